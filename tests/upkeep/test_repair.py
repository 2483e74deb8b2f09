"""Repair: what is damaged is made again with the published checksums, in a new generation and a new version."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from och_dist.errors import IntegrityError, UsageError
from och_dist.search.bucket_tables import build_tables
from och_dist.store.index import open_version, remembered_bitmap
from och_dist.upkeep.compaction import compact
from och_dist.upkeep.deletion import delete
from och_dist.upkeep.housekeeping import gc
from och_dist.upkeep.verification import verify
from tests.support.crashes import Crash, crash_at, tree
from tests.support.index_help import grow, live_codes
from tests.support.races import before_commit
from tests.support.stage_data import corpus_of
from tests.upkeep.test_verify import damage

HOW = ("flip middle", "cut", "empty", "delete")


@pytest.fixture(scope="module")
def made(vectors: np.ndarray, model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 250 rows; an index of it in two segments, and the same one with 20 rows dropped by a compaction."""
    folder = tmp_path_factory.mktemp("repairing")
    grow(folder, vectors[:250], [90], model, chunk_rows=40)
    shutil.copytree(folder / "index", folder / "compacted")
    delete(str(folder / "compacted"), rows="30-49")
    compact(str(folder / "compacted"), chunk_rows=50)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """The two indexes, to write to; they name the corpus of ``made``, which nobody writes to."""
    for name in ("index", "compacted"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


def segment(index: Path, number: int = 0) -> Path:
    return index / open_version(str(index)).segments[number].job.folder


def check_repaired(index: Path, before: dict[int, bytes], *, generation: int = 1, number: int = 0) -> None:
    """Same rows, same codes; clean to verify and nothing left to repair; gc takes the damaged generation."""
    assert live_codes(str(index)) == before
    assert open_version(str(index)).segments[number].job.generation == generation
    assert verify(str(index)).facts["damaged"] == 0
    again = verify(str(index), repair=True)
    assert (again.status, again.facts["repaired"]) == ("nothing to do", 0)
    gc(str(index), keep=1)
    assert verify(str(index)).facts["superseded"] == []
    assert live_codes(str(index)) == before


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("key", ["codes/c/1/0", "codes/zarr.json", "ones/c/0/0", "ones/zarr.json"])
def test_a_segment(key: str, how: str, copy: Path) -> None:
    index = copy / "index"
    before, version = live_codes(str(index)), open_version(str(index)).version
    path = segment(index, 1) / key
    if key.endswith("zarr.json") and how == "flip middle":
        how = "flip first"  # the middle may be the name of something that has its default value
    damage(path, how)
    broken = path.read_bytes() if path.exists() else None
    with pytest.raises(IntegrityError, match="--repair"):
        verify(str(index))
    report = verify(str(index), repair=True)
    assert (report.status, report.facts["damaged"], report.facts["repaired"] > 0) == ("done", 0, True)
    assert (path.read_bytes() if path.exists() else None) == broken, "what is damaged is never overwritten"
    assert report.facts["superseded"], "older versions still list it"
    assert open_version(str(index)).version == version + 1
    check_repaired(index, before, number=1)


def test_what_was_repaired_stays_repaired_when_its_rows_are_compacted(copy: Path) -> None:
    """No version newer than the repaired one lists the job any more; the damage is still that of older versions."""
    index = str(copy / "index")
    damage(segment(Path(index), 1) / "codes/c/1/0", "flip middle")
    verify(index, repair=True)
    delete(index, rows="5,70-90")
    compact(index)
    report = verify(index)
    assert (report.facts["damaged"], len(report.facts["superseded"]) > 0) == (0, True)
    assert verify(index, repair=True).status == "nothing to do"
    gc(index, keep=1)
    assert verify(index).facts["superseded"] == []


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("key", ["codes/c/0/0", "rows/c/0/0", "rows/zarr.json"])
def test_a_compacted_segment(key: str, how: str, copy: Path) -> None:
    index = copy / "compacted"
    before = live_codes(str(index))
    how = "flip first" if key.endswith("zarr.json") and how == "flip middle" else how
    damage(segment(index) / key, how)
    verify(str(index), repair=True)
    check_repaired(index, before)


def test_several_at_once(copy: Path) -> None:
    index = copy / "compacted"
    before = live_codes(str(index))
    for key in ("codes/c/0/0", "rows/c/0/0", "rows/c/3/0", "codes/zarr.json", "ones/c/0/0"):
        damage(segment(index) / key, "cut")
    assert verify(str(index), repair=True).facts["repaired"] == 5
    check_repaired(index, before)


@pytest.mark.parametrize("how", HOW)
def test_the_announcement_of_a_job_is_restored_in_place(how: str, copy: Path) -> None:
    index = copy / "index"
    before = tree(index)
    damage(segment(index) / "job.json", how)
    assert verify(str(index), repair=True).facts["repaired"] == 1
    assert tree(index) == before


@pytest.mark.parametrize("how", HOW)
def test_a_bitmap_of_dropped_rows_is_restored(how: str, copy: Path) -> None:
    index = copy / "compacted"
    before = tree(index)
    (path,) = (path for path in (index / "tombstones").iterdir() if path.is_file())
    data = path.read_bytes()
    path.unlink() if how == "delete" else path.write_bytes({"cut": data[:9], "empty": b""}.get(how, b"\1" + data[1:]))
    verify(str(index), repair=True)
    assert tree(index) == before


def test_a_bitmap_of_rows_that_have_codes_is_not(copy: Path) -> None:
    index = copy / "index"
    delete(str(index), rows="3")
    (path,) = (path for path in (index / "tombstones").iterdir() if path.is_file())
    path.unlink()
    remembered_bitmap.cache_clear()
    with pytest.raises(IntegrityError, match=r"bitmap of deleted rows, is missing.*Restore these objects from a copy"):
        verify(str(index), repair=True)


@pytest.mark.parametrize("key", ["000000.json", "000000/rows/c/0/0"])
def test_damaged_tables_are_removed(key: str, copy: Path) -> None:
    index = copy / "index"
    before = tree(index)
    build_tables(str(index), partition_rows=80, least_rows=1)
    damage(next(segment(index).glob(f"tables/*/{key}")), "flip middle")
    with pytest.raises(IntegrityError, match=r"1 faults in .*tables"):
        verify(str(index))
    assert verify(str(index), repair=True).facts["repaired"] == 1
    assert {key: data for key, data in tree(index).items() if "/tables/" not in key} == before


def test_a_repaired_segment_can_be_repaired(copy: Path) -> None:
    index = copy / "index"
    before = live_codes(str(index))
    for generation in (1, 2):
        damage(segment(index) / "codes" / "c" / "0" / "0", "flip middle")
        verify(str(index), repair=True)
        assert open_version(str(index)).segments[0].job.generation == generation
    check_repaired(index, before, generation=2)


def test_the_corpus_is_gone_or_another(copy: Path, made: Path, vectors: np.ndarray) -> None:
    index = copy / "index"
    before = live_codes(str(index))
    damage(segment(index) / "codes" / "c" / "0" / "0", "cut")
    other = corpus_of(copy / "other", vectors[250:500])
    for corpus, text in ((copy / "nowhere", "cannot be opened"), (other, "are not the vectors")):
        with pytest.raises(IntegrityError, match=text):
            verify(str(index), repair=True, corpus=str(corpus))
    moved = shutil.copytree(made / "corpus", copy / "moved")
    verify(str(index), repair=True, corpus=str(moved))
    check_repaired(index, before)
    with pytest.raises(UsageError, match="add --repair"):
        verify(str(index), corpus=str(moved))


def test_no_corpus_is_needed_where_codes_are_sound(copy: Path) -> None:
    index = copy / "index"
    damage(segment(index) / "ones" / "c" / "0" / "0", "empty")
    verify(str(index), repair=True, corpus=str(copy / "nowhere"))


def test_a_damaged_corpus_names_rows_and_sources(copy: Path, made: Path) -> None:
    corpus = Path(shutil.copytree(made / "corpus", copy / "corpus"))
    damage(sorted(corpus.glob("segments/*/vectors/c/1/0"))[0], "flip middle")
    with pytest.raises(IntegrityError, match=r"Nothing here can make rows \d+\.\.\d+ again.*och ingest .*\.npy"):
        verify(str(corpus), repair=True)


def test_a_damaged_model(copy: Path) -> None:
    index = copy / "index"
    damage(index / "models" / open_version(str(index)).model / "mean.npy", "flip last")
    with pytest.raises(IntegrityError, match="A model is the same in every copy"):
        verify(str(index), repair=True)


def test_what_happens_meanwhile_is_kept(copy: Path) -> None:
    """A delete between the check and the commit of a repair."""
    index = copy / "index"
    before = live_codes(str(index))
    damage(segment(index, 1) / "codes" / "c" / "0" / "0", "empty")
    with before_commit(lambda: delete(str(index), rows="7")):
        verify(str(index), repair=True)
    del before[7]
    check_repaired(index, before, number=1)


@pytest.mark.parametrize("stored", [False, True], ids=["before", "after"])
def test_a_crash_at_every_operation(stored: bool, copy: Path, tmp_path: Path) -> None:
    index = copy / "compacted"
    before = live_codes(str(index))
    for key in ("codes/c/0/0", "rows/c/1/0"):
        damage(segment(index) / key, "flip middle")
    shutil.copytree(index, tmp_path / "reference")
    with crash_at() as counted:
        verify(str(tmp_path / "reference"), repair=True)
    assert counted.count > 20
    for at in range(1, counted.count + 1):
        attempt = Path(shutil.copytree(index, tmp_path / f"attempt-{at}"))
        with crash_at(at, stored=stored), pytest.raises(Crash):
            verify(str(attempt), repair=True)
        verify(str(attempt), repair=True)
        assert tree(attempt).keys() == tree(tmp_path / "reference").keys()
        assert live_codes(str(attempt)) == before
        shutil.rmtree(attempt)
