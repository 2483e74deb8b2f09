"""Spherical Hashing (Heo et al. 2012): a bit tells whether a row lies inside a sphere.

Every sphere holds half of the training rows and every two of them share a quarter, which makes bits balanced and
pairwise independent. Pivots that share more push each other apart, those that share less attract each other.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from och_dist.errors import BadInputError
from och_dist.methods.base import Hasher, LearnedArray, Progress, TrainingData

__all__ = ["SphericalHashing"]

_BLOCK_ROWS = 2048


class SphericalHashing(Hasher):
    """Spherical Hashing, with plain Hamming distance between codes.

    The method's own distance, which counts the spheres two rows share, is in ``och_dist.kernels.spheres``.

    Parameters
    ----------
    n_bits
        Length of the code, the number of spheres; it may exceed the number of features.
    n_seed_rows
        Training rows whose mean is the first pivot of a sphere.
    mean_tolerance, std_tolerance
        Training ends when the overlaps of two spheres, as shares of the ideal quarter of the rows, deviate from 1
        by no more than this on average, and their standard deviation is no larger than this.
    max_iter
        Most rounds of moving the pivots; 0 leaves them where they start.
    random_state
        Seed of the first pivots.

    Attributes
    ----------
    pivots_, squared_radii_
        (n_bits, d) float32 and (n_bits,) float64; bit k is 1 inside sphere k, its surface included.
    n_iter_, converged_, loss_curve_, std_curve_, notes_
        Rounds made, whether the tolerances were met, mean deviation and standard deviation of the overlaps of each
        state, what went otherwise than asked.
    """

    method: ClassVar[str] = "sph"
    reported: ClassVar[tuple[str, ...]] = ("n_iter", "converged", "loss_curve", "std_curve")
    arrays: ClassVar[dict[str, LearnedArray]] = {
        "pivots": LearnedArray(("r", "d")),
        "squared_radii": LearnedArray(("r",), "float64"),
    }

    pivots_: np.ndarray
    squared_radii_: np.ndarray

    def __init__(
        self,
        n_bits: int = 64,
        *,
        n_seed_rows: int = 5,
        mean_tolerance: float = 0.10,
        std_tolerance: float = 0.15,
        max_iter: int = 100,
        random_state: Any = 0,
    ) -> None:
        self.n_bits = n_bits
        self.n_seed_rows = n_seed_rows
        self.mean_tolerance = mean_tolerance
        self.std_tolerance = std_tolerance
        self.max_iter = max_iter
        self.random_state = random_state

    def check_parameters(self) -> None:
        super().check_parameters()
        self._check_integers(n_seed_rows=1, max_iter=0)
        self._check_above_zero("mean_tolerance", "std_tolerance", or_zero=True)

    def encode_block(self, block: np.ndarray, *, first_row: int = 0) -> np.ndarray:
        # Imported here so that a method can be inspected without compiling the encoder.
        from och_dist.kernels.spheres import encode_spheres

        return encode_spheres(block, self.pivots_, self.squared_radii_, first_row=first_row)

    def query_scores(self, vectors: np.ndarray) -> np.ndarray:
        """(q, n_bits) float64: how far each query lies inside each sphere, radius minus distance."""
        from och_dist.kernels.spheres import sphere_scores

        return sphere_scores(vectors, self.pivots_, self.squared_radii_)

    def _learn(self, data: TrainingData, progress: Progress | None) -> None:
        from och_dist.kernels.spheres import nth_distances

        data.require_rows()
        n = len(data.rows)
        # In units of the rms distance from the mean, float32 neither overflows nor underflows.
        scale = math.sqrt(float(np.trace(data.covariance)))
        if scale <= np.finfo(np.float32).tiny:
            self.notes_.append("all rows are equal: nothing to learn, all their codes are equal")
            scale = 1.0
        rows = _scaled(data.rows, data.mean, scale)
        self.loss_curve_: list[float] = []
        self.std_curve_: list[float] = []
        pivots = self._spread(rows, self._first_pivots(rows), progress)
        self.n_iter_ = len(self.loss_curve_) - 1
        with np.errstate(over="ignore"):
            self.pivots_ = np.ascontiguousarray(data.mean + scale * pivots, dtype=np.float32)
        if not np.isfinite(self.pivots_).all():
            raise BadInputError("the learned pivots exceed the range of float32; rescale the vectors")
        self.squared_radii_ = nth_distances(data.rows, self.pivots_, _half(n))

    def _first_pivots(self, rows: np.ndarray) -> np.ndarray:
        """(r, d) float64: means of a few random rows, at most half of them lest all pivots be one."""
        rng = np.random.default_rng(self.seed_)
        n_seed_rows = min(int(self.n_seed_rows), _half(len(rows)))
        if n_seed_rows < self.n_seed_rows:
            self.notes_.append(f"n_seed_rows reduced from {self.n_seed_rows} to {n_seed_rows}: too few rows")
        drawn = [rng.choice(len(rows), n_seed_rows, replace=False) for _ in range(int(self.n_bits))]
        return np.stack([rows[chosen].mean(axis=0, dtype=np.float64) for chosen in drawn])

    def _spread(self, rows: np.ndarray, pivots: np.ndarray, progress: Progress | None) -> np.ndarray:
        """Move ``pivots`` (r, d) until the overlaps of their spheres are even; returns their last places."""
        squared_norms = np.einsum("ij,ij->i", rows, rows)
        for step in range(int(self.max_iter) + 1):
            deviation = _overlap_deviation(_inside(rows, squared_norms, pivots))
            off_diagonal = deviation[np.triu_indices_from(deviation, 1)]
            mean, std = (float(np.abs(off_diagonal).mean()), float(off_diagonal.std())) if off_diagonal.size else (0, 0)
            self.loss_curve_.append(mean)
            self.std_curve_.append(std)
            if progress is not None:
                progress(step, mean)
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


def _scaled(rows: np.ndarray, mean: np.ndarray, scale: float) -> np.ndarray:
    """(n, d) float32: ``rows`` (n, d) about their ``mean`` (d,) in units of ``scale``."""
    scaled = np.empty(rows.shape, dtype=np.float32)
    for start in range(0, len(rows), _BLOCK_ROWS):
        step = slice(start, start + _BLOCK_ROWS)
        scaled[step] = (rows[step] - mean) / scale
    return scaled


def _inside(rows: np.ndarray, squared_norms: np.ndarray, pivots: np.ndarray) -> np.ndarray:
    """(r, n) float32 of 0 and 1: which rows are among the nearer half of each pivot, ties included."""
    nearness = np.empty((len(pivots), len(rows)), dtype=np.float32)
    columns = np.ascontiguousarray(pivots, dtype=np.float32)
    for start in range(0, len(rows), _BLOCK_ROWS):
        step = slice(start, start + _BLOCK_ROWS)
        # Without the pivot's own norm: it is the same for all rows.
        nearness[:, step] = squared_norms[step] - 2 * (columns @ rows[step].T)
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
