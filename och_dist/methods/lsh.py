"""Locality-sensitive hashing by the signs of random projections, the baseline that learns nothing but the mean.

The name usually stands for the integer buckets of p-stable projections; comparisons of binary codes mean this
family instead, in which the share of differing bits estimates the angle between two rows (Charikar, 2002). Rows
are centred first: an angle about a far-away origin tells little.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from och_dist.methods.base import LinearHasher, TrainingData

__all__ = ["LocalitySensitiveHashing"]


class LocalitySensitiveHashing(LinearHasher):
    """Signs of random projections of the centred rows."""

    method: ClassVar[str] = "lsh"

    def _learn(self, data: TrainingData) -> Iterable[float]:
        if not np.diag(data.covariance).any():
            self.notes_.append("all rows are equal: all their codes are equal")
        directions = np.random.default_rng(self.seed_).normal(size=(len(data.mean), int(self.n_bits)))
        self._set_linear(data.mean, directions)
        return ()
