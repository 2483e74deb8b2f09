"""Anchor Graph Hashing: the smoothest functions on a graph that joins rows through a few hundred anchors.

A row is a mixture of its nearest anchors (row of Z). The graph Z diag(Z^T 1)^-1 Z^T between rows is never built: its
eigenvectors are Z W, with W from an eigenproblem of the size of the anchors. One layer thresholds r of them at zero;
two layers take r / 2 and divide each side once more, where that costs the graph least.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from scipy.linalg import eigh
from scipy.sparse import csr_array

from och_dist.errors import BadInputError
from och_dist.kernels.anchors import anchor_scores, anchor_shares, encode_anchors, nearest_anchors
from och_dist.methods.base import Hasher, LearnedArray, TrainingData, parameter, with_fixed_signs

_CONNECTED = 1e-3
"""Eigenvalues this close to 1 tell which part of a disconnected graph a row is in, and nothing within it."""

_NOISE = 1e-10
"""Smaller eigenvalues, and anchors with a smaller total share, are rounding errors."""


def graph_vectors(mixtures: csr_array, n_vectors: int) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues (q,), descending, and W (m, q) such that Y = Z W has Y^T Y = n I and column means 0.

    ``mixtures`` is Z (n, m), rows summing to 1, without an empty column. q is ``n_vectors`` or as many as the graph
    has. The largest entry of each column of W is positive.
    """
    roots = 1.0 / np.sqrt(mixtures.sum(axis=0))
    values, vectors = eigh(roots[:, None] * (mixtures.T @ mixtures).toarray() * roots)
    usable = np.flatnonzero((values > _NOISE) & (values < 1.0 - _CONNECTED))[::-1][:n_vectors]
    values, vectors = values[usable], vectors[:, usable]
    return values, with_fixed_signs(np.sqrt(mixtures.shape[0] / values) * roots[:, None] * vectors)


def divisions(mixtures: csr_array, scores: np.ndarray) -> np.ndarray:
    """Thresholds (2, q) of the second layer from ``mixtures`` Z (n, m) and ``scores`` Y (n, q).

    The folded function, y - b0 where y > 0 and b1 - y elsewhere, has mean zero and the least energy on the graph.
    Where no fold changes the energy (the two sides share no anchor) both thresholds are 0.
    """
    positive = scores > 0
    n, n_above = len(scores), positive.sum(axis=0)
    sums = np.where(positive, scores, 0.0).sum(axis=0)
    totals = mixtures.sum(axis=0)[:, None]
    above, magnitudes = mixtures.T @ positive.astype(np.float64), mixtures.T @ np.abs(scores)
    slope = sums - (above * magnitudes / totals).sum(axis=0)
    curvature = n_above - (above * above / totals).sum(axis=0)
    flat = curvature <= _NOISE * n
    fold = slope / np.where(flat, 1.0, curvature)
    cuts = np.stack([2 * sums + (n - n_above) * fold, n_above * fold - 2 * sums]) / n
    cuts[:, flat] = 0.0
    return cuts


@dataclass(eq=False, kw_only=True)
class AnchorGraphHashing(Hasher):
    """Anchor Graph Hashing (Liu, Wang, Kumar and Chang 2011), with one or two layers.

    There are fewer bits than anchors with one layer, less than twice as many and an even number with two.

    Attributes
    ----------
    anchors_, bandwidth_, weights_, thresholds_
        Anchors (m, d) float32, bandwidth h^2 (1,), W (m, q) and second-layer thresholds (2, q) float64; q is the
        number of graph functions.
    eigenvalues_
        Smoothness of the functions (q,), 1 for a constant.
    """

    method: ClassVar[str] = "agh"
    reported: ClassVar[tuple[str, ...]] = ("n_anchors", "eigenvalues")
    arrays: ClassVar[dict[str, LearnedArray]] = {
        "anchors": LearnedArray(("m", "d")),
        "bandwidth": LearnedArray(("one",), "float64", positive=True),
        "weights": LearnedArray(("m", "q"), "float64"),
        "thresholds": LearnedArray(("two", "q"), "float64"),
    }

    n_layers: Literal[1, 2] = parameter(
        1, "1: one bit of each graph function; 2: two bits of half as many, smoother functions."
    )
    n_centres: int = parameter(300, "Number of anchors, the k-means centres.", at_least=1)
    n_neighbours: int = parameter(
        5,
        "Nearest anchors that a row is a mixture of: more connect the graph better, 2 to a tenth of the anchors.",
        at_least=2,
    )

    def centres_wanted(self) -> int:
        return int(self.n_centres)

    def check_parameters(self) -> None:
        super().check_parameters()
        if self.n_layers == 2 and self.n_bits % 2:
            raise BadInputError(f"n_bits={self.n_bits} with n_layers=2; use an even number")
        if self.n_centres <= self._n_functions():
            raise BadInputError(
                f"n_centres={self.n_centres} for n_bits={self.n_bits} with n_layers={self.n_layers}; "
                f"use an integer above {self._n_functions()}, or fewer bits"
            )

    def _n_functions(self) -> int:
        return int(self.n_bits) // int(self.n_layers)

    def _sizes(self) -> dict[str, int]:
        return {**super()._sizes(), "q": self._n_functions()}

    def _learn(self, data: TrainingData) -> Iterable[float]:
        data.require_rows()
        centres = np.ascontiguousarray(data.required_centres(), dtype=np.float32)
        anchors, bandwidth, numbers, shares = self._mixtures(data.rows, centres)
        n, m, q = len(numbers), len(anchors), self._n_functions()
        starts = np.arange(n + 1) * numbers.shape[1]
        mixtures = csr_array((shares.ravel(), numbers.ravel(), starts), shape=(n, m))
        values, weights = graph_vectors(mixtures, q)
        if len(values) < q:
            raise BadInputError(
                f"n_bits={self.n_bits} needs {q} functions of the anchor graph, but {m} anchors and n_samples={n} "
                f"training rows with n_neighbours={self.n_neighbours} have {len(values)}; "
                "use fewer bits, or increase n_neighbours or n_centres"
            )
        thresholds = np.zeros((2, q))
        if self.n_layers == 2:
            thresholds = divisions(mixtures, anchor_scores(numbers, shares, weights))
            if flat := int((thresholds == 0).all(axis=0).sum()):
                self.notes_.append(f"{flat} graph functions have no second division: their second bit is constant")
        self.n_anchors_ = len(anchors)
        self.anchors_, self.bandwidth_ = anchors, np.array([bandwidth])
        self.weights_, self.thresholds_, self.eigenvalues_ = weights, thresholds, values
        return ()

    def _mixtures(self, rows: np.ndarray, anchors: np.ndarray) -> tuple[np.ndarray, float, np.ndarray, np.ndarray]:
        """Anchors in use (m, d), bandwidth, and of the ``rows`` (n, d) anchor numbers and shares (n, s).

        An anchor that no row is near would have no value; dropping it may change the neighbours of rows, so that all
        is done again. It ends because each round has fewer anchors, and the nearest of a row always stay.
        """
        n_centres = len(anchors)
        while True:
            numbers, distances = nearest_anchors(rows, anchors, int(self.n_neighbours))
            width = float(np.sqrt(distances[:, -1]).mean()) ** 2
            # All rows lie on all their anchors: any width gives the same shares.
            width = width if width > 0 else 1.0
            shares = anchor_shares(distances, width)
            used = np.bincount(numbers.ravel(), shares.ravel(), len(anchors)) > _NOISE
            if used.all():
                break
            anchors = np.ascontiguousarray(anchors[used])
        self._reduce("anchors", n_centres, len(anchors), "no row is near the others")
        self._reduce("n_neighbours", int(self.n_neighbours), len(anchors), "no more anchors")
        return anchors, width, numbers, shares

    def encode_block(self, block: np.ndarray, *, first_row: int = 0) -> np.ndarray:
        return encode_anchors(
            block,
            self.anchors_,
            float(self.bandwidth_[0]),
            self.weights_,
            self.thresholds_ if self.n_layers == 2 else None,
            n_neighbours=int(self.n_neighbours),
            first_row=first_row,
        )

    def query_scores(self, vectors: np.ndarray) -> np.ndarray:
        """(q, n_bits) float64: the graph functions, and with two layers how far each is inside its division."""
        numbers, distances = nearest_anchors(vectors, self.anchors_, int(self.n_neighbours))
        scores = anchor_scores(numbers, anchor_shares(distances, float(self.bandwidth_[0])), self.weights_)
        if self.n_layers == 1:
            return scores
        above, below = self.thresholds_
        return np.concatenate([scores, np.where(scores > 0, scores - above, below - scores)], axis=1)
