"""The store and the whole pipeline on an S3 service with conditional writes."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist.errors import (
    BadInputError,
    ConflictError,
    IncompleteError,
    IntegrityError,
    OchError,
    UsageError,
)
from och_dist.stage import Context, Report
from och_dist.store.arrays import (
    ArraySpec,
    create_array,
    find_chunk,
    open_array,
    read_rows,
    stored_chunks,
    write_chunk,
)
from och_dist.store.objects import BucketObjects, open_objects


def test_keys_that_leave_the_store(s3: str) -> None:
    for key in ("..", "a/../b", "/a", "a//b", ""):
        with pytest.raises(BadInputError, match="leaves its store"):
            open_objects(s3).read(key)


class Asked:
    """An object store behind another: each request passes ``look`` first."""

    def __init__(self, store: Any, look: Callable[[str], None]) -> None:
        self.store, self.look = store, look

    def __getattr__(self, name: str) -> Any:
        self.look(name)
        return getattr(self.store, name)


def test_many_objects_go_with_few_requests(s3: str) -> None:
    """The records of a billion rows are 15,000 objects: one request for each would take minutes."""
    objects, requests = BucketObjects(s3), []
    for number in range(30):
        objects.put(f"done/{number}", b"")
    objects.put("other", b"")
    objects._store = Asked(objects._store, requests.append)
    assert objects.delete_below("done") == 30
    objects.delete_all([])
    objects.delete_all(["other", "never there"])
    assert requests.count("delete") <= 3
    assert list(objects.list("")) == []


def test_tag_changes_with_the_content(s3: str) -> None:
    objects = open_objects(s3)
    objects.put("key", b"1")
    before = list(objects.list(""))
    objects.delete("key")
    objects.put("key", b"2")
    assert [tag for _, _, tag in objects.list("")] != [tag for _, _, tag in before]


def test_lost_answer_of_the_service(lossy_s3: str) -> None:
    objects = open_objects(lossy_s3)
    assert objects.put("key", b"mine") is False
    assert objects.get("key") == b"mine"
    with pytest.raises(ConflictError):
        objects.put("key", b"other")


class GivesUp(BucketObjects):
    """Stores, and then hears nothing any more."""

    def _create(self, key: str, data: bytes) -> bool:
        super()._create(key, data)
        raise IncompleteError("the object store failed")


def test_lost_answer_after_the_last_retry(s3: str) -> None:
    objects = GivesUp(s3)
    assert objects.put("key", b"mine") is False
    with pytest.raises(ConflictError):
        objects.put("key", b"other")
    assert objects.get("key") == b"mine"


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        ("GenericError", IncompleteError, r"failed \(no answer\); .* run the command again"),
        ("PermissionDeniedError", UsageError, "AWS_ACCESS_KEY_ID"),
    ],
)
def test_what_the_service_refuses(s3: str, failure: str, error: type[OchError], message: str) -> None:
    exceptions = pytest.importorskip("obstore.exceptions")

    def refuse(name: str) -> None:
        raise getattr(exceptions, failure)("no answer\n\nDebug source: much")

    objects = BucketObjects(s3)
    objects._store = Asked(objects._store, refuse)
    for action in (lambda: objects.put("key", b"1"), lambda: objects.read("key")):
        with pytest.raises(error, match=message):
            action()


def test_a_service_without_put_if_absent_is_refused(careless_s3: str, s3: str) -> None:
    with pytest.raises(UsageError, match="no working put-if-absent"):
        open_objects(careless_s3).require_put_if_absent()
    assert list(open_objects(careless_s3).list("")) == []
    open_objects(s3).require_put_if_absent()


def test_a_lost_answer_does_not_discredit_a_service(lossy_s3: str) -> None:
    open_objects(lossy_s3).require_put_if_absent()
    assert list(open_objects(lossy_s3).list("")) == []


def test_ingest_refuses_a_service_without_put_if_absent(careless_s3: str) -> None:
    from och_dist.ingest.stage import generate

    with pytest.raises(UsageError, match="no working put-if-absent"):
        generate(f"{careless_s3}/corpus", rows=10, dim=4)


@pytest.mark.parametrize("action", [lambda o: o.put("a", b"1"), lambda o: list(o.list("a")), lambda o: o.folders("a")])
def test_missing_bucket(s3_server: str, action: Any) -> None:
    with pytest.raises(UsageError, match="bucket"):
        action(open_objects("s3://no-such-bucket/prefix"))


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix"])
def test_address_without_a_bucket(s3_server: str, url: str) -> None:
    with pytest.raises(UsageError, match="no such bucket"):
        open_objects(url).read("a")


def test_arrays(s3: str) -> None:
    objects = open_objects(s3)
    values = np.arange(50, dtype="<f4").reshape(10, 5)
    create_array(objects, "a", ArraySpec(10, 5, "<f4", 4))
    written = [write_chunk(objects, "a", chunk, values[chunk * 4 : chunk * 4 + 4]) for chunk in range(3)]
    assert np.array_equal(read_rows(open_array(objects, "a"), 0, 10), values)
    assert [find_chunk(objects, "a", chunk, stated=written[chunk].crc).fault for chunk in range(3)] == [None] * 3
    assert stored_chunks(objects, "a") == {0: 84, 1: 84, 2: 84}
    with pytest.raises(ConflictError):
        write_chunk(objects, "a", 0, values[:4] + 1)
    objects.delete("a/c/1/0")
    with pytest.raises(IntegrityError, match=r"a/c/1/0 is missing"):
        read_rows(open_array(objects, "a"), 0, 10)


def test_adopted_array(s3: str) -> None:
    from och_dist.store.corpus import open_corpus

    objects = open_objects(s3)
    values = np.arange(50, dtype="<f4").reshape(10, 5)
    create_array(objects, "a", ArraySpec(10, 5, "<f4", 4))
    for chunk in range(3):
        write_chunk(objects, "a", chunk, values[chunk * 4 : chunk * 4 + 4])
    corpus = open_corpus(f"{s3}/a")
    assert (corpus.version, corpus.rows, corpus.dim) == (0, 10, 5)
    assert np.array_equal(corpus.read(3, 9), values[3:9])
    assert open_corpus(f"{s3}/a").fingerprint == corpus.fingerprint


def run(root: str, output: Path) -> list[Report]:
    from och_dist.encode import stage as encode
    from och_dist.ingest import stage as ingest
    from och_dist.search import stage as search
    from och_dist.train import stage as train
    from och_dist.upkeep import verification as verify

    context = Context(client=None)
    corpus, queries, index = f"{root}/corpus", f"{root}/queries", f"{root}/index"
    reports = [
        ingest.generate(corpus, rows=3000, dim=16, chunk_rows=700, context=context),
        ingest.generate(queries, rows=25, dim=16, first_row=3000, context=context),
        train.train(
            corpus, f"{root}/models", bits=20, train_rows=500, kmeans_rounds=2,
            params={"n_centres": 20, "max_iter": 20}, context=context,
        ),
    ]  # fmt: skip
    reports.append(encode.encode(corpus, index, model=reports[-1].facts["model"], chunk_rows=1024, context=context))
    reports.append(search.search(index, queries, k=10, output=str(output), context=context))
    verify.verify(corpus, context=context)
    assert verify.verify(index, context=context).facts["chunks"] == 3
    return reports


def test_pipeline(s3: str, tmp_path: Path) -> None:
    there = run(s3, tmp_path / "there.zarr")
    here = run(str(tmp_path / "here"), tmp_path / "here.zarr")
    assert [report.status for report in there] == ["done"] * 5
    assert there[3].facts["model"] == here[3].facts["model"]
    for name in ("distances/c/0/0", "rows/c/0/0"):
        assert filecmp.cmp(tmp_path / "there.zarr" / name, tmp_path / "here.zarr" / name, shallow=False)
    objects = open_objects(s3)
    before = list(objects.list(""))
    again = run(s3, tmp_path / "there.zarr")
    assert [report.status for report in again] == ["nothing to do"] * 5
    assert list(objects.list("")) == before
    same = {key: objects.get(key) for key, _, _ in before if key.startswith("index/")}
    local = open_objects(tmp_path / "here")
    folders = ("index/segments", "index/models")
    for key in (key for key in same if key.startswith(folders) and not key.endswith("provenance.json")):
        assert local.get(key) == same[key], key


def test_verify_finds_damage_in_a_bucket(s3: str) -> None:
    from och_dist.ingest import stage as ingest
    from och_dist.upkeep import verification as verify

    ingest.generate(f"{s3}/corpus", rows=100, dim=4, chunk_rows=30)
    objects = open_objects(f"{s3}/corpus")
    key = next(key for key, _, _ in objects.list("segments") if key.endswith("/c/2/0"))
    data = bytearray(objects.get(key))
    data[7] ^= 16
    objects.delete(key)
    objects.put(key, bytes(data))
    with pytest.raises(IntegrityError, match=r"1 faults .*chunk 2"):
        verify.verify(f"{s3}/corpus")
