"""Ordinal Embedding Hashing: a linear hash that keeps the order of k-means centres as seen from each of them.

The predecessor of OCH. It differs in a wide reduction (64 axes whatever the code length), an unconstrained W held near
a tight frame by a penalty, one anchor per step, and plain descent.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy.special import expit

from och_dist.kernels.ordinal import FAR, NEAR, near_sets
from och_dist.methods.base import TrainingData, parameter
from och_dist.methods.linear import LinearHasher, principal_axes

# The anchor itself, one near, one far.
_FEWEST_CENTRES = 3


@dataclass(eq=False, kw_only=True)
class OrdinalEmbeddingHashing(LinearHasher):
    """Ordinal Embedding Hashing (Liu, Ji, Wu and Liu 2016), with the gradient of its loss as it should be.

    Attributes
    ----------
    n_components_, n_iter_, loss_curve_, penalty_
        Axes used, steps made, loss of each step as a mean over all relations of its anchor (it rises while the
        penalty shrinks W, and with it all differences), final |W W^T - I|^2 / 4.
    """

    method: ClassVar[str] = "oeh"
    reported: ClassVar[tuple[str, ...]] = ("n_components", "n_iter", "loss_curve", "penalty")

    n_centres: int = parameter(300, "Number of k-means centres, which are landmarks and anchors.", at_least=1)
    n_components: int = parameter(
        64,
        "Principal axes kept. The authors' 64 are too many for short codes: with 16 OEH comes near OCH at 32 bits.",
        at_least=1,
    )
    n_near: int = parameter(9, "Landmarks of an anchor that count as near.", at_least=1)
    margin: float = parameter(1.0, "Bits by which a near landmark should look closer than a far one.", at_least=0)
    penalty: float = parameter(0.01, "Weight of |W W^T - I|^2 / 4.", at_least=0)
    learning_rate: float = parameter(0.1, "Length of a step of the descent.", above=0)
    max_iter: int = parameter(
        300, "Steps of the descent, one anchor each; 0 leaves random projections of the rows.", at_least=0
    )

    def centres_wanted(self) -> int:
        return 0 if self.max_iter == 0 else int(self.n_centres)

    def _learn(self, data: TrainingData) -> Iterable[float]:
        rng = np.random.default_rng(self.seed_)
        values, axes = principal_axes(data, int(self.n_components))
        found = axes.shape[1]
        p = self._reduce("n_components", int(self.n_components), found, "the rows vary along no more axes")
        weights = rng.normal(size=(p, int(self.n_bits)))
        # The rms length of a reduced row. In its units the loss means the same for any data, and the arguments of
        # tanh are about those of the authors' descriptors, whose length it is near to.
        scale = math.sqrt(values.sum())
        if self._differ(scale) and self.max_iter > 0:
            centres = (data.required_centres() - data.mean) / scale
            weights = yield from self._descend(centres, axes, weights, rng)
        self.n_iter_, self.n_components_ = len(self.loss_curve_), p
        self.penalty_ = penalty_and_gradient(weights)[0]
        self._set_linear(data.mean, axes @ weights)

    def _descend(
        self, centres: np.ndarray, axes: np.ndarray, weights: np.ndarray, rng: np.random.Generator
    ) -> Generator[float, None, np.ndarray]:
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
            yield total / max(int((relations[anchor] > 0).sum()) * int((relations[anchor] < 0).sum()), 1)
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


def embedding_loss_and_gradient(
    reduced: np.ndarray, anchor: int, relations: np.ndarray, weights: np.ndarray, *, margin: float
) -> tuple[float, int, np.ndarray]:
    """Loss of the violated relations of one anchor, their number, and the gradient by the ``weights`` W (p, r).

    ``anchor`` is the row of A whose order of the others is wanted, where ``reduced`` A (L, p) are the landmarks;
    ``relations`` (L,) int8 are those of ``near_sets``, ``margin`` the bits by which a near landmark should look closer
    than a far one.

    With H = tanh(A W), T = H h_anchor and v = margin + T_far - T_near, a relation is violated while v > 0, and costs
    sigmoid(v). The derivative by T_near and T_far goes through the codes of the landmark and of the anchor.
    """
    codes = np.tanh(reduced @ weights)
    similarity = codes @ codes[anchor]
    near, far = np.flatnonzero(relations == NEAR), np.flatnonzero(relations == FAR)
    excess = margin + similarity[far] - similarity[near][:, None]
    violated = excess > 0
    cost = np.where(violated, expit(excess), 0.0)
    slope = cost * (1.0 - cost)
    by_similarity = np.zeros(len(reduced))
    by_similarity[near] = -slope.sum(axis=1)
    by_similarity[far] = slope.sum(axis=0)
    by_codes = np.outer(by_similarity, codes[anchor])
    by_codes[anchor] += by_similarity @ codes
    gradient = reduced.T @ (by_codes * (1.0 - codes * codes))
    return float(cost.sum()), int(violated.sum()), gradient


def penalty_and_gradient(weights: np.ndarray) -> tuple[float, np.ndarray]:
    """|W W^T - I|^2 / 4 for W (p, r), and its gradient (W W^T - I) W."""
    excess = weights @ weights.T
    excess[np.diag_indices_from(excess)] -= 1.0
    return float((excess * excess).sum() / 4.0), excess @ weights
