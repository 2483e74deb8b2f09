"""Spherical Hashing (Heo et al. 2012): a bit tells whether a row lies inside a sphere.

Every sphere holds half of the training rows and every two of them share a quarter, which makes bits balanced and
pairwise independent. Pivots that share more push each other apart, those that share less attract each other.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from och_dist.errors import BadInputError
from och_dist.kernels.spheres import encode_spheres, nth_distances, sphere_scores
from och_dist.methods.base import Hasher, LearnedArray, TrainingData, parameter, row_blocks

_BLOCK_ROWS = 2048


@dataclass(eq=False, kw_only=True)
class SphericalHashing(Hasher):
    """Spherical Hashing, with plain Hamming distance between codes, of which there may be more bits than features.

    The method's own distance, which counts the spheres two rows share, is in ``och_dist.kernels.spheres``. Training
    ends when the overlaps of two spheres, as shares of the ideal quarter of the rows, are within both tolerances.

    Attributes
    ----------
    pivots_, squared_radii_
        (n_bits, d) float32 and (n_bits,) float64; bit k is 1 inside sphere k, its surface included.
    n_iter_, converged_, loss_curve_, std_curve_
        Rounds made, whether the tolerances were met, mean deviation and standard deviation of the overlaps of each
        state.
    """

    method: ClassVar[str] = "sph"
    reported: ClassVar[tuple[str, ...]] = ("n_iter", "converged", "loss_curve", "std_curve")
    arrays: ClassVar[dict[str, LearnedArray]] = {
        "pivots": LearnedArray(("r", "d")),
        "squared_radii": LearnedArray(("r",), "float64"),
    }

    n_seed_rows: int = parameter(5, "Training rows whose mean is the first pivot of a sphere.", at_least=1)
    mean_tolerance: float = parameter(0.10, "Most that the overlaps may deviate from 1 on average.", at_least=0)
    std_tolerance: float = parameter(0.15, "Largest standard deviation of the overlaps.", at_least=0)
    max_iter: int = parameter(100, "Most rounds of moving the pivots; 0 leaves them where they start.", at_least=0)

    def encode_block(self, block: np.ndarray, *, first_row: int = 0) -> np.ndarray:
        return encode_spheres(block, self.pivots_, self.squared_radii_, first_row=first_row)

    def query_scores(self, vectors: np.ndarray) -> np.ndarray:
        """(q, n_bits) float64: how far each query lies inside each sphere, radius minus distance."""
        return sphere_scores(vectors, self.pivots_, self.squared_radii_)

    def _learn(self, data: TrainingData) -> Iterable[float]:
        data.require_rows()
        # In units of the rms distance from the mean, float32 neither overflows nor underflows.
        scale = math.sqrt(float(np.trace(data.covariance)))
        scale = scale if self._differ(scale) else 1.0
        rows = np.empty(data.rows.shape, dtype=np.float32)
        for block in row_blocks(len(rows), _BLOCK_ROWS):
            rows[block] = (data.rows[block] - data.mean) / scale
        pivots = yield from self._spread(rows, self._first_pivots(rows))
        self.n_iter_ = len(self.loss_curve_) - 1
        with np.errstate(over="ignore"):
            self.pivots_ = np.ascontiguousarray(data.mean + scale * pivots, dtype=np.float32)
        if not np.isfinite(self.pivots_).all():
            raise BadInputError("the learned pivots exceed the range of float32; rescale the vectors")
        self.squared_radii_ = nth_distances(data.rows, self.pivots_, _half(len(rows)))

    def _first_pivots(self, rows: np.ndarray) -> np.ndarray:
        """(r, d) float64: means of a few random rows, at most half of them lest all pivots be one."""
        rng = np.random.default_rng(self.seed_)
        count = self._reduce("n_seed_rows", int(self.n_seed_rows), _half(len(rows)), "too few rows")
        drawn = [rng.choice(len(rows), count, replace=False) for _ in range(int(self.n_bits))]
        return np.stack([rows[chosen].mean(axis=0, dtype=np.float64) for chosen in drawn])

    def _spread(self, rows: np.ndarray, pivots: np.ndarray) -> Generator[float, None, np.ndarray]:
        """Move ``pivots`` (r, d) until the overlaps of their spheres are even; returns their last places."""
        squared_norms = np.einsum("ij,ij->i", rows, rows)
        self.std_curve_: list[float] = []
        for step in range(int(self.max_iter) + 1):
            deviation = _overlap_deviation(_inside(rows, squared_norms, pivots))
            off_diagonal = deviation[np.triu_indices_from(deviation, 1)]
            mean, std = (float(np.abs(off_diagonal).mean()), float(off_diagonal.std())) if off_diagonal.size else (0, 0)
            self.std_curve_.append(std)
            yield mean
            self.converged_ = mean <= self.mean_tolerance and std <= self.std_tolerance
            forces = _forces(deviation, pivots)
            if self.converged_ or step == self.max_iter or not forces.any():
                break
            pivots = pivots + forces
        if not self.converged_:
            self.notes_.append(
                f"the overlaps of the spheres deviate by {mean:.3g} (std {std:.3g}) after {step} rounds; "
                f"max_iter={self.max_iter}"
            )
        return pivots


def _half(n: int) -> int:
    return max(1, n // 2)


def _inside(rows: np.ndarray, squared_norms: np.ndarray, pivots: np.ndarray) -> np.ndarray:
    """(r, n) float32 of 0 and 1: which rows are among the nearer half of each pivot, ties included."""
    nearness = np.empty((len(pivots), len(rows)), dtype=np.float32)
    columns = np.ascontiguousarray(pivots, dtype=np.float32)
    for block in row_blocks(len(rows), _BLOCK_ROWS):
        # Without the pivot's own norm: it is the same for all rows.
        nearness[:, block] = squared_norms[block] - 2 * (columns @ rows[block].T)
    n = _half(len(rows))
    return (nearness <= np.partition(nearness, n - 1, axis=1)[:, n - 1 : n]).astype(np.float32)


def _overlap_deviation(inside: np.ndarray) -> np.ndarray:
    """(r, r) float64: by how much two spheres share more rows than a quarter, in units of that quarter."""
    # Counts below 2**24 are exact in float32, for any order of summation.
    quarter = inside.shape[1] / 4
    deviation = (inside @ inside.T).astype(np.float64) / quarter - 1
    np.fill_diagonal(deviation, 0)
    return deviation


def _forces(deviation: np.ndarray, pivots: np.ndarray) -> np.ndarray:
    """(r, d): the mean over all other pivots of half the deviation times the way from there to here."""
    half = deviation / 2
    return (half.sum(axis=1, keepdims=True) * pivots - half @ pivots) / len(pivots)
