"""Exact Euclidean distances for the candidates of a Hamming search: only the corpus chunks that hold one are read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from och_dist.cluster import reduce_tasks
from och_dist.kernels.euclidean import exact_distances
from och_dist.search.filters import join_places
from och_dist.stage import Context
from och_dist.store import Corpus, CorpusRef

MAX_PAIRS = 1 << 18
"""Pairs of query and candidate that are measured at a time: they travel to the workers inside the tasks."""


@dataclass(frozen=True, eq=False)
class MeasurePairs:
    """Measure query ``queries[i]`` against global row ``rows[i]``, ascending; ``places[i]`` is where that belongs."""

    corpus: CorpusRef
    rows: np.ndarray
    queries: np.ndarray
    places: np.ndarray


def measure_pairs(task: MeasurePairs, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(places, squared distances) of pairs, reading each chunk that is needed once."""
    squared, wanted = np.empty(len(task.rows)), np.unique(task.rows)
    for here, block in task.corpus.open().vectors_at(wanted):
        rows = wanted[here]
        first, last = np.searchsorted(task.rows, (rows[0], rows[-1] + 1))
        which = np.searchsorted(rows, task.rows[first:last])
        squared[first:last] = exact_distances(vectors, block, task.queries[first:last], which)
    return task.places, squared


def euclidean_order(
    corpus: Corpus, vectors: np.ndarray, rows: np.ndarray, k: int, context: Context
) -> tuple[np.ndarray, np.ndarray]:
    """Distances and rows (q, min(k, m)) of the nearest of the candidate ``rows`` (q, m), by (distance, row)."""
    squared = np.empty(rows.shape)
    step = max(1, MAX_PAIRS // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        squared[part] = _squared(corpus, vectors[part], rows[part], context)
    return first_of(np.sqrt(squared), rows, k)


def _squared(corpus: Corpus, vectors: np.ndarray, rows: np.ndarray, context: Context) -> np.ndarray:
    if not rows.size:
        return np.empty(rows.shape)
    flat = rows.reshape(-1)
    order = np.argsort(flat, kind="stable")
    queries = np.repeat(np.arange(len(rows)), rows.shape[1])[order]
    cuts = np.searchsorted(flat[order], [start for start, _ in corpus.partitions()][1:])
    tasks = [
        MeasurePairs(corpus.ref, flat[places], asked, places)
        for places, asked in zip(np.split(order, cuts), np.split(queries, cuts), strict=True)
        if len(places)
    ]
    places, measured = reduce_tasks(
        measure_pairs, tasks, join_places, client=context.client, name="measure_pairs", shared=vectors
    )
    squared = np.empty(flat.shape)
    squared[places] = measured
    return squared.reshape(rows.shape)


def first_of(distances: np.ndarray, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The first k of candidates (q, m) in the order (distance, row)."""
    order = np.lexsort((rows, distances), axis=1)[:, :k]
    return np.take_along_axis(distances, order, 1), np.take_along_axis(rows, order, 1)
