"""OCH by the letter of the paper, for comparison: what :mod:`och_dist.methods.och` was before its changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from och_dist.methods.base import TrainingData, parameter
from och_dist.methods.och import Draw, OrdinalDescent

__all__ = ["PrintedOrdinalConstraintHashing"]


@dataclass(eq=False, kw_only=True)
class PrintedOrdinalConstraintHashing(OrdinalDescent):
    """Ordinal Constraint Hashing as printed: relations among the k-means centres alone.

    The centres are landmarks and anchors alike, hyperplanes pass through the mean (no offsets), the gain inside tanh is
    1 from the first step to the last, and no relation crosses anchors. The paper's vectors are normalised, it does not
    say how: here the rms projection is 1. The loss falls while codes of 128 bits get worse than those of 64: a few
    hundred centres are too few to learn from. The optimiser is that of OCH."""

    method: ClassVar[str] = "och-paper"

    n_components: int = parameter(16, "Principal axes kept, the paper's d_svd.", at_least=1)
    n_near: int = parameter(
        10, "Landmarks of an anchor that count as near, the k of its k (L - k) relations.", at_least=1
    )
    max_iter: int = parameter(400, "Steps of the optimiser; 0 gives a random tight frame.", at_least=0)

    def _draw(self, data: TrainingData) -> Draw:
        numbers = len(data.rows) + np.arange(len(data.required_centres()))
        n_anchors = self._reduce("n_anchors", int(self.n_anchors), len(numbers), "no more centres")
        return lambda rng: (rng.choice(numbers, n_anchors, replace=False), numbers)

    def _near_count(self, n_landmarks: int) -> int:
        return min(int(self.n_near), n_landmarks - 2)
