"""Dask arrays of rows: reduced chunk by chunk, wherever Dask collections compute, by any of its schedulers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from och_dist.cluster.outcome import catch, unique, unwrap, watched
from och_dist.cluster.tasks import merge_tree, split_pairs

if TYPE_CHECKING:
    import dask.array as da
    from dask.delayed import Delayed
    from distributed import Client

T = TypeVar("T")


@contextlib.contextmanager
def collections_on(client: Client | None) -> Iterator[None]:
    """Let Dask collections compute on the workers of ``client``; without one in this thread, a task at a time."""
    import dask

    if client is None:
        with dask.config.set(scheduler="synchronous"):
            yield
    else:
        with client.as_current(), dask.config.set(scheduler=client), watched(client):
            yield


def shared_value(value: Any, name: str) -> Delayed:
    """``value`` as one node of a graph that all tasks of a ``map_blocks`` may refer to; ``name`` is its key."""
    import dask

    return dask.delayed(value, name=name, traverse=False)


def reduce_rows(
    function: Callable[[np.ndarray, int, Any], T],
    array: da.Array,
    merge: Callable[[Sequence[T]], T],
    *,
    name: str,
    shared: Any = None,
) -> T:
    """``merge`` over ``function(block, first_row, shared)`` of every chunk of rows of ``array`` (n, d).

    The chunks are of whole rows and of known sizes; empty ones are left out. Reading a chunk and what is done with it
    are one task where Dask can make them one. The shape of the tree depends on the number of chunks alone.
    """
    (root,) = merge_tree(_leaves(function, array, name, shared), merge, unique(name))
    result: T = unwrap(root.compute())
    return result


def scan_rows(
    function: Callable[[np.ndarray, int, Any], tuple[T, Any]],
    array: da.Array,
    merge: Callable[[Sequence[T]], T],
    *,
    name: str,
    shared: Any = None,
) -> tuple[T, list[Delayed]]:
    """:func:`reduce_rows` over the first of the two values that ``function`` returns; the second ones stay where Dask
    keeps persisted results: on the workers, if there are any."""
    import dask

    token = unique(name)
    merging, keeping = split_pairs(_leaves(function, array, name, shared), token)
    root, *kept = dask.persist(*merge_tree(merging, merge, token), *keeping)
    return unwrap(root.compute()), kept


@dataclass(frozen=True)
class BlockTask:
    """What the tasks of one pass over an array share: the work, and where chunks start."""

    function: Callable[[np.ndarray, int, Any], Any]
    first_rows: np.ndarray
    shared: Any


def _leaves(function: Any, array: da.Array, name: str, shared: Any) -> list[Delayed]:
    sizes = array.chunks[0]
    task = BlockTask(function, first_rows(sizes), shared)
    found = array.map_blocks(
        run_block,
        task=shared_value(task, unique(f"{name}_shared")),
        token=unique(name),
        meta=np.empty((0, 0), np.float32),  # the results are no arrays, which only their consumer must know
    )
    leaves = zip(found.to_delayed().ravel(), sizes, strict=True)
    return [leaf for leaf, size in leaves if size]


def run_block(block: np.ndarray, task: BlockTask, block_id: tuple[int, ...]) -> Any:
    return catch(task.function, block, int(task.first_rows[block_id[0]]), task.shared)


def first_rows(sizes: Sequence[int]) -> np.ndarray:
    """(chunks,) int64, the global number of the first row of each chunk."""
    return np.cumsum([0, *sizes[:-1]], dtype=np.int64)


def stack_rows(blocks: Sequence[Any], sizes: Sequence[int], dim: int, dtype: Any) -> da.Array:
    """Blocks of ``sizes`` rows (arrays, futures or Delayed ones of arrays) as one Dask array (n, dim)."""
    import dask
    import dask.array as da

    parts = [
        da.from_delayed(dask.delayed(block), shape=(size, dim), dtype=dtype)
        for block, size in zip(blocks, sizes, strict=True)
    ]
    return da.concatenate(parts)
