"""One file per hashing method, or for those that share what they are; a method is loaded when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from och_dist.errors import UsageError

if TYPE_CHECKING:
    from och_dist.methods.base import Hasher

METHODS = {
    "och": ("och", "OrdinalConstraintHashing"),
    "lsh": ("linear", "LocalitySensitiveHashing"),
    "pca-frame": ("linear", "RandomFrame"),
    "itq": ("itq", "IterativeQuantization"),
    "isohash": ("isohash", "IsotropicHashing"),
    "agh": ("agh", "AnchorGraphHashing"),
    "oeh": ("oeh", "OrdinalEmbeddingHashing"),
    "och-paper": ("och", "PrintedOrdinalConstraintHashing"),
    "sph": ("sph", "SphericalHashing"),
    "sgh": ("sgh", "ScalableGraphHashing"),
}
"""Name -> module and class."""


def get_method(name: str) -> type[Hasher]:
    """The class of a method, by its lower-case name."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}; use one of {', '.join(METHODS)}")
    module, hashing = METHODS[name]
    found: type[Hasher] = getattr(import_module(f"och_dist.methods.{module}"), hashing)
    return found
