"""One step of k-means on a block of rows, and the few rows that represent each cluster, as mergeable
statistics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from och_dist.errors import BadInputError, ConflictError, UsageError
from och_dist.kernels.compiled import njit
from och_dist.kernels.fixed_order import squared_distance
from och_dist.kernels.lloyd import Round, begin_round, bounded, rounding, score_of
from och_dist.kernels.moments import check_finite, check_rows
from och_dist.kernels.simd import LANES

NONE = np.int64(-1)
"""Stands for a row number where a cluster has fewer members, or a block fewer far rows, than there is
room for."""

SQUARED_LIMIT = 1e30
"""Rows farther than this from the centres, in units of their spread, could overflow float32: all are measured."""

LAST_PRIORITY = np.uint64(0xFFFF_FFFF_FFFF_FFFF)


@dataclass(frozen=True, eq=False)
class ClusterStats:
    """What a set of rows tells about L centres in d dimensions.

    ``counts`` (L,) int64, ``inertia``: the sum of squared distances. ``members``: of each cluster the m rows of
    smallest priority, with
    ``member_rows`` (L, m) int64 (-1: none), ``member_priority`` (L, m) uint64 ascending and ``members``
    (L, m, d) float32. ``far_*``: the f rows farthest from their centres, farthest first, with ``far_rows``
    (f,) int64 (-1: none), ``far_distances`` (f,) float64 squared and ``far_vectors`` (f, d) float32. Ties go
    to the smaller row.
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
        rows = np.concatenate([self.member_rows, other.member_rows], axis=1)
        priority = np.concatenate([self.member_priority, other.member_priority], axis=1)
        vectors = np.concatenate([self.members, other.members], axis=1)
        first = np.lexsort((rows, priority, rows < 0), axis=-1)[:, : self.member_rows.shape[1]]
        far_rows = np.concatenate([self.far_rows, other.far_rows])
        far_distances = np.concatenate([self.far_distances, other.far_distances])
        far_vectors = np.concatenate([self.far_vectors, other.far_vectors])
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
    check_rows(block, centres.shape[1])
    if centres.shape[0] == 0:
        raise BadInputError("there are no centres; expected at least one: train them first")
    check_finite(block, first_row=first_row)
    shared = begin_round(centres) if shared is None else shared
    exact = np.ascontiguousarray(centres, np.float64)
    labels = np.empty(block.shape[0], dtype=np.int32)
    distances = np.empty(block.shape[0], dtype=np.float64)
    error = 2.0 * rounding(centres.shape[1]) * float(np.sqrt(shared.squared.max()))
    for part in bounded(block, shared):
        step = slice(part.start, part.start + len(part.rows))
        labels[step] = part.bounds.argmin(axis=1)
        errors = error * (np.sqrt(part.squared) + np.sqrt(shared.squared.max()))
        _exact_nearest(
            *(part.bounds, part.slack, part.centred, part.squared, shared.centres, shared.squared),
            *(errors, part.rows, exact, labels[step], distances[step]),
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
    if n_members < 0 or n_far < 0:
        raise UsageError(f"n_members={n_members}, n_far={n_far}; expected numbers of at least 0")
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


@njit(nogil=True)
def _exact_nearest(  # type: ignore[no-untyped-def]
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
        best = np.inf if whole else score_of(centred, i, near, near_squared, labels[i])
        count = 0
        for j in range(n_centres):
            if not whole and bounds[i, j] > best + slack[i]:
                continue
            value = 0.0 if whole else score_of(centred, i, near, near_squared, j)
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
