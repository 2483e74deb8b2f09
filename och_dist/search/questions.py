"""Codes of an index held in memory by partitions, and the questions that a search asks of each.

A question answers for one partition and merges the answers of several; where the partitions are held, in this process
or on the workers of a cluster, is the business of ``holders``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

import numpy as np

from och_dist.errors import UsageError
from och_dist.kernels.asymmetric import spherical_top_k, weighted_pairs, weighted_top_k
from och_dist.kernels.buckets import BucketTables
from och_dist.kernels.hamming import (
    CodeBlock,
    hamming_histogram,
    hamming_radius,
    hamming_top_k,
    lay_out,
    merge_radius,
    merge_top_k,
)
from och_dist.search.filters import Selection
from och_dist.store import CodeChunk, Index, IndexRef, TablePartition, open_tables

Ranking = Literal["hamming", "asymmetric", "spherical"]
RANKINGS: tuple[Ranking, ...] = get_args(Ranking)
MAX_PARTITION_BYTES = 256 << 20

TopKPart = tuple[np.ndarray, np.ndarray]
RadiusPart = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Partition:
    """Adjoining chunks of an index version."""

    index: IndexRef
    chunks: tuple[CodeChunk, ...]
    tables: TablePartition | None = None
    """Its bucket tables, where a search is to use them."""

    @property
    def start(self) -> int:
        return self.chunks[0].start

    @property
    def stop(self) -> int:
        return self.chunks[-1].stop


def laid_out_bytes(index: Index) -> int:
    """Memory of all codes of an index once they are laid out for scanning."""
    return index.stored_rows * (4 if index.bits <= 32 else 8 * -(-index.bits // 64))


def partitions_of(index: Index, at_least: int, most_bytes: int = MAX_PARTITION_BYTES) -> list[Partition]:
    """All chunks in ``at_least`` partitions of similar size (as far as there are chunks), none over ``most_bytes``."""
    count = max(at_least, -(-laid_out_bytes(index) // most_bytes), 1)
    cuts = np.linspace(0, len(index.chunks), min(count, len(index.chunks)) + 1).astype(int).tolist()
    return [Partition(index.ref, index.chunks[low:high]) for low, high in itertools.pairwise(cuts)]


def with_tables(index: Index, parts: Sequence[TablePartition]) -> list[Partition]:
    """Partitions of an index as its bucket tables cut it."""
    return [Partition(index.ref, part.chunks, None if part.layout is None else part) for part in parts]


@dataclass(frozen=True, eq=False)
class ResidentCodes:
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

    @property
    def where(self) -> dict[str, Any]:
        """How the kernels are told about row numbers and deleted rows."""
        return {"first_row": self.start, "row_numbers": self.row_numbers, "live": self.live}

    def selected(self, selection: Selection) -> ResidentCodes:
        """The same codes, of which only selected ones are live."""
        live = selection.live(self.start, self.stop, self.row_numbers)
        return replace(self, live=live if self.live is None else live & self.live)

    def halves(self, count: int) -> list[ResidentCodes]:
        """The same codes in about ``count`` parts, without copies; bucket tables are not taken apart."""
        if self.tables is not None or count == 1:
            return [self]
        step = max(64, -(-self.block.n // (64 * count)) * 64)
        return [self._part(low, min(low + step, self.block.n)) for low in range(0, self.block.n, step)]

    def _part(self, low: int, high: int) -> ResidentCodes:
        numbers, live = (None if part is None else part[low:high] for part in (self.row_numbers, self.live))
        start = self.start + low if numbers is None else int(numbers[0])
        stop = self.start + high if numbers is None else int(numbers[-1]) + 1
        return ResidentCodes(self.block.part(low, high), start, stop, numbers, live)

    def packed(self) -> np.ndarray:
        """The codes (n, bytes) uint8 as they are stored."""
        words = np.ascontiguousarray(self.block.groups.transpose(0, 2, 1)).reshape(-1, self.block.groups.shape[1])
        return words.view(np.uint8)[: self.block.n, : -(-self.block.n_bits // 8)]


def load_partition(partition: Partition) -> ResidentCodes:
    """Read and check the codes of a partition and lay them out."""
    index = partition.index.open()
    chunks = partition.chunks
    codes = np.concatenate([index.read(chunk) for chunk in chunks])
    numbers, lives = [index.row_numbers(chunk) for chunk in chunks], [index.live(chunk) for chunk in chunks]
    row_numbers = live = None
    if any(part is not None for part in numbers):
        filled = zip(chunks, numbers, strict=True)
        row_numbers = np.concatenate([np.arange(c.start, c.stop) if part is None else part for c, part in filled])
    if any(part is not None for part in lives):
        sizes = [c.stop - c.start if part is None else len(part) for c, part in zip(chunks, numbers, strict=True)]
        live = np.concatenate(
            [np.ones(n, bool) if part is None else part for n, part in zip(sizes, lives, strict=True)]
        )
    block = lay_out(codes, index.bits)
    tables = None if partition.tables is None else open_tables(index, partition.tables, block)
    return ResidentCodes(block, partition.start, partition.stop, row_numbers, live, tables)


@dataclass(frozen=True, eq=False)
class QueryBatch:
    """Packed ``codes`` (q, bytes); ``weights`` (q, bits) for asymmetric distances, ``rows`` (q, m) to weigh."""

    codes: np.ndarray
    weights: np.ndarray | None = None
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.weights, self.rows) if part is not None)

    def __getitem__(self, part: slice) -> QueryBatch:
        return QueryBatch(*(None if a is None else a[part] for a in (self.codes, self.weights, self.rows)))  # type: ignore[arg-type]


class Question(Protocol):
    """What is asked of every partition."""

    def nothing(self, queries: QueryBatch, n_bits: int) -> Any:
        """The answer of an index without rows."""

    def answer(self, held: ResidentCodes, queries: QueryBatch, so_far: Any = None) -> Any:
        """The answer of one partition; ``so_far``, the answer of others, may spare it work."""

    def merge(self, parts: Sequence[Any]) -> Any:
        """One answer of several, for the same queries."""

    def join(self, parts: Sequence[Any]) -> Any:
        """One answer of several, for queries that follow each other."""


@dataclass(frozen=True)
class TopK:
    """(distances, rows) of the ``k`` nearest codes, each (q, min(k, live rows))."""

    k: int
    ranking: Ranking = "hamming"

    def nothing(self, queries: QueryBatch, n_bits: int) -> TopKPart:
        dtypes: dict[Ranking, Any] = {"hamming": np.int32, "asymmetric": np.int64, "spherical": np.float64}
        return np.empty((len(queries), 0), dtypes[self.ranking]), np.empty((len(queries), 0), np.int64)

    def answer(self, held: ResidentCodes, queries: QueryBatch, so_far: TopKPart | None = None) -> TopKPart:
        if self.ranking == "asymmetric":
            assert queries.weights is not None  # the Searcher adds them for this ranking
            return weighted_top_k(queries.codes, queries.weights, held.block, self.k, **held.where)
        if self.ranking == "spherical":
            return spherical_top_k(queries.codes, held.block, self.k, **held.where)
        limits = None
        if so_far is not None and so_far[0].shape[1] == self.k:
            limits = np.ascontiguousarray(so_far[0][:, -1])
        if held.tables is not None:
            return held.tables.top_k(queries.codes, self.k, **held.where, limits=limits)
        return hamming_top_k(queries.codes, held.block, self.k, **held.where, limits=limits)

    def merge(self, parts: Sequence[TopKPart]) -> TopKPart:
        return merge_top_k(parts, self.k)

    def join(self, parts: Sequence[TopKPart]) -> TopKPart:
        return np.concatenate([d for d, _ in parts]), np.concatenate([r for _, r in parts])


@dataclass(frozen=True)
class WithinRadius:
    """(indptr, distances, rows) of all codes at a Hamming distance of at most ``radius``."""

    radius: int

    def nothing(self, queries: QueryBatch, n_bits: int) -> RadiusPart:
        return np.zeros(len(queries) + 1, np.int64), np.empty(0, np.int32), np.empty(0, np.int64)

    def answer(self, held: ResidentCodes, queries: QueryBatch, so_far: Any = None) -> RadiusPart:
        if held.tables is not None:
            return held.tables.radius(queries.codes, self.radius, **held.where)
        return hamming_radius(queries.codes, held.block, self.radius, **held.where)

    def merge(self, parts: Sequence[RadiusPart]) -> RadiusPart:
        return merge_radius(parts)

    def join(self, parts: Sequence[RadiusPart]) -> RadiusPart:
        return join_radius(parts)


@dataclass(frozen=True)
class Histogram:
    """(q, bits + 1): how many codes lie at each Hamming distance."""

    def nothing(self, queries: QueryBatch, n_bits: int) -> np.ndarray:
        return np.zeros((len(queries), n_bits + 1), np.int64)

    def answer(self, held: ResidentCodes, queries: QueryBatch, so_far: Any = None) -> np.ndarray:
        return hamming_histogram(queries.codes, held.block, live=held.live)

    def merge(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.sum(parts, axis=0)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)


@dataclass(frozen=True)
class Weigh:
    """Asymmetric distances (q, m) of ``queries.rows`` (q, m); -1 for rows that another partition holds."""

    def nothing(self, queries: QueryBatch, n_bits: int) -> np.ndarray:
        return np.empty((len(queries), 0), np.int64)

    def answer(self, held: ResidentCodes, queries: QueryBatch, so_far: Any = None) -> np.ndarray:
        assert queries.rows is not None  # the Searcher adds both for this question
        assert queries.weights is not None
        places = queries.rows - held.start
        inside = (places >= 0) & (queries.rows < held.stop)
        if held.row_numbers is not None:
            places = np.searchsorted(held.row_numbers, queries.rows)
            inside &= held.row_numbers[np.minimum(places, held.block.n - 1)] == queries.rows
        codes = held.packed()[np.where(inside, places, 0)]
        return np.where(inside, weighted_pairs(queries.codes, queries.weights, codes), -1)

    def merge(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.max(parts, axis=0)

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)


def join_radius(parts: Sequence[RadiusPart]) -> RadiusPart:
    """Radius results of queries that follow each other as one."""
    lasts = np.cumsum([0, *(int(indptr[-1]) for indptr, _, _ in parts)])
    indptr = np.concatenate([[0], *(p[1:] + last for (p, _, _), last in zip(parts, lasts, strict=False))])
    return indptr.astype(np.int64), np.concatenate([d for _, d, _ in parts]), np.concatenate([r for _, _, r in parts])


def check_ranking(ranking: str) -> None:
    if ranking not in RANKINGS:
        raise UsageError(f"ranking {ranking!r} is not known; use one of {', '.join(RANKINGS)}")
