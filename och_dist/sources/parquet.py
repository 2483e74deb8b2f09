"""Reader of parquet files: one column of lists, one list a row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from och_dist.errors import BadInputError
from och_dist.sources.base import Opened, choose_dataset, missing_extra

MAGIC = b"PAR1"
BATCH_BYTES = 4 << 20
BUFFER_BYTES = 1 << 20


@contextmanager
def open_parquet(path: str) -> Iterator[Any]:
    """The open ParquetFile; errors of the library become BadInputError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing_extra("pyarrow", "parquet", path) from error
    with open(path, "rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise BadInputError(f"{path}: no parquet signature; expected a parquet file; check the format")
    try:
        # Without pre-buffering and with a stream buffer, memory does not grow with the row group.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInputError(f"{path}: not readable as parquet ({error}); fetch it again") from error


@contextmanager
def open_lists(path: str, dataset: str | None) -> Iterator[Opened]:
    """The named or only column of lists of numbers; ``dim`` is the length of the first list."""
    with open_parquet(path) as file:
        columns = _list_columns(file)
        name = choose_dataset(path, {k: str(v) for k, v in columns.items()}, dataset, kind="list column")
        dtype = np.dtype(columns[name].value_type.to_pandas_dtype())
        fixed = getattr(columns[name], "list_size", None)
        dim = fixed if fixed is not None else _first_length(file, name, path)

        def read(start: int, stop: int) -> np.ndarray:
            out = np.empty((stop - start, dim), dtype)
            size = max(1, BATCH_BYTES // (dim * dtype.itemsize))
            for row, column in column_slices(file, path, name, start, stop, size):
                out[row - start : row - start + len(column)] = _block(column, dim, path, name, row)
            return out

        yield Opened((file.metadata.num_rows, dim), dtype, read, name)


def _list_columns(file: Any) -> dict[str, Any]:
    """Arrow types of the columns that hold lists of numbers."""
    import pyarrow.types as types

    def is_list(kind: Any) -> bool:
        return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)

    def is_number(kind: Any) -> bool:
        return types.is_floating(kind) or types.is_integer(kind)

    kinds = {field.name: field.type for field in file.schema_arrow}
    return {name: kind for name, kind in kinds.items() if is_list(kind) and is_number(kind.value_type)}


def _first_length(file: Any, name: str, path: str) -> int:
    """Length of the list in row 0; 0 when the file has no rows."""
    for batch in file.iter_batches(batch_size=1, columns=[name], use_threads=False):
        if batch.num_rows:
            value = batch.column(name)[0]
            if not value.is_valid:
                raise _bad_row(path, name, 0, "is null")
            return len(value)
    return 0


def _bad_row(path: str, name: str, row: int, what: str) -> BadInputError:
    return BadInputError(
        f"{path}: row {row} of column {name!r} {what}; expected lists of one length, no nulls; repair it"
    )


def first_null(column: Any) -> int:
    """The place of the first null of an Arrow array that has one."""
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))


def _block(column: Any, dim: int, path: str, name: str, first_row: int) -> np.ndarray:
    """A batch's list column as (rows, dim); ``first_row`` is its row number in the file."""
    import pyarrow.compute as compute

    if column.null_count:
        raise _bad_row(path, name, first_row + first_null(column), "is null")
    lengths = compute.list_value_length(column).to_numpy(zero_copy_only=False)
    ragged = np.flatnonzero(lengths != dim)
    if ragged.size:
        row = int(ragged[0])
        raise _bad_row(path, name, first_row + row, f"has {lengths[row]} values instead of {dim}")
    values = column.flatten()
    if values.null_count:
        raise _bad_row(path, name, first_row + first_null(values) // dim, "holds a null value")
    return values.to_numpy(zero_copy_only=False).reshape(-1, dim)


def row_groups(file: Any, start: int, stop: int) -> tuple[list[int], int]:
    """The row groups that hold rows [start, stop), and the row number at which the first of them begins."""
    counts = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    ends = np.cumsum(counts, dtype=np.int64)
    low = int(np.searchsorted(ends, start, side="right"))
    high = int(np.searchsorted(ends, stop, side="left"))
    return list(range(low, high + 1)), int(ends[low] - counts[low])


def column_slices(file: Any, path: str, name: str, start: int, stop: int, size: int) -> Iterator[tuple[int, Any]]:
    """(first row, values) of rows [start, stop) of a column, ``size`` at a time; only their row groups are decoded."""
    groups, row = row_groups(file, start, stop)
    for batch in file.iter_batches(batch_size=size, row_groups=groups, columns=[name], use_threads=False):
        low, high = max(row, start), min(row + batch.num_rows, stop)
        if low < high:
            yield low, batch.column(name).slice(low - row, high - low)
        row += batch.num_rows
        if row >= stop:
            return
    raise BadInputError(f"{path}: ends at row {row}, {stop} were expected; fetch it again")
