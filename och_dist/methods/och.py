"""Ordinal Constraint Hashing: a linear hash learned so that near rows get closer codes than far rows.

The rows are reduced to the leading principal axes (the paper's ordinal constraint projection, Eq. 10) and mapped by a
matrix V and offsets b, which descend the ordinal loss (Eq. 14). V starts as a tight frame on the first few axes and is
free to take up the others; with ``orthogonal=True`` it stays on the Stiefel manifold, as in the paper (Eq. 15). The
cost does not depend on the corpus' size. What this was before its changes is here as well, for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from och_dist.errors import BadInputError
from och_dist.kernels.kmeans import assign
from och_dist.kernels.ordinal import near_sets, ordinal_loss_and_gradient
from och_dist.methods.base import TrainingData, parameter
from och_dist.methods.linear import RandomFrame, Start, balanced, retract, tangent

Draw = Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]
"""Draws numbers in the pool: anchors (m,) and landmarks (S,), distinct each."""

# Step of the free frame along its balanced momentum, which is longer than one of a unit gradient, per learning rate.
_BALANCED_STEP = 0.375

# The anchor itself, one near, one far.
_FEWEST_LANDMARKS = 3


@dataclass(eq=False, kw_only=True)
class OrdinalDescent(RandomFrame):
    """What OCH and its printed form share: stochastic descent of the ordinal loss from a random frame.

    A subclass says what a step draws and how many of the landmarks are near.

    Attributes
    ----------
    n_iter_, loss_curve_
        Steps made, loss of each.
    """

    reported: ClassVar[tuple[str, ...]] = ("n_components", "n_iter", "loss_curve", "manifold_residual")

    n_centres: int = parameter(300, "Number of k-means clusters that the landmarks stand for.", at_least=1)
    n_anchors: int = parameter(80, "Anchors drawn at each step, whose order of landmarks is learned.", at_least=1)
    learning_rate: float = parameter(0.08, "Length of the first step; it falls linearly to zero.", above=0)
    momentum: float = parameter(0.9, "Share of the last direction in the next.", at_least=0, below=1)
    max_iter: int = parameter(300, "Steps of the optimiser; 0 gives a random tight frame.", at_least=0)

    # What the paper leaves no choice of; OCH makes parameters of it.
    orthogonal = True
    offsets = False
    cross_weight = 0.0
    gain = (1.0, 1.0)

    def centres_wanted(self) -> int:
        return 0 if self.max_iter == 0 else int(self.n_centres)

    def _draw(self, data: TrainingData) -> Draw:
        raise NotImplementedError

    def _near_count(self, n_landmarks: int) -> int:
        raise NotImplementedError

    def _learn(self, data: TrainingData) -> Iterable[float]:
        rng = np.random.default_rng(self.seed_)
        start = self._start(data, rng)
        frame, offsets = start.frame, np.zeros(int(self.n_bits))
        if not self.orthogonal and self.max_iter > 0:
            frame = np.concatenate([frame, np.zeros((len(start.variances) - len(frame), len(offsets)))])
        if self._differ(start.scale) and self.max_iter > 0:
            frame, offsets = yield from self._descend(data, start, frame, rng)
        self.n_iter_, self.n_components_ = len(self.loss_curve_), len(frame)
        self._set_rotated(data.mean, start.axes[:, : len(frame)], frame, offsets * start.scale)

    def _descend(
        self, data: TrainingData, start: Start, frame: np.ndarray, rng: np.random.Generator
    ) -> Generator[float, None, tuple[np.ndarray, np.ndarray]]:
        """V (p, r), which begins as ``frame``, and the offsets (r,), in units of the scale, after the descent.

        The momentum is that of unit gradients: only their direction counts, the rate sets the length.
        """
        offsets = np.zeros(frame.shape[1])
        pool, draw = Pool.reduced(data, start, len(frame)), self._draw(data)
        variances = start.variances[: len(frame)] / start.scale**2
        frame_speed, offset_speed = np.zeros_like(frame), np.zeros_like(offsets)
        first, last = self.gain
        for step in range(self.max_iter):
            anchors, landmarks = draw(rng)
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
            yield loss
        return frame, offsets


@dataclass(eq=False, kw_only=True)
class OrdinalConstraintHashing(OrdinalDescent):
    """Ordinal Constraint Hashing.

    ``n_components`` are the axes of the first frame; the learned one makes use of at least 64."""

    method: ClassVar[str] = "och"
    added: ClassVar[dict[str, Any]] = {"member_shares": "equal", "orthogonal": True}

    orthogonal: bool = parameter(
        False,
        "Keep the frame on its first axes and its rows orthonormal (columns with more axes than bits), the "
        "constraint of the paper. Without it only the rms of the projections is kept.",
    )
    landmarks: Literal["members", "centres", "rows"] = parameter(
        "members",
        '"members": random members of the clusters, redrawn at each step; "centres": the k-means centres; "rows": '
        "a random sample of rows, redrawn at each step.",
    )
    n_members: int = parameter(
        1,
        'Members drawn per cluster at each step, with ``landmarks="members"``: two cost 1.6 times the time of one '
        "for about 1 % more mean average precision.",
        at_least=1,
    )
    member_shares: Literal["proportional", "equal"] = parameter(
        "proportional",
        '"proportional": clusters are represented in proportion to their rows, by ``n_members`` on average; '
        '"equal": each by ``n_members``, which overweights thin regions and costs pooled precision and recall.',
    )
    n_landmarks: int = parameter(300, 'Landmarks of a step, with ``landmarks="rows"``.', at_least=1)
    near_fraction: float = parameter(
        0.02, "Share of the landmarks that counts as near, at least two landmarks.", above=0, below=1
    )
    cross_weight: float = parameter(
        0.15,
        "Share of the relations that compare near and far pairs of different anchors: more makes distances of "
        "different queries comparable (pooled precision and recall), less favours the order within a query.",
        at_least=0,
        at_most=1,
    )
    offsets: bool = parameter(True, "Learn offsets; without them every hyperplane passes through the mean.")
    gain: tuple[float, float] = parameter(
        (1.5, 4.0), "Factor inside tanh at the first and at the last step, in units of the rms projection.", above=0
    )

    def centres_wanted(self) -> int:
        return 0 if self.landmarks == "rows" else super().centres_wanted()

    def _draw(self, data: TrainingData) -> Draw:
        n_rows, n_drawn = len(data.rows), 1
        n_anchors = self._reduce("n_anchors", int(self.n_anchors), n_rows, "no more rows")
        if self.landmarks == "rows":
            n_drawn = self._reduce("n_landmarks", int(self.n_landmarks), n_rows, "no more rows")
            groups = Groups(np.arange(n_rows), np.array([0]), np.array([n_rows]))
        elif self.landmarks == "centres":
            each = np.arange(len(data.required_centres()))
            groups = Groups(n_rows + each, each, np.ones_like(each))
        else:
            groups, n_drawn = Groups.of_clusters(nearest_centres(data), len(data.required_centres())), self.n_members
            if self.member_shares == "proportional":
                groups, n_drawn = groups.in_proportion(int(n_drawn)), 1
        return lambda rng: (rng.choice(n_rows, n_anchors, replace=False), groups.draw(int(n_drawn), rng))

    def _near_count(self, n_landmarks: int) -> int:
        """Size of the near set: one landmark may be the anchor itself, and one must be left as far."""
        return min(max(2, round(self.near_fraction * n_landmarks)), n_landmarks - 2)


@dataclass(eq=False, kw_only=True)
class PrintedOrdinalConstraintHashing(OrdinalDescent):
    """Ordinal Constraint Hashing as printed: relations among the k-means centres alone.

    The centres are landmarks and anchors alike, hyperplanes pass through the mean (no offsets), the gain inside tanh is
    1 from the first step to the last, and no relation crosses anchors. The paper's vectors are normalised, it does not
    say how: here the rms projection is 1. The loss falls while codes of 128 bits get worse than those of 64: a few
    hundred centres are too few to learn from. The optimiser is that of OCH."""

    method: ClassVar[str] = "och-paper"

    n_components: int = parameter(16, "Principal axes kept, the paper's d_svd.", at_least=1)
    n_near: int = parameter(
        10, "Landmarks of an anchor that count as near, the k of its k (L - k) relations.", at_least=1
    )
    max_iter: int = parameter(400, "Steps of the optimiser; 0 gives a random tight frame.", at_least=0)

    def _draw(self, data: TrainingData) -> Draw:
        numbers = len(data.rows) + np.arange(len(data.required_centres()))
        n_anchors = self._reduce("n_anchors", int(self.n_anchors), len(numbers), "no more centres")
        return lambda rng: (rng.choice(numbers, n_anchors, replace=False), numbers)

    def _near_count(self, n_landmarks: int) -> int:
        return min(int(self.n_near), n_landmarks - 2)


def _of_unit_rms(frame: np.ndarray, variances: np.ndarray) -> np.ndarray:
    """``frame`` (p, r), scaled so that the projections of rows with ``variances`` (p,) have an rms of one."""
    return frame * math.sqrt(frame.shape[1] / float(variances @ np.einsum("ij,ij->i", frame, frame)))


def _unit(gradient: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(gradient)
    return gradient / length if length > 0 else gradient


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
    def reduced(cls, data: TrainingData, start: Start, p: int) -> Pool:
        """All rows on the axes of ``start``, in units of its scale; the first ``p`` coordinates also by themselves."""
        centres = data.rows[:0] if data.centres is None else data.centres
        centred = np.concatenate([data.rows, centres]).astype(np.float32, copy=False)
        centred -= data.mean.astype(np.float32)
        centred *= np.float32(1.0 / start.scale)
        points = centred @ start.axes.astype(np.float32)
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
class Groups:
    """Numbers in the pool, ``order`` (n,), group by group: where each group starts and how many are in it (L,)."""

    order: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    @classmethod
    def of_clusters(cls, labels: np.ndarray, n_centres: int) -> Groups:
        """The rows of each cluster, by their ``labels`` (m,); one without a row is represented by its centre."""
        empty = np.setdiff1d(np.arange(n_centres), labels)
        groups = np.concatenate([labels, empty])
        numbers = np.concatenate([np.arange(len(labels)), len(labels) + empty])
        counts = np.bincount(groups, minlength=n_centres)
        return cls(numbers[np.argsort(groups, kind="stable")], np.cumsum(counts) - counts, counts)

    def in_proportion(self, n_drawn: int) -> Groups:
        """As many equal stretches of the order as are drawn from all: groups by their size, not alike."""
        n = len(self.order)
        n_stretches = min(n_drawn * len(self.counts), n)
        cuts = np.arange(n_stretches + 1) * n // n_stretches
        return Groups(self.order, cuts[:-1], np.diff(cuts))

    def draw(self, n_drawn: int, rng: np.random.Generator) -> np.ndarray:
        """Distinct numbers (S,): at most ``n_drawn`` of each group, or a plain sample when there is one."""
        if len(self.counts) == 1:
            return rng.choice(self.order, min(n_drawn, len(self.order)), replace=False)
        picks = (rng.random((n_drawn, len(self.counts))) * self.counts).astype(np.int64)
        drawn = self.order[self.starts + picks].reshape(-1)
        return drawn if n_drawn == 1 else np.unique(drawn)


def nearest_centres(data: TrainingData) -> np.ndarray:
    """(m,) nearest centre of each row of the pool, computed when the data come without."""
    if data.labels is None:
        return assign(data.rows, data.required_centres())[0]
    if len(data.labels) != len(data.rows):
        raise BadInputError(f"{len(data.labels)} labels of {len(data.rows)} rows; pass one for each row")
    return np.asarray(data.labels, dtype=np.int64)
