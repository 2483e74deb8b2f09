"""Where the codes of a search are: in this process, held on workers, or read anew for each batch of queries.

All three answer the same questions with the same result; :func:`place_codes` picks by memory.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from och_dist import cluster
from och_dist.kernels.buckets import COSTS, BucketTables, Costs, code_bytes
from och_dist.kernels.hamming import CodeBlock, lay_out
from och_dist.search.filters import Selection
from och_dist.search.questions import QueryBatch, Question
from och_dist.store import CodeChunk, Index, IndexRef, TablePartition, open_tables

if TYPE_CHECKING:
    from distributed import Client

CACHE_BYTES = 2 << 30
"""Codes that this process may hold."""

HELD_SHARE = 0.4
"""Of the memory of workers, so much may be held codes."""

STREAM_BYTES = 16 << 20
"""Codes that a thread has in memory at a time where they are not held."""

MAX_TASKS = 512
KEPT_SELECTIONS = 4
"""Choices of rows whose flags stay on the workers: many searches with one :class:`RowSet` build them once."""

Answer = Callable[[], Any]
Advance = Callable[[int], None]


@dataclass(frozen=True)
class Capacity:
    """What can hold codes: ``threads`` of this process or of ``workers``, with ``memory`` (bytes); how long work takes
    there, and how much of it is done at a time."""

    client: Client | None
    threads: int
    memory: int
    workers: int = 0
    costs: Costs = COSTS
    load_nanoseconds: float = 2.0
    """Reading and laying out a byte of bucket tables (measured: 1.2 to 2.0, one thread)."""
    partition_bytes: int = 256 << 20
    copied_bytes: int = 64 << 20
    """An index of at most so many bytes is held whole by every worker."""
    few_rows: int = 1 << 22
    """A single query of fewer codes is not shared among threads."""
    few_queries: int = 64
    """So many queries at least make it worth while to ask another copy."""
    most_pairs: int = 1 << 36
    """Queries times codes that held codes are asked at a time, some seconds of work: then there is progress to tell."""
    least_queries: int = 256
    """So many share one pass over the codes anyway."""

    @classmethod
    def of(cls, client: Client | None = None, threads: int | None = None) -> Capacity:
        """That of this process, or of the workers of a cluster."""
        if client is None:
            return cls(None, threads or cluster.usable_cores(), CACHE_BYTES)
        workers = cluster.workers_of(client)
        slots = sum(worker.get("nthreads") or 1 for worker in workers)
        memory = sum(worker.get("memory_limit") or CACHE_BYTES for worker in workers)
        return cls(client, max(1, min(slots, MAX_TASKS)), int(HELD_SHARE * memory), len(workers))


@dataclass(frozen=True)
class Partition:
    """Adjoining chunks of an index version, and their bucket tables where a search is to use them."""

    index: IndexRef
    chunks: tuple[CodeChunk, ...]
    tables: TablePartition | None = None

    @property
    def start(self) -> int:
        return self.chunks[0].start if self.chunks else 0

    @property
    def stop(self) -> int:
        return self.chunks[-1].stop if self.chunks else 0


def laid_out_bytes(index: Index) -> int:
    """Memory of all codes of an index once they are laid out for scanning."""
    return index.stored_rows * code_bytes(index.bits)


def partitions_of(index: Index, at_least: int, most_bytes: int) -> list[Partition]:
    """All chunks in ``at_least`` partitions of similar size (as far as there are chunks), none much over
    ``most_bytes``."""
    count = max(at_least, -(-laid_out_bytes(index) // most_bytes), 1)
    cuts = np.linspace(0, len(index.chunks), min(count, len(index.chunks)) + 1).astype(int).tolist()
    return [Partition(index.ref, index.chunks[low:high]) for low, high in itertools.pairwise(cuts)]


@dataclass(frozen=True, eq=False)
class HeldCodes:
    """The codes of one partition: rows ``start`` on, or ``row_numbers`` (n,); ``live`` (n,) bool, None: all of them."""

    block: CodeBlock
    start: int
    stop: int
    row_numbers: np.ndarray | None = None
    live: np.ndarray | None = None
    tables: BucketTables | None = None

    def __sizeof__(self) -> int:
        """What Dask reckons with."""
        held = (self.block, self.row_numbers, self.live, self.tables)
        return sum(part.nbytes for part in held if part is not None)

    def numbered(self, rows: np.ndarray) -> np.ndarray:
        """The numbers in the index of ``rows`` of the block; -1, where nothing was found, stays."""
        numbers = rows + self.start if self.row_numbers is None else self.row_numbers[rows]
        numbers[rows < 0] = -1
        return numbers

    def selected(self, selection: Selection) -> HeldCodes:
        """The same codes, of which only selected ones are live."""
        if not selection:
            return self
        live = selection.live(self.start, self.stop, self.row_numbers)
        return replace(self, live=live if self.live is None else live & self.live)

    def cut(self, count: int) -> list[HeldCodes]:
        """The same codes in about ``count`` parts, without copies; bucket tables are not taken apart."""
        if self.tables is not None or count == 1:
            return [self]
        step, parts = max(64, -(-self.block.n // (64 * count)) * 64), []
        for low in range(0, self.block.n, step):
            high = min(low + step, self.block.n)
            numbers, live = (None if values is None else values[low:high] for values in (self.row_numbers, self.live))
            start, stop = self.start + low, self.start + high
            if numbers is not None:
                start, stop = int(numbers[0]), int(numbers[-1]) + 1
            parts.append(HeldCodes(self.block.part(low, high), start, stop, numbers, live))
        return parts

    def packed(self) -> np.ndarray:
        """The codes (n, bytes) uint8 as they are stored."""
        words = np.ascontiguousarray(self.block.groups.transpose(0, 2, 1)).reshape(-1, self.block.groups.shape[1])
        return words.view(np.uint8)[: self.block.n, : -(-self.block.n_bits // 8)]


def load_partition(partition: Partition) -> HeldCodes:
    """Read and check the codes of a partition and lay them out."""
    index, chunks = partition.index.open(), partition.chunks
    codes = [index.read(chunk) for chunk in chunks]
    numbers = _joined(map(index.row_numbers, chunks), lambda i: np.arange(chunks[i].start, chunks[i].stop))
    live = _joined(map(index.live, chunks), lambda i: np.ones(len(codes[i]), bool))
    block = lay_out(np.concatenate([np.empty((0, -(-index.bits // 8)), np.uint8), *codes]), index.bits)
    tables = None if partition.tables is None else open_tables(index, partition.tables, block)
    return HeldCodes(block, partition.start, partition.stop, numbers, live, tables)


def _joined(parts: Iterable[np.ndarray | None], usual: Callable[[int], np.ndarray]) -> np.ndarray | None:
    """Parts as one array, ``usual(i)`` where part i is None; None if all are."""
    found = list(parts)
    if all(part is None for part in found):
        return None
    return np.concatenate([usual(i) if part is None else part for i, part in enumerate(found)])


def answer_in_turn(question: Question, parts: Iterable[HeldCodes], queries: QueryBatch) -> Any:
    """One partition after the other, each knowing what those before it found."""
    best: Any = None
    for codes in parts:
        part = question.chunk(codes, queries, best)
        best = part if best is None else question.combine([best, part])
    return best


class Placement(ABC):
    """The codes of some partitions, which can be asked."""

    def __init__(self, index: Index, partitions: Sequence[Partition], capacity: Capacity) -> None:
        self.stored_rows, self.partitions, self.capacity = index.stored_rows, partitions, capacity
        self._loading = threading.Lock()

    @abstractmethod
    def start(
        self, question: Question, queries: QueryBatch, selection: Selection, advance: Advance | None = None
    ) -> Answer:
        """Ask all codes; the answer waits for them. ``advance`` hears of the queries that are done, once of each."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the codes; another question would load them again."""


class Held(Placement):
    """Codes in memory, which are asked long batches in pieces; the next is under way while one is awaited."""

    def start(
        self, question: Question, queries: QueryBatch, selection: Selection, advance: Advance | None = None
    ) -> Answer:
        limits = self.capacity
        pieces = queries.cut(max(limits.least_queries, limits.most_pairs // max(1, self.stored_rows)))
        first = self._start_piece(question, pieces[0], selection)

        def answer() -> Any:
            begun, parts = first, []
            for piece, following in itertools.zip_longest(pieces, pieces[1:]):
                current = begun
                if following is not None:
                    begun = self._start_piece(question, following, selection)
                parts.append(current())
                if advance is not None:
                    advance(len(piece))
            return parts[0] if len(parts) == 1 else question.join(parts)

        return answer

    @abstractmethod
    def _start_piece(self, question: Question, queries: QueryBatch, selection: Selection) -> Answer:
        """As :meth:`start`, all queries at once."""


class HeldHere(Held):
    """Codes in this process, searched by its threads: queries are shared out, or rows when there are few queries."""

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.capacity.threads, thread_name_prefix="och-search")

    @cached_property
    def codes(self) -> list[HeldCodes]:
        return [load_partition(partition) for partition in self.partitions]

    @cached_property
    def shares(self) -> list[HeldCodes]:
        """The codes cut for few queries, which all threads share. A batch would be slower by it: 10 % with k = 1000."""
        threads, least = self.capacity.threads, self.capacity.few_rows
        return [part for codes in self.codes for part in codes.cut(threads if codes.block.n >= least else 1)]

    def _start_piece(self, question: Question, queries: QueryBatch, selection: Selection) -> Answer:
        return partial(self._answer, question, queries, selection)

    def _answer(self, question: Question, queries: QueryBatch, selection: Selection) -> Any:
        threads = self.capacity.threads
        few = len(queries) < threads and not selection
        with self._loading:
            held = self.shares if few else self.codes
        codes = [part.selected(selection) for part in held]
        if threads == 1 or (few and len(codes) == 1):
            return answer_in_turn(question, codes, queries)
        if few:
            return question.combine(list(self.pool.map(lambda part: question.chunk(part, queries), codes)))
        tiles = queries.cut(-(-len(queries) // threads))
        return question.join(list(self.pool.map(partial(answer_in_turn, question, codes), tiles)))

    def close(self) -> None:
        with self._loading:
            held = [self.__dict__.pop(name, None) for name in ("codes", "shares", "pool")]
        if held[-1] is not None:
            held[-1].shutdown()


class HeldOnWorkers(Held):
    """Codes that stay on the workers between batches. A lost worker's partitions are read again by another.

    Each worker holds a partition and answers all queries from it; of an index so small that every worker can hold a
    copy (``copies``), each answers a share of the queries, and few queries are all answered by one.
    """

    def __init__(
        self, index: Index, partitions: Sequence[Partition], capacity: Capacity, *, copies: bool = False
    ) -> None:
        super().__init__(index, partitions, capacity)
        self.copies, self._turn = copies, itertools.count()
        self._held = cluster.HeldValues(load_partition, partitions, client=capacity.client, name="hold_codes")
        self._selected: dict[Selection, cluster.HeldValues] = {}

    def _live(self, selection: Selection) -> cluster.HeldValues:
        """The held codes, of which ``selection`` is live."""
        if not selection:
            return self._held
        with self._loading:
            if selection not in self._selected:
                parts = [selection.within(part.start, part.stop) for part in self.partitions]
                for oldest in list(self._selected)[: 1 - KEPT_SELECTIONS]:
                    del self._selected[oldest]
                self._selected[selection] = cluster.HeldValues(
                    HeldCodes.selected, self._held, parts, client=self._held.client, name="select_codes"
                )
            return self._selected[selection]

    def _start_piece(self, question: Question, queries: QueryBatch, selection: Selection) -> Answer:
        held, count, capacity = self._live(selection), len(self.partitions), self.capacity
        ask = partial(held.ask, question.chunk, name="search_codes", threads=capacity.threads)
        if not self.copies:
            return ask([queries] * count, question.combine)
        if held.disturbed and len(held.client.nthreads()) >= count:
            held.forget()  # one worker holds several copies; there are enough workers again to hold them anew
        shares, turn = queries.cut(max(capacity.few_queries, -(-len(queries) // count))), next(self._turn)
        return ask(shares, question.join, places=[(turn + number) % count for number in range(len(shares))])

    def close(self) -> None:
        with self._loading:
            self._held.forget()
            self._selected.clear()


def search_partition(question: Question, task: tuple[Partition, Selection, int], queries: QueryBatch) -> Any:
    """The answer of a partition that is not held: at most STREAM_BYTES of codes are in memory at a time."""
    partition, selection, _ = task
    index, chunks = partition.index.open(), partition.chunks
    rows = STREAM_BYTES // -(-index.bits // 8)
    size = max(1, rows // max(1, chunks[0].stop - chunks[0].start))
    pieces = (Partition(partition.index, chunks[i : i + size]) for i in range(0, len(chunks), size))
    return answer_in_turn(question, (load_partition(piece).selected(selection) for piece in pieces), queries)


class ReadEachTime(Placement):
    """Codes that do not fit in memory: every batch of queries reads them, by partition, here or on the workers.

    A share of the queries counts as done with each partition.
    """

    def start(
        self, question: Question, queries: QueryBatch, selection: Selection, advance: Advance | None = None
    ) -> Answer:
        shares = np.diff(np.linspace(0, len(queries), len(self.partitions) + 1).astype(int)).tolist()
        chosen = [selection.within(part.start, part.stop) for part in self.partitions]
        return partial(
            cluster.reduce_tasks,
            partial(search_partition, question),
            list(zip(self.partitions, chosen, shares, strict=True)),
            question.combine,
            client=self.capacity.client,
            threads=self.capacity.threads,
            name="search_partition",
            shared=queries,
            advance=advance,
            weight=itemgetter(2),
        )

    def close(self) -> None:
        """Nothing is held."""


def hold(index: Index, partitions: Sequence[Partition], capacity: Capacity) -> Held:
    """Keep partitions in memory."""
    return (HeldHere if capacity.client is None else HeldOnWorkers)(index, partitions, capacity)


def place_codes(index: Index, capacity: Capacity, *, resident: bool | None) -> Placement:
    """Hold the codes of an index in memory, unless ``resident`` is False or, by default, they would take too much."""
    client, threads, workers, size = capacity.client, capacity.threads, capacity.workers, laid_out_bytes(index)
    cut = partial(partitions_of, index, most_bytes=capacity.partition_bytes)
    if not index.live_rows:
        return HeldHere(index, [Partition(index.ref, ())], replace(capacity, threads=1))
    if not (size <= capacity.memory if resident is None else resident):
        return ReadEachTime(index, cut(1 if client is None else min(MAX_TASKS, len(index.chunks))), capacity)
    # Where a worker has several threads, it would search a copy by one of them.
    one_thread_each = 1 < workers == threads <= cluster.FEW_THREADS
    if client is not None and one_thread_each and size <= min(capacity.copied_bytes, capacity.memory // workers):
        return HeldOnWorkers(index, cut(1) * workers, capacity, copies=True)
    return hold(index, cut(1 if client is None else threads), capacity)
