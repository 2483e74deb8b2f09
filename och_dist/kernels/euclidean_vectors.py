"""The arithmetic of exact distances and of their bounds as LLVM vectors: sums that stay in registers, masks of 64 rows.

Vectors have 512 bits and LLVM maps them to what the processor has; no operation is reordered or fused, so that the
result is the same everywhere.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from och_dist.kernels.code_vectors import splat
from och_dist.kernels.project import LANES

MASKED = 64
INDEX = ir.IntType(64)
DOUBLES = ir.VectorType(ir.DoubleType(), 8)
FLOATS = ir.VectorType(ir.FloatType(), 16)


def _contiguous(*kinds: Any) -> bool:
    """Whether arrays may be walked row by row; others are refused when a caller is compiled."""
    return all(kind.layout == "C" for kind in kinds)


def _row(context: Any, builder: Any, kind: Any, array: Any, row: Any) -> tuple[Any, Any]:
    """(pointer to the first entry, number of entries) of a row of a contiguous array of two dimensions."""
    opened = context.make_array(kind)(context, builder, array)
    width = builder.extract_value(opened.shape, kind.ndim - 1)
    return builder.gep(opened.data, [builder.mul(row, width)]), width


def _load(builder: Any, pointer: Any, at: Any, count: int) -> Any:
    """``count`` entries from ``at`` on as a vector."""
    kind = ir.VectorType(pointer.type.pointee, count)
    place = builder.bitcast(builder.gep(pointer, [at]), kind.as_pointer())
    return builder.load(place, align=4 if isinstance(kind.element, ir.FloatType) else 8)


@intrinsic
def lane_sums(typingctx, queries, q, rows, i, partial):  # type: ignore[no-untyped-def]
    """Fill ``partial`` (LANES,) float64 with the squared differences of ``queries[q]`` and ``rows[i]``, dimension j
    added in order to sum j mod LANES; dimensions behind the last whole LANES are left out.

    ``queries`` and ``rows`` (n, d) are contiguous float32 or float64.
    """

    if not _contiguous(queries, rows, partial):
        return None

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kinds = signature.args
        query, width = _row(context, builder, kinds[0], args[0], args[1])
        row, _ = _row(context, builder, kinds[2], args[2], args[3])
        starts = range(0, LANES, DOUBLES.count)
        sums = [cgutils.alloca_once_value(builder, ir.Constant(DOUBLES, [0.0] * DOUBLES.count)) for _ in starts]

        def doubles(pointer: Any, at: Any) -> Any:
            loaded = _load(builder, pointer, at, DOUBLES.count)
            return loaded if loaded.type == DOUBLES else builder.fpext(loaded, DOUBLES)

        with cgutils.for_range(builder, builder.udiv(width, INDEX(LANES))) as loop:
            first = builder.mul(loop.index, INDEX(LANES))
            for start, total in zip(starts, sums, strict=True):
                at = builder.add(first, INDEX(start))
                difference = builder.fsub(doubles(row, at), doubles(query, at))
                builder.store(builder.fadd(builder.load(total), builder.fmul(difference, difference)), total)
        target, _ = _row(context, builder, kinds[4], args[4], INDEX(0))
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

    if not _contiguous(product, halves):
        return None

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kinds = signature.args
        products, _ = _row(context, builder, kinds[0], args[0], args[1])
        half, _ = _row(context, builder, kinds[3], args[3], INDEX(0))
        bar = splat(builder, args[4], FLOATS)
        mask = INDEX(0)
        for first in range(0, MASKED, FLOATS.count):
            at = builder.add(args[2], INDEX(first))
            value = builder.fsub(_load(builder, products, at, FLOATS.count), _load(builder, half, at, FLOATS.count))
            near = builder.bitcast(builder.fcmp_unordered(">=", value, bar), ir.IntType(FLOATS.count))
            mask = builder.or_(mask, builder.shl(builder.zext(near, INDEX), INDEX(first)))
        return mask

    return types.uint64(product, types.int64, types.int64, halves, types.float32), codegen
