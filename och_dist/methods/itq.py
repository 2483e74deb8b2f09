"""Iterative quantization: principal axes, rotated so that projections lie close to the corners of a cube.

Signs B and rotation R take turns to lower |B - Y R|^2, where Y holds the projections on as many principal axes
as there are bits (Gong and Lazebnik, 2011). The axes come from the moments of the corpus, the rotation from the
pool of training rows.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from och_dist.methods.base import TrainingData, parameter, row_blocks
from och_dist.methods.linear import RotatedAxes, axes_for_bits, polar

_BLOCK_ROWS = 2048


@dataclass(eq=False, kw_only=True)
class IterativeQuantization(RotatedAxes):
    """Iterative quantization, of at most as many bits as there are axes along which the rows vary.

    Attributes
    ----------
    loss_curve_
        Mean squared difference between signs and projections after each round, the projections in units of their
        rms over the corpus. It never rises.
    n_iter_
        Rounds made, fewer than ``max_iter`` if the signs settle.
    """

    method: ClassVar[str] = "itq"
    reported: ClassVar[tuple[str, ...]] = ("n_iter", "loss_curve", "manifold_residual")

    max_iter: int = parameter(50, "Rounds of signs and rotation; 0 keeps the random rotation.", at_least=0)

    def _learn(self, data: TrainingData) -> Iterable[float]:
        data.require_rows()
        r, n_rows = int(self.n_bits), len(data.rows)
        values, axes = axes_for_bits(data, r)
        if n_rows < r:
            self.notes_.append(f"{n_rows} rows in the pool for {r} bits: the rotation stays partly arbitrary")
        rotation = polar(np.random.default_rng(self.seed_).normal(size=(r, r)))
        projected = _projected(data, axes / math.sqrt(values.mean()))
        rotation = yield from self._alternate(projected, rotation)
        self.n_iter_ = len(self.loss_curve_)
        self._set_rotated(data.mean, axes, rotation)

    def _alternate(self, projected: np.ndarray, rotation: np.ndarray) -> Generator[float, None, np.ndarray]:
        """The rotation (r, r) after ``max_iter`` rounds on ``projected`` (m, r), or when it no longer moves."""
        energy = float(np.einsum("ij,ij->", projected, projected, dtype=np.float64)) / projected.size
        for _ in range(self.max_iter):
            left, values, right = np.linalg.svd(_signs_cross(projected, rotation))
            # |B - Y R|^2 = |B|^2 + |Y|^2 - 2 tr(R^T Y^T B), and the best R makes the trace the sum of the values.
            loss = 1.0 + energy - 2.0 * float(values.sum()) / projected.size
            before, rotation = rotation, left @ right
            yield loss
            if np.array_equal(rotation, before):
                break
        return rotation


def _projected(data: TrainingData, axes: np.ndarray) -> np.ndarray:
    """(m, r) float32, the rows of the pool on the ``axes`` (d, r)."""
    projected = np.empty((len(data.rows), axes.shape[1]), dtype=np.float32)
    for block in row_blocks(len(projected), _BLOCK_ROWS):
        projected[block] = (data.rows[block] - data.mean) @ axes
    return projected


def _signs_cross(projected: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """Y^T B (r, r) float64 of ``projected`` Y (m, r), where B = sign(Y R) with -1 at zero, as in the codes."""
    r = projected.shape[1]
    rotation = rotation.astype(np.float32)
    half_signs = np.empty((min(len(projected), _BLOCK_ROWS), r), dtype=np.float32)
    total = np.zeros((r, r))
    for rows in row_blocks(len(projected), _BLOCK_ROWS):
        block = projected[rows]
        half = half_signs[: len(block)]
        np.matmul(block, rotation, out=half)
        # In place and without a temporary: this costs as much as the products.
        np.greater(half, 0, out=half, casting="unsafe")
        half -= np.float32(0.5)
        total += block.T @ half
    return 2.0 * total
