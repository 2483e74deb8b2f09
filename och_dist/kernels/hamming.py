"""Hamming distances between packed codes: nearest rows, histograms, single pairs.

All functions take the uint64 words of ``packing.code_words``. Neighbours are exact and in the total order
(distance, row).

The scan looks at 64 codes at a time and computes only their smallest distance, a loop without stores that
compiles to vector population counts; a group is looked at again, code by code, only where that minimum
beats the current k-th distance. Rows come in ascending order, so a row at the k-th distance itself never
enters, and a histogram of the distances kept is all that is needed to know the k-th.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from och_dist.errors import BadInputError, UsageError

GROUP = 64
BLOCK_WORDS = 16_384
"""Words of codes scanned for one query before the next: 128 KB, which stays in the second-level cache."""

QUERY_TILE = 64
"""Queries that share one pass over the codes: bounds the candidate buffers, whatever the number of
queries."""


def hamming_top_k(
    query_words: np.ndarray,
    code_words: np.ndarray,
    k: int,
    *,
    n_bits: int,
    first_row: int = 0,
    skip: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Nearest rows of ``code_words`` (n, w) for each of ``query_words`` (q, w).

    Returns distances (q, m) int32 and rows (q, m) int64, counted from ``first_row``, sorted by (distance,
    row), with m = min(k, live rows). ``skip`` (n,) bool marks rows that are not considered.
    """
    _check_words(query_words, code_words, n_bits)
    if k < 0:
        raise UsageError(f"k={k}; expected a number of neighbours of at least 0")
    live = None
    if skip is not None:
        if skip.shape != code_words.shape[:1]:
            raise UsageError(f"skip has shape {skip.shape}; expected one flag for each of {len(code_words)} codes")
        live = np.flatnonzero(~skip)
        code_words = code_words[live]
    codes, queries = np.ascontiguousarray(code_words), np.ascontiguousarray(query_words)
    width = min(int(k), codes.shape[0])
    distances = np.empty((queries.shape[0], width), dtype=np.int32)
    rows = np.empty((queries.shape[0], width), dtype=np.int64)
    if width:
        for start in range(0, queries.shape[0], QUERY_TILE):
            tile = slice(start, start + QUERY_TILE)
            _scan(queries[tile], codes, width, distances[tile], rows[tile])
    rows = rows if live is None else live[rows]
    return distances, rows + first_row


def merge_top_k(parts: Sequence[tuple[np.ndarray, np.ndarray]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """The first k of several results, each (distances (q, k_i), rows (q, k_i)) sorted by (distance, row).

    The width is min(k, sum of k_i). Row numbers of different parts must be disjoint.
    """
    if not parts:
        raise UsageError("no partial results to merge; expected at least one")
    if len({distances.shape[0] for distances, _ in parts}) != 1:
        raise UsageError("the partial results are of different numbers of queries; expected one and the same")

    def merge(left: tuple[np.ndarray, np.ndarray], right: tuple[np.ndarray, np.ndarray]) -> Any:
        return _merge_two(*map(np.ascontiguousarray, (*left, *right)), min(k, left[0].shape[1] + right[0].shape[1]))

    distances, rows = reduce(merge, parts)
    return distances[:, :k], rows[:, :k]


def hamming_histogram(query_words: np.ndarray, code_words: np.ndarray, n_bits: int) -> np.ndarray:
    """(q, n_bits + 1) int64: how many codes lie at each distance from each query."""
    _check_words(query_words, code_words, n_bits)
    counts = _histogram(np.ascontiguousarray(query_words), np.ascontiguousarray(code_words))
    if counts[:, n_bits + 1 :].any():
        raise BadInputError(
            f"some distances exceed {n_bits}; expected codes of {n_bits} bits, padded with zeros: "
            "encode both with one model"
        )
    return counts[:, : n_bits + 1].copy()


def hamming_pairs(
    query_words: np.ndarray, code_words: np.ndarray, pair_query: np.ndarray, pair_row: np.ndarray
) -> np.ndarray:
    """Distances (p,) int32 between ``query_words[pair_query[i]]`` and ``code_words[pair_row[i]]``."""
    _check_words(query_words, code_words, 64 * query_words.shape[1])
    if pair_query.shape != pair_row.shape or pair_query.ndim != 1:
        raise UsageError(f"pairs of shapes {pair_query.shape} and {pair_row.shape}; expected two equal (p,)")
    for index, size in ((pair_query, len(query_words)), (pair_row, len(code_words))):
        if index.size and not (index.min() >= 0 and index.max() < size):
            raise UsageError(f"pair numbers {index.min()} to {index.max()}; expected 0 to {size - 1}")
    return _pairs(
        np.ascontiguousarray(query_words),
        np.ascontiguousarray(code_words),
        np.ascontiguousarray(pair_query, dtype=np.int64),
        np.ascontiguousarray(pair_row, dtype=np.int64),
    )


def _check_words(query_words: np.ndarray, code_words: np.ndarray, n_bits: int) -> None:
    for words in (query_words, code_words):
        if words.ndim != 2 or words.dtype != np.uint64:
            raise BadInputError(f"words are {words.dtype} {words.shape}; expected uint64 (rows, words): pack them")
    width = -(-n_bits // 64)
    if n_bits < 1 or query_words.shape[1] != width or code_words.shape[1] != width:
        raise BadInputError(
            f"queries have {query_words.shape[1]} words and codes {code_words.shape[1]}; expected {width} "
            f"for {n_bits} bits: encode both with one model"
        )


@intrinsic
def popcount(typingctx, value):  # type: ignore[no-untyped-def]
    """Set bits of a uint64, through LLVM's ctpop: one instruction, vectorised where the processor can."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


@njit(nogil=True)
def _fill_groups(codes, groups):  # type: ignore[no-untyped-def]
    """Lay ``codes`` (rows, w) out as ``groups`` (ceil(rows / GROUP), w, GROUP): word by word within a
    group."""
    for i in range(codes.shape[0]):
        for j in range(codes.shape[1]):
            groups[i // GROUP, j, i % GROUP] = codes[i, j]


@njit(nogil=True)
def _group_distances(query, groups, g, totals):  # type: ignore[no-untyped-def]
    """Fill ``totals`` (GROUP,) with the distances of ``query`` (w,) to group g, two words at a time."""
    w = groups.shape[1]
    first = w % 2
    for i in range(GROUP):
        totals[i] = popcount(query[0] ^ groups[g, 0, i]) if first else np.uint64(0)
    for j in range(first, w, 2):
        q0, q1 = query[j], query[j + 1]
        for i in range(GROUP):
            totals[i] += popcount(q0 ^ groups[g, j, i]) + popcount(q1 ^ groups[g, j + 1, i])


@njit(nogil=True)
def _group_minima(query, groups, totals, minima):  # type: ignore[no-untyped-def]
    """Fill ``minima`` (m,) with the smallest distance of ``query`` (w,) in each of ``groups`` (m, w, GROUP).

    ``totals`` (GROUP,) is scratch. One, two and four words (64, 128, 256 bits) have loops of their own,
    without stores and several times as fast as the general one.
    """
    n_groups, w, _ = groups.shape
    for g in range(n_groups):
        best = np.uint64(1 << 32)
        if w == 1:
            q0 = query[0]
            for i in range(GROUP):
                best = min(best, popcount(q0 ^ groups[g, 0, i]))
        elif w == 2:
            q0, q1 = query[0], query[1]
            for i in range(GROUP):
                best = min(best, popcount(q0 ^ groups[g, 0, i]) + popcount(q1 ^ groups[g, 1, i]))
        elif w == 4:
            q0, q1, q2, q3 = query[0], query[1], query[2], query[3]
            for i in range(GROUP):
                half = popcount(q0 ^ groups[g, 0, i]) + popcount(q1 ^ groups[g, 1, i])
                best = min(best, half + popcount(q2 ^ groups[g, 2, i]) + popcount(q3 ^ groups[g, 3, i]))
        else:
            _group_distances(query, groups, g, totals)
            for i in range(GROUP):
                best = min(best, totals[i])
        minima[g] = best


@njit(nogil=True)
def _compact(distances, rows, filled, limit, at_limit):  # type: ignore[no-untyped-def]
    """Keep the candidates below ``limit`` and the first ``at_limit`` at it, in row order; return how many."""
    kept = 0
    for c in range(filled):
        distance = distances[c]
        if distance > limit or (distance == limit and at_limit == 0):
            continue
        if distance == limit:
            at_limit -= 1
        distances[kept] = distance
        rows[kept] = rows[c]
        kept += 1
    return kept


@njit(nogil=True)
def _sort_by_distance(distances, rows, filled, n_distances, out_distances, out_rows):  # type: ignore[no-untyped-def]
    """Counting sort of candidates that are in row order: stable, hence sorted by (distance, row)."""
    place = np.zeros(n_distances + 1, dtype=np.int64)
    for c in range(filled):
        place[distances[c] + 1] += 1
    for value in range(n_distances):
        place[value + 1] += place[value]
    for c in range(filled):
        at = place[distances[c]]
        place[distances[c]] += 1
        out_distances[at] = distances[c]
        out_rows[at] = rows[c]


@njit(nogil=True)
def _scan(queries, codes, k, out_distances, out_rows):  # type: ignore[no-untyped-def]
    """Fill ``out_distances`` and ``out_rows`` (q, k), k <= n, for a tile of queries in one pass over the
    codes."""
    n_queries, w = queries.shape
    n = codes.shape[0]
    n_distances = 64 * w + 1
    block = max(1, BLOCK_WORDS // w // GROUP) * GROUP
    capacity = min(n, 2 * k + 256)
    distances = np.empty((n_queries, capacity), dtype=np.int32)
    rows = np.empty((n_queries, capacity), dtype=np.int64)
    filled = np.zeros(n_queries, dtype=np.int64)
    counts = np.zeros((n_queries, n_distances), dtype=np.int64)
    # Invariant: fewer than k candidates lie below the limit; a row at or above it cannot enter any more.
    limits = np.full(n_queries, n_distances, dtype=np.int64)
    below = np.zeros(n_queries, dtype=np.int64)
    groups = np.zeros((-(-min(block, n) // GROUP), w, GROUP), dtype=np.uint64)
    minima = np.empty(groups.shape[0], dtype=np.int64)
    totals = np.empty(GROUP, dtype=np.uint64)
    for first in range(0, n, block):
        size = min(block, n - first)
        _fill_groups(codes[first : first + size], groups)
        n_groups = -(-size // GROUP)
        for q in range(n_queries):
            query = queries[q]
            limit = limits[q]
            # The last group may also hold stale codes: they cause a needless look at most, and hide no row.
            _group_minima(query, groups[:n_groups], totals, minima)
            for g in range(n_groups):
                if minima[g] >= limit:
                    continue
                _group_distances(query, groups, g, totals)
                for i in range(min(GROUP, size - g * GROUP)):
                    distance = np.int64(totals[i])
                    if distance >= limit:
                        continue
                    if filled[q] == capacity:
                        filled[q] = _compact(distances[q], rows[q], capacity, limit, k - below[q])
                    distances[q, filled[q]] = distance
                    rows[q, filled[q]] = first + g * GROUP + i
                    filled[q] += 1
                    counts[q, distance] += 1
                    below[q] += 1
                    while below[q] >= k:
                        limit -= 1
                        below[q] -= counts[q, limit]
            limits[q] = limit
    for q in range(n_queries):
        kept = _compact(distances[q], rows[q], filled[q], limits[q], k - below[q])
        _sort_by_distance(distances[q], rows[q], kept, n_distances, out_distances[q], out_rows[q])


@njit(nogil=True)
def _merge_two(left_distances, left_rows, right_distances, right_rows, width):  # type: ignore[no-untyped-def]
    n_queries = left_distances.shape[0]
    n_left, n_right = left_distances.shape[1], right_distances.shape[1]
    distances = np.empty((n_queries, width), dtype=left_distances.dtype)
    rows = np.empty((n_queries, width), dtype=left_rows.dtype)
    for q in range(n_queries):
        a = 0
        b = 0
        for c in range(width):
            take_left = b == n_right
            if a < n_left and b < n_right:
                x, y = left_distances[q, a], right_distances[q, b]
                take_left = x < y or (x == y and left_rows[q, a] < right_rows[q, b])
            if take_left:
                distances[q, c] = left_distances[q, a]
                rows[q, c] = left_rows[q, a]
                a += 1
            else:
                distances[q, c] = right_distances[q, b]
                rows[q, c] = right_rows[q, b]
                b += 1
    return distances, rows


@njit(nogil=True)
def _histogram(queries, codes):  # type: ignore[no-untyped-def]
    """(q, 64 w + 1) int64. Distances of a block go to a small buffer first, so that they can be
    vectorised, and are then counted into four tables in turn, since equal distances in a row would wait
    for each other."""
    n_queries, w = queries.shape
    n = codes.shape[0]
    n_distances = 64 * w + 1
    counts = np.zeros((n_queries, n_distances), dtype=np.int64)
    block = max(GROUP, BLOCK_WORDS // w)
    planes = np.empty((w, min(block, n)), dtype=np.uint64)
    buffer = np.empty(planes.shape[1], dtype=np.uint16)
    tables = np.empty((4, n_distances), dtype=np.int64)
    for first in range(0, n, block):
        size = min(block, n - first)
        for i in range(size):
            for j in range(w):
                planes[j, i] = codes[first + i, j]
        for q in range(n_queries):
            for i in range(size):
                buffer[i] = popcount(queries[q, 0] ^ planes[0, i])
            for j in range(1, w):
                for i in range(size):
                    buffer[i] += popcount(queries[q, j] ^ planes[j, i])
            tables[:] = 0
            whole = size - size % 4
            for i in range(0, whole, 4):
                tables[0, buffer[i]] += 1
                tables[1, buffer[i + 1]] += 1
                tables[2, buffer[i + 2]] += 1
                tables[3, buffer[i + 3]] += 1
            for i in range(whole, size):
                tables[0, buffer[i]] += 1
            for value in range(n_distances):
                counts[q, value] += tables[0, value] + tables[1, value] + tables[2, value] + tables[3, value]
    return counts


@njit(nogil=True)
def _pairs(queries, codes, pair_query, pair_row):  # type: ignore[no-untyped-def]
    distances = np.empty(pair_query.shape[0], dtype=np.int32)
    for p in range(pair_query.shape[0]):
        total = np.uint64(0)
        for j in range(queries.shape[1]):
            total += popcount(queries[pair_query[p], j] ^ codes[pair_row[p], j])
        distances[p] = total
    return distances
