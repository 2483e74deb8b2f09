"""What a method learns from: moments, k-means centres and a pool of rows, all of one sample of rows.

There is one training. A pass over all rows, from any source, takes a sample by global row number; the rest looks at the
sample alone, so that training a billion rows costs that pass more than training a million. The same rows, dtype, seed,
``train_rows`` and ``kmeans_rows`` give the same model (with the same BLAS, one thread of it and the same kind of
processor), whether the rows come as a NumPy array, a Dask array or a corpus, and however these are cut into chunks.
With ``kmeans_rows=0`` moments and k-means are those of all rows, and are summed chunk by chunk.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from och_dist import events
from och_dist.kernels import kmeans
from och_dist.kernels.kmeans import ClusterStats, ClusterSums, Round
from och_dist.kernels.moments import Moments, block_moments
from och_dist.methods.base import TrainingData, one_thread
from och_dist.stage import logger
from och_dist.train.rows import Rows, TrainingRows, fold_rows

if TYPE_CHECKING:
    import dask.array as da

TRAIN_ROWS = 10_000
LEARNED_ROWS = 1 << 16
"""Moments of more rows than these do not change what is learned: docs/algorithms.md has the measurement."""

ROWS_PER_CENTRE = 256
KMEANS_ROUNDS = 10
SEEDS_PER_CENTRE = 10
MEMBERS = 2
FAR_ROWS = 16
REPAIRS = 3


@dataclass(frozen=True)
class Centres:
    """``vectors`` (L, d) float32 without empty or duplicate centres; ``stats`` of all rows under them."""

    vectors: np.ndarray
    stats: ClusterStats
    notes: tuple[str, ...]


def training_data(
    source: TrainingRows,
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
        settled = fill_empty_clusters(partial(count_members, rows, seed=seed), moved, min(centres, source.rows))
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
    return fold_rows(moments_block, rows, Moments.merge, shared=pilot, name="sum_moments")


def moments_block(block: np.ndarray, first_row: int, pilot: np.ndarray) -> Moments:
    return block_moments(block, pilot)


def count_members(rows: Rows, centres: np.ndarray, seed: int) -> ClusterStats:
    """Counts, squared inertia, members and worst-fitted rows of given centres (L, d), of rows (n, d)."""
    shared = (centres, kmeans.begin_round(centres), seed)
    return fold_rows(cluster_block, rows, ClusterStats.merge, shared=shared, name="count_members")


def cluster_block(block: np.ndarray, first_row: int, shared: tuple[np.ndarray, Round, int]) -> ClusterStats:
    """Statistics of ``block`` (n, d); shared: centres (L, d), as they are and prepared, and a seed."""
    centres, prepared, seed = shared
    return kmeans.block_clusters(
        block, centres, first_row=first_row, seed=seed, n_members=MEMBERS, n_far=FAR_ROWS, shared=prepared
    )


def _seeds(pool: np.ndarray, centres: int, seed: int) -> np.ndarray:
    """Seeds from a few rows of the pool, from anywhere in it (a corpus may be sorted), or from all if those repeat."""
    few = np.random.default_rng([seed, 2]).permutation(len(pool))[: SEEDS_PER_CENTRE * centres]
    seeds = seed_centres(pool[np.sort(few)], centres, seed)
    return seeds if len(seeds) == min(centres, len(pool)) else seed_centres(pool, centres, seed)


def pool_with_members(pool: np.ndarray, chosen: np.ndarray, centres: Centres) -> tuple[np.ndarray, np.ndarray]:
    """The pool (m, d), the rows ``chosen`` (m,) of the sample, and its labels (m,) int32; members are added for
    clusters that it holds too few of."""
    labels, _ = kmeans.assign(pool, centres.vectors)
    stats = centres.stats
    thin = np.bincount(labels, minlength=len(centres.vectors)) < stats.member_rows.shape[1]
    more = thin[:, None] & (stats.member_rows >= 0) & ~np.isin(stats.member_rows, chosen)
    labels = np.concatenate([labels, np.nonzero(more)[0]])
    return np.concatenate([pool, stats.members[more]]), labels.astype(np.int32)


# Centres: seeds of scikit-learn, Lloyd's rounds of our own, and the repair of empty clusters.
#
# The rounds on Dask arrays are the ``fit`` of Dask-ML's KMeans, whose traps stay here: its own seeding is slow and
# poor, an empty cluster becomes the zero vector without a word, integer input gives integer centres, ``tol`` is
# absolute and ``inertia_`` is not squared.


def seed_centres(rows: np.ndarray, count: int, seed: int) -> np.ndarray:
    """At most ``count`` distinct rows of ``rows`` (m, d), by k-means++."""
    from sklearn.cluster import kmeans_plusplus

    with warnings.catch_warnings():  # fewer distinct rows than asked for: handled by np.unique below
        warnings.simplefilter("ignore")
        # float64: scikit-learn would convert float32 rows anew for each seed. One candidate a seed, not its seven:
        # ten rounds later the clusters are 0.3 % wider, for a sixth of the time.
        seeds, _ = kmeans_plusplus(
            rows.astype(np.float64), min(count, len(rows)), n_local_trials=1, random_state=seed % 2**32
        )
    _, first = np.unique(seeds, axis=0, return_index=True)
    return np.ascontiguousarray(seeds[np.sort(first)], dtype=np.float32)


def lloyd(rows: Rows, seeds: np.ndarray, *, max_iter: int, variance: float) -> np.ndarray:
    """Lloyd's rounds from given seeds; (L, d) float32, an empty cluster where it was.

    The same for a NumPy array and for a Dask array in chunks of ``BLOCK_ROWS`` rows. ``variance`` is the mean one of
    the columns, which says when centres move too little to go on.
    """
    if len(seeds) < 2 or max_iter < 1:
        return seeds
    tol = 1e-4 * variance
    if isinstance(rows, np.ndarray):
        return move_centres(rows, seeds, max_iter=max_iter, tol=tol)[0]
    model = lloyd_kmeans()(n_clusters=len(seeds), init=seeds, max_iter=max_iter, tol=tol).fit(rows)
    return np.ascontiguousarray(model.cluster_centers_, dtype=np.float32)


def move_centres(rows: Rows, centres: np.ndarray, *, max_iter: int, tol: float) -> tuple[np.ndarray, int, float]:
    """Centres (L, d) after at least one round, number of rounds, and the inertia that the last one began with."""
    done, shift = 0, np.inf
    while done < max_iter and shift > tol:
        # Of chunks that are read for it, reading and summing are one task.
        total = fold_rows(sum_chunk, rows, ClusterSums.merge, shared=kmeans.begin_round(centres), name="sum_clusters")
        events.say("inertia", round=done, rounds=max_iter, value=total.inertia / len(rows))
        moved = kmeans.next_centres(total, centres)
        shift = float(((moved.astype(np.float64) - centres) ** 2).sum())
        centres, done = moved, done + 1
    return centres, done, total.inertia


@lru_cache
def lloyd_kmeans() -> type:
    """Dask-ML's KMeans whose ``fit`` is our rounds; a function, because importing Dask-ML takes two seconds."""
    from dask_ml.cluster import KMeans

    class LloydKMeans(KMeans):
        """From given seeds, ``init`` (L, d). Takes rows of any real dtype, in chunks of whole rows, finite ones.

        One task per chunk and round: nearest centres and the sums of each cluster, merged in a tree that the chunks
        alone decide. ``inertia_`` is the sum of squared distances to the centres that the last round began with.
        """

        def fit(self, X: da.Array, y: Any = None) -> Any:
            seeds = np.asarray(self.init, np.float32)
            self.cluster_centers_, self.n_iter_, self.inertia_ = move_centres(
                X, seeds, max_iter=self.max_iter, tol=self.tol
            )
            self.n_features_in_ = X.shape[1]
            self.labels_ = X.map_blocks(
                kmeans.block_labels, kmeans.begin_round(self.cluster_centers_), dtype=np.int32, drop_axis=1
            )
            return self

    return LloydKMeans


def sum_chunk(block: np.ndarray, first_row: int, shared: Round) -> ClusterSums:
    return kmeans.block_sums(block, shared)


def fill_empty_clusters(count: Callable[[np.ndarray], ClusterStats], centres: np.ndarray, asked: int) -> Centres:
    """Move empty (so also duplicate) centres to the worst-fitted rows; ``count`` is a pass over all rows.

    Centres that are missing (the seeds had duplicates) start as duplicates of the first one, hence empty.
    """
    centres = np.concatenate([centres, np.repeat(centres[:1], max(0, asked - len(centres)), axis=0)])
    for _ in range(REPAIRS):
        stats = count(centres)
        empty = np.flatnonzero(stats.counts == 0)
        far = stats.far_vectors[stats.far_distances > 0][: len(empty)]
        far = far[np.sort(np.unique(far, axis=0, return_index=True)[1])] if len(far) else far
        if not len(empty) or not len(far):
            break
        logger.info("moving %d empty centres to the worst-fitted rows", len(far))
        centres = centres.copy()
        centres[empty[: len(far)]] = far
    else:
        stats = count(centres)
    full = stats.counts > 0
    notes: tuple[str, ...] = ()
    if full.sum() < asked:
        notes = (f"n_centres reduced from {asked} to {int(full.sum())}: the rows form no more distinct clusters",)
    kept = {name: getattr(stats, name)[full] for name in ("counts", "member_rows", "member_priority", "members")}
    return Centres(centres[full], replace(stats, **kept), notes)
