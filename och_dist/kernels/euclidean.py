"""Exact Euclidean neighbours of a block of rows: the ground truth, and the re-ranking of candidates.

Definition of a distance: the squared difference of each dimension in float64, dimension j added in order to
partial sum j mod 32, the partial sums then folded in halves (16, 8, 4, 2, 1), as ``squared_distance`` does. It is the
same float64 on every machine, and neighbours are in the total order (distance, row).

A float32 matrix product bounds every distance from below, rigorously; only rows whose bound does not
exceed the current k-th distance are measured exactly. What the product rounds therefore decides how much
is measured, never what is returned. Nor does the result depend on the parts in which a corpus is searched, or on
the order in which these are merged.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from och_dist.errors import UsageError
from och_dist.kernels.compiled import njit
from och_dist.kernels.fixed_order import NORM_LIMIT, centre_rows, centred_rows, distance_error, squared_distance
from och_dist.kernels.moments import ROWS_PER_BLOCK, as_float_rows, check_finite, check_rows, float_blocks
from och_dist.kernels.simd import GROUP, LANES, lowest_bit, near_rows

QUERIES_PER_TILE = 512
PAIRS_PER_STEP = 1024
STRIP = 128
"""Rows that meet all queries of a tile before the next rows do: few enough to stay in a core's own cache."""

SPARE = 12
"""Least number of candidates beyond k that are kept before they are cut back to the nearest k."""


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


def exact_distances(queries: np.ndarray, block: np.ndarray, pair_query: np.ndarray, pair_row: np.ndarray) -> np.ndarray:
    """Squared distances (p,) float64 between ``queries[pair_query[i]]`` and ``block[pair_row[i]]``."""
    check_rows(block, queries.shape[1])
    check_rows(queries, queries.shape[1])
    if pair_query.shape != pair_row.shape or pair_query.ndim != 1:
        raise UsageError(f"pairs of shapes {pair_query.shape} and {pair_row.shape}; expected two equal (p,)")
    distances = np.empty(pair_query.shape[0], dtype=np.float64)
    for start in range(0, distances.size, PAIRS_PER_STEP):
        step = slice(start, start + PAIRS_PER_STEP)
        _row_distances(as_float_rows(queries[pair_query[step]]), as_float_rows(block[pair_row[step]]), distances[step])
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
    query may have fewer. Memory beside the result: about 1,024 rows and a tile of 512 queries in float32.
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
    room = min(n, width + max(SPARE, width // 2))
    distances, rows = np.empty((q, room)), np.empty((q, room), dtype=np.int64)
    filled = np.zeros(q, dtype=np.int64)
    if width and q:
        _scan_block(queries, block, first_row, width, (distances, rows, filled, limits.copy()))
    return gather_nearest(np.arange(q) * room, filled, distances.reshape(-1), rows.reshape(-1), width)


def _scan_block(queries: np.ndarray, block: np.ndarray, first_row: int, k: int, found: tuple[np.ndarray, ...]) -> None:
    """Add the rows of ``block`` to what is ``found``: distances and rows (q, room), how many of them are filled (q,),
    and the distances (q,) beyond which no row counts."""
    q, d = queries.shape
    exact_queries = as_float_rows(queries)
    # Near the queries the cancellation in |x|^2 + |q|^2 - 2 x.q is least; one query alone has none at all.
    with np.errstate(over="ignore"):
        centre = np.clip(exact_queries.mean(axis=0, dtype=np.float64), -1e37, 1e37).astype(np.float32)
    near_queries, query_squared = centred_rows(exact_queries, centre)
    # share (|x'|^2 + |q'|^2) - 2 x'.q' - lost is at most |x - q|^2, since |x'||q'| <= (|x'|^2 + |q'|^2) / 2.
    product_error, rounding, lost = distance_error(d)
    share = 1.0 - (product_error / 2.0 + 2.0 * rounding)
    query_halves = np.where(query_squared <= NORM_LIMIT**2 / 4, (share * query_squared - lost) / 2, -np.inf)
    size = min(ROWS_PER_BLOCK, block.shape[0])
    wide = -(-size // GROUP) * GROUP
    centred, row_squared = np.empty((size, d), dtype=np.float32), np.empty(size)
    products, row_halves = np.zeros((min(QUERIES_PER_TILE, q), wide), np.float32), np.zeros(wide, np.float32)
    for place, rows in float_blocks(block, d, size):
        m = rows.shape[0]
        centre_rows(rows, centre, centred[:m], row_squared[:m])
        if not np.isfinite(row_squared[:m]).all():
            check_finite(block, first_row=first_row)
        small = row_squared[:m] <= NORM_LIMIT**2 / 4
        halves = np.where(small, share * row_squared[:m] / 2, -np.inf).astype(np.float32)
        row_halves[:m] = np.nextafter(halves, np.float32(-np.inf))
        for first in range(0, q, QUERIES_PER_TILE):
            tile = slice(first, min(first + QUERIES_PER_TILE, q))
            product = products[: tile.stop - first]
            with np.errstate(over="ignore", invalid="ignore"):
                np.matmul(near_queries[tile], centred[:m].T, out=product[:, :m])
            _push_near(
                *(product, query_halves[tile], row_halves, exact_queries[tile], rows, first_row + place.start, k),
                *(part[tile] for part in found),
            )


@njit(nogil=True)
def _push_near(  # type: ignore[no-untyped-def]
    product, query_halves, row_halves, queries, rows, first_row, k, distances, found, filled, bars
):
    """Measure and keep every row whose lower bound does not exceed the query's bar.

    Half of the bound is query_half + row_half - product. A row is far if product - row_half < query_half - bar / 2, in
    float32: rounding to nearest keeps order, so that no row within the bar is taken for a far one.
    """
    partial = np.empty(LANES, dtype=np.float64)
    room = distances.shape[1]
    for strip in range(0, rows.shape[0], STRIP):
        for q in range(product.shape[0]):
            least = np.float32(query_halves[q] - 0.5 * bars[q])
            for start in range(strip, min(strip + STRIP, rows.shape[0]), GROUP):
                left = near_rows(product, q, start, row_halves, least)
                while left != 0:
                    i = start + lowest_bit(left)
                    left &= left - np.uint64(1)
                    if i >= rows.shape[0] or product[q, i] - row_halves[i] < least:
                        continue
                    distance = squared_distance(queries, q, rows, i, partial)
                    if distance > bars[q]:
                        continue
                    distances[q, filled[q]], found[q, filled[q]] = distance, first_row + i
                    filled[q] += 1
                    if filled[q] == room and room > k:
                        # Rows come in ascending order: one at the k-th distance itself is behind all that are there.
                        bar = keep_nearest(distances[q], found[q], k)
                        bars[q], filled[q] = min(bars[q], np.nextafter(bar, -np.inf)), k
                        least = np.float32(query_halves[q] - 0.5 * bars[q])


@njit(nogil=True)
def _row_distances(left, right, distances):  # type: ignore[no-untyped-def]
    partial = np.empty(LANES, dtype=np.float64)
    for i in range(left.shape[0]):
        distances[i] = squared_distance(left, i, right, i, partial)


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
