"""k-means centres: seeds of scikit-learn, Lloyd's rounds of our own, and the repair of empty clusters.

The rounds on Dask arrays are the ``fit`` of Dask-ML's KMeans. This is its only user, and keeps its traps away from the
rest: its own seeding is slow and poor, an empty cluster becomes the zero vector without a word, integer input gives
integer centres, ``tol`` is absolute and ``inertia_`` is not squared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from och_dist import events
from och_dist.kernels.kmeans import (
    ClusterStats,
    ClusterSums,
    Round,
    begin_round,
    block_labels,
    block_sums,
    next_centres,
)
from och_dist.stage import logger
from och_dist.train.rows import Rows, fold_rows

if TYPE_CHECKING:
    import dask.array as da

REPAIRS = 3


@dataclass(frozen=True)
class Centres:
    """``vectors`` (L, d) float32 without empty or duplicate centres; ``stats`` of all rows under them."""

    vectors: np.ndarray
    stats: ClusterStats
    notes: tuple[str, ...]


def seed_centres(rows: np.ndarray, count: int, seed: int) -> np.ndarray:
    """At most ``count`` distinct rows of ``rows`` (m, d), by greedy k-means++."""
    from sklearn.cluster import kmeans_plusplus

    with warnings.catch_warnings():  # fewer distinct rows than asked for: handled by np.unique below
        warnings.simplefilter("ignore")
        seeds, _ = kmeans_plusplus(rows, min(count, len(rows)), random_state=seed % 2**32)
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
        total = fold_rows(sum_chunk, rows, merge_sums, shared=begin_round(centres), name="sum_clusters")
        events.say("inertia", round=done, rounds=max_iter, value=total.inertia / len(rows))
        moved = next_centres(total, centres)
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
            self.labels_ = X.map_blocks(block_labels, begin_round(self.cluster_centers_), dtype=np.int32, drop_axis=1)
            return self

    return LloydKMeans


def sum_chunk(block: np.ndarray, first_row: int, shared: Round) -> ClusterSums:
    return block_sums(block, shared)


def merge_sums(parts: Sequence[ClusterSums]) -> ClusterSums:
    return reduce(ClusterSums.merge, parts)


def settle_centres(count: Callable[[np.ndarray], ClusterStats], centres: np.ndarray, asked: int) -> Centres:
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
