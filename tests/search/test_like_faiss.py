"""What FAISS' own tests make its binary indexes go through, by us on stored indexes, with FAISS beside us.

Flat and hash indexes, range search, selectors, ids, removal, adding in steps, merging, shards and replicas, writing and
reading back, reconstruction. Our order is (distance, row) where FAISS promises none; distances must be its.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist.encode.stage import encode
from och_dist.ingest.stage import ingest
from och_dist.search.bucket_tables import build_tables
from och_dist.search.searcher import Searcher, open_index
from och_dist.train.stage import train
from och_dist.upkeep.compaction import compact
from och_dist.upkeep.deletion import delete
from tests.support.searching import open_within
from tests.support.stage_data import all_codes, clustered, corpus_of

faiss = pytest.importorskip("faiss")

ROWS, BITS, K = 600, 32, 12


@pytest.fixture(scope="module")
def made(vectors: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus whose ids are no row numbers, its 32-bit index and bucket tables; tests work on copies."""
    folder = tmp_path_factory.mktemp("faiss")
    np.save(folder / "v.npy", vectors[:ROWS])
    np.save(folder / "ids.npy", names())
    ingest([str(folder / "v.npy")], str(folder / "corpus"), ids=[str(folder / "ids.npy")])
    model = train(str(folder / "corpus"), str(folder / "models"), bits=BITS, method="lsh").facts["model"]
    (folder / "model").write_text(model)
    encode(str(folder / "corpus"), str(folder / "index"), model=model, chunk_rows=100)
    return folder


@pytest.fixture
def index(made: Path, tmp_path: Path) -> str:
    shutil.copytree(made / "index", tmp_path / "index")
    return str(tmp_path / "index")


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    return clustered(20, seed=5)


def names() -> np.ndarray:
    """Ids in an order of their own."""
    return np.random.default_rng(3).permutation(10_000)[:ROWS].astype(np.int64)


def flat(codes: np.ndarray) -> Any:
    peer = faiss.IndexBinaryFlat(BITS)
    peer.add(codes)
    return peer


def ours(searcher: Searcher, queries: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    found = searcher.search(queries, k=K, **options)
    return found.distances, found.rows


def same(one: tuple[np.ndarray, ...], other: tuple[np.ndarray, ...]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def sorted_pairs(distances: np.ndarray, names: np.ndarray) -> list[list[tuple[int, int]]]:
    return [sorted(zip(d.tolist(), n.tolist(), strict=True)) for d, n in zip(distances, names, strict=True)]


def test_flat_and_reconstruction(index: str, vectors: np.ndarray, queries: np.ndarray) -> None:
    with open_index(index) as searcher:
        codes, asked = all_codes(index), searcher.encode(queries)
        np.testing.assert_array_equal(codes, searcher.encode(vectors[:ROWS]))
        distances, rows = ours(searcher, queries)
        np.testing.assert_array_equal(distances, flat(codes).search(asked, K)[0])
        for query in range(len(queries)):
            np.testing.assert_array_equal(
                distances[query], np.bitwise_count(codes[rows[query]] ^ asked[query]).sum(axis=1)
            )


@pytest.mark.parametrize("method", ["flat", "multi-index"])
def test_range_search_by_scan_and_by_hash(index: str, queries: np.ndarray, method: str) -> None:
    build_tables(index, least_rows=1, partition_rows=256)
    peer = flat(all_codes(index))
    with open_index(index, method=method) as searcher:  # type: ignore[arg-type]
        asked = searcher.encode(queries)
        nearest = searcher.search(queries, k=10)
        median = int(np.median(nearest.distances[:, -1]))
        for radius in (0, 1, 3, median, BITS):
            within = searcher.radius(queries, radius=radius)
            limits, distances, places = peer.range_search(asked, radius + 1)
            np.testing.assert_array_equal(within.indptr, limits)
            cuts = limits[1:-1].astype(int)
            theirs = [
                sorted(zip(d, p, strict=True))
                for d, p in zip(*(np.split(x, cuts) for x in (distances, places)), strict=True)
            ]
            mine = [
                list(zip(d, r, strict=True))
                for d, r in zip(*(np.split(x, cuts) for x in (within.distances, within.rows)), strict=True)
            ]
            assert mine == theirs
        within = searcher.radius(queries, radius=median)
        for query in range(len(queries)):  # consistent with the nearest, like theirs
            inside = set(within.rows[within.indptr[query] : within.indptr[query + 1]].tolist())
            first, last = set(nearest.rows[query].tolist()), nearest.distances[query, -1]
            assert first <= inside if last <= median else inside <= first


@pytest.mark.parametrize("method", ["flat", "multi-index"])
def test_selectors(index: str, queries: np.ndarray, method: str) -> None:
    build_tables(index, least_rows=1, partition_rows=256)
    peer, rng = flat(all_codes(index)), np.random.default_rng(0)
    batch = rng.choice(ROWS, 80, replace=False)
    bitmap = rng.random(ROWS) < 0.3
    span, listed = faiss.IDSelectorRange(100, 333), faiss.IDSelectorBatch(batch)
    marked = faiss.IDSelectorBitmap(np.packbits(bitmap, bitorder="little"))
    both = faiss.IDSelectorAnd(span, listed)
    with open_index(index, method=method) as searcher:  # type: ignore[arg-type]
        asked = searcher.encode(queries)
        for chosen, selector in (
            ({"only": range(100, 333)}, span),
            ({"only": batch}, listed),
            ({"only": bitmap}, marked),
            ({"without": batch}, faiss.IDSelectorNot(listed)),
            ({"only": np.intersect1d(np.arange(100, 333), batch)}, both),
            ({"only": range(100, 333), "without": batch}, faiss.IDSelectorAnd(span, faiss.IDSelectorNot(listed))),
        ):
            theirs = peer.search(asked, K, params=faiss.SearchParameters(sel=selector))[0]
            found = ours(searcher, queries, **chosen)[0]
            np.testing.assert_array_equal(found, theirs[:, : found.shape[1]])
            assert (theirs[:, found.shape[1] :] == np.iinfo(np.int32).max).all()


def test_ids_and_removal(index: str, queries: np.ndarray) -> None:
    peer = faiss.IndexBinaryIDMap(faiss.IndexBinaryFlat(BITS))
    peer.add_with_ids(all_codes(index), names())
    for gone in (names()[:0], names()[[0, 5, 6, 7, 99, 100, 599]], names()[200:330]):
        peer.remove_ids(gone)
        delete(index, ids=gone)
        with open_index(index) as searcher:
            asked = searcher.encode(queries)
            found = searcher.search(queries, k=peer.ntotal, ids=True)
            assert found.ids is not None
            theirs = peer.search(asked, peer.ntotal)
            assert sorted_pairs(found.distances, found.ids) == sorted_pairs(*theirs)
            np.testing.assert_array_equal(found.ids, names()[found.rows])
    before = ours(open_index(index), queries)
    compact(index)
    same(ours(open_index(index), queries), before)


def test_added_in_steps_while_searching(
    made: Path, index: str, vectors: np.ndarray, queries: np.ndarray, tmp_path: Path
) -> None:
    model, grown = (made / "model").read_text(), str(tmp_path / "grown")
    peer, searchers = faiss.IndexBinaryFlat(BITS), []
    for start, stop in ((0, 1), (1, 64), (64, 300), (300, ROWS)):
        corpus = corpus_of(tmp_path, vectors[start:stop])
        encode(corpus, grown, model=model, chunk_rows=100)
        searcher = open_index(grown)
        peer.add(searcher.encode(vectors[start:stop]))
        found = ours(searcher, queries)
        np.testing.assert_array_equal(found[0], peer.search(searcher.encode(queries), min(K, stop))[0])
        searchers.append((searcher, found))
    for searcher, found in searchers:  # each stays with the version that it opened
        same(ours(searcher, queries), found)
    same(found, ours(open_index(index), queries))
    compact(grown)  # segments merged into one, like indexes
    same(found, ours(open_index(grown), queries))


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_shards(index: str, queries: np.ndarray, parts: int) -> None:
    expected = ours(open_index(index), queries)
    shards = faiss.IndexBinaryShards(BITS)
    codes, kept = all_codes(index), []
    for part in np.array_split(codes, parts):
        kept.append(flat(part))
        shards.add_shard(kept[-1])
    for options in ({"threads": 1}, {"threads": 3}, {"resident": False, "threads": 2}):
        with open_within(index, partition_bytes=-(-4 * ROWS // parts), **options) as searcher:
            same(ours(searcher, queries), expected)
            np.testing.assert_array_equal(expected[0], shards.search(searcher.encode(queries), K)[0])


def test_written_and_read_back_elsewhere(index: str, queries: np.ndarray, tmp_path: Path) -> None:
    expected, peer = ours(open_index(index), queries), flat(all_codes(index))
    faiss.write_index_binary(peer, str(tmp_path / "peer"))
    shutil.move(index, tmp_path / "moved")
    with open_index(str(tmp_path / "moved")) as searcher:
        same(ours(searcher, queries), expected)
        theirs = faiss.read_index_binary(str(tmp_path / "peer")).search(searcher.encode(queries), K)[0]
        np.testing.assert_array_equal(expected[0], theirs)


def test_nothing_left_and_nothing_asked(index: str, queries: np.ndarray) -> None:
    with open_index(index) as searcher:
        assert searcher.search(queries[:0], k=K).rows.shape == (0, K)
        assert searcher.radius(queries[:0], radius=3).indptr.tolist() == [0]
    delete(index, rows=range(ROWS))
    with open_index(index) as searcher:
        assert searcher.search(queries, k=K).rows.shape == (len(queries), 0)
        assert not searcher.radius(queries, radius=BITS).rows.size
        assert not searcher.histogram(queries).any()
