"""Hamming distances between packed codes: nearest rows, rows within a radius, histograms.

Codes are laid out once (``lay_out``) and scanned often. Everything is exact, and results are in the total order
(distance, row).

A scan looks at 64 codes at a time and computes only whether one of them beats the current k-th distance; only then
is the group looked at code by code. For many rows a sample of them tells first what the k-th distance will be about,
so that few groups are looked at in vain; a query for which the sample promised too much is scanned again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import Any

import numpy as np

from och_dist.errors import UsageError
from och_dist.kernels import hamming_numba
from och_dist.kernels.packing import check_padding, check_words, code_words
from och_dist.kernels.simd import GROUP

Neighbours = tuple[np.ndarray, np.ndarray]
Within = tuple[np.ndarray, np.ndarray, np.ndarray]

GATHER_COST = 100
"""Codes scanned for one query in the time it takes to gather one; fewer where comparing takes longer."""

SAMPLE_STRIDE = 32
SAMPLE_FROM = 1 << 16
"""Blocks of at least so many codes have a sample, every 32nd code, that tells about the k-th distance."""

MIN_CODES_PER_NEIGHBOUR = 16
"""With fewer codes for each neighbour wanted nearly every group is looked at, whatever the sample says."""

SAFETY = 3.0
"""Standard deviations by which the rank taken in the sample exceeds the expected one: about one query in a thousand
is scanned a second time."""

CACHE_LINE = 64


@dataclass(frozen=True)
class CodeBlock:
    """``n`` codes of ``n_bits`` laid out for scanning: ``groups`` (ceil(n / 64), words, 64), word by word in a group.

    Made by ``lay_out``. ``sample`` has every 32nd code, or is nothing for small blocks.
    """

    groups: np.ndarray
    n: int
    n_bits: int
    sample: CodeBlock | None = field(repr=False, default=None)

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return int(self.groups.nbytes) + (0 if self.sample is None else self.sample.nbytes)

    @cached_property
    def _every(self) -> np.ndarray:
        """Made once: fresh memory for it would cost a single query a third of its scan."""
        return self.live_bits(np.ones(self.n, bool))

    def count(self, live: np.ndarray | None) -> int:
        """How many rows are ``live`` (n,) bool, which is checked; all without it."""
        if live is None:
            return self.n
        if live.shape != (self.n,) or live.dtype != bool:
            raise UsageError(
                f"live is {live.dtype} {live.shape}; expected bool ({self.n},), True for the rows that count"
            )
        return int(np.count_nonzero(live))

    def live_bits(self, live: np.ndarray | None) -> np.ndarray:
        """One uint64 for each group: which rows are ``live`` (n,) bool, all without it. None are beyond the last."""
        if live is None:
            return self._every
        flags = np.zeros(8 * len(self.groups), np.uint8)
        flags[: -(-self.n // 8)] = np.packbits(live, bitorder="little")
        return flags.view(np.uint64)

    def part(self, start: int, stop: int) -> CodeBlock:
        """The rows from ``start`` to ``stop``, without a copy of the codes; both are multiples of 64 (or n)."""
        if not 0 <= start <= stop <= self.n or start % GROUP or (stop % GROUP and stop != self.n):
            raise UsageError(f"rows {start} to {stop} of {self.n}; expected multiples of {GROUP} in ascending order")
        groups = self.groups[start // GROUP : -(-stop // GROUP)]
        return _block(groups, stop - start, self.n_bits)

    def take(self, rows: np.ndarray) -> CodeBlock:
        """The codes of ``rows`` (m,) int64, copied."""
        if rows.size and not (rows.min() >= 0 and rows.max() < self.n):
            raise UsageError(f"rows {rows.min()} to {rows.max()}; expected 0 to {self.n - 1}")
        words = np.empty((rows.size, self.groups.shape[1]), self.groups.dtype)
        hamming_numba.gather_rows(self.groups, rows.astype(np.int64, copy=False), words)
        return _lay_out_words(words, self.n_bits)


def lay_out(codes: np.ndarray, n_bits: int) -> CodeBlock:
    """Packed ``codes`` (n, ceil(n_bits / 8)) uint8 as a block for scanning."""
    return _lay_out_words(scan_words(codes, n_bits, "codes"), n_bits)


def hamming_top_k(
    queries: np.ndarray,
    block: CodeBlock,
    k: int,
    *,
    live: np.ndarray | None = None,
    limits: np.ndarray | None = None,
) -> Neighbours:
    """Nearest rows of ``block`` for each of the packed ``queries`` (q, bytes) uint8.

    Returns distances (q, m) int32 and rows (q, m) int64, sorted by (distance, row), with m = min(k, live rows).
    ``live`` (n,) bool marks the rows that count; all without it. ``limits`` (q,) are upper bounds already known for the
    k-th distance: rows beyond them are not found, and the place they leave at the end has distance n_bits + 1 and
    row -1.
    """
    words, beyond = scan_words(queries, block.n_bits), block.n_bits + 1
    bounds = check_limits(limits, len(words), block.n_bits) + 1

    def scan(some: slice | np.ndarray, groups: np.ndarray, live: np.ndarray, *rest: np.ndarray) -> np.ndarray:
        return hamming_numba.scan(words[some], groups, live, beyond, *rest)

    return scan_nearest(scan, block, k, live, bounds, np.int32(beyond), sample=limits is None)


def scan_nearest(
    scan: Callable[..., np.ndarray],
    block: CodeBlock,
    k: int,
    live: np.ndarray | None,
    bounds: np.ndarray,
    empty: np.generic,
    *,
    sample: bool = True,
    gather_cost: int = GATHER_COST,
) -> Neighbours:
    """Distances and rows (q, m) of the first k live rows below ``bounds`` (q,), from a ``scan`` of any distance.

    ``scan(some queries, groups, live bits, bounds, distances, rows)`` fills the last two, (q, k), and tells how many
    rows it found. Places without a row have the distance ``empty``, as large as any, and row -1. A scan of the sample
    first tells bounds below which about k rows lie; a query that has fewer there is scanned once more.
    """
    check_k(k)
    block, live, kept, n_live = rows_to_scan(block, live, len(bounds), gather_cost)
    shape = len(bounds), min(int(k), n_live)
    distances, rows = np.full(shape, empty), np.full(shape, -1, np.int64)
    if not distances.size:
        return distances, rows
    bits = block.live_bits(live)
    guess = _guessed_bounds(scan, block, live, bounds, shape[1], empty) if sample else None
    found = scan(slice(None), block.groups, bits, bounds if guess is None else guess, distances, rows)
    late = np.flatnonzero(found < shape[1]) if guess is not None else found[:0]
    if late.size:
        part = distances[late], rows[late]
        scan(late, block.groups, bits, bounds[late], *part)
        distances[late], rows[late] = part
    return distances, rows if kept is None else np.where(rows < 0, -1, kept[rows])


def hamming_radius(queries: np.ndarray, block: CodeBlock, radius: int, *, live: np.ndarray | None = None) -> Within:
    """All rows of ``block`` at a distance of at most ``radius`` from each of the packed ``queries`` (q, bytes).

    Returns indptr (q + 1,) int64, distances int32 and rows int64: query i has the entries indptr[i] to
    indptr[i + 1], sorted by (distance, row). ``live`` as for ``hamming_top_k``.
    """
    words = scan_words(queries, block.n_bits)
    check_radius(radius)
    block, live, kept, _ = rows_to_scan(block, live, len(words))
    limit = min(int(radius), block.n_bits) + 1
    counts, distances, rows = hamming_numba.within_radius(
        words, block.groups, block.live_bits(live), limit, block.n_bits + 1
    )
    return indptr_of(counts), distances, rows if kept is None else kept[rows]


def hamming_histogram(queries: np.ndarray, block: CodeBlock, *, live: np.ndarray | None = None) -> np.ndarray:
    """(q, n_bits + 1) int64: how many (live) codes lie at each distance from each of ``queries`` (q, bytes)."""
    words = scan_words(queries, block.n_bits)
    # At no cost rows are always gathered; where most are live, the dead ones, for these are less work to count.
    if live is not None and 2 * block.count(live) > block.n:
        dead = rows_to_scan(block, ~live, len(words), gather_cost=0)[0]
        return hamming_histogram(queries, block) - hamming_histogram(queries, dead)
    block = rows_to_scan(block, live, len(words), gather_cost=0)[0]
    return hamming_numba.histogram(words, block.groups, block.n, block.n_bits + 1)


def count_rows(
    query_words: np.ndarray, code_words: np.ndarray, rows: np.ndarray, first: int, n_bits: int
) -> np.ndarray:
    """(q, n_bits + 1) int64: how many of ``rows`` (q, k) lie at each distance from their query, whose words are in
    ``query_words`` (q, w) uint64; those are counted that have theirs in ``code_words`` (n, w), which begin at row
    ``first``."""
    check_words(query_words, n_bits)
    check_words(code_words, n_bits)
    if rows.ndim != 2 or len(rows) != len(query_words) or rows.dtype != np.int64:
        raise UsageError(f"rows are {rows.dtype} {rows.shape}; expected int64 ({len(query_words)}, k)")
    counts = np.zeros((len(rows), n_bits + 1), np.int64)
    words = np.ascontiguousarray(query_words), np.ascontiguousarray(code_words)
    hamming_numba.count_rows(*words, np.ascontiguousarray(rows), first, counts)
    return counts


def merge_top_k(parts: Sequence[Neighbours], k: int) -> Neighbours:
    """The first k of several results, each (distances (q, k_i), rows (q, k_i)) sorted by (distance, row).

    The width is min(k, sum of k_i). Row numbers of different parts must be disjoint.
    """
    _check_parts(parts, [len(distances) for distances, _ in parts])

    def merge(left: Neighbours, right: Neighbours) -> Any:
        width = min(k, left[0].shape[1] + right[0].shape[1])
        return hamming_numba.merge_two(*map(np.ascontiguousarray, (*left, *right)), width)

    distances, rows = reduce(merge, parts)
    return distances[:, :k], rows[:, :k]


def merge_radius(parts: Sequence[Within]) -> Within:
    """All of several results of ``hamming_radius`` for the same queries; row numbers of the parts are disjoint."""
    _check_parts(parts, [len(indptr) for indptr, _, _ in parts])
    counts = [np.diff(indptr) for indptr, _, _ in parts]
    owner = np.concatenate([np.repeat(np.arange(len(count)), count) for count in counts])
    distances, rows = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
    order = np.lexsort((rows, distances, owner))
    return indptr_of(np.sum(counts, axis=0)), distances[order], rows[order]


def _check_parts(parts: Sequence[Any], lengths: list[int]) -> None:
    if not parts:
        raise UsageError("no partial results to merge; expected at least one")
    if len(set(lengths)) != 1:
        raise UsageError("the partial results are of different numbers of queries; expected one and the same")


def scan_words(codes: np.ndarray, n_bits: int, name: str = "queries") -> np.ndarray:
    """Packed ``codes`` (n, bytes) as contiguous words (n, w) of the type that a block has: uint32 up to 32 bits."""
    check_padding(codes, n_bits, name)
    if n_bits > 32:
        return np.ascontiguousarray(code_words(codes))
    if codes.shape[1] == 4 and codes.flags.c_contiguous and codes.ctypes.data % 4 == 0:
        return codes.view(np.uint32)
    words = np.zeros((len(codes), 1), np.uint32)
    words.view(np.uint8)[:, : codes.shape[1]] = codes
    return words


def _lay_out_words(words: np.ndarray, n_bits: int) -> CodeBlock:
    n, width = words.shape
    groups = aligned((-(-n // GROUP), width, GROUP), words.dtype)
    hamming_numba.fill_groups(words, groups)
    return _block(groups, n, n_bits)


def _block(groups: np.ndarray, n: int, n_bits: int) -> CodeBlock:
    block = CodeBlock(groups, n, n_bits)
    return block if n < SAMPLE_FROM else replace(block, sample=block.take(np.arange(0, n, SAMPLE_STRIDE)))


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Like numpy.empty, beginning at a cache line: vectors that straddle two lines load at half the speed."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + size].view(dtype).reshape(shape)


def check_k(k: int) -> None:
    if k < 0:
        raise UsageError(f"k={k}; expected a number of neighbours of at least 0")


def check_radius(radius: int) -> None:
    if radius < 0:
        raise UsageError(f"radius={radius}; expected a distance of at least 0")


def check_limits(limits: np.ndarray | None, n_queries: int, n_bits: int) -> np.ndarray:
    """Distances (q,) int64 from -1 to ``n_bits``, the largest without ``limits``."""
    if limits is None:
        return np.full(n_queries, n_bits, np.int64)
    if limits.shape != (n_queries,):
        raise UsageError(f"limits have shape {limits.shape}; expected one for each of {n_queries} queries")
    return np.clip(limits.astype(np.int64), -1, n_bits)


def indptr_of(counts: np.ndarray) -> np.ndarray:
    """Where the results of each query begin (q + 1,) int64, if it has so many."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def rows_to_scan(
    block: CodeBlock, live: np.ndarray | None, n_queries: int, gather_cost: int = GATHER_COST
) -> tuple[CodeBlock, np.ndarray | None, np.ndarray | None, int]:
    """(block, live, rows of the block as they were numbered, live rows) to go through, after a check of ``live``.

    Live rows are gathered first where that pays; else dead ones are sorted out on sight.
    """
    n_live = block.count(live)
    if live is not None and gather_cost * n_live < n_queries * (block.n - n_live):
        kept = np.flatnonzero(live)
        return block.take(kept), None, kept, n_live
    return block, live, None, n_live


def _guessed_bounds(
    scan: Callable[..., np.ndarray],
    block: CodeBlock,
    live: np.ndarray | None,
    bounds: np.ndarray,
    k: int,
    empty: np.generic,
) -> np.ndarray | None:
    """(q,) bounds that about k live rows are expected to be below, somewhat more rather than fewer; None where a sample
    tells little."""
    if block.sample is None or MIN_CODES_PER_NEIGHBOUR * k > block.n:
        return None
    expected = k / SAMPLE_STRIDE
    rank = int(np.ceil(expected + SAFETY * np.sqrt(expected))) + 1
    bits = block.sample.live_bits(None if live is None else live[::SAMPLE_STRIDE])
    distances = np.full((len(bounds), rank), empty)
    scan(slice(None), block.sample.groups, bits, bounds, distances, np.empty(distances.shape, np.int64))
    farthest = distances.max(axis=1)
    beyond = farthest + np.int64(1) if farthest.dtype.kind == "i" else np.nextafter(farthest, np.inf)
    return np.minimum(beyond, bounds)
