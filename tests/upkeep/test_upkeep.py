"""Upkeep: what is there is described as it is, and what goes is never what somebody needs."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from och_dist.encode.stage import encode
from och_dist.errors import BadInputError, IntegrityError, UsageError
from och_dist.ingest.stage import ingest
from och_dist.search.stage import open_index
from och_dist.store.corpus import open_corpus
from och_dist.store.index import model_objects, open_version
from och_dist.store.manifest import version_key
from och_dist.store.model import load_model, split_model_path
from och_dist.upkeep.housekeeping import gc, inspect, status
from och_dist.upkeep.verification import verify
from tests.support.command import och
from tests.support.crashes import Crash, crash_at, tree
from tests.support.index_help import grow
from tests.support.races import before_operation
from tests.support.stage_data import BITS, all_codes, corpus_of


@pytest.fixture(scope="module")
def made(vectors: np.ndarray, models: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """corpus of 2 versions; index: 1 and 2 of the first model, 3 of the second, and an unpublished job of 50 rows."""
    folder = tmp_path_factory.mktemp("made")
    corpus = grow(folder, vectors[:300], [180], models[0], chunk_rows=80)
    encode(corpus, str(folder / "index"), model=models[1], chunk_rows=80)
    corpus_of(folder, vectors[300:350])
    encode(corpus, str(folder / "index"), model=models[1], chunk_rows=20, publish=False)
    return folder


def jobs_of(index: str, version: int) -> list[str]:
    return [segment.job.id for segment in open_version(index, version).segments]


def models_in(index: str) -> set[str]:
    return {path.name for path in Path(index, "models").iterdir()} - {".tmp"}


def test_a_corpus_is_described(made: Path) -> None:
    facts = inspect(str(made / "corpus")).facts
    assert (facts["kind"], facts["version"], facts["rows"], facts["dim"], facts["dtype"]) == (
        "corpus",
        3,
        350,
        16,
        "<f4",
    )
    assert facts["fingerprint"] == open_corpus(str(made / "corpus")).fingerprint
    assert [(s["start"], s["stop"]) for s in facts["segments"]] == [(0, 180), (180, 300), (300, 350)]
    assert facts["segments"][0]["sources"][0]["format"] == "npy"


def test_an_adopted_array_is_described(vectors: np.ndarray, tmp_path: Path) -> None:
    zarr.create_array(store=tmp_path / "array", data=vectors, chunks=(300, 16))
    facts = inspect(str(tmp_path / "array")).facts
    assert (facts["kind"], facts["rows"], facts["version"]) == ("zarr array", 1000, 0)


def test_an_index_is_described(made: Path, models: tuple[str, str]) -> None:
    facts = inspect(str(made / "index")).facts
    assert (facts["kind"], facts["version"], facts["rows"], facts["bits"]) == ("index", 3, 300, BITS)
    assert (facts["method"], facts["model"], facts["bytes"]) == ("och", split_model_path(models[1])[1], 300 * 3)
    assert facts["corpus"]["version"] == 2
    assert [(s["start"], s["stop"]) for s in facts["segments"]] == [(0, 300)]


def test_a_model_is_described(model: str) -> None:
    facts = inspect(model).facts
    assert (facts["kind"], facts["method"], facts["dim"]) == ("model", "och", 16)
    assert facts["params"]["n_bits"] == BITS
    assert facts["provenance"]["seed"] == 0


def test_nothing_is_described_as_such(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="holds no corpus"):
        inspect(str(tmp_path))
    with pytest.raises(BadInputError, match="holds no index and no job"):
        status(str(tmp_path))
    with pytest.raises(BadInputError, match="nothing to collect"):
        gc(str(tmp_path))


def test_status_knows_every_job(made: Path) -> None:
    facts = status(str(made / "index")).facts
    assert (facts["version"], facts["versions"], facts["rows"]) == (3, [1, 2, 3], 300)
    states = sorted((job["state"], *job["rows"], job["done"], job["chunks"]) for job in facts["jobs"])
    assert states == [
        ("finished", 300, 350, 3, 3),
        ("published", 0, 300, 4, 4),
        ("superseded", 0, 180, 3, 3),
        ("superseded", 180, 300, 2, 2),
    ]


def test_status_of_an_unfinished_job(corpus: str, model: str, tmp_path: Path) -> None:
    with crash_at() as operations:
        encode(corpus, str(tmp_path / "whole"), model=model, chunk_rows=100, publish=False)
    with crash_at(operations.count - 7), pytest.raises(Crash):
        encode(corpus, str(tmp_path / "half"), model=model, chunk_rows=100, publish=False)
    facts = status(str(tmp_path / "half")).facts
    assert (facts["version"], facts["versions"], facts["rows"]) == (None, [], 0)
    (job,) = facts["jobs"]
    assert (job["state"], job["done"], job["chunks"], job["rows"]) == ("unfinished", 6, 10, [0, 1000])
    with pytest.raises(BadInputError, match="half has no published version yet; 'och status' lists its jobs"):
        inspect(str(tmp_path / "half"))


@pytest.mark.parametrize("keep", [1, 2, 3, 10])
def test_the_last_versions_stay(keep: int, index: str) -> None:
    expected = {number: all_codes(index, number) for number in (1, 2, 3)}
    used = {number: set(jobs_of(index, number)) for number in (1, 2, 3)}
    report = gc(index, keep=keep)
    kept = [1, 2, 3][-keep:]
    assert (report.facts["versions_kept"], report.facts["versions_removed"]) == (kept, [1, 2, 3][:-keep])
    gone = set.union(*used.values()) - set.union(*(used[number] for number in kept))
    assert report.facts["segments_removed"] == sorted(f"segments/{job}.0" for job in gone)
    for number in kept:
        np.testing.assert_array_equal(all_codes(index, number), expected[number])
    verify(index)
    assert report.status == ("nothing to do" if keep > 2 else "done")
    assert gc(index, keep=keep).status == "nothing to do"


def test_models_that_nobody_uses_go(index: str, models: tuple[str, str]) -> None:
    first, second = (split_model_path(model)[1] for model in models)
    gc(index, keep=2)
    assert models_in(index) == {first, second}
    gc(index, keep=1)
    assert models_in(index) == {second}
    open_index(index)


def test_the_model_of_an_unpublished_job_stays(index: str, models: tuple[str, str]) -> None:
    corpus = str(Path(index).parent / "corpus")
    encode(corpus, index, model=models[0], chunk_rows=33, publish=False)
    gc(index, keep=1)
    assert len(models_in(index)) == 2
    encode(corpus, index, model=models[0])
    verify(index)


def test_a_store_of_trainings_keeps_its_models(corpus: str, models: tuple[str, str], tmp_path: Path) -> None:
    shutil.copytree(split_model_path(models[0])[0], tmp_path / "models")
    encode(corpus, str(tmp_path), model=f"{tmp_path}/models/{split_model_path(models[0])[1]}")
    gc(str(tmp_path))
    assert models_in(str(tmp_path)) == {*(split_model_path(model)[1] for model in models), "trained"}


def test_a_job_that_begins_while_its_model_goes(index: str, models: tuple[str, str]) -> None:
    """gc has read the jobs and is about to delete an unused model when somebody starts to encode with it."""
    corpus, first = str(Path(index).parent / "corpus"), split_model_path(models[0])[1]

    def begin() -> None:
        encode(corpus, index, model=models[0], publish=False)

    with before_operation("delete", lambda key: key == f"{first}/model.json", begin) as waiting:
        gc(index, keep=1)
    assert not waiting
    load_model(model_objects(index), first)
    encode(corpus, index, model=models[0])
    open_index(index)
    verify(index)


def test_a_delete_that_fails_is_incomplete_work(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the disk while old versions are removed: exit code 5, and the same command ends it."""
    remove = os.unlink

    def fail(path: Path, **options: Any) -> None:
        if Path(path).parent.name == "versions":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        remove(path, **options)

    monkeypatch.setattr(os, "unlink", fail)
    told = och("gc", index, "--keep", "1", code=5).stderr
    assert "Input/output error" in told
    assert "run the same command again" in told
    monkeypatch.undo()
    och("gc", index, "--keep", "1")
    verify(index)


def test_an_unpublished_job_goes_only_by_name(index: str) -> None:
    (job,) = [job["job"] for job in status(index).facts["jobs"] if job["state"] == "finished"]
    gc(index, keep=1)
    assert Path(index, "segments", f"{job}.0").exists()
    report = gc(index, keep=1, jobs=[job])
    assert report.facts["segments_removed"] == [f"segments/{job}.0"]
    assert not Path(index, "segments", f"{job}.0").exists()
    verify(index)


@pytest.mark.parametrize("version", [1, 3])
def test_a_published_job_does_not_go_by_name(version: int, index: str) -> None:
    before = tree(index)
    for job in jobs_of(index, version):
        with pytest.raises(UsageError, match=f"segments/{job}.0 is published in a version that is kept, and stays"):
            gc(index, jobs=[job])
    assert tree(index) == before
    with pytest.raises(UsageError, match="has no job 'abc'; jobs there"):
        gc(index, jobs=["abc"])
    with pytest.raises(UsageError, match="keep=0"):
        gc(index, keep=0)
    assert tree(index) == before


def test_a_reader_of_a_collected_version_is_told(index: str, vectors: np.ndarray) -> None:
    reader = open_index(index, version=1)
    gc(index, keep=1)
    with pytest.raises(IntegrityError, match=r"version 1 of .*(was|may have been) collected"):
        reader.search(vectors[:2], k=3)
    with pytest.raises(IntegrityError, match=r"version 1 of .* is not there .*present: 3"):
        open_index(index, version=1)


def test_a_reader_of_a_version_that_stays_reads_on(index: str, vectors: np.ndarray) -> None:
    reader = open_index(index)
    gc(index, keep=1)
    assert reader.search(vectors[:2], k=1).distances.tolist() == [[0], [0]]


def test_a_dry_run_changes_nothing(index: str) -> None:
    before = tree(index)
    (job,) = [job["job"] for job in status(index).facts["jobs"] if job["state"] == "finished"]
    planned = gc(index, keep=1, jobs=[job], dry_run=True)
    assert tree(index) == before
    done = gc(index, keep=1, jobs=[job])
    for name in ("versions_removed", "versions_kept", "segments_removed"):
        assert planned.facts[name] == done.facts[name] != []
    assert (planned.facts["dry_run"], planned.facts["objects_removed"]) == (True, 0)


@pytest.mark.parametrize("stored", [False, True])
def test_a_crash_at_any_operation_ends_clean(stored: bool, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "index", tmp_path / "reference")
    (job,) = [job["job"] for job in status(str(made / "index")).facts["jobs"] if job["state"] == "finished"]
    kept = all_codes(str(made / "index"))
    with crash_at() as operations:
        gc(str(tmp_path / "reference"), keep=1, jobs=[job])
    assert operations.count > 25
    for at in range(1, operations.count + 1):
        index = str(tmp_path / str(at))
        shutil.copytree(made / "index", index)
        with crash_at(at, stored=stored), pytest.raises(Crash):
            gc(index, keep=1, jobs=[job])
        np.testing.assert_array_equal(all_codes(index), kept)
        if not Path(index, version_key(1)).exists() and not Path(index, version_key(2)).exists():
            verify(index)  # half of a segment may be gone, but no version says that it is there
        present = [job] if Path(index, "segments", f"{job}.0").exists() else []
        gc(index, keep=1, jobs=present)
        assert tree(index) == tree(tmp_path / "reference"), f"crash at operation {at} of {operations.count}"


def test_a_killed_gc_does_not_stop_an_encoder(index: str, models: tuple[str, str]) -> None:
    corpus = str(Path(index).parent / "corpus")
    with crash_at(6), pytest.raises(Crash):  # marks are set, some objects are gone
        gc(index, keep=1)
    gc(index, keep=3)  # whatever it is asked for, it ends what was begun
    encode(corpus, index, model=models[0], chunk_rows=80)
    assert len(all_codes(index)) == 350
    verify(index)


def test_leftovers_of_a_killed_publisher_go(index: str) -> None:
    folder = Path(index, open_version(index).segments[0].job.folder)
    before = tree(index)
    for name in ("done/00000000.json", "publishing/0123.json"):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(b"{}")
    assert gc(index).facts["objects_removed"] == 2
    assert tree(index) == before


@pytest.mark.parametrize("folder", [".tmp", "models/.tmp"])
def test_old_temporary_files_go(folder: str, index: str) -> None:
    litter = Path(index, folder)
    litter.mkdir(exist_ok=True)
    for name, age in (("old", 25 * 3600), ("new", 60)):
        (litter / name).write_bytes(b"x")
        os.utime(litter / name, (time.time() - age,) * 2)
    assert gc(index).facts["objects_removed"] == 1
    assert [path.name for path in litter.iterdir()] == ["new"]


def test_a_corpus_keeps_its_rows(index: str, vectors: np.ndarray) -> None:
    corpus = str(Path(index).parent / "corpus")
    report = gc(corpus, keep=1)
    assert (report.facts["versions_removed"], report.facts["segments_removed"]) == ([1, 2], [])
    np.testing.assert_array_equal(open_corpus(corpus).read(0, 350), vectors[:350])
    verify(corpus)


def test_a_segment_of_a_killed_ingest_goes_by_name(index: str, vectors: np.ndarray, tmp_path: Path) -> None:
    corpus = str(Path(index).parent / "corpus")
    before = tree(corpus)
    np.save(tmp_path / "more.npy", vectors[400:500])
    with crash_at(6), pytest.raises(Crash):
        ingest([str(tmp_path / "more.npy")], corpus, chunk_rows=20, append=True)
    assert gc(corpus).status == "nothing to do"
    (left,) = {key.split("/")[1] for key in tree(corpus).keys() - before.keys()}
    gc(corpus, jobs=[left])
    assert tree(corpus) == before
