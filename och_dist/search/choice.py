"""Flat scan or bucket tables: the faster for each search, by the measured costs of ``plan_search``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from och_dist.errors import UsageError
from och_dist.search.filters import Selection
from och_dist.search.placement import Advance, Answer, Holder, ReadEachTime, Room, hold_flat, quietly
from och_dist.search.plan import Plan, plan_search, sample_codes
from och_dist.search.questions import QueryBatch, Question, TopK, Weigh, WithinRadius, laid_out_bytes, with_tables
from och_dist.store import Index, TablePartition, find_tables

Way = Literal["auto", "flat", "multi-index"]
MOST_PAIRS = 1 << 36
"""Queries times codes that held codes are asked at a time, some seconds of work: then there is progress to tell."""

LEAST_QUERIES = 256
"""So many share one pass over the codes anyway."""

LOAD_NANOSECONDS_PER_BYTE = 2.0
"""Reading and laying out a byte of bucket tables (measured: 1.2 to 2.0, one thread)."""


class ChosenCodes:
    """The codes of an index, plain and with bucket tables, each loaded when it is first used.

    Tables that are not loaded yet must earn it: they are taken once what they would have saved exceeds their loading.
    """

    def __init__(self, index: Index, room: Room, *, resident: bool | None, method: Way) -> None:
        if method not in get_args(Way):
            raise UsageError(f"method {method!r} is not known; use one of {', '.join(get_args(Way))}")
        self.index, self.room, self.method = index, room, method
        self.reason = "nothing was searched yet"
        self._memory = room.memory - laid_out_bytes(index) if resident is None else None
        self._flat: Holder = hold_flat(index, room, resident=resident)
        self._tabled: Holder | None = None
        self._plans: dict[Any, Plan] = {}
        self._missed = 0.0
        self._choosing = threading.Lock()
        if method == "multi-index" and not self._has_tables:
            raise UsageError(f"{index.url} has no bucket tables; make them with 'och tables {index.url}'")

    @cached_property
    def _parts(self) -> list[TablePartition]:
        return find_tables(self.index)

    @cached_property
    def _has_tables(self) -> bool:
        return any(part.layout is not None for part in self._parts)

    @cached_property
    def _sample(self) -> np.ndarray:
        return sample_codes(self.index)

    def start(
        self, question: Question, queries: QueryBatch, selection: Selection, advance: Advance = quietly
    ) -> Answer:
        """Ask all partitions a question; the answer waits for them. ``advance`` hears of queries that are done."""
        holder = self._pick(question, queries, selection)
        if isinstance(holder, ReadEachTime):  # a batch reads everything, so it is as large as can be
            return holder.start(question, queries, selection, advance)
        size = max(LEAST_QUERIES, MOST_PAIRS // max(1, self.index.stored_rows))
        if len(queries) <= size:
            return holder.start(question, queries, selection)
        pieces = [queries[start : start + size] for start in range(0, len(queries), size)]
        return lambda: question.join(list(self._in_turn(holder, question, pieces, selection, advance)))

    @staticmethod
    def _in_turn(
        holder: Holder, question: Question, pieces: list[QueryBatch], selection: Selection, advance: Advance
    ) -> Iterator[Any]:
        """Answers of pieces of a long batch, of which the next is under way already."""
        following = holder.start(question, pieces[0], selection)
        for number, piece in enumerate(pieces, 1):
            answer, last = following, number == len(pieces)
            following = answer if last else holder.start(question, pieces[number], selection)
            yield answer()
            advance(len(piece))

    def _pick(self, question: Question, queries: QueryBatch, selection: Selection) -> Holder:
        if isinstance(question, Weigh):  # ranks anew what a search found, and leaves it to that to say how
            return self._flat
        by_hamming = isinstance(question, WithinRadius) or (
            isinstance(question, TopK) and question.ranking == "hamming"
        )
        if self.method == "flat" or not by_hamming or isinstance(self._flat, ReadEachTime):
            self.reason = "a flat scan, as asked for" if self.method == "flat" else "a flat scan"
            return self._flat
        with self._choosing:
            if not self._has_tables:
                self.reason = f"a flat scan: there are no bucket tables, 'och tables {self.index.url}' would make them"
                return self._flat
            if self.method == "multi-index":
                self.reason = "bucket tables, as asked for"
                return self._tables()
            return self._cheaper(question, queries, selection)

    def _cheaper(self, question: Any, queries: QueryBatch, selection: Selection) -> Holder:
        key = (question, len(queries) > 1) if not selection else None
        plan = self._plans.get(key) if key else None
        if plan is None:
            plan = self._plan(question, queries, selection)
            if key:
                self._plans[key] = plan
        # Tables may be fewer than workers, and those without one would wait.
        at_once = min(self.room.threads, len(self._parts)) if self.room.client is not None else self.room.threads
        saved = (plan.flat / self.room.threads - plan.multi_index / at_once) * len(queries)
        if plan.method == "flat" or saved <= 0:
            self.reason = f"a flat scan: {plan.reason}"
            return self._flat
        self._missed += saved
        loading = LOAD_NANOSECONDS_PER_BYTE * sum(part.nbytes(self.index) for part in self._parts) / at_once
        if self._tabled is None and self._missed < loading:
            self.reason = (
                f"a flat scan: loading the bucket tables takes {loading / 1e9:.2g} s, which this does not save"
            )
            return self._flat
        self.reason = f"bucket tables: {plan.reason}"
        return self._tables()

    def _plan(self, question: Any, queries: QueryBatch, selection: Selection) -> Plan:
        rows = max(1, self.index.rows)
        share = 1.0 if selection.only is None else selection.only.count / rows
        share -= 0.0 if selection.without is None else selection.without.count / rows
        asked = {"k": question.k} if isinstance(question, TopK) else {"radius": question.radius}
        return plan_search(
            self.index,
            queries.codes,
            **asked,
            memory=self._memory,
            live_share=max(share, 1 / rows),
            partitions=self._parts,
            codes=self._sample,
        )

    def _tables(self) -> Holder:
        if self._tabled is None:
            self._tabled = self.room.hold(with_tables(self.index, self._parts))
        return self._tabled

    def close(self) -> None:
        """Let go of everything."""
        for holder in (self._flat, self._tabled):
            if holder is not None:
                holder.close()
