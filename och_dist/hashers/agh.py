"""Anchor Graph Hashing: the smoothest functions on a graph that joins rows through a few hundred anchors.

A row is a mixture of its nearest anchors (row of Z). The graph Z diag(Z^T 1)^-1 Z^T between rows is never built: its
eigenvectors are Z W, with W from an eigenproblem of the size of the anchors. One layer thresholds r of them at zero;
two layers take r / 2 and divide each side once more, where that costs the graph least.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from scipy.linalg import eigh

from och_dist.errors import BadInputError, IntegrityError
from och_dist.hashers.base import ArraySpec, Hasher, Progress, TrainingData, is_integer
from och_dist.kernels.anchors import anchor_scores, anchor_shares, encode_anchors, nearest_anchors

__all__ = ["AGH", "Mixture", "divisions", "graph_vectors"]

_CONNECTED = 1e-3
"""Eigenvalues this close to 1 tell which part of a disconnected graph a row is in, and nothing within it."""

_NOISE = 1e-10
"""Smaller eigenvalues, and anchors with a smaller total share, are rounding errors."""


class Mixture(NamedTuple):
    """Rows as mixtures of anchors: ``numbers`` (n, s) int64 and ``shares`` (n, s) float64 that sum to 1."""

    numbers: np.ndarray
    shares: np.ndarray

    def totals(self, n_anchors: int, values: np.ndarray | None = None) -> np.ndarray:
        """Z^T 1 (m,), or Z^T values (m, q) for ``values`` (n, q)."""
        if values is None:
            return np.bincount(self.numbers.ravel(), self.shares.ravel(), n_anchors)
        return np.stack([_column(self, n_anchors, column) for column in values.T], axis=1)

    def gram(self, n_anchors: int) -> np.ndarray:
        """Z^T Z (m, m)."""
        out = np.zeros(n_anchors * n_anchors)
        for a in range(self.numbers.shape[1]):
            for b in range(self.numbers.shape[1]):
                places = self.numbers[:, a] * n_anchors + self.numbers[:, b]
                out += np.bincount(places, self.shares[:, a] * self.shares[:, b], n_anchors * n_anchors)
        return out.reshape(n_anchors, n_anchors)


def _column(mixture: Mixture, n_anchors: int, values: np.ndarray) -> np.ndarray:
    return np.bincount(mixture.numbers.ravel(), (mixture.shares * values[:, None]).ravel(), n_anchors)


def graph_vectors(mixture: Mixture, n_anchors: int, n_vectors: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues (q,), descending, and W (m, q) such that Y = Z W has Y^T Y = n I and column means 0.

    q is ``n_vectors`` or as many as the graph has; every anchor must have a share in some row. The largest entry of
    each column of W is positive.
    """
    totals = mixture.totals(n_anchors)
    roots = 1.0 / np.sqrt(totals)
    values, vectors = eigh(roots[:, None] * mixture.gram(n_anchors) * roots)
    usable = np.flatnonzero((values > _NOISE) & (values < 1.0 - _CONNECTED))[::-1][:n_vectors]
    values, vectors = values[usable], vectors[:, usable]
    weights = np.sqrt(len(mixture.numbers) / values) * roots[:, None] * vectors
    largest = weights[np.abs(weights).argmax(axis=0), np.arange(len(usable))]
    return values, np.ascontiguousarray(weights * np.sign(largest))


def divisions(mixture: Mixture, n_anchors: int, scores: np.ndarray) -> np.ndarray:
    """Thresholds (2, q) of the second layer from ``scores`` Y (n, q), for the rows above zero and for the others.

    The folded function y - b0 above zero, b1 - y elsewhere, has mean zero and the least energy on the graph. Where no
    fold changes the energy (the sides share no anchor) both are 0.
    """
    positive = scores > 0
    n, n_above = len(scores), positive.sum(axis=0)
    sums = np.where(positive, scores, 0.0).sum(axis=0)
    totals = mixture.totals(n_anchors)[:, None]
    above = mixture.totals(n_anchors, positive.astype(np.float64))
    magnitudes = mixture.totals(n_anchors, np.abs(scores))
    slope = sums - (above * magnitudes / totals).sum(axis=0)
    curvature = n_above - (above * above / totals).sum(axis=0)
    flat = curvature <= _NOISE * n
    fold = slope / np.where(flat, 1.0, curvature)
    cuts = np.stack([2 * sums + (n - n_above) * fold, n_above * fold - 2 * sums]) / n
    cuts[:, flat] = 0.0
    return cuts


class AGH(Hasher):
    """Anchor Graph Hashing (Liu, Wang, Kumar and Chang 2011), with one or two layers.

    Parameters
    ----------
    n_bits
        Length of the code; less than the number of anchors with one layer, less than twice and even with two.
    n_layers
        1: one bit of each graph function; 2: two bits of half as many, smoother functions.
    n_centres
        Number of anchors, the k-means centres.
    n_neighbours
        Nearest anchors that a row is a mixture of: more connect the graph better, 2 to a tenth of the anchors.
    random_state
        Seed of the sample and of k-means; the rest is not random.

    Attributes
    ----------
    anchors_, bandwidth_, weights_, thresholds_
        Anchors (m, d) float32, bandwidth h^2 (1,), W (m, q) and second-layer thresholds (2, q) float64; q is the
        number of graph functions.
    eigenvalues_, notes_
        Smoothness of the functions (q,), 1 for a constant; what was reduced and why.
    """

    method: ClassVar[str] = "agh"
    arrays: ClassVar[dict[str, ArraySpec]] = {
        "anchors": ArraySpec(("m", "d")),
        "bandwidth": ArraySpec(("one",), "float64"),
        "weights": ArraySpec(("m", "q"), "float64"),
        "thresholds": ArraySpec(("two", "q"), "float64"),
    }

    anchors_: np.ndarray
    bandwidth_: np.ndarray
    weights_: np.ndarray
    thresholds_: np.ndarray

    def __init__(
        self,
        n_bits: int = 64,
        *,
        n_layers: Literal[1, 2] = 1,
        n_centres: int = 300,
        n_neighbours: int = 5,
        random_state: Any = 0,
    ) -> None:
        self.n_bits = n_bits
        self.n_layers = n_layers
        self.n_centres = n_centres
        self.n_neighbours = n_neighbours
        self.random_state = random_state

    def centres_wanted(self) -> int:
        """How many k-means centres are learned from."""
        return int(self.n_centres)

    def check_parameters(self) -> None:
        super().check_parameters()
        if not is_integer(self.n_layers) or self.n_layers not in (1, 2):
            raise BadInputError(f"n_layers={self.n_layers!r}; use 1 or 2")
        if not is_integer(self.n_neighbours) or self.n_neighbours < 2:
            raise BadInputError(f"n_neighbours={self.n_neighbours!r}; use an integer of at least 2")
        if self.n_layers == 2 and self.n_bits % 2:
            raise BadInputError(f"n_bits={self.n_bits} with n_layers=2; use an even number")
        if not is_integer(self.n_centres) or self.n_centres <= self._n_functions():
            raise BadInputError(
                f"n_centres={self.n_centres!r} for {self._n_functions()} graph functions; use an integer above that"
            )

    def _n_functions(self) -> int:
        return int(self.n_bits) // int(self.n_layers)

    def _learn(self, data: TrainingData, progress: Progress | None) -> None:
        if data.centres is None or len(data.centres) == 0 or len(data.rows) == 0:
            raise BadInputError("anchors without centres or training rows; pass at least one of each")
        anchors, mixture, bandwidth = self._graph(data.rows, np.ascontiguousarray(data.centres, dtype=np.float32))
        q = self._n_functions()
        values, weights = graph_vectors(mixture, len(anchors), q)
        if len(values) < q:
            raise BadInputError(
                f"n_bits={self.n_bits} needs {q} functions of the anchor graph, which {len(anchors)} anchors of "
                f"n_samples={len(data.rows)} training rows with n_neighbours={self.n_neighbours} give {len(values)} of; "
                "use fewer bits, or increase n_neighbours or n_centres"
            )
        thresholds = np.zeros((2, q))
        if self.n_layers == 2:
            thresholds = divisions(mixture, len(anchors), anchor_scores(*mixture, weights))
            if flat := int((thresholds == 0).all(axis=0).sum()):
                self.notes_.append(f"{flat} graph functions have no second division: their second bit is constant")
        self.anchors_, self.bandwidth_ = anchors, np.array([bandwidth])
        self.weights_, self.thresholds_, self.eigenvalues_ = weights, thresholds, values

    def _graph(self, rows: np.ndarray, anchors: np.ndarray) -> tuple[np.ndarray, Mixture, float]:
        """Anchors in use, the rows (n, d) as their mixtures, and the bandwidth; ends as each round drops an anchor."""
        n_centres = len(anchors)
        while True:
            numbers, distances = nearest_anchors(rows, anchors, int(self.n_neighbours))
            width = float(np.sqrt(distances[:, -1]).mean()) ** 2
            # Rows that lie on their anchors, all of them: any width gives the same shares.
            width = width if width >= np.finfo(np.float64).tiny else 1.0
            mixture = Mixture(numbers, anchor_shares(distances, width))
            used = mixture.totals(len(anchors)) > _NOISE
            if used.all():
                break
            anchors = np.ascontiguousarray(anchors[used])
        if len(anchors) < n_centres:
            self.notes_.append(f"anchors reduced from {n_centres} to {len(anchors)}: no row is near the others")
        if len(anchors) < self.n_neighbours:
            self.notes_.append(f"n_neighbours reduced from {self.n_neighbours} to {len(anchors)}: no more anchors")
        return anchors, mixture, width

    def encode_block(self, block: np.ndarray, *, first_row: int = 0) -> np.ndarray:
        """Codes of one block (rows, d); ``first_row`` is its global row number, for error messages."""
        return encode_anchors(
            block,
            self.anchors_,
            float(self.bandwidth_[0]),
            self.weights_,
            self.thresholds_ if self.n_layers == 2 else None,
            n_neighbours=int(self.n_neighbours),
            first_row=first_row,
        )

    def info(self) -> dict[str, Any]:
        """Notes, and for a model trained here the eigenvalues of the graph."""
        report = super().info()
        if hasattr(self, "eigenvalues_"):
            report.update(n_anchors=len(self.anchors_), eigenvalues=self.eigenvalues_.tolist())
        return report

    @classmethod
    def from_state(cls, params: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Self:
        """The fitted hasher of ``to_state``; anything unexpected is an IntegrityError."""
        model = super().from_state(params, arrays)
        q = model._n_functions()
        found = model.bandwidth_.shape, model.thresholds_.shape
        if found != ((1,), (2, q)) or not model.bandwidth_[0] > 0:
            raise IntegrityError(
                f"{cls.method} model has bandwidth {model.bandwidth_} and thresholds {found[1]}; expected one number "
                f"above 0 and (2, {q}): train it again"
            )
        return model
