"""Ids from files: npy (integers or strings), text (one id per line) and parquet columns.

``open_ids`` looks at a file once, on the driver; ``read_ids`` reads a range of rows, on any worker that sees the same
path, and checks every id that it returns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from och_dist.errors import BadInputError, UsageError
from och_dist.sources.base import Opened, file_fingerprint, readable
from och_dist.sources.flat import open_npy
from och_dist.sources.parquet import column_slices, first_null, open_parquet
from och_dist.store import MAX_ID_BYTES

MARK_LINES = 1 << 16
SCAN_BYTES = 1 << 22
BATCH_ROWS = 1 << 16
KINDS = {"i": "int64", "u": "int64", "U": "string", "S": "string"}  # by the kind of the dtype in the file


@dataclass(frozen=True)
class IdFile:
    """One file of ids of a ``kind``, ``'int64'`` or ``'string'``; ``column`` names one of a parquet file."""

    path: str
    rows: int
    kind: str
    fingerprint: str
    mtime_ns: int
    column: str | None = None

    def describe(self) -> dict[str, Any]:
        return {"path": self.path, "column": self.column, "fingerprint": self.fingerprint}


def open_ids(path: str, *, column: str | None = None) -> IdFile:
    """Describe a file of ids; ``column`` names the column of a parquet file."""
    extension = os.path.splitext(path)[1].lower()
    if extension not in FORMATS or (extension == ".parquet") != (column is not None):
        raise UsageError(
            f"{path}: ids are read from .npy and .txt files, and from a named column of parquet vectors; "
            "give such a file, or --id-column"
        )
    with readable(path), FORMATS[extension](path, column) as found:
        kind = KINDS.get(found.dtype.kind)
        if kind is None or len(found.shape) != 1 or found.dtype.itemsize == 0:
            raise BadInputError(
                f"{path}: {found.dtype} of shape {found.shape}; expected integers or strings of shape (rows,)"
            )
        return IdFile(
            path, found.shape[0], kind, file_fingerprint(path, dataset=column), os.stat(path).st_mtime_ns, column
        )


def read_ids(source: IdFile, start: int, stop: int) -> np.ndarray:
    """Ids of rows [start, stop): int64 (m,), or UTF-8 bytes (m,) as NumPy strings, none empty, too long or with NUL."""
    extension = os.path.splitext(source.path)[1].lower()
    with readable(source.path), FORMATS[extension](source.path, source.column) as found:
        if (found.shape, KINDS.get(found.dtype.kind)) != ((source.rows,), source.kind):
            raise BadInputError(f"{source.path}: changed since it was opened; leave input files alone and start again")
        values = found.read(start, stop)
    return _as_int64(source, values, start) if source.kind == "int64" else _as_bytes(source, values, start)


def _as_int64(source: IdFile, values: np.ndarray, start: int) -> np.ndarray:
    largest = int(np.argmax(values)) if len(values) else None
    if largest is not None and int(values[largest]) > np.iinfo(np.int64).max:
        raise BadInputError(
            f"{source.path}: the id of row {start + largest} is {values[largest]}; expected at most 2^63 - 1; "
            "use strings"
        )
    return values.astype("<i8", copy=False)


def _as_bytes(source: IdFile, values: np.ndarray | list[str] | list[bytes], start: int) -> np.ndarray:
    """UTF-8 of str or bytes; a NUL would be lost in the padding."""
    out = []
    for row, value in enumerate(values.tolist() if isinstance(values, np.ndarray) else values, start):
        try:
            data = value.encode() if isinstance(value, str) else value
            data.decode()
        except UnicodeError:
            raise _bad_id(source.path, row, "is no valid Unicode") from None
        if b"\0" in data:
            raise _bad_id(source.path, row, "holds NUL")
        if not 1 <= len(data) <= MAX_ID_BYTES:
            raise _bad_id(source.path, row, f"has {len(data)} bytes")
        out.append(data)
    return np.array(out, dtype=np.bytes_)


def _bad_id(path: str, row: int, what: str) -> BadInputError:
    return BadInputError(
        f"{path}: the id of row {row} {what}; expected 1 to {MAX_ID_BYTES} bytes of UTF-8 without NUL; mend it"
    )


@contextmanager
def _open_text(path: str, column: str | None) -> Iterator[Opened]:
    """A text file of one id per line."""
    status = os.stat(path)
    rows, marks = _marks(path, status.st_size, status.st_mtime_ns)

    def read(start: int, stop: int) -> list[bytes]:
        wanted, mark = [], start // MARK_LINES
        with open(path, "rb") as stream:
            stream.seek(marks[mark])
            for row in range(mark * MARK_LINES, stop):
                line = stream.readline(MAX_ID_BYTES + 3)
                if not line.endswith(b"\n") and len(line) == MAX_ID_BYTES + 3:
                    raise _bad_id(path, row, f"has more than {MAX_ID_BYTES} bytes")
                if row >= start:
                    wanted.append(line.removesuffix(b"\n").removesuffix(b"\r"))
        return wanted

    yield Opened((rows,), np.dtype("S1"), read)


@lru_cache(maxsize=64)
def _marks(path: str, size: int, mtime_ns: int) -> tuple[int, tuple[int, ...]]:
    """(lines, places of every 65,536th line); a last line may lack its end. Each process looks once through a file."""
    lines, place, marks, ended = 0, 0, [0], True
    with open(path, "rb") as stream:
        while data := stream.read(SCAN_BYTES):
            ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
            for count in range(-lines % MARK_LINES or MARK_LINES, len(ends) + 1, MARK_LINES):
                marks.append(place + int(ends[count - 1]) + 1)
            lines, place, ended = lines + len(ends), place + len(data), data.endswith(b"\n")
    return lines + (not ended), tuple(marks)


@contextmanager
def _open_column(path: str, column: str | None) -> Iterator[Opened]:
    """A column of a parquet file."""
    with open_parquet(path) as file:
        import pyarrow.types as types

        kinds = {field.name: field.type for field in file.schema_arrow}
        if column not in kinds:
            raise BadInputError(f"{path}: no column {column!r}; expected one of {', '.join(kinds)}; name another")
        kind = kinds[column]
        is_integer, is_text = types.is_integer(kind), types.is_string(kind) or types.is_large_string(kind)
        if not (is_integer or is_text):
            raise BadInputError(f"{path}: column {column!r} is {kind}; expected integers or strings; name another")

        def read(start: int, stop: int) -> Any:
            parts = []
            for row, values in column_slices(file, path, str(column), start, stop, BATCH_ROWS):
                if values.null_count:
                    empty = row + first_null(values)
                    raise BadInputError(f"{path}: the id of row {empty} is null; expected an id; mend it")
                parts.append(values.to_numpy(zero_copy_only=False) if is_integer else values.to_pylist())
            return np.concatenate(parts) if is_integer else [text for part in parts for text in part]

        dtype = np.dtype(kind.to_pandas_dtype()) if is_integer else np.dtype("U1")
        yield Opened((file.metadata.num_rows,), dtype, read, column)


FORMATS = {".npy": open_npy, ".txt": _open_text, ".parquet": _open_column}
