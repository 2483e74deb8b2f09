"""Compiled loops over laid-out codes; ``kernels.hamming`` holds the functions to call.

A scan computes for each group of 64 codes only whether one of them is nearer than the limit, without a branch and
without storing distances. Groups that have one are looked at again.
"""

from __future__ import annotations

import numpy as np

from och_dist.kernels.compiled import njit
from och_dist.kernels.simd import GROUP, close_codes, lowest_bit, popcount, some_close

BLOCK_BYTES = 24 << 10
"""Codes scanned for one query before the next: they stay in the first-level cache."""

QUERY_TILE = 256
"""Queries that share one pass over the codes: bounds the candidate buffers, whatever the number of queries."""

TILE_BYTES = 1 << 23
"""Candidate buffers of one pass: fewer queries share it when many neighbours are wanted."""

ROW_BITS = 40
"""A candidate is one integer, distance << ROW_BITS | row."""


@njit(nogil=True)
def fill_groups(codes, groups):  # type: ignore[no-untyped-def]
    """Lay words ``codes`` (n, w) out in ``groups`` (ceil(n / 64), w, 64), zero-padded."""
    n, w = codes.shape
    for g in range(groups.shape[0]):
        size = min(GROUP, n - g * GROUP)
        for j in range(w):
            for i in range(size):
                groups[g, j, i] = codes[g * GROUP + i, j]
            for i in range(size, GROUP):
                groups[g, j, i] = 0


@njit(nogil=True)
def gather_rows(groups, rows, words):  # type: ignore[no-untyped-def]
    """Fill ``words`` (m, w) with the codes of ``rows`` (m,)."""
    for i in range(rows.shape[0]):
        for j in range(words.shape[1]):
            words[i, j] = groups[rows[i] // GROUP, j, rows[i] % GROUP]


@njit(nogil=True)
def _distance(queries, q, groups, g, i):  # type: ignore[no-untyped-def]
    total = np.uint64(0)
    for j in range(queries.shape[1]):
        total += popcount(np.uint64(queries[q, j] ^ groups[g, j, i]))
    return np.int64(total)


@njit(nogil=True)
def _close_groups(groups, start, stop, queries, q, limit):  # type: ignore[no-untyped-def]
    """uint64: bit i tells whether group ``start`` + i, below ``stop``, has a code nearer than ``limit``.

    Without a branch, since nobody can predict which group has one.
    """
    hits = np.uint64(0)
    for g in range(start, stop):
        hits |= np.uint64(some_close(groups, g, queries, q, limit)) << np.uint64(g - start)
    return hits


@njit(nogil=True)
def _compact(keys, filled, limit, at_limit):  # type: ignore[no-untyped-def]
    """Keep the candidates below ``limit`` and the first ``at_limit`` at it, in row order; return how many."""
    kept = 0
    for c in range(filled):
        distance = keys[c] >> ROW_BITS
        if distance > limit or (distance == limit and at_limit == 0):
            continue
        if distance == limit:
            at_limit -= 1
        keys[kept] = keys[c]
        kept += 1
    return kept


@njit(nogil=True)
def _sort_by_distance(keys, place, out_distances, out_rows):  # type: ignore[no-untyped-def]
    """Counting sort of ``keys`` in row order: stable, hence sorted by (distance, row). ``place`` is scratch."""
    place[:] = 0
    for key in keys:
        place[(key >> ROW_BITS) + 1] += 1
    for value in range(1, place.shape[0]):
        place[value] += place[value - 1]
    for key in keys:
        distance = key >> ROW_BITS
        at = place[distance]
        place[distance] += 1
        out_distances[at] = distance
        out_rows[at] = key & ((1 << ROW_BITS) - 1)


@njit(nogil=True)
def _start_tile(n_queries, groups, k, n_distances):  # type: ignore[no-untyped-def]
    """Buffers for as many queries as share one pass over the codes: keys, counts and state of ``_scan_tile``."""
    capacity = min(groups.shape[0] * GROUP, 2 * k + 256)
    tile = max(1, min(n_queries, QUERY_TILE, TILE_BYTES // (8 * capacity)))
    keys = np.empty((tile, capacity), dtype=np.int64)
    return keys, np.empty((tile, n_distances), dtype=np.int64), np.empty((tile, 3), dtype=np.int64)


@njit(nogil=True)
def scan(queries, groups, live, n_distances, limits, out_distances, out_rows):  # type: ignore[no-untyped-def]
    """Fill ``out_distances`` and ``out_rows`` (q, k) with the nearest rows nearer than ``limits`` (q,) int64.

    ``live`` (m,) uint64 has a bit for each row that counts. Returns how many were found (q,) int64, k at most. Rows
    come in ascending order, so a row at the k-th distance itself never enters, and a histogram of the distances kept is
    all that is needed to know the k-th.
    """
    k = out_rows.shape[1]
    found = np.empty(queries.shape[0], dtype=np.int64)
    keys, counts, state = _start_tile(queries.shape[0], groups, k, n_distances)
    place = np.empty(n_distances + 1, dtype=np.int64)
    for first in range(0, queries.shape[0], keys.shape[0]):
        last = min(first + keys.shape[0], queries.shape[0])
        _scan_tile(queries[first:last], groups, live, k, limits[first:last], keys, counts, state)
        for t in range(last - first):
            limit, below, filled = state[t]
            kept = _compact(keys[t], filled, limit, k - below)
            found[first + t] = kept
            _sort_by_distance(keys[t, :kept], place, out_distances[first + t], out_rows[first + t])
    return found


@njit(nogil=True)
def _scan_tile(queries, groups, live, k, limits, keys, counts, state):  # type: ignore[no-untyped-def]
    """One pass over the codes. ``state`` (q, 3) receives limit, candidates below it, candidates in ``keys``.

    Invariant: fewer than k candidates lie below the limit; a row at or above it cannot enter any more.
    """
    n_groups = groups.shape[0]
    block = max(1, BLOCK_BYTES // (groups.shape[1] * GROUP * groups.itemsize))
    capacity = keys.shape[1]
    counts[:] = 0
    for q in range(queries.shape[0]):
        state[q] = limits[q], 0, 0
    for start in range(0, n_groups, block):
        stop = min(start + block, n_groups)
        for q in range(queries.shape[0]):
            limit, below, filled = state[q, 0], state[q, 1], state[q, 2]
            for base in range(start, stop, 64):
                hits = _close_groups(groups, base, min(base + 64, stop), queries, q, limit)
                while hits != 0:
                    g = base + lowest_bit(hits)
                    hits &= hits - np.uint64(1)
                    close = close_codes(groups, g, queries, q, limit) & live[g]
                    while close != 0:
                        i = lowest_bit(close)
                        close &= close - np.uint64(1)
                        distance = _distance(queries, q, groups, g, i)
                        if distance >= limit:
                            continue
                        if filled == capacity:
                            filled = _compact(keys[q], capacity, limit, k - below)
                        keys[q, filled] = distance << ROW_BITS | (g * GROUP + i)
                        filled += 1
                        counts[q, distance] += 1
                        below += 1
                        while below >= k:
                            limit -= 1
                            below -= counts[q, limit]
            state[q] = limit, below, filled


@njit(nogil=True)
def _grown(values, size):  # type: ignore[no-untyped-def]
    larger = np.empty(2 * values.shape[0] + GROUP, dtype=values.dtype)
    larger[:size] = values[:size]
    return larger


@njit(nogil=True)
def within_radius(queries, groups, live, limit, n_distances):  # type: ignore[no-untyped-def]
    """(counts (q,), distances int32, rows int64) of all rows nearer than ``limit``: query by query, sorted by
    (distance, row)."""
    n_queries, n_groups = queries.shape[0], groups.shape[0]
    block = max(1, BLOCK_BYTES // (groups.shape[1] * GROUP * groups.itemsize))
    keys = np.empty(1024, dtype=np.int64)
    owners = np.empty(1024, dtype=np.int32)
    size = 0
    counts = np.zeros(n_queries, dtype=np.int64)
    for start in range(0, n_groups, block):
        for q in range(n_queries):
            before = size
            stop = min(start + block, n_groups)
            for base in range(start, stop, 64):
                hits = _close_groups(groups, base, min(base + 64, stop), queries, q, limit)
                while hits != 0:
                    g = base + lowest_bit(hits)
                    hits &= hits - np.uint64(1)
                    close = close_codes(groups, g, queries, q, limit) & live[g]
                    if size + GROUP > keys.shape[0]:
                        keys, owners = _grown(keys, size), _grown(owners, size)
                    while close != 0:
                        i = lowest_bit(close)
                        close &= close - np.uint64(1)
                        keys[size] = _distance(queries, q, groups, g, i) << ROW_BITS | (g * GROUP + i)
                        owners[size] = q
                        size += 1
            counts[q] += size - before
    by_query = np.empty(size, dtype=np.int64)
    ends = np.cumsum(counts)
    place = ends - counts
    for c in range(size):
        by_query[place[owners[c]]] = keys[c]
        place[owners[c]] += 1
    distances, rows = np.empty(size, dtype=np.int32), np.empty(size, dtype=np.int64)
    scratch = np.empty(n_distances + 1, dtype=np.int64)
    for q in range(n_queries):
        part = slice(ends[q] - counts[q], ends[q])
        _sort_by_distance(by_query[part], scratch, distances[part], rows[part])
    return counts, distances, rows


@njit(nogil=True)
def histogram(queries, groups, n, n_distances):  # type: ignore[no-untyped-def]
    """(q, n_distances) int64 over the first ``n`` rows. Distances of a block go to a small buffer first, so that they
    can be vectorised, and are then counted into four tables in turn, since equal distances in a row would wait for
    each other."""
    n_queries, w = queries.shape
    counts = np.zeros((n_queries, n_distances), dtype=np.int64)
    block = max(1, BLOCK_BYTES // (w * GROUP * groups.itemsize))
    buffer = np.empty((min(block, groups.shape[0]), GROUP), dtype=np.uint16)
    flat = buffer.reshape(-1)
    tables = np.empty((4, n_distances), dtype=np.int64)
    for start in range(0, groups.shape[0], block):
        size = min(block * GROUP, n - start * GROUP)
        for q in range(n_queries):
            for g in range(-(-size // GROUP)):
                for i in range(GROUP):
                    buffer[g, i] = popcount(np.uint64(queries[q, 0] ^ groups[start + g, 0, i]))
                for j in range(1, w):
                    for i in range(GROUP):
                        buffer[g, i] += popcount(np.uint64(queries[q, j] ^ groups[start + g, j, i]))
            tables[:] = 0
            whole = size - size % 4
            for i in range(0, whole, 4):
                tables[0, flat[i]] += 1
                tables[1, flat[i + 1]] += 1
                tables[2, flat[i + 2]] += 1
                tables[3, flat[i + 3]] += 1
            for i in range(whole, size):
                tables[0, flat[i]] += 1
            for value in range(n_distances):
                counts[q, value] += tables[0, value] + tables[1, value] + tables[2, value] + tables[3, value]
    return counts


@njit(nogil=True)
def count_rows(queries, codes, rows, first, counts):  # type: ignore[no-untyped-def]
    """Add to ``counts`` (q, distances) where the words ``codes`` (n, w) of rows ``first`` on, as far as they are among
    ``rows`` (q, k), lie from their query."""
    for q in range(rows.shape[0]):
        for c in range(rows.shape[1]):
            place = rows[q, c] - first
            if 0 <= place < codes.shape[0]:
                total = np.uint64(0)
                for j in range(queries.shape[1]):
                    total += popcount(queries[q, j] ^ codes[place, j])
                counts[q, total] += 1


@njit(nogil=True)
def merge_two(left_distances, left_rows, right_distances, right_rows, width):  # type: ignore[no-untyped-def]
    """The first ``width`` of two results (q, m) sorted by (distance, row)."""
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
