"""One round of Lloyd's k-means on a block of rows: the nearest centre of each row, and the sums of each cluster.

Centres are averages, so a few axes V hold nearly all that tells them apart, and most centres can be ruled out there.
With x and c taken about the mean of the centres, y = x V and z = c V, the score |c|^2 - 2 x.c, which is least for the
nearest centre, obeys (Cauchy and Schwarz, on what the axes leave of x and c)

    |c|^2 - 2 x.c  >=  |c|^2 - 2 y.z - 2 |x - y V^T| |c - z V^T|.

One narrow matrix product gives this bound for all centres; the score itself is computed only where the bound does not
exceed the best score so far. No row keeps a state between rounds, so rows may be read anew in each of them.

Scores are float32: of centres that are equally near up to rounding, either may be taken, the same one on every run on
the same kind of processor. Labels that must never depend on it come from :mod:`och_dist.kernels.clusters`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from och_dist.errors import BadInputError, ConflictError
from och_dist.kernels.compiled import njit
from och_dist.kernels.moments import as_float_rows, check_rows

ROWS_PER_BLOCK = 1024
ROUNDOFF = 2.0**-24
REST = 0.04
"""Share of the squared lengths of the centres that may lie off the axes."""

DENSE = 0.6
"""Cost of the bounds, relative to all scores, from which on all scores are computed instead."""

WIDTH = 16
EXTRA = 2
FAST = {"reassoc", "contract"}
"""Sums may be reordered: they repeat on one kind of processor, and nothing here promises more."""


@dataclass(frozen=True, eq=False)
class Round:
    """What all blocks of a round share, in units of ``scale``, a power of two that brings centres near 1.

    ``origin`` (d,) float32, ``centres`` (L, d) float32 about it, ``squared`` (L,) float32 their squared lengths.
    ``axes`` (d, p + 2) float32, the last two columns zero; ``bounds`` (p + 2, L) float32 turns (y, 1, rest of x) into
    lower bounds. Where axes do not pay, ``axes`` has no columns.
    """

    origin: np.ndarray
    scale: float
    centres: np.ndarray
    squared: np.ndarray
    axes: np.ndarray
    bounds: np.ndarray


@dataclass(frozen=True, eq=False)
class ClusterSums:
    """``counts`` (L,) int64, ``sums`` (L, d) float64 of the rows as they are, ``inertia``: sum of squared distances."""

    counts: np.ndarray
    sums: np.ndarray
    inertia: float

    def merge(self, other: ClusterSums) -> ClusterSums:
        """Sums of the rows of both, from the same round."""
        if self.sums.shape != other.sums.shape:
            raise ConflictError(
                f"sums {self.sums.shape} and {other.sums.shape}; expected equal shapes: use one round for all blocks"
            )
        return ClusterSums(self.counts + other.counts, self.sums + other.sums, self.inertia + other.inertia)


def begin_round(centres: np.ndarray) -> Round:
    """Prepare ``centres`` (L, d) for a round."""
    if centres.ndim != 2 or not len(centres):
        raise BadInputError(f"centres of shape {centres.shape}; expected (L, d) with at least one: choose seeds first")
    if not np.isfinite(centres).all():
        raise BadInputError("some centres hold NaN or infinity; expected finite numbers: seed them from finite rows")
    origin = centres.mean(axis=0, dtype=np.float64).astype(np.float32)
    about = centres.astype(np.float64) - origin
    largest = float(np.abs(about).max(initial=0.0))
    scale = 2.0 ** -int(np.clip(np.frexp(largest)[1], -120, 120))
    about = (about * scale).astype(np.float32)
    squared = (about.astype(np.float64) ** 2).sum(axis=1).astype(np.float32)
    axes, bounds = _axes(about, squared)
    return Round(origin, scale, about, squared, axes, bounds)


def _axes(centres: np.ndarray, squared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As few principal axes as leave ``REST`` of the centres, and the matrix of bounds on them."""
    n, d = centres.shape
    exact = centres.astype(np.float64)
    gram = exact @ exact.T if n <= d else exact.T @ exact
    values, vectors = np.linalg.eigh(gram)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    left = values.sum() - np.cumsum(values)
    p = int(np.searchsorted(-left, -REST * values.sum())) + 1
    p = -(-(p + EXTRA) // WIDTH) * WIDTH - EXTRA
    if not values.sum() or p > len(values) or p * (n + d) > DENSE * n * d:
        return np.empty((d, 0), np.float32), np.empty((0, n), np.float32)
    chosen = vectors[:, :p] if n > d else (exact.T @ vectors[:, :p]) / np.sqrt(values[:p])
    places = exact @ chosen
    rest = np.sqrt(np.maximum(squared - (places**2).sum(axis=1), 0.0) + ROUNDOFF * squared)
    axes = np.zeros((d, p + EXTRA), np.float32)
    axes[:, :p] = chosen
    return axes, np.concatenate([-2.0 * places.T, squared[None], -2.0 * rest[None]]).astype(np.float32)


def next_centres(total: ClusterSums, centres: np.ndarray) -> np.ndarray:
    """Means (L, d) float32 of the clusters; a cluster without rows keeps its place in ``centres`` (L, d)."""
    means = total.sums / np.maximum(total.counts, 1)[:, None]
    return np.where(total.counts[:, None] > 0, means, centres).astype(np.float32)


def block_sums(block: np.ndarray, shared: Round) -> ClusterSums:
    """Sums of the rows of ``block`` (n, d) by their nearest centres, with memory for 1,024 rows beside the sums."""
    n_centres, d = shared.centres.shape
    counts, sums, inertia = np.zeros(n_centres, np.int64), np.zeros((n_centres, d)), 0.0
    for part in bounded(block, shared):
        labels, distances = _nearest(part, shared)
        order = np.argsort(labels.astype(np.uint16) if n_centres < 1 << 16 else labels, kind="stable")
        _add_rows(part.rows, labels, order, counts, sums)
        inertia += float(distances.sum())
    return ClusterSums(counts, sums, inertia)


def block_labels(block: np.ndarray, shared: Round) -> np.ndarray:
    """(n,) int32, the nearest centre of each row of ``block`` (n, d)."""
    parts = [_nearest(part, shared)[0] for part in bounded(block, shared)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class Bounded:
    """Some rows (m, d) as floats from ``start`` on, and in units of the round: ``centred`` (m, d) float32, ``squared``
    (m,) float64 lengths, ``bounds`` (m, L) float32, each at most its score + ``slack`` (m,) float64. The arrays are
    used again for the rows that follow.
    """

    start: int
    rows: np.ndarray
    centred: np.ndarray
    squared: np.ndarray
    bounds: np.ndarray
    slack: np.ndarray


def bounded(block: np.ndarray, shared: Round) -> Iterator[Bounded]:
    """The rows of ``block`` (n, d), a few at a time, with a lower bound of the score of every centre."""
    n_centres, d = shared.centres.shape
    check_rows(block, d)
    size = max(1, min(ROWS_PER_BLOCK, block.shape[0]))
    centred, squared = np.empty((size, d), np.float32), np.empty(size)
    bounds, features = np.empty((size, n_centres), np.float32), np.empty((size, shared.axes.shape[1]), np.float32)
    reach, noise = float(np.sqrt(shared.squared.max())), rounding(d, shared.axes.shape[1])
    factors = shared.bounds if features.size else np.ascontiguousarray(-2.0 * shared.centres.T)
    for start in range(0, block.shape[0], size):
        rows = as_float_rows(block[start : start + size])
        m = len(rows)
        with np.errstate(over="ignore", invalid="ignore"):
            _centre(rows, shared.origin, shared.scale, centred[:m], squared[:m])
            if features.size:
                np.matmul(centred[:m], shared.axes, out=features[:m])
                _finish_features(features[:m], squared[:m], noise)
                np.matmul(features[:m], factors, out=bounds[:m])
            else:
                np.matmul(centred[:m], factors, out=bounds[:m])
                bounds[:m] += shared.squared
        slack = noise * reach * (np.sqrt(squared[:m]) + reach)
        yield Bounded(start, rows, centred[:m], squared[:m], bounds[:m], slack)


def rounding(d: int, p: int = 0) -> float:
    """Error of a score, or of a bound on ``p`` axes, relative to |c| (|x| + |c|), twofold safe.

    A sum of n products in float32 is wrong by less than n roundoffs (to first order); each of the p coordinates of a
    row has such an error of its own.
    """
    return 4.0 * (np.sqrt(p) + 1.0) * (d + p + 8) * ROUNDOFF


def _nearest(part: Bounded, shared: Round) -> tuple[np.ndarray, np.ndarray]:
    """Labels (m,) int32 and squared distances (m,) float64."""
    labels, scores = part.bounds.argmin(axis=1).astype(np.int32), np.empty(len(part.rows))
    _settle(part.bounds, part.centred, shared.centres, shared.squared, part.slack, labels, scores)
    return labels, np.maximum(part.squared + scores, 0.0) / shared.scale**2


@njit(nogil=True, fastmath=FAST)
def _centre(rows, origin, scale, centred, squared):  # type: ignore[no-untyped-def]
    for i in range(rows.shape[0]):
        total = 0.0
        for j in range(rows.shape[1]):
            value = np.float32((rows[i, j] - origin[j]) * np.float32(scale))
            centred[i, j] = value
            total += np.float64(value) * np.float64(value)
        squared[i] = total


@njit(nogil=True, fastmath=FAST)
def _finish_features(features, squared, noise):  # type: ignore[no-untyped-def]
    """Behind the coordinates of each row: 1, and the length of what the axes leave of it, rounded up."""
    p = features.shape[1] - EXTRA
    for i in range(features.shape[0]):
        total = 0.0
        for j in range(p):
            total += np.float64(features[i, j]) * np.float64(features[i, j])
        features[i, p] = 1.0
        features[i, p + 1] = np.sqrt(max(squared[i] - total, 0.0) + noise * squared[i])


@njit(nogil=True, fastmath=FAST)
def score_of(centred, i, centres, squared, j):  # type: ignore[no-untyped-def]
    product = np.float32(0.0)
    for k in range(centred.shape[1]):
        product += centred[i, k] * centres[j, k]
    return np.float64(squared[j]) - 2.0 * np.float64(product)


@njit(nogil=True)
def _settle(bounds, centred, centres, squared, slack, labels, scores):  # type: ignore[no-untyped-def]
    """Replace the first guess in ``labels`` by the centre of least score, the smaller one of equals."""
    n_centres = bounds.shape[1]
    for i in range(bounds.shape[0]):
        guess = labels[i]
        best, score = guess, score_of(centred, i, centres, squared, guess)
        for first in range(0, n_centres, WIDTH):
            last = min(first + WIDTH, n_centres)
            bar = np.float32(score + slack[i])
            hits = 0
            for j in range(first, last):
                hits += bounds[i, j] <= bar
            if hits == 0:
                continue
            for j in range(first, last):
                if j == guess or bounds[i, j] > score + slack[i]:
                    continue
                other = score_of(centred, i, centres, squared, j)
                if other < score or (other == score and j < best):
                    best, score = j, other
        labels[i] = best
        scores[i] = score


@njit(nogil=True)
def _add_rows(rows, labels, order, counts, sums):  # type: ignore[no-untyped-def]
    """Add rows in the order of their labels, so that one row of sums at a time is in the nearest cache."""
    d = rows.shape[1]
    partial = np.empty(d, np.float64)
    place = 0
    while place < order.shape[0]:
        label = labels[order[place]]
        partial[:] = 0.0
        first = place
        while place < order.shape[0] and labels[order[place]] == label:
            row = order[place]
            for j in range(d):
                partial[j] += np.float64(rows[row, j])
            place += 1
        counts[label] += place - first
        for j in range(d):
            sums[label, j] += partial[j]
