"""och-dist: short binary codes that keep neighbour order, learned and searched on Dask.

>>> from och_dist import OCH, open_index
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from och_dist.estimators import AGH as AGH
    from och_dist.estimators import ITQ as ITQ
    from och_dist.estimators import LSH as LSH
    from och_dist.estimators import OCH as OCH
    from och_dist.estimators import OEH as OEH
    from och_dist.estimators import SGH as SGH
    from och_dist.estimators import IsoHash as IsoHash
    from och_dist.estimators import OCHPaper as OCHPaper
    from och_dist.estimators import PCAFrame as PCAFrame
    from och_dist.estimators import SpH as SpH
    from och_dist.search import open_index as open_index
    from och_dist.store import open_corpus as open_corpus

__version__ = "0.1.0"

_ESTIMATORS = ("AGH", "ITQ", "LSH", "OCH", "OEH", "SGH", "IsoHash", "OCHPaper", "PCAFrame", "SpH")
_LOCATIONS = {
    **dict.fromkeys(_ESTIMATORS, "och_dist.estimators"),
    "open_corpus": "och_dist.store",
    "open_index": "och_dist.search",
}
__all__ = sorted(_LOCATIONS)


def __getattr__(name: str) -> Any:
    """Names are imported on first use, so that ``import och_dist`` needs no Dask, Numba or Zarr."""
    if name in _LOCATIONS:
        return getattr(import_module(_LOCATIONS[name]), name)
    raise AttributeError(f"module 'och_dist' has no attribute {name!r}")
