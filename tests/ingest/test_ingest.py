"""Ingest: what is in the files is in the corpus, whatever happens on the way."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, ConflictError, IntegrityError, NonFiniteError, UsageError
from och_dist.ingest import chunks as segments
from och_dist.ingest.stage import default_chunk_rows, generate, ingest
from och_dist.kernels.gistlike import gist_rows
from och_dist.sources.files import VectorFile
from och_dist.sources.joined import JoinedFiles
from och_dist.stage import Context
from och_dist.store.arrays import CODECS, ArraySpec, chunk_key, open_array
from och_dist.store.corpus import find_corpus, open_corpus
from och_dist.store.objects import open_objects
from och_dist.upkeep.housekeeping import gc
from och_dist.upkeep.verification import verify
from tests.support.crashes import Crash, crash_at, tree
from tests.support.races import before_commit, together
from tests.support.stage_data import clustered
from tests.support.vector_files import (
    sample,
    write_bvecs,
    write_fvecs,
    write_hdf5,
    write_hdf5_swapped,
    write_mat5,
    write_mat73,
    write_npy,
    write_npy_fortran,
    write_npy_swapped,
    write_parquet_fixed,
    write_parquet_lists,
    write_zarr_2,
    write_zarr_3,
)

FORMATS = [
    (write_fvecs, "<f4", None),
    (write_bvecs, "|u1", None),
    *((write_npy, dtype, None) for dtype in ("<f2", "<f4", "<f8", "|u1", "|i1")),
    (write_npy_swapped, "<f4", None),
    (write_npy_fortran, "<f8", None),
    (write_hdf5, "<f4", "train"),
    (write_hdf5_swapped, "<f8", None),
    (write_parquet_fixed, "<f4", None),
    (write_parquet_lists, "<f8", None),
    (write_mat5, "<f8", "X"),
    (write_mat73, "<f4", None),
    (write_zarr_2, "<f4", None),
    (write_zarr_3, "|u1", None),
]


def whole(url: str, version: int | None = None) -> np.ndarray:
    corpus = open_corpus(url, version)
    return corpus.read(0, corpus.rows)


def save(folder: Path, name: str, values: np.ndarray) -> str:
    np.save(folder / name, values)
    return str(folder / name)


@pytest.mark.parametrize(("write", "dtype", "dataset"), FORMATS)
def test_every_format_arrives_as_it_is(write: Any, dtype: str, dataset: str | None, tmp_path: Path) -> None:
    values = sample(dtype)
    path = write(tmp_path, values)
    report = ingest([str(path)], str(tmp_path / "corpus"), dataset=dataset, chunk_rows=4)
    found = whole(str(tmp_path / "corpus"))
    assert found.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(found, values)
    assert (report.status, report.facts["rows"], report.facts["new_rows"]) == ("done", 23, 23)


def test_files_follow_each_other_and_globs_are_sorted(tmp_path: Path) -> None:
    values = clustered(50)
    for name, part in (("b2.npy", values[20:37]), ("b1.npy", values[10:20]), ("a.npy", values[:10])):
        save(tmp_path, name, part)
    last = save(tmp_path, "0.npy", values[37:])
    ingest([str(tmp_path / "a.npy"), str(tmp_path / "b*.npy"), last], str(tmp_path / "corpus"), chunk_rows=8)
    np.testing.assert_array_equal(whole(str(tmp_path / "corpus")), values)


def test_append_publishes_a_version_and_keeps_the_old_one(tmp_path: Path) -> None:
    values, url = clustered(40), str(tmp_path / "corpus")
    ingest([save(tmp_path, "a.npy", values[:25])], url, chunk_rows=8)
    before = tree(url)
    report = ingest([save(tmp_path, "b.npy", values[25:])], url, chunk_rows=6, append=True)
    assert (report.facts["version"], report.facts["rows"], report.facts["new_rows"]) == (2, 40, 15)
    np.testing.assert_array_equal(whole(url), values)
    np.testing.assert_array_equal(whole(url, 1), values[:25])
    assert before.items() <= tree(url).items()
    assert [(s.start, s.stop, s.chunk_rows) for s in open_corpus(url).segments] == [(0, 25, 8), (25, 40, 6)]


def test_what_the_corpus_holds_is_not_taken_again(tmp_path: Path) -> None:
    values, url = clustered(30), str(tmp_path / "corpus")
    first, second = save(tmp_path, "a.npy", values[:20]), save(tmp_path, "b.npy", values[20:])
    ingest([first], url)
    before = tree(url)
    assert ingest([first], url).status == "nothing to do"
    copy = shutil.copy(first, tmp_path / "copy.npy")
    assert ingest([str(copy)], url, append=True, chunk_rows=3).status == "nothing to do"
    assert tree(url) == before
    report = ingest([first, second], url, append=True)
    assert (report.facts["new_rows"], report.facts["version"]) == (10, 2)
    np.testing.assert_array_equal(whole(url), values)


def test_a_copy_in_the_same_call_is_refused(tmp_path: Path) -> None:
    first = save(tmp_path, "a.npy", clustered(20))
    copy = str(shutil.copy(first, tmp_path / "copy.npy"))
    with pytest.raises(UsageError, match=r"copy\.npy has the content of .*a\.npy"):
        ingest([first, copy], str(tmp_path / "corpus"))
    assert find_corpus(str(tmp_path / "corpus")) is None


def test_other_rows_need_append(tmp_path: Path) -> None:
    values, url = clustered(30), str(tmp_path / "corpus")
    ingest([save(tmp_path, "a.npy", values[:20])], url)
    before = tree(url)
    with pytest.raises(ConflictError, match="--append"):
        ingest([save(tmp_path, "b.npy", values[20:])], url)
    with pytest.raises(ConflictError, match="--append"):
        generate(url, rows=5, dim=16)
    assert tree(url) == before


@pytest.mark.parametrize("other", [np.zeros((4, 15), np.float32), np.zeros((4, 16), np.float64)])
def test_a_corpus_has_one_dimension_and_one_dtype(other: np.ndarray, tmp_path: Path) -> None:
    url = str(tmp_path / "corpus")
    ingest([save(tmp_path, "a.npy", clustered(20))], url)
    before = tree(url)
    with pytest.raises(BadInputError, match="one dimension and one dtype"):
        ingest([save(tmp_path, "b.npy", other)], url, append=True)
    assert tree(url) == before


@pytest.mark.parametrize("stored", [False, True])
def test_a_crash_at_any_operation_is_resumed(stored: bool, tmp_path: Path) -> None:
    values = clustered(70)
    first, second = save(tmp_path, "a.npy", values[:30]), save(tmp_path, "b.npy", values[30:])
    reference = str(tmp_path / "reference")
    ingest([first], reference, chunk_rows=16)
    with crash_at() as operations:
        ingest([second], reference, chunk_rows=8, append=True)
    assert operations.count >= 5 + 2  # chunks, metadata, manifest
    for at in range(1, operations.count + 1):
        url = str(tmp_path / f"{at}")
        ingest([first], url, chunk_rows=16)
        with crash_at(at, stored=stored), pytest.raises(Crash):
            ingest([second], url, chunk_rows=8, append=True)
        np.testing.assert_array_equal(whole(url, 1), values[:30])
        newest = whole(url)
        np.testing.assert_array_equal(newest, values[: len(newest)])
        assert len(newest) in (30, 70)
        ingest([second], url, chunk_rows=8, append=True)
        assert tree(url) == tree(reference), f"crash at operation {at} of {operations.count}"


def test_a_resumed_ingest_writes_only_what_is_missing(tmp_path: Path) -> None:
    path, url = save(tmp_path, "a.npy", clustered(50)), str(tmp_path / "corpus")
    with crash_at(3 + 1 + 2), pytest.raises(Crash):  # the probe, the metadata, one chunk, and the next one dies
        ingest([path], url, chunk_rows=10)
    steps: list[int] = []
    ingest([path], url, chunk_rows=10, context=Context(progress=lambda name, total: steps.append))
    assert steps == [10, 10, 10, 10, 10]  # the rows that are there, then chunk by chunk


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:20], lambda data: b"\1" + data[1:]])
def test_a_damaged_chunk_of_a_killed_run_is_not_published(damage: Any, tmp_path: Path) -> None:
    values, url = clustered(50), str(tmp_path / "corpus")
    path = save(tmp_path, "a.npy", values)
    with crash_at(7), pytest.raises(Crash):
        ingest([path], url, chunk_rows=10)
    (chunk,) = sorted(Path(url).rglob("c/0/0"))
    chunk.write_bytes(damage(chunk.read_bytes()))
    with pytest.raises(IntegrityError, match=r"chunk 0 of segment .* is damaged.*och gc .* --job") as caught:
        ingest([path], url, chunk_rows=10)
    assert find_corpus(url) is None
    gc(url, jobs=[str(caught.value).partition("--job ")[2].partition("'")[0]])
    ingest([path], url, chunk_rows=10)
    np.testing.assert_array_equal(whole(url), values)
    verify(url)


def with_bad_rows(rows: int, bad: set[int], dtype: str = "<f4") -> np.ndarray:
    values = clustered(rows, dim=4).astype(dtype)
    for number, row in enumerate(sorted(bad)):
        values[row, number % 4] = (np.nan, np.inf, -np.inf)[number % 3]
    return values


@given(
    rows=st.integers(1, 40),
    chunk_rows=st.integers(1, 9),
    scan_rows=st.integers(1, 12),
    bad=st.sets(st.integers(0, 39), max_size=30),
)
@settings(deadline=None, max_examples=40)
def test_drop_leaves_out_exactly_the_bad_rows(rows: int, chunk_rows: int, scan_rows: int, bad: set[int]) -> None:
    bad = {row for row in bad if row < rows}
    values = with_bad_rows(rows, bad)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "PART_ROWS", scan_rows)
        path, url = save(Path(folder), "a.npy", values), f"{folder}/corpus"
        if len(bad) == rows:
            with pytest.raises(BadInputError, match="none of the"):
                ingest([path], url, chunk_rows=chunk_rows, nonfinite="drop")
            return
        report = ingest([path], url, chunk_rows=chunk_rows, nonfinite="drop")
        np.testing.assert_array_equal(whole(url), np.delete(values, sorted(bad), axis=0))
        assert (report.facts["dropped"], report.facts["dropped_rows"]) == (len(bad), sorted(bad)[:20])
        assert open_corpus(url).segments[0].dropped == len(bad)


@given(rows=st.integers(1, 40), chunk_rows=st.integers(1, 9), bad=st.sets(st.integers(0, 39), min_size=1))
@settings(deadline=None, max_examples=25)
def test_bad_rows_are_listed_by_their_number_in_the_call(rows: int, chunk_rows: int, bad: set[int]) -> None:
    bad = {row % rows for row in bad}
    values = with_bad_rows(rows, bad)
    with tempfile.TemporaryDirectory() as folder:
        parts = [part for part in (values[: rows // 3], values[rows // 3 :]) if len(part)]
        paths = [save(Path(folder), f"{number}.npy", part) for number, part in enumerate(parts)]
        with pytest.raises(NonFiniteError, match="nothing was published") as caught:
            ingest(paths, f"{folder}/corpus", chunk_rows=chunk_rows)
        assert (caught.value.rows, caught.value.total) == (tuple(sorted(bad)[:20]), len(bad))
        assert find_corpus(f"{folder}/corpus") is None


@pytest.mark.parametrize("dtype", ["<f2", "<f8"])
def test_bad_rows_of_other_dtypes_keep_the_old_version(dtype: str, tmp_path: Path) -> None:
    url = str(tmp_path / "corpus")
    good = clustered(9, dim=4).astype(dtype)
    ingest([save(tmp_path, "a.npy", good)], url)
    path = save(tmp_path, "b.npy", with_bad_rows(30, {0, 7, 8, 29}, dtype))
    with pytest.raises(NonFiniteError) as caught:
        ingest([path], url, chunk_rows=8, append=True)
    assert caught.value.rows == (0, 7, 8, 29)
    np.testing.assert_array_equal(whole(url), good)
    ingest([path], url, chunk_rows=8, append=True, nonfinite="drop")
    assert open_corpus(url).rows == 9 + 26


def test_bad_rows_are_all_listed_after_a_crash_too(tmp_path: Path) -> None:
    path, url = save(tmp_path, "a.npy", with_bad_rows(30, {12, 25})), str(tmp_path / "corpus")
    with crash_at(5), pytest.raises(Crash):
        ingest([path], url, chunk_rows=10)
    with pytest.raises(NonFiniteError) as caught:
        ingest([path], url, chunk_rows=10)
    assert caught.value.rows == (12, 25)


def race(url: str, paths: list[str], **options: Any) -> list[Any]:
    """Ingest each path in a thread of its own; all have written their chunks before the first one publishes."""
    barrier = threading.Barrier(len(paths))

    def progress(name: str, total: int) -> Callable[[int], None]:
        counts: list[int] = []

        def advance(count: int) -> None:
            counts.append(count)
            if sum(counts) == total:
                barrier.wait(30)

        return advance

    context = Context(progress=progress)
    return together(*(partial(ingest, [path], url, context=context, **options) for path in paths))


@pytest.mark.parametrize("append", [False, True])
def test_of_two_ingests_at_once_one_wins(append: bool, tmp_path: Path) -> None:
    values, url = clustered(60), str(tmp_path / "corpus")
    start = 10 if append else 0
    if append:
        ingest([save(tmp_path, "first.npy", values[:10])], url)
    paths = [save(tmp_path, "a.npy", values[10:30]), save(tmp_path, "b.npy", values[30:])]
    outcomes = race(url, paths, chunk_rows=8, append=append)
    lost = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, ConflictError)]
    assert len(lost) == 1
    assert not isinstance(outcomes[1 - lost[0]], Exception)
    kept = [values[10:30], values[30:]][1 - lost[0]]
    np.testing.assert_array_equal(whole(url)[start:], kept)
    ingest([paths[lost[0]]], url, chunk_rows=8, append=True)
    np.testing.assert_array_equal(whole(url)[start + len(kept) :], [values[10:30], values[30:]][lost[0]])
    verify(url)


def test_an_ingest_that_was_overtaken_publishes_nothing(tmp_path: Path) -> None:
    values, url = clustered(60), str(tmp_path / "corpus")
    first, second = save(tmp_path, "a.npy", values[:25]), save(tmp_path, "b.npy", values[25:])
    overtaken = before_commit(lambda: ingest([first], url, chunk_rows=8))
    with overtaken, pytest.raises(ConflictError, match="nothing was mixed: run the command again"):
        ingest([second], url, chunk_rows=8)
    np.testing.assert_array_equal(whole(url), values[:25])
    ingest([second], url, chunk_rows=8, append=True)
    np.testing.assert_array_equal(whole(url), values)


def test_the_same_ingest_twice_at_once_is_one(tmp_path: Path) -> None:
    values, url = clustered(30), str(tmp_path / "corpus")
    path = save(tmp_path, "a.npy", values)
    outcomes = race(url, [path, path], chunk_rows=8)
    assert [outcome.facts["version"] for outcome in outcomes] == [1, 1]
    np.testing.assert_array_equal(whole(url), values)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("chunk_rows", [1, 7, 29, 30, 100])
def test_chunks_and_codecs(codec: Any, chunk_rows: int, tmp_path: Path) -> None:
    values, url = clustered(30), str(tmp_path / "corpus")
    values[10:20] = 0  # an all-zero chunk is stored like any other
    ingest([save(tmp_path, "a.npy", values)], url, chunk_rows=chunk_rows, codec=codec)
    corpus = open_corpus(url)
    (segment,) = corpus.segments
    size = min(chunk_rows, 30)
    assert open_array(open_objects(url), segment.prefix).chunks == (size, 16)
    assert len(segment.digests) == -(-30 // size)
    for chunk, digest in enumerate(segment.digests.tolist()):
        data = Path(url, chunk_key(segment.prefix, chunk)).read_bytes()
        assert google_crc32c.value(data[:-4]) == int.from_bytes(data[-4:], "little") == digest
        assert codec != "none" or data[: 16 * 4] == values[chunk * size].tobytes()
    np.testing.assert_array_equal(corpus.read(0, 30), values)
    np.testing.assert_array_equal(zarr.open_array(Path(url, segment.prefix), mode="r")[:], values)


@pytest.mark.parametrize(("dim", "dtype", "rows"), [(960, "<f4", 8192), (1, "|u1", 1 << 25), (1 << 27, "<f8", 1)])
def test_default_chunks_are_near_32_mebibytes(dim: int, dtype: str, rows: int) -> None:
    assert default_chunk_rows(dim, dtype) == rows


def test_generated_rows_depend_on_their_number_alone(tmp_path: Path) -> None:
    url = str(tmp_path / "corpus")
    generate(url, rows=30, dim=24, seed=3, chunk_rows=7)
    assert generate(url, rows=30, dim=24, seed=3).status == "nothing to do"
    generate(url, rows=20, dim=24, seed=3, first_row=30, append=True, chunk_rows=9)
    np.testing.assert_array_equal(whole(url), gist_rows(0, 50, dim=24, seed=3))
    assert [s.sources[0]["first_row"] for s in open_corpus(url).segments] == [0, 30]


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    chunk_rows=st.integers(1, 8),
    data=st.data(),
)
def test_a_task_carries_only_the_files_that_it_reads(sizes: list[int], chunk_rows: int, data: st.DataObject) -> None:
    """Rows of all chunks that are still to do, and files that each task knows, against the plain list of all rows."""
    sources = tuple(VectorFile(f"{i}.npy", "npy", rows, 2, "<f4", f"{i}", 0) for i, rows in enumerate(sizes))
    rows = [(source.path, row) for source in sources for row in range(source.rows)]
    bad = sorted(data.draw(st.sets(st.integers(0, len(rows) - 1), max_size=len(rows) - 1)))
    kept = [place for number, place in enumerate(rows) if number not in bad]
    spec = ArraySpec(len(kept), 2, "<f4", chunk_rows)
    there = data.draw(st.sets(st.integers(0, spec.n_chunks - 1)))
    new = segments.NewSegment("/corpus", "p", 0, spec)
    tasks = segments.plan(new, JoinedFiles(sources), np.array(bad, np.int64), there)
    assert [task.chunk for task in tasks] == [chunk for chunk in range(spec.n_chunks) if chunk not in there]
    for task in tasks:
        assert isinstance(task.source, JoinedFiles)
        known = [(source.path, row) for source in task.source.files for row in range(source.rows)]
        numbers = [n for n in range(task.start, task.stop) if n not in task.skip]
        assert [known[n - task.source.first_row] for n in numbers] == kept[slice(*spec.bounds(task.chunk))]
        wanted = {rows[n][0] for n in range(task.start, task.stop)}
        assert {source.path for source in task.source.files} == wanted


def test_a_long_run_of_bad_rows_is_not_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of ten rows, the first of which lies a thousand bad rows before the others."""
    values = clustered(1030, dim=4)
    values[[*range(1, 1001), 1015]] = np.nan
    monkeypatch.setattr(segments, "PART_ROWS", 50)
    sizes: list[int] = []
    plain = JoinedFiles.read
    monkeypatch.setattr(JoinedFiles, "read", lambda self, a, b: sizes.append(b - a) or plain(self, a, b))
    path = save(tmp_path, "a.npy", values)
    ingest([path], str(tmp_path / "c"), chunk_rows=10, nonfinite="drop")
    assert np.array_equal(whole(str(tmp_path / "c")), values[np.isfinite(values).all(axis=1)])
    assert max(sizes) == 50
