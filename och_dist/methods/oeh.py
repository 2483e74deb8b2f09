"""Ordinal Embedding Hashing: a linear hash that keeps the order of k-means centres as seen from each of them.

The predecessor of OCH. It differs in a wide reduction (64 axes whatever the code length), an unconstrained W held near
a tight frame by a penalty, one anchor per step, and plain descent.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from och_dist.errors import BadInputError
from och_dist.kernels.embedding import embedding_loss_and_gradient, penalty_and_gradient
from och_dist.kernels.ordinal import near_sets
from och_dist.methods.base import LinearHasher, Progress, TrainingData
from och_dist.methods.och import principal_axes

__all__ = ["OrdinalEmbeddingHashing"]

# The anchor itself, one near, one far.
_FEWEST_CENTRES = 3


class OrdinalEmbeddingHashing(LinearHasher):
    """Ordinal Embedding Hashing (Liu, Ji, Wu and Liu 2016), with the gradient of its loss as it should be.

    Parameters
    ----------
    n_bits
        Length of the code.
    n_centres
        Number of k-means centres, which are landmarks and anchors.
    n_components
        Principal axes kept. The authors' 64 are too many for short codes: with 16 OEH comes near OCH at 32 bits.
    n_near
        Landmarks of an anchor that count as near.
    margin
        Bits by which a near landmark should look closer than a far one.
    penalty
        Weight of |W W^T - I|^2 / 4.
    learning_rate, max_iter
        Steps of the descent, one anchor each; ``max_iter=0`` gives random projections of the reduced rows.
    random_state
        Seed of all draws.

    Attributes
    ----------
    mean_, projection_, offsets_
        The linear map, float32: (d,), (d, n_bits), (n_bits,); the offsets are zero.
    n_components_, n_iter_, loss_curve_, penalty_, notes_
        Axes used, steps made, loss of each step as a mean over all relations of its anchor (it rises while the
        penalty shrinks W, and with it all differences), final |W W^T - I|^2 / 4, what was reduced and why.
    """

    method: ClassVar[str] = "oeh"
    reported: ClassVar[tuple[str, ...]] = ("n_components", "n_iter", "loss_curve", "penalty")

    def __init__(
        self,
        n_bits: int = 64,
        *,
        n_centres: int = 300,
        n_components: int = 64,
        n_near: int = 9,
        margin: float = 1.0,
        penalty: float = 0.01,
        learning_rate: float = 0.1,
        max_iter: int = 300,
        random_state: Any = 0,
    ) -> None:
        self.n_bits = n_bits
        self.n_centres = n_centres
        self.n_components = n_components
        self.n_near = n_near
        self.margin = margin
        self.penalty = penalty
        self.learning_rate = learning_rate
        self.max_iter = max_iter
        self.random_state = random_state

    def centres_wanted(self) -> int:
        """How many k-means centres are learned from; 0 for none."""
        return 0 if self.max_iter == 0 else int(self.n_centres)

    def check_parameters(self) -> None:
        super().check_parameters()
        self._check_integers(n_centres=1, n_components=1, n_near=1, max_iter=0)
        self._check_above_zero("margin", "penalty", or_zero=True)
        self._check_above_zero("learning_rate")

    def _learn(self, data: TrainingData, progress: Progress | None) -> None:
        rng = np.random.default_rng(self.seed_)
        wanted, r = int(self.n_components), int(self.n_bits)
        values, axes = principal_axes(data, wanted)
        p = axes.shape[1]
        if p < wanted:
            self.notes_.append(f"n_components reduced from {wanted} to {p}: the rows vary along no more axes")
        weights = rng.normal(size=(p, r))
        self.loss_curve_: list[float] = []
        # The rms length of a reduced row. In its units the loss means the same for any data, and the arguments of
        # tanh are about those of the authors' descriptors, whose length it is near to.
        scale = math.sqrt(values.sum())
        if scale <= np.finfo(np.float32).tiny:
            self.notes_.append("all rows are equal: nothing to learn, all their codes are equal")
        elif self.max_iter > 0:
            weights = self._descend(_centred(data, scale), axes, weights, rng, progress)
        self.n_iter_, self.n_components_ = len(self.loss_curve_), p
        self.penalty_ = penalty_and_gradient(weights)[0]
        self._set_linear(data.mean, axes @ weights, np.zeros(r))

    def _descend(
        self,
        centres: np.ndarray,
        axes: np.ndarray,
        weights: np.ndarray,
        rng: np.random.Generator,
        progress: Progress | None,
    ) -> np.ndarray:
        """W (p, r) after the descent, on ``centres`` (L, d) about the mean and in units of the scale."""
        if len(centres) < _FEWEST_CENTRES:
            self.notes_.append(f"no relations among {len(centres)} centres: the projections stay random")
            return weights
        relations, reduced = self._relations(centres), centres @ axes
        order = rng.permutation(len(centres))
        for step in range(self.max_iter):
            anchor = int(order[step % len(order)])
            total, violated, gradient = embedding_loss_and_gradient(
                reduced, anchor, relations[anchor], weights, margin=float(self.margin)
            )
            _, pull = penalty_and_gradient(weights)
            rate = self.learning_rate / max(violated, 1)
            weights = weights - self._penalty_rate(weights) * pull - rate * gradient
            loss = total / max(int((relations[anchor] > 0).sum()) * int((relations[anchor] < 0).sum()), 1)
            self.loss_curve_.append(loss)
            if progress is not None:
                progress(step, loss)
        return weights

    def _relations(self, centres: np.ndarray) -> np.ndarray:
        """(L, L) relations by true distance in the full space."""
        squared = np.einsum("ij,ij->i", centres, centres)
        count = len(centres)
        return near_sets(squared - 2 * centres @ centres.T, np.eye(count, dtype=bool), min(self.n_near, count - 2))

    def _penalty_rate(self, weights: np.ndarray) -> float:
        """The step along the penalty's gradient, shortened where it would overshoot, as at 1,000 bits and more."""
        largest = float(np.linalg.norm(weights, 2)) ** 2
        return min(float(self.learning_rate) * float(self.penalty), 1.0 / max(largest, 1.0))


def _centred(data: TrainingData, scale: float) -> np.ndarray:
    """Centres (L, d) about the mean in units of ``scale``, float64."""
    if data.centres is None or len(data.centres) == 0:
        raise BadInputError("no centres to learn from; pass at least one")
    return (data.centres - data.mean) / scale
