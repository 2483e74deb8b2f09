"""The methods by name. A module is imported when its method is first asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from och_dist.errors import UsageError
from och_dist.methods.base import Hasher

__all__ = ["METHODS", "get_method", "model_from_state"]

_LOCATIONS = {
    "och": ("och", "OCH"),
    "lsh": ("lsh", "LSH"),
    "pca-frame": ("pca_frame", "PCAFrame"),
    "itq": ("itq", "ITQ"),
    "isohash": ("isohash", "IsoHash"),
    "agh": ("agh", "AGH"),
    "oeh": ("oeh", "OEH"),
    "och-paper": ("och_paper", "OCHPaper"),
    "sph": ("sph", "SpH"),
    "sgh": ("sgh", "SGH"),
}


class _Methods(Mapping[str, type[Hasher]]):
    """Name -> class, filled as classes are asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, type[Hasher]] = {}

    def __getitem__(self, name: str) -> type[Hasher]:
        if name not in self._loaded:
            module, cls = _LOCATIONS[name]
            self._loaded[name] = getattr(import_module(f"och_dist.methods.{module}"), cls)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_LOCATIONS)

    def __len__(self) -> int:
        return len(_LOCATIONS)


METHODS: Mapping[str, type[Hasher]] = _Methods()


def get_method(name: str) -> type[Hasher]:
    """The class of a method, by its lower-case name."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}; use one of {', '.join(METHODS)}")
    return METHODS[name]


def model_from_state(method: str, params: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Hasher:
    """A fitted hasher from what its ``to_state`` gave."""
    return get_method(method).from_state(params, arrays)
