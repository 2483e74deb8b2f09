"""Ordinal Constraint Hashing: a linear hash learned so that near rows get closer codes than far rows.

The rows are reduced to the leading principal axes (the paper's ordinal constraint projection, Eq. 10) and mapped by a
matrix V and offsets b, which descend the ordinal loss (Eq. 14). V starts as a tight frame on the first few axes and is
free to take up the others; with ``orthogonal=True`` it stays on the Stiefel manifold, as in the paper (Eq. 15). The
cost does not depend on the corpus' size.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import numpy as np
from scipy.linalg import eigh

from och_dist.errors import BadInputError
from och_dist.kernels.ordinal import ordinal_loss_and_gradient
from och_dist.kernels.stiefel import balanced, polar, residual, retract, tangent
from och_dist.methods.base import LinearHasher, Progress, TrainingData, is_number
from och_dist.methods.och_pool import Pool, Sampler, nearest_centres

__all__ = ["OrdinalConstraintHashing", "default_components", "principal_axes"]

_COMPONENTS = ((32, 20), (64, 24), (128, 32), (256, 40), (512, 48))
_MOST_COMPONENTS = 64
_ORDER_AXES = 64

# Step of the free frame along its balanced momentum, which is longer than one of a unit gradient, per learning rate.
_BALANCED_STEP = 0.375

# The anchor itself, one near, one far.
_FEWEST_LANDMARKS = 3


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


class OrdinalConstraintHashing(LinearHasher):
    """Ordinal Constraint Hashing.

    Parameters
    ----------
    n_bits
        Length of the code.
    n_centres
        Number of k-means clusters that the landmarks stand for.
    n_components
        Principal axes of the first frame; None chooses by the code length, 20 (up to 32 bits) to 64 (1,024 bits). The
        learned one makes use of at least 64.
    orthogonal
        Keep the frame on its first axes and its rows orthonormal (columns with more axes than bits), the constraint of
        the paper. Without it only the rms of the projections is kept.
    landmarks
        "members": random members of the clusters, redrawn at each step; "centres": the k-means centres;
        "rows": a random sample of rows, redrawn at each step.
    n_members
        Members drawn per cluster at each step, with ``landmarks="members"``: two cost 1.6 times the time
        of one for about 1 % more mean average precision.
    member_shares
        "proportional": clusters are represented in proportion to their rows, by ``n_members`` on average; "equal": each
        by ``n_members``, which overweights thin regions and costs pooled precision and recall.
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
        Principal axes (p, d) and the matrix V (p, n_bits), float64; ``projection_`` is their product.
    n_components_, n_iter_, loss_curve_, manifold_residual_, notes_
        Axes used, steps made, loss of each step, distance of V from the Stiefel manifold (0 only with ``orthogonal``),
        what was reduced and why.
    """

    method: ClassVar[str] = "och"
    reported: ClassVar[tuple[str, ...]] = ("n_components", "n_iter", "loss_curve", "manifold_residual")
    added: ClassVar[dict[str, Any]] = {"member_shares": "equal", "orthogonal": True}

    def __init__(
        self,
        n_bits: int = 64,
        *,
        n_centres: int = 300,
        n_components: int | None = None,
        orthogonal: bool = False,
        landmarks: Literal["members", "centres", "rows"] = "members",
        n_members: int = 1,
        member_shares: Literal["proportional", "equal"] = "proportional",
        n_landmarks: int = 300,
        n_anchors: int = 80,
        near_fraction: float = 0.02,
        cross_weight: float = 0.15,
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
        self.orthogonal = orthogonal
        self.landmarks = landmarks
        self.n_members = n_members
        self.member_shares = member_shares
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
        self._check_integers(n_centres=1, n_members=1, n_landmarks=1, n_anchors=1, max_iter=0)
        if self.n_components is not None:
            self._check_integers(n_components=1)
        self._check_choice("landmarks", "members", "centres", "rows")
        self._check_choice("member_shares", "proportional", "equal")
        for name in ("offsets", "orthogonal"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                self._refuse(name, "True or False")
        if not (is_number(self.near_fraction) and 0 < self.near_fraction < 1):
            self._refuse("near_fraction", "a number between 0 and 1")
        if not (is_number(self.cross_weight) and 0 <= self.cross_weight <= 1):
            self._refuse("cross_weight", "a number from 0 to 1")
        if not (is_number(self.momentum) and 0 <= self.momentum < 1):
            self._refuse("momentum", "a number from 0 to below 1")
        self._check_above_zero("learning_rate")
        pair = isinstance(self.gain, (tuple, list)) and len(self.gain) == 2
        if not (pair and all(is_number(value) and value > 0 for value in self.gain)):
            self._refuse("gain", "two numbers above 0")

    def _learn(self, data: TrainingData, progress: Progress | None) -> None:
        data.require_rows()
        rng = np.random.default_rng(self.seed_)
        wanted = int(self.n_components or default_components(self.n_bits))
        values, axes = principal_axes(data, max(wanted, _ORDER_AXES))
        start, r = min(wanted, len(values)), int(self.n_bits)
        if start < wanted:
            self.notes_.append(f"n_components reduced from {wanted} to {start}: the rows vary along no more axes")
        # Without a step there is nothing beyond the start.
        p = start if self.orthogonal or self.max_iter == 0 else len(values)
        self.rotation_ = np.zeros((p, r))
        self.rotation_[:start] = polar(rng.normal(size=(start, r)))
        self.loss_curve_: list[float] = []
        offsets = np.zeros(r)
        # The rms of a projection on V; in its units the gain and the steps mean the same for any data.
        scale = math.sqrt(values[:start].sum() / max(start, r))
        if scale <= np.finfo(np.float32).tiny:
            self.notes_.append("all rows are equal: nothing to learn, all their codes are equal")
        elif self.max_iter > 0:
            pool = Pool.reduced(data, axes, p, scale)
            offsets = self._descend(pool, values[:p] / scale**2, self._sampler(data), rng, progress)
        self.n_iter_ = len(self.loss_curve_)
        self.n_components_ = p
        self.components_ = np.ascontiguousarray(axes[:, :p].T)
        self.manifold_residual_ = residual(self.rotation_)
        self._set_linear(data.mean, axes[:, :p] @ self.rotation_, offsets * scale)

    def _sampler(self, data: TrainingData) -> Sampler:
        n_rows = len(data.rows)
        if self.n_anchors > n_rows:
            self.notes_.append(f"n_anchors reduced from {self.n_anchors} to {n_rows}: no more rows")
        if self.landmarks == "rows":
            if self.n_landmarks > n_rows:
                self.notes_.append(f"n_landmarks reduced from {self.n_landmarks} to {n_rows}: no more rows")
            return Sampler.of_rows(n_rows, int(self.n_landmarks), int(self.n_anchors))
        if data.centres is None or len(data.centres) == 0:
            raise BadInputError(f"landmarks={self.landmarks!r} without centres; pass some or use 'rows'")
        if self.landmarks == "centres":
            return Sampler.of_centres(n_rows, len(data.centres), int(self.n_anchors))
        labels = nearest_centres(data, data.centres)
        sampler = Sampler.of_members(labels, len(data.centres), int(self.n_members), int(self.n_anchors))
        return sampler.in_proportion() if self.member_shares == "proportional" else sampler

    def _descend(
        self,
        pool: Pool,
        variances: np.ndarray,
        sampler: Sampler,
        rng: np.random.Generator,
        progress: Progress | None,
    ) -> np.ndarray:
        """Stochastic descent of V (``rotation_``) and of the offsets, returned in units of the scale.

        The momentum is that of unit gradients: only their direction counts, the rate sets the length. ``variances``
        (p,) are those of the reduced rows.
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
            d_frame = d_frame.astype(np.float64)
            if self.orthogonal:
                frame_speed = self.momentum * frame_speed + _unit(tangent(d_frame, frame))
                frame = retract(frame - rate * frame_speed)
            else:
                frame_speed = self.momentum * frame_speed + _unit(d_frame)
                frame = _of_unit_rms(frame - _BALANCED_STEP * rate * balanced(frame_speed), variances)
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


def _of_unit_rms(frame: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """``frame`` (p, r), scaled so that the projections of rows with ``variances`` (p,) have an rms of one."""
    return frame * math.sqrt(frame.shape[1] / float(variances @ np.einsum("ij,ij->i", frame, frame)))


def _unit(gradient: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(gradient)
    return gradient / length if length > 0 else gradient
