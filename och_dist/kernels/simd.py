"""The arithmetic of the hottest loops as LLVM vectors: distances of codes, sums and bounds of Euclidean distances.

Vectors have 512 bits and LLVM maps them to what the processor has, such as ``vpopcntq`` with AVX-512, or table look-ups
in registers elsewhere. No operation is reordered or fused, so that results are the same everywhere.

Codes lie in ``groups`` (m, w, 64), uint64 or, up to 32 bits, uint32: word by word within a group of 64 codes, so that
one instruction handles several codes. The 64 distances of a group stay in vector registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

GROUP = 64
"""Codes, or rows, that are compared at once: their answers are the bits of one integer."""

LANES = 32
"""Partial sums of a sum over dimensions: enough to hide the latency of an addition."""

VECTOR_BYTES = 64
INDEX = ir.IntType(64)
Vector = Callable[[Any], Any]
DOUBLES = ir.VectorType(ir.DoubleType(), 8)
FLOATS = ir.VectorType(ir.FloatType(), 16)

PLANES = 3
"""Binary digits of the weights rounded down: one population count for each."""

FRACTION = 2**16
"""Fixed point of the bound of spherical distances."""


@intrinsic
def popcount(typingctx, value):  # type: ignore[no-untyped-def]
    """Set bits of a uint64, through LLVM's ctpop: one instruction, vectorised where the processor can."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


@intrinsic
def lowest_bit(typingctx, value):  # type: ignore[no-untyped-def]
    """Position of the lowest set bit of a uint64 that is not zero."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@intrinsic
def prefetch(typingctx, array, index):  # type: ignore[no-untyped-def]
    """Ask for the cache line of ``array[index]`` of a one-dimensional contiguous array, without waiting for it."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data, _ = _place(context, builder, signature.args[0], args[0], args[1])
        pointer = builder.bitcast(data, ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


def _place(context: Any, builder: Any, kind: Any, array: Any, number: Any) -> tuple[Any, Any]:
    """Pointer to entry ``number`` of the first axis of a contiguous array, and the length of the second axis (or 1)."""
    if kind.layout != "C":
        raise TypeError(f"{kind} is not contiguous; it cannot be walked row by row")
    made = context.make_array(kind)(context, builder, array)
    sizes = [builder.extract_value(made.shape, axis) for axis in range(1, kind.ndim)]
    stride = INDEX(1)
    for size in sizes:
        stride = builder.mul(stride, size)
    return builder.gep(made.data, [builder.mul(number, stride)]), sizes[0] if sizes else INDEX(1)


def _load(builder: Any, pointer: Any, at: Any, kind: Any) -> Any:
    """The vector of entries from ``at`` on, each of at least 4 bytes."""
    place = builder.bitcast(builder.gep(pointer, [at]), kind.as_pointer())
    return builder.load(place, align=4)


def _splat(builder: Any, scalar: Any, kind: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), None)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)


def _narrowed(builder: Any, value: Any, kind: Any) -> Any:
    """A vector of ``value``, an int64, as entries of ``kind``."""
    return _splat(builder, value if kind.element.width == 64 else builder.trunc(value, kind.element), kind)


def _call(builder: Any, name: str, *vectors: Any) -> Any:
    """Call the LLVM intrinsic ``llvm.<name>`` on vectors of one type."""
    kind = vectors[0].type
    function = ir.FunctionType(kind, [kind] * len(vectors))
    full_name = f"llvm.{name}.v{kind.count}i{kind.element.width}"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, full_name), vectors)


def _folded(builder: Any, name: str, vectors: list[Any]) -> Any:
    """One vector of several, by an intrinsic of two."""
    while len(vectors) > 1:
        vectors = [_call(builder, name, a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _gathered(builder: Any, flags: list[Any]) -> Any:
    """uint64 of the truth values in vectors, which are 64 in all."""
    mask = INDEX(0)
    for v, flag in enumerate(flags):
        bits = builder.zext(builder.bitcast(flag, ir.IntType(flag.type.count)), INDEX)
        mask = builder.or_(mask, builder.shl(bits, INDEX(v * flag.type.count)))
    return mask


def _gathered_if_any(builder: Any, vectors: list[Any], limit: Any) -> Any:
    """uint64 with a bit for each of 64 signed numbers below ``limit``; bits are gathered only if there is one."""
    some = builder.icmp_signed("<", _folded(builder, "smin", vectors), limit)
    some = builder.bitcast(some, ir.IntType(some.type.count))
    result = cgutils.alloca_once_value(builder, INDEX(0))
    with builder.if_then(builder.icmp_unsigned("!=", some, some.type(0)), likely=False):
        flags = [builder.icmp_signed("<", vector, limit) for vector in vectors]
        builder.store(_gathered(builder, flags), result)
    return builder.load(result)


def _totals(context: Any, builder: Any, signature: Any, args: Any, terms: Callable[[Any, Any], Vector]) -> list[Any]:
    """Sums over the words of a group, as vectors, from the arguments (groups, g, queries, q, ...) of an intrinsic.

    ``terms(j, own)`` gives what is summed as a function of the vector of word j of some codes; ``own`` has that of the
    query in every entry.
    """
    codes, n_words = _place(context, builder, signature.args[0], args[0], args[1])
    query, _ = _place(context, builder, signature.args[2], args[2], args[3])
    word = codes.type.pointee
    kind = ir.VectorType(word, 8 * VECTOR_BYTES // word.width)
    places = range(0, GROUP, kind.count)

    def summands(j: Any) -> list[Any]:
        term = terms(j, _splat(builder, builder.load(builder.gep(query, [j])), kind))
        start = builder.mul(j, INDEX(GROUP))
        return [term(_load(builder, codes, builder.add(start, INDEX(place)), kind)) for place in places]

    # The first word is taken out of the loop: with one word there is none, which saves a quarter of the time.
    totals = [cgutils.alloca_once(builder, kind) for _ in places]
    for total, first in zip(totals, summands(INDEX(0)), strict=True):
        builder.store(first, total)
    with cgutils.for_range(builder, n_words, start=INDEX(1)) as loop:
        for total, more in zip(totals, summands(loop.index), strict=True):
            builder.store(builder.add(builder.load(total), more), total)
    return [builder.load(total) for total in totals]


def _hamming(context: Any, builder: Any, signature: Any, args: Any) -> tuple[list[Any], Any]:
    """Vectors of the distances of a group, and the limit, from the arguments (groups, g, queries, q, limit)."""

    def terms(j: Any, own: Any) -> Vector:
        return lambda loaded: _call(builder, "ctpop", builder.xor(loaded, own))

    totals = _totals(context, builder, signature, args, terms)
    return totals, _narrowed(builder, args[4], totals[0].type)


@intrinsic
def some_close(typingctx, groups, g, queries, q, limit):  # type: ignore[no-untyped-def]
    """int64: 1 if one of the codes of ``groups[g]`` is nearer than ``limit`` to ``queries[q]``, else 0.

    ``groups`` (m, w, 64) and ``queries`` (q, w) are contiguous and of one type, ``limit`` is an int64 of at least 0.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        distances, bound = _hamming(context, builder, signature, args)
        # As 32-bit integers: upper halves are zero, and AVX2 has no minimum of 64-bit integers.
        halves = ir.VectorType(ir.IntType(32), VECTOR_BYTES // 4)
        least = _folded(builder, "umin", [builder.bitcast(vector, halves) for vector in distances])
        found = builder.icmp_signed("<", builder.bitcast(least, bound.type), bound)
        found = builder.bitcast(found, ir.IntType(found.type.count))
        return builder.zext(builder.icmp_unsigned("!=", found, found.type(0)), INDEX)

    return types.int64(groups, types.int64, queries, types.int64, types.int64), codegen


@intrinsic
def close_codes(typingctx, groups, g, queries, q, limit):  # type: ignore[no-untyped-def]
    """uint64: bit i tells whether code i of ``groups[g]`` is nearer than ``limit`` to ``queries[q]``."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        distances, bound = _hamming(context, builder, signature, args)
        return _gathered(builder, [builder.icmp_signed("<", vector, bound) for vector in distances])

    return types.uint64(groups, types.int64, queries, types.int64, types.int64), codegen


@intrinsic
def close_weighted(typingctx, groups, g, queries, q, masks, limit):  # type: ignore[no-untyped-def]
    """uint64: bit i tells whether the bound, in steps, of code i of ``groups[g]`` to ``queries[q]`` is below ``limit``.

    ``queries`` (q, w) and ``masks`` (q, PLANES, w) have the type of ``groups`` (m, w, 64); ``limit`` is an int64.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        digits, _ = _place(context, builder, signature.args[4], args[4], args[3])
        _, n_words = _place(context, builder, signature.args[2], args[2], args[3])

        def terms(j: Any, own: Any) -> Vector:
            places = [builder.add(j, builder.mul(n_words, INDEX(p))) for p in range(PLANES)]
            planes = [_splat(builder, builder.load(builder.gep(digits, [at])), own.type) for at in places]
            one = ir.Constant(own.type, [1] * own.type.count)

            def term(loaded: Any) -> Any:
                differing = builder.xor(loaded, own)
                counts = [_call(builder, "ctpop", builder.and_(differing, plane)) for plane in planes]
                total = counts[-1]
                for count in counts[-2::-1]:
                    total = builder.add(builder.shl(total, one), count)
                return total

            return term

        totals = _totals(context, builder, signature, args, terms)
        return _gathered_if_any(builder, totals, _narrowed(builder, args[5], totals[0].type))

    return types.uint64(groups, types.int64, queries, types.int64, masks, types.int64), codegen


@intrinsic
def close_spherical(typingctx, groups, g, queries, q, bar):  # type: ignore[no-untyped-def]
    """uint64: bit i tells whether FRACTION |a xor b| < bar (10 |a and b| + 1) for code i of ``groups[g]``."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        tenfold = builder.mul(args[4], INDEX(10))

        def terms(j: Any, own: Any) -> Vector:
            weight = _narrowed(builder, tenfold, own.type)
            digits = ir.Constant(own.type, [FRACTION.bit_length() - 1] * own.type.count)

            def term(loaded: Any) -> Any:
                either = _call(builder, "ctpop", builder.xor(loaded, own))
                both = _call(builder, "ctpop", builder.and_(loaded, own))
                return builder.sub(builder.shl(either, digits), builder.mul(both, weight))

            return term

        totals = _totals(context, builder, signature, args, terms)
        return _gathered_if_any(builder, totals, _narrowed(builder, args[4], totals[0].type))

    return types.uint64(groups, types.int64, queries, types.int64, types.int64), codegen


@intrinsic
def lane_sums(typingctx, queries, q, rows, i, partial):  # type: ignore[no-untyped-def]
    """Fill ``partial`` (LANES,) float64 with the squared differences of ``queries[q]`` and ``rows[i]``, dimension j
    added in order to sum j mod LANES; dimensions behind the last whole LANES are left out.

    ``queries`` and ``rows`` (n, d) are contiguous float32 or float64.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kinds = signature.args
        query, width = _place(context, builder, kinds[0], args[0], args[1])
        row, _ = _place(context, builder, kinds[2], args[2], args[3])
        starts = range(0, LANES, DOUBLES.count)
        sums = [cgutils.alloca_once_value(builder, ir.Constant(DOUBLES, [0.0] * DOUBLES.count)) for _ in starts]

        def doubles(pointer: Any, at: Any) -> Any:
            element = pointer.type.pointee
            loaded = _load(builder, pointer, at, ir.VectorType(element, DOUBLES.count))
            return loaded if element == DOUBLES.element else builder.fpext(loaded, DOUBLES)

        with cgutils.for_range(builder, builder.udiv(width, INDEX(LANES))) as loop:
            first = builder.mul(loop.index, INDEX(LANES))
            for start, total in zip(starts, sums, strict=True):
                at = builder.add(first, INDEX(start))
                difference = builder.fsub(doubles(row, at), doubles(query, at))
                builder.store(builder.fadd(builder.load(total), builder.fmul(difference, difference)), total)
        target, _ = _place(context, builder, kinds[4], args[4], INDEX(0))
        for start, total in zip(starts, sums, strict=True):
            place = builder.bitcast(builder.gep(target, [INDEX(start)]), DOUBLES.as_pointer())
            builder.store(builder.load(total), place, align=8)
        return context.get_dummy_value()

    return types.void(queries, types.int64, rows, types.int64, partial), codegen


@intrinsic
def near_rows(typingctx, product, q, start, halves, least):  # type: ignore[no-untyped-def]
    """uint64: bit i tells that ``product[q, start + i] - halves[start + i]`` is not below ``least``, or is NaN.

    ``product`` (n, m) and ``halves`` (m,) are contiguous float32 with at least 64 entries from ``start`` on.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kinds = signature.args
        products, _ = _place(context, builder, kinds[0], args[0], args[1])
        half, _ = _place(context, builder, kinds[3], args[3], INDEX(0))
        bar, flags = _splat(builder, args[4], FLOATS), []
        for first in range(0, GROUP, FLOATS.count):
            at = builder.add(args[2], INDEX(first))
            value = builder.fsub(_load(builder, products, at, FLOATS), _load(builder, half, at, FLOATS))
            flags.append(builder.fcmp_unordered(">=", value, bar))
        return _gathered(builder, flags)

    return types.uint64(product, types.int64, types.int64, halves, types.float32), codegen
