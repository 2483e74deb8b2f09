"""Neighbours of several queries as sets, from parts of a corpus: merged, cut to the nearest k, and ranked at the end.

Which rows are the nearest k is decided by the total order (distance, row), so that it never depends on the parts or on
the order in which they come.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from och_dist.errors import UsageError
from och_dist.kernels.compiled import njit


@dataclass(frozen=True, eq=False)
class Candidates:
    """Neighbours of q queries, query i at ``offsets[i]:offsets[i + 1]``; in any order, or ``ranked`` by (distance,
    row).

    ``offsets`` (q + 1,) int64, squared ``distances`` (m,) float64, ``rows`` (m,) int64.
    """

    offsets: np.ndarray
    distances: np.ndarray
    rows: np.ndarray
    ranked: bool = False

    def rank(self) -> Candidates:
        """The same, each query sorted by (distance, row)."""
        if self.ranked:
            return self
        distances, rows = np.empty_like(self.distances), np.empty_like(self.rows)
        for low, high in itertools.pairwise(self.offsets.tolist()):
            order = np.argsort(self.distances[low:high])
            distances[low:high] = self.distances[low:high][order]
            if (distances[low + 1 : high] == distances[low : high - 1]).any():
                order = np.lexsort((self.rows[low:high], self.distances[low:high]))
            rows[low:high] = self.rows[low:high][order]
        return Candidates(self.offsets, distances, rows, ranked=True)

    def of_queries(self, start: int, stop: int) -> Candidates:
        """Those of queries [start, stop), in arrays of their own."""
        low, high = self.offsets[start], self.offsets[stop]
        offsets = self.offsets[start : stop + 1] - low
        return Candidates(offsets, self.distances[low:high].copy(), self.rows[low:high].copy(), self.ranked)

    def dense(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Distances and rows (q, w) of the first w = min(k, candidates of a query), the same for all queries."""
        counts = np.minimum(np.diff(self.offsets), k)
        if counts.size == 0:
            return np.empty((0, k)), np.empty((0, k), dtype=np.int64)
        if counts.min() != counts.max():
            raise UsageError(
                f"queries have between {counts.min()} and {counts.max()} candidates; expected one number: "
                "lower k or search without limits"
            )
        ranked = self.rank()
        if self.offsets[-1] == counts.sum():
            shape = len(counts), int(counts[0])
            return ranked.distances.reshape(shape), ranked.rows.reshape(shape)
        index = self.offsets[:-1, None] + np.arange(counts[0])
        return ranked.distances[index], ranked.rows[index]


def merge_candidates(parts: Sequence[Candidates], k: int) -> Candidates:
    """The nearest k of several results for the same queries and disjoint rows."""
    if not parts:
        raise UsageError("no partial results to merge; expected at least one")
    if len({part.offsets.size for part in parts}) != 1:
        raise UsageError("the partial results are of different numbers of queries; expected one and the same")
    starts = np.sum([part.offsets for part in parts], axis=0)
    distances, rows = np.empty(starts[-1]), np.empty(starts[-1], dtype=np.int64)
    counts = np.zeros(len(starts) - 1, dtype=np.int64)
    for part in parts:
        _append(part.offsets, part.distances, part.rows, starts, counts, distances, rows)
    return gather_nearest(starts[:-1], counts, distances, rows, k)


def gather_nearest(
    starts: np.ndarray, counts: np.ndarray, distances: np.ndarray, rows: np.ndarray, k: int
) -> Candidates:
    """The nearest k of each query, whose ``counts`` (q,) values begin at ``starts`` (q,) of flat arrays, which are
    changed."""
    offsets = np.concatenate(([0], np.cumsum(np.minimum(counts, k))))
    if len(distances) > offsets[-1]:
        kept_distances, kept_rows = np.empty(offsets[-1]), np.empty(offsets[-1], dtype=np.int64)
        _gather(starts, counts, distances, rows, k, offsets, kept_distances, kept_rows)
        distances, rows = kept_distances, kept_rows
    return Candidates(offsets, distances, rows)


@njit(nogil=True)
def keep_nearest(distances, rows, k):  # type: ignore[no-untyped-def]
    """Move the nearest ``k`` of more than k to the front, in the order they have; the distance of the last of them."""
    bar = nth_smallest(distances.copy(), k - 1)
    nearer, ties = 0, 0
    for i in range(distances.shape[0]):
        nearer += distances[i] < bar
        ties += distances[i] == bar
    last_row = np.inf
    if nearer + ties > k:
        tied = np.empty(ties)
        at = 0
        for i in range(distances.shape[0]):
            if distances[i] == bar:
                tied[at] = rows[i]
                at += 1
        last_row = nth_smallest(tied, k - nearer - 1)
    kept = 0
    for i in range(distances.shape[0]):
        if distances[i] < bar or (distances[i] == bar and rows[i] <= last_row):
            distances[kept], rows[kept] = distances[i], rows[i]
            kept += 1
    return bar


@njit(nogil=True)
def nth_smallest(values, n):  # type: ignore[no-untyped-def]
    """The n-th smallest of ``values``, from 0, which are shuffled (Hoare's selection).

    numpy.partition takes four seconds to compile.
    """
    low, high = 0, values.shape[0] - 1
    state = np.uint64(1)
    while low < high:
        # No order of the rows is slow for pivots that jump about; the result does not depend on them.
        state = state * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        pivot = values[low + np.int64(state >> np.uint64(33)) % (high - low + 1)]
        i, j = low, high
        while i <= j:
            while values[i] < pivot:
                i += 1
            while pivot < values[j]:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if n <= j:
            high = j
        elif n >= i:
            low = i
        else:
            break
    return values[n]


@njit(nogil=True)
def _append(part_offsets, part_distances, part_rows, starts, counts, distances, rows):  # type: ignore[no-untyped-def]
    for q in range(counts.shape[0]):
        at = starts[q] + counts[q]
        low, high = part_offsets[q], part_offsets[q + 1]
        for i in range(high - low):
            distances[at + i] = part_distances[low + i]
            rows[at + i] = part_rows[low + i]
        counts[q] += high - low


@njit(nogil=True)
def _gather(starts, counts, distances, rows, k, offsets, kept_distances, kept_rows):  # type: ignore[no-untyped-def]
    for q in range(counts.shape[0]):
        start, stop = starts[q], starts[q] + counts[q]
        if counts[q] > k > 0:
            keep_nearest(distances[start:stop], rows[start:stop], k)
        for i in range(offsets[q + 1] - offsets[q]):
            kept_distances[offsets[q] + i] = distances[start + i]
            kept_rows[offsets[q] + i] = rows[start + i]
