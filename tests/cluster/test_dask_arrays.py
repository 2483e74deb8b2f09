"""Reductions of Dask arrays by any scheduler, against the plain loop over chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest

from och_dist.cluster import collections_on, first_rows, reduce_rows, scan_rows, stack_rows
from och_dist.errors import BadInputError

ROWS = np.arange(600, dtype=np.float32).reshape(200, 3)
CHUNKS = {"single": (200,), "even": (50,) * 4, "many": (10,) * 20, "with empty ones": (0, 7, 0, 193, 0)}


def described(block: np.ndarray, first_row: int, shared: float) -> str:
    return f"<{first_row} {len(block)} {block.sum() * shared:.0f}>"


def bracket(parts: Sequence[str]) -> str:
    return f"[{''.join(parts)}]"


def split(block: np.ndarray, first_row: int, shared: float) -> tuple[str, np.ndarray]:
    return described(block, first_row, shared), block[::2]


def refuse(block: np.ndarray, first_row: int, shared: Any) -> str:
    raise BadInputError(f"row {first_row} is bad")


def expected(chunks: tuple[int, ...]) -> str:
    """The same tree, eight at a time, the slow way."""
    level = [
        described(ROWS[start : start + size], start, 2.0)
        for start, size in zip(first_rows(chunks), chunks, strict=True)
        if size
    ]
    while True:
        level = [bracket(level[i : i + 8]) for i in range(0, len(level), 8)]
        if len(level) == 1:
            return level[0]


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("where", ["threads", "here", "workers"])
def test_the_tree_depends_on_the_chunks_alone(chunks: tuple[int, ...], where: str, client: Any) -> None:
    array = da.from_array(ROWS, chunks=(chunks, 3))
    with (
        dask.config.set(scheduler="threads")
        if where == "threads"
        else collections_on(client if where == "workers" else None)
    ):
        assert reduce_rows(described, array, bracket, name="described", shared=2.0) == expected(chunks)
        found, kept = scan_rows(split, array, bracket, name="split", shared=2.0)
        assert found == expected(chunks)
        sizes = [-(-size // 2) for size in chunks if size]
        stacked = stack_rows(kept, sizes, 3, ROWS.dtype).compute()
    even = [ROWS[start : start + size : 2] for start, size in zip(first_rows(chunks), chunks, strict=True) if size]
    np.testing.assert_array_equal(stacked, np.concatenate(even))


def test_an_error_of_ours_arrives_as_it_was(client: Any) -> None:
    array = da.from_array(ROWS, chunks=(50, 3))
    for where in (None, client):
        with collections_on(where), pytest.raises(BadInputError, match="row 0 is bad"):
            reduce_rows(refuse, array, bracket, name="refuse")
