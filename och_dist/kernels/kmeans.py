"""k-means on a block of rows: the nearest centre of each row, and what rows tell about the centres, as mergeable sums.

Centres are averages, so a few axes V hold nearly all that tells them apart, and most centres can be ruled out there.
With x and c taken about the mean of the centres, y = x V and z = c V, the score |c|^2 - 2 x.c, which is least for the
nearest centre, obeys (Cauchy and Schwarz, on what the axes leave of x and c)

    |c|^2 - 2 x.c  >=  |c|^2 - 2 y.z - 2 |x - y V^T| |c - z V^T|.

One narrow matrix product gives this bound for all centres; the score itself is computed only where the bound does not
exceed the best score so far. No row keeps a state between rounds, so rows may be read anew in each of them.

Scores are float32: in a round of Lloyd's (``block_sums``, ``block_labels``), of centres that are equally near up to
rounding either may be taken, the same one on every run on the same kind of processor. Labels that must never depend on
it come from ``assign``, which measures the few centres that scores leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from och_dist.errors import BadInputError, ConflictError
from och_dist.kernels.compiled import njit
from och_dist.kernels.fixed_order import ROUNDOFF, squared_distance
from och_dist.kernels.moments import ROWS_PER_BLOCK, check_finite, check_rows, float_blocks
from och_dist.kernels.simd import LANES

NONE = np.int64(-1)
"""Stands for a row number where there are fewer rows than there is room for."""

SQUARED_LIMIT = 1e30
"""Rows farther than this from the centres, in units of their spread, could overflow float32: all are measured."""

LAST_PRIORITY = np.uint64(0xFFFF_FFFF_FFFF_FFFF)

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
    for part in _bounded(block, shared):
        labels, distances = _nearest(part, shared)
        order = np.argsort(labels.astype(np.uint16) if n_centres < 1 << 16 else labels, kind="stable")
        _add_rows(part.rows, labels, order, counts, sums)
        inertia += float(distances.sum())
    return ClusterSums(counts, sums, inertia)


def block_labels(block: np.ndarray, shared: Round) -> np.ndarray:
    """(n,) int32, the nearest centre of each row of ``block`` (n, d)."""
    parts = [_nearest(part, shared)[0] for part in _bounded(block, shared)]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class Bounded:
    """Some rows (m, d) as floats, their place, and in units of the round: ``centred`` (m, d) float32, ``squared`` (m,)
    float64 lengths, ``bounds`` (m, L) float32, each at most its score + ``slack`` (m,) float64. The arrays are used
    again for the rows that follow.
    """

    place: slice
    rows: np.ndarray
    centred: np.ndarray
    squared: np.ndarray
    bounds: np.ndarray
    slack: np.ndarray


def _bounded(block: np.ndarray, shared: Round) -> Iterator[Bounded]:
    """The rows of ``block`` (n, d), a few at a time, with a lower bound of the score of every centre."""
    n_centres, d = shared.centres.shape
    size = max(1, min(ROWS_PER_BLOCK, block.shape[0]))
    centred, squared = np.empty((size, d), np.float32), np.empty(size)
    bounds, features = np.empty((size, n_centres), np.float32), np.empty((size, shared.axes.shape[1]), np.float32)
    reach, noise = float(np.sqrt(shared.squared.max())), _rounding(d, shared.axes.shape[1])
    factors = shared.bounds if features.size else np.ascontiguousarray(-2.0 * shared.centres.T)
    for place, rows in float_blocks(block, d, size):
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
        yield Bounded(place, rows, centred[:m], squared[:m], bounds[:m], slack)


def _rounding(d: int, p: int = 0) -> float:
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


@dataclass(frozen=True, eq=False)
class ClusterStats:
    """What a set of rows tells about L centres in d dimensions.

    ``counts`` (L,) int64, ``inertia``: the sum of squared distances. Of each cluster the m rows of smallest priority:
    ``member_rows`` (L, m) int64 (-1: none), ``member_priority`` (L, m) uint64 ascending, ``members`` (L, m, d) float32.
    The f rows farthest from their centres, farthest first: ``far_rows`` (f,) int64 (-1: none), ``far_distances`` (f,)
    float64 squared, ``far_vectors`` (f, d) float32. Ties go to the smaller row.
    """

    counts: np.ndarray
    inertia: float
    member_rows: np.ndarray
    member_priority: np.ndarray
    members: np.ndarray
    far_rows: np.ndarray
    far_distances: np.ndarray
    far_vectors: np.ndarray

    def merge(self, other: ClusterStats) -> ClusterStats:
        """Statistics of the rows of both; the row numbers must be disjoint."""
        if self.members.shape != other.members.shape or self.far_vectors.shape != other.far_vectors.shape:
            raise ConflictError(
                f"members {self.members.shape} and {other.members.shape}, "
                f"far rows {self.far_vectors.shape} and {other.far_vectors.shape}; "
                "expected equal shapes: use the same options for all blocks"
            )

        def both(name: str, axis: int) -> np.ndarray:
            return np.concatenate([getattr(self, name), getattr(other, name)], axis=axis)

        rows, priority, vectors = (both(name, 1) for name in ("member_rows", "member_priority", "members"))
        first = np.lexsort((rows, priority, rows < 0), axis=-1)[:, : self.member_rows.shape[1]]
        far_rows, far_distances, far_vectors = (both(f"far_{name}", 0) for name in ("rows", "distances", "vectors"))
        far = np.lexsort((far_rows, -far_distances, far_rows < 0))[: self.far_rows.size]
        return ClusterStats(
            counts=self.counts + other.counts,
            inertia=self.inertia + other.inertia,
            member_rows=np.take_along_axis(rows, first, axis=1),
            member_priority=np.take_along_axis(priority, first, axis=1),
            members=np.take_along_axis(vectors, first[:, :, None], axis=1),
            far_rows=far_rows[far],
            far_distances=far_distances[far],
            far_vectors=far_vectors[far],
        )


def row_priority(rows: np.ndarray, seed: int) -> np.ndarray:
    """Priorities uint64 of global row numbers: a keyed hash (splitmix64), so that a sample by smallest
    priority is uniform and does not depend on how the rows are cut into blocks."""
    key = _splitmix(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64))
    return _splitmix(np.asarray(rows).astype(np.uint64) ^ key)


def assign(
    block: np.ndarray, centres: np.ndarray, *, first_row: int = 0, shared: Round | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Nearest centre of each row: labels (n,) int32 and squared distances (n,) float64.

    ``block`` (n, d), ``centres`` (L, d). Distances are exact in the sense of ``euclidean`` and ties go to the
    smaller label, so that a row has one label whatever block it comes in. ``shared`` is ``begin_round(centres)``, for
    callers with many blocks.
    """
    shared = begin_round(centres) if shared is None else shared
    check_rows(block, centres.shape[1])
    check_finite(block, first_row=first_row)
    exact = np.ascontiguousarray(centres, np.float64)
    labels, distances = np.empty(len(block), np.int32), np.empty(len(block))
    reach = float(np.sqrt(shared.squared.max()))
    for part in _bounded(block, shared):
        labels[part.place] = part.bounds.argmin(axis=1)
        errors = 2.0 * _rounding(block.shape[1]) * reach * (np.sqrt(part.squared) + reach)
        _measure_nearest(
            *(part.bounds, part.slack, part.centred, part.squared, shared.centres, shared.squared),
            *(errors, part.rows, exact, labels[part.place], distances[part.place]),
        )
    return labels, distances


def block_clusters(
    block: np.ndarray,
    centres: np.ndarray,
    *,
    first_row: int,
    seed: int,
    n_members: int = 2,
    n_far: int = 8,
    shared: Round | None = None,
) -> ClusterStats:
    """Statistics of the rows of ``block`` (n, d), counted from ``first_row``, about ``centres`` (L, d)."""
    labels, distances = assign(block, centres, first_row=first_row, shared=shared)
    n_labels = len(centres)
    priority = row_priority(first_row + np.arange(block.shape[0]), seed)
    chosen = _first_members(labels, priority, n_labels, n_members)
    far = np.full(n_far, NONE)
    farthest = np.lexsort((np.arange(distances.size), -distances))[:n_far]
    far[: farthest.size] = farthest
    return ClusterStats(
        counts=np.bincount(labels, minlength=n_labels),
        inertia=float(distances.sum()),
        member_rows=np.where(chosen < 0, NONE, chosen + first_row),
        member_priority=_picked(priority, chosen, LAST_PRIORITY),
        members=_picked(block, chosen, 0).astype(np.float32),
        far_rows=np.where(far < 0, NONE, far + first_row),
        far_distances=_picked(distances, far, -1.0),
        far_vectors=_picked(block, far, 0).astype(np.float32),
    )


def _first_members(labels: np.ndarray, priority: np.ndarray, n_labels: int, n_members: int) -> np.ndarray:
    """Local rows (L, m) int64 of smallest (priority, row) of each label, -1 where there are fewer."""
    chosen = np.full((n_labels, n_members), NONE)
    order = np.lexsort((priority, labels))  # stable: equal priorities stay in row order
    ordered = labels[order]
    place = np.arange(order.size) - np.searchsorted(ordered, ordered)
    kept = place < n_members
    chosen[ordered[kept], place[kept]] = order[kept]
    return chosen


def _picked(values: np.ndarray, index: np.ndarray, none: float | np.uint64) -> np.ndarray:
    """``values[index]``, and ``none`` where the index is -1."""
    if values.shape[0] == 0:
        return np.full(index.shape + values.shape[1:], none, dtype=values.dtype)
    picked = values[index]
    picked[index < 0] = none
    return picked


def _splitmix(state: np.ndarray) -> np.ndarray:
    """One output of splitmix64 (Steele, Lea and Flood 2014) for each uint64 state; arrays wrap silently."""
    z = state + np.uint64(0x9E37_79B9_7F4A_7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return z ^ (z >> np.uint64(31))


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
def _score(centred, i, centres, squared, j):  # type: ignore[no-untyped-def]
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
        best, score = guess, _score(centred, i, centres, squared, guess)
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
                other = _score(centred, i, centres, squared, j)
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


@njit(nogil=True)
def _measure_nearest(  # type: ignore[no-untyped-def]
    bounds, slack, centred, squared, near, near_squared, errors, rows, centres, labels, distances
):
    """Replace the first guess in ``labels`` by the nearest of ``centres`` (L, d) float64, the smaller of equals.

    Bounds rule most centres out, scores in float32 most of the others; what is left is measured exactly.
    """
    n_centres = bounds.shape[1]
    partial = np.empty(LANES, dtype=np.float64)
    scores = np.empty(n_centres, dtype=np.float64)
    left = np.empty(n_centres, dtype=np.int64)
    for i in range(bounds.shape[0]):
        whole = not squared[i] <= SQUARED_LIMIT
        best = np.inf if whole else _score(centred, i, near, near_squared, labels[i])
        count = 0
        for j in range(n_centres):
            if not whole and bounds[i, j] > best + slack[i]:
                continue
            value = 0.0 if whole else _score(centred, i, near, near_squared, j)
            best = min(best, value)
            left[count], scores[count] = j, value
            count += 1
        nearest = np.inf
        for c in range(count):
            if not whole and scores[c] > best + errors[i]:
                continue
            distance = squared_distance(centres, left[c], rows, i, partial)
            if distance < nearest:
                labels[i], nearest = left[c], distance
        distances[i] = nearest
