"""The arithmetic of scans over codes as LLVM vectors: Hamming distances, and bounds of finer ones.

Codes lie in ``groups`` (m, w, 64), uint64 or, up to 32 bits, uint32: word by word within a group of 64 codes, so that
one instruction handles several codes. The 64 distances of a group stay in vector registers. Vectors have 512 bits and
LLVM maps them to what the processor has: ``vpopcntq`` with AVX-512, table look-ups in registers elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

GROUP = 64
VECTOR_BITS = 512
INDEX = ir.IntType(64)

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


def vector_call(builder: Any, name: str, *vectors: Any) -> Any:
    """Call the LLVM intrinsic ``llvm.<name>`` on vectors of one type."""
    kind = vectors[0].type
    function = ir.FunctionType(kind, [kind] * len(vectors))
    full_name = f"llvm.{name}.v{kind.count}i{kind.element.width}"
    return builder.call(cgutils.get_or_insert_function(builder.module, function, full_name), vectors)


def splat(builder: Any, scalar: Any, kind: Any) -> Any:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), kind.count), None)
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), zeros)


def _minimum(builder: Any, vectors: list[Any]) -> Any:
    """Entry by entry, as 32-bit integers: upper halves are zero, and AVX2 has no minimum of 64-bit integers."""
    kind = vectors[0].type
    vectors = [builder.bitcast(vector, ir.VectorType(ir.IntType(32), VECTOR_BITS // 32)) for vector in vectors]
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [vector_call(builder, "umin", left, right) for left, right in pairs]
    return builder.bitcast(vectors[0], kind)


def _group_totals(builder: Any, codes: Any, n_words: Any, terms: Callable[[Any, Any], Callable[[Any], Any]]) -> list:
    """Sums over the words of one group, as vectors; ``terms(j, kind)`` gives the function of word j to be summed."""
    word = codes.type.pointee
    kind = ir.VectorType(word, VECTOR_BITS // word.width)
    n_vectors = GROUP // kind.count

    def summands(j: Any) -> list[Any]:
        term, start, found = terms(j, kind), builder.mul(j, INDEX(GROUP)), []
        for v in range(n_vectors):
            at = builder.gep(codes, [builder.add(start, INDEX(v * kind.count))])
            found.append(term(builder.load(builder.bitcast(at, kind.as_pointer()), align=word.width // 8)))
        return found

    # The first word is taken out of the loop: with one word there is none, which saves a quarter of the time.
    totals = [cgutils.alloca_once(builder, kind) for _ in range(n_vectors)]
    for total, first in zip(totals, summands(INDEX(0)), strict=True):
        builder.store(first, total)
    with cgutils.for_range(builder, n_words, start=INDEX(1)) as loop:
        for total, more in zip(totals, summands(loop.index), strict=True):
            builder.store(builder.add(builder.load(total), more), total)
    return [builder.load(total) for total in totals]


def _place(context: Any, builder: Any, kind: Any, array: Any, number: Any) -> tuple[Any, Any]:
    """Pointer to entry ``number`` of the first axis of a contiguous array, and its words (the second axis)."""
    made = context.make_array(kind)(context, builder, array)
    sizes = [builder.extract_value(made.shape, axis) for axis in range(1, kind.ndim)]
    stride = sizes[0] if len(sizes) == 1 else builder.mul(*sizes)
    return builder.gep(made.data, [builder.mul(number, stride)]), sizes[0]


def _narrowed(builder: Any, value: Any, kind: Any) -> Any:
    return splat(builder, value if kind.element.width == 64 else builder.trunc(value, kind.element), kind)


def _hamming(context: Any, builder: Any, signature: Any, args: Any) -> tuple[list[Any], Any]:
    """Vectors of the distances of a group, and the limit, from the arguments (groups, g, queries, q, limit)."""
    codes, n_words = _place(context, builder, signature.args[0], args[0], args[1])
    query, _ = _place(context, builder, signature.args[2], args[2], args[3])

    def terms(j: Any, kind: Any) -> Callable[[Any], Any]:
        own = splat(builder, builder.load(builder.gep(query, [j])), kind)
        return lambda loaded: vector_call(builder, "ctpop", builder.xor(loaded, own))

    totals = _group_totals(builder, codes, n_words, terms)
    return totals, _narrowed(builder, args[4], totals[0].type)


def _below(builder: Any, vector: Any, limit: Any) -> Any:
    """An integer with a bit for each entry of ``vector`` below ``limit``."""
    return builder.bitcast(builder.icmp_signed("<", vector, limit), ir.IntType(vector.type.count))


def _all_below(builder: Any, vectors: list[Any], limit: Any) -> Any:
    """uint64 with a bit for each of 64 numbers below ``limit``."""
    mask = INDEX(0)
    for v, vector in enumerate(vectors):
        part = builder.zext(_below(builder, vector, limit), INDEX)
        mask = builder.or_(mask, builder.shl(part, INDEX(v * vector.type.count)))
    return mask


@intrinsic
def some_close(typingctx, groups, g, queries, q, limit):  # type: ignore[no-untyped-def]
    """int64: 1 if one of the codes of ``groups[g]`` is nearer than ``limit`` to ``queries[q]``, else 0.

    ``groups`` (m, w, 64) and ``queries`` (q, w) are contiguous and of one type, ``limit`` is an int64 of at least 0.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        distances, bound = _hamming(context, builder, signature, args)
        found = _below(builder, _minimum(builder, distances), bound)
        return builder.zext(builder.icmp_unsigned("!=", found, found.type(0)), INDEX)

    return types.int64(groups, types.int64, queries, types.int64, types.int64), codegen


@intrinsic
def close_codes(typingctx, groups, g, queries, q, limit):  # type: ignore[no-untyped-def]
    """uint64: bit i tells whether code i of ``groups[g]`` is nearer than ``limit`` to ``queries[q]``."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _all_below(builder, *_hamming(context, builder, signature, args))

    return types.uint64(groups, types.int64, queries, types.int64, types.int64), codegen


def _flags_below(builder: Any, vectors: list[Any], limit: Any) -> Any:
    """As ``_all_below``, of signed numbers; the bits are gathered only if there is one."""
    least = vectors
    while len(least) > 1:
        least = [vector_call(builder, "smin", a, b) for a, b in zip(least[::2], least[1::2], strict=True)]
    some = _below(builder, least[0], limit)
    result = cgutils.alloca_once_value(builder, INDEX(0))
    with builder.if_then(builder.icmp_unsigned("!=", some, some.type(0)), likely=False):
        builder.store(_all_below(builder, vectors, limit), result)
    return builder.load(result)


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
            places = [builder.add(j, builder.mul(n_words, INDEX(p))) for p in range(PLANES)]
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
        tenfold = builder.mul(args[4], INDEX(10))

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
