"""The Stiefel manifold as OCH uses it: matrices (p, r) whose shorter side is orthonormal.

For p <= r the rows are orthonormal (V V^T = I, a Parseval frame), for p > r the columns (V^T V = I). The
metric is the Euclidean one; the retraction is the polar factor, the nearest point of the manifold.
"""

from __future__ import annotations

import numpy as np

from och_dist.errors import BadInputError

__all__ = ["balanced", "polar", "residual", "retract", "tangent"]


def polar(matrix: np.ndarray) -> np.ndarray:
    """The nearest matrix (p, r) with an orthonormal shorter side, from the thin SVD; float64."""
    left, values, right = np.linalg.svd(np.asarray(matrix, dtype=np.float64), full_matrices=False)
    if values.size and not values[-1] > np.finfo(np.float64).eps * values[0] * max(matrix.shape):
        raise BadInputError(f"a {matrix.shape} matrix of deficient rank has no polar factor; use a smaller step")
    return left @ right


def retract(matrix: np.ndarray) -> np.ndarray:
    """:func:`polar` of a matrix (p, r) near the manifold, by Newton-Schulz steps of small products; float64.

    Each step takes a singular value s to (3 s - s^3) / 2, which tends to 1 for 0 < s < sqrt(3), quadratically; beyond
    that range, or if it has not ended in ten steps, the polar factor itself is taken.
    """
    point = np.asarray(matrix, dtype=np.float64)
    wide = point.shape[0] <= point.shape[1]
    unit = np.eye(min(point.shape))
    for _ in range(10):
        excess = (point @ point.T if wide else point.T @ point) - unit
        error = np.abs(excess).sum(axis=1).max()  # bounds the eigenvalues of the excess, hence the singular values
        if error < 1e-13 * len(unit):
            return point
        if not error < 1.5:
            break
        point = point - 0.5 * (excess @ point if wide else point @ excess)
    return polar(matrix)


def balanced(matrix: np.ndarray) -> np.ndarray:
    """``matrix`` (p, r) with singular values brought near each other, a cheap step towards :func:`polar`; float64.

    A descent along it moves as far along weak directions as along strong ones. Three rounds of an odd polynomial of
    degree 5 (with the coefficients of the Muon optimiser) multiply small singular values by 41 and bring those from 2 %
    to 100 % of the norm to between 0.68 and 1.21. A zero matrix stays zero.
    """
    length = np.linalg.norm(matrix)
    if length == 0:
        return np.zeros(matrix.shape)
    wide = matrix.shape[0] <= matrix.shape[1]
    point = ((matrix if wide else matrix.T) / length).astype(np.float32)
    a, b, c = np.float32(3.4445), np.float32(-4.7750), np.float32(2.0315)
    for _ in range(3):
        gram = point @ point.T
        point = a * point + (b * gram + c * (gram @ gram)) @ point
    return np.asarray(point if wide else point.T, dtype=np.float64)


def tangent(gradient: np.ndarray, point: np.ndarray) -> np.ndarray:
    """The part of ``gradient`` (p, r) that keeps ``point`` (p, r) on the manifold to first order."""
    if point.shape[0] <= point.shape[1]:
        inner = gradient @ point.T
        return gradient - 0.5 * (inner + inner.T) @ point
    inner = point.T @ gradient
    return gradient - 0.5 * point @ (inner + inner.T)


def residual(point: np.ndarray) -> float:
    """The largest entry of |V V^T - I|, or of |V^T V - I| when ``point`` (p, r) has p > r."""
    p, r = point.shape
    gram = point @ point.T if p <= r else point.T @ point
    return float(np.abs(gram - np.eye(min(p, r))).max())
