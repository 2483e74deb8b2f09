"""Where rows to learn from lie: a NumPy array, a Dask array or a corpus. Each gives a sample of them in one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from och_dist.cluster import collections_on, first_rows, merge_here, reduce_rows, scan_rows, scan_tasks, stack_rows
from och_dist.errors import LISTED_ROWS, BadInputError, NonFiniteError
from och_dist.kernels.moments import nonfinite_rows
from och_dist.stage import Context
from och_dist.store import MAX_PARTITIONS, Corpus, CorpusRef

if TYPE_CHECKING:
    import dask.array as da

T = TypeVar("T")
Rows: TypeAlias = "np.ndarray | da.Array"

PART_BYTES = 256 << 20
BLOCK_ROWS = 8192
"""Rows of a sample that are summed at once, wherever they are."""

MEND_ARRAY = "leave them out or replace their values"


@dataclass(frozen=True)
class RowFaults:
    """What is wrong with some rows: numbers of the first that are not finite, how many are not, and whether float32
    can hold those that were taken."""

    rows: tuple[int, ...]
    total: int
    in_range: bool

    def merge(self, other: RowFaults) -> RowFaults:
        rows = tuple(sorted(self.rows + other.rows)[:LISTED_ROWS])
        return RowFaults(rows, self.total + other.total, self.in_range and other.in_range)

    def check(self, where: str, remedy: str) -> None:
        """Raise if anything is wrong, with the numbers of the rows."""
        if self.total:
            raise NonFiniteError.of(f"rows of {where}", self.rows, self.total, remedy)
        if not self.in_range:
            raise BadInputError("some rows hold values beyond the range of float32; rescale them")


MERGE_FAULTS = partial(reduce, RowFaults.merge)


def take_block(block: np.ndarray, first_row: int, numbers: np.ndarray) -> tuple[RowFaults, np.ndarray]:
    """What is wrong with ``block`` (n, d), and its rows among ``numbers``."""
    bad = nonfinite_rows(block)
    chosen = numbers[slice(*np.searchsorted(numbers, (first_row, first_row + len(block))))] - first_row
    rows = block if len(chosen) == len(block) else block[chosen]
    in_range = rows.dtype.itemsize < 8 or bool((np.abs(rows) <= np.finfo(np.float32).max).all())
    return RowFaults(tuple(int(row) + first_row for row in bad[:LISTED_ROWS]), len(bad), in_range), rows


def fold_rows(
    function: Callable[[np.ndarray, int, Any], T], rows: Rows, merge: Callable[[T, T], T], *, shared: Any, name: str
) -> T:
    """``merge`` over ``function(block, first_row, shared)``; the same for an array and for its Dask array in blocks of
    ``BLOCK_ROWS`` rows."""
    if not isinstance(rows, np.ndarray):
        return reduce_rows(function, rows, partial(reduce, merge), name=name, shared=shared)
    starts = range(0, len(rows), BLOCK_ROWS)
    parts = (function(rows[start : start + BLOCK_ROWS], start, shared) for start in starts)
    return merge_here(parts, len(starts), partial(reduce, merge))


@dataclass(frozen=True)
class ArrayRows:
    """The rows (rows, dim) of a NumPy array."""

    array: Any

    @property
    def rows(self) -> int:
        return int(self.array.shape[0])

    @property
    def dim(self) -> int:
        return int(self.array.shape[1])

    def take(self, numbers: np.ndarray) -> Rows:
        """The rows ``numbers`` (s,), ascending, in their own dtype; raises if any row of all is not finite."""
        faults, rows = take_block(self.array, 0, numbers)
        faults.check("X", MEND_ARRAY)
        return rows

    def stored(self) -> Rows:
        """All rows in their own dtype; a Dask array is read anew by each pass."""
        return self.array

    def dask(self) -> AbstractContextManager[None]:
        """Where Dask collections of these rows are computed."""
        return nullcontext()


@dataclass(frozen=True)
class DaskRows(ArrayRows):
    """The rows of a Dask array, in chunks of whole rows of known sizes, read where its own scheduler runs."""

    def __post_init__(self) -> None:
        if 0 in self.array.shape:
            raise BadInputError(f"X has shape {self.array.shape}; expected at least one row and one feature")

    def take(self, numbers: np.ndarray) -> Rows:
        faults, kept = scan_rows(take_block, self.array, MERGE_FAULTS, name="take_rows", shared=numbers)
        faults.check("X", MEND_ARRAY)
        sizes = self.array.chunks[0]
        edges = [*first_rows(sizes)[np.array(sizes) > 0], self.rows]
        return _in_even_blocks(kept, np.searchsorted(numbers, edges), self.dim, self.array.dtype)


@dataclass(frozen=True)
class CorpusRows:
    """The rows of a corpus, a task for each partition and a chunk at a time, on the workers if there are any."""

    corpus: Corpus
    context: Context

    @property
    def rows(self) -> int:
        return self.corpus.rows

    @property
    def dim(self) -> int:
        return self.corpus.dim

    def take(self, numbers: np.ndarray) -> da.Array:
        partitions = self.corpus.partitions()
        faults, kept = scan_tasks(
            partial(take_partition, self.corpus.ref),
            partitions,
            MERGE_FAULTS,
            client=self.context.client,
            name="take_rows",
            shared=numbers,
            advance=self.context.progress("sample", self.rows),
            weight=lambda rows: rows[1] - rows[0],
        )
        faults.check(self.corpus.url, "ingest the data with --nonfinite=drop to leave them out")
        edges = [*(start for start, _ in partitions), self.rows]
        return _in_even_blocks(kept, np.searchsorted(numbers, edges), self.dim, self.corpus.dtype)

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


TrainingRows = ArrayRows | CorpusRows


def _in_even_blocks(kept: Sequence[Any], edges: np.ndarray, dim: int, dtype: Any) -> da.Array:
    """What each part kept of a sample, its rows from one of the ``edges`` to the next, as one Dask array that stays
    where Dask keeps results."""
    blocks = [(block, int(size)) for block, size in zip(kept, np.diff(edges), strict=True) if size]
    array = stack_rows([block for block, _ in blocks], [size for _, size in blocks], dim, dtype)
    return array.rechunk((BLOCK_ROWS, dim)).persist()


def take_partition(corpus: CorpusRef, partition: tuple[int, int], numbers: np.ndarray) -> tuple[RowFaults, np.ndarray]:
    """What is wrong with the rows of a partition, and those of them among ``numbers``."""
    faults, kept = zip(
        *(take_block(block, first, numbers) for first, block in corpus.open().blocks(*partition)), strict=True
    )
    return MERGE_FAULTS(faults), np.concatenate(kept)


def read_part(corpus: CorpusRef, maximum: int, block_id: tuple[int, ...]) -> np.ndarray:
    """One of at most ``maximum`` parts of a corpus, by its number, as (rows, dim) in the dtype of the corpus."""
    opened = corpus.open()
    start, stop = opened.partitions(maximum)[block_id[0]]
    rows = np.empty((stop - start, opened.dim), opened.dtype)
    for first, block in opened.blocks(start, stop):
        rows[first - start : first - start + len(block)] = block
    return rows
