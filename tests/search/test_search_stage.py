"""Search: NumPy's answer in one total order, for any chunks, segments and k."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist.encode.stage import encode
from och_dist.errors import BadInputError, NonFiniteError, UsageError
from och_dist.search.placement import Capacity, ReadEachTime, place_codes
from och_dist.search.stage import open_index, search
from och_dist.stage import Context
from och_dist.store.index import open_version
from och_dist.store.results import open_neighbors
from tests.support.searching import open_within
from tests.support.stage_data import all_codes, clustered, corpus_of

ROWS = 400


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    return clustered(23, seed=9)


def index_of(folder: Path, values: np.ndarray, model: str, chunk_rows: int, cuts: tuple[int, ...] = ()) -> str:
    """An index of ``values`` in one segment, or in several that end at ``cuts``."""
    for part in np.split(values, cuts):
        encode(corpus_of(folder, part), str(folder / "index"), model=model, chunk_rows=chunk_rows)
    return str(folder / "index")


def brute(index: str, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k smallest (distance, row) of every query, from the whole table."""
    codes = open_index(index).encode(queries)
    table = np.bitwise_count(codes[:, None] ^ all_codes(index)[None]).sum(axis=2, dtype=np.int64)
    order = np.argsort(table, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(table, order, axis=1), order


@pytest.mark.parametrize(
    ("chunk_rows", "cuts"), [(399, ()), (100, ()), (150, ()), (400, ()), (7, ()), (64, (1, 200)), (500, (399,))]
)
def test_neighbours_are_those_of_brute_force(
    chunk_rows: int, cuts: tuple[int, ...], vectors: np.ndarray, queries: np.ndarray, model: str, tmp_path: Path
) -> None:
    index = index_of(tmp_path, vectors[:ROWS], model, chunk_rows, cuts)
    assert len(open_version(index).segments) == len(cuts) + 1
    for k in (1, 10, 399, 400, 1000):
        found = open_index(index).search(queries, k=k)
        distances, rows = brute(index, queries, k)
        assert found.rows.shape == (23, min(k, ROWS))
        np.testing.assert_array_equal(found.distances, distances)
        np.testing.assert_array_equal(found.rows, rows)


@pytest.fixture(scope="module")
def index(vectors: np.ndarray, model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """400 rows in chunks of 60 in two segments; nobody writes to it."""
    return index_of(tmp_path_factory.mktemp("searched"), vectors[:ROWS], model, 60, (250,))


def test_codes_that_take_too_much_memory_are_read_each_time(index: str, queries: np.ndarray) -> None:
    with open_within(index, memory=1000) as searcher:
        assert isinstance(place_codes(searcher.index, Capacity(None, 1, 1000), resident=None), ReadEachTime)
        found = searcher.search(queries, k=30)
    np.testing.assert_array_equal(found.rows, brute(index, queries, 30)[1])


def test_other_work_replaces_a_result(index: str, queries: np.ndarray, tmp_path: Path) -> None:
    output = str(tmp_path / "found.zarr")
    search(index, queries, k=12, output=output)
    assert search(index, queries, k=13, output=output).status == "done"
    assert search(index, queries[:20], k=13, output=output).status == "done"
    np.testing.assert_array_equal(open_neighbors(output).read_rows(0, 20), brute(index, queries[:20], 13)[1])


def test_without_output_the_report_has_the_lists(index: str, queries: np.ndarray) -> None:
    lists = search(index, queries, k=4).facts["neighbors"]
    distances, rows = brute(index, queries, 4)
    assert lists == [{"distances": d, "rows": r} for d, r in zip(distances.tolist(), rows.tolist(), strict=True)]


def test_no_queries_are_legal(index: str, tmp_path: Path) -> None:
    assert open_index(index).search(np.empty((0, 16), np.float32), k=5).rows.shape == (0, 5)
    assert search(index, np.empty((0, 16), np.float32), k=5).facts["neighbors"] == []
    output = str(tmp_path / "none.zarr")
    search(index, np.empty((0, 16), np.float32), k=5, output=output)
    assert open_neighbors(output).read(0, 0).rows.shape == (0, 5)


def test_an_old_version_can_be_searched(index: str, vectors: np.ndarray, queries: np.ndarray) -> None:
    found = open_index(index, version=1).search(queries, k=1000)
    assert found.rows.shape == (23, 250)
    whole = brute(index, queries, ROWS)
    first = np.stack([rows[rows < 250] for rows in whole[1]])
    np.testing.assert_array_equal(found.rows, first)


def test_a_row_is_its_own_nearest(index: str, vectors: np.ndarray) -> None:
    found = open_index(index).search(vectors[:ROWS], k=ROWS)
    assert (found.distances[:, 0] == 0).all()
    for row in range(ROWS):
        assert row in found.rows[row][found.distances[row] == 0]


@pytest.mark.parametrize(
    ("queries", "options", "error", "text"),
    [
        (np.zeros((3, 15), np.float32), {}, BadInputError, "are 15-d, the index is 16-d"),
        (np.zeros(16, np.float32), {}, BadInputError, "one query per row"),
        (np.zeros((3, 16), complex), {}, BadInputError, "one query per row"),
        (np.full((3, 16), np.nan, np.float32), {}, NonFiniteError, "3 queries .* 0, 1, 2"),
        (np.zeros((3, 16), np.float32), {"output": "x.csv"}, UsageError, r"\.zarr"),
    ],
)
def test_bad_queries_are_refused(queries: Any, options: dict[str, Any], error: type, text: str, index: str) -> None:
    with pytest.raises(error, match=text):
        search(index, queries, **options)


def test_progress_counts_the_queries(index: str, queries: np.ndarray) -> None:
    seen: list[Any] = []
    context = Context(progress=lambda name, total: seen.append((name, total)) or seen.append)
    search(index, np.resize(queries, (10_000, 16)), k=3, context=context)
    assert seen == [("search", 10_000), 4096, 4096, 1808]
