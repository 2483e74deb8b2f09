"""Binary codes of a block of rows under a linear model, the same bytes on every machine.

Definition of a code. A row x is centred elementwise in float32 (float64 rows: subtracted in float64, then
rounded), c = float32(x - mean). Bit k is 1 exactly when sum_j c_j W_jk + b_k > 0, the sum taken without
rounding. A float32 matrix product gives the sign wherever the magnitude exceeds a rigorous bound on its
error (Higham, Accuracy and Stability, eq. 3.5, which holds for every order of summation). The few scores
inside the bound are summed again in float64 in a fixed order, and those still undecided with
compensation, i.e. with about 106 bits. The bytes therefore depend neither on the blocking nor on the BLAS
nor on the processor.
"""

from __future__ import annotations

import numpy as np

from och_dist.errors import BadInputError
from och_dist.kernels.compiled import njit
from och_dist.kernels.fixed_order import ROUNDOFF, SAFETY, UNDERFLOW, centre_rows, centred_rows, fixed_dot
from och_dist.kernels.moments import ROWS_PER_BLOCK, float_blocks, refuse_row
from och_dist.kernels.simd import LANES

DOUBLE_RATIO = 2.0**-29
"""Roundoff of float64 relative to float32: the same bound, scaled, holds for sums in float64."""

SCORE_LIMIT = 1e37
"""A row whose norm times the longest column (plus offset) exceeds this could overflow float32."""

OVERFLOW = "overflow in the projection of row {}; expected scores within the range of float32"


def encode_linear(
    block: np.ndarray,
    mean: np.ndarray,
    projection: np.ndarray,
    offsets: np.ndarray,
    *,
    first_row: int = 0,
) -> np.ndarray:
    """Codes of ``block`` (n, d) as (n, ceil(r / 8)) uint8, little bit order, pad bits zero.

    ``mean`` (d,), ``projection`` (d, r) and ``offsets`` (r,) are float32. ``first_row`` is the global number
    of the first row and is used in error messages only. Rows with NaN or infinity raise ``NonFiniteError``;
    finite rows whose scores could overflow float32 raise ``BadInputError``.
    """
    n, (d, r) = block.shape[0], projection.shape
    codes = np.zeros((n, -(-r // 8)), dtype=np.uint8)
    column_norms = np.sqrt(_squared_column_norms(projection))
    reach = float(column_norms.max(initial=0.0)), float(np.abs(offsets).max(initial=0.0))
    slope, floor = _error_bound(d, column_norms, offsets)
    columns = np.ascontiguousarray(projection.T)
    size = max(1, min(n, ROWS_PER_BLOCK))
    centred = np.empty((size, d), dtype=np.float32)
    scores = np.empty((size, r), dtype=np.float32)
    squared = np.empty(size, dtype=np.float64)
    for place, rows in float_blocks(block, d, size):
        m = rows.shape[0]
        centre_rows(rows, mean, centred[:m], squared[:m])
        norms = np.sqrt(squared[:m])
        usable = norms * reach[0] + reach[1] <= SCORE_LIMIT
        if not usable.all():
            refuse_row(block, first_row, place.start + int(np.argmin(usable)), OVERFLOW)
        np.matmul(centred[:m], projection, out=scores[:m])
        _write_signs(scores[:m], centred[:m], norms, columns, offsets, slope, floor, codes[place])
    return codes


def linear_scores(block: np.ndarray, mean: np.ndarray, projection: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Scores (n, r) float64 of ``block`` (n, d), c W + b with c as above, each summed in one fixed order.

    Products of float32 are exact in float64: the scores are the same on every machine. They cost several times what
    codes cost, and are meant for queries.
    """
    scores = np.empty((block.shape[0], projection.shape[1]))
    columns = np.ascontiguousarray(projection.T)
    for place, rows in float_blocks(block, mean.shape[0]):
        _fill_scores(centred_rows(rows, mean)[0], columns, offsets, scores[place])
    return scores


def _error_bound(d: int, column_norms: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(r,) slope and (r,) floor: a float32 score is wrong by less than slope * |c| + floor, twofold safe."""
    if (d + 1) * ROUNDOFF >= 0.5:
        raise BadInputError(f"dimension {d} is too large for float32 sums; use fewer than 2**23 dimensions")
    gamma = (d + 1) * ROUNDOFF / (1.0 - (d + 1) * ROUNDOFF)
    slope = SAFETY * gamma * column_norms
    floor = SAFETY * (ROUNDOFF * np.abs(offsets.astype(np.float64)) + d * UNDERFLOW)
    return slope, floor


@njit(nogil=True)
def _squared_column_norms(projection):  # type: ignore[no-untyped-def]
    """(r,) float64, summed row by row: the overflow rule must not depend on the machine."""
    total = np.zeros(projection.shape[1], dtype=np.float64)
    for j in range(projection.shape[0]):
        for k in range(projection.shape[1]):
            w = np.float64(projection[j, k])
            total[k] += w * w
    return total


@njit(nogil=True)
def _compensated_score(centred, i, columns, k, offset):  # type: ignore[no-untyped-def]
    """The score with about 106 bits: products of float32 are exact in float64, and each addition keeps its
    rounding error (Knuth's two-sum)."""
    total = np.float64(offset)
    lost = 0.0
    for j in range(centred.shape[1]):
        term = np.float64(centred[i, j]) * np.float64(columns[k, j])
        new = total + term
        part = new - total
        lost += (total - (new - part)) + (term - part)
        total = new
    return total + lost


@njit(nogil=True)
def _write_signs(scores, centred, norms, columns, offsets, slope, floor, codes):  # type: ignore[no-untyped-def]
    m, r = scores.shape
    partial = np.empty(LANES, dtype=np.float64)
    for i in range(m):
        for byte in range(codes.shape[1]):
            value = 0
            for k in range(8 * byte, min(8 * byte + 8, r)):
                score = np.float64(scores[i, k]) + np.float64(offsets[k])
                bound = norms[i] * slope[k] + floor[k]
                if abs(score) <= bound:
                    score = fixed_dot(centred, i, columns, k, offsets[k], partial)
                    if abs(score) <= bound * DOUBLE_RATIO:
                        score = _compensated_score(centred, i, columns, k, offsets[k])
                value |= (score > 0.0) << (k - 8 * byte)
            codes[i, byte] = value


@njit(nogil=True)
def _fill_scores(centred, columns, offsets, scores):  # type: ignore[no-untyped-def]
    partial = np.empty(LANES, dtype=np.float64)
    for i in range(scores.shape[0]):
        for k in range(scores.shape[1]):
            scores[i, k] = fixed_dot(centred, i, columns, k, offsets[k], partial)
