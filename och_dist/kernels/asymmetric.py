"""Nearest codes by finer distances than Hamming's: weighted by the query's scores, or by the spheres two codes share.

The asymmetric distance of a query to a code is the sum of the query's weights over the bits in which its own code
differs from the stored one. Weights are whole numbers, so that sums are exact and the order (distance, row) is total
and the same on every machine. The spherical distance is that of ``spheres``: |a xor b| / (|a and b| + 0.1).

A scan computes bounds of 64 distances at a time by population counts, which stay in vector registers. The bound of the
asymmetric distance rounds the weights down to 3 binary digits, each of which is a mask over the bits. Only where a
bound is below the current k-th distance is a code measured exactly, by one look-up for each byte in a table of 256 sums
made for the query.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from och_dist.errors import BadInputError, UsageError
from och_dist.kernels.compiled import njit
from och_dist.kernels.euclidean import keep_nearest
from och_dist.kernels.hamming import CodeBlock, Neighbours, scan_nearest, scan_words
from och_dist.kernels.packing import check_padding, pack_bits
from och_dist.kernels.simd import FRACTION, GROUP, PLANES, close_spherical, close_weighted, lowest_bit, popcount
from och_dist.kernels.spheres import MOST_LEVEL_BITS

WEIGHT_DIGITS = 19
"""Binary digits of the largest weight of a query: sums over 4,096 bits do not exceed 2**31."""

LARGEST_SUM = 2**32 - 1
"""Of all weights of a query: the tables are uint32."""

LARGEST_LEVEL = 2**PLANES - 1
CLIP = 1.75
"""Weights beyond so many times the mean are not resolved by the bound: bits of large weight differ in far codes."""

GATHER_COST = 16
"""Codes scanned for one query in the time it takes to gather one."""

BLOCK_BYTES = 1 << 15
"""Codes scanned for one query before the next: they stay in the first-level cache."""

QUERY_TILE = 128
"""Queries that share one pass over the codes: bounds tables and buffers, whatever the number of queries."""

TILE_BYTES = 1 << 23

SPARE = 64
"""Room for candidates beyond 2 k: fewer selections where k is small."""


def whole_weights(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights (q, r) int32 and scales (q,) float64 of real ``scores`` (q, r): |score| = weight * scale, rounded.

    The scale of a query is a power of two such that its largest weight has 19 binary digits, fewer where r exceeds
    4,096. Products with the scale are exact. A query whose scores are all 0 has the scale 1.
    """
    magnitudes = np.abs(scores)
    largest = magnitudes.max(axis=1, initial=0.0)
    digits = WEIGHT_DIGITS - max(0, (scores.shape[1] - 1).bit_length() - 12)
    _, exponents = np.frexp(largest)
    # Held at the smallest normal number: processors may treat smaller ones as zero.
    scales = np.where(largest > 0, np.ldexp(1.0, np.maximum(exponents - digits, -1022)), 1.0)
    return np.rint(magnitudes / scales[:, None]).astype(np.int32), scales


def weighted_top_k(
    queries: np.ndarray, weights: np.ndarray, block: CodeBlock, k: int, *, live: np.ndarray | None = None
) -> Neighbours:
    """The rows of ``block`` at the smallest weighted distances from each of the packed ``queries`` (q, bytes) uint8.

    ``weights`` (q, n_bits) are integers from 0, with sums below 2**32. ``live`` (n,) bool marks the rows that count;
    all without it. Returns distances (q, m) int64 and rows (q, m) int64, sorted by (distance, row), with m = min(k,
    live rows).
    """
    words = scan_words(queries, block.n_bits)
    _check_weights(weights, len(queries), block.n_bits)
    weighing = *_bound_masks(weights), np.ascontiguousarray(queries), np.ascontiguousarray(weights, dtype=np.int64)

    def scan(some: slice | np.ndarray, *rest: np.ndarray) -> np.ndarray:
        return _scan(words[some], *(part[some] for part in weighing), *rest)

    return _nearest(scan, block, k, live, len(queries), np.int64(LARGEST_SUM + 1))


def weighted_pairs(queries: np.ndarray, weights: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Weighted distances (q, m) int64 of packed ``queries`` (q, bytes) to candidates of their own.

    ``codes`` (q, m, bytes) are those of the candidates; ``weights`` (q, n_bits) as for :func:`weighted_top_k`.
    """
    if codes.ndim != 3 or codes.dtype != np.uint8 or codes.shape[::2] != queries.shape:
        raise BadInputError(
            f"candidates are {codes.dtype} {codes.shape} for queries {queries.shape}; expected uint8 (queries, "
            "candidates, bytes): gather the codes of each query's candidates"
        )
    check_padding(queries, weights.shape[-1], "queries")
    _check_weights(weights, len(queries), weights.shape[-1])
    return _measure_pairs(queries, weights.astype(np.int64, copy=False), codes)


def spherical_top_k(queries: np.ndarray, block: CodeBlock, k: int, *, live: np.ndarray | None = None) -> Neighbours:
    """As :func:`weighted_top_k`, by spherical distance; distances (q, m) are float64.

    A distance is 10 |a xor b| / (10 |a and b| + 1), rounded once: equal distances are equal numbers.
    """
    if block.n_bits > MOST_LEVEL_BITS:
        raise UsageError(f"n_bits={block.n_bits}; expected at most {MOST_LEVEL_BITS} bits for spherical distances")
    words = scan_words(queries, block.n_bits)

    def scan(some: slice | np.ndarray, *rest: np.ndarray) -> np.ndarray:
        return _scan(words[some], None, None, None, None, *rest)

    return _nearest(scan, block, k, live, len(queries), np.float64(np.inf))


def _nearest(
    scan: Callable[..., np.ndarray],
    block: CodeBlock,
    k: int,
    live: np.ndarray | None,
    n_queries: int,
    beyond: np.generic,
) -> Neighbours:
    """The first k by a ``scan`` of distances below ``beyond``."""
    bounds = np.full(n_queries, beyond)
    distances, rows = scan_nearest(scan, block, k, live, bounds, beyond, gather_cost=GATHER_COST)
    # Rows are ascending, and a stable sort leaves them so within a distance.
    order = np.argsort(distances, axis=1, kind="stable")
    return np.take_along_axis(distances, order, axis=1), np.take_along_axis(rows, order, axis=1)


def _check_weights(weights: np.ndarray, n_queries: int, n_bits: int) -> None:
    if weights.shape != (n_queries, n_bits) or weights.dtype.kind not in "iu":
        raise BadInputError(
            f"weights are {weights.dtype} {weights.shape}; expected integers ({n_queries}, {n_bits}), one for each bit "
            "of each query: use query_weights of the model"
        )
    if weights.size and (weights.min() < 0 or weights.max() > LARGEST_SUM or weights.sum(axis=1).max() > LARGEST_SUM):
        raise BadInputError("weights are below 0 or add up to 2**32 or more; use query_weights of the model")


def _bound_masks(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Masks (q, PLANES, w) and steps (q,) int64 of weights rounded down.

    A weight is at least its step times the sum of 2**p over the planes p whose mask holds its bit.
    """
    mean = weights.mean(axis=1, dtype=np.float64)
    steps = np.maximum(1, np.ceil(CLIP / LARGEST_LEVEL * mean)).astype(np.int64)
    levels = np.minimum(weights // steps[:, None], LARGEST_LEVEL).astype(np.uint8)
    planes = [scan_words(pack_bits((levels >> plane & 1) > 0), weights.shape[1]) for plane in range(PLANES)]
    return np.stack(planes, axis=1), steps


@njit(nogil=True)
def _fill_tables(queries, weights, tables):  # type: ignore[no-untyped-def]
    """Fill ``tables`` (q, bytes, 256) uint32: what the value of a byte of a code adds to the distance of a query.

    ``queries`` (q, b) uint8 and ``weights`` (q, r) integers; bytes beyond b and bits beyond r add nothing.
    """
    tables[:] = 0
    for q in range(queries.shape[0]):
        for byte in range(queries.shape[1]):
            table = tables[q, byte]
            own = np.int64(queries[q, byte])
            # A value is named by the bits in which it differs from the query's: one bit more, one weight more.
            for bit in range(min(8, weights.shape[1] - 8 * byte)):
                weight = np.uint32(weights[q, 8 * byte + bit])
                for other in range(1 << bit):
                    table[own ^ (other | 1 << bit)] = table[own ^ other] + weight


@njit(nogil=True)
def _measure_pairs(queries, weights, codes):  # type: ignore[no-untyped-def]
    distances = np.zeros(codes.shape[:2], dtype=np.int64)
    tables = np.empty((1, codes.shape[2], 256), dtype=np.uint32)
    for q in range(codes.shape[0]):
        _fill_tables(queries[q : q + 1], weights[q : q + 1], tables)
        for i in range(codes.shape[1]):
            for byte in range(codes.shape[2]):
                distances[q, i] += np.int64(tables[0, byte, codes[q, i, byte]])
    return distances


@njit(nogil=True)
def _scan(  # type: ignore[no-untyped-def]
    queries, masks, steps, codes, weights, groups, live, limits, out_distances, out_rows
):
    """Fill ``out_distances`` and ``out_rows`` (q, k) with the first rows by (distance, row), in row order.

    Only rows nearer than ``limits`` (q,) count; returns how many there are (q,), k at most. ``queries`` (q, w) and
    ``masks`` (q, PLANES, w) are words like those of ``groups`` (m, w, 64), ``steps`` (q,) int64; ``codes`` are the
    packed queries. ``live`` (m,) uint64 has a bit for each row that counts. Where masks, steps, codes and weights are
    None, distances are spherical; this is decided when the function is compiled.
    """
    n_groups, w, _ = groups.shape
    k = out_rows.shape[1]
    block = max(1, BLOCK_BYTES // (w * GROUP * groups.itemsize))
    capacity = 2 * k + SPARE
    table_bytes = 0 if masks is None else 1024 * w * groups.itemsize
    tile = max(1, min(queries.shape[0], QUERY_TILE, TILE_BYTES // (16 * capacity + table_bytes)))
    tables = _empty_tables(masks, tile, w * groups.itemsize)
    distances = np.empty((tile, capacity), dtype=limits.dtype)
    rows = np.empty((tile, capacity), dtype=np.int64)
    filled, bars = np.empty(tile, dtype=np.int64), np.empty(tile, dtype=limits.dtype)
    found = np.empty(queries.shape[0], dtype=np.int64)
    for first in range(0, queries.shape[0], tile):
        size = min(tile, queries.shape[0] - first)
        if masks is not None:
            _fill_tables(codes[first : first + size], weights[first : first + size], tables[:size])
        filled[:] = 0
        bars[:size] = limits[first : first + size]
        for start in range(0, n_groups, block):
            for t in range(size):
                q = first + t
                limit = bars[t]
                bar = _bar(limit, steps, q, groups)
                for g in range(start, min(start + block, n_groups)):
                    close = _close(groups, g, queries, q, masks, bar)
                    if close == 0:
                        continue
                    close &= live[g]
                    while close != 0:
                        i = lowest_bit(close)
                        close &= close - np.uint64(1)
                        distance = _distance(queries, q, tables, t, groups, g, i)
                        if distance >= limit:
                            continue
                        distances[t, filled[t]] = distance
                        rows[t, filled[t]] = g * GROUP + i
                        filled[t] += 1
                        if filled[t] == capacity:
                            # Rows come in ascending order: one at the k-th distance cannot enter any more.
                            limit, filled[t] = keep_nearest(distances[t], rows[t], k), k
                    bar = _bar(limit, steps, q, groups)
                bars[t] = limit
        for t in range(size):
            if filled[t] > k:
                keep_nearest(distances[t, : filled[t]], rows[t, : filled[t]], k)
            width = min(filled[t], k)
            out_distances[first + t, :width] = distances[t, :width]
            out_rows[first + t, :width] = rows[t, :width]
            found[first + t] = width
    return found


@njit(nogil=True)
def _empty_tables(masks, n_queries, n_bytes):  # type: ignore[no-untyped-def]
    if masks is None:
        return None
    return np.empty((n_queries, n_bytes, 256), dtype=np.uint32)


# forceinline: a call for every 64 codes would cost a fifth of the scan.
@njit(nogil=True, forceinline=True)
def _close(groups, g, queries, q, masks, bar):  # type: ignore[no-untyped-def]
    if masks is None:
        return close_spherical(groups, g, queries, q, bar)
    return close_weighted(groups, g, queries, q, masks, bar)


@njit(nogil=True)
def _bar(limit, steps, q, groups):  # type: ignore[no-untyped-def]
    """What the bound of a distance below ``limit`` is below; beyond all bounds it excludes nothing."""
    n_bits = 8 * groups.itemsize * groups.shape[1]
    if steps is None:
        # More than FRACTION times a tenth of the limit.
        return np.int64(min(limit / 10.0, n_bits + 1.0) * FRACTION) + 2
    return min(np.int64(LARGEST_LEVEL * n_bits + 1), (limit - 1) // steps[q] + 1)


@njit(nogil=True)
def _distance(queries, q, tables, t, groups, g, i):  # type: ignore[no-untyped-def]
    if tables is None:
        either, both = np.int64(0), np.int64(0)
        for j in range(groups.shape[1]):
            either += np.int64(popcount(np.uint64(groups[g, j, i] ^ queries[q, j])))
            both += np.int64(popcount(np.uint64(groups[g, j, i] & queries[q, j])))
        return np.float64(10 * either) / np.float64(10 * both + 1)
    total = np.int64(0)
    for j in range(groups.shape[1]):
        word = groups[g, j, i]
        for byte in range(groups.itemsize):
            value = np.int64(word >> (8 * byte)) & 255
            total += np.int64(tables[t, groups.itemsize * j + byte, value])
    return total
