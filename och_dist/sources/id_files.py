"""Ids from files: npy (integers or strings), text (one id per line) and parquet columns.

``open_ids`` looks at a file once, on the driver; ``read_ids`` reads a range of rows, on any worker that sees the same
path, and checks every id that it returns.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from och_dist.errors import BadInputError, UsageError
from och_dist.sources.base import file_fingerprint, read_exactly
from och_dist.sources.flat import npy_header
from och_dist.sources.parquet import column_slices, open_parquet
from och_dist.store import MAX_ID_BYTES

MARK_LINES = 1 << 16
SCAN_BYTES = 1 << 22
BATCH_ROWS = 1 << 16
FORMATS = {".npy": "npy", ".txt": "text", ".parquet": "parquet"}


@dataclass(frozen=True)
class IdFile:
    """One file of ids, small and picklable. ``marks`` are the places in a text file of line ``first_mark`` * 65,536 and
    of every 65,536th after it."""

    path: str
    format: str
    rows: int
    kind: str
    fingerprint: str
    mtime_ns: int
    column: str | None = None
    marks: tuple[int, ...] = ()
    first_mark: int = 0

    def cut(self, start: int, stop: int) -> IdFile:
        """The same file with no more marks than rows [start, stop) need."""
        if not self.marks:
            return self
        low, high = start // MARK_LINES, -(-stop // MARK_LINES)
        return replace(self, marks=self.marks[low - self.first_mark : high - self.first_mark], first_mark=low)

    def describe(self) -> dict[str, Any]:
        return {"path": self.path, "column": self.column, "fingerprint": self.fingerprint}


def open_ids(path: str, *, column: str | None = None) -> IdFile:
    """Describe a file of ids; ``column`` names the column of a parquet file."""
    extension = os.path.splitext(path)[1].lower()
    kind = FORMATS.get(extension)
    if kind is None or (kind == "parquet") != (column is not None):
        raise UsageError(
            f"{path}: ids are read from .npy and .txt files, and from a named column of parquet vectors; "
            "give such a file, or --id-column"
        )
    try:
        fingerprint = file_fingerprint(path, dataset=column)
        mtime_ns = os.stat(path).st_mtime_ns
        marks: tuple[int, ...] = ()
        if kind == "npy":
            rows, of = _describe_npy(path)
        elif kind == "text":
            rows, marks = _describe_text(path)
            of = "string"
        else:
            rows, of = _describe_parquet(path, str(column))
    except OSError as error:
        raise _unreadable(path, error) from error
    return IdFile(path, kind, rows, of, fingerprint, mtime_ns, column, marks)


def read_ids(source: IdFile, start: int, stop: int) -> np.ndarray:
    """Ids of rows [start, stop): int64 (m,), or UTF-8 bytes (m,) as NumPy strings, none empty, too long or with NUL."""
    reader = {"npy": _read_npy, "text": _read_text, "parquet": _read_parquet}[source.format]
    try:
        values = reader(source, start, stop)
    except OSError as error:
        raise _unreadable(source.path, error) from error
    if source.kind == "int64":
        return values
    lengths = np.strings.str_len(values)
    wrong = np.flatnonzero((lengths == 0) | (lengths > MAX_ID_BYTES))
    if len(wrong):
        raise _bad_id(source, start + int(wrong[0]), f"has {lengths[wrong[0]]} bytes")
    return values


def _bad_id(source: IdFile, row: int, what: str) -> BadInputError:
    return BadInputError(
        f"{source.path}: the id of row {row} {what}; expected 1 to {MAX_ID_BYTES} bytes of UTF-8 without NUL; mend it"
    )


def _unreadable(path: str, error: OSError) -> BadInputError:
    reason = error.strerror or str(error)
    return BadInputError(f"{path}: cannot be read ({reason}); expected a file of ids that all workers see")


def _changed(source: IdFile) -> BadInputError:
    return BadInputError(f"{source.path}: changed since it was opened; leave input files alone and start again")


def _describe_npy(path: str) -> tuple[int, str]:
    shape, _, dtype, offset = npy_header(path)
    if len(shape) != 1 or dtype.kind not in "iuU" or dtype.itemsize == 0:
        raise BadInputError(f"{path}: {dtype} of shape {shape}; expected integers or strings of shape (rows,)")
    if offset + shape[0] * dtype.itemsize != os.path.getsize(path):
        raise BadInputError(f"{path}: its size is not what its header promises; write it again")
    return int(shape[0]), "string" if dtype.kind == "U" else "int64"


def _read_npy(source: IdFile, start: int, stop: int) -> np.ndarray:
    shape, _, dtype, offset = npy_header(source.path)
    if shape != (source.rows,) or (dtype.kind == "U") != (source.kind == "string"):
        raise _changed(source)
    values = np.empty(stop - start, dtype)
    with open(source.path, "rb", buffering=0) as stream:
        stream.seek(offset + start * dtype.itemsize)
        read_exactly(stream, values.view(np.uint8), source.path)
    if dtype.kind != "U":
        return _as_int64(source, values, start)
    return _encoded(source, values.tolist(), start)


def _as_int64(source: IdFile, values: np.ndarray, start: int) -> np.ndarray:
    if values.dtype.kind == "u" and values.dtype.itemsize == 8 and len(values):
        row = int(np.argmax(values))
        if int(values[row]) > np.iinfo(np.int64).max:
            raise BadInputError(
                f"{source.path}: the id of row {start + row} is {values[row]}; expected at most 2^63 - 1; use strings"
            )
    return values.astype("<i8")


def _encoded(source: IdFile, values: list[Any], start: int) -> np.ndarray:
    """UTF-8 of str or bytes; a NUL would be lost in the padding."""
    out = []
    for row, value in enumerate(values, start):
        try:
            data = value.encode() if isinstance(value, str) else value
            data.decode()
        except UnicodeError:
            raise _bad_id(source, row, "is no valid Unicode") from None
        if b"\0" in data:
            raise _bad_id(source, row, "holds NUL")
        out.append(data[: MAX_ID_BYTES + 1])  # one more tells that it is too long
    return np.array(out, dtype=np.bytes_) if out else np.empty(0, "S1")


def _describe_text(path: str) -> tuple[int, tuple[int, ...]]:
    """(lines, places of every 65,536th line); a last line may lack its end."""
    lines, place, marks, ended = 0, 0, [0], True
    with open(path, "rb") as stream:
        while data := stream.read(SCAN_BYTES):
            ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
            for count in range(-lines % MARK_LINES or MARK_LINES, len(ends) + 1, MARK_LINES):
                marks.append(place + int(ends[count - 1]) + 1)
            lines, place, ended = lines + len(ends), place + len(data), data.endswith(b"\n")
    return lines + (not ended), tuple(marks)


def _read_text(source: IdFile, start: int, stop: int) -> np.ndarray:
    mark = start // MARK_LINES
    wanted: list[bytes] = []
    with open(source.path, "rb") as stream:
        stream.seek(source.marks[mark - source.first_mark])
        for row in range(mark * MARK_LINES, stop):
            line = stream.readline(MAX_ID_BYTES + 3)
            if not line:
                raise _changed(source)
            if not line.endswith(b"\n") and len(line) == MAX_ID_BYTES + 3:
                raise _bad_id(source, row, f"has more than {MAX_ID_BYTES} bytes")
            if row >= start:
                wanted.append(line.removesuffix(b"\n").removesuffix(b"\r"))
    return _encoded(source, wanted, start)


def _describe_parquet(path: str, column: str) -> tuple[int, str]:
    import pyarrow.types as types

    with open_parquet(path) as file:
        kinds = {field.name: field.type for field in file.schema_arrow}
        if column not in kinds:
            raise BadInputError(f"{path}: no column {column!r}; expected one of {', '.join(kinds)}; name another")
        kind = kinds[column]
        if types.is_integer(kind):
            return int(file.metadata.num_rows), "int64"
        if types.is_string(kind) or types.is_large_string(kind):
            return int(file.metadata.num_rows), "string"
    raise BadInputError(f"{path}: column {column!r} is {kind}; expected integers or strings; name another column")


def _read_parquet(source: IdFile, start: int, stop: int) -> np.ndarray:
    parts, name = [], source.column or ""
    with open_parquet(source.path) as file:
        if file.metadata.num_rows != source.rows:
            raise _changed(source)
        for row, column in column_slices(file, source.path, name, start, stop, BATCH_ROWS):
            if column.null_count:
                empty = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
                raise BadInputError(f"{source.path}: the id of row {row + empty} is null; expected an id; mend it")
            if source.kind == "int64":
                parts.append(_as_int64(source, column.to_numpy(zero_copy_only=False), row))
            else:
                parts.append(_encoded(source, column.to_pylist(), row))
    return np.concatenate(parts)
