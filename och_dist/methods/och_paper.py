"""OCH by the letter of the paper, for comparison: what :mod:`och_dist.methods.och` was before its changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from och_dist.errors import BadInputError
from och_dist.methods.base import TrainingData
from och_dist.methods.och import OrdinalConstraintHashing

__all__ = ["PrintedOrdinalConstraintHashing"]


class PrintedOrdinalConstraintHashing(OrdinalConstraintHashing):
    """Ordinal Constraint Hashing as printed: relations among the k-means centres alone.

    The centres are landmarks and anchors alike, hyperplanes pass through the mean (no offsets), the gain inside tanh is
    1 from the first step to the last, and no relation crosses anchors. The paper's vectors are normalised, it does not
    say how: here the rms projection is 1. The loss falls while codes of 128 bits get worse than those of 64: a few
    hundred centres are too few to learn from. The optimiser is that of OCH.

    Parameters
    ----------
    n_bits
        Length of the code.
    n_centres
        Number of k-means centres.
    n_components
        Principal axes kept, the paper's d_svd.
    n_near
        Landmarks of an anchor that count as near, the k of its k (L - k) relations.
    n_anchors
        Centres drawn at each step whose order of the other centres is learned.
    learning_rate, momentum, max_iter
        Steps of the optimiser, the rate falling linearly to zero; ``max_iter=0`` gives a random tight frame.
    random_state
        Seed of all draws.

    Attributes
    ----------
    mean_, projection_, offsets_, components_, rotation_
        As in OCH; the offsets are zero.
    n_components_, n_iter_, loss_curve_, manifold_residual_, notes_
        As in OCH.
    """

    method: ClassVar[str] = "och-paper"
    added: ClassVar[dict[str, Any]] = {}

    # What the paper leaves no choice of: no parameters here.
    orthogonal = True
    landmarks = "centres"
    n_members = 1
    member_shares = "equal"
    n_landmarks = 1
    near_fraction = 0.5
    cross_weight = 0.0
    offsets = False
    gain = (1.0, 1.0)

    def __init__(
        self,
        n_bits: int = 64,
        *,
        n_centres: int = 300,
        n_components: int = 16,
        n_near: int = 10,
        n_anchors: int = 80,
        learning_rate: float = 0.08,
        momentum: float = 0.9,
        max_iter: int = 400,
        random_state: Any = 0,
    ) -> None:
        self.n_bits = n_bits
        self.n_centres = n_centres
        self.n_components = n_components
        self.n_near = n_near
        self.n_anchors = n_anchors
        self.learning_rate = learning_rate
        self.momentum = momentum
        self.max_iter = max_iter
        self.random_state = random_state

    def check_parameters(self) -> None:
        super().check_parameters()
        self._check_integers(n_components=1, n_near=1)

    def _sampler(self, data: TrainingData) -> Any:
        if data.centres is None or len(data.centres) == 0:
            raise BadInputError("no centres to learn from; pass at least one")
        n_rows, n_centres = len(data.rows), len(data.centres)
        if self.n_anchors > n_centres:
            self.notes_.append(f"n_anchors reduced from {self.n_anchors} to {n_centres}: no more centres")
        return _Centres(n_rows + np.arange(n_centres), min(int(self.n_anchors), n_centres))

    def _near_count(self, n_landmarks: int) -> int:
        return min(int(self.n_near), n_landmarks - 2)


@dataclass(frozen=True)
class _Centres:
    """Draws anchors among the centres, given by their ``numbers`` (L,) in the pool; all are landmarks."""

    numbers: np.ndarray
    n_anchors: int

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Distinct anchors (m,) and the landmarks (L,)."""
        return rng.choice(self.numbers, self.n_anchors, replace=False), self.numbers
