"""A random tight frame on the leading principal axes: OCH before its first step.

With more bits than axes every axis is seen from many directions, which alone beats several learned methods.
What OCH gains over this control is what its training is worth.
"""

from __future__ import annotations

from typing import Any, ClassVar

from och_dist.methods.base import LinearHasher, Progress, TrainingData
from och_dist.methods.och import OrdinalConstraintHashing

__all__ = ["RandomFrame"]


class RandomFrame(LinearHasher):
    """Signs of a random tight frame on the leading principal axes, the model of ``OCH(max_iter=0)``.

    Parameters
    ----------
    n_bits
        Length of the code, of any size.
    n_components
        Principal axes kept; None chooses by the code length, 20 (up to 32 bits) to 64 (1,024 bits).
    random_state
        Seed of the frame.

    Attributes
    ----------
    mean_, projection_, offsets_
        The linear map, float32: (d,), (d, n_bits), (n_bits,) zeros.
    components_, rotation_
        Principal axes (p, d) and the frame (p, n_bits), float64; ``projection_`` is their product.
    n_components_, manifold_residual_, notes_
        Axes used, distance of the frame from a tight one, what was reduced and why.
    """

    method: ClassVar[str] = "pca-frame"
    reported: ClassVar[tuple[str, ...]] = ("n_components", "manifold_residual")

    def __init__(self, n_bits: int = 64, *, n_components: int | None = None, random_state: Any = 0) -> None:
        self.n_bits = n_bits
        self.n_components = n_components
        self.random_state = random_state

    def check_parameters(self) -> None:
        self._untrained(0).check_parameters()

    def _untrained(self, seed: int) -> OrdinalConstraintHashing:
        return OrdinalConstraintHashing(self.n_bits, n_components=self.n_components, max_iter=0, random_state=seed)

    def _learn(self, data: TrainingData, progress: Progress | None) -> None:
        frame = self._untrained(self.seed_).fit_training(data)
        self.notes_ = frame.notes_
        self.components_, self.rotation_ = frame.components_, frame.rotation_
        self.n_components_, self.manifold_residual_ = frame.n_components_, frame.manifold_residual_
        self.mean_, self.projection_, self.offsets_ = frame.mean_, frame.projection_, frame.offsets_
