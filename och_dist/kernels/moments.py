"""Count, mean and covariance of rows as mergeable sums, and the check for rows that cannot be summed.

The sums are taken of x - pilot, where the pilot is any vector near the mean (say the mean of the first rows):
without it the second moments of data far from the origin would lose their digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from typing import NoReturn

import numpy as np
from scipy.linalg.blas import dsyrk

from och_dist.errors import BadInputError, ConflictError, NonFiniteError

BLOCK_BYTES = 16 << 20
MOST_ROWS = 4096
"""A block is summed at once: at most so many rows, and so many bytes of them in float64."""

CONSTANT_RATIO = 2.0 * MOST_ROWS * float(np.finfo(np.float64).eps)
"""Worst relative error of a sum of so many equal terms, doubled for the square of the mean."""

ROWS_PER_BLOCK = 1024
"""Rows that are computed with at a time: the only memory that most kernels need beside input and output."""

LISTED_ROWS = 10
"""Rows named in the message about rows that are not finite."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over ``count`` rows of y = x - pilot, float64: ``total`` (d,) of y, ``outer`` (d, d) the upper triangle of
    the sum of y y^T, zeros below it."""

    count: int
    pilot: np.ndarray
    total: np.ndarray
    outer: np.ndarray

    def merge(self, other: Moments) -> Moments:
        """Moments of the rows of both; the pilots must be the same."""
        if not np.array_equal(self.pilot, other.pilot):
            raise ConflictError("two moments have different pilots; expected one: use the same pilot for all blocks")
        return Moments(self.count + other.count, self.pilot, self.total + other.total, self.outer + other.outer)

    @property
    def mean(self) -> np.ndarray:
        """(d,) float64."""
        return self.pilot + self.total / self._positive_count()

    @property
    def covariance(self) -> np.ndarray:
        """(d, d) float64, symmetric, divided by the count (not by count - 1).

        A variance within the rounding error of its own sums (``CONSTANT_RATIO`` of the second moment
        about the pilot) is that of a constant dimension and becomes exactly zero, together with its row
        and column.
        """
        n = self._positive_count()
        shift = self.total / n
        second = (self.outer + np.triu(self.outer, 1).T) / n
        covariance = second - np.outer(shift, shift)
        noise = CONSTANT_RATIO * np.diag(second)
        constant = np.diag(covariance) <= noise
        covariance[constant, :] = 0.0
        covariance[:, constant] = 0.0
        return covariance

    def _positive_count(self) -> int:
        if self.count == 0:
            raise BadInputError("the moments cover no rows; expected at least one: use a corpus that is not empty")
        return self.count


def block_moments(block: np.ndarray, pilot: np.ndarray) -> Moments:
    """Moments about ``pilot`` (d,) of the rows of ``block`` (n, d), by way of a copy in float64."""
    check_rows(block, len(pilot))
    shifted = block.astype(np.float64)
    shifted -= pilot
    # The transpose of a C-ordered block is F-ordered, as BLAS wants it: no further copy.
    outer = dsyrk(1.0, shifted.T) if len(block) else np.zeros((len(pilot), len(pilot)))
    return Moments(len(block), pilot, shifted.sum(axis=0), outer)


def rows_per_block(d: int) -> int:
    """A power of two, so that the usual chunks of a corpus are whole blocks."""
    rows = max(1, min(MOST_ROWS, BLOCK_BYTES // (8 * max(d, 1))))
    return 1 << (rows.bit_length() - 1)


@dataclass(eq=False)
class MomentSums:
    """Moments in the making, the same to the last bit however the rows are cut and in whatever order they come.

    Blocks begin at multiples of ``rows_per_block`` by global row number. They are added in pairs, pairs of pairs and so
    on, which their numbers alone decide. What a cut leaves of a block waits as rows until the rest of it comes.
    """

    pilot: np.ndarray
    nodes: dict[tuple[int, int], Moments] = field(default_factory=dict)
    """By (level, number): the moments of 2^level blocks."""
    parts: dict[int, dict[int, np.ndarray]] = field(default_factory=dict)
    """By number of the block and first row: rows (n, d)."""

    def add(self, rows: np.ndarray, first_row: int) -> None:
        """Add ``rows`` (n, d) as they are numbered from ``first_row`` on; each row may come once."""
        size, stop = rows_per_block(len(self.pilot)), first_row + len(rows)
        for start in range(first_row - first_row % size, stop, size) if len(rows) else ():
            low = max(start, first_row)
            self._add_part(start // size, low, rows[low - first_row : min(start + size, stop) - first_row])

    def merge(self, other: MomentSums) -> MomentSums:
        """Those of the rows of both."""
        merged = MomentSums(self.pilot, dict(self.nodes), {block: dict(rows) for block, rows in self.parts.items()})
        for (level, number), moments in other.nodes.items():
            merged._add_node(level, number, moments)
        for number, parts in other.parts.items():
            for first_row, rows in parts.items():
                merged._add_part(number, first_row, rows)
        return merged

    def total(self) -> Moments:
        """Moments of all rows, once these are there from the first to the last."""
        ends = [(number, _joined(parts)) for number, parts in sorted(self.parts.items())]
        if not self.nodes and not ends:
            return block_moments(np.empty((0, len(self.pilot))), self.pilot)
        found = {number << level: moments for (level, number), moments in self.nodes.items()}
        found |= {number: block_moments(rows, self.pilot) for number, rows in ends}
        return reduce(Moments.merge, (found[number] for number in sorted(found)))

    def _add_part(self, number: int, first_row: int, rows: np.ndarray) -> None:
        size, parts = rows_per_block(len(self.pilot)), self.parts.pop(number, {})
        if len(rows) < size:
            parts[first_row] = rows.copy()  # not the chunk that it is a view of
            if sum(map(len, parts.values())) < size:
                self.parts[number] = parts
                return
            rows = _joined(parts)
        self._add_node(0, number, block_moments(rows, self.pilot))

    def _add_node(self, level: int, number: int, moments: Moments) -> None:
        while (sibling := self.nodes.pop((level, number ^ 1), None)) is not None:
            moments, level, number = sibling.merge(moments), level + 1, number >> 1
        self.nodes[level, number] = moments


def _joined(parts: dict[int, np.ndarray]) -> np.ndarray:
    return np.concatenate([parts[first_row] for first_row in sorted(parts)])


def nonfinite_rows(block: np.ndarray) -> np.ndarray:
    """Local numbers (m,) int64, ascending, of the rows of ``block`` (n, d) that hold NaN or infinity."""
    if block.dtype.kind in "iub" or block.size == 0:
        return np.empty(0, dtype=np.int64)
    step = max(1, (1 << 20) // block.shape[1])
    finite = [np.isfinite(block[start : start + step]).all(axis=1) for start in range(0, block.shape[0], step)]
    return np.flatnonzero(~np.concatenate(finite)).astype(np.int64)


def check_finite(block: np.ndarray, *, first_row: int = 0, what: str = "rows") -> None:
    """Raise ``NonFiniteError`` naming the rows of ``block`` (n, d), counted from ``first_row``, that hold
    NaN or infinity."""
    local = nonfinite_rows(block)
    if local.size == 0:
        return
    listed = tuple(int(first_row + row) for row in local[:LISTED_ROWS])
    more = "" if local.size <= LISTED_ROWS else ", ..."
    raise NonFiniteError(
        f"{local.size} {what} hold NaN or infinity ({', '.join(map(str, listed))}{more}); "
        "expected finite numbers: ingest with --nonfinite=drop, or correct the source",
        listed,
        int(local.size),
    )


def check_rows(block: np.ndarray, d: int) -> None:
    """Raise ``BadInputError`` unless ``block`` is (n, d) of a dtype that float32 or float64 holds exactly."""
    if block.ndim != 2 or block.shape[1] != d:
        raise BadInputError(f"the rows have shape {block.shape}; expected (n, {d}): use vectors of dimension {d}")
    if block.dtype.str[1:] not in ("f2", "f4", "f8", "u1", "i1"):
        raise BadInputError(
            f"the rows have dtype {block.dtype}; expected float16, float32, float64, uint8 or int8: convert them"
        )


def refuse_row(block: np.ndarray, first_row: int, row: int, overflow: str) -> NoReturn:
    """Name all rows of ``block`` (n, d) with NaN or infinity; without any, the ``row`` that ``overflow`` is about."""
    check_finite(block, first_row=first_row)
    raise BadInputError(f"{overflow.format(first_row + row)}: scale the vectors down or drop the row")


def float_blocks(block: np.ndarray, d: int, size: int = ROWS_PER_BLOCK) -> Iterator[tuple[slice, np.ndarray]]:
    """The rows of ``block`` (n, d), checked, some at a time: their place and, as contiguous floats, the rows."""
    check_rows(block, d)
    for start in range(0, len(block), size):
        place = slice(start, min(start + size, len(block)))
        yield place, as_float_rows(block[place])


def as_float_rows(rows: np.ndarray) -> np.ndarray:
    """``rows`` as contiguous native float32 without loss of a bit, or float64 where the source is float64."""
    return np.ascontiguousarray(rows, dtype=np.float64 if rows.dtype.str[1:] == "f8" else np.float32)
