"""Where rows to learn from lie: a NumPy array, a Dask array or a corpus. All three run the same passes over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from och_dist.cluster import collections_on, first_rows, reduce_rows, reduce_tasks, scan_rows, scan_tasks, stack_rows
from och_dist.errors import BadInputError
from och_dist.stage import Context
from och_dist.store import MAX_PARTITIONS, Corpus, CorpusRef

if TYPE_CHECKING:
    import dask.array as da

T = TypeVar("T")
Merge = Callable[[Sequence[T]], T]

PART_BYTES = 256 << 20
BLOCK_ROWS = 8192
"""Rows of a sample that are one chunk: k-means of a sample adds the sums of these blocks, wherever it runs."""


class RowSource(Protocol):
    """Rows (rows, dim). A pass is a function of (block (n, dim), its first row, what all blocks share)."""

    @property
    def where(self) -> str: ...

    @property
    def remedy(self) -> str:
        """What to do about rows that are not finite."""

    @property
    def rows(self) -> int: ...

    @property
    def dim(self) -> int: ...

    def head(self, count: int) -> np.ndarray:
        """The first rows: ``count`` of them, or fewer."""

    def reduce(self, function: Callable[..., T], merge: Merge[T], *, shared: Any, name: str) -> T:
        """``merge`` of what ``function`` makes of all rows."""

    def scan(
        self, function: Callable[..., tuple[T, np.ndarray]], merge: Merge[T], sample: np.ndarray, *, shared: Any
    ) -> tuple[T, np.ndarray | da.Array]:
        """:meth:`reduce`, with the rows numbered ``sample`` (s,), ascending, which ``function`` gives beside it."""

    def stored(self) -> np.ndarray | da.Array:
        """All rows in their own dtype; a Dask array is read anew in each round."""

    def dask(self) -> AbstractContextManager[None]:
        """Where Dask collections of these rows are computed."""


@dataclass(frozen=True)
class ArrayRows:
    """The rows of a NumPy array, all one block."""

    array: Any
    where = "X"
    remedy = "leave them out or replace their values"

    @property
    def rows(self) -> int:
        return int(self.array.shape[0])

    @property
    def dim(self) -> int:
        return int(self.array.shape[1])

    def head(self, count: int) -> np.ndarray:
        return np.asarray(self.array[:count])

    def reduce(self, function: Callable[..., T], merge: Merge[T], *, shared: Any, name: str) -> T:
        return function(self.array, 0, shared)

    def scan(
        self, function: Callable[..., tuple[T, np.ndarray]], merge: Merge[T], sample: np.ndarray, *, shared: Any
    ) -> tuple[T, np.ndarray | da.Array]:
        return function(self.array, 0, shared)

    def stored(self) -> np.ndarray | da.Array:
        return self.array

    def dask(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class DaskRows(ArrayRows):
    """The rows of a Dask array, in chunks of whole rows of known sizes, read where its own scheduler runs."""

    def __post_init__(self) -> None:
        if 0 in self.array.shape:
            raise BadInputError(f"X has shape {self.array.shape}; expected at least one row and one feature")

    def reduce(self, function: Callable[..., T], merge: Merge[T], *, shared: Any, name: str) -> T:
        return reduce_rows(function, self.array, merge, name=name, shared=shared)

    def scan(
        self, function: Callable[..., tuple[T, np.ndarray]], merge: Merge[T], sample: np.ndarray, *, shared: Any
    ) -> tuple[T, da.Array]:
        found, kept = scan_rows(function, self.array, merge, name="scan_chunk", shared=shared)
        sizes = self.array.chunks[0]
        chosen = np.diff(np.searchsorted(sample, [*first_rows(sizes), self.rows]))
        blocks = zip(kept, chosen[np.flatnonzero(sizes)], strict=True)
        return found, _in_even_blocks([(block, int(size)) for block, size in blocks if size], self.dim)


@dataclass(frozen=True)
class CorpusRows:
    """The rows of a corpus, a task for each partition and a chunk at a time, on the workers if there are any."""

    corpus: Corpus
    context: Context
    remedy = "ingest the data with --nonfinite=drop to leave them out"

    @property
    def where(self) -> str:
        return self.corpus.url

    @property
    def rows(self) -> int:
        return self.corpus.rows

    @property
    def dim(self) -> int:
        return self.corpus.dim

    def head(self, count: int) -> np.ndarray:
        return self.corpus.read(0, min(count, self.rows))

    def reduce(self, function: Callable[..., T], merge: Merge[T], *, shared: Any, name: str) -> T:
        tasks = [PassTask(self.corpus.ref, *rows, function, merge) for rows in self.corpus.partitions()]
        return reduce_tasks(
            reduce_partition,
            tasks,
            merge,
            client=self.context.client,
            name="cluster_partition",
            shared=shared,
            advance=self.context.progress(name, self.rows),
            weight=lambda task: task.stop - task.start,
        )

    def scan(
        self, function: Callable[..., tuple[T, np.ndarray]], merge: Merge[T], sample: np.ndarray, *, shared: Any
    ) -> tuple[T, da.Array]:
        partitions = self.corpus.partitions()
        found, kept = scan_tasks(
            scan_partition,
            [PassTask(self.corpus.ref, *rows, function, merge) for rows in partitions],
            merge,
            client=self.context.client,
            name="scan_partition",
            shared=shared,
            advance=self.context.progress("statistics", self.rows),
            weight=lambda task: task.stop - task.start,
        )
        sizes = np.diff(np.searchsorted(sample, [*(start for start, _ in partitions), self.rows]))
        blocks = zip(kept, sizes, strict=True)
        return found, _in_even_blocks([(block, int(size)) for block, size in blocks if size], self.dim)

    def stored(self) -> da.Array:
        import dask.array as da

        # A part is held whole, unlike the partitions of other passes: its size may not grow with the corpus.
        maximum = max(MAX_PARTITIONS, self.corpus.nbytes // PART_BYTES)
        sizes = tuple(stop - start for start, stop in self.corpus.partitions(maximum))
        # Blocks by number: Dask makes one task of reading a part and of what is done with it.
        return da.map_blocks(
            read_part,
            corpus=self.corpus.ref,
            maximum=maximum,
            chunks=(sizes, (self.dim,)),
            dtype=self.corpus.dtype,
            meta=np.empty((0, 0), self.corpus.dtype),
        )

    def dask(self) -> AbstractContextManager[None]:
        return collections_on(self.context.client)


def _in_even_blocks(blocks: Sequence[tuple[Any, int]], dim: int) -> da.Array:
    """Blocks of float32 rows and their sizes, as one Dask array that stays where Dask keeps results."""
    array = stack_rows([block for block, _ in blocks], [size for _, size in blocks], dim)
    return array.rechunk((BLOCK_ROWS, dim)).persist()


@dataclass(frozen=True)
class PassTask:
    """What a pass makes of rows [start, stop) of a corpus version."""

    corpus: CorpusRef
    start: int
    stop: int
    function: Callable[..., Any]
    merge: Merge[Any]


def reduce_partition(task: PassTask, shared: Any) -> Any:
    """The merged value of a partition; values of few chunks are held, for one may be large."""
    total: Any = None
    for first, block in task.corpus.open().blocks(task.start, task.stop):
        part = task.function(block, first, shared)
        total = part if total is None else task.merge([total, part])
    return total


def scan_partition(task: PassTask, shared: Any) -> tuple[Any, np.ndarray]:
    """The merged value of a partition, and its rows of the sample."""
    total, kept = None, []
    for first, block in task.corpus.open().blocks(task.start, task.stop):
        part, rows = task.function(block, first, shared)
        kept.append(rows)
        total = part if total is None else task.merge([total, part])
    return total, np.concatenate(kept)


def read_part(corpus: CorpusRef, maximum: int, block_id: tuple[int, ...]) -> np.ndarray:
    """One of at most ``maximum`` parts of a corpus, by its number, as (rows, dim) in the dtype of the corpus."""
    opened = corpus.open()
    start, stop = opened.partitions(maximum)[block_id[0]]
    rows = np.empty((stop - start, opened.dim), opened.dtype)
    for first, block in opened.blocks(start, stop):
        rows[first - start : first - start + len(block)] = block
    return rows
