"""Indexes of any size and shape, searched in every way, against all distances and against FAISS."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist import LSH
from och_dist.kernels.packing import unpack_bits
from och_dist.search.bucket_tables import build_tables
from och_dist.store.arrays import write_chunk
from och_dist.store.index import IndexSegment, Job, model_objects, next_version
from och_dist.store.manifest import commit_version
from och_dist.store.model import save_model
from och_dist.store.objects import open_objects
from och_dist.upkeep.compaction import compact
from och_dist.upkeep.deletion import delete
from tests.support.searching import open_within

DIM = 8
WAYS: dict[str, dict[str, Any]] = {
    "held": {"threads": 1},
    "held by two threads": {"threads": 2},
    "read each time": {"threads": 1, "resident": False},
    "bucket tables": {"threads": 1, "method": "multi-index"},
}


@dataclass(frozen=True)
class World:
    """A drawn index: vectors of its rows and queries, how it is cut and what is deleted."""

    bits: int
    rows: np.ndarray
    queries: np.ndarray
    chunk_rows: int
    deleted: np.ndarray
    compacted: bool

    @property
    def live(self) -> np.ndarray:
        return ~np.isin(np.arange(len(self.rows)), self.deleted)

    @contextmanager
    def index(self) -> Iterator[str]:
        """The index, through the store's own functions: nothing of an encoder stands between it and the codes."""
        folder = Path(tempfile.mkdtemp())
        try:
            hasher = LSH(self.bits, random_state=0).fit(np.random.default_rng(0).normal(size=(50, DIM)))
            objects = open_objects(str(folder / "index"))
            address = save_model(model_objects(objects.url), hasher, {})
            job = Job(address, self.bits, 0, len(self.rows), self.chunk_rows, "drawn")
            job.begin(objects)
            codes = hasher.encode_block(self.rows)
            crcs = [
                write_chunk(objects, f"{job.folder}/codes", number, codes[slice(*job.spec.bounds(number))]).crc
                for number in range(job.spec.n_chunks)
            ]
            segment = IndexSegment(job, np.array(crcs, "<u4"))
            corpus = {"url": "drawn", "version": 1, "fingerprint": "none"}
            commit_version(objects, next_version(None, (segment,), corpus, objects.url).to_json())
            if len(self.deleted):
                delete(objects.url, rows=self.deleted)
            if self.compacted and self.live.any():
                compact(objects.url, chunk_rows=self.chunk_rows)
            yield objects.url
        finally:
            shutil.rmtree(folder)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    bits = draw(st.integers(1, 512) | st.sampled_from([8, 31, 32, 33, 63, 64, 65, 128, 256, 512]))
    n = draw(st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 200]))
    distinct = draw(st.sampled_from([1, 3, n]))  # all codes equal, many duplicates, few
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    rows = rng.normal(size=(distinct, DIM))[rng.integers(0, distinct, n)].astype(np.float32)
    asked = draw(st.integers(1, 5))
    queries = np.where(rng.random((asked, 1)) < 0.5, rows[rng.integers(0, n, asked)], rng.normal(size=(asked, DIM)))
    gone = np.flatnonzero(rng.random(n) < draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])))
    chunk_rows = draw(st.sampled_from([n, 50, 64, 65]))
    return World(bits, rows, queries.astype(np.float32), min(chunk_rows, n), gone, draw(st.booleans()))


def choices(n: int) -> st.SearchStrategy[dict[str, Any]]:
    """Rows to choose, as they may be given."""
    some = st.lists(st.integers(0, n - 1), max_size=n)
    masks = st.integers(0, 99).map(lambda seed: np.random.default_rng(seed).random(n) < 0.5)
    ranges = st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda ends: range(min(ends), max(ends)))
    given_rows = st.none() | some | masks | ranges
    return st.fixed_dictionaries({"only": given_rows, "without": given_rows})


def chosen_rows(world: World, choice: dict[str, Any]) -> np.ndarray:
    """The same by the dumbest means."""
    numbers, live = np.arange(len(world.rows)), world.live
    for name, rows in choice.items():
        if rows is None:
            continue
        array = np.asarray(rows)
        inside = array if array.dtype == bool else np.isin(numbers, array)
        live = live & (inside if name == "only" else ~inside)
    return np.flatnonzero(live)


def by_distance_and_row(distances: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(distances[:, rows], axis=1, kind="stable")[:, :k]
    return np.take_along_axis(distances[:, rows], order, 1), rows[order]


@settings(deadline=None, max_examples=40)
@given(data=st.data(), world=worlds(), k=st.sampled_from([1, 3, 64, 500]), pairs=st.sampled_from([1, 1 << 36]))
def test_every_way_against_all_distances_and_faiss(data: st.DataObject, world: World, k: int, pairs: int) -> None:
    faiss = pytest.importorskip("faiss")
    choice = data.draw(choices(len(world.rows)))
    radius = data.draw(st.integers(0, world.bits + 3))
    way = data.draw(st.sampled_from(sorted(WAYS)))
    rows = chosen_rows(world, choice)
    with world.index() as index:
        if way == "bucket tables":
            if not world.live.any():
                return
            build_tables(index, least_rows=1, partition_rows=64)
        with open_within(index, **WAYS[way], most_pairs=pairs, least_queries=2) as searcher:
            hasher = searcher.model.hasher
            stored, asked = (unpack_bits(hasher.encode_block(x), world.bits) for x in (world.rows, world.queries))
            differ = stored[None] != asked[:, None]
            hamming = differ.sum(axis=2)
            _, weights, scales = hasher.query_weights(world.queries)
            rankings = {
                "hamming": hamming,
                "spherical": 10 * hamming / (10 * (stored[None] & asked[:, None]).sum(axis=2) + 1),
                "asymmetric": (differ * weights[:, None]).sum(axis=2) * scales[:, None],
            }
            for ranking, distances in rankings.items():
                found = searcher.search(world.queries, k=k, ranking=ranking, **choice)
                expected = by_distance_and_row(distances, rows, k)
                np.testing.assert_array_equal(found.rows, expected[1])
                np.testing.assert_array_equal(found.distances, expected[0])
            again = searcher.search(world.queries, k=1, rerank=k, rerank_by="asymmetric", **choice)
            within = searcher.radius(world.queries, radius=radius, **choice)
            counts = searcher.histogram(world.queries, **choice)
    _check_the_rest(rows, hamming, rankings["asymmetric"], k, radius, again, within, counts)
    if len(rows):
        peer = faiss.IndexBinaryFlat(8 * -(-world.bits // 8))
        peer.add(hasher.encode_block(world.rows[rows]))
        theirs, _ = peer.search(hasher.encode_block(world.queries), min(k, len(rows)))
        np.testing.assert_array_equal(by_distance_and_row(hamming, rows, k)[0], theirs)
        limits, _, places = peer.range_search(hasher.encode_block(world.queries), radius + 1)  # theirs is exclusive
        np.testing.assert_array_equal(within.indptr, limits)
        np.testing.assert_array_equal(np.sort(within.rows), np.sort(rows[places]))


def _check_the_rest(
    rows: np.ndarray,
    hamming: np.ndarray,
    asymmetric: np.ndarray,
    k: int,
    radius: int,
    again: Any,
    within: Any,
    counts: Any,
) -> None:
    """Ranking anew, radius and histogram, query by query."""
    candidates = by_distance_and_row(hamming, rows, k)[1]
    for query in range(len(hamming)):
        distances, ordered = by_distance_and_row(hamming[query : query + 1], rows, len(rows))
        place = slice(within.indptr[query], within.indptr[query + 1])
        np.testing.assert_array_equal(within.rows[place], ordered[distances <= radius])
        np.testing.assert_array_equal(within.distances[place], distances[distances <= radius])
        np.testing.assert_array_equal(counts[query], np.bincount(distances[0], minlength=counts.shape[1]))
        best = by_distance_and_row(asymmetric[query : query + 1], np.sort(candidates[query]), 1)
        np.testing.assert_array_equal(again.rows[query], best[1][0])
