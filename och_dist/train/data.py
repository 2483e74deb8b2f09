"""What a method learns from: moments, k-means centres and a pool of rows, all of one sample of rows.

There is one training. A pass over all rows, from any source, takes a sample by global row number; the rest looks at the
sample alone, so that training a billion rows costs that pass more than training a million. The same rows, dtype, seed,
``train_rows`` and ``kmeans_rows`` give the same model (with the same BLAS, one thread of it and the same kind of
processor), whether the rows come as a NumPy array, a Dask array or a corpus, and however these are cut into chunks.
With ``kmeans_rows=0`` moments and k-means are those of all rows, and are summed chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np

from och_dist import events
from och_dist.kernels.kmeans import ClusterStats, Round, assign, begin_round, block_clusters
from och_dist.kernels.moments import Moments, block_moments
from och_dist.methods.base import TrainingData, one_thread
from och_dist.stage import logger
from och_dist.train.centres import Centres, lloyd, seed_centres, settle_centres
from och_dist.train.rows import Rows, RowSource, fold_rows

TRAIN_ROWS = 10_000
LEARNED_ROWS = 1 << 16
"""Moments of more rows than these do not change what is learned: docs/algorithms.md has the measurement."""

ROWS_PER_CENTRE = 256
KMEANS_ROUNDS = 10
SEEDS_PER_CENTRE = 10
MEMBERS = 2
FAR_ROWS = 16


def training_data(
    source: RowSource,
    *,
    centres: int,
    seed: int,
    train_rows: int = TRAIN_ROWS,
    kmeans_rows: int | None = None,
    kmeans_rounds: int = KMEANS_ROUNDS,
) -> TrainingData:
    """Moments of the sample, a pool of ``train_rows`` of its rows, and ``centres`` centres; 0 asks for none.

    ``kmeans_rows`` is the size of the sample, at least ``train_rows``; 0 for all rows.
    """
    numbers = draw_rows(source.rows, max(train_rows, sample_size(centres, kmeans_rows)), seed)
    chosen = np.sort(np.random.default_rng([seed, 1]).permutation(len(numbers))[:train_rows])
    with one_thread(), source.dask():
        rows = source.take(numbers)
        pool = np.asarray(rows[chosen]).astype(np.float32)
        if kmeans_rows == 0:
            rows, chosen = source.stored(), numbers[chosen]
        moments = moments_of(rows, pool.mean(axis=0, dtype=np.float64))
        if not centres:
            return TrainingData(source.rows, moments.mean, moments.covariance, pool)
        seeds, variance = _seeds(pool, centres, seed), float(np.trace(moments.covariance)) / source.dim
        moved = lloyd(rows, seeds, max_iter=kmeans_rounds, variance=variance)
        settled = settle_centres(lambda vectors: count_members(rows, vectors, seed), moved, min(centres, source.rows))
        found, notes = len(settled.vectors), settled.notes
        if source.rows < centres:
            notes = (f"n_centres reduced from {centres} to {found}: there are {source.rows} rows",)
        inertia = settled.stats.inertia / len(rows)
        logger.info("%d centres, mean squared distance %.6g", found, inertia)
        events.say("inertia", round=None, value=inertia)
        pool, labels = pool_with_members(pool, chosen, settled)
    return TrainingData(source.rows, moments.mean, moments.covariance, pool, settled.vectors, labels, notes)


def sample_size(centres: int, kmeans_rows: int | None) -> int:
    """Rows that moments and k-means are of, if there are as many; a sample of none where they are of all rows."""
    return max(LEARNED_ROWS, ROWS_PER_CENTRE * centres) if kmeans_rows is None else kmeans_rows


def draw_rows(rows: int, count: int, seed: int) -> np.ndarray:
    """``min(count, rows)`` distinct global row numbers, ascending; a function of these three numbers."""
    if count >= rows:
        return np.arange(rows)
    return np.sort(np.random.default_rng(seed).choice(rows, count, replace=False, shuffle=False))


def moments_of(rows: Rows, pilot: np.ndarray) -> Moments:
    """Moments of rows (n, d) about ``pilot`` (d,), which should be near the mean."""
    return fold_rows(moments_block, rows, merge_moments, shared=pilot, name="sum_moments")


def moments_block(block: np.ndarray, first_row: int, pilot: np.ndarray) -> Moments:
    return block_moments(block, pilot)


def merge_moments(parts: Sequence[Moments]) -> Moments:
    return reduce(Moments.merge, parts)


def count_members(rows: Rows, centres: np.ndarray, seed: int) -> ClusterStats:
    """Counts, squared inertia, members and worst-fitted rows of given centres (L, d), of rows (n, d)."""
    shared = (centres, begin_round(centres), seed)
    return fold_rows(cluster_block, rows, merge_clusters, shared=shared, name="count_members")


def cluster_block(block: np.ndarray, first_row: int, shared: tuple[np.ndarray, Round, int]) -> ClusterStats:
    """Statistics of ``block`` (n, d); shared: centres (L, d), as they are and prepared, and a seed."""
    centres, prepared, seed = shared
    return block_clusters(
        block, centres, first_row=first_row, seed=seed, n_members=MEMBERS, n_far=FAR_ROWS, shared=prepared
    )


def merge_clusters(parts: Sequence[ClusterStats]) -> ClusterStats:
    return reduce(ClusterStats.merge, parts)


def _seeds(pool: np.ndarray, centres: int, seed: int) -> np.ndarray:
    """Seeds from a few rows of the pool, from anywhere in it (a corpus may be sorted), or from all if those repeat."""
    few = np.random.default_rng([seed, 2]).permutation(len(pool))[: SEEDS_PER_CENTRE * centres]
    seeds = seed_centres(pool[np.sort(few)], centres, seed)
    return seeds if len(seeds) == min(centres, len(pool)) else seed_centres(pool, centres, seed)


def pool_with_members(pool: np.ndarray, chosen: np.ndarray, centres: Centres) -> tuple[np.ndarray, np.ndarray]:
    """The pool (m, d), the rows ``chosen`` (m,) of the sample, and its labels (m,) int32; members are added for
    clusters that it holds too few of."""
    labels, _ = assign(pool, centres.vectors)
    stats = centres.stats
    thin = np.bincount(labels, minlength=len(centres.vectors)) < stats.member_rows.shape[1]
    more = thin[:, None] & (stats.member_rows >= 0) & ~np.isin(stats.member_rows, chosen)
    labels = np.concatenate([labels, np.nonzero(more)[0]])
    return np.concatenate([pool, stats.members[more]]), labels.astype(np.int32)
