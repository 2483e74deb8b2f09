"""The arithmetic of a Hamming scan as LLVM vectors.

Codes lie in ``groups`` (m, w, 64), uint64 or, up to 32 bits, uint32: word by word within a group of 64 codes, so that
one instruction handles several codes. The 64 distances of a group stay in vector registers. Vectors have 512 bits and
LLVM maps them to what the processor has: ``vpopcntq`` with AVX-512, table look-ups in registers elsewhere.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

GROUP = 64
VECTOR_BITS = 512


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


def _group_distances(builder: Any, codes: Any, query: Any, n_words: Any) -> list[Any]:
    """Distances of one group as vectors, from pointers to its words and to those of the query."""
    word = codes.type.pointee
    kind = ir.VectorType(word, VECTOR_BITS // word.width)
    index = ir.IntType(64)
    n_vectors = GROUP // kind.count

    def counts(j: Any) -> list[Any]:
        value = splat(builder, builder.load(builder.gep(query, [j])), kind)
        start = builder.mul(j, index(GROUP))
        found = []
        for v in range(n_vectors):
            at = builder.gep(codes, [builder.add(start, index(v * kind.count))])
            loaded = builder.load(builder.bitcast(at, kind.as_pointer()), align=word.width // 8)
            found.append(vector_call(builder, "ctpop", builder.xor(loaded, value)))
        return found

    totals = [cgutils.alloca_once(builder, kind) for _ in range(n_vectors)]
    for total, first in zip(totals, counts(index(0)), strict=True):
        builder.store(first, total)
    with cgutils.for_range(builder, n_words, start=index(1)) as loop:
        for total, more in zip(totals, counts(loop.index), strict=True):
            builder.store(builder.add(builder.load(total), more), total)
    return [builder.load(total) for total in totals]


class _Scan:
    """What the arguments (groups, g, queries, q, limit) of the two intrinsics below mean in LLVM."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.builder = builder
        groups_type, _, queries_type, _, _ = signature.args
        group_array = context.make_array(groups_type)(context, builder, args[0])
        query_array = context.make_array(queries_type)(context, builder, args[2])
        self.n_words = builder.extract_value(query_array.shape, 1)
        self.query = builder.gep(query_array.data, [builder.mul(args[3], self.n_words)])
        stride = builder.mul(self.n_words, ir.IntType(64)(GROUP))
        self.codes = builder.gep(group_array.data, [builder.mul(args[1], stride)])
        word = self.codes.type.pointee
        self.kind = ir.VectorType(word, VECTOR_BITS // word.width)
        self.bound = splat(builder, args[4] if word.width == 64 else builder.trunc(args[4], word), self.kind)

    def distances(self) -> list[Any]:
        """Vectors of the distances of group g."""
        return _group_distances(self.builder, self.codes, self.query, self.n_words)

    def closer(self, vector: Any) -> Any:
        """An integer with a bit for each entry of ``vector`` below the limit."""
        return self.builder.bitcast(self.builder.icmp_signed("<", vector, self.bound), ir.IntType(self.kind.count))


@intrinsic
def some_close(typingctx, groups, g, queries, q, limit):  # type: ignore[no-untyped-def]
    """int64: 1 if one of the codes of ``groups[g]`` is nearer than ``limit`` to ``queries[q]``, else 0.

    ``groups`` (m, w, 64) and ``queries`` (q, w) are contiguous and of one type, ``limit`` is an int64 of at least 0.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        scan = _Scan(context, builder, signature, args)
        found = scan.closer(_minimum(builder, scan.distances()))
        return builder.zext(builder.icmp_unsigned("!=", found, found.type(0)), ir.IntType(64))

    return types.int64(groups, types.int64, queries, types.int64, types.int64), codegen


@intrinsic
def close_codes(typingctx, groups, g, queries, q, limit):  # type: ignore[no-untyped-def]
    """uint64: bit i tells whether code i of ``groups[g]`` is nearer than ``limit`` to ``queries[q]``."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        scan = _Scan(context, builder, signature, args)
        mask = ir.IntType(64)(0)
        for v, vector in enumerate(scan.distances()):
            part = builder.zext(scan.closer(vector), ir.IntType(64))
            mask = builder.or_(mask, builder.shl(part, ir.IntType(64)(v * scan.kind.count)))
        return mask

    return types.uint64(groups, types.int64, queries, types.int64, types.int64), codegen
