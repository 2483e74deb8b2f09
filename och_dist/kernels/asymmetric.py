"""Nearest codes by finer distances than Hamming's: weighted by the query's scores, or by the spheres two codes share.

The asymmetric distance of a query to a code is the sum of the query's weights over the bits in which its own code
differs from the stored one. Weights are whole numbers, so that sums are exact and the order (distance, row) is total
and the same on every machine. The spherical distance is that of ``spheres``: |a xor b| / (|a and b| + 0.1).

Both scans compute bounds of 64 distances at a time by population counts. The bound of the asymmetric distance rounds
the weights down to 3 binary digits, each of which is a mask over the bits. Only where a bound is below the current
k-th distance is a code measured exactly, by one look-up for each byte in a table of 256 sums made for the query.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from och_dist.errors import BadInputError, UsageError
from och_dist.kernels.asymmetric_numba import (
    LARGEST_LEVEL,
    QUERY_TILE,
    fill_tables,
    measure_pairs,
    scan_spherical,
    scan_weighted,
)
from och_dist.kernels.code_vectors import PLANES
from och_dist.kernels.hamming import SAMPLE_STRIDE, CodeBlock, lay_out, live_bits, rows_to_scan, scan_words
from och_dist.kernels.packing import check_padding, pack_bits
from och_dist.kernels.spheres import MOST_LEVEL_BITS

__all__ = ["spherical_top_k", "weighted_pairs", "weighted_top_k", "whole_weights"]

Neighbours = tuple[np.ndarray, np.ndarray]
Scan = Callable[..., None]

WEIGHT_DIGITS = 19
"""Binary digits of the largest weight of a query: sums over 4,096 bits do not exceed 2**31."""

LARGEST_SUM = 2**32 - 1
"""Of all weights of a query: the tables are uint32."""

CLIP = 1.75
"""Weights beyond so many times the mean are not resolved by the bound: bits of large weight differ in far codes."""

GATHER_COST = 16
"""Codes scanned for one query in the time it takes to gather one."""

GUIDED_SHARE = 16
SAFETY = 3.0


def whole_weights(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights (q, r) int32 and scales (q,) float64 of real ``scores`` (q, r): |score| = weight * scale, rounded.

    The scale of a query is a power of two such that its largest weight has 19 binary digits, fewer where r exceeds
    4,096. Products with the scale are exact. A query whose scores are all 0 has the scale 1.
    """
    magnitudes = np.abs(scores)
    largest = magnitudes.max(axis=1, initial=0.0)
    digits = WEIGHT_DIGITS - max(0, (scores.shape[1] - 1).bit_length() - 12)
    _, exponents = np.frexp(largest)
    # Held at the smallest normal number: processors may treat smaller ones as zero.
    scales = np.where(largest > 0, np.ldexp(1.0, np.maximum(exponents - digits, -1022)), 1.0)
    return np.rint(magnitudes / scales[:, None]).astype(np.int32), scales


def weighted_top_k(
    queries: np.ndarray,
    weights: np.ndarray,
    block: CodeBlock | np.ndarray,
    k: int,
    *,
    n_bits: int | None = None,
    first_row: int = 0,
    row_numbers: np.ndarray | None = None,
    live: np.ndarray | None = None,
) -> Neighbours:
    """The rows of ``block`` at the smallest weighted distances from each of the packed ``queries`` (q, bytes) uint8.

    ``block`` is a CodeBlock, or packed codes (n, bytes) uint8 that are laid out first. ``weights`` (q, n_bits) are
    integers from 0, with sums below 2**32. ``n_bits``, if given, must be that of the codes.

    Returns distances (q, m) int64 and rows (q, m) int64, sorted by (distance, row), with m = min(k, live rows). Rows
    count from ``first_row``, or are looked up in ``row_numbers`` (n,), ascending. ``live`` (n,) bool marks the rows
    that count; all without it.
    """
    block = _laid_out(block, weights.shape[-1] if n_bits is None else n_bits)
    words = scan_words(queries, block.n_bits)
    _check_weights(weights, len(queries), block.n_bits)
    masks, steps = _bound_masks(weights)
    codes, weights = np.ascontiguousarray(queries), np.ascontiguousarray(weights, dtype=np.int64)

    def scan(some: np.ndarray, *rest: object) -> None:
        scan_weighted(words[some], masks[some], steps[some], codes[some], weights[some], *rest)

    # The largest distance is below 2**32: a limit beyond it excludes nothing.
    search = _Search(block, first_row, row_numbers, live, k, len(queries))
    return search.run(scan, np.int64(LARGEST_SUM + 1))


def weighted_pairs(queries: np.ndarray, weights: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Weighted distances (q, m) int64 of packed ``queries`` (q, bytes) to candidates of their own.

    ``codes`` (q, m, bytes) are those of the candidates; ``weights`` (q, n_bits) as for :func:`weighted_top_k`.
    """
    if codes.ndim != 3 or codes.dtype != np.uint8 or codes.shape[::2] != queries.shape:
        raise BadInputError(
            f"candidates are {codes.dtype} {codes.shape} for queries {queries.shape}; expected uint8 (queries, "
            "candidates, bytes): gather the codes of each query's candidates"
        )
    n_bits = int(weights.shape[-1])
    check_padding(queries, n_bits, "queries")
    _check_weights(weights, len(queries), n_bits)
    distances = np.empty(codes.shape[:2], dtype=np.int64)
    for start in range(0, len(codes), QUERY_TILE):
        tile = slice(start, start + QUERY_TILE)
        tables = np.empty((*queries[tile].shape, 256), dtype=np.uint32)
        own = np.ascontiguousarray(queries[tile]), np.ascontiguousarray(weights[tile], dtype=np.int64)
        fill_tables(*own, tables)
        measure_pairs(tables, np.ascontiguousarray(codes[tile]), distances[tile])
    return distances


def spherical_top_k(
    queries: np.ndarray,
    block: CodeBlock | np.ndarray,
    k: int,
    *,
    n_bits: int | None = None,
    first_row: int = 0,
    row_numbers: np.ndarray | None = None,
    live: np.ndarray | None = None,
) -> Neighbours:
    """As :func:`weighted_top_k`, by spherical distance; distances (q, m) are float64.

    A distance is 10 |a xor b| / (10 |a and b| + 1), rounded once: equal distances are equal numbers. ``n_bits`` is
    needed where ``block`` is an array.
    """
    if n_bits is None and not isinstance(block, CodeBlock):
        raise UsageError("n_bits=None with an array of codes; expected their number of bits: pass n_bits")
    block = _laid_out(block, n_bits)
    if block.n_bits > MOST_LEVEL_BITS:
        raise UsageError(f"n_bits={block.n_bits}; expected at most {MOST_LEVEL_BITS} bits for spherical distances")
    words = scan_words(queries, block.n_bits)

    def scan(some: np.ndarray, *rest: object) -> None:
        scan_spherical(words[some], *rest)

    return _Search(block, first_row, row_numbers, live, k, len(queries)).run(scan, np.float64(np.inf))


class _Search:
    """Which rows to scan and how to number them; the same for both distances."""

    def __init__(
        self,
        block: CodeBlock,
        first_row: int,
        numbers: np.ndarray | None,
        live: np.ndarray | None,
        k: int,
        n_queries: int,
    ) -> None:
        if k < 0:
            raise UsageError(f"k={k}; expected a number of neighbours of at least 0")
        self.block, self.live, self.row_numbers, self.n_live = rows_to_scan(
            block, first_row, numbers, live, n_queries, GATHER_COST
        )
        self.first_row = first_row
        self.n_queries, self.width = n_queries, min(int(k), self.n_live)

    def run(self, scan: Scan, no_limit: np.int64 | np.float64) -> Neighbours:
        """``scan(queries, groups, live bits, k, limits, distances, rows, found)`` over all rows, twice if need be."""
        distances = np.empty((self.n_queries, self.width), dtype=no_limit.dtype)
        rows = np.empty(distances.shape, dtype=np.int64)
        if not distances.size:
            return distances, rows
        bits = live_bits(self.block.n, self.live)
        limits = self._expected_limits(scan, no_limit)
        again = np.arange(self.n_queries)
        while again.size:
            # A query for which the sample promised too much is scanned once more, without a limit.
            part = distances[again], rows[again], np.empty(again.size, dtype=np.int64)
            scan(again, self.block.groups, bits, self.width, limits[again], *part)
            distances[again], rows[again] = part[:2]
            again = again[part[2] < self.width]
            limits[again] = no_limit
        # Rows are ascending, and a stable sort leaves them so within a distance.
        order = np.argsort(distances, axis=1, kind="stable")
        distances, rows = np.take_along_axis(distances, order, axis=1), np.take_along_axis(rows, order, axis=1)
        if self.row_numbers is not None:
            return distances, self.row_numbers[rows]
        return distances, rows + self.first_row

    def _expected_limits(self, scan: Scan, no_limit: np.int64 | np.float64) -> np.ndarray:
        """(q,) distances that about k live rows are expected to be below, from a sample of the codes."""
        block, limits = self.block, np.full(self.n_queries, no_limit)
        if block.sample is None or GUIDED_SHARE * self.width > self.n_live:
            return limits
        expected = self.width / SAMPLE_STRIDE
        rank = int(np.ceil(expected + SAFETY * np.sqrt(expected))) + 1
        bits = live_bits(-(-block.n // SAMPLE_STRIDE), None if self.live is None else self.live[::SAMPLE_STRIDE])
        distances = np.zeros((self.n_queries, rank), dtype=no_limit.dtype)
        rows, found = np.empty(distances.shape, dtype=np.int64), np.empty(self.n_queries, dtype=np.int64)
        scan(np.arange(self.n_queries), block.sample, bits, rank, limits, distances, rows, found)
        farthest = distances.max(axis=1)
        beyond = farthest + 1 if farthest.dtype == np.int64 else np.nextafter(farthest, np.inf)
        return np.where(found == rank, beyond, no_limit)


def _laid_out(block: CodeBlock | np.ndarray, n_bits: int | None) -> CodeBlock:
    if not isinstance(block, CodeBlock):
        return lay_out(block, n_bits or 0)
    if n_bits is not None and n_bits != block.n_bits:
        raise BadInputError(
            f"the codes have {block.n_bits} bits; expected {n_bits}: use codes and queries of one model"
        )
    return block


def _check_weights(weights: np.ndarray, n_queries: int, n_bits: int) -> None:
    if weights.shape != (n_queries, n_bits) or weights.dtype.kind not in "iu":
        raise BadInputError(
            f"weights are {weights.dtype} {weights.shape}; expected integers ({n_queries}, {n_bits}), one for each bit "
            "of each query: use query_weights of the model"
        )
    if weights.size and (weights.min() < 0 or weights.max() > LARGEST_SUM or weights.sum(axis=1).max() > LARGEST_SUM):
        raise BadInputError("weights are below 0 or add up to 2**32 or more; use query_weights of the model")


def _bound_masks(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Masks (q, PLANES, w) and steps (q,) int64 of weights rounded down.

    A weight is at least its step times the sum of 2**p over the planes p whose mask holds its bit.
    """
    mean = weights.mean(axis=1, dtype=np.float64)
    steps = np.maximum(1, np.ceil(CLIP / LARGEST_LEVEL * mean)).astype(np.int64)
    levels = np.minimum(weights // steps[:, None], LARGEST_LEVEL).astype(np.uint8)
    planes = [scan_words(pack_bits((levels >> plane & 1) > 0), weights.shape[1]) for plane in range(PLANES)]
    return np.stack(planes, axis=1), steps
