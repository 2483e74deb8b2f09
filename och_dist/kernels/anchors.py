"""The anchor graph of a block of rows: each row as a mixture of its few nearest anchors, and codes from mixtures.

Definition of a code. The nearest anchors of a row are in the total order (distance, anchor), distances as
``euclidean`` defines them. Anchor a of a row has the weight exp(-(d_a^2 - d_min^2) / h^2), divided by the sum of the
row's weights; a score is the sum of weight times the anchor's value, added in the order of the anchors, all in
float64. The exponential is our own sequence of additions and multiplications, so that every bit is the same on every
machine and in every block.
"""

from __future__ import annotations

import numpy as np

from och_dist.kernels.compiled import njit
from och_dist.kernels.euclidean import euclidean_top_k
from och_dist.kernels.fixed_order import exp_minus
from och_dist.kernels.moments import ROWS_PER_BLOCK, check_finite, check_rows, float_blocks, refuse_row
from och_dist.kernels.packing import pack_bits

OVERFLOW = "overflow in the distances of row {} to the anchors; expected squares within the range of float64"


def nearest_anchors(
    block: np.ndarray, anchors: np.ndarray, n_neighbours: int, *, first_row: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers (n, s) int64 and squared distances (n, s) of ``anchors`` (m, d) nearest to rows of ``block`` (n, d).

    s is ``n_neighbours`` or, if there are fewer anchors, their number. ``first_row`` is the global number of the first
    row, for error messages: rows with NaN or infinity raise ``NonFiniteError``, rows so far away that a squared
    distance exceeds float64 raise ``BadInputError``.
    """
    check_rows(block, anchors.shape[1])
    check_finite(block, first_row=first_row)
    shape = len(block), min(n_neighbours, len(anchors))
    numbers, distances = np.empty(shape, dtype=np.int64), np.empty(shape)
    for place, rows in float_blocks(block, anchors.shape[1]):
        distances[place], numbers[place] = euclidean_top_k(rows, anchors, n_neighbours).dense(n_neighbours)
    usable = np.isfinite(distances).all(axis=1)
    if not usable.all():
        refuse_row(block, first_row, int(np.argmin(usable)), OVERFLOW)
    return numbers, distances


def anchor_shares(distances: np.ndarray, bandwidth: float) -> np.ndarray:
    """Shares (n, s) of the anchors at squared ``distances`` (n, s), nearest first; each row sums to 1.

    ``bandwidth`` is h^2, above 0. The nearest distance is subtracted first: a row far from all anchors has shares, too.
    """
    return _shares(np.ascontiguousarray(distances, dtype=np.float64), float(bandwidth))


def anchor_scores(numbers: np.ndarray, shares: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Scores (n, q) float64 of rows given by anchor ``numbers`` and ``shares`` (n, s), under ``weights`` (m, q)."""
    scores = np.empty((numbers.shape[0], weights.shape[1]))
    _scores(numbers, shares, np.ascontiguousarray(weights, dtype=np.float64), scores)
    return scores


def encode_anchors(
    block: np.ndarray,
    anchors: np.ndarray,
    bandwidth: float,
    weights: np.ndarray,
    thresholds: np.ndarray | None = None,
    *,
    n_neighbours: int,
    first_row: int = 0,
) -> np.ndarray:
    """Codes of ``block`` (n, d) as (n, bytes) uint8, little bit order, pad bits zero.

    ``anchors`` (m, d) float32, ``weights`` (m, q) float64. Bit k is score k > 0. With ``thresholds`` (2, q) q more bits
    follow, which divide each half again: score - thresholds[0] > 0 where the score is above 0, thresholds[1] - score
    > 0 elsewhere. Errors as in :func:`nearest_anchors`.
    """
    n_bits = weights.shape[1] * (1 if thresholds is None else 2)
    codes = np.empty((len(block), -(-n_bits // 8)), dtype=np.uint8)
    numbers, distances = nearest_anchors(block, anchors, n_neighbours, first_row=first_row)
    for start in range(0, len(block), ROWS_PER_BLOCK):
        place = slice(start, start + ROWS_PER_BLOCK)
        scores = anchor_scores(numbers[place], anchor_shares(distances[place], bandwidth), weights)
        bits = scores > 0
        if thresholds is not None:
            halves = np.where(bits, scores > thresholds[0], thresholds[1] > scores)
            bits = np.concatenate([bits, halves], axis=1)
        codes[place] = pack_bits(bits)
    return codes


@njit(nogil=True)
def _shares(distances, bandwidth):  # type: ignore[no-untyped-def]
    n, s = distances.shape
    out = np.empty((n, s), dtype=np.float64)
    for i in range(n):
        total = 0.0
        for a in range(s):
            out[i, a] = exp_minus((distances[i, a] - distances[i, 0]) / bandwidth)
            total += out[i, a]
        for a in range(s):
            out[i, a] /= total
    return out


@njit(nogil=True)
def _scores(numbers, shares, weights, out):  # type: ignore[no-untyped-def]
    for i in range(numbers.shape[0]):
        for k in range(weights.shape[1]):
            out[i, k] = 0.0
        for a in range(numbers.shape[1]):
            share, anchor = shares[i, a], numbers[i, a]
            for k in range(weights.shape[1]):
                out[i, k] += share * weights[anchor, k]
