"""Compiled loops of the searches by weighted and by spherical distance; ``kernels.asymmetric`` holds the functions.

Codes lie in ``groups`` (m, w, 64) as ``kernels.hamming`` lays them out. ``close_weighted`` and ``close_spherical`` are
all the arithmetic that most groups meet: bounds of the 64 distances stay in vector registers, and unless one of them
is below the limit nothing else happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from och_dist.kernels.compiled import njit
from och_dist.kernels.hamming_vectors import GROUP, VECTOR_BITS, lowest_bit, popcount, splat, vector_call

PLANES = 3
"""Binary digits of the weights rounded down: one population count for each."""

LARGEST_LEVEL = 2**PLANES - 1

FRACTION = 2**16
"""Fixed point of the bound of spherical distances."""

BLOCK_BYTES = 1 << 15
"""Codes scanned for one query before the next: they stay in the first-level cache."""

QUERY_TILE = 128
"""Queries that share one pass over the codes: bounds tables and buffers, whatever the number of queries."""

TILE_BYTES = 1 << 23

SPARE = 64
"""Room for candidates beyond 2 k: fewer selections where k is small."""

_INDEX = ir.IntType(64)


def _group_totals(builder: Any, codes: Any, n_words: Any, terms: Callable[[Any, Any], Callable[[Any], Any]]) -> list:
    """Sums over the words of one group, as vectors; ``terms(j, kind)`` gives the function of word j to be summed."""
    word = codes.type.pointee
    kind = ir.VectorType(word, VECTOR_BITS // word.width)
    totals = [cgutils.alloca_once(builder, kind) for _ in range(GROUP // kind.count)]
    for total in totals:
        builder.store(ir.Constant(kind, None), total)
    with cgutils.for_range(builder, n_words) as loop:
        term = terms(loop.index, kind)
        start = builder.mul(loop.index, _INDEX(GROUP))
        for v, total in enumerate(totals):
            at = builder.gep(codes, [builder.add(start, _INDEX(v * kind.count))])
            loaded = builder.load(builder.bitcast(at, kind.as_pointer()), align=word.width // 8)
            builder.store(builder.add(builder.load(total), term(loaded)), total)
    return [builder.load(total) for total in totals]


def _flags_below(builder: Any, vectors: list[Any], limit: Any) -> Any:
    """uint64 with a bit for each of 64 signed numbers below ``limit``; the bits are gathered only if there is one."""
    kind = vectors[0].type
    flags = ir.IntType(kind.count)

    def below(vector: Any) -> Any:
        return builder.bitcast(builder.icmp_signed("<", vector, limit), flags)

    least = vectors
    while len(least) > 1:
        least = [vector_call(builder, "smin", a, b) for a, b in zip(least[::2], least[1::2], strict=True)]
    result = cgutils.alloca_once_value(builder, _INDEX(0))
    with builder.if_then(builder.icmp_unsigned("!=", below(least[0]), flags(0)), likely=False):
        mask = _INDEX(0)
        for v, vector in enumerate(vectors):
            part = builder.zext(below(vector), _INDEX)
            mask = builder.or_(mask, builder.shl(part, _INDEX(v * kind.count)))
        builder.store(mask, result)
    return builder.load(result)


def _place(context: Any, builder: Any, kind: Any, array: Any, number: Any) -> tuple[Any, Any]:
    """Pointer to entry ``number`` of the first axis of a contiguous array, and its words (the second axis)."""
    made = context.make_array(kind)(context, builder, array)
    sizes = [builder.extract_value(made.shape, axis) for axis in range(1, kind.ndim)]
    stride = sizes[0] if len(sizes) == 1 else builder.mul(*sizes)
    return builder.gep(made.data, [builder.mul(number, stride)]), sizes[0]


def _narrowed(builder: Any, value: Any, kind: Any) -> Any:
    return splat(builder, value if kind.element.width == 64 else builder.trunc(value, kind.element), kind)


@intrinsic
def close_weighted(typingctx, groups, g, queries, masks, q, limit):  # type: ignore[no-untyped-def]
    """uint64: bit i tells whether the bound, in steps, of code i of ``groups[g]`` to ``queries[q]`` is below ``limit``.

    ``queries`` (q, w) and ``masks`` (q, PLANES, w) have the type of ``groups`` (m, w, 64); ``limit`` is an int64.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        codes, n_words = _place(context, builder, signature.args[0], args[0], args[1])
        query, _ = _place(context, builder, signature.args[2], args[2], args[4])
        digits, _ = _place(context, builder, signature.args[3], args[3], args[4])

        def terms(j: Any, kind: Any) -> Callable[[Any], Any]:
            own = splat(builder, builder.load(builder.gep(query, [j])), kind)
            places = [builder.add(j, builder.mul(n_words, _INDEX(p))) for p in range(PLANES)]
            planes = [splat(builder, builder.load(builder.gep(digits, [at])), kind) for at in places]
            one = ir.Constant(kind, [1] * kind.count)

            def term(loaded: Any) -> Any:
                differing = builder.xor(loaded, own)
                counts = [vector_call(builder, "ctpop", builder.and_(differing, plane)) for plane in planes]
                total = counts[-1]
                for count in counts[-2::-1]:
                    total = builder.add(builder.shl(total, one), count)
                return total

            return term

        totals = _group_totals(builder, codes, n_words, terms)
        return _flags_below(builder, totals, _narrowed(builder, args[5], totals[0].type))

    return types.uint64(groups, types.int64, queries, masks, types.int64, types.int64), codegen


@intrinsic
def close_spherical(typingctx, groups, g, queries, q, bar):  # type: ignore[no-untyped-def]
    """uint64: bit i tells whether FRACTION |a xor b| < bar (10 |a and b| + 1) for code i of ``groups[g]``."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        codes, n_words = _place(context, builder, signature.args[0], args[0], args[1])
        query, _ = _place(context, builder, signature.args[2], args[2], args[3])
        tenfold = builder.mul(args[4], _INDEX(10))

        def terms(j: Any, kind: Any) -> Callable[[Any], Any]:
            own = splat(builder, builder.load(builder.gep(query, [j])), kind)
            weight = _narrowed(builder, tenfold, kind)
            digits = ir.Constant(kind, [FRACTION.bit_length() - 1] * kind.count)

            def term(loaded: Any) -> Any:
                either = vector_call(builder, "ctpop", builder.xor(loaded, own))
                both = vector_call(builder, "ctpop", builder.and_(loaded, own))
                return builder.sub(builder.shl(either, digits), builder.mul(both, weight))

            return term

        totals = _group_totals(builder, codes, n_words, terms)
        return _flags_below(builder, totals, _narrowed(builder, args[4], totals[0].type))

    return types.uint64(groups, types.int64, queries, types.int64, types.int64), codegen


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
def _nth(values, n):  # type: ignore[no-untyped-def]
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
def _select(distances, rows, k):  # type: ignore[no-untyped-def]
    """Move the first k by (distance, row) of candidates in row order to the front, in row order; the k-th distance."""
    limit = _nth(distances.copy(), k - 1)
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
