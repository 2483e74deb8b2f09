"""The methods by name. A module is imported when its method is first asked for."""

from __future__ import annotations

from importlib import import_module

from och_dist.errors import UsageError
from och_dist.methods.base import Hasher

__all__ = ["METHODS", "get_method"]

METHODS = {
    "och": "OrdinalConstraintHashing",
    "lsh": "LocalitySensitiveHashing",
    "pca-frame": "RandomFrame",
    "itq": "IterativeQuantization",
    "isohash": "IsotropicHashing",
    "agh": "AnchorGraphHashing",
    "oeh": "OrdinalEmbeddingHashing",
    "och-paper": "PrintedOrdinalConstraintHashing",
    "sph": "SphericalHashing",
    "sgh": "ScalableGraphHashing",
}
"""Name -> class in the module of that name, with underscores."""


def get_method(name: str) -> type[Hasher]:
    """The class of a method, by its lower-case name."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}; use one of {', '.join(METHODS)}")
    found: type[Hasher] = getattr(import_module(f"och_dist.methods.{name.replace('-', '_')}"), METHODS[name])
    return found
