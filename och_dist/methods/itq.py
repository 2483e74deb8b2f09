"""Iterative quantization: principal axes, rotated so that projections lie close to the corners of a cube.

Signs B and rotation R take turns to lower |B - Y R|^2, where Y holds the projections on as many principal axes
as there are bits (Gong and Lazebnik, 2011). The axes come from the moments of the corpus, the rotation from the
pool of training rows.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from och_dist.errors import BadInputError
from och_dist.kernels.stiefel import polar, residual
from och_dist.methods.base import LinearHasher, Progress, TrainingData
from och_dist.methods.och import principal_axes

__all__ = ["IterativeQuantization", "axes_for_bits"]

_BLOCK_ROWS = 2048

# Variance below this share of the largest, times the dimension, is the rounding error of the moments.
_NOISE = 16 * float(np.finfo(np.float64).eps)


def axes_for_bits(data: TrainingData, n_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Variances (n_bits,) and principal axes (d, n_bits), one for each bit, or a refusal when there are fewer."""
    values, axes = principal_axes(data, n_bits)
    least = max(_NOISE * len(data.mean) * values[0], float(np.finfo(np.float32).tiny) ** 2)
    found = int((values > least).sum())
    if found < n_bits:
        raise BadInputError(
            f"n_bits={n_bits}; the training rows (n_samples={data.count}, n_features={len(data.mean)}) vary along "
            f"{found} axes and each bit needs one: use fewer bits, or a method without this limit such as lsh"
        )
    return values, axes


class IterativeQuantization(LinearHasher):
    """Iterative quantization.

    Parameters
    ----------
    n_bits
        Length of the code, at most the number of axes along which the rows vary.
    max_iter
        Rounds of signs and rotation; 0 keeps the random rotation.
    random_state
        Seed of the first rotation.

    Attributes
    ----------
    mean_, projection_, offsets_
        The linear map, float32: (d,), (d, n_bits), (n_bits,) zeros.
    components_, rotation_
        Principal axes (n_bits, d) and the rotation R (n_bits, n_bits), float64; ``projection_`` is their product.
    loss_curve_
        Mean squared difference between signs and projections after each round, the projections in units of their
        rms over the corpus. It never rises.
    n_iter_, manifold_residual_, notes_
        Rounds made (fewer than ``max_iter`` if the signs settle), distance of R from orthogonality, what is
        special about the data.
    """

    method: ClassVar[str] = "itq"
    reported: ClassVar[tuple[str, ...]] = ("n_iter", "loss_curve", "manifold_residual")

    def __init__(self, n_bits: int = 64, *, max_iter: int = 50, random_state: Any = 0) -> None:
        self.n_bits = n_bits
        self.max_iter = max_iter
        self.random_state = random_state

    def check_parameters(self) -> None:
        super().check_parameters()
        self._check_integers(max_iter=0)

    def _learn(self, data: TrainingData, progress: Progress | None) -> None:
        data.require_rows()
        r, n_rows = int(self.n_bits), len(data.rows)
        values, axes = axes_for_bits(data, r)
        if n_rows < r:
            self.notes_.append(f"{n_rows} rows in the pool for {r} bits: the rotation stays partly arbitrary")
        rotation = polar(np.random.default_rng(self.seed_).normal(size=(r, r)))
        projected = _projected(data, axes / math.sqrt(values.mean()))
        self.rotation_ = self._alternate(projected, rotation, progress)
        self.n_iter_ = len(self.loss_curve_)
        self.components_ = np.ascontiguousarray(axes.T)
        self.manifold_residual_ = residual(self.rotation_)
        self._set_linear(data.mean, axes @ self.rotation_, np.zeros(r))

    def _alternate(self, projected: np.ndarray, rotation: np.ndarray, progress: Progress | None) -> np.ndarray:
        """The rotation (r, r) after ``max_iter`` rounds on ``projected`` (m, r), or when it no longer moves."""
        self.loss_curve_: list[float] = []
        energy = float(np.einsum("ij,ij->", projected, projected, dtype=np.float64)) / projected.size
        for step in range(self.max_iter):
            left, values, right = np.linalg.svd(_signs_cross(projected, rotation))
            # |B - Y R|^2 = |B|^2 + |Y|^2 - 2 tr(R^T Y^T B), and the best R makes the trace the sum of the values.
            loss = 1.0 + energy - 2.0 * float(values.sum()) / projected.size
            before, rotation = rotation, left @ right
            self.loss_curve_.append(loss)
            if progress is not None:
                progress(step, loss)
            if np.array_equal(rotation, before):
                break
        return rotation


def _projected(data: TrainingData, axes: np.ndarray) -> np.ndarray:
    """(m, r) float32, the rows of the pool on the ``axes`` (d, r)."""
    projected = np.empty((len(data.rows), axes.shape[1]), dtype=np.float32)
    for start in range(0, len(projected), _BLOCK_ROWS):
        block = data.rows[start : start + _BLOCK_ROWS] - data.mean
        projected[start : start + _BLOCK_ROWS] = block @ axes
    return projected


def _signs_cross(projected: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """Y^T B (r, r) float64 of ``projected`` Y (m, r), where B = sign(Y R) with -1 at zero, as in the codes."""
    r = projected.shape[1]
    rotation = rotation.astype(np.float32)
    half_signs = np.empty((min(len(projected), _BLOCK_ROWS), r), dtype=np.float32)
    total = np.zeros((r, r))
    for start in range(0, len(projected), _BLOCK_ROWS):
        block = projected[start : start + _BLOCK_ROWS]
        half = half_signs[: len(block)]
        np.matmul(block, rotation, out=half)
        # In place and without a temporary: this costs as much as the products.
        np.greater(half, 0, out=half, casting="unsafe")
        half -= np.float32(0.5)
        total += block.T @ half
    return 2.0 * total
