"""Exact Euclidean neighbours of a block of rows: the ground truth, and the re-ranking of candidates.

Definition of a distance: the squared difference of each dimension in float64, dimension j added in order to
partial sum j mod 32, the partial sums then folded in halves (16, 8, 4, 2, 1). It is the same float64 on every
machine, and neighbours are in the total order (distance, row).

A float32 matrix product bounds every distance from below, rigorously; only rows whose bound does not
exceed the current k-th distance are measured exactly. What the product rounds therefore decides how much
is measured, never what is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numba import njit

from och_dist.errors import UsageError
from och_dist.kernels.moments import as_float_rows, check_finite, check_rows
from och_dist.kernels.project import LANES, ROUNDOFF, SAFETY, UNDERFLOW, centre_rows

ROWS_PER_BLOCK = 2048
QUERIES_PER_TILE = 512
PAIRS_PER_STEP = 1024

NORM_LIMIT = 1e18
"""Rows and queries farther than this from the centre could overflow float32: they are always measured
exactly."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Neighbours of q queries, query i at ``offsets[i]:offsets[i + 1]`` and sorted by (distance, row).

    ``offsets`` (q + 1,) int64, squared ``distances`` (m,) float64, ``rows`` (m,) int64.
    """

    offsets: np.ndarray
    distances: np.ndarray
    rows: np.ndarray

    def dense(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Distances and rows (q, w) of the first w = min(k, candidates of a query), the same for all
        queries."""
        counts = np.minimum(np.diff(self.offsets), k)
        if counts.size == 0:
            return np.empty((0, k)), np.empty((0, k), dtype=np.int64)
        if counts.min() != counts.max():
            raise UsageError(
                f"queries have between {counts.min()} and {counts.max()} candidates; expected one number: "
                "lower k or search without limits"
            )
        index = self.offsets[:-1, None] + np.arange(counts[0])
        return self.distances[index], self.rows[index]


def exact_distances(queries: np.ndarray, block: np.ndarray, pair_query: np.ndarray, pair_row: np.ndarray) -> np.ndarray:
    """Squared distances (p,) float64 between ``queries[pair_query[i]]`` and ``block[pair_row[i]]``."""
    check_rows(block, queries.shape[1])
    check_rows(queries, queries.shape[1])
    if pair_query.shape != pair_row.shape or pair_query.ndim != 1:
        raise UsageError(f"pairs of shapes {pair_query.shape} and {pair_row.shape}; expected two equal (p,)")
    distances = np.empty(pair_query.shape[0], dtype=np.float64)
    for start in range(0, distances.size, PAIRS_PER_STEP):
        step = slice(start, start + PAIRS_PER_STEP)
        left = queries[pair_query[step]].astype(np.float64)
        _row_distances(left, as_float_rows(block[pair_row[step]]), distances[step])
    return distances


def euclidean_top_k(
    queries: np.ndarray,
    block: np.ndarray,
    k: int,
    *,
    first_row: int = 0,
    limit: np.ndarray | None = None,
) -> Candidates:
    """The k nearest rows of ``block`` (n, d) to each of ``queries`` (q, d), rows counted from ``first_row``.

    With ``limit`` (q,) only rows at squared distances up to and including it are returned, so that a
    query may have fewer. Memory beside the result: about 2,048 rows and a tile of 512 queries in float32.
    """
    if k < 0:
        raise UsageError(f"k={k}; expected a number of neighbours of at least 0")
    check_rows(queries, queries.shape[1])
    check_rows(block, queries.shape[1])
    check_finite(queries, what="queries")
    q, n = queries.shape[0], block.shape[0]
    limits = np.full(q, np.inf) if limit is None else np.ascontiguousarray(limit, dtype=np.float64)
    if limits.shape != (q,) or np.isnan(limits).any():
        raise UsageError(f"limits of shape {limits.shape}; expected one number for each of {q} queries")
    width = min(int(k), n)
    distances, rows = np.empty((q, width)), np.empty((q, width), dtype=np.int64)
    filled = np.zeros(q, dtype=np.int64)
    if width and q:
        _scan_block(queries, block, first_row, limits, (distances, rows, filled))
    _sort_heaps(distances, rows, filled)
    offsets = np.concatenate(([0], np.cumsum(filled)))
    kept = np.arange(width) < filled[:, None]
    return Candidates(offsets, distances[kept], rows[kept])


def merge_candidates(parts: Sequence[Candidates], k: int) -> Candidates:
    """The first k of several results for the same queries and disjoint rows."""
    if not parts:
        raise UsageError("no partial results to merge; expected at least one")
    if len({part.offsets.size for part in parts}) != 1:
        raise UsageError("the partial results are of different numbers of queries; expected one and the same")

    def merge(left: Candidates, right: Candidates) -> Candidates:
        counts = np.minimum(np.diff(left.offsets) + np.diff(right.offsets), k)
        offsets = np.concatenate(([0], np.cumsum(counts)))
        distances, rows = np.empty(offsets[-1]), np.empty(offsets[-1], dtype=np.int64)
        _merge_sorted(
            *(left.offsets, left.distances, left.rows),
            *(right.offsets, right.distances, right.rows),
            *(offsets, distances, rows),
        )
        return Candidates(offsets, distances, rows)

    none = Candidates(np.zeros_like(parts[0].offsets), np.empty(0), np.empty(0, dtype=np.int64))
    return reduce(merge, parts, none)


def _scan_block(
    queries: np.ndarray,
    block: np.ndarray,
    first_row: int,
    limits: np.ndarray,
    heaps: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    """Push the rows of ``block`` into the ``heaps`` (distances, rows, filled) of all queries."""
    q, d = queries.shape
    exact_queries = queries.astype(np.float64)
    # Near the queries the cancellation in |x|^2 + |q|^2 - 2 x.q is least; one query alone has none at all.
    with np.errstate(over="ignore"):
        centre = np.clip(exact_queries.mean(axis=0), -1e37, 1e37).astype(np.float32)
    near_queries, query_squared = np.empty((q, d), dtype=np.float32), np.empty(q)
    centre_rows(as_float_rows(queries), centre, near_queries, query_squared)
    size = min(ROWS_PER_BLOCK, block.shape[0])
    near_rows, row_squared = np.empty((size, d), dtype=np.float32), np.empty(size)
    products = np.empty((min(QUERIES_PER_TILE, q), size), dtype=np.float32)
    for start in range(0, block.shape[0], size):
        rows = as_float_rows(block[start : start + size])
        m = rows.shape[0]
        centre_rows(rows, centre, near_rows[:m], row_squared[:m])
        if not np.isfinite(row_squared[:m]).all():
            check_finite(block, first_row=first_row)
        for first in range(0, q, QUERIES_PER_TILE):
            tile = slice(first, min(first + QUERIES_PER_TILE, q))
            product = products[: tile.stop - first, :m]
            with np.errstate(over="ignore", invalid="ignore"):
                np.matmul(near_queries[tile], near_rows[:m].T, out=product)
            _push_near(
                *(product, np.sqrt(query_squared[tile]), np.sqrt(row_squared[:m]), _slack(d)),
                *(exact_queries[tile], rows, first_row + start, limits[tile]),
                *(heap[tile] for heap in heaps),
            )


def _slack(d: int) -> tuple[float, float, float]:
    """Error of |x'|^2 + |q'|^2 - 2 x'.q' as a squared distance of x and q: a |x'||q'| + b (|x'| + |q'|)^2
    + c.

    a: the float32 product, for any order of summation. b: rounding x - centre to float32 moves x' and q'
    by at most ROUNDOFF of their norms, their distance s by twice that times s; c: products lost to
    underflow.
    """
    gamma = d * ROUNDOFF / (1.0 - d * ROUNDOFF) if d * ROUNDOFF < 0.5 else np.inf
    return SAFETY * 2.0 * gamma, SAFETY * 3.0 * ROUNDOFF, SAFETY * 2.0 * d * UNDERFLOW


@njit(nogil=True)
def squared_distance(queries, q, rows, i, partial):  # type: ignore[no-untyped-def]
    """The distance as the module defines it; ``partial`` (LANES,) float64 is scratch."""
    d = rows.shape[1]
    whole = d - d % LANES
    for lane in range(LANES):
        partial[lane] = 0.0
    for j in range(0, whole, LANES):
        for lane in range(LANES):
            difference = np.float64(rows[i, j + lane]) - queries[q, j + lane]
            partial[lane] += difference * difference
    for j in range(whole, d):
        difference = np.float64(rows[i, j]) - queries[q, j]
        partial[j - whole] += difference * difference
    half = LANES // 2
    while half > 0:
        for lane in range(half):
            partial[lane] += partial[lane + half]
        half //= 2
    return partial[0]


@njit(nogil=True)
def _row_distances(left, right, distances):  # type: ignore[no-untyped-def]
    partial = np.empty(LANES, dtype=np.float64)
    for i in range(left.shape[0]):
        distances[i] = squared_distance(left, i, right, i, partial)


@njit(nogil=True)
def _push_near(  # type: ignore[no-untyped-def]
    product, query_norms, row_norms, slack, queries, rows, first_row, limits, distances, heap_rows, filled
):
    """Measure and push every row whose lower bound does not exceed the query's k-th distance or limit."""
    partial = np.empty(LANES, dtype=np.float64)
    k = distances.shape[1]
    for q in range(product.shape[0]):
        bar = distances[q, 0] if filled[q] == k else np.inf
        for i in range(product.shape[1]):
            query_norm, row_norm = query_norms[q], row_norms[i]
            reach = query_norm + row_norm
            both = query_norm * row_norm
            lower = reach * reach - 2.0 * both - 2.0 * np.float64(product[q, i])
            lower -= slack[0] * both + slack[1] * reach * reach + slack[2]
            if reach <= NORM_LIMIT and (lower > bar or lower > limits[q]):
                continue
            distance = squared_distance(queries, q, rows, i, partial)
            # Rows come in ascending order, so a row at the k-th distance itself is behind all that are there.
            if distance > limits[q] or (filled[q] == k and distance >= bar):
                continue
            filled[q] = _push(distances[q], heap_rows[q], filled[q], distance, first_row + i)
            bar = distances[q, 0] if filled[q] == k else np.inf


@njit(nogil=True)
def _push(distances, rows, filled, distance, row):  # type: ignore[no-untyped-def]
    """Add to a heap with the largest (distance, row) on top, in place of the top if it is full; the new
    size."""
    if filled == distances.shape[0]:
        distances[0] = distance
        rows[0] = row
        _sift_down(distances, rows, 0, filled)
        return filled
    at = filled
    while at > 0:
        parent = (at - 1) // 2
        if distances[parent] > distance:  # at an equal distance the new row is the larger one
            break
        distances[at] = distances[parent]
        rows[at] = rows[parent]
        at = parent
    distances[at] = distance
    rows[at] = row
    return filled + 1


@njit(nogil=True)
def _sift_down(distances, rows, at, size):  # type: ignore[no-untyped-def]
    distance, row = distances[at], rows[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            distances[other] > distances[child] or (distances[other] == distances[child] and rows[other] > rows[child])
        ):
            child = other
        if distances[child] < distance or (distances[child] == distance and rows[child] < row):
            break
        distances[at] = distances[child]
        rows[at] = rows[child]
        at = child
    distances[at] = distance
    rows[at] = row


@njit(nogil=True)
def _sort_heaps(distances, rows, filled):  # type: ignore[no-untyped-def]
    """Turn every heap into its ascending order by (distance, row), in place."""
    for q in range(distances.shape[0]):
        for last in range(filled[q] - 1, 0, -1):
            distances[q, 0], distances[q, last] = distances[q, last], distances[q, 0]
            rows[q, 0], rows[q, last] = rows[q, last], rows[q, 0]
            _sift_down(distances[q], rows[q], 0, last)


@njit(nogil=True)
def _merge_sorted(  # type: ignore[no-untyped-def]
    left_offsets,
    left_distances,
    left_rows,
    right_offsets,
    right_distances,
    right_rows,
    offsets,
    distances,
    rows,
):
    for q in range(offsets.shape[0] - 1):
        a, a_stop = left_offsets[q], left_offsets[q + 1]
        b, b_stop = right_offsets[q], right_offsets[q + 1]
        for c in range(offsets[q], offsets[q + 1]):
            take_left = b == b_stop
            if a < a_stop and b < b_stop:
                x, y = left_distances[a], right_distances[b]
                take_left = x < y or (x == y and left_rows[a] < right_rows[b])
            if take_left:
                distances[c], rows[c] = left_distances[a], left_rows[a]
                a += 1
            else:
                distances[c], rows[c] = right_distances[b], right_rows[b]
                b += 1
