"""Indexes with deleted rows: how to make them small, and what they hold row by row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from och_dist.encode.stage import encode
from och_dist.store import index as index_store
from och_dist.store.index import Index, open_version
from tests.support.stage_data import corpus_of


@contextmanager
def small_ranges(rows: int = 64) -> Iterator[None]:
    """Bitmaps of so few rows that a small index has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_store, "RANGE_ROWS", rows)
        index_store.remembered_bitmap.cache_clear()
        yield
    index_store.remembered_bitmap.cache_clear()


def grow(folder: Path, rows: np.ndarray, cuts: list[int], model: str, *, chunk_rows: int) -> str:
    """An index in ``folder`` that gets a segment for each part of ``rows``, cut at these places; returns its corpus."""
    for part in np.split(rows, cuts):
        corpus = corpus_of(folder, part)
        encode(corpus, str(folder / "index"), model=model, chunk_rows=chunk_rows)
    return corpus


def corpus_beside(index: str) -> str:
    return str(Path(index).parent / "corpus")


def live_codes(index: str | Index, version: int | None = None) -> dict[int, bytes]:
    """Row -> code of everything that is not deleted, read chunk by chunk as a search does."""
    opened = open_version(index, version) if isinstance(index, str) else index
    found: dict[int, bytes] = {}
    for chunk in opened.chunks:
        codes, rows, live = opened.read(chunk), opened.row_numbers(chunk), opened.live(chunk)
        rows = np.arange(chunk.start, chunk.stop) if rows is None else rows
        assert len(codes) == len(rows)
        assert live is None or (len(live) == len(codes) and not live.all())
        for place in range(len(codes)) if live is None else np.flatnonzero(live):
            assert chunk.start <= rows[place] < chunk.stop
            found[int(rows[place])] = codes[place].tobytes()
    assert list(found) == sorted(found)
    assert len(found) == opened.live_rows
    return found


def without(codes: np.ndarray, deleted: set[int]) -> dict[int, bytes]:
    """The same from all codes, by the dumbest means."""
    return {row: code.tobytes() for row, code in enumerate(codes) if row not in deleted}
