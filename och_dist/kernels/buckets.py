"""Exact Hamming search that looks at few codes: multi-index hashing (Norouzi, Punjani and Fleet, 2014).

The bits of a code are cut into m substrings. A code within distance r of a query agrees with it, in at least one
substring, up to distance floor(r / m). So one table per substring lists the rows by the value of that substring, and
a search looks up the values about those of the query, at substring distance 0, then 1, and so on. After table a was
looked up at substring distance s, every code within s m + a has been met; the search ends when that reaches the k-th
distance, ties included.

A code may be met in several tables. It counts where it is met first, which can be told from its own substring
distances: nothing has to be marked.

A query that comes to cost more than a flat scan is given up and scanned flat, so that none costs more than about two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import comb, inf, log2

import numpy as np

from och_dist.errors import IntegrityError, UsageError
from och_dist.kernels import buckets_numba, hamming
from och_dist.kernels.buckets_numba import ROW_BITS, TableArrays
from och_dist.kernels.hamming import CodeBlock, Neighbours, Within, aligned, indptr_of, scan_words
from och_dist.kernels.packing import check_padding

MAX_SUBSTRING_BITS = 24
"""A table of 24 bits has 64 MB of offsets."""

BUCKET_ROWS = 64
"""Rows that an average bucket should hold: one group of codes, which costs about as much as finding it."""

MAX_ROWS = 1 << ROW_BITS
ALLOWANCE = 1.0
"""What a query may spend on tables, in flat scans, before it is scanned flat: no query costs more than about two."""

NO_LIVE = np.ones(0, dtype=np.bool_)


@dataclass(frozen=True)
class Costs:
    """Nanoseconds of one thread, measured by ``python -m benchmarks.multi_index --constants --rows 1000000 10000000``.

    A look-up finds a bucket; a group of 64 codes comes from memory and is compared; a match is a code within the k-th
    distance so far. The codes of a flat scan stay in the cache for many queries, and are read once for all of them.
    """

    query: float = 300.0
    lookup: float = 9.0
    group: float = 17.0
    group_byte: float = 0.036
    match: float = 25.0
    scan: float = 0.0037
    scan_byte: float = 0.003
    memory_byte: float = 0.013

    def of_group(self, n_bits: int) -> float:
        """Reading and comparing 64 codes."""
        return self.group + self.group_byte * 64 * code_bytes(n_bits)

    def of_scan(self, n_bits: int, rows: int, n_queries: int = 1000) -> float:
        """Scanning ``rows`` codes for one of ``n_queries`` that share the reading."""
        size = code_bytes(n_bits)
        return rows * (self.scan + self.scan_byte * size + self.memory_byte * size / n_queries)


COSTS = Costs()


def code_bytes(n_bits: int) -> int:
    """Bytes of a code as laid out for scanning."""
    return 4 if n_bits <= 32 else 8 * -(-n_bits // 64)


def substring_count(n_bits: int, n: int) -> int:
    """How many substrings suit n codes of ``n_bits``."""
    width = min(max(log2(max(n, 1) / BUCKET_ROWS), 6.0), MAX_SUBSTRING_BITS - 2.0)
    return max(-(-n_bits // MAX_SUBSTRING_BITS), min(n_bits, round(n_bits / width)), 1)


def cut_bits(n_bits: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """First bit and width, (count,) int64 each, of nearly equal substrings; the longer ones come first."""
    least = -(-n_bits // MAX_SUBSTRING_BITS)
    if not 1 <= least <= count <= n_bits:
        raise UsageError(
            f"{count} substrings of {n_bits} bits; use {least} to {n_bits}, so that each has 1 to "
            f"{MAX_SUBSTRING_BITS} bits"
        )
    widths = np.full(count, n_bits // count, dtype=np.int64)
    widths[: n_bits % count] += 1
    return np.cumsum(widths) - widths, widths


def sort_table(values: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """``rows`` (n,) uint32 sorted by (value, row) and ``offsets`` (2**width + 1,) uint32 of substring ``values`` (n,).

    The rows of value v are rows[offsets[v]:offsets[v + 1]].
    """
    if values.size >= MAX_ROWS:
        raise UsageError(f"{values.size} rows in one table; use partitions of fewer than {MAX_ROWS}")
    rows, offsets = np.empty(values.size, np.uint32), np.empty((1 << width) + 1, np.uint32)
    buckets_numba.sort_rows(values, offsets, rows)
    return rows, offsets


def read_substring(words: np.ndarray, start: int, width: int) -> np.ndarray:
    """Bits [start, start + width) of each code of ``words`` (n, w), as (n,) uint32."""
    values = np.empty(len(words), np.uint32)
    buckets_numba.substring_values(words, start, width, values)
    return values


@dataclass(frozen=True)
class BucketTables:
    """The tables of a block of codes. Made by :func:`make_tables`, or by :func:`join_tables` from stored ones."""

    block: CodeBlock
    arrays: TableArrays = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Memory in use, beside the block."""
        return int(sum(array.nbytes for array in self.arrays))

    def top_k(
        self,
        queries: np.ndarray,
        k: int,
        *,
        live: np.ndarray | None = None,
        limits: np.ndarray | None = None,
        allowance: float | None = ALLOWANCE,
    ) -> Neighbours:
        """The same as ``hamming_top_k`` of the block, bit for bit.

        ``allowance`` is what a query may spend here, in flat scans, before it is scanned flat; None never gives up.
        """
        hamming.check_k(k)
        bounds = hamming.check_limits(limits, len(queries), self.block.n_bits)
        shape = len(queries), min(int(k), self.block.count(live))
        distances, rows = np.full(shape, self.block.n_bits + 1, np.int32), np.full(shape, -1, np.int64)
        if not distances.size:
            check_padding(queries, self.block.n_bits, "queries")
            return distances, rows
        keys, indptr, finished, _ = self.search(queries, shape[1], bounds, live=live, allowance=allowance)
        filled = np.arange(shape[1]) < np.diff(indptr)[:, None]
        distances[filled], rows[filled] = keys >> ROW_BITS, keys & (MAX_ROWS - 1)
        if not finished.all():
            late = np.flatnonzero(~finished)
            limits = None if limits is None else limits[late]
            distances[late], rows[late] = hamming.hamming_top_k(queries[late], self.block, k, live=live, limits=limits)
        return distances, rows

    def radius(
        self, queries: np.ndarray, radius: int, *, live: np.ndarray | None = None, allowance: float | None = ALLOWANCE
    ) -> Within:
        """The same as ``hamming_radius`` of the block, bit for bit; ``allowance`` as in :meth:`top_k`."""
        hamming.check_radius(radius)
        n_live = self.block.count(live)
        bounds = np.full(len(queries), min(int(radius), self.block.n_bits), np.int64)
        keys, indptr, finished, _ = self.search(queries, max(1, n_live), bounds, live=live, allowance=allowance)
        found = indptr, (keys >> ROW_BITS).astype(np.int32), keys & (MAX_ROWS - 1)
        if finished.all():
            return found
        late = np.flatnonzero(~finished)
        return _interleave(found, hamming.hamming_radius(queries[late], self.block, radius, live=live), late)

    def search(
        self,
        queries: np.ndarray,
        wanted: int,
        bounds: np.ndarray,
        *,
        live: np.ndarray | None = None,
        allowance: float | None = ALLOWANCE,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Keys, indptr (q + 1,), finished (q,) and work (q, 3): look-ups, groups, matches; see ``search_tables``."""
        n_bits = self.block.n_bits
        words = np.array(scan_words(queries, n_bits))  # writable, or all would be compiled a second time
        budget = inf if allowance is None else allowance * COSTS.of_scan(n_bits, self.block.count(live))
        costs = np.array([COSTS.lookup, COSTS.of_group(n_bits), COSTS.match, budget])
        flags = NO_LIVE if live is None else np.ascontiguousarray(live)
        return buckets_numba.search_tables(
            words, self.arrays, wanted, np.ascontiguousarray(bounds, np.int64), flags, costs
        )


def make_tables(block: CodeBlock, count: int | None = None) -> BucketTables:
    """Sort the codes of ``block`` into tables, one for each of ``count`` substrings."""
    starts, widths = cut_bits(block.n_bits, count or substring_count(block.n_bits, block.n))
    words = block.groups.transpose(0, 2, 1).reshape(-1, block.groups.shape[1])[: block.n]
    parts = [
        sort_table(read_substring(words, start, width), int(width)) for start, width in zip(starts, widths, strict=True)
    ]
    return join_tables(block, [rows for rows, _ in parts], [offsets for _, offsets in parts])


def join_tables(block: CodeBlock, rows: list[np.ndarray], offsets: list[np.ndarray]) -> BucketTables:
    """Tables from their ``rows`` (n,) and ``offsets`` (2**width + 1,), one of each for every substring.

    What would lead a search astray in memory is refused with :class:`IntegrityError`; that each row is in its bucket
    is for the maker and the checksums to guarantee.
    """
    starts, widths = cut_bits(block.n_bits, len(rows))
    longest = 1 << int(widths[0])
    table_rows = np.empty((len(rows), block.n), np.uint32)
    table_offsets = np.full((len(rows), longest + 1), block.n, np.uint32)
    groups = aligned((len(rows), *block.groups.shape), block.groups.dtype)
    for a, (own_rows, own_offsets) in enumerate(zip(rows, offsets, strict=True)):
        _check_table(own_rows, own_offsets, block.n, 1 << int(widths[a]))
        table_rows[a] = own_rows
        table_offsets[a, : len(own_offsets)] = own_offsets
        buckets_numba.fill_table(block.groups, table_rows[a], groups[a])
    choose = np.array([[comb(int(width), weight) for weight in range(int(widths[0]) + 1)] for width in widths])
    return BucketTables(
        block, TableArrays(groups, table_rows, table_offsets, starts, widths, _masks(block, starts, widths), choose)
    )


def _masks(block: CodeBlock, starts: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """The bits of each substring, (m, w) words like those of ``block``."""
    bits = np.arange(8 * block.groups.itemsize * block.groups.shape[1])
    inside = (bits >= starts[:, None]) & (bits < (starts + widths)[:, None])
    return np.packbits(inside, axis=1, bitorder="little").view(block.groups.dtype)


def table_bytes(n_bits: int, n: int, count: int) -> int:
    """Memory of the tables of n codes, beside their block."""
    longest = -(-n_bits // count)
    return count * (-(-n // 64) * 64 * code_bytes(n_bits) + 4 * n + 4 * ((1 << longest) + 1))


def _check_table(rows: np.ndarray, offsets: np.ndarray, n: int, values: int) -> None:
    sound = rows.shape == (n,) and offsets.shape == (values + 1,)
    sound = sound and offsets[0] == 0 and offsets[-1] == n and bool(np.all(offsets[1:] >= offsets[:-1]))
    if not sound or (n and int(rows.max()) >= n):
        raise IntegrityError(f"a bucket table of {rows.shape[0]} rows does not fit {n} codes; build the tables again")


def _interleave(found: Within, scanned: Within, late: np.ndarray) -> Within:
    """``found`` with the results ``scanned`` put in for the queries ``late``, of which it holds nothing."""
    counts, more = np.diff(found[0]), np.diff(scanned[0])
    owners = np.concatenate([np.repeat(np.arange(len(counts)), counts), np.repeat(late, more)])
    order = np.argsort(owners, kind="stable")
    counts[late] = more
    distances, rows = (np.concatenate(pair)[order] for pair in zip(found[1:], scanned[1:], strict=True))
    return indptr_of(counts), distances, rows
