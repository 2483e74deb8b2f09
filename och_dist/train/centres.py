"""k-means centres of a corpus: our seeds, Dask-ML's KMeans with a round of our own, our own count and repair.

This is the only user of Dask-ML, and keeps its traps away from the rest: its own seeding is slow and poor, an
empty cluster becomes the zero vector without a word, integer input gives integer centres, ``tol`` is absolute
and ``inertia_`` is not squared. So: seeds of scikit-learn, one pass of ours per round, every figure from such a pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from och_dist import events
from och_dist.cluster import reduce_rows, reduce_tasks
from och_dist.kernels.clusters import ClusterStats, block_clusters
from och_dist.kernels.lloyd import ClusterSums, Round, begin_round, block_labels, block_sums, next_centres
from och_dist.methods.base import one_thread
from och_dist.stage import Context, logger
from och_dist.store import Corpus, CorpusRef

if TYPE_CHECKING:
    import dask.array as da

SEEDS_PER_CENTRE = 10
REPAIRS = 3
MEMBERS = 2
FAR_ROWS = 16


@dataclass(frozen=True)
class Centres:
    """``vectors`` (L, d) float32 without empty or duplicate centres; ``stats`` of the corpus under them."""

    vectors: np.ndarray
    stats: ClusterStats
    notes: tuple[str, ...]


def seed_centres(rows: np.ndarray, count: int, seed: int) -> np.ndarray:
    """At most ``count`` distinct rows of ``rows`` (m, d), by greedy k-means++."""
    from sklearn.cluster import kmeans_plusplus

    count = min(count, len(rows))
    with one_thread(), warnings.catch_warnings():  # fewer distinct rows than asked for: handled by np.unique below
        warnings.simplefilter("ignore")
        seeds, _ = kmeans_plusplus(rows, count, random_state=seed % 2**32)
    _, first = np.unique(seeds, axis=0, return_index=True)
    return np.ascontiguousarray(seeds[np.sort(first)], dtype=np.float32)


def lloyd(rows: da.Array, seeds: np.ndarray, *, max_iter: int, seed: int, variance: float) -> np.ndarray:
    """Lloyd's rounds from given seeds; (L, d) float32, an empty cluster where it was."""
    if len(seeds) < 2 or max_iter < 1:
        return seeds
    with one_thread():
        model = lloyd_kmeans()(
            n_clusters=len(seeds),
            init=seeds,
            max_iter=max_iter,
            random_state=seed % 2**32,
            tol=1e-4 * variance,
        ).fit(rows)
    return np.ascontiguousarray(model.cluster_centers_, dtype=np.float32)


@lru_cache
def lloyd_kmeans() -> type:
    """Dask-ML's KMeans whose ``fit`` is our round; a function, because importing Dask-ML takes two seconds."""
    from dask_ml.cluster import KMeans

    class LloydKMeans(KMeans):
        """From given seeds, ``init`` (L, d). Takes rows of any real dtype, in chunks of whole rows, finite ones.

        One task per chunk and round: nearest centres and the sums of each cluster, merged in a tree that the chunks
        alone decide. ``inertia_`` is the sum of squared distances to the centres that the last round began with.
        """

        def fit(self, X: da.Array, y: Any = None) -> Any:
            centres = np.asarray(self.init, np.float32)
            self.n_iter_, shift = 0, np.inf
            while self.n_iter_ < self.max_iter and shift > self.tol:
                total = sum_clusters(X, begin_round(centres))
                events.say("inertia", round=self.n_iter_, rounds=self.max_iter, value=total.inertia / len(X))
                moved = next_centres(total, centres)
                shift = float(((moved.astype(np.float64) - centres) ** 2).sum())
                centres, self.n_iter_ = moved, self.n_iter_ + 1
            self.cluster_centers_, self.inertia_, self.n_features_in_ = centres, total.inertia, X.shape[1]
            self.labels_ = X.map_blocks(block_labels, begin_round(centres), dtype=np.int32, drop_axis=1)
            return self

    return LloydKMeans


def sum_clusters(rows: da.Array, shared: Round) -> ClusterSums:
    """One round over all chunks of rows; where these are read for it, reading and summing are one task."""
    return reduce_rows(sum_block, rows, merge_sums, name="sum_clusters", shared=shared)


def sum_block(block: np.ndarray, first_row: int, shared: Round) -> ClusterSums:
    return block_sums(block, shared)


def merge_sums(parts: Sequence[ClusterSums]) -> ClusterSums:
    return reduce(ClusterSums.merge, parts)


@dataclass(frozen=True)
class ClusterPartition:
    corpus: CorpusRef
    start: int
    stop: int
    seed: int


def cluster_partition(task: ClusterPartition, centres: tuple[np.ndarray, Round]) -> ClusterStats:
    """Counts, squared inertia, members and worst-fitted rows of one partition."""
    blocks = task.corpus.open().blocks(task.start, task.stop)
    return merge_clusters(cluster_block(block, centres, first, task.seed) for first, block in blocks)


def cluster_block(block: np.ndarray, centres: tuple[np.ndarray, Round], first_row: int, seed: int) -> ClusterStats:
    """Statistics of ``block`` (n, d), counted from ``first_row``, about centres (L, d), which come prepared."""
    vectors, shared = centres
    return block_clusters(
        block, vectors, first_row=first_row, seed=seed, n_members=MEMBERS, n_far=FAR_ROWS, shared=shared
    )


def merge_clusters(parts: Iterable[ClusterStats]) -> ClusterStats:
    return reduce(ClusterStats.merge, parts)


def count_members(corpus: Corpus, centres: np.ndarray, seed: int, context: Context) -> ClusterStats:
    """One pass over the whole corpus with given centres."""
    tasks = [ClusterPartition(corpus.ref, *rows, seed) for rows in corpus.partitions()]
    return reduce_tasks(
        cluster_partition,
        tasks,
        merge_clusters,
        client=context.client,
        name="cluster_partition",
        shared=(centres, begin_round(centres)),
        advance=context.progress("clusters", corpus.rows),
        weight=lambda task: task.stop - task.start,
    )


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
        notes = (f"n_centres reduced from {asked} to {int(full.sum())}: the corpus has no more distinct clusters",)
    kept = {
        name: getattr(stats, name)[full] for name in ("counts", "sums", "member_rows", "member_priority", "members")
    }
    return Centres(centres[full], replace(stats, **kept), notes)
