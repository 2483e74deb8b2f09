"""Count, mean and covariance of rows as mergeable sums, and the check for rows that cannot be summed.

The sums are taken of x - pilot, where the pilot is any vector near the mean (say the mean of the first rows):
without it the second moments of data far from the origin would lose their digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from scipy.linalg.blas import dsyrk

from och_dist.errors import BadInputError, ConflictError, NonFiniteError

COPIED_BYTES = 16 << 20
"""Rows in float64 that are multiplied at once."""

CONSTANT_RATIO = 2.0 * 8192 * float(np.finfo(np.float64).eps)
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
    """Moments about ``pilot`` (d,) of the rows of ``block`` (n, d), of which a few at a time are copied."""
    check_rows(block, len(pilot))
    d, total = len(pilot), np.zeros(len(pilot))
    outer, step = np.zeros((d, d), order="F"), max(1, COPIED_BYTES // (8 * max(d, 1)))
    for start in range(0, len(block), step):
        shifted = block[start : start + step].astype(np.float64)
        shifted -= pilot
        # The transpose of a C-ordered block is F-ordered, as BLAS wants it: no further copy.
        outer = dsyrk(1.0, shifted.T, beta=1.0, c=outer, overwrite_c=1)
        total += shifted.sum(axis=0)
    return Moments(len(block), pilot, total, outer)


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
