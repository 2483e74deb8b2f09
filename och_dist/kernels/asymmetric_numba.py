"""Compiled loops of the searches by weighted and by spherical distance; ``kernels.asymmetric`` holds the functions.

Codes lie in ``groups`` (m, w, 64) as ``kernels.hamming`` lays them out. ``close_weighted`` and ``close_spherical`` are
all the arithmetic that most groups meet: bounds of the 64 distances stay in vector registers, and unless one of them
is below the limit nothing else happens.
"""

from __future__ import annotations

import numpy as np

from och_dist.kernels.candidates import nth_smallest
from och_dist.kernels.code_vectors import (
    FRACTION,
    GROUP,
    PLANES,
    close_spherical,
    close_weighted,
    lowest_bit,
    popcount,
)
from och_dist.kernels.compiled import njit

LARGEST_LEVEL = 2**PLANES - 1

BLOCK_BYTES = 1 << 15
"""Codes scanned for one query before the next: they stay in the first-level cache."""

QUERY_TILE = 128
"""Queries that share one pass over the codes: bounds tables and buffers, whatever the number of queries."""

TILE_BYTES = 1 << 23

SPARE = 64
"""Room for candidates beyond 2 k: fewer selections where k is small."""


@njit(nogil=True)
def fill_tables(query_codes, weights, tables):  # type: ignore[no-untyped-def]
    """Fill ``tables`` (q, bytes, 256) uint32: what the value of a byte of a code adds to the distance of a query.

    ``query_codes`` (q, b) uint8 and ``weights`` (q, r) integers; bytes beyond b and bits beyond r add nothing.
    """
    tables[:] = 0
    for q in range(query_codes.shape[0]):
        for byte in range(query_codes.shape[1]):
            table = tables[q, byte]
            own = np.int64(query_codes[q, byte])
            # A value is named by the bits in which it differs from the query's: one bit more, one weight more.
            for bit in range(min(8, weights.shape[1] - 8 * byte)):
                weight = np.uint32(weights[q, 8 * byte + bit])
                for other in range(1 << bit):
                    table[own ^ (other | 1 << bit)] = table[own ^ other] + weight


@njit(nogil=True)
def measure_pairs(tables, codes, distances):  # type: ignore[no-untyped-def]
    """Fill ``distances`` (q, m) with those of ``codes`` (q, m, bytes) under ``tables`` (q, bytes, 256)."""
    for q in range(codes.shape[0]):
        for i in range(codes.shape[1]):
            total = np.int64(0)
            for byte in range(codes.shape[2]):
                total += np.int64(tables[q, byte, codes[q, i, byte]])
            distances[q, i] = total


@njit(nogil=True)
def _weighted_distance(table, groups, g, i):  # type: ignore[no-untyped-def]
    total = np.int64(0)
    for j in range(groups.shape[1]):
        word = groups[g, j, i]
        for byte in range(groups.itemsize):
            value = np.int64(word >> (8 * byte)) & 255
            total += np.int64(table[groups.itemsize * j + byte, value])
    return total


@njit(nogil=True)
def _spherical_distance(query, groups, g, i):  # type: ignore[no-untyped-def]
    either, both = np.int64(0), np.int64(0)
    for j in range(groups.shape[1]):
        word = groups[g, j, i]
        either += np.int64(popcount(np.uint64(word ^ query[j])))
        both += np.int64(popcount(np.uint64(word & query[j])))
    return np.float64(10 * either) / np.float64(10 * both + 1)


@njit(nogil=True)
def _tile(n_queries, row_bytes):  # type: ignore[no-untyped-def]
    return max(1, min(n_queries, QUERY_TILE, TILE_BYTES // row_bytes))


@njit(nogil=True)
def scan_weighted(  # type: ignore[no-untyped-def]
    queries, masks, steps, query_codes, weights, groups, live, k, limits, out_distances, out_rows, found
):
    """Fill ``out_distances`` and ``out_rows`` (q, k) with the first rows by (distance, row), in row order.

    Only rows nearer than ``limits`` (q,) count; ``found`` (q,) receives how many there are, k at most.
    ``queries`` (q, w) and ``masks`` (q, PLANES, w) are words like those of ``groups`` (m, w, 64), ``steps`` (q,)
    int64. ``live`` (m,) uint64 has a bit for each row that counts.
    """
    n_groups, w, _ = groups.shape
    block = max(1, BLOCK_BYTES // (w * GROUP * groups.itemsize))
    most = np.int64(LARGEST_LEVEL * 8 * groups.itemsize * w + 1)
    capacity = 2 * k + SPARE
    tile = _tile(queries.shape[0], 16 * capacity + 1024 * w * groups.itemsize)
    tables = np.empty((tile, w * groups.itemsize, 256), dtype=np.uint32)
    distances, rows = np.empty((tile, capacity), dtype=np.int64), np.empty((tile, capacity), dtype=np.int64)
    filled = np.empty(tile, dtype=np.int64)
    for first in range(0, queries.shape[0], tile):
        size = min(tile, queries.shape[0] - first)
        fill_tables(query_codes[first : first + size], weights[first : first + size], tables[:size])
        filled[:] = 0
        for start in range(0, n_groups, block):
            for t in range(size):
                q = first + t
                limit, step = limits[q], steps[q]
                bar = min(most, (limit - 1) // step + 1)
                for g in range(start, min(start + block, n_groups)):
                    close = close_weighted(groups, g, queries, masks, q, bar)
                    if close == 0:
                        continue
                    close &= live[g]
                    while close != 0:
                        i = lowest_bit(close)
                        close &= close - np.uint64(1)
                        distance = _weighted_distance(tables[t], groups, g, i)
                        if distance >= limit:
                            continue
                        limit = _push(distances[t], rows[t], filled, t, k, distance, g * GROUP + i, limit)
                    bar = min(most, (limit - 1) // step + 1)
                limits[q] = limit
        for t in range(size):
            out = out_distances[first + t], out_rows[first + t]
            found[first + t] = _finish(distances[t], rows[t], filled[t], k, *out)


@njit(nogil=True)
def scan_spherical(queries, groups, live, k, limits, out_distances, out_rows, found):  # type: ignore[no-untyped-def]
    """As ``scan_weighted``, by spherical distance."""
    n_groups, w, _ = groups.shape
    block = max(1, BLOCK_BYTES // (w * GROUP * groups.itemsize))
    capacity = 2 * k + SPARE
    tile = _tile(queries.shape[0], 16 * capacity)
    distances, rows = np.empty((tile, capacity), dtype=np.float64), np.empty((tile, capacity), dtype=np.int64)
    filled = np.empty(tile, dtype=np.int64)
    for first in range(0, queries.shape[0], tile):
        size = min(tile, queries.shape[0] - first)
        filled[:] = 0
        for start in range(0, n_groups, block):
            for t in range(size):
                q = first + t
                limit = limits[q]
                bar = _spherical_bar(limit, groups)
                for g in range(start, min(start + block, n_groups)):
                    close = close_spherical(groups, g, queries, q, bar)
                    if close == 0:
                        continue
                    close &= live[g]
                    while close != 0:
                        i = lowest_bit(close)
                        close &= close - np.uint64(1)
                        distance = _spherical_distance(queries[q], groups, g, i)
                        if distance >= limit:
                            continue
                        limit = _push(distances[t], rows[t], filled, t, k, distance, g * GROUP + i, limit)
                    bar = _spherical_bar(limit, groups)
                limits[q] = limit
        for t in range(size):
            out = out_distances[first + t], out_rows[first + t]
            found[first + t] = _finish(distances[t], rows[t], filled[t], k, *out)


@njit(nogil=True)
def _spherical_bar(limit, groups):  # type: ignore[no-untyped-def]
    """More than FRACTION times a tenth of ``limit``; beyond the number of bits (and 1) it excludes nothing."""
    n_bits = 8.0 * groups.itemsize * groups.shape[1]
    return np.int64(min(limit / 10.0, n_bits + 1.0) * FRACTION) + 2


@njit(nogil=True)
def _push(distances, rows, filled, t, k, distance, row, limit):  # type: ignore[no-untyped-def]
    """Add a candidate of query t; if that fills the buffer, keep the first k. Returns the limit for later rows.

    Rows come in ascending order, so that one at the k-th distance cannot enter any more.
    """
    at = filled[t]
    distances[at] = distance
    rows[at] = row
    filled[t] = at + 1
    if filled[t] < distances.shape[0]:
        return limit
    filled[t] = k
    return _select(distances, rows, k)


@njit(nogil=True)
def _select(distances, rows, k):  # type: ignore[no-untyped-def]
    """Move the first k by (distance, row) of candidates in row order to the front, in row order; the k-th distance."""
    limit = nth_smallest(distances.copy(), k - 1)
    at_limit = k
    for distance in distances:
        if distance < limit:
            at_limit -= 1
    kept = 0
    for c in range(distances.shape[0]):
        distance = distances[c]
        if distance > limit or (distance == limit and at_limit == 0):
            continue
        if distance == limit:
            at_limit -= 1
        distances[kept] = distance
        rows[kept] = rows[c]
        kept += 1
    return limit


@njit(nogil=True)
def _finish(distances, rows, filled, k, out_distances, out_rows):  # type: ignore[no-untyped-def]
    """Write the first candidates by (distance, row), k at most, in row order. Returns how many."""
    if filled > k:
        _select(distances[:filled], rows, k)
    width = min(filled, k)
    out_distances[:width] = distances[:width]
    out_rows[:width] = rows[:width]
    return width
