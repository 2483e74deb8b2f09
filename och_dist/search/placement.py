"""Where the codes of a search are held: in the threads of this process, pinned on workers, or read anew each time.

All three answer the same questions with the same result; :func:`hold` picks by memory.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from och_dist.cluster import ask_values, begin_asking, derive_values, hold_values, reduce_tasks, workers_of
from och_dist.search.filters import Selection
from och_dist.search.questions import (
    Partition,
    QueryBatch,
    Question,
    ResidentCodes,
    laid_out_bytes,
    load_partition,
    partitions_of,
)
from och_dist.store import Index

if TYPE_CHECKING:
    from distributed import Client, Future

CACHE_BYTES = 2 << 30
PINNED_SHARE = 0.4
STREAM_BYTES = 16 << 20
MAX_TASKS = 512
KEPT_SELECTIONS = 4
"""Choices of rows whose flags stay on the workers: many searches with one :class:`RowSet` build them once."""

FEW_ROWS = 1 << 22
COPIED_BYTES = 64 << 20
FEW_QUERIES = 64
FEW_ANSWERS = 32
"""Up to so many threads of workers are asked at once and answer this process; more are merged on the way, by tasks."""


Answer = Callable[[], Any]
Advance = Callable[[int], None]


def quietly(count: int) -> None:
    """Tells nobody about progress."""


@dataclass(frozen=True)
class AnswerPartition:
    """Read a partition, piece by piece, and answer a question from it."""

    partition: Partition
    question: Question
    selection: Selection
    share: int = 0
    """Of the queries, so many count as done when it is."""


def answer_partition(task: AnswerPartition, queries: QueryBatch) -> Any:
    """The answer of a partition that is not held: at most STREAM_BYTES of codes are in memory at a time."""
    best: Any = None
    for piece in pieces_of(task.partition):
        held = load_partition(piece)
        held = held.selected(task.selection) if task.selection else held
        part = task.question.answer(held, queries, best)
        best = part if best is None else task.question.merge([best, part])
    return best


def pieces_of(partition: Partition) -> list[Partition]:
    """The chunks of a partition in pieces of about STREAM_BYTES of codes."""
    index = partition.index.open()
    rows = max(1, STREAM_BYTES // -(-index.bits // 8))
    size = max(1, rows // max(1, partition.chunks[0].stop - partition.chunks[0].start))
    chunks = partition.chunks
    return [Partition(partition.index, chunks[i : i + size]) for i in range(0, len(chunks), size)]


class HeldHere:
    """Codes in this process, searched by ``threads`` threads: queries are shared out, or rows when there are few."""

    def __init__(self, partitions: Sequence[Partition], threads: int) -> None:
        self.threads = threads
        self._partitions = partitions
        self._loading = threading.Lock()

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, thread_name_prefix="och-search")

    @cached_property
    def codes(self) -> list[ResidentCodes]:
        return [load_partition(partition) for partition in self._partitions]

    @cached_property
    def halves(self) -> list[ResidentCodes]:
        """The codes cut for single queries, which all threads share."""
        return [part for held in self.codes for part in held.halves(self.threads if held.block.n >= FEW_ROWS else 1)]

    def start(self, question: Question, queries: QueryBatch, selection: Selection) -> Answer:
        with self._loading:
            codes, halves = self.codes, self.halves if len(queries) < self.threads and not selection else None
        if selection:
            codes = [held.selected(selection) for held in codes]
        return lambda: self._answer(question, queries, codes, halves)

    def _answer(
        self, question: Question, queries: QueryBatch, codes: list[ResidentCodes], halves: list[ResidentCodes] | None
    ) -> Any:
        if self.threads == 1 or (halves is not None and len(halves) == 1):
            return answer_in_turn(question, codes, queries)
        if halves is not None:
            return question.merge(list(self.pool.map(lambda held: question.answer(held, queries), halves)))
        size = -(-len(queries) // self.threads)
        tiles = [queries[i : i + size] for i in range(0, len(queries), size)]
        return question.join(list(self.pool.map(lambda tile: answer_in_turn(question, codes, tile), tiles)))

    def close(self) -> None:
        with self._loading:
            held = [self.__dict__.pop(name, None) for name in ("codes", "halves", "pool")]
        if held[-1] is not None:
            held[-1].shutdown()


def answer_in_turn(question: Question, codes: Sequence[ResidentCodes], queries: QueryBatch) -> Any:
    """One partition after the other, each knowing what those before it found."""
    best: Any = None
    for held in codes:
        part = question.answer(held, queries, best)
        best = part if best is None else question.merge([best, part])
    return best


class ReadEachTime:
    """Codes that do not fit in memory: every batch of queries reads them, by partition, here or on the workers."""

    def __init__(self, index: Index, client: Client | None, threads: int) -> None:
        self.client, self.threads = client, threads
        self._partitions = partitions_of(index, 1 if client is None else min(MAX_TASKS, len(index.chunks)))

    def start(
        self, question: Question, queries: QueryBatch, selection: Selection, advance: Advance = quietly
    ) -> Answer:
        shares = np.diff(np.linspace(0, len(queries), len(self._partitions) + 1).astype(int)).tolist()
        tasks = [
            AnswerPartition(part, question, selection.within(part.start, part.stop), share)
            for part, share in zip(self._partitions, shares, strict=True)
        ]
        return lambda: self._answer(tasks, question, queries, advance)

    def _answer(self, tasks: list[AnswerPartition], question: Question, queries: QueryBatch, advance: Advance) -> Any:
        if self.client is not None or self.threads == 1:
            return reduce_tasks(
                answer_partition, tasks, question.merge, client=self.client, name="search_partition", shared=queries,
                advance=None if advance is quietly else advance, weight=lambda task: task.share,
            )  # fmt: skip
        best: Any = None
        with ThreadPoolExecutor(self.threads, thread_name_prefix="och-search") as pool:
            for task, part in zip(tasks, pool.map(lambda task: answer_partition(task, queries), tasks), strict=True):
                best = part if best is None else question.merge([best, part])
                advance(task.share)
        return best

    def close(self) -> None:
        """Nothing is held."""


class PinnedOnWorkers:
    """Codes that stay on the workers between batches. A lost worker's partitions are read again by another.

    Each worker holds a partition and answers all queries from it; of an index so small that every worker can hold a
    copy (``copies``), each answers a share of the queries, and few queries are all answered by one.
    """

    def __init__(self, partitions: Sequence[Partition], client: Client, threads: int, *, copies: bool = False) -> None:
        self.client, self.threads, self.copies = client, threads, copies
        self._partitions = partitions
        self._loading = threading.Lock()
        self._pinned: list[Future] | None = None
        self._selected: dict[Selection, list[Future]] = {}
        self._turn = itertools.count()
        self._uneven = self._apart = False

    def _pin(self, selection: Selection) -> list[Future]:
        """The held codes, of which ``selection`` is live."""
        with self._loading:
            client = self.client
            if self._pinned is None:
                self._pinned = hold_values(load_partition, self._partitions, client=client, name="hold_codes")
            if not selection:
                return self._pinned
            if selection not in self._selected:
                parts = [selection.within(part.start, part.stop) for part in self._partitions]
                chosen = derive_values(ResidentCodes.selected, self._pinned, parts, client=client, name="select_codes")
                for oldest in list(self._selected)[: 1 - KEPT_SELECTIONS]:
                    del self._selected[oldest]
                self._selected[selection] = chosen
            return self._selected[selection]

    def start(self, question: Question, queries: QueryBatch, selection: Selection) -> Answer:
        self._spread_again()
        futures = self._pin(selection)
        payloads, combine = [queries] * len(futures), question.merge
        if self.copies:
            size = max(FEW_QUERIES, -(-len(queries) // len(futures)))
            payloads, combine = [queries[i : i + size] for i in range(0, len(queries), size)], question.join
            turn = next(self._turn)
            futures = [futures[(turn + i) % len(futures)] for i in range(len(payloads))]
        if self.threads > FEW_ANSWERS or not all(future.done() for future in futures):
            return self._scheduled(question, futures, payloads, combine)
        merge = None if self.copies or self._apart else question.merge
        finish = ask_values(question.answer, futures, payloads, client=self.client, merge=merge)

        def answer() -> Any:
            parts = finish()
            if parts is not None:
                return combine(parts)
            self._uneven, self._apart = self.copies, True  # two workers may hold one partition for a while
            return self._scheduled(question, futures, payloads, combine)()

        return answer

    def _spread_again(self) -> None:
        """After a loss one worker holds several copies; hold them anew as soon as there are enough workers."""
        if self._uneven and len(self.client.nthreads()) >= len(self._partitions):
            self._uneven = False
            self.close()

    def _scheduled(
        self, question: Question, futures: list[Future], payloads: list[QueryBatch], combine: Callable[..., Any]
    ) -> Answer:
        finish = begin_asking(
            question.answer, futures, payloads, combine, client=self.client, name="search_codes",
            nbytes=sum(payload.nbytes for payload in payloads),
        )  # fmt: skip

        def answer() -> Any:
            try:
                return finish()
            except BaseException:
                self.close()  # what failed to load is not kept
                raise

        return answer

    def close(self) -> None:
        """Let the workers forget the codes."""
        with self._loading:
            self._pinned, self._apart = None, False
            self._selected.clear()


Holder = HeldHere | PinnedOnWorkers | ReadEachTime


@dataclass(frozen=True)
class Room:
    """What there is to hold codes with: threads of this process or of workers, and memory (bytes)."""

    client: Client | None
    threads: int
    memory: int
    workers: int = 0

    @classmethod
    def of(cls, client: Client | None, threads: int | None) -> Room:
        if client is None:
            return cls(None, threads or usable_cores(), CACHE_BYTES)
        workers = workers_of(client)
        slots = sum(worker.get("nthreads") or 1 for worker in workers)
        memory = sum(worker.get("memory_limit") or CACHE_BYTES for worker in workers)
        return cls(client, max(1, min(slots, MAX_TASKS)), int(PINNED_SHARE * memory), len(workers))

    def copies_fit(self, size: int) -> bool:
        """Whether every worker may hold a copy of ``size`` bytes; one with many threads would use one of them."""
        few = 1 < self.workers == self.threads <= FEW_ANSWERS
        return few and size <= COPIED_BYTES and size * self.workers <= self.memory

    def hold(self, partitions: Sequence[Partition]) -> HeldHere | PinnedOnWorkers:
        """Keep partitions in memory."""
        if self.client is None:
            return HeldHere(partitions, self.threads)
        return PinnedOnWorkers(partitions, self.client, self.threads)


def hold_flat(index: Index, room: Room, *, resident: bool | None) -> Holder:
    """Hold the codes of an index in memory, unless ``resident`` is False or, by default, they would take too much."""
    fits = laid_out_bytes(index) <= room.memory if resident is None else resident
    if fits and room.client is not None and room.copies_fit(laid_out_bytes(index)):
        whole = partitions_of(index, 1)
        return PinnedOnWorkers(whole * room.workers, room.client, room.threads, copies=True)
    if fits:
        return room.hold(partitions_of(index, 1 if room.client is None else room.threads))
    return ReadEachTime(index, room.client, room.threads if room.client is None else 1)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
