"""Compacting: the same codes under the same row numbers in fewer, fuller chunks, without the deleted ones."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist import store
from och_dist.encode.stage import encode, publish
from och_dist.errors import BadInputError, ConflictError, IntegrityError, UsageError
from och_dist.evaluate.exact import truth
from och_dist.evaluate.stage import evaluate
from och_dist.search.stage import open_index
from och_dist.stage import Context
from och_dist.store.corpus import open_corpus
from och_dist.store.index import Tombstones, open_version
from och_dist.store.manifest import seal, version_key
from och_dist.store.model import split_model_path
from och_dist.store.objects import open_objects
from och_dist.upkeep import compaction as stage
from och_dist.upkeep.compaction import chunk_starts, compact
from och_dist.upkeep.deletion import delete
from och_dist.upkeep.housekeeping import gc, inspect, status
from och_dist.upkeep.verification import verify
from tests.support.crashes import Crash, crash_at, tree
from tests.support.index_help import corpus_beside, grow, live_codes, small_ranges, without
from tests.support.races import after_tasks, together
from tests.support.stage_data import all_codes, corpus_of


@pytest.fixture(scope="module")
def made(vectors: np.ndarray, model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 250 rows and its index of three segments, in chunks of 40."""
    folder = tmp_path_factory.mktemp("compacting")
    grow(folder, vectors[:250], [90, 150], model, chunk_rows=40)
    return folder


def segment_sizes(index: str) -> list[list[int]]:
    """Codes in each chunk of each segment."""
    return [
        [int(np.subtract(*s.job.spec.bounds(chunk)[::-1])) for chunk in range(s.job.spec.n_chunks)]
        for s in open_version(index).segments
    ]


@settings(deadline=None, max_examples=15)
@given(
    first=st.sets(st.integers(0, 249), max_size=250),
    chunk_rows=st.integers(15, 260),
    second=st.sets(st.integers(0, 249), max_size=100),
    again=st.integers(15, 260),
)
def test_the_codes_that_are_left(first: set[int], chunk_rows: int, second: set[int], again: int, made: Path) -> None:
    """Delete, compact, delete, compact, against the codes as they were encoded; with bitmaps of 64 rows."""
    codes = all_codes(str(made / "index"))
    with small_ranges(), tempfile.TemporaryDirectory() as folder:
        index = str(shutil.copytree(made / "index", Path(folder) / "index"))
        gone: set[int] = set()
        for rows, size in ((first, chunk_rows), (second, again)):
            delete(index, rows=sorted(rows))
            gone |= rows
            compact(index, chunk_rows=size)
            opened, left = open_version(index), 250 - len(gone)
            assert live_codes(opened) == without(codes, gone)
            (sizes,) = segment_sizes(index)
            full, rest = divmod(left, size)
            assert sizes == [size] * full + [rest] * bool(rest)
            assert (opened.rows, opened.stored_rows, opened.nbytes) == (250, left, 3 * left)
            edges = [chunk.start for chunk in opened.chunks] + [250] * bool(opened.chunks)
            assert [chunk.stop for chunk in opened.chunks] == edges[1:]
            before = tree(index)
            assert compact(index, chunk_rows=size).status == "nothing to do"
            assert tree(index) == before
            verify(index)


@settings(deadline=None, max_examples=50)
@given(gone=st.sets(st.integers(0, 199)), rows=st.integers(1, 200), chunk_rows=st.integers(1, 70))
def test_where_the_chunks_begin(gone: set[int], rows: int, chunk_rows: int, made: Path) -> None:
    """Row 0, and every so-manieth row that is left; the bitmaps are never all in memory."""
    live = [row for row in range(rows) if row not in gone]

    class Rows:
        live_rows = len(live)
        deleted_in = staticmethod(lambda number: sum(row // 64 == number for row in gone if row < rows))

        @staticmethod
        def deleted(start: int, stop: int) -> np.ndarray | None:
            assert stop - start <= 64
            found = np.array([row in gone for row in range(start, stop)])
            return found if found.any() else None

    Rows.rows = rows  # type: ignore[attr-defined]
    with small_ranges():
        found = chunk_starts(Rows, chunk_rows)  # type: ignore[arg-type]
    assert found.tolist() == [0, *live[chunk_rows::chunk_rows]][: -(-len(live) // chunk_rows)]


def test_the_report(index: str) -> None:
    delete(index, rows="0-49")
    facts = compact(index).facts
    assert {name: facts[name] for name in ("version", "rows", "live_rows", "segments_before", "segments")} == {
        "version": 5,
        "rows": 250,
        "live_rows": 200,
        "segments_before": 3,
        "segments": 1,
    }
    assert (facts["dropped"], facts["bytes_before"], facts["bytes"]) == (50, 750, 600)
    with pytest.raises(UsageError, match="chunk_rows=0; use at least 1"):
        compact(index, chunk_rows=0)
    with pytest.raises(BadInputError, match="holds no published index"):
        compact(str(Path(index).parent / "none"))


def test_without_deleted_rows_there_are_no_row_numbers(index: str, vectors: np.ndarray, tmp_path: Path) -> None:
    codes = all_codes(index)
    truth(corpus_beside(index), vectors[:4], str(tmp_path / "truth.zarr"), k=5)
    before = evaluate(index, vectors[:4], str(tmp_path / "truth.zarr")).facts
    compact(index, chunk_rows=100)
    opened = open_version(index)
    assert [opened.row_numbers(chunk) for chunk in opened.chunks] == [None] * 3
    assert not Path(index, opened.segments[0].job.folder, "rows").exists()
    np.testing.assert_array_equal(all_codes(index), codes)
    after = evaluate(index, vectors[:4], str(tmp_path / "truth.zarr")).facts
    assert after == {**before, "version": 4}


def test_a_search_gives_the_same(index: str, vectors: np.ndarray) -> None:
    delete(index, rows="0-9,88-120,249")
    before = open_index(index).search(vectors[:5], k=300)
    compact(index, chunk_rows=30)
    after = open_index(index).search(vectors[:5], k=300)
    np.testing.assert_array_equal(after.rows, before.rows)
    np.testing.assert_array_equal(after.distances, before.distances)
    assert after.rows.shape == (5, 250 - 44)


def test_life_goes_on(index: str, vectors: np.ndarray, models: tuple[str, str]) -> None:
    """Append, delete, compact again, another model: all after a compaction."""
    corpus = corpus_beside(index)
    delete(index, rows="3,149-151")
    compact(index, chunk_rows=64)
    assert encode(corpus, index, model=models[0]).status == "nothing to do"
    corpus_of(Path(corpus).parent, vectors[250:300])
    assert encode(corpus, index, model=models[0], chunk_rows=40).facts["new_rows"] == 50
    delete(index, rows="260,4")
    gone = {3, 4, 149, 150, 151, 260}
    elsewhere = str(Path(index).parent / "elsewhere")
    encode(corpus, elsewhere, model=models[0])
    codes = all_codes(elsewhere)
    assert live_codes(index) == without(codes, gone)
    compact(index, chunk_rows=64)
    assert segment_sizes(index) == [[64] * 4 + [38]]
    assert live_codes(index) == without(codes, gone)
    sources = [(start, stop) for start, stop, _ in open_version(index).segments[0].sources]
    assert sources == [(0, 90), (90, 150), (150, 250), (250, 300)]
    encode(corpus, index, model=models[1])
    assert (open_version(index).model, open_version(index).live_rows) == (split_model_path(models[1])[1], 294)
    assert live_codes(index) == without(all_codes(index), gone)
    encode(corpus, index, model=models[0])
    assert live_codes(index) == without(codes, gone)
    verify(index)
    gc(index, keep=1)
    verify(index)
    assert live_codes(index) == without(codes, gone)


def test_other_vectors_are_still_refused(index: str, vectors: np.ndarray, model: str, tmp_path: Path) -> None:
    compact(index)
    other = vectors[:250].copy()
    other[120] += 1
    for part in np.split(other, [90, 150]):
        corpus = corpus_of(tmp_path / "other", part)
    with pytest.raises(ConflictError, match=r"rows 90\.\.150 of .* were made from other vectors"):
        encode(corpus, index, model=model)


def test_everything_deleted(index: str, vectors: np.ndarray, model: str) -> None:
    delete(index, rows="0-249")
    facts = compact(index).facts
    assert (facts["live_rows"], facts["bytes"], facts["dropped"]) == (0, 0, 250)
    assert open_version(index).chunks == ()
    assert compact(index).status == "nothing to do"
    assert open_index(index).search(vectors[:2], k=3).rows.shape == (2, 0)
    verify(index)
    gc(index, keep=1)
    verify(index)
    assert (inspect(index).facts["live_rows"], status(index).facts["live_rows"]) == (0, 0)
    corpus = corpus_of(Path(index).parent, vectors[250:300])
    encode(corpus, index, model=model)
    assert sorted(live_codes(index)) == list(range(250, 300))
    compact(index, chunk_rows=20)
    assert sorted(live_codes(index)) == list(range(250, 300))
    assert segment_sizes(index) == [[20, 20, 10]]
    verify(index)


def test_all_rows_of_one_segment_deleted(index: str) -> None:
    codes = all_codes(index)
    delete(index, rows="90-149")
    compact(index, chunk_rows=64)
    assert live_codes(index) == without(codes, set(range(90, 150)))


def test_older_versions_stay_until_they_are_collected(index: str) -> None:
    codes = all_codes(index)
    delete(index, rows="7")
    pinned = open_version(index)
    compact(index)
    assert live_codes(pinned) == live_codes(index) == without(codes, {7})
    assert live_codes(index, 3) == without(codes, set())
    states = {job["kind"]: job["state"] for job in status(index).facts["jobs"]}
    assert states == {"encode": "superseded", "compact": "published"}
    gc(index, keep=1)
    assert len(list(Path(index, "segments").iterdir())) == 1
    assert live_codes(index) == without(codes, {7})
    with pytest.raises(IntegrityError, match="was collected while it was being read"):
        live_codes(pinned)


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("rows", ["", "2,70-140"], ids=["whole", "dropped"])
def test_a_crash_at_any_operation_ends_clean(rows: str, stored: bool, made: Path, tmp_path: Path) -> None:
    begun = shutil.copytree(made / "index", tmp_path / "begun")
    delete(str(begun), rows=rows or [])
    left = live_codes(str(begun))
    reference = shutil.copytree(begun, tmp_path / "reference")
    with crash_at() as operations:
        compact(str(reference), chunk_rows=60)
    assert operations.count > 15
    for at in range(1, operations.count + 1):
        index = str(shutil.copytree(begun, tmp_path / str(at)))
        with crash_at(at, stored=stored), pytest.raises(Crash):
            compact(index, chunk_rows=60)
        assert live_codes(index) == left
        verify(index)
        compact(index, chunk_rows=60)
        gc(index, keep=9)  # records or claim of the killed one
        assert tree(index) == tree(reference), f"crash at operation {at} of {operations.count}"


def test_a_killed_compaction_that_nothing_can_go_on_with(index: str) -> None:
    """Rows were deleted since, so the next compaction is another job; gc takes the first one with its version."""
    with crash_at(8), pytest.raises(Crash):
        compact(index, chunk_rows=60)
    [killed] = [job for job in status(index).facts["jobs"] if job["kind"] == "compact"]
    assert killed["state"] == "unfinished"
    gc(index)
    assert killed in status(index).facts["jobs"], "it can still be resumed"
    delete(index, rows="5")
    gc(index, keep=2)
    assert killed in status(index).facts["jobs"], "the version that it merges is still there"
    assert gc(index, keep=1).facts["segments_removed"] == [f"segments/{killed['job']}.0"]
    assert compact(index, chunk_rows=60).facts["job"] != killed["job"]
    verify(index)


def test_a_resumed_compaction_writes_only_what_is_missing(index: str) -> None:
    def die() -> None:
        raise Crash

    delete(index, rows="5")
    with pytest.raises(Crash):
        compact(index, chunk_rows=50, context=after_tasks(2, die))
    (unfinished,) = [job for job in status(index).facts["jobs"] if job["kind"] == "compact"]
    assert (unfinished["state"], unfinished["done"], unfinished["chunks"]) == ("unfinished", 2, 5)
    with pytest.raises(UsageError, match="is a compaction; run 'och compact"):
        publish(index, unfinished["job"], corpus=corpus_beside(index))
    advances: list[int] = []
    compact(index, chunk_rows=50, context=Context(progress=lambda description, total: advances.append))
    assert len(advances) == 1 + 3
    assert sum(advances) == 250


@pytest.mark.parametrize("meanwhile", ["append", "delete", "both"])
def test_what_came_meanwhile_is_kept(meanwhile: str, index: str, vectors: np.ndarray, model: str) -> None:
    delete(index, rows="5")
    gone = {5} if meanwhile == "append" else {5, 6, 7, 8, 9, 100}

    def others() -> None:
        if meanwhile != "delete":
            corpus = corpus_of(Path(index).parent, vectors[250:300])
            encode(corpus, index, model=model, chunk_rows=40)
        if meanwhile != "append":
            delete(index, rows="6-9,100")

    compact(index, chunk_rows=50, context=after_tasks(2, others))
    opened, rows = open_version(index), 250 if meanwhile == "delete" else 300
    assert (opened.rows, len(opened.segments)) == (rows, 1 + (rows == 300))
    elsewhere = str(Path(index).parent / "elsewhere")
    encode(corpus_beside(index), elsewhere, model=model)
    assert live_codes(index) == without(all_codes(elsewhere), gone)
    assert compact(index, chunk_rows=50).status == "done"
    assert live_codes(index) == without(all_codes(elsewhere), gone)
    verify(index)


def test_another_model_came_meanwhile(index: str, models: tuple[str, str]) -> None:
    retrain = after_tasks(2, lambda: encode(corpus_beside(index), index, model=models[1]))
    with pytest.raises(ConflictError, match=r"was encoded anew .*nothing was published"):
        compact(index, chunk_rows=50, context=retrain)
    assert open_version(index).model == split_model_path(models[1])[1]
    verify(index)


@pytest.mark.parametrize("attempt", range(3))
def test_two_compactions_of_one_version(attempt: int, index: str) -> None:
    delete(index, rows="3-9")
    left = live_codes(index)
    outcomes = together(*[lambda: compact(index, chunk_rows=20)] * 2)
    assert [outcome.facts["version"] for outcome in outcomes] == [5, 5], outcomes
    assert live_codes(index) == left
    verify(index)


@pytest.mark.parametrize("attempt", range(2))
def test_a_compaction_beside_deletes(attempt: int, index: str) -> None:
    codes = all_codes(index)
    outcomes = together(lambda: compact(index, chunk_rows=20), *[lambda n=n: delete(index, rows=[n]) for n in range(3)])
    assert not [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert live_codes(index) == without(codes, {0, 1, 2})
    verify(index)


def test_a_late_publisher_of_a_merged_job_finds_it_done(index: str, model: str, vectors: np.ndarray) -> None:
    corpus = corpus_of(Path(index).parent, vectors[250:300])
    (job,) = encode(corpus, index, model=model, publish=False).facts["jobs"]
    publish(index, job, corpus=corpus)
    compact(index)
    assert publish(index, job, corpus=corpus).status == "nothing to do"


def flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def other_crc(data: bytes) -> bytes:
    record = json.loads(data)
    return json.dumps({**record, "rows_crc": record["rows_crc"] ^ 1}).encode()


@pytest.mark.parametrize(
    ("key", "damage"),
    [
        ("rows/c/1/0", flip),
        ("rows/c/1/0", lambda data: data[:-9]),
        ("rows/c/1/0", None),
        ("codes/c/1/0", flip),
        ("done/00000001.json", other_crc),
        ("done/00000001.json", lambda data: data.replace(b"rows_crc", b"crc_rows")),
    ],
)
def test_damage_is_found_before_it_is_published(key: str, damage: Any, index: str) -> None:
    delete(index, rows="55-60")

    def spoil() -> None:
        (job,) = [job for job in status(index).facts["jobs"] if job["kind"] == "compact"]
        path = Path(index, "segments", f"{job['job']}.0", key)
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(
        IntegrityError, match=r"chunk 1 of job .*nothing was published.*och gc .* --job .*compact"
    ) as error:
        compact(index, chunk_rows=50, context=after_tasks(5, spoil))
    assert open_version(index).version == 4
    gc(index, jobs=[str(error.value).partition("--job ")[2].partition("'")[0]])
    compact(index, chunk_rows=50)
    verify(index)


@pytest.mark.parametrize("place", [0, -1])
def test_row_numbers_of_another_place_are_not_published(
    place: int, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and as recorded, but not what the chunk stands for."""
    delete(index, rows="55-60")
    gather = stage.live_codes

    def shifted(*args: Any) -> tuple[np.ndarray, np.ndarray]:
        codes, rows = gather(*args)
        rows[place] += 1000 if place else -1
        return codes, rows

    monkeypatch.setattr(stage, "live_codes", shifted)
    with pytest.raises(IntegrityError, match=r"do not ascend from .*nothing was published"):
        compact(index, chunk_rows=50)


@pytest.mark.parametrize("array", ["rows", "codes"])
@pytest.mark.parametrize("damage", [flip, lambda data: data[:-9], None], ids=["flipped", "cut", "missing"])
def test_verify_finds_damage(array: str, damage: Any, index: str) -> None:
    delete(index, rows="55-60")
    compact(index, chunk_rows=50)
    path = Path(index, open_version(index).segments[0].job.folder, array, "c/1/0")
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(IntegrityError, match=rf"1 faults in .*chunk 1 of .*/{array} is"):
        verify(index)
    with pytest.raises(IntegrityError):
        live_codes(index)


def lie(index: str, change: Any) -> None:
    """Change the newest manifest and seal it again."""
    path = Path(index, version_key(open_version(index).version))
    body = json.loads(path.read_bytes())
    del body["sha256"]
    change(body)
    path.write_bytes(seal(body))


LIES = {
    "sources that do not adjoin": lambda body: body["segments"][0]["sources"].pop(1),
    "no sources": lambda body: body["segments"][0].update(sources=[]),
    "too few starts": lambda body: body["segments"][0].update(starts=""),
    "starts at one place": lambda body: body["segments"][0].update(
        starts="A" * (len(body["segments"][0]["starts"]) - 1) + "="
    ),
    "more kept than rows": lambda body: body["segments"][0].update(kept=251),
    "fewer codes than live rows": lambda body: body.update(tombstones=[]),
    "tombstones twice": lambda body: body.update(tombstones=body["tombstones"] * 2),
    "tombstones elsewhere": lambda body: body["tombstones"][0].update(range=5),
    "too many tombstones": lambda body: body["tombstones"][0].update(deleted=251),
    "no digest": lambda body: body["tombstones"][0].update(digest="../../x"),
    "half a tombstone": lambda body: body["tombstones"][0].pop("deleted"),
}


@pytest.mark.parametrize("change", LIES.values(), ids=LIES.keys())
def test_manifests_that_lie(change: Any, index: str) -> None:
    delete(index, rows="55-60")
    compact(index, chunk_rows=50)
    lie(index, change)
    with pytest.raises(IntegrityError):
        open_version(index)


def test_tombstones_know_their_place() -> None:
    assert Tombstones(3, "ab" * 32, 1).start == 3 << 20


def test_in_a_bucket(s3: str, index: str, model: str) -> None:
    """The same bitmaps, codes and row numbers as in a directory, and gc leaves what is needed."""
    there = f"{s3}/index"
    delete(index, rows="7,100-120")
    compact(index, chunk_rows=60)
    for number in (1, 2, 3):
        encode_version(corpus_beside(index), number, there, model)
    delete(there, rows="7,100-120")
    assert delete(there, rows="7").status == "nothing to do"
    compact(there, chunk_rows=60)
    gc(there, keep=1)
    verify(there)
    assert live_codes(there) == live_codes(index)
    objects, local = open_objects(there), tree(index)
    keys = [key for key, _, _ in objects.list("tombstones")] + [key for key, _, _ in objects.list("segments")]
    assert len(keys) > 10
    assert all(objects.get(key) == local[key] for key in keys)


def encode_version(corpus: str, number: int, index: str, model: str) -> None:
    """Encode an older version of a corpus, as if it had not grown yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "open_corpus", lambda url, version=None: open_corpus(url, number))
        encode(corpus, index, model=model, chunk_rows=40)
