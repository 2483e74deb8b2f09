"""A question that the package does not have, asked from outside: the seam is one class, wherever the codes are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

from och_dist.encode.stage import encode
from och_dist.search.filters import selection
from och_dist.search.placement import HeldCodes
from och_dist.search.questions import QueryBatch, Question
from och_dist.search.searcher import Searcher, open_index
from och_dist.sources.queries import open_queries
from och_dist.upkeep.deletion import delete
from tests.support.stage_data import all_codes, clustered, corpus_of

ROWS, GONE = 300, [3, 4, 170, 299]

Part = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Farthest(Question):
    """(distances, rows), each (q, min(k, live rows)), of the ``k`` farthest codes, the farthest first."""

    k: int

    def chunk(self, codes: HeldCodes, queries: QueryBatch, so_far: Part | None = None) -> Part:
        rows = np.arange(codes.start, codes.stop) if codes.row_numbers is None else codes.row_numbers
        distances = np.bitwise_count(queries.codes[:, None] ^ codes.packed()[None]).sum(axis=2, dtype=np.int64)
        live = slice(None) if codes.live is None else codes.live
        return self._first(distances[:, live], np.broadcast_to(rows, distances.shape)[:, live])

    def combine(self, parts: Sequence[Part]) -> Part:
        return self._first(*(np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True)))

    def finalise(self, part: Part, queries: QueryBatch, vectors: np.ndarray, searcher: Searcher) -> dict[str, Any]:
        return {"distances": part[0] / searcher.index.bits, "rows": part[1]}

    def _first(self, distances: np.ndarray, rows: np.ndarray) -> Part:
        order = np.lexsort((rows, -distances), axis=1)[:, : self.k]
        return np.take_along_axis(distances, order, 1), np.take_along_axis(rows, order, 1)


@pytest.fixture(scope="module")
def index(vectors: np.ndarray, model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two segments in chunks of 40, some rows deleted."""
    folder = tmp_path_factory.mktemp("farthest")
    for part in np.split(vectors[:ROWS], [180]):
        encode(corpus_of(folder, part), str(folder / "index"), model=model, chunk_rows=40)
    delete(str(folder / "index"), rows=GONE)
    return str(folder / "index")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Threads as workers: a class of this file need not be installed anywhere."""
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0", protocol="inproc://"
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.mark.parametrize(
    "way", [{"threads": 1}, {"threads": 3}, {"resident": False}, {"client": True}, {"client": True, "resident": False}]
)
def test_the_farthest_are_those_of_numpy(way: dict[str, Any], index: str, client: Client) -> None:
    queries, told = clustered(11, seed=4), []
    if way.get("client"):
        way = {**way, "client": client}
    with open_index(index, **way) as searcher:
        codes = searcher.encode(queries)
        for chosen in (selection(), selection(only=range(20, 200))):
            told.clear()
            found = list(searcher.ask(Farthest(7), open_queries(queries), chosen, told.append))
            distances = np.bitwise_count(codes[:, None] ^ all_codes(index)[None]).sum(axis=2, dtype=np.int64)
            rows = np.setdiff1d(np.arange(20, 200) if chosen else np.arange(ROWS), GONE)
            order = np.argsort(-distances[:, rows], axis=1, kind="stable")[:, :7]
            assert len(found) == 1
            np.testing.assert_array_equal(found[0]["rows"], rows[order])
            expected = np.take_along_axis(distances[:, rows], order, 1) / searcher.index.bits
            np.testing.assert_array_equal(found[0]["distances"], expected)
            assert sum(told) == len(queries)
            assert searcher.plan == "a flat scan"


def test_an_index_without_rows_answers_too(index: str, vectors: np.ndarray, model: str, tmp_path: Path) -> None:
    empty = str(tmp_path / "index")
    encode(corpus_of(tmp_path, vectors[:5]), empty, model=model)
    delete(empty, rows=range(5))
    with open_index(empty) as searcher:
        (found,) = searcher.ask(Farthest(2), open_queries(vectors[:3]))
        assert found["rows"].shape == (3, 0)
