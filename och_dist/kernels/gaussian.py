"""Gaussian kernel features of a block of rows, and codes that are the signs of their linear combinations.

Definition of a code. A row x is centred elementwise in float32 (float64 rows: subtracted in float64, then rounded),
c = float32(x - mean), and brought to length 1, y = c / |c| (y = 0 where c = 0). With the squared distance to base j,
s_j = |y|^2 + |b_j|^2 - 2 c.b_j / |c| (never below 0), its feature is k_j = exp(-s_j / (2 bandwidth)) - bias_j.
Bit k is 1 exactly when sum_j k_j W_jk > 0. All of this is float64 in one fixed order, the exponential included
(``decay``), hence the same on every machine.

Matrix products in float64 give the sign wherever its magnitude exceeds a rigorous bound on how far two orders of
summation can lie apart; the rare scores inside the bound are computed as defined. The weights of a learned model
cancel too much for products in float32: their bound would leave about 5 % of the bits open.
"""

from __future__ import annotations

import math

import numpy as np

from och_dist.errors import BadInputError
from och_dist.kernels.compiled import njit
from och_dist.kernels.moments import as_float_rows, check_finite, check_rows
from och_dist.kernels.packing import pack_bits
from och_dist.kernels.project import LANES, SAFETY, centre_rows

ROWS_PER_BLOCK = 512

ROUNDOFF = 2.0**-53
DECAY_ERROR = 2.0**-48
"""Generous bound of the absolute error of ``decay`` and of the operations around it."""

DEEPEST = 700.0
"""Beyond it exp(-z) is close to underflow, where processors may differ: it is held there."""

PER_LN2 = 1.4426950408889634
LN2_HIGH = 0.693147180369123816490
LN2_LOW = 1.90821492927058770002e-10
"""ln 2 in two parts, the first with so many trailing zeros that its multiples up to 2**20 are exact."""

SMALLEST_BANDWIDTH = 1e-300
"""Below it the reciprocal could overflow."""

POWERS = np.ldexp(1.0, -np.arange(1012))
TAYLOR = np.array([(-1.0) ** i / math.factorial(i) for i in range(14)])
"""Of exp(-t); for |t| <= ln(2) / 2 the first term left out is below 2**-57."""


def encode_gaussian(
    block: np.ndarray,
    mean: np.ndarray,
    bases: np.ndarray,
    bandwidth: float,
    bias: np.ndarray,
    weights: np.ndarray,
    *,
    first_row: int = 0,
) -> np.ndarray:
    """Codes of ``block`` (n, d) as (n, ceil(r / 8)) uint8, little bit order, pad bits zero.

    ``mean`` (d,) and ``bases`` (m, d) are float32, ``bias`` (m,) and ``weights`` (m, r) float64, ``bandwidth`` is
    positive. ``first_row`` is the global number of the first row and is used in error messages only. Rows with NaN
    or infinity raise ``NonFiniteError``; rows too far from the mean for float32 raise ``BadInputError``.
    """
    features = GaussianFeatures(mean, bases, bandwidth, bias)
    weights = np.ascontiguousarray(weights, dtype=np.float64)
    if weights.ndim != 2 or weights.shape[0] != len(bases) or not np.isfinite(weights).all():
        raise BadInputError(
            f"the model has weights {weights.shape} of {len(bases)} bases; "
            "expected finite numbers, one row for each base: load a complete model"
        )
    check_rows(block, features.mean.shape[0])
    r = weights.shape[1]
    bound = features.error() * np.abs(weights).sum(axis=0) + np.finfo(np.float64).tiny
    columns = np.ascontiguousarray(weights.T)
    codes = np.empty((block.shape[0], -(-r // 8)), dtype=np.uint8)
    for start in range(0, block.shape[0], ROWS_PER_BLOCK):
        centred, squared = features.centred(block[start : start + ROWS_PER_BLOCK])
        if not np.isfinite(squared).all():
            _raise_unusable(block, first_row, start + int(np.argmin(np.isfinite(squared))))
        scores = features.of_centred(centred, squared) @ weights
        bits = scores > 0
        open_rows, open_bits = np.nonzero(np.abs(scores) <= bound)
        if open_rows.size:
            _settle(features, centred, squared, columns, open_rows, open_bits, bits)
        codes[start : start + len(bits)] = pack_bits(bits)
    return codes


def gaussian_scores(
    block: np.ndarray, mean: np.ndarray, bases: np.ndarray, bandwidth: float, bias: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Scores (n, r) float64 of ``block`` (n, d), sum_j k_j W_jk as defined above, the same on every machine.

    The arguments are those of :func:`encode_gaussian`. Slower than codes by far: meant for queries.
    """
    features = GaussianFeatures(mean, bases, bandwidth, bias)
    check_rows(block, features.mean.shape[0])
    columns = np.ascontiguousarray(weights.T, dtype=np.float64)
    scores = np.empty((block.shape[0], columns.shape[0]))
    exact = features.rate, features.bases, features.base_squared, features.bias
    for start in range(0, block.shape[0], ROWS_PER_BLOCK):
        step = slice(start, start + ROWS_PER_BLOCK)
        _fill_scores(*features.centred(block[step]), *exact, columns, scores[step])
    return scores


class GaussianFeatures:
    """The features k (n, m) of rows: ``mean`` (d,) float32, ``bases`` (m, d) float32, ``bias`` (m,) float64."""

    def __init__(self, mean: np.ndarray, bases: np.ndarray, bandwidth: float, bias: np.ndarray) -> None:
        self.mean = np.ascontiguousarray(mean, dtype=np.float32)
        self.bases = np.ascontiguousarray(bases, dtype=np.float32)
        self.bias = np.ascontiguousarray(bias, dtype=np.float64)
        if self.bases.ndim != 2 or self.mean.shape != self.bases.shape[1:] or self.bias.shape != self.bases.shape[:1]:
            raise BadInputError(
                f"the model has mean {self.mean.shape}, bases {self.bases.shape} and bias {self.bias.shape}; "
                "expected (d,), (m, d) and (m,): load a complete model"
            )
        if not all(np.isfinite(part).all() for part in (self.mean, self.bases, self.bias)):
            raise BadInputError("the model holds NaN or infinity; expected finite numbers: train it again")
        if not SMALLEST_BANDWIDTH <= bandwidth < math.inf:
            raise BadInputError(f"bandwidth={bandwidth}; expected a positive number: train it again")
        self.rate = 0.5 / float(bandwidth)
        self.base_squared = np.empty(len(self.bases))
        centre_rows(self.bases, np.zeros_like(self.mean), np.empty_like(self.bases), self.base_squared)
        self._columns = self.bases.astype(np.float64).T

    def centred(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``rows`` (n, d) minus the mean in float32, and squared norms (n,) float64."""
        rows = as_float_rows(rows)
        centred, squared = np.empty(rows.shape, dtype=np.float32), np.empty(len(rows))
        centre_rows(rows, self.mean, centred, squared)
        return centred, squared

    def of_centred(self, centred: np.ndarray, squared: np.ndarray) -> np.ndarray:
        """Features (n, m) float64 of what ``centred`` gave, within ``error()`` of their definition."""
        products = centred.astype(np.float64) @ self._columns
        _finish_features(products, squared, self.base_squared, self.rate, self.bias)
        return products

    def error(self) -> float:
        """Bound of the difference of one feature, or of its share of a score, between two orders of summation."""
        m, d = self.bases.shape
        product = 2.0 * SAFETY * (d + LANES) * ROUNDOFF * float(np.sqrt(self.base_squared.max()))
        score = 2.0 * SAFETY * (m + LANES) * ROUNDOFF * (1.0 + float(np.abs(self.bias).max()))
        # exp(-z) changes by no more than z does.
        return 2.0 * self.rate * (product + DECAY_ERROR * (1.0 + float(self.base_squared.max()))) + DECAY_ERROR + score


def _raise_unusable(block: np.ndarray, first_row: int, bad_row: int) -> None:
    """Name every non-finite row of the block, or else the first row that is out of range."""
    check_finite(block, first_row=first_row)
    raise BadInputError(
        f"overflow in row {first_row + bad_row}; "
        "expected differences from the mean within the range of float32: scale the vectors down or drop the row"
    )


def _settle(
    features: GaussianFeatures,
    centred: np.ndarray,
    squared: np.ndarray,
    columns: np.ndarray,
    open_rows: np.ndarray,
    open_bits: np.ndarray,
    bits: np.ndarray,
) -> None:
    """Set the open ``bits`` by the definition; ``columns`` (r, m) are the weights transposed."""
    exact = features.rate, features.bases, features.base_squared, features.bias
    _set_exact_bits(centred, squared, *exact, columns, open_rows, open_bits, bits)


@njit(nogil=True)
def decay(z):  # type: ignore[no-untyped-def]
    """exp(-z) for z >= 0 to about 1e-16, by multiplications and additions only; exp(-700) beyond 700."""
    z = min(z, DEEPEST)
    halvings = np.int32(z * PER_LN2 + 0.5)
    t = (z - halvings * LN2_HIGH) - halvings * LN2_LOW
    value = TAYLOR[13]
    for i in range(12, -1, -1):
        value = value * t + TAYLOR[i]
    return value * POWERS[halvings]


@njit(nogil=True)
def _feature(product, norm, base_squared, rate, bias):  # type: ignore[no-untyped-def]
    """The feature from the product c.b; ``norm`` is that of c."""
    separation = base_squared
    if norm > 0.0:
        separation = (1.0 + base_squared) - 2.0 * (product / norm)
    return decay(max(separation, 0.0) * rate) - bias


@njit(nogil=True)
def _finish_features(products, squared, base_squared, rate, bias):  # type: ignore[no-untyped-def]
    for i in range(products.shape[0]):
        norm = np.sqrt(squared[i])
        for j in range(products.shape[1]):
            products[i, j] = _feature(products[i, j], norm, base_squared[j], rate, bias[j])


@njit(nogil=True)
def _fixed_dot(left, i, right, j, partial):  # type: ignore[no-untyped-def]
    """left[i] . right[j] in ``LANES`` fixed partial sums of float64; ``partial`` (LANES,) is scratch."""
    d = left.shape[1]
    whole = d - d % LANES
    for lane in range(LANES):
        partial[lane] = 0.0
    for k in range(0, whole, LANES):
        for lane in range(LANES):
            partial[lane] += np.float64(left[i, k + lane]) * np.float64(right[j, k + lane])
    total = 0.0
    for k in range(whole, d):
        total += np.float64(left[i, k]) * np.float64(right[j, k])
    for lane in range(LANES):
        total += partial[lane]
    return total


@njit(nogil=True)
def _fill_features(centred, i, squared, rate, bases, base_squared, bias, features, partial):  # type: ignore[no-untyped-def]
    """Fill ``features`` (1, m) with those of row i as defined; ``partial`` (LANES,) is scratch."""
    norm = np.sqrt(squared)
    for j in range(bases.shape[0]):
        product = _fixed_dot(centred, i, bases, j, partial)
        features[0, j] = _feature(product, norm, base_squared[j], rate, bias[j])


@njit(nogil=True)
def _fill_scores(centred, squared, rate, bases, base_squared, bias, columns, scores):  # type: ignore[no-untyped-def]
    """Fill ``scores`` (n, r) as defined; ``columns`` (r, m) are the weights transposed."""
    partial = np.empty(LANES, dtype=np.float64)
    features = np.empty((1, bases.shape[0]), dtype=np.float64)
    for i in range(scores.shape[0]):
        _fill_features(centred, i, squared[i], rate, bases, base_squared, bias, features, partial)
        for k in range(scores.shape[1]):
            scores[i, k] = _fixed_dot(features, 0, columns, k, partial)


@njit(nogil=True)
def _set_exact_bits(  # type: ignore[no-untyped-def]
    centred, squared, rate, bases, base_squared, bias, columns, open_rows, open_bits, bits
):
    """Pairs come row by row, so that the features of a row are computed once."""
    partial = np.empty(LANES, dtype=np.float64)
    features = np.empty((1, bases.shape[0]), dtype=np.float64)
    last = -1
    for p in range(open_rows.shape[0]):
        i = open_rows[p]
        if i != last:
            _fill_features(centred, i, squared[i], rate, bases, base_squared, bias, features, partial)
            last = i
        bits[i, open_bits[p]] = _fixed_dot(features, 0, columns, open_bits[p], partial) > 0.0
