"""Readers of foreign formats: fvecs and bvecs (TEXMEX records), npy, HDF5, MATLAB, parquet, Zarr, and lines of text.

The reader of a format is a context manager of ``(path, dataset)`` that gives an :class:`Opened`. It checks the file,
but not whether shape and dtype are of use. Optional dependencies are imported where they are used, so that the other
formats work without them.
"""

from __future__ import annotations

import functools
import math
import os
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from typing import Any

import numpy as np

from och_dist.errors import BadInputError, IntegrityError, UsageError
from och_dist.store import MAX_ID_BYTES, open_array, open_objects

ACCEPTED_DTYPES = ("float16", "float32", "float64", "uint8", "int8")
VECS_DTYPES = {"fvecs": "<f4", "bvecs": "|u1"}
VECS_HEADS = 17
BLOCK_BYTES = 1 << 20
HEAD_BYTES = 4

# NumPy parses a header as Python text: a hostile one may also end in the tokenizer, or nest too deep for the parser.
HEADER_ERRORS = (ValueError, TypeError, SyntaxError, EOFError, MemoryError, RecursionError, tokenize.TokenError)


@dataclass(frozen=True)
class Opened:
    """An open file: the shape and dtype of what it holds, and what reads rows [start, stop) as they lie there.

    ``dataset`` is the name that was chosen, in a file that holds arrays by name.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int, int], Any]
    dataset: str | None = None


def is_accepted(dtype: Any) -> bool:
    """True for float16, float32, float64, uint8 and int8 of either byte order."""
    return np.dtype(dtype).newbyteorder("=").name in ACCEPTED_DTYPES


def choose_dataset(path: str, candidates: Mapping[str, str], wanted: str | None, *, kind: str) -> str:
    """The name to read: the wanted one, else the only candidate.

    ``candidates`` maps each usable name to a short description of it, shown when the choice is not clear;
    a wanted name outside of them is refused.
    """
    if wanted is not None and wanted in candidates:
        return wanted
    if wanted is None and len(candidates) == 1:
        return next(iter(candidates))
    listed = ", ".join(f"{name} ({what})" for name, what in candidates.items()) or "none"
    if wanted is not None:
        raise BadInputError(f"{path}: no usable {kind} {wanted!r}; usable here: {listed}; name one of these")
    raise BadInputError(
        f"{path}: {len(candidates)} usable {kind}s, expected exactly one: {listed}; choose with dataset="
    )


def missing_extra(module: str, extra: str, path: str) -> UsageError:
    """The error for a format whose optional dependency is not installed."""
    return UsageError(f"{path}: reading it needs {module}; install it with pip install 'och-dist[{extra}]'")


def read_into(stream: BufferedReader, values: np.ndarray, path: str) -> None:
    """Fill the C-contiguous array ``values``; BadInputError when the file ends."""
    missing = values.nbytes - stream.readinto(values.data)
    if missing:
        raise BadInputError(f"{path}: the file ends {missing} bytes early; it was cut short; fetch it again")


# Flat files


@contextmanager
def open_vecs(path: str, dataset: str | None, *, kind: str) -> Iterator[Opened]:
    """An fvecs or bvecs file: records of an int32 ``dim`` and ``dim`` values.

    The heads of 17 records spread over the file are checked here, those of all that are read later.
    """
    dtype = np.dtype(VECS_DTYPES[kind])
    with open(path, "rb") as stream:

        def check_head(row: int, found: int) -> None:
            if found != dim:
                raise BadInputError(
                    f"{path}: row {row} announces {found} values, row 0 announces {dim}; expected one length; "
                    "the file is damaged or of another format, fetch it again"
                )

        def read_head(row: int) -> int:
            stream.seek(row * record)
            return int.from_bytes(stream.read(HEAD_BYTES), "little", signed=True)

        def read(start: int, stop: int) -> np.ndarray:
            # Through a block that stays in cache: one pass over memory, no second copy of the whole range.
            out = np.empty((stop - start, dim), dtype)
            out_bytes = out.view(np.uint8)
            step = max(1, BLOCK_BYTES // record)
            block = np.empty((min(step, stop - start), record), np.uint8)
            stream.seek(start * record)
            for low in range(start, stop, step):
                records = block[: stop - low]
                read_into(stream, records, path)
                heads = records[:, :HEAD_BYTES].copy().view("<i4")[:, 0]
                worst = int(np.argmax(heads != dim))
                check_head(low + worst, int(heads[worst]))
                out_bytes[low - start : low - start + len(records)] = records[:, HEAD_BYTES:]
            return out

        size, record = os.fstat(stream.fileno()).st_size, 0
        dim = read_head(0)
        record = HEAD_BYTES + dim * dtype.itemsize
        if size < HEAD_BYTES or dim < 0 or record > size:
            raise BadInputError(
                f"{path}: {size} bytes and a first record of {dim} values; not a whole {kind} file; "
                "check the format or fetch it again"
            )
        rows, rest = divmod(size, record)
        if dim and rest:
            raise BadInputError(
                f"{path}: {size} bytes are not a multiple of the {record} bytes of a record of {dim} values; "
                f"truncated, or not {kind}; fetch it again"
            )
        for row in np.linspace(0, rows - 1, VECS_HEADS).astype(int).tolist():
            check_head(row, read_head(row))
        yield Opened((rows, dim), dtype, read)


@contextmanager
def open_npy(path: str, dataset: str | None) -> Iterator[Opened]:
    """An npy file of any shape, order and byte order, whose size must be exactly what its header promises."""
    shape, fortran, dtype, offset = _npy_header(path)
    promised, size = offset + math.prod(shape) * dtype.itemsize, os.path.getsize(path)
    if promised != size and not dtype.hasobject:  # pickled objects have any size; their dtype is refused
        raise BadInputError(
            f"{path}: its size is not what its header promises ({size} bytes, not {promised}); "
            "truncated or two arrays; write it again"
        )

    def read(start: int, stop: int) -> np.ndarray:
        if fortran:
            # Column-major: the rows are one run of bytes in each column, the map touches those pages only.
            return np.memmap(path, dtype, "r", offset, shape[::-1]).T[start:stop]
        out = np.empty((stop - start, *shape[1:]), dtype)
        with open(path, "rb") as stream:
            stream.seek(offset + start * math.prod(shape[1:]) * dtype.itemsize)
            read_into(stream, out, path)
        return out

    yield Opened(shape, dtype, read)


def _npy_header(path: str) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """(shape, Fortran order, dtype, offset of the data) of an npy file; nothing is unpickled."""
    with open(path, "rb") as stream:
        try:
            version = np.lib.format.read_magic(stream)
            if version == (1, 0):
                header = np.lib.format.read_array_header_1_0(stream)
            elif version in ((2, 0), (3, 0)):
                # 3.0 differs from 2.0 only in the encoding of field names, and records are refused anyway.
                header = np.lib.format.read_array_header_2_0(stream)
            else:
                raise ValueError(f"format version {version}")
        except HEADER_ERRORS as error:
            raise BadInputError(
                f"{path}: not a readable npy file ({error}); expected one of numpy.save; write it again"
            ) from error
        return *header, stream.tell()


# HDF5


@contextmanager
def _open_hdf5_file(path: str) -> Iterator[Any]:
    """The open file; errors of the library become BadInputError."""
    try:
        import h5py
    except ImportError as error:
        raise missing_extra("h5py", "hdf5", path) from error
    if not h5py.is_hdf5(path):
        raise BadInputError(f"{path}: no HDF5 signature; expected an HDF5 file; check the format")
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            yield file
    except (OSError, RuntimeError, KeyError) as error:
        raise BadInputError(f"{path}: HDF5 cannot read it ({error}); expected a whole file; fetch it again") from error


@contextmanager
def open_hdf5(path: str, dataset: str | None) -> Iterator[Opened]:
    """One dataset: the named one, else ``train``, else the only one with 2 axes of numbers."""
    with _open_hdf5_file(path) as file:
        arrays: dict[str, Any] = {}

        def visit(name: str, node: Any) -> None:
            if getattr(node, "ndim", 0) == 2 and node.dtype.kind in "fiu":
                arrays[name] = node

        file.visititems(visit)
        wanted = dataset.strip("/") if dataset is not None else "train" if "train" in arrays else None
        listed = {name: f"{'x'.join(map(str, node.shape))} {node.dtype}" for name, node in arrays.items()}
        name = choose_dataset(path, listed, wanted, kind="dataset")
        node = arrays[name]
        yield Opened(node.shape, node.dtype, lambda start, stop: node[start:stop], name)


# MATLAB

MAT_CLASSES = {"double": "<f8", "single": "<f4", "uint8": "|u1", "int8": "|i1"}
Variables = dict[str, tuple[tuple[int, ...], str]]  # name -> (shape, MATLAB class)


@contextmanager
def open_mat(path: str, dataset: str | None) -> Iterator[Opened]:
    """One variable: the named one, else the only numeric one with 2 axes and more than 1 row.

    Version 7.3 is HDF5, with the axes the other way round, and is sliced. Version 5 is compressed as one stream, so the
    whole variable is loaded and the last one stays in memory (one per process): such a file must fit into a worker.
    """
    with open(path, "rb") as stream:
        head = stream.read(128)
    major = {b"IM": head[125:126], b"MI": head[124:125]}.get(head[126:])  # in the byte order of the file
    if major not in (b"\1", b"\2"):
        raise BadInputError(
            f"{path}: no MATLAB 5 or 7.3 header; expected a file of save -v6, -v7 or -v7.3; save it again"
        )
    if major == b"\2":  # of version 7.3
        with _open_hdf5_file(path) as file:
            name = _choose_variable(path, _mat73_variables(file), dataset)
            node = file[name]
            yield Opened(node.shape[::-1], node.dtype, lambda start, stop: node[:, start:stop].T, name)
        return
    from scipy.io import whosmat

    with _scipy_errors(path):
        variables = {name: (tuple(shape), kind) for name, shape, kind in whosmat(path)}
    name = _choose_variable(path, variables, dataset)
    shape, kind = variables[name]
    dtype = MAT_CLASSES[kind]
    whole = _mat5_variable(path, name, dtype, os.stat(path).st_mtime_ns) if all(shape) else np.empty(shape, dtype)
    # A copy: the cached variable is not for writing.
    yield Opened(shape, whole.dtype, lambda start, stop: np.array(whole[start:stop], order="C"), name)


def _choose_variable(path: str, variables: Variables, dataset: str | None) -> str:
    usable = {
        name: f"{shape[0]}x{shape[1]} {kind}"
        for name, (shape, kind) in variables.items()
        if len(shape) == 2 and kind in MAT_CLASSES and (shape[0] > 1 or name == dataset)
    }
    if dataset is not None and dataset in variables and dataset not in usable:
        shape, kind = variables[dataset]
        raise BadInputError(
            f"{path}: variable {dataset!r} is {kind} of shape {shape}; expected (rows, dim) of one of "
            f"{', '.join(MAT_CLASSES)}; convert it first"
        )
    return choose_dataset(path, usable, dataset, kind="variable")


def _mat73_variables(file: Any) -> Variables:
    found = {}
    for name, node in file.items():
        kind = node.attrs.get("MATLAB_class", b"")
        kind = kind.decode() if isinstance(kind, bytes) else str(kind)
        if getattr(node, "shape", None) is not None and "MATLAB_empty" not in node.attrs:  # a dataset, not a group
            kind = kind if is_accepted(node.dtype) else f"{kind} stored as {node.dtype}"
            found[name] = (node.shape[::-1], kind)
    return found


@functools.lru_cache(maxsize=1)
def _mat5_variable(path: str, name: str, dtype: str, mtime_ns: int) -> np.ndarray:
    """The whole variable, kept for the next read of the same file."""
    from scipy.io import loadmat

    with _scipy_errors(path):
        stored = np.asarray(loadmat(path, variable_names=[name])[name])
    # MATLAB stores whole-numbered doubles as small integers: the declared class decides.
    return stored if stored.dtype.kind == "c" else stored.astype(dtype, copy=False)


@contextmanager
def _scipy_errors(path: str) -> Iterator[None]:
    """scipy answers a damaged file with whatever its parser stumbles over: any of it means bad input."""
    try:
        yield
    except Exception as error:
        raise BadInputError(
            f"{path}: not readable as MATLAB 5 ({error}); expected a whole file; fetch or save it again"
        ) from error


# Parquet

PARQUET_MAGIC = b"PAR1"
BATCH_BYTES = 4 << 20
BUFFER_BYTES = 1 << 20


@contextmanager
def open_parquet_file(path: str) -> Iterator[Any]:
    """The open ParquetFile; errors of the library become BadInputError."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise missing_extra("pyarrow", "parquet", path) from error
    with open(path, "rb") as stream:
        if stream.read(len(PARQUET_MAGIC)) != PARQUET_MAGIC:
            raise BadInputError(f"{path}: no parquet signature; expected a parquet file; check the format")
    try:
        # Without pre-buffering and with a stream buffer, memory does not grow with the row group.
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER_BYTES) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInputError(f"{path}: not readable as parquet ({error}); fetch it again") from error


@contextmanager
def open_lists(path: str, dataset: str | None) -> Iterator[Opened]:
    """The named or only column of lists of numbers, one list a row; ``dim`` is the length of the first list."""
    with open_parquet_file(path) as file:
        import pyarrow.types as types

        def holds_vectors(kind: Any) -> bool:
            is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
            return is_list and (types.is_floating(kind.value_type) or types.is_integer(kind.value_type))

        columns = {field.name: field.type for field in file.schema_arrow if holds_vectors(field.type)}
        name = choose_dataset(path, {k: str(v) for k, v in columns.items()}, dataset, kind="list column")
        dtype = np.dtype(columns[name].value_type.to_pandas_dtype())
        fixed = getattr(columns[name], "list_size", None)
        dim = fixed if fixed is not None else _first_length(file, path, name)

        def read(start: int, stop: int) -> np.ndarray:
            out = np.empty((stop - start, dim), dtype)
            size = max(1, BATCH_BYTES // (dim * dtype.itemsize))
            for row, column in column_slices(file, path, name, start, stop, size):
                out[row - start : row - start + len(column)] = _block(column, dim, path, name, row)
            return out

        yield Opened((file.metadata.num_rows, dim), dtype, read, name)


def first_null(column: Any) -> int:
    """The place of the first null of an Arrow array that has one."""
    return int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))


def _bad_row(path: str, name: str, row: int, what: str) -> BadInputError:
    return BadInputError(
        f"{path}: row {row} of column {name!r} {what}; expected lists of one length, no nulls; repair it"
    )


def _first_length(file: Any, path: str, name: str) -> int:
    """Length of the list in row 0; 0 when the file has no rows."""
    if not file.metadata.num_rows:
        return 0
    _, column = next(column_slices(file, path, name, 0, 1, 1))
    if column.null_count:
        raise _bad_row(path, name, 0, "is null")
    return len(column[0])


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


# Zarr


def is_zarr(folder: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("zarr.json", ".zarray"))


@contextmanager
def open_zarr(path: str, dataset: str | None) -> Iterator[Opened]:
    """A Zarr array folder, version 2 or 3. A chunk that is not stored is the fill value: in Zarr that is legal data."""
    if not is_zarr(path):
        raise BadInputError(f"{path}: a folder without zarr.json or .zarray; expected a Zarr array; name one")
    try:
        array = open_array(open_objects(path), "", strict=False)
    except IntegrityError as error:
        below = ", ".join(sorted(entry.name for entry in os.scandir(path) if entry.is_dir()))
        raise BadInputError(
            f"{path}: not an array that Zarr can open ({error.__cause__}); "
            f"{f'name one of those below it: {below}' if below else 'copy it again'}"
        ) from error

    def read(start: int, stop: int) -> np.ndarray:
        try:
            return np.asarray(array[start:stop])
        except (OSError, ValueError, RuntimeError) as error:
            raise BadInputError(f"{path}: rows {start} to {stop} cannot be decoded ({error}); copy it again") from error

    yield Opened(array.shape, array.dtype, read)


# Ids

MARK_LINES = 1 << 16
SCAN_BYTES = 1 << 22
ID_BATCH_ROWS = 1 << 16


def bad_id(path: str, row: int, what: str) -> BadInputError:
    return BadInputError(
        f"{path}: the id of row {row} {what}; expected 1 to {MAX_ID_BYTES} bytes of UTF-8 without NUL; mend it"
    )


@contextmanager
def open_lines(path: str, column: str | None) -> Iterator[Opened]:
    """A text file, one id a line; each row is read as bytes without the end of the line."""
    status = os.stat(path)
    rows, marks = _line_marks(path, status.st_size, status.st_mtime_ns)

    def read(start: int, stop: int) -> list[bytes]:
        wanted, mark = [], start // MARK_LINES
        with open(path, "rb") as stream:
            stream.seek(marks[mark])
            for row in range(mark * MARK_LINES, stop):
                line = stream.readline(MAX_ID_BYTES + 3)
                if not line.endswith(b"\n") and len(line) == MAX_ID_BYTES + 3:
                    raise bad_id(path, row, f"has more than {MAX_ID_BYTES} bytes")
                if row >= start:
                    wanted.append(line.removesuffix(b"\n").removesuffix(b"\r"))
        return wanted

    yield Opened((rows,), np.dtype("S1"), read)


@functools.lru_cache(maxsize=64)
def _line_marks(path: str, size: int, mtime_ns: int) -> tuple[int, tuple[int, ...]]:
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
def open_column(path: str, column: str | None) -> Iterator[Opened]:
    """A column of integers or strings of a parquet file."""
    with open_parquet_file(path) as file:
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
            for row, values in column_slices(file, path, str(column), start, stop, ID_BATCH_ROWS):
                if values.null_count:
                    empty = row + first_null(values)
                    raise BadInputError(f"{path}: the id of row {empty} is null; expected an id; mend it")
                parts.append(values.to_numpy(zero_copy_only=False) if is_integer else values.to_pylist())
            return np.concatenate(parts) if is_integer else [text for part in parts for text in part]

        dtype = np.dtype(kind.to_pandas_dtype()) if is_integer else np.dtype("U1")
        yield Opened((file.metadata.num_rows,), dtype, read, column)
