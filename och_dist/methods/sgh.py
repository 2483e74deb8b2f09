"""Scalable Graph Hashing (Jiang and Li 2015): codes whose inner products approach a similarity graph of all rows.

The rows are centred and brought to length 1. The graph 2 exp(-|x - y|^2 / 2) - 1 is never built: on unit rows the
exponential of their inner product is nearly linear, which makes the graph a product P Q^T of two thin matrices.
Bits are signs of Gaussian kernel features, learned one after the other from what the earlier ones leave of the
graph, and then once more each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NoReturn

import numpy as np
from scipy.linalg import cholesky, eigh, eigvalsh, solve_triangular

from och_dist.errors import BadInputError
from och_dist.kernels.gaussian import GaussianFeatures, encode_gaussian, gaussian_scores
from och_dist.methods.base import Hasher, LearnedArray, TrainingData, parameter, row_blocks, with_fixed_signs

_BLOCK_ROWS = 1024
_RIDGE = 1e-6
_EPSILON = float(np.finfo(np.float64).eps)


@dataclass(eq=False, kw_only=True)
class ScalableGraphHashing(Hasher):
    """Scalable Graph Hashing, of at most as many bits as there are bases, and as the kernel features' rank.

    Attributes
    ----------
    mean_, bases_, bandwidth_, bias_, weights_
        The model: (d,) and (m, d) float32, (1,), (m,) and (m, n_bits) float64. ``bandwidth_`` is the mean squared
        distance of training rows to bases, ``bias_`` the mean of each kernel.
    n_iter_, loss_curve_, eigenvalue_curve_
        Eigenproblems solved, share of the graph (squared, as the features see it) that is left after each, their
        largest eigenvalues.
    """

    method: ClassVar[str] = "sgh"
    reported: ClassVar[tuple[str, ...]] = ("n_iter", "loss_curve", "eigenvalue_curve")
    arrays: ClassVar[dict[str, LearnedArray]] = {
        "mean": LearnedArray(("d",)),
        "bases": LearnedArray(("m", "d")),
        "bandwidth": LearnedArray(("one",), "float64", positive=True),
        "bias": LearnedArray(("m",), "float64"),
        "weights": LearnedArray(("m", "r"), "float64"),
    }

    n_bases: int = parameter(
        300, "Training rows, drawn at random, whose Gaussian kernels are the features.", at_least=1
    )
    n_sweeps: int = parameter(
        1, "How often all bits are learned again, in random order, after they were learned one by one.", at_least=0
    )

    def check_parameters(self) -> None:
        super().check_parameters()
        if self.n_bits > self.n_bases:
            raise BadInputError(f"n_bits={self.n_bits} with n_bases={self.n_bases}; use at least one base for each bit")

    def encode_block(self, block: np.ndarray, *, first_row: int = 0) -> np.ndarray:
        return encode_gaussian(block, *self._model(), first_row=first_row)

    def query_scores(self, vectors: np.ndarray) -> np.ndarray:
        """(q, n_bits) float64: the weighted sums of kernel features whose signs are the bits."""
        return gaussian_scores(vectors, *self._model())

    def _model(self) -> tuple[np.ndarray, np.ndarray, float, np.ndarray, np.ndarray]:
        return self.mean_, self.bases_, float(self.bandwidth_[0]), self.bias_, self.weights_

    def _learn(self, data: TrainingData) -> Iterable[float]:
        data.require_rows()
        rng = np.random.default_rng(self.seed_)
        self.mean_ = data.mean.astype(np.float32)
        unit = _unit_rows(data.rows, self.mean_)
        self._draw_bases(unit, rng)
        features, graph = self._features(data.rows, unit)
        bits = _Bits(features, graph, self._whitening(features, data), int(self.n_bits))
        self.eigenvalue_curve_: list[float] = []
        sweeps = [np.arange(int(self.n_bits)), *(rng.permutation(int(self.n_bits)) for _ in range(int(self.n_sweeps)))]
        for bit in np.concatenate(sweeps):
            loss, eigenvalue = bits.learn(int(bit))
            self.eigenvalue_curve_.append(eigenvalue)
            yield loss
        self.weights_ = np.ascontiguousarray(bits.weights)
        self.n_iter_ = len(self.loss_curve_)

    def _draw_bases(self, unit: np.ndarray, rng: np.random.Generator) -> None:
        n = len(unit)
        n_bases = self._reduce("n_bases", int(self.n_bases), n, "no more rows")
        self.bases_ = unit[rng.choice(n, n_bases, replace=False)]
        # The mean of |x - b|^2 over all rows x and bases b, without forming them.
        centre, base_centre = unit.mean(axis=0, dtype=np.float64), self.bases_.mean(axis=0, dtype=np.float64)
        squares = np.einsum("ij,ij->", unit, unit, dtype=np.float64) / n
        squares += np.einsum("ij,ij->", self.bases_, self.bases_, dtype=np.float64) / n_bases
        self.bandwidth_ = np.array([squares - 2 * float(centre @ base_centre)])

    def _features(self, rows: np.ndarray, unit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Kernel features (n, m) float64 without their means (``bias_``), and their products with the graph (m, d + 1).

        The features sum to zero over the rows, so that the constant columns of P and Q cannot add to the graph.
        """
        n_bases = len(self.bases_)
        if not self.bandwidth_[0] > 1e-12:
            self._refuse_rank(0, rows)
        kernels = GaussianFeatures(self.mean_, self.bases_, float(self.bandwidth_[0]), np.zeros(n_bases))
        features = np.empty((len(rows), n_bases))
        for step in row_blocks(len(rows), _BLOCK_ROWS):
            centred, squared = kernels.centred(rows[step])
            if not np.isfinite(squared).all():
                raise BadInputError("rows lie beyond the range of float32 from their mean; rescale the vectors")
            features[step] = kernels.of_centred(centred, squared)
        self.bias_ = features.mean(axis=0)
        features -= self.bias_
        graph = np.zeros((n_bases, unit.shape[1] + 1))
        for step in row_blocks(len(rows), _BLOCK_ROWS):
            graph += features[step].T @ graph_factor(unit[step])
        return features, graph

    def _whitening(self, features: np.ndarray, data: TrainingData) -> np.ndarray:
        """Upper triangular R with R^T R = K^T K + ridge for the features K: w = R^-1 u has w^T (R^T R) w = |u|^2."""
        gram = features.T @ features
        values = eigvalsh(gram)
        noise = _EPSILON * max(features.shape) * float(values[-1])
        rank = int((values > max(noise, _EPSILON)).sum())
        if rank < self.n_bits:
            self._refuse_rank(rank, data.rows)
        # Duplicate bases make the matrix singular; beyond the rounding of its largest eigenvalue it is safe.
        gram[np.diag_indices_from(gram)] += max(_RIDGE, 100 * noise)
        return cholesky(gram)

    def _refuse_rank(self, rank: int, rows: np.ndarray) -> NoReturn:
        n, d = rows.shape
        raise BadInputError(
            f"n_bits={self.n_bits} but the kernel features of the rows (n_samples={n}, n_features={d}) "
            f"have rank {rank}; use no more bits than that, or rows that differ more"
        )


class _Bits:
    """Learns bits from the part of the graph that the others leave, in coordinates where K^T K is the identity."""

    def __init__(self, features: np.ndarray, graph: np.ndarray, whitening: np.ndarray, n_bits: int) -> None:
        self.features, self.whitening = features, whitening
        factor = self._whitened(graph)
        self.rest = n_bits * (factor @ factor.T)
        self.whole = float(np.square(self.rest).sum())
        self.weights = np.zeros((features.shape[1], n_bits))
        self.images = np.zeros((features.shape[1], n_bits))

    def learn(self, bit: int) -> tuple[float, float]:
        """Learn ``bit``, again if it was learned before; the share of the graph that is left, and the eigenvalue."""
        self.rest += np.outer(self.images[:, bit], self.images[:, bit])
        last = len(self.rest) - 1
        (value,), vectors = eigh(self.rest, subset_by_index=(last, last))
        weights = with_fixed_signs(solve_triangular(self.whitening, vectors))[:, 0]
        self.weights[:, bit] = weights
        self.images[:, bit] = self._whitened(_signed_sum(self.features, weights))
        self.rest -= np.outer(self.images[:, bit], self.images[:, bit])
        left = float(np.square(self.rest).sum())
        return left / self.whole if self.whole > 0 else 0.0, float(value)

    def _whitened(self, columns: np.ndarray) -> np.ndarray:
        return solve_triangular(self.whitening, columns, trans="T")


def graph_factor(unit: np.ndarray) -> np.ndarray:
    """The columns (n, d + 1) float64 that P and Q share for rows ``unit`` (n, d) of length 1 or 0.

    With one more column, of ones in P and of -1 in Q, P Q^T is 2 exp(-|x - y|^2 / 2) - 1, where exp(x.y) is replaced
    by the line through its values at -1 and 1.
    """
    slope, level = math.sinh(1.0), math.cosh(1.0)
    damping = np.exp(-np.einsum("ij,ij->i", unit, unit, dtype=np.float64) / 2)[:, None]
    return np.concatenate([math.sqrt(2 * slope) * damping * unit, math.sqrt(2 * level) * damping], axis=1)


def _unit_rows(rows: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """(n, d) float32: ``rows`` (n, d) minus ``mean`` (d,) at length 1; rows at the mean stay zero."""
    unit = np.empty(rows.shape, dtype=np.float32)
    for step in row_blocks(len(rows), _BLOCK_ROWS):
        centred = rows[step].astype(np.float64) - mean
        norms = np.sqrt(np.einsum("ij,ij->i", centred, centred))[:, None]
        unit[step] = centred / np.where(norms > 0, norms, 1.0)
    return unit


def _signed_sum(features: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(m,): K^T sign(K w) for the features K (n, m), where the sign of 0 is -1 as in a code."""
    total = np.zeros(features.shape[1])
    for step in row_blocks(len(features), _BLOCK_ROWS):
        block = features[step]
        total += np.where(block @ weights > 0, 1.0, -1.0) @ block
    return total
