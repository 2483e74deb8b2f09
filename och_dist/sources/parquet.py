"""Reader of parquet files: one column of lists, one list a row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from och_dist.errors import BadInputError
from och_dist.sources.base import (
    Layout,
    VectorFile,
    accepted_dtype,
    check_unchanged,
    choose_dataset,
    missing_extra,
)

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


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _list_columns(file: Any) -> dict[str, Any]:
    """Arrow types of the columns that hold lists of numbers."""
    import pyarrow.types as types

    return {
        field.name: field.type
        for field in file.schema_arrow
        if _is_list(field.type)
        and (types.is_floating(field.type.value_type) or types.is_integer(field.type.value_type))
    }


def _dtype(kind: Any, path: str, name: str) -> str:
    return accepted_dtype(kind.value_type.to_pandas_dtype(), f"{path}:{name}")


def _first_length(file: Any, name: str, path: str) -> int:
    """Length of the list in row 0; 0 when the file has no rows."""
    for batch in file.iter_batches(batch_size=1, columns=[name], use_threads=False):
        if batch.num_rows:
            value = batch.column(name)[0]
            if not value.is_valid:
                raise _bad_row(path, name, 0, "is null")
            return len(value)
    return 0


def describe_parquet(path: str, dataset: str | None) -> Layout:
    """Layout of the named or only column of number lists; ``dim`` is the length of the first list."""
    with open_parquet(path) as file:
        columns = _list_columns(file)
        name = choose_dataset(path, {k: str(v) for k, v in columns.items()}, dataset, kind="list column")
        dtype = _dtype(columns[name], path, name)
        fixed = getattr(columns[name], "list_size", None)
        dim = fixed if fixed is not None else _first_length(file, name, path)
        return Layout(file.metadata.num_rows, int(dim), dtype, name)


def _bad_row(path: str, name: str, row: int, what: str) -> BadInputError:
    return BadInputError(
        f"{path}: row {row} of column {name!r} {what}; expected lists of one length, no nulls; repair it"
    )


def _block(column: Any, source: VectorFile, first_row: int) -> np.ndarray:
    """A batch's list column as (rows, dim); ``first_row`` is its row number in the file."""
    import pyarrow.compute as compute

    name = source.dataset or ""
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise _bad_row(source.path, name, first_row + row, "is null")
    lengths = compute.list_value_length(column).to_numpy(zero_copy_only=False)
    ragged = np.flatnonzero(lengths != source.dim)
    if ragged.size:
        row = int(ragged[0])
        what = f"has {lengths[row]} values instead of {source.dim}"
        raise _bad_row(source.path, name, first_row + row, what)
    values = column.flatten()
    if values.null_count:
        row = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0]) // source.dim
        raise _bad_row(source.path, name, first_row + row, "holds a null value")
    return values.to_numpy(zero_copy_only=False).reshape(-1, source.dim)


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


def read_parquet(source: VectorFile, start: int, stop: int) -> np.ndarray:
    """Rows of a list column."""
    out = np.empty((stop - start, source.dim), source.dtype)
    name = source.dataset or ""
    with open_parquet(source.path) as file:
        kind = _list_columns(file).get(name)
        dtype = _dtype(kind, source.path, name) if kind is not None else "nothing"
        check_unchanged(source, file.metadata.num_rows, source.dim, dtype)
        size = max(1, BATCH_BYTES // (source.dim * out.itemsize))
        for row, column in column_slices(file, source.path, name, start, stop, size):
            out[row - start : row - start + len(column)] = _block(column, source, row)
    return out
