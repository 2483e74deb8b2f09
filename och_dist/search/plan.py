"""How codes are scanned: all of them or by bucket tables, as predicted from a sample of the codes, by measured costs.

Uniform random codes would be easy to predict and tell nothing: learned codes are skewed, their neighbours near and
their buckets of very different sizes. So a few of the queries are compared with a sample of the codes. That gives, for
each, how its distances grow, hence about where its k-th neighbour lies, hence how far a search must go; and how many
codes lie in the buckets on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb, log
from typing import Any, Literal, get_args

import numpy as np

from och_dist.errors import UsageError
from och_dist.kernels.buckets import ALLOWANCE, COSTS, Costs, cut_bits, read_substring
from och_dist.kernels.packing import code_words
from och_dist.search.filters import Selection
from och_dist.search.placement import Capacity
from och_dist.search.questions import QueryBatch, Question
from och_dist.store import Index, TablePartition, find_tables

SearchMethod = Literal["auto", "flat", "multi-index"]

LOAD_NANOSECONDS_PER_BYTE = 2.0
"""Reading and laying out a byte of bucket tables (measured: 1.2 to 2.0, one thread)."""

SAMPLE_CHUNKS = 8
SAMPLE_ROWS = 1 << 16
PROBES = 16
FEW_LIVE = 8
"""Where a filter leaves fewer than one row in so many, a flat scan gathers them first."""

MARGIN = 0.9
"""Tables are used where they are faster by so much: their times are less certain than those of a scan."""

NEAREST = 32
"""Sample distances from which the growth near a query is told."""


@dataclass(frozen=True)
class Plan:
    """The method to use, why, and the predicted nanoseconds of one query by either."""

    method: SearchMethod
    reason: str
    flat: float = 0.0
    multi_index: float = 0.0


@dataclass(frozen=True)
class PlannedPartition:
    """A partition as the planner sees it: its rows, and its substrings (0: it has no tables)."""

    rows: int
    substrings: int


@dataclass(frozen=True, eq=False)
class Sample:
    """Packed ``codes`` (s, bytes) from all over an index and some ``queries`` (q, bytes) that will be searched."""

    codes: np.ndarray
    queries: np.ndarray
    n_bits: int

    @cached_property
    def distances(self) -> np.ndarray:
        """(q, s) sorted distances."""
        words, queries = code_words(self.codes), code_words(self.queries)
        found = np.zeros((len(queries), len(words)), np.int64)
        for j in range(words.shape[1]):
            found += np.bitwise_count(queries[:, j, None] ^ words[None, :, j])
        return np.sort(found, axis=1)

    def substring_counts(self, start: int, width: int) -> np.ndarray:
        """(q, width + 1): codes of the sample at each distance from a query's substring."""
        codes = read_substring(code_words(self.codes), start, width)
        queries = read_substring(code_words(self.queries), start, width)
        values = np.bitwise_count(queries[:, None] ^ codes[None, :])
        return np.stack([np.bincount(own, minlength=width + 1) for own in values])

    def expected_distance(self, k: int, rows: int) -> np.ndarray:
        """(q,) where the k-th of ``rows`` codes like these is expected.

        Below the sample the number of codes within a distance is taken to grow with a power of it, which the nearest
        distances of the sample tell (the maximum-likelihood estimate of the local dimension).
        """
        size = self.distances.shape[1]
        rank = k * size / max(rows, 1)
        if rank >= size:
            return np.full(len(self.queries), float(self.n_bits))
        nearest = min(NEAREST, size)
        if rank >= nearest:
            return self.distances[:, int(np.ceil(rank)) - 1].astype(float)
        near = self.distances[:, :nearest] + 0.5
        growth = np.log(near[:, -1:] / near).mean(axis=1)
        return np.maximum(near[:, -1] * (rank / nearest) ** np.maximum(growth, 1e-3) - 0.5, 0.0)


def predict(
    sample: Sample,
    tables: Sequence[PlannedPartition],
    *,
    k: int | None = None,
    radius: int | None = None,
    n_queries: int = 1000,
    costs: Costs = COSTS,
) -> tuple[float, float, float]:
    """Nanoseconds of an average query by a flat scan and by tables, and the expected k-th distance (or the radius).

    Partitions are searched in order; each begins with the k-th distance of those before.
    """
    flat = np.zeros(len(sample.queries))
    multi = np.zeros(len(sample.queries))
    reach, rows, counts = np.zeros(len(sample.queries)), 0, {}
    for table in tables:
        rows += table.rows
        reach = np.full(len(flat), float(radius or 0)) if k is None else sample.expected_distance(k, rows)
        scan = costs.of_scan(sample.n_bits, table.rows, n_queries)
        flat += scan
        if table.substrings == 0:
            multi += scan
            continue
        if table.substrings not in counts:
            counts[table.substrings] = _Substrings(sample, table.substrings)
        spent = counts[table.substrings].cost(table.rows, reach, k, costs)
        allowed = ALLOWANCE * costs.of_scan(sample.n_bits, table.rows)
        multi += costs.query + np.where(spent <= allowed, spent, allowed + scan)
    return float(flat.mean()), float(multi.mean()), float(reach.mean())


class _Substrings:
    """What a sample says of tables of ``count`` substrings: look-ups and codes met up to each step of a search."""

    def __init__(self, sample: Sample, count: int) -> None:
        starts, widths = cut_bits(sample.n_bits, count)
        per_table = [sample.substring_counts(start, int(width)) for start, width in zip(starts, widths, strict=True)]
        steps = [(step // count, step % count) for step in range(sample.n_bits + 1)]
        self.n_bits, size = sample.n_bits, max(1, len(sample.codes))
        self.lookups = np.array([comb(int(widths[a]), weight) for weight, a in steps], float)
        self.shares = np.stack([per_table[a][:, weight] for weight, a in steps], axis=1) / size  # (q, steps)
        every = np.arange(sample.n_bits + 1)
        self.within = np.stack([np.searchsorted(own, every, "right") for own in sample.distances]) / size

    def cost(self, rows: int, reach: np.ndarray, k: int | None, costs: Costs) -> np.ndarray:
        """(q,) nanoseconds of queries that must look as far as ``reach`` (q,)."""
        # A search ends with the first step at or beyond the k-th distance; one between two distances goes part way.
        steps = np.clip(reach[:, None] + 1.0 - np.arange(self.n_bits + 1), 0.0, 1.0)
        met = steps * self.shares * rows
        filled = np.minimum(steps * self.lookups, met)
        groups = filled.sum(axis=1) + met.sum(axis=1) / 64
        met_in_all = met.sum(axis=1)
        if k is None:
            place = np.clip(reach.astype(int), 0, self.n_bits)
            matches = self.within[np.arange(len(reach)), place] * rows
        else:
            matches = k * (2.0 + 2.0 * np.log(np.maximum(met_in_all / max(k, 1), 1.0)))
        lookups = (steps * self.lookups).sum(axis=1)
        return lookups * costs.lookup + groups * costs.of_group(self.n_bits) + matches * costs.match


def sample_codes(index: Index) -> np.ndarray:
    """At most SAMPLE_ROWS packed codes (s, bytes) of a few chunks from all over the index."""
    places = np.unique(np.linspace(0, len(index.chunks) - 1, SAMPLE_CHUNKS).astype(int))
    blocks = [index.read(index.chunks[place]) for place in places]
    step = max(1, -(-sum(map(len, blocks)) // SAMPLE_ROWS))
    return np.concatenate([block[::step] for block in blocks])


def make_plan(flat: float, multi: float, reach: float, *, rows: int, bits: int, k: int | None) -> Plan:
    """The faster of the two, and a sentence that says so."""
    method: SearchMethod = "multi-index" if multi < MARGIN * flat else "flat"
    what = f"neighbour {k} of" if k is not None else "the radius among"
    times = f"about {_milliseconds(multi)} a query by bucket tables, {_milliseconds(flat)} by a flat scan"
    return Plan(method, f"{times} ({what} {rows} codes is at distance {reach:.0f} of {bits})", flat, multi)


def _milliseconds(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.{max(0, 2 - int(np.floor(log(max(nanoseconds / 1e6, 1e-4), 10))))}f} ms"


class Planner:
    """Decides for each search of an index whether bucket tables answer it; ``reason`` says why, or why not.

    Tables that are not loaded yet must earn it: they are taken once what they would have saved exceeds their loading.
    They may take ``memory`` bytes. Codes that are not ``held`` leave no room for tables either.
    """

    def __init__(
        self, index: Index, method: SearchMethod, capacity: Capacity, *, held: bool, memory: int | None
    ) -> None:
        if method not in get_args(SearchMethod):
            raise UsageError(f"method {method!r} is not known; use one of {', '.join(get_args(SearchMethod))}")
        self.index, self.method, self.held, self.memory = index, method, held, memory
        self.capacity = capacity
        self.reason = "nothing was searched yet"
        self._plans: dict[Any, Plan] = {}
        self._missed, self._loaded = 0.0, False
        self._deciding = threading.Lock()
        if method == "multi-index" and not self._has_tables:
            raise UsageError(f"{index.url} has no bucket tables; make them with 'och tables {index.url}'")

    @cached_property
    def partitions(self) -> list[TablePartition]:
        """All chunks, as the bucket tables cut them."""
        return find_tables(self.index)

    @cached_property
    def _has_tables(self) -> bool:
        return any(part.layout is not None for part in self.partitions)

    @cached_property
    def _sample(self) -> np.ndarray:
        return sample_codes(self.index)

    def use_tables(self, question: Question, queries: QueryBatch, selection: Selection) -> bool:
        """Whether bucket tables answer this question about these queries."""
        with self._deciding:
            use, self.reason = self._decide(question, queries, selection)
            self._loaded = self._loaded or use
        return use

    def _decide(self, question: Question, queries: QueryBatch, selection: Selection) -> tuple[bool, str]:
        if self.method == "flat":
            return False, "a flat scan, as asked for"
        if question.sought is None or not self.held or not self.index.live_rows:
            return False, "a flat scan"
        if not self._has_tables:
            return False, f"a flat scan: there are no bucket tables, 'och tables {self.index.url}' would make them"
        if self.method == "multi-index":
            return True, "bucket tables, as asked for"
        plan = self.plan(question, queries, selection)
        # Tables may be fewer than workers, and those without one would wait.
        threads = self.capacity.threads
        tabled = threads if self.capacity.client is None else min(threads, len(self.partitions))
        saved = (plan.flat / threads - plan.multi_index / tabled) * len(queries)
        if plan.method == "flat" or saved <= 0:
            return False, f"a flat scan: {plan.reason}"
        self._missed += saved
        loading = LOAD_NANOSECONDS_PER_BYTE * sum(part.nbytes(self.index) for part in self.partitions) / tabled
        if not self._loaded and self._missed < loading:
            took = f"loading the bucket tables takes {loading / 1e9:.2g} s, which this does not save"
            return False, f"a flat scan: {took}"
        return True, f"bucket tables: {plan.reason}"

    def plan(self, question: Question, queries: QueryBatch, selection: Selection) -> Plan:
        """What the costs of the two ways are; remembered, for other queries are as many codes away."""
        key = None if selection else (question, min(len(queries), 2))
        if key not in self._plans:
            plan = self._new_plan(queries.codes, selection, **(question.sought or {}))
            if key is None:
                return plan
            self._plans[key] = plan
        return self._plans[key]

    def _new_plan(
        self, codes: np.ndarray, selection: Selection, *, k: int | None = None, radius: int | None = None
    ) -> Plan:
        index, needed = self.index, sum(part.nbytes(self.index) for part in self.partitions)
        if self.memory is not None and needed > self.memory:
            text = f"the bucket tables take {needed / 1e6:.0f} MB, and {self.memory / 1e6:.0f} MB may be used"
            return Plan("flat", text)
        if len(codes) == 0:
            return Plan("flat", "there are no queries")
        chosen = index.rows if selection.only is None else selection.only.count
        dropped = 0 if selection.without is None else selection.without.count
        live_share = max(chosen - dropped, 1) / max(1, index.rows)
        probes = codes[np.unique(np.linspace(0, len(codes) - 1, min(PROBES, len(codes))).astype(int))]
        tables = [
            PlannedPartition(part.rows, 0 if part.layout is None else part.layout.substrings)
            for part in self.partitions
        ]
        wanted = None if k is None else max(1, round(k / live_share))
        sample = Sample(self._sample, probes, index.bits)
        flat, multi, reach = predict(sample, tables, k=wanted, radius=radius, n_queries=len(codes))
        if FEW_LIVE * live_share < 1:
            flat *= live_share
        return make_plan(flat, multi, reach, rows=index.stored_rows, bits=index.bits, k=k)
