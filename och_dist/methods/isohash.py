"""Isotropic hashing: principal axes, rotated so that all bits carry the same variance.

With the leading variances L = diag(l_1 .. l_r) of mean a, any orthogonal Q with diag(Q^T L Q) = a is a solution
(Kong and Li, 2012). Only the covariance is needed. Every solver starts from a random rotation, on which its
solution depends, and works in units of a.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Literal

import numpy as np

from och_dist.methods.base import TrainingData, parameter
from och_dist.methods.linear import RotatedAxes, axes_for_bits, polar

# A step of the flow: its sufficient decrease, how often it may be halved, and how it grows when it succeeds.
_ARMIJO = 1e-4
_HALVINGS = 40
_GROWTH = 1.5


@dataclass(eq=False, kw_only=True)
class IsotropicHashing(RotatedAxes):
    """Isotropic hashing, of at most as many bits as there are axes along which the rows vary.

    Attributes
    ----------
    loss_curve_, n_iter_
        Largest relative deviation after each step, and the number of steps.
    deviation_
        Largest relative deviation of the result.
    """

    method: ClassVar[str] = "isohash"
    reported: ClassVar[tuple[str, ...]] = ("n_iter", "loss_curve", "deviation", "manifold_residual")

    solver: Literal["lift-projection", "gradient-flow", "givens"] = parameter(
        "lift-projection",
        '"lift-projection": alternate between matrices of equal diagonal and matrices with the given spectrum; '
        '"gradient-flow": descend the squared deviation of the diagonal along the orthogonal group; "givens": one '
        "step of up to ``n_bits`` - 1 plane rotations, each of which settles one bit exactly.",
    )
    max_iter: int = parameter(
        500, "Most steps of the solver; what they leave is finished with plane rotations.", at_least=0
    )
    tol: float = parameter(
        1e-6, "Relative deviation of a bit's variance from the mean one below which nothing is left to do.", above=0
    )

    def _learn(self, data: TrainingData) -> Iterable[float]:
        r = int(self.n_bits)
        variances, axes = axes_for_bits(data, r)
        spectrum = variances / variances.mean()
        start = polar(np.random.default_rng(self.seed_).normal(size=(r, r)))
        rotation = yield from self._solve(spectrum, start)
        self.n_iter_ = len(self.loss_curve_)
        self.deviation_ = _deviation(_rotated(spectrum, rotation))
        self._set_rotated(data.mean, axes, rotation)

    def _solve(self, spectrum: np.ndarray, rotation: np.ndarray) -> Generator[float, None, np.ndarray]:
        """Q (r, r) with diag(Q^T diag(spectrum) Q) = 1, from the start ``rotation``."""
        steps = {"lift-projection": _lift_and_project, "gradient-flow": _flow, "givens": _settle}[self.solver]
        deviation = _deviation(_rotated(spectrum, rotation))
        rounds = self.max_iter if deviation >= self.tol else 0
        for point in islice(steps(spectrum, rotation), rounds):
            rotation, deviation = point
            yield deviation
            if deviation < self.tol:
                break
        if deviation < self.tol:
            return rotation
        self.notes_.append(
            f"{self.solver} left a deviation of {deviation:.1e} after {len(self.loss_curve_)} steps: "
            "finished with plane rotations"
        )
        return _givens(spectrum, rotation)


def _rotated(spectrum: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """Q^T diag(spectrum) Q (r, r), exactly symmetric."""
    product = (rotation.T * spectrum) @ rotation
    return (product + product.T) / 2


def _deviation(matrix: np.ndarray) -> float:
    """Largest deviation of the diagonal of ``matrix`` (r, r) from 1."""
    return float(np.abs(np.diag(matrix) - 1).max())


def _lift_and_project(spectrum: np.ndarray, rotation: np.ndarray) -> Iterator[tuple[np.ndarray, float]]:
    """Rotations and their deviations: set the diagonal to 1, then take the nearest matrix with the spectrum."""
    matrix = _rotated(spectrum, rotation)
    while True:
        np.fill_diagonal(matrix, 1.0)
        # Eigenvalues come ascending, the spectrum falls; with T = E D E^T the answer is E L E^T, thus Q = E^T.
        rotation = np.linalg.eigh(matrix)[1][:, ::-1].T
        matrix = _rotated(spectrum, rotation)
        yield rotation, _deviation(matrix)


def _flow(spectrum: np.ndarray, rotation: np.ndarray) -> Iterator[tuple[np.ndarray, float]]:
    """Rotations and their deviations along dX/dt = [X, [diag(X) - I, X]], the descent of |diag(X) - 1|^2 / 2.

    A step multiplies Q by the Cayley transform of the skew direction, so that the spectrum is kept whatever the
    step, whose length is found by halving and grows again after each step. Ends where no step descends any more: at
    a saddle, or within the rounding error of a solution.
    """
    matrix, step, identity = _rotated(spectrum, rotation), 0.5 / spectrum[0], np.eye(len(spectrum))
    while True:
        excess = np.diag(matrix) - 1
        direction = (excess[:, None] - excess) * matrix
        value, slope = excess @ excess / 2, float(np.einsum("ij,ij->", direction, direction))
        for _ in range(_HALVINGS):
            half = step / 2 * direction
            turned = rotation @ np.linalg.solve(identity - half, identity + half)
            trial = _rotated(spectrum, turned)
            new_excess = np.diag(trial) - 1
            if new_excess @ new_excess / 2 < value - _ARMIJO * step * slope:
                break
            step /= 2
        else:
            return
        rotation, matrix, step = turned, trial, step * _GROWTH
        yield rotation, _deviation(matrix)


def _settle(spectrum: np.ndarray, rotation: np.ndarray) -> Iterator[tuple[np.ndarray, float]]:
    """All plane rotations as one step."""
    rotation = _givens(spectrum, rotation)
    yield rotation, _deviation(_rotated(spectrum, rotation))


def _givens(spectrum: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """``rotation`` (r, r) after at most r - 1 plane rotations, each of which brings one diagonal entry to 1.

    The entry furthest below 1 is paired with the one furthest above; an entry that is settled is left alone.
    """
    rotation, matrix = rotation.copy(), _rotated(spectrum, rotation)
    diagonal = np.diag(matrix).copy()
    for _ in range(len(spectrum) - 1):
        i, j = int(diagonal.argmin()), int(diagonal.argmax())
        below, above = diagonal[i] - 1, diagonal[j] - 1
        if not below < 0 < above:
            break
        # Of the two roots of above t^2 - 2 m t + below = 0 the smaller: the least turn, without cancellation.
        middle = matrix[i, j]
        t = below / (middle + math.copysign(math.sqrt(middle * middle - below * above), middle))
        c = 1 / math.sqrt(1 + t * t)
        plane = np.array([[c, t * c], [-t * c, c]])
        pair = [i, j]
        matrix[pair] = plane.T @ matrix[pair]
        matrix[:, pair] = matrix[:, pair] @ plane
        rotation[:, pair] = rotation[:, pair] @ plane
        diagonal[j] = matrix[j, j]
        diagonal[i] = 1.0
    return rotation
