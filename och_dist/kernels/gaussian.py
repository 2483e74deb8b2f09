"""Gaussian kernel features of a block of rows, and codes that are the signs of their linear combinations.

Definition of a code. A row x is centred elementwise in float32 (float64 rows: subtracted in float64, then rounded),
c = float32(x - mean), and brought to length 1, y = c / |c| (y = 0 where c = 0). With the squared distance to base j,
s_j = |y|^2 + |b_j|^2 - 2 c.b_j / |c| (never below 0), its feature is k_j = exp(-s_j / (2 bandwidth)) - bias_j.
Bit k is 1 exactly when sum_j k_j W_jk > 0. All of this is float64 in one fixed order, the exponential included
(``exp_minus``), hence the same on every machine.

Matrix products in float64 give the sign wherever its magnitude exceeds a rigorous bound on how far two orders of
summation can lie apart; the rare scores inside the bound are computed as defined. The weights of a learned model
cancel too much for products in float32: their bound would leave about 5 % of the bits open.
"""

from __future__ import annotations

import numpy as np

from och_dist.kernels.compiled import njit
from och_dist.kernels.fixed_order import SAFETY, centred_rows, exp_minus, fixed_dot
from och_dist.kernels.moments import as_float_rows, float_blocks, refuse_row
from och_dist.kernels.packing import pack_bits
from och_dist.kernels.simd import LANES

ROWS_PER_BLOCK = 512
OVERFLOW = "overflow in row {}; expected differences from the mean within the range of float32"

ROUNDOFF = 2.0**-53
DECAY_ERROR = 2.0**-48
"""Generous bound of the absolute error of ``exp_minus`` and of the operations around it."""

DEEPEST = 700.0
"""Beyond it exp(-z) is close to underflow, where processors may differ: it is held there."""


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
    bound = features.error() * np.abs(weights).sum(axis=0) + np.finfo(np.float64).tiny
    columns = np.ascontiguousarray(weights.T)
    codes = np.empty((block.shape[0], -(-len(columns) // 8)), dtype=np.uint8)
    for place, rows in float_blocks(block, len(mean), ROWS_PER_BLOCK):
        centred, squared = features.centred(rows)
        if not np.isfinite(squared).all():
            refuse_row(block, first_row, place.start + int(np.argmin(np.isfinite(squared))), OVERFLOW)
        scores = features.of_centred(centred, squared) @ weights
        _fill_scores(centred, squared, *features.exact, columns, *np.nonzero(np.abs(scores) <= bound), scores)
        codes[place] = pack_bits(scores > 0)
    return codes


def gaussian_scores(
    block: np.ndarray, mean: np.ndarray, bases: np.ndarray, bandwidth: float, bias: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Scores (n, r) float64 of ``block`` (n, d), sum_j k_j W_jk as defined above, the same on every machine.

    The arguments are those of :func:`encode_gaussian`. Slower than codes by far: meant for queries.
    """
    features = GaussianFeatures(mean, bases, bandwidth, bias)
    columns = np.ascontiguousarray(weights.T)
    scores = np.empty((block.shape[0], len(columns)))
    for place, rows in float_blocks(block, len(mean), ROWS_PER_BLOCK):
        every = np.indices(scores[place].shape).reshape(2, -1)
        _fill_scores(*features.centred(rows), *features.exact, columns, *every, scores[place])
    return scores


class GaussianFeatures:
    """The features k (n, m) of rows: ``mean`` (d,) float32, ``bases`` (m, d) float32, ``bias`` (m,) float64."""

    def __init__(self, mean: np.ndarray, bases: np.ndarray, bandwidth: float, bias: np.ndarray) -> None:
        self.mean, self.bases, self.bias = mean, bases, bias
        self.rate = 0.5 / float(bandwidth)
        self.base_squared = centred_rows(bases, np.zeros_like(mean))[1]
        self.exact = self.rate, bases, self.base_squared, bias
        self._columns = bases.astype(np.float64).T

    def centred(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``rows`` (n, d) minus the mean in float32, and squared norms (n,) float64."""
        return centred_rows(as_float_rows(rows), self.mean)

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


@njit(nogil=True)
def _feature(product, norm, base_squared, rate, bias):  # type: ignore[no-untyped-def]
    """The feature from the product c.b; ``norm`` is that of c."""
    separation = base_squared
    if norm > 0.0:
        separation = (1.0 + base_squared) - 2.0 * (product / norm)
    return exp_minus(min(max(separation, 0.0) * rate, DEEPEST)) - bias


@njit(nogil=True)
def _finish_features(products, squared, base_squared, rate, bias):  # type: ignore[no-untyped-def]
    for i in range(products.shape[0]):
        norm = np.sqrt(squared[i])
        for j in range(products.shape[1]):
            products[i, j] = _feature(products[i, j], norm, base_squared[j], rate, bias[j])


@njit(nogil=True)
def _fill_scores(  # type: ignore[no-untyped-def]
    centred, squared, rate, bases, base_squared, bias, columns, pair_row, pair_bit, scores
):
    """Set ``scores[pair_row[p], pair_bit[p]]`` as defined; ``columns`` (r, m) are the weights transposed.

    Pairs come row by row, so that the features of a row are computed once.
    """
    partial = np.empty(LANES, dtype=np.float64)
    features = np.empty((1, bases.shape[0]), dtype=np.float64)
    last = -1
    for p in range(pair_row.shape[0]):
        i, k = pair_row[p], pair_bit[p]
        if i != last:
            norm, last = np.sqrt(squared[i]), i
            for j in range(bases.shape[0]):
                product = fixed_dot(centred, i, bases, j, 0.0, partial)
                features[0, j] = _feature(product, norm, base_squared[j], rate, bias[j])
        scores[i, k] = fixed_dot(features, 0, columns, k, 0.0, partial)
