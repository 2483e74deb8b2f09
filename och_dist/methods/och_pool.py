"""What a step of OCH draws from: the training rows on their leading axes, and samplers of anchors and landmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from och_dist.errors import BadInputError
from och_dist.kernels.ordinal import near_sets
from och_dist.methods.base import TrainingData

__all__ = ["Pool", "Sampler", "nearest_centres"]

_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class Pool:
    """The rows a step may draw: the training rows, then the centres, by one running number."""

    points: np.ndarray
    """(rows + centres, q) float32: coordinates on the leading axes, about the mean, in units of the scale."""
    squared_norms: np.ndarray
    """(rows + centres,) float32, of the whole vectors."""
    reduced_rows: np.ndarray
    """(rows + centres, p) float32: the first p of the coordinates."""

    @classmethod
    def reduced(cls, data: TrainingData, axes: np.ndarray, p: int, scale: float) -> Pool:
        """Project all rows on the ``axes`` (d, q), in units of ``scale``."""
        centres = data.rows[:0] if data.centres is None else data.centres
        centred = np.concatenate([data.rows, centres]).astype(np.float32, copy=False)
        centred -= data.mean.astype(np.float32)
        centred *= np.float32(1.0 / scale)
        points = centred @ axes.astype(np.float32)
        squared_norms = np.einsum("ij,ij->i", centred, centred)
        return cls(points, squared_norms, np.ascontiguousarray(points[:, :p]))

    def relations(self, anchors: np.ndarray, landmarks: np.ndarray, k: int) -> np.ndarray:
        """(m, S) relations by distance: whole norms, and products on the leading axes.

        Beyond 64 axes the products of two centred rows nearly cancel: on held-out rows the codes are as
        good as with products of whole vectors, for a fraction of the time when d is large.
        """
        # Without the anchor's own norm: it is the same for all its landmarks.
        distances = self.points[anchors] @ self.points[landmarks].T
        distances *= np.float32(-2)
        distances += self.squared_norms[landmarks]
        return near_sets(distances, anchors[:, None] == landmarks, k)


@dataclass(frozen=True)
class Sampler:
    """Draws anchors and landmarks by number: some of each group, or a plain sample when there is one."""

    n_rows: int
    n_anchors: int
    order: np.ndarray
    """Row numbers, group by group."""
    starts: np.ndarray
    counts: np.ndarray
    n_drawn: int
    """Draws from each group."""

    @classmethod
    def of_rows(cls, n_rows: int, n_landmarks: int, n_anchors: int) -> Sampler:
        whole = np.array([0]), np.array([n_rows])
        return cls(n_rows, n_anchors, np.arange(n_rows), *whole, min(n_landmarks, n_rows))

    @classmethod
    def of_centres(cls, n_rows: int, n_centres: int, n_anchors: int) -> Sampler:
        each = np.arange(n_centres)
        return cls(n_rows, n_anchors, n_rows + each, each, np.ones_like(each), 1)

    @classmethod
    def of_members(cls, labels: np.ndarray, n_centres: int, n_members: int, n_anchors: int) -> Sampler:
        """Groups are clusters; a cluster without a row in the pool is represented by its centre."""
        n_rows = len(labels)
        empty = np.setdiff1d(np.arange(n_centres), labels)
        groups = np.concatenate([labels, empty])
        order = np.argsort(groups, kind="stable")
        numbers = np.concatenate([np.arange(n_rows), n_rows + empty])
        counts = np.bincount(groups, minlength=n_centres)
        return cls(n_rows, n_anchors, numbers[order], np.cumsum(counts) - counts, counts, n_members)

    def in_proportion(self) -> Sampler:
        """As many draws, one from each of as many equal stretches of the order: groups by their size, not alike."""
        n = len(self.order)
        n_stretches = min(self.n_drawn * len(self.counts), n)
        cuts = np.arange(n_stretches + 1) * n // n_stretches
        return replace(self, starts=cuts[:-1], counts=np.diff(cuts), n_drawn=1)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Distinct anchors (m,) among the rows and distinct landmarks (S,)."""
        anchors = rng.choice(self.n_rows, min(self.n_anchors, self.n_rows), replace=False)
        if len(self.counts) == 1:
            return anchors, rng.choice(self.order, min(self.n_drawn, len(self.order)), replace=False)
        picks = (rng.random((self.n_drawn, len(self.counts))) * self.counts).astype(np.int64)
        landmarks = self.order[self.starts + picks].reshape(-1)
        return anchors, landmarks if self.n_drawn == 1 else np.unique(landmarks)


def _blocks(*arrays: np.ndarray) -> Iterator[np.ndarray]:
    for array in arrays:
        for start in range(0, len(array), _BLOCK_ROWS):
            yield array[start : start + _BLOCK_ROWS]


def nearest_centres(data: TrainingData, centres: np.ndarray) -> np.ndarray:
    """(m,) nearest centre of each row of the pool, computed when the data come without."""
    if data.labels is not None:
        if len(data.labels) != len(data.rows):
            raise BadInputError(f"{len(data.labels)} labels of {len(data.rows)} rows; pass one for each row")
        return np.asarray(data.labels, dtype=np.int64)
    centres = centres - data.mean
    half_norms = 0.5 * np.einsum("ij,ij->i", centres, centres)
    return np.concatenate(
        [np.argmin(half_norms - (block - data.mean) @ centres.T, axis=1) for block in _blocks(data.rows)]
    )
