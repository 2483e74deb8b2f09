"""How codes are scanned: all of them or by bucket tables, as predicted from a sample of the codes, by measured costs.

Uniform random codes would be easy to predict and tell nothing: learned codes are skewed, their neighbours near and
their buckets of very different sizes. So a few of the queries are compared with a sample of the codes. That gives, for
each, how its distances grow, hence about where its k-th neighbour lies, hence how far a search must go; and how many
codes lie in the buckets on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import comb, inf, log
from typing import Any, Literal, get_args

import numpy as np

from och_dist.errors import UsageError
from och_dist.kernels.buckets import ALLOWANCE, COSTS, Costs, cut_bits, read_substring
from och_dist.kernels.packing import code_words
from och_dist.search.filters import Selection
from och_dist.search.placement import Capacity, laid_out_bytes
from och_dist.search.questions import QueryBatch, Question
from och_dist.store import Index, TablePartition, find_tables

SearchMethod = Literal["auto", "flat", "multi-index"]

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
class Prediction:
    """Nanoseconds of an average query by a flat scan and by tables, and the expected k-th distance (or the radius)."""

    flat: float
    multi_index: float
    reach: float

    @property
    def method(self) -> SearchMethod:
        """The faster of the two."""
        return "multi-index" if self.multi_index < MARGIN * self.flat else "flat"


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

    def steps(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Each step of a search by tables of ``count`` substrings, nearest first: look-ups (steps,), and the share of
        the codes that lie in the buckets (q, steps)."""
        tables = []
        for start, width in zip(*cut_bits(self.n_bits, count), strict=True):
            codes, queries = (read_substring(code_words(part), start, width) for part in (self.codes, self.queries))
            distances = np.bitwise_count(queries[:, None] ^ codes)
            found = np.stack([np.bincount(own, minlength=width + 1) for own in distances])
            tables.append((int(width), found / max(1, len(codes))))
        places = [divmod(step, count) for step in range(self.n_bits + 1)]
        lookups = np.array([comb(tables[a][0], weight) for weight, a in places], float)
        return lookups, np.stack([tables[a][1][:, weight] for weight, a in places], axis=1)

    def table_cost(
        self, steps: tuple[np.ndarray, np.ndarray], rows: int, reach: np.ndarray, k: int | None, costs: Costs
    ) -> np.ndarray:
        """(q,) nanoseconds of queries that must look as far as ``reach`` (q,) in tables of ``rows`` codes."""
        lookups, shares = steps
        # A search ends with the first step at or beyond the k-th distance; one between two distances goes part way.
        taken = np.clip(reach[:, None] + 1.0 - np.arange(self.n_bits + 1), 0.0, 1.0)
        lookups, met = taken * lookups, taken * shares * rows
        codes = met.sum(axis=1)
        groups = np.minimum(lookups, met).sum(axis=1) + codes / 64
        if k is None:
            within = [np.searchsorted(own, far, "right") for own, far in zip(self.distances, reach, strict=True)]
            matches = np.array(within) / max(1, len(self.codes)) * rows
        else:
            matches = k * (2.0 + 2.0 * np.log(np.maximum(codes / max(k, 1), 1.0)))
        return lookups.sum(axis=1) * costs.lookup + groups * costs.of_group(self.n_bits) + matches * costs.match


def predict(
    sample: Sample,
    tables: Sequence[tuple[int, int]],
    *,
    k: int | None = None,
    radius: int = 0,
    n_queries: int = 1000,
    costs: Costs = COSTS,
) -> Prediction:
    """What queries for ``k`` neighbours, or for all within ``radius``, cost.

    ``tables`` are (rows, substrings) of each partition, 0 substrings where it has no tables. Partitions are searched
    in order; each begins with the k-th distance of those before.
    """
    flat, multi, reach = np.zeros((3, len(sample.queries)))
    steps, seen = cache(sample.steps), 0
    for rows, substrings in tables:
        seen += rows
        reach = np.full(len(flat), float(radius)) if k is None else sample.expected_distance(k, seen)
        scan = costs.of_scan(sample.n_bits, rows, n_queries)
        flat += scan
        if substrings == 0:
            multi += scan
            continue
        spent = sample.table_cost(steps(substrings), rows, reach, k, costs)
        allowed = ALLOWANCE * costs.of_scan(sample.n_bits, rows)
        multi += costs.query + np.where(spent <= allowed, spent, allowed + scan)
    return Prediction(float(flat.mean()), float(multi.mean()), float(reach.mean()))


def sample_codes(index: Index, most: int = SAMPLE_ROWS) -> np.ndarray:
    """At most ``most`` packed codes (s, bytes) of a few chunks from all over the index."""
    places = np.unique(np.linspace(0, len(index.chunks) - 1, SAMPLE_CHUNKS).astype(int))
    blocks = [index.read(index.chunks[place]) for place in places]
    step = max(1, -(-sum(map(len, blocks)) // most))
    return np.concatenate([block[::step] for block in blocks])


def _milliseconds(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.{max(0, 2 - int(np.floor(log(max(nanoseconds / 1e6, 1e-4), 10))))}f} ms"


class Planner:
    """Decides for each search of an index whether bucket tables answer it; ``reason`` says why, or why not.

    Tables that are not loaded yet must earn it: they are taken once what they would have saved exceeds their loading.
    They may take the memory that the codes leave, or any if the codes are to be ``resident``. Codes that are not
    ``held`` leave no room for tables either.
    """

    def __init__(
        self, index: Index, method: SearchMethod, capacity: Capacity, *, held: bool, resident: bool | None
    ) -> None:
        if method not in get_args(SearchMethod):
            raise UsageError(f"method {method!r} is not known; use one of {', '.join(get_args(SearchMethod))}")
        self.index, self.method, self.capacity, self.held = index, method, capacity, held
        self.memory = inf if resident else capacity.memory - laid_out_bytes(index)
        self.reason = "nothing was searched yet"
        self._predicted: dict[Any, Prediction] = {}
        self._missed, self._loaded = 0.0, False
        self._deciding = threading.Lock()
        if method == "multi-index" and not self._table_bytes:
            raise UsageError(f"{index.url} has no bucket tables; make them with 'och tables {index.url}'")

    @cached_property
    def partitions(self) -> list[TablePartition]:
        """All chunks, as the bucket tables cut them."""
        return find_tables(self.index)

    @cached_property
    def _table_bytes(self) -> int:
        return sum(part.nbytes(self.index) for part in self.partitions)

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
        if not self._table_bytes:
            return False, f"a flat scan: there are no bucket tables, 'och tables {self.index.url}' would make them"
        if self.method == "multi-index":
            return True, "bucket tables, as asked for"
        if self._table_bytes > self.memory:
            sizes = f"take {self._table_bytes / 1e6:.0f} MB, and {self.memory / 1e6:.0f} MB may be used"
            return False, f"a flat scan: the bucket tables {sizes}"
        if not len(queries):
            return False, "a flat scan: there are no queries"
        found = self.predicted(question, queries, selection)
        why = self._sentence(found, question)
        # Tables may be fewer than workers, and those without one would wait.
        threads = self.capacity.threads
        tabled = threads if self.capacity.client is None else min(threads, len(self.partitions))
        saved = (found.flat / threads - found.multi_index / tabled) * len(queries)
        if found.method == "flat" or saved <= 0:
            return False, f"a flat scan: {why}"
        self._missed += saved
        loading = self.capacity.load_nanoseconds * self._table_bytes / tabled
        if not self._loaded and self._missed < loading:
            took = f"loading the bucket tables takes {loading / 1e9:.2g} s, which this does not save"
            return False, f"a flat scan: {took}"
        return True, f"bucket tables: {why}"

    def predicted(self, question: Question, queries: QueryBatch, selection: Selection) -> Prediction:
        """What the two ways cost; remembered where all rows count, for other queries are as many codes away."""
        key = question, min(len(queries), 2)
        if not selection and key in self._predicted:
            return self._predicted[key]
        sought, live_share = dict(question.sought or {}), selection.share(self.index.rows)
        if "k" in sought:
            sought["k"] = max(1, round(sought["k"] / live_share))
        probes = np.unique(np.linspace(0, len(queries) - 1, min(PROBES, len(queries))).astype(int))
        sample = Sample(self._sample, queries.codes[probes], self.index.bits)
        tables = [(part.rows, part.substrings) for part in self.partitions]
        found = predict(sample, tables, n_queries=len(queries), costs=self.capacity.costs, **sought)
        if not selection:
            self._predicted[key] = found
        return replace(found, flat=found.flat * live_share) if FEW_LIVE * live_share < 1 else found

    def _sentence(self, found: Prediction, question: Question) -> str:
        sought = question.sought or {}
        what = f"neighbour {sought['k']} of" if "k" in sought else "the radius among"
        where = f"{what} {self.index.stored_rows} codes is at distance {found.reach:.0f} of {self.index.bits}"
        times = [_milliseconds(nanoseconds) for nanoseconds in (found.multi_index, found.flat)]
        return f"about {times[0]} a query by bucket tables, {times[1]} by a flat scan ({where})"
