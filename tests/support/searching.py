"""Searchers that do little at a time, so that small indexes go through everything that large ones do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from och_dist.search.placement import Capacity
from och_dist.search.searcher import Searcher
from och_dist.store import open_version


def open_within(path: str, *, client: Any = None, threads: int | None = None, **options: Any) -> Searcher:
    """As ``open_index``; options that are limits of :class:`Capacity` replace its own."""
    limits = {name: options.pop(name) for name in Capacity.__dataclass_fields__ if name in options}
    return Searcher(open_version(path), replace(Capacity.of(client, threads), **limits), **options)
