"""Ordinal Constraint Hashing: a linear hash learned so that near rows get closer codes than far rows.

The rows are reduced to the leading principal axes (the paper's ordinal constraint projection, Eq. 10) and
mapped by a frame V with orthonormal rows (columns when there are fewer bits than axes) and offsets b. V and b
descend the ordinal loss, V on the Stiefel manifold (Eq. 14-15). The cost does not depend on the corpus' size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
from scipy.linalg import eigh

from och_dist.errors import BadInputError
from och_dist.hashers.base import LinearHasher, Progress, TrainingData, is_integer, is_number
from och_dist.kernels.ordinal import near_sets, ordinal_loss_and_gradient
from och_dist.kernels.stiefel import polar, residual, retract, tangent

__all__ = ["OCH", "default_components", "principal_axes"]

_COMPONENTS = ((32, 20), (64, 24), (128, 32), (256, 40), (512, 48))
_MOST_COMPONENTS = 64
_ORDER_AXES = 64

_LEAST = {"n_centres": 1, "n_components": 1, "n_members": 1, "n_landmarks": 1, "n_anchors": 1, "max_iter": 0}

# The anchor itself, one near, one far.
_FEWEST_LANDMARKS = 3
_BLOCK_ROWS = 4096


def default_components(n_bits: int) -> int:
    """Principal axes that suit a code length: too many fit noise, too few lose order."""
    return next((p for bits, p in _COMPONENTS if n_bits <= bits), _MOST_COMPONENTS)


def principal_axes(data: TrainingData, n_components: int) -> tuple[np.ndarray, np.ndarray]:
    """Leading eigenvalues (p,) and axes (d, p) of the covariance, at most its rank, at least one.

    The sign of an axis is chosen so that its largest entry is positive. Without any variance the one axis is
    the first coordinate, with eigenvalue 0.
    """
    d = data.covariance.shape[0]
    p = min(n_components, d)
    values, axes = eigh(data.covariance, subset_by_index=(d - p, d - 1))
    values, axes = values[::-1], axes[:, ::-1]
    noise = np.finfo(np.float64).eps * d * max(values[0], 0.0)
    rank = int((values > noise).sum())
    if rank == 0:
        return np.zeros(1), np.eye(d, 1)
    axes = axes[:, :rank]
    largest = axes[np.abs(axes).argmax(axis=0), np.arange(rank)]
    return values[:rank], np.ascontiguousarray(axes * np.sign(largest))


class OCH(LinearHasher):
    """Ordinal Constraint Hashing.

    Parameters
    ----------
    n_bits
        Length of the code.
    n_centres
        Number of k-means clusters that the landmarks stand for.
    n_components
        Principal axes kept; None chooses by the code length, 20 (up to 32 bits) to 64 (1,024 bits).
    landmarks
        "members": random members of each cluster, redrawn at each step; "centres": the k-means centres;
        "rows": a random sample of rows, redrawn at each step.
    n_members
        Members drawn of each cluster at each step, with ``landmarks="members"``: two cost 1.6 times the time
        of one for about 1 % more mean average precision.
    n_landmarks
        Landmarks of a step, with ``landmarks="rows"``.
    n_anchors
        Rows drawn at each step whose order of landmarks is learned.
    near_fraction
        Share of the landmarks that counts as near, at least two landmarks.
    cross_weight
        Share of the relations that compare near and far pairs of different anchors: more makes distances of
        different queries comparable (pooled precision and recall), less favours the order within a query.
    offsets
        Learn offsets; without them every hyperplane passes through the mean.
    gain
        Factor inside tanh at the first and at the last step, in units of the rms projection.
    learning_rate, momentum, max_iter
        Steps of the optimiser, the rate falling linearly to zero; ``max_iter=0`` gives a random tight frame.
    random_state
        Seed of all draws.

    Attributes
    ----------
    mean_, projection_, offsets_
        The linear map, float32: (d,), (d, n_bits), (n_bits,).
    components_, rotation_
        Principal axes (p, d) and the frame V (p, n_bits), float64; ``projection_`` is their product.
    n_components_, n_iter_, loss_curve_, manifold_residual_, notes_
        Axes used, steps made, loss of each step, distance of V from its manifold, what was reduced and why.
    """

    method: ClassVar[str] = "och"

    def __init__(
        self,
        n_bits: int = 64,
        *,
        n_centres: int = 300,
        n_components: int | None = None,
        landmarks: Literal["members", "centres", "rows"] = "members",
        n_members: int = 1,
        n_landmarks: int = 300,
        n_anchors: int = 80,
        near_fraction: float = 0.02,
        cross_weight: float = 0.3,
        offsets: bool = True,
        gain: tuple[float, float] = (1.5, 4.0),
        learning_rate: float = 0.08,
        momentum: float = 0.9,
        max_iter: int = 300,
        random_state: Any = 0,
    ) -> None:
        self.n_bits = n_bits
        self.n_centres = n_centres
        self.n_components = n_components
        self.landmarks = landmarks
        self.n_members = n_members
        self.n_landmarks = n_landmarks
        self.n_anchors = n_anchors
        self.near_fraction = near_fraction
        self.cross_weight = cross_weight
        self.offsets = offsets
        self.gain = gain
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.max_iter = max_iter
        self.random_state = random_state

    def centres_wanted(self) -> int:
        """How many k-means centres are learned from; 0 for none."""
        return 0 if self.landmarks == "rows" or self.max_iter == 0 else int(self.n_centres)

    def check_parameters(self) -> None:
        super().check_parameters()
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not (name == "n_components" and value is None) and not (is_integer(value) and value >= least):
                self._refuse(name, f"an integer of at least {least}")
        if self.landmarks not in ("members", "centres", "rows"):
            self._refuse("landmarks", "'members', 'centres' or 'rows'")
        if not isinstance(self.offsets, (bool, np.bool_)):
            self._refuse("offsets", "True or False")
        if not (is_number(self.near_fraction) and 0 < self.near_fraction < 1):
            self._refuse("near_fraction", "a number between 0 and 1")
        if not (is_number(self.cross_weight) and 0 <= self.cross_weight <= 1):
            self._refuse("cross_weight", "a number from 0 to 1")
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            self._refuse("momentum", "a number from 0 to below 1")
        if not (is_number(self.learning_rate) and self.learning_rate > 0):
            self._refuse("learning_rate", "a number above 0")
        pair = isinstance(self.gain, (tuple, list)) and len(self.gain) == 2
        if not (pair and all(is_number(value) and value > 0 for value in self.gain)):
            self._refuse("gain", "two numbers above 0")

    def _refuse(self, name: str, expected: str) -> NoReturn:
        raise BadInputError(f"{name}={getattr(self, name)!r}; use {expected}")

    def _learn(self, data: TrainingData, progress: Progress | None) -> None:
        if len(data.rows) == 0:
            raise BadInputError("the training pool holds no rows; pass at least one")
        rng = np.random.default_rng(self.seed_)
        wanted = int(self.n_components or default_components(self.n_bits))
        values, order_axes = principal_axes(data, max(wanted, _ORDER_AXES))
        values, axes = values[:wanted], order_axes[:, :wanted]
        p, r = axes.shape[1], int(self.n_bits)
        if p < wanted:
            self.notes_.append(f"n_components reduced from {wanted} to {p}: the rows vary along no more axes")
        self.rotation_ = polar(rng.normal(size=(p, r)))
        self.loss_curve_: list[float] = []
        offsets = np.zeros(r)
        # The rms of a projection on V; in its units the gain and the steps mean the same for any data.
        scale = math.sqrt(values.sum() / max(p, r))
        if scale <= np.finfo(np.float32).tiny:
            self.notes_.append("all rows are equal: nothing to learn, all their codes are equal")
        elif self.max_iter > 0:
            offsets = self._descend(_Pool.reduced(data, order_axes, p, scale), self._sampler(data), rng, progress)
        self.n_iter_ = len(self.loss_curve_)
        self.n_components_ = p
        self.components_ = np.ascontiguousarray(axes.T)
        self.manifold_residual_ = residual(self.rotation_)
        self._set_linear(data.mean, axes @ self.rotation_, offsets * scale)

    def _sampler(self, data: TrainingData) -> _Sampler:
        n_rows = len(data.rows)
        if self.n_anchors > n_rows:
            self.notes_.append(f"n_anchors reduced from {self.n_anchors} to {n_rows}: no more rows")
        if self.landmarks == "rows":
            if self.n_landmarks > n_rows:
                self.notes_.append(f"n_landmarks reduced from {self.n_landmarks} to {n_rows}: no more rows")
            return _Sampler.of_rows(n_rows, int(self.n_landmarks), int(self.n_anchors))
        if data.centres is None or len(data.centres) == 0:
            raise BadInputError(f"landmarks={self.landmarks!r} without centres; pass some or use 'rows'")
        if self.landmarks == "centres":
            return _Sampler.of_centres(n_rows, len(data.centres), int(self.n_anchors))
        labels = _labels(data, data.centres)
        return _Sampler.of_members(labels, len(data.centres), int(self.n_members), int(self.n_anchors))

    def _descend(
        self, pool: _Pool, sampler: _Sampler, rng: np.random.Generator, progress: Progress | None
    ) -> np.ndarray:
        """Stochastic descent of V (``rotation_``) and of the offsets, returned in units of the scale.

        The momentum is that of unit gradients: only their direction counts, the rate sets the length.
        """
        frame, offsets = self.rotation_, np.zeros(self.rotation_.shape[1])
        frame_speed, offset_speed = np.zeros_like(frame), np.zeros_like(offsets)
        first, last = self.gain
        for step in range(self.max_iter):
            anchors, landmarks = sampler.draw(rng)
            if len(landmarks) < _FEWEST_LANDMARKS:
                self.notes_.append(f"no relations among {len(landmarks)} landmarks: the frame stays random")
                break
            done = step / self.max_iter
            loss, d_frame, d_offsets = ordinal_loss_and_gradient(
                pool.reduced_rows[anchors],
                pool.reduced_rows[landmarks],
                pool.relations(anchors, landmarks, self._near_count(len(landmarks))),
                frame,
                offsets,
                gain=first * (last / first) ** done,
                shift=int(rng.integers(1, len(anchors))) if len(anchors) > 1 else 0,
                cross_weight=float(self.cross_weight),
            )
            rate = self.learning_rate * (1 - done)
            frame_speed = self.momentum * frame_speed + _unit(tangent(d_frame.astype(np.float64), frame))
            frame = retract(frame - rate * frame_speed)
            if self.offsets:
                offset_speed = self.momentum * offset_speed + _unit(d_offsets.astype(np.float64))
                offsets = offsets - rate * offset_speed
            self.loss_curve_.append(loss)
            if progress is not None:
                progress(step, loss)
        self.rotation_ = frame
        return offsets

    def _near_count(self, n_landmarks: int) -> int:
        """Size of the near set: one landmark may be the anchor itself, and one must be left as far."""
        return min(max(2, round(self.near_fraction * n_landmarks)), n_landmarks - 2)

    def info(self) -> dict[str, Any]:
        """Notes, and for a model trained here the loss of each step and the shape of the solution."""
        report = super().info()
        if hasattr(self, "rotation_"):
            report.update(
                n_components=self.n_components_,
                n_iter=self.n_iter_,
                loss_curve=self.loss_curve_,
                manifold_residual=self.manifold_residual_,
            )
        return report


@dataclass(frozen=True)
class _Pool:
    """The rows a step may draw: the training rows, then the centres, by one running number."""

    points: np.ndarray
    """(rows + centres, q) float32: coordinates on the leading axes, about the mean, in units of the scale."""
    squared_norms: np.ndarray
    """(rows + centres,) float32, of the whole vectors."""
    reduced_rows: np.ndarray
    """(rows + centres, p) float32: the first p of the coordinates."""

    @classmethod
    def reduced(cls, data: TrainingData, axes: np.ndarray, p: int, scale: float) -> _Pool:
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

        Beyond ``_ORDER_AXES`` axes the products of two centred rows nearly cancel: on held-out rows the codes are as
        good as with products of whole vectors, for a fraction of the time when d is large.
        """
        # Without the anchor's own norm: it is the same for all its landmarks.
        distances = self.points[anchors] @ self.points[landmarks].T
        distances *= np.float32(-2)
        distances += self.squared_norms[landmarks]
        return near_sets(distances, anchors[:, None] == landmarks, k)


@dataclass(frozen=True)
class _Sampler:
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
    def of_rows(cls, n_rows: int, n_landmarks: int, n_anchors: int) -> _Sampler:
        whole = np.array([0]), np.array([n_rows])
        return cls(n_rows, n_anchors, np.arange(n_rows), *whole, min(n_landmarks, n_rows))

    @classmethod
    def of_centres(cls, n_rows: int, n_centres: int, n_anchors: int) -> _Sampler:
        each = np.arange(n_centres)
        return cls(n_rows, n_anchors, n_rows + each, each, np.ones_like(each), 1)

    @classmethod
    def of_members(cls, labels: np.ndarray, n_centres: int, n_members: int, n_anchors: int) -> _Sampler:
        """Groups are clusters; a cluster without a row in the pool is represented by its centre."""
        n_rows = len(labels)
        empty = np.setdiff1d(np.arange(n_centres), labels)
        groups = np.concatenate([labels, empty])
        order = np.argsort(groups, kind="stable")
        numbers = np.concatenate([np.arange(n_rows), n_rows + empty])
        counts = np.bincount(groups, minlength=n_centres)
        return cls(n_rows, n_anchors, numbers[order], np.cumsum(counts) - counts, counts, n_members)

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


def _labels(data: TrainingData, centres: np.ndarray) -> np.ndarray:
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


def _unit(gradient: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(gradient)
    return gradient / length if length > 0 else gradient
