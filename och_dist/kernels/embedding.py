"""The loss of Ordinal Embedding Hashing for one anchor, its gradient, and the penalty that keeps W near a frame."""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from och_dist.kernels.ordinal import FAR, NEAR

__all__ = ["embedding_loss_and_gradient", "penalty_and_gradient"]


def embedding_loss_and_gradient(
    reduced: np.ndarray, anchor: int, relations: np.ndarray, weights: np.ndarray, *, margin: float
) -> tuple[float, int, np.ndarray]:
    """Loss of the violated relations of one anchor, their number, and the gradient by W (p, r).

    Parameters
    ----------
    reduced
        A (L, p), the reduced landmarks.
    anchor
        Row of A whose order of the others is wanted.
    relations
        (L,) int8 from ``near_sets``: near, far or neither.
    weights
        W (p, r).
    margin
        Bits by which a near landmark should look closer than a far one.

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
