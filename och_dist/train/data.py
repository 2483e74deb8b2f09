"""What a method learns from: moments of all rows, k-means centres and a pool of rows, from any source of rows.

There is one training. The same rows, dtype, seed, ``train_rows`` and ``kmeans_rows`` give the same model (with the same
BLAS, one thread of it and the same kind of processor), whether the rows come as a NumPy array, a Dask array or a
corpus, and however these are cut into chunks: rows are drawn by global row number, and summed in blocks that global row
numbers decide. Only k-means on all rows (``kmeans_rows=0``) follows the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from och_dist import events
from och_dist.errors import BadInputError, NonFiniteError
from och_dist.kernels.clusters import ClusterStats, assign, block_clusters
from och_dist.kernels.lloyd import Round, begin_round
from och_dist.kernels.moments import MomentSums, nonfinite_rows
from och_dist.methods.base import TrainingData, one_thread
from och_dist.stage import logger
from och_dist.train.centres import Centres, lloyd, seed_centres, settle_centres
from och_dist.train.rows import RowSource

KMEANS_ROWS_PER_CENTRE = 256
TRAIN_ROWS = 10_000
KMEANS_ROUNDS = 10
SEEDS_PER_CENTRE = 10
MEMBERS = 2
FAR_ROWS = 16
LISTED_ROWS = 20
PILOT_ROWS = 1024


def training_data(
    source: RowSource,
    *,
    centres: int,
    seed: int,
    train_rows: int = TRAIN_ROWS,
    kmeans_rows: int | None = None,
    kmeans_rounds: int = KMEANS_ROUNDS,
) -> TrainingData:
    """Moments of all rows, a pool of ``train_rows`` of them, and ``centres`` centres; 0 asks for none.

    ``kmeans_rows`` is the size of the sample that k-means runs on: 256 per centre unless given, at least
    ``train_rows``, 0 for all rows.
    """
    wanted = max(train_rows, KMEANS_ROWS_PER_CENTRE * centres if kmeans_rows is None else kmeans_rows)
    sample = draw_rows(source.rows, wanted, seed)
    places = np.sort(np.random.default_rng([seed, 1]).permutation(len(sample))[:train_rows])
    with one_thread(), source.dask():
        shared = (pilot_of(source.head(PILOT_ROWS)), sample)
        statistics, rows = source.scan(scan_block, merge_statistics, sample, shared=shared)
        statistics.check(source)
        moments = statistics.moments.total()
        mean, covariance, pool = moments.mean, moments.covariance, np.asarray(rows[places])
        if not centres:
            return TrainingData(source.rows, mean, covariance, pool)
        rows = source.stored() if kmeans_rows == 0 else rows
        seeds, variance = _seeds(pool, centres, seed), float(np.trace(covariance)) / source.dim
        moved = lloyd(rows, seeds, max_iter=kmeans_rounds, variance=variance)
        del rows
        settled = settle_centres(lambda vectors: count_members(source, vectors, seed), moved, min(centres, source.rows))
        found, notes = len(settled.vectors), settled.notes
        if source.rows < centres:
            notes = (f"n_centres reduced from {centres} to {found}: there are {source.rows} rows",)
        inertia = settled.stats.inertia / source.rows
        logger.info("%d centres, mean squared distance %.6g", found, inertia)
        events.say("inertia", round=None, value=inertia)
        pool, labels = pool_with_members(pool, sample[places], settled)
    _check_range(np.isfinite(pool).all())
    return TrainingData(source.rows, mean, covariance, pool, settled.vectors, labels, notes)


def draw_rows(rows: int, count: int, seed: int) -> np.ndarray:
    """``min(count, rows)`` distinct global row numbers, ascending; a function of these three numbers."""
    if count >= rows:
        return np.arange(rows)
    return np.sort(np.random.default_rng(seed).choice(rows, count, replace=False, shuffle=False))


def pilot_of(head: np.ndarray) -> np.ndarray:
    """(d,) float64 near the mean: that of the finite rows among the first ones, ``head`` (n, d)."""
    head = head.astype(np.float64)
    finite = head[np.isfinite(head).all(axis=1)]
    return finite.mean(axis=0) if len(finite) else np.zeros(head.shape[1])


@dataclass(frozen=True)
class Statistics:
    """Moments of all rows, the first few that are not finite, how many there are, whether float32 can hold the sample.

    The moments mean nothing where rows are not finite.
    """

    moments: MomentSums
    nonfinite: tuple[int, ...]
    n_nonfinite: int
    in_range: bool

    def merge(self, other: Statistics) -> Statistics:
        rows = tuple(sorted(self.nonfinite + other.nonfinite)[:LISTED_ROWS])
        n_nonfinite, in_range = self.n_nonfinite + other.n_nonfinite, self.in_range and other.in_range
        return Statistics(self.moments.merge(other.moments), rows, n_nonfinite, in_range)

    def check(self, source: RowSource) -> None:
        """Raise if rows are not finite, with their numbers, or too large."""
        if self.n_nonfinite:
            listed = ", ".join(map(str, self.nonfinite)) + (", ..." if self.n_nonfinite > LISTED_ROWS else "")
            raise NonFiniteError(
                f"{self.n_nonfinite} rows of {source.where} hold NaN or infinity: {listed}; {source.remedy}",
                self.nonfinite,
                self.n_nonfinite,
            )
        _check_range(self.in_range)


def merge_statistics(parts: Sequence[Statistics]) -> Statistics:
    return reduce(Statistics.merge, parts)


def _check_range(in_range: bool | np.bool_) -> None:
    if not in_range:
        raise BadInputError("some rows hold values beyond the range of float32; rescale them")


def scan_block(
    block: np.ndarray, first_row: int, shared: tuple[np.ndarray, np.ndarray]
) -> tuple[Statistics, np.ndarray]:
    """Statistics of ``block`` (n, d), and its rows among a sample, as float32; shared: a pilot and the sample."""
    pilot, sample = shared
    bad, moments = nonfinite_rows(block), MomentSums(pilot)
    chosen = sample[slice(*np.searchsorted(sample, (first_row, first_row + len(block))))] - first_row
    with np.errstate(over="ignore", invalid="ignore"):
        moments.add(block, first_row)
        rows = block[chosen].astype(np.float32)
    listed = tuple(int(row) + first_row for row in bad[:LISTED_ROWS])
    return Statistics(moments, listed, len(bad), bool(np.isfinite(rows).all())), rows


def count_members(source: RowSource, centres: np.ndarray, seed: int) -> ClusterStats:
    """Counts, squared inertia, members and worst-fitted rows of given centres (L, d), of all rows."""
    shared = (centres, begin_round(centres), seed)
    return source.reduce(cluster_block, merge_clusters, shared=shared, name="clusters")


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


def pool_with_members(pool: np.ndarray, numbers: np.ndarray, centres: Centres) -> tuple[np.ndarray, np.ndarray]:
    """The pool (m, d), of the rows ``numbers`` (m,), and its labels (m,) int32; members are added for clusters that it
    holds too few of."""
    labels, _ = assign(pool, centres.vectors)
    stats = centres.stats
    thin = np.bincount(labels, minlength=len(centres.vectors)) < stats.member_rows.shape[1]
    chosen = thin[:, None] & (stats.member_rows >= 0) & ~np.isin(stats.member_rows, numbers)
    labels = np.concatenate([labels, np.nonzero(chosen)[0]])
    return np.concatenate([pool, stats.members[chosen]]), labels.astype(np.int32)
