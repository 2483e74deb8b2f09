"""Deleting rows: for good, in every later version, whatever happens at the same moment."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist import store
from och_dist.encode.stage import encode
from och_dist.errors import BadInputError, ConflictError, IntegrityError, UsageError
from och_dist.evaluate.exact import truth
from och_dist.evaluate.stage import evaluate
from och_dist.search.stage import open_index
from och_dist.store.index import open_version, remembered_bitmap
from och_dist.store.model import split_model_path
from och_dist.upkeep.deletion import delete
from och_dist.upkeep.housekeeping import gc, inspect, status
from och_dist.upkeep.verification import verify
from tests.support.crashes import Crash, crash_at, tree
from tests.support.index_help import corpus_beside, grow, live_codes, small_ranges, without
from tests.support.races import before_commit, together
from tests.support.stage_data import all_codes, corpus_of


@pytest.fixture(scope="module")
def made(vectors: np.ndarray, model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 250 rows and its index of two segments, in chunks of 40."""
    folder = tmp_path_factory.mktemp("deleting")
    grow(folder, vectors[:250], [150], model, chunk_rows=40)
    return folder


def bitmaps(index: str) -> list[str]:
    return sorted(path.name for path in Path(index, "tombstones").glob("0*.*"))


rows_250 = st.sets(st.integers(0, 249), max_size=60)


@settings(deadline=None, max_examples=25)
@given(deletes=st.lists(rows_250, min_size=1, max_size=4), start=st.integers(0, 250), length=st.integers(0, 120))
def test_deletes_add_up(deletes: list[set[int]], start: int, length: int, made: Path) -> None:
    """Against plain sets of row numbers, with bitmaps of 64 rows."""
    codes, gone = all_codes(str(made / "index")), set[int]()
    with small_ranges(), tempfile.TemporaryDirectory() as folder:
        index = shutil.copytree(made / "index", Path(folder) / "index")
        version = 2
        for rows in deletes:
            new = rows - gone
            report = delete(str(index), rows=sorted(rows, reverse=True))
            gone |= rows
            version += bool(new)
            assert (report.status, report.facts["version"]) == ("done" if new else "nothing to do", version)
            assert (report.facts["deleted"], report.facts["deleted_in_all"]) == (len(new), len(gone))
            opened = open_version(str(index))
            assert opened.live_rows == report.facts["live_rows"] == 250 - len(gone)
            assert live_codes(opened) == without(codes, gone)
        expected = [row in gone for row in range(start, start + length)]
        found = opened.deleted(start, start + length)
        assert (found is None) == (not any(expected))
        assert found is None or found.tolist() == expected
        verify(str(index))


def test_one_bitmap_of_a_million_rows(index: str) -> None:
    delete(index, rows="7,10-20")
    (entry,) = open_version(index).tombstones
    assert (entry.number, entry.deleted, bitmaps(index)) == (0, 12, [f"00000000.00000003.{entry.digest[:16]}"])
    bits = np.unpackbits(np.fromfile(Path(index, entry.key), np.uint8), bitorder="little")
    assert len(bits) == 1 << 20
    assert np.flatnonzero(bits).tolist() == [7, *range(10, 21)]


@pytest.mark.parametrize(
    "rows",
    ["3,5-7", [7, 3, 6, 5, 3], (3, 5, 6, 7), np.array([3, 5, 6, 7], np.uint8), np.isin(np.arange(250), [3, 5, 6, 7])],
    ids=["text", "list", "tuple", "array", "mask"],
)
def test_rows_in_any_form(rows: Any, index: str) -> None:
    delete(index, rows=rows)
    found = open_version(index).deleted(0, 250)
    assert found is not None
    assert np.flatnonzero(found).tolist() == [3, 5, 6, 7]


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ("250", UsageError, r"row 250 does not exist.*rows 0 to 249; nothing was deleted"),
        ([3, 1 << 40], UsageError, rf"row {1 << 40} does not exist.*nothing was deleted"),
        ("5-1000000000000", UsageError, r"row 1000000000000 does not exist"),
        ([-1, 4], UsageError, "row -1 does not exist"),
        ("4,a", UsageError, "'a' is not a row"),
        ("9-4", UsageError, "ends before it starts"),
        ([1.5], BadInputError, "float64"),
        (None, UsageError, "row numbers or ids"),
    ],
)
def test_what_cannot_be_deleted(rows: Any, error: type[Exception], message: str, index: str) -> None:
    before = tree(index)
    with pytest.raises(error, match=message):
        delete(index, rows=rows)
    assert tree(index) == before


def test_nothing_is_nothing_to_do(index: str) -> None:
    before = tree(index)
    assert delete(index, rows=[]).status == "nothing to do"
    assert tree(index) == before


def test_a_place_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="holds no published index"):
        delete(str(tmp_path / "none"), rows="1")
    assert not (tmp_path / "none").exists()


def test_a_pinned_reader_keeps_its_version(index: str) -> None:
    pinned, ref, codes = open_version(index), open_version(index).ref, all_codes(index)
    delete(index, rows="0-9")
    middle = open_version(index)
    delete(index, rows="5-29")
    assert pinned.deleted(0, 250) is None
    assert live_codes(pinned) == live_codes(ref.open()) == without(codes, set())
    assert live_codes(middle) == live_codes(index, 3) == without(codes, set(range(10)))
    assert live_codes(index) == without(codes, set(range(30)))


def test_later_versions_keep_them(index: str, vectors: np.ndarray, models: tuple[str, str]) -> None:
    corpus = corpus_beside(index)
    delete(index, rows="3,149-151")
    corpus_of(Path(corpus).parent, vectors[250:300])
    encode(corpus, index, model=models[0], chunk_rows=40)
    assert live_codes(index) == without(all_codes(index), {3, 149, 150, 151})
    assert open_version(index).rows == 300
    encode(corpus, index, model=models[1], chunk_rows=70)
    retrained = open_version(index)
    assert retrained.model == split_model_path(models[1])[1]
    assert (retrained.live_rows, len(retrained.segments)) == (296, 1)
    assert live_codes(index) == without(all_codes(index), {3, 149, 150, 151})
    assert delete(index, rows="299,150").facts["deleted"] == 1
    verify(index)


def test_manifests_say_which_format_they_need(index: str) -> None:
    assert open_version(index).to_json()["format"] == 1
    delete(index, rows="3")
    assert open_version(index).to_json()["format"] == 2
    assert open_version(index, 2).to_json()["format"] == 1


def test_a_search_finds_none_of_them(index: str, vectors: np.ndarray) -> None:
    nearest = open_index(index).search(vectors[:3], k=5)
    delete(index, rows=np.unique(nearest.rows))
    again = open_index(index).search(vectors[:3], k=250)
    assert again.rows.shape == (3, 250 - len(np.unique(nearest.rows)))
    assert not np.isin(again.rows, nearest.rows).any()
    delete(index, rows="0-249")
    assert open_index(index).search(vectors[:3], k=5).rows.shape == (3, 0)


def test_an_evaluation_is_refused(index: str, vectors: np.ndarray, tmp_path: Path) -> None:
    truth(corpus_beside(index), vectors[:4], str(tmp_path / "truth.zarr"), k=5)
    delete(index, rows="8")
    with pytest.raises(ConflictError, match=r"1 rows of .* are deleted.*with --version"):
        evaluate(index, vectors[:4], str(tmp_path / "truth.zarr"))
    assert evaluate(index, vectors[:4], str(tmp_path / "truth.zarr"), version=2).facts["rows"] == 250


def test_the_descriptions_count_them(index: str) -> None:
    delete(index, rows="0-9")
    facts = inspect(index).facts
    assert (facts["rows"], facts["live_rows"], facts["deleted"]) == (250, 240, 10)
    assert status(index).facts["live_rows"] == 240


@pytest.mark.parametrize("stored", [False, True])
def test_a_crash_at_any_operation_ends_clean(stored: bool, made: Path, tmp_path: Path) -> None:
    codes = all_codes(str(made / "index"))
    with small_ranges():
        reference = shutil.copytree(made / "index", tmp_path / "reference")
        delete(str(reference), rows="1")
        begun = shutil.copytree(reference, tmp_path / "begun")
        with crash_at() as operations:
            delete(str(reference), rows="2,70-140")
        assert operations.count == 4  # three bitmaps, the version
        for at in range(1, operations.count + 1):
            index = str(shutil.copytree(begun, tmp_path / str(at)))
            with crash_at(at, stored=stored), pytest.raises(Crash):
                delete(index, rows="2,70-140")
            seen = live_codes(index)
            assert seen in (without(codes, {1}), without(codes, {1, 2, *range(70, 141)}))
            verify(index)
            delete(index, rows="2,70-140")
            gc(index, keep=9)
            assert tree(index) == tree(reference), f"crash at operation {at} of {operations.count}"


@pytest.mark.parametrize("attempt", range(3))
def test_concurrent_deletes_are_all_kept(attempt: int, index: str) -> None:
    codes = all_codes(index)
    outcomes = together(*[lambda n=n: delete(index, rows=range(n * 10, n * 10 + 15)) for n in range(5)])
    assert sorted(outcome.facts["version"] for outcome in outcomes) == [3, 4, 5, 6, 7], outcomes
    assert live_codes(index) == without(codes, set(range(55)))
    verify(index)


@pytest.mark.parametrize("attempt", range(3))
def test_a_delete_beside_an_append(attempt: int, index: str, model: str, vectors: np.ndarray) -> None:
    corpus = corpus_of(Path(index).parent, vectors[250:300])
    outcomes = together(lambda: encode(corpus, index, model=model), lambda: delete(index, rows="100-199"))
    assert sorted(outcome.facts["version"] for outcome in outcomes) == [3, 4], outcomes
    opened = open_version(index)
    assert (opened.rows, opened.live_rows) == (300, 200)
    assert live_codes(index) == without(all_codes(index), set(range(100, 200)))


def test_a_lost_race_is_rebased(index: str) -> None:
    """Another delete commits between the bitmaps and the manifest of this one, several times."""
    codes = all_codes(index)

    def others() -> None:
        delete(index, rows="4")
        delete(index, rows="9")

    with before_commit(lambda: delete(index, rows="3"), others):
        report = delete(index, rows="8,9")
    assert (report.facts["version"], report.facts["deleted"]) == (6, 1)
    assert live_codes(index) == without(codes, {3, 4, 8, 9})


def test_gc_takes_the_bitmaps_of_collected_versions_only(index: str) -> None:
    codes, entries = all_codes(index), []
    for row in (1, 2, 3):
        delete(index, rows=[row])
        entries.append(open_version(index).tombstones[0].key.partition("/")[2])
    pinned = open_version(index, 3)
    gc(index, keep=2)
    assert bitmaps(index) == sorted(entries[1:])
    assert live_codes(index, 4) == without(codes, {1, 2})
    assert live_codes(index) == without(codes, {1, 2, 3})
    verify(index)
    remembered_bitmap.cache_clear()
    with pytest.raises(IntegrityError, match=r"version 3 of .* was collected while it was being read; open the newest"):
        pinned.deleted(0, 250)


def test_gc_between_the_bitmap_and_the_version(index: str) -> None:
    """The bitmap lies there and no version lists it yet, for its version is not there."""
    codes = all_codes(index)
    with before_commit(lambda: gc(index, keep=1)):
        delete(index, rows="8")
    assert live_codes(index) == without(codes, {8})
    verify(index)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("moment", ["stored_bitmaps", "version_numbers", "open_version"])
def test_a_delete_beside_two_collectors(index: str, monkeypatch: pytest.MonkeyPatch, moment: str, killed: bool) -> None:
    """While one gc looks around, another one runs to its end, and a delete that was tried before commits."""
    codes = all_codes(index)
    delete(index, rows="1")
    with crash_at(2), pytest.raises(Crash):  # the bitmap is there, the version is not
        delete(index, rows="8")
    look, times = getattr(store, moment), []
    when = 4 if moment == "version_numbers" else 1  # the fourth is the one that bitmaps are judged by

    def others_meanwhile(*args: Any) -> Any:
        found = look(*args)
        times.append(len(times))
        if len(times) == when:
            gc(index)
            with crash_at(2 if killed else 0, stored=True), contextlib.suppress(Crash):
                delete(index, rows="8")
        return found

    monkeypatch.setattr(store, moment, others_meanwhile)
    gc(index)
    monkeypatch.undo()
    assert len(times) > when
    remembered_bitmap.cache_clear()
    assert live_codes(index) == without(codes, {1, 8})
    verify(index)
    gc(index, keep=1)
    assert len(bitmaps(index)) == 1


def test_the_bitmap_of_a_killed_delete_goes_after_the_next_version(index: str) -> None:
    with crash_at(2), pytest.raises(Crash):  # the bitmap is there
        delete(index, rows="8")
    gc(index)
    assert len(bitmaps(index)) == 1
    delete(index, rows="9")
    gc(index)
    assert bitmaps(index) == [open_version(index).tombstones[0].key.partition("/")[2]]


def test_a_delete_that_slept_through_a_collection(index: str) -> None:
    """The number that it is about to commit was taken and collected: it begins again, and deletes in the newest."""
    codes = all_codes(index)

    def others() -> None:
        for row in ("3", "4"):
            delete(index, rows=row)
        gc(index, keep=1)

    with before_commit(others):
        assert delete(index, rows="8").facts["version"] == 5
    assert live_codes(index) == without(codes, {3, 4, 8})
    gc(index, keep=1)
    verify(index)


def test_a_killed_gc_is_ended_by_the_next(index: str) -> None:
    for row in (1, 2, 3, 4):
        delete(index, rows=[row])
    with crash_at() as operations:
        reference = shutil.copytree(index, Path(index).parent / "reference")
        gc(str(reference), keep=1)
    for at in range(1, operations.count + 1):
        copy = str(shutil.copytree(index, Path(index).parent / str(at)))
        with crash_at(at), pytest.raises(Crash):
            gc(copy, keep=1)
        assert len(live_codes(copy)) == 246
        gc(copy, keep=1)
        assert tree(copy) == tree(reference), f"crash at operation {at}"
        delete(copy, rows="5")


DAMAGE = {
    "flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "cut": lambda data: data[:-7],
    "empty": lambda data: b"",
    "replaced": lambda data: bytes(len(data)),
    "missing": None,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_verify_and_readers_find_damage(damage: Any, index: str) -> None:
    delete(index, rows="8-11")
    path = Path(index, "tombstones", bitmaps(index)[0])
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    remembered_bitmap.cache_clear()
    with pytest.raises(IntegrityError, match=r"1 faults.*a bitmap of deleted rows, is (damaged|missing)"):
        verify(index)
    with pytest.raises(IntegrityError, match="a bitmap of deleted rows"):
        open_version(index).deleted(0, 250)
    with pytest.raises(IntegrityError, match="a bitmap of deleted rows"):
        delete(index, rows="9,12")
    assert open_version(index).version == 3
