"""A random tight frame on the leading principal axes: OCH before its first step.

With more bits than axes every axis is seen from many directions, which alone beats several learned methods.
What OCH gains over this control is what its training is worth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from och_dist.kernels.stiefel import polar
from och_dist.methods.base import RotatedAxes, TrainingData, parameter, principal_axes

__all__ = ["RandomFrame", "Start", "default_components"]

_COMPONENTS = ((32, 20), (64, 24), (128, 32), (256, 40), (512, 48))
_MOST_COMPONENTS = 64


def default_components(n_bits: int) -> int:
    """Principal axes that suit a code length: too many fit noise, too few lose order."""
    return next((p for bits, p in _COMPONENTS if n_bits <= bits), _MOST_COMPONENTS)


class Start(NamedTuple):
    """A random frame (p, r), the variances (q,) and axes (d, q) of the rows, q >= p, and the rms of a projection on
    the frame: in its units a gain and a step mean the same for any data."""

    frame: np.ndarray
    variances: np.ndarray
    axes: np.ndarray
    scale: float


@dataclass(eq=False, kw_only=True)
class RandomFrame(RotatedAxes):
    """Signs of a random tight frame on the leading principal axes, the model of ``OCH(max_iter=0)``.

    Attributes
    ----------
    n_components_
        Principal axes used.
    """

    method: ClassVar[str] = "pca-frame"
    reported: ClassVar[tuple[str, ...]] = ("n_components", "manifold_residual")

    n_components: int | None = parameter(
        None, "Principal axes kept; None: by the code length, 20 (up to 32 bits) to 64 (1,024 bits).", at_least=1
    )

    def _learn(self, data: TrainingData) -> Iterable[float]:
        start = self._start(data, np.random.default_rng(self.seed_))
        self.n_components_ = len(start.frame)
        self._differ(start.scale)
        self._set_rotated(data.mean, start.axes[:, : self.n_components_], start.frame)
        return ()

    def _start(self, data: TrainingData, rng: np.random.Generator) -> Start:
        data.require_rows()
        r, wanted = int(self.n_bits), int(self.n_components or default_components(self.n_bits))
        variances, axes = principal_axes(data, max(wanted, _MOST_COMPONENTS))
        p = self._reduce("n_components", wanted, len(variances), "the rows vary along no more axes")
        frame = polar(rng.normal(size=(p, r)))
        return Start(frame, variances, axes, math.sqrt(variances[:p].sum() / max(p, r)))
