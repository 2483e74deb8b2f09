"""Float64 arithmetic in one fixed order, hence the same numbers on every machine, and bounds of products in float32.

Many running sums instead of one: the compiler may use vector registers without changing the order of additions.
"""

from __future__ import annotations

import math

import numpy as np

from och_dist.kernels.compiled import njit
from och_dist.kernels.simd import LANES, lane_sums

ROUNDOFF = 2.0**-24
SAFETY = 2.0
UNDERFLOW = 2.0**-125
"""Largest absolute error of one float32 product lost to underflow, flush-to-zero included, doubled."""

NORM_LIMIT = 1e18
"""Vectors farther than half of this from the centre could overflow float32: they are always measured exactly."""

PER_LN2 = 1.4426950408889634
LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
"""ln 2 in two parts, the first with 21 trailing zero bits: its multiples up to 1,022 are exact."""

LAST_POWER = 1022
"""Beyond it 2**-k leaves the normal range of float64."""

POWERS = np.ldexp(1.0, -np.arange(LAST_POWER + 1))
TAYLOR = np.array([(-1.0) ** i / math.factorial(i) for i in range(14)])


def distance_error(d: int) -> tuple[float, float, float]:
    """(a, b, c): |x'|^2 + |p'|^2 - 2 x'.p' is within a |x'||p'| + b (|x'| + |p'|)^2 + c of |x - p|^2, twofold safe.

    x' and p' (d,) are x and p minus some centre, rounded to float32, and their product is one in float32. a: the
    product, for any order of summation. b: the rounding, which moves x' and p' by at most ROUNDOFF of their norms, and
    the sums in float64. c: products lost to underflow.
    """
    gamma = d * ROUNDOFF / (1.0 - d * ROUNDOFF) if d * ROUNDOFF < 0.5 else np.inf
    return SAFETY * 2.0 * gamma, SAFETY * 3.0 * ROUNDOFF, SAFETY * 2.0 * d * UNDERFLOW


def centred_rows(rows: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``rows`` (m, d) - ``mean`` (d,) in float32, and the squared norms (m,) float64 of that."""
    centred, squared = np.empty(rows.shape, dtype=np.float32), np.empty(len(rows))
    centre_rows(rows, mean, centred, squared)
    return centred, squared


@njit(nogil=True)
def fixed_dot(left, i, right, j, start, partial):  # type: ignore[no-untyped-def]
    """``start`` + left[i] . right[j]; ``partial`` (LANES,) float64 is scratch."""
    d = left.shape[1]
    whole = d - d % LANES
    for lane in range(LANES):
        partial[lane] = 0.0
    for k in range(0, whole, LANES):
        for lane in range(LANES):
            partial[lane] += np.float64(left[i, k + lane]) * np.float64(right[j, k + lane])
    total = np.float64(start)
    for k in range(whole, d):
        total += np.float64(left[i, k]) * np.float64(right[j, k])
    for lane in range(LANES):
        total += partial[lane]
    return total


@njit(nogil=True)
def centre_rows(rows, mean, centred, squared):  # type: ignore[no-untyped-def]
    """Fill ``centred`` (m, d) float32 with rows - mean and ``squared`` (m,) float64 with its squared norms.

    As ``fixed_dot`` would sum them, but in one go, which is a twentieth of the time of an encoder.
    """
    m, d = rows.shape
    whole = d - d % LANES
    partial = np.empty(LANES, dtype=np.float64)
    for i in range(m):
        for lane in range(LANES):
            partial[lane] = 0.0
        for j in range(0, whole, LANES):
            for lane in range(LANES):
                c = np.float32(rows[i, j + lane] - mean[j + lane])
                centred[i, j + lane] = c
                partial[lane] += np.float64(c) * np.float64(c)
        total = 0.0
        for j in range(whole, d):
            c = np.float32(rows[i, j] - mean[j])
            centred[i, j] = c
            total += np.float64(c) * np.float64(c)
        for lane in range(LANES):
            total += partial[lane]
        squared[i] = total


@njit(nogil=True)
def squared_distance(queries, q, rows, i, partial):  # type: ignore[no-untyped-def]
    """The squared distance of ``queries[q]`` and ``rows[i]``; ``partial`` (LANES,) float64 is scratch.

    The squared difference of dimension j is added in order to partial sum j mod LANES; the partial sums are then folded
    in halves.
    """
    d = rows.shape[1]
    whole = d - d % LANES
    lane_sums(queries, q, rows, i, partial)
    for j in range(whole, d):
        difference = np.float64(rows[i, j]) - np.float64(queries[q, j])
        partial[j - whole] += difference * difference
    half = LANES // 2
    while half > 0:
        for lane in range(half):
            partial[lane] += partial[lane + half]
        half //= 2
    return partial[0]


@njit(nogil=True)
def exp_minus(x):  # type: ignore[no-untyped-def]
    """exp(-x) for x >= 0 to about a unit in the last place, by additions and multiplications; 0 below the normal range.

    x = k ln 2 + t with |t| <= ln(2) / 2, where 14 terms of the series of exp(-t) leave less than 2**-57.
    """
    k = np.floor(x * PER_LN2 + 0.5)
    if not k <= LAST_POWER:
        return 0.0
    t = (x - k * LN2_HIGH) - k * LN2_LOW
    value = TAYLOR[13]
    for i in range(12, -1, -1):
        value = value * t + TAYLOR[i]
    return value * POWERS[int(k)]
