"""Linear hashing, bit = (x - mean) W + b > 0: what such methods share, and the two that learn no more than moments.

LSH takes random directions. A random frame takes as many of them on the leading principal axes as there are bits,
evenly spread: with more bits than axes every axis is seen from many directions, which alone beats several learned
methods. What OCH, which begins so, gains over this control is what its training is worth.

Frames are matrices (p, r) whose shorter side is orthonormal, the Stiefel manifold: for p <= r the rows (V V^T = I, a
Parseval frame), for p > r the columns (V^T V = I). The metric is the Euclidean one; the retraction is the polar factor,
the nearest point of the manifold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from scipy.linalg import eigh

from och_dist.errors import BadInputError
from och_dist.methods.base import Hasher, LearnedArray, TrainingData, parameter, with_fixed_signs

_EPSILON = float(np.finfo(np.float64).eps)
_COMPONENTS = ((32, 20), (64, 24), (128, 32), (256, 40), (512, 48))
_MOST_COMPONENTS = 64


class LinearHasher(Hasher):
    """bit = (x - mean) @ projection + offsets > 0.

    Attributes
    ----------
    mean_, projection_, offsets_
        The linear map, float32: (d,), (d, n_bits), (n_bits,).
    """

    arrays: ClassVar[dict[str, LearnedArray]] = {
        "mean": LearnedArray(("d",)),
        "projection": LearnedArray(("d", "r")),
        "offsets": LearnedArray(("r",)),
    }

    mean_: np.ndarray
    projection_: np.ndarray
    offsets_: np.ndarray

    def encode_block(self, block: np.ndarray, *, first_row: int = 0) -> np.ndarray:
        from och_dist.kernels.project import encode_linear

        return encode_linear(block, self.mean_, self.projection_, self.offsets_, first_row=first_row)

    def query_scores(self, vectors: np.ndarray) -> np.ndarray:
        """(q, n_bits) float64: (x - mean) @ projection + offsets."""
        from och_dist.kernels.project import linear_scores

        return linear_scores(vectors, self.mean_, self.projection_, self.offsets_)

    def _set_linear(self, mean: np.ndarray, projection: np.ndarray, offsets: np.ndarray | None = None) -> None:
        """Store the learned map in float32, refusing values that do not fit."""
        offsets = np.zeros(projection.shape[1]) if offsets is None else offsets
        with np.errstate(over="ignore"):
            parts = [np.ascontiguousarray(part, dtype=np.float32) for part in (mean, projection, offsets)]
        if not all(np.isfinite(part).all() for part in parts):
            raise BadInputError("the learned projection exceeds the range of float32; rescale the vectors")
        self.mean_, self.projection_, self.offsets_ = parts


class LocalitySensitiveHashing(LinearHasher):
    """Signs of random projections of the centred rows.

    The name usually stands for the integer buckets of p-stable projections; comparisons of binary codes mean this
    family instead, in which the share of differing bits estimates the angle between two rows (Charikar, 2002). Rows
    are centred first: an angle about a far-away origin tells little."""

    method: ClassVar[str] = "lsh"

    def _learn(self, data: TrainingData) -> Iterable[float]:
        if not np.diag(data.covariance).any():
            self.notes_.append("all rows are equal: all their codes are equal")
        self._set_linear(data.mean, np.random.default_rng(self.seed_).normal(size=(len(data.mean), int(self.n_bits))))
        return ()


class RotatedAxes(LinearHasher):
    """Projections on principal axes, and what is made of these: the rotation, or another matrix.

    Attributes
    ----------
    components_, rotation_
        Principal axes (p, d) and the matrix (p, n_bits) that follows, float64; ``projection_`` is their product.
    manifold_residual_
        Distance of ``rotation_`` from the matrices whose shorter side is orthonormal.
    """

    def _set_rotated(
        self, mean: np.ndarray, axes: np.ndarray, rotation: np.ndarray, offsets: np.ndarray | None = None
    ) -> None:
        """Store the map onto ``axes`` (d, p) that a ``rotation`` (p, r) follows."""
        self.components_, self.rotation_ = np.ascontiguousarray(axes.T), rotation
        self.manifold_residual_ = residual(rotation)
        self._set_linear(mean, axes @ rotation, offsets)


class Start(NamedTuple):
    """A random frame (p, r), the variances (q,) and axes (d, q) of the rows, q >= p, and the rms of a projection on
    the frame: in its units a gain and a step mean the same for any data."""

    frame: np.ndarray
    variances: np.ndarray
    axes: np.ndarray
    scale: float


@dataclass(eq=False, kw_only=True)
class RandomFrame(RotatedAxes):
    """Signs of a random tight frame on the leading principal axes, the model of ``OCH(max_iter=0)``.

    Attributes
    ----------
    n_components_
        Principal axes used.
    """

    method: ClassVar[str] = "pca-frame"
    reported: ClassVar[tuple[str, ...]] = ("n_components", "manifold_residual")

    n_components: int | None = parameter(
        None, "Principal axes kept; None: by the code length, 20 (up to 32 bits) to 64 (1,024 bits).", at_least=1
    )

    def _learn(self, data: TrainingData) -> Iterable[float]:
        start = self._start(data, np.random.default_rng(self.seed_))
        self.n_components_ = len(start.frame)
        self._differ(start.scale)
        self._set_rotated(data.mean, start.axes[:, : self.n_components_], start.frame)
        return ()

    def _start(self, data: TrainingData, rng: np.random.Generator) -> Start:
        data.require_rows()
        r, wanted = int(self.n_bits), int(self.n_components or default_components(self.n_bits))
        variances, axes = principal_axes(data, max(wanted, _MOST_COMPONENTS))
        p = self._reduce("n_components", wanted, len(variances), "the rows vary along no more axes")
        frame = polar(rng.normal(size=(p, r)))
        return Start(frame, variances, axes, math.sqrt(variances[:p].sum() / max(p, r)))


def default_components(n_bits: int) -> int:
    """Principal axes that suit a code length: too many fit noise, too few lose order."""
    return next((p for bits, p in _COMPONENTS if n_bits <= bits), _MOST_COMPONENTS)


def principal_axes(data: TrainingData, n_components: int) -> tuple[np.ndarray, np.ndarray]:
    """Leading eigenvalues (p,) and axes (d, p) of the covariance, at most its rank, at least one.

    Without any variance the one axis is the first coordinate, with eigenvalue 0.
    """
    d = data.covariance.shape[0]
    p = min(n_components, d)
    values, axes = eigh(data.covariance, subset_by_index=(d - p, d - 1))
    values, axes = values[::-1], axes[:, ::-1]
    rank = int((values > _EPSILON * d * max(values[0], 0.0)).sum())
    if rank == 0:
        return np.zeros(1), np.eye(d, 1)
    return values[:rank], with_fixed_signs(axes[:, :rank])


def axes_for_bits(data: TrainingData, n_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Variances (n_bits,) and principal axes (d, n_bits), one for each bit, or a refusal when there are fewer."""
    values, axes = principal_axes(data, n_bits)
    # Below the first of these a variance is the rounding error of the moments, below the other one of float32.
    least = max(16 * _EPSILON * len(data.mean) * values[0], float(np.finfo(np.float32).tiny) ** 2)
    found = int((values > least).sum())
    if found < n_bits:
        raise BadInputError(
            f"n_bits={n_bits}; the training rows (n_samples={data.count}, n_features={len(data.mean)}) vary along "
            f"{found} axes and each bit needs one: use fewer bits, or a method without this limit such as lsh"
        )
    return values, axes


def polar(matrix: np.ndarray) -> np.ndarray:
    """The nearest matrix (p, r) with an orthonormal shorter side, from the thin SVD; float64."""
    left, values, right = np.linalg.svd(np.asarray(matrix, dtype=np.float64), full_matrices=False)
    if values.size and not values[-1] > _EPSILON * values[0] * max(matrix.shape):
        raise BadInputError(f"a {matrix.shape} matrix of deficient rank has no polar factor; use a smaller step")
    return left @ right


def retract(matrix: np.ndarray) -> np.ndarray:
    """:func:`polar` of a matrix (p, r) near the manifold, by Newton-Schulz steps of small products; float64.

    Each step takes a singular value s to (3 s - s^3) / 2, which tends to 1 for 0 < s < sqrt(3), quadratically; beyond
    that range, or if it has not ended in ten steps, the polar factor itself is taken.
    """
    point = np.asarray(matrix, dtype=np.float64)
    wide = point.shape[0] <= point.shape[1]
    for _ in range(10):
        excess = _excess(point)
        error = np.abs(excess).sum(axis=1).max()  # bounds the eigenvalues of the excess, hence the singular values
        if error < 1e-13 * len(excess):
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
    return float(np.abs(_excess(point)).max())


def _excess(point: np.ndarray) -> np.ndarray:
    """V V^T - I, or V^T V - I when ``point`` (p, r) has p > r."""
    gram = point @ point.T if point.shape[0] <= point.shape[1] else point.T @ point
    return gram - np.eye(len(gram))
