"""Files of vectors, and of the ids of their rows.

``open_sources`` and ``open_ids`` look at files once, on the driver; ``read_rows`` and ``read_ids`` read a range of
rows, on any worker that sees the same path. Values of vectors are not looked at here; every id is checked.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from och_dist.errors import BadInputError, UsageError
from och_dist.sources import formats
from och_dist.sources.formats import ACCEPTED_DTYPES, Opened, bad_id, is_accepted
from och_dist.store import MAX_ID_BYTES

Reader = Callable[[str, str | None], AbstractContextManager[Opened]]

FORMATS: dict[str, Reader] = {
    "fvecs": partial(formats.open_vecs, kind="fvecs"),
    "bvecs": partial(formats.open_vecs, kind="bvecs"),
    "npy": formats.open_npy,
    "hdf5": formats.open_hdf5,
    "mat": formats.open_mat,
    "parquet": formats.open_lists,
    "zarr": formats.open_zarr,
}
NAMED = ("hdf5", "mat", "parquet")
"""Formats that hold arrays by name, so that ``dataset`` means something."""

EXTENSIONS = {
    ".fvecs": "fvecs",
    ".bvecs": "bvecs",
    ".npy": "npy",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".mat": "mat",
    ".parquet": "parquet",
}
ID_FORMATS: dict[str, Reader] = {
    ".npy": formats.open_npy,
    ".txt": formats.open_lines,
    ".parquet": formats.open_column,
}
ID_KINDS = {"i": "int64", "u": "int64", "U": "string", "S": "string"}  # by the kind of the dtype in the file

END_BYTES = 1 << 20
SAMPLE_BYTES = 1 << 16
SAMPLES = 16


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


@dataclass(frozen=True)
class VectorFile:
    """One file (or Zarr array) of vectors: small and picklable, so that a task can carry it to a worker.

    ``dtype`` is the little-endian dtype string of what ``read_rows`` returns; ``dataset`` the name that was chosen
    inside an HDF5, parquet or MATLAB file; ``fingerprint`` depends on content (and dataset) only; ``ids`` is the file
    of the ids of its rows, if they have any.
    """

    path: str
    format: str
    rows: int
    dim: int
    dtype: str
    fingerprint: str
    mtime_ns: int
    dataset: str | None = None
    ids: IdFile | None = None

    @property
    def content(self) -> tuple[str, str | None]:
        """What makes two files the same."""
        return self.fingerprint, self.dataset

    def describe(self) -> dict[str, Any]:
        """The file as a manifest lists it, with its ids."""
        about = {name: getattr(self, name) for name in ("path", "format", "rows", "fingerprint", "dataset")}
        return about if self.ids is None else {**about, "ids": self.ids.describe()}


def expand(pattern: str) -> list[str]:
    """Absolute paths of one pattern; an existing path counts as itself even if it has wildcard characters."""
    if "://" in pattern:
        raise UsageError(f"{pattern}: a URL; expected a path or a glob; download it first")
    if os.path.exists(pattern) or not glob.has_magic(pattern):
        return [os.path.abspath(pattern)]
    found = sorted(os.path.abspath(path) for path in glob.glob(pattern, recursive=True))
    if not found:
        raise BadInputError(f"{pattern}: matches no file; expected at least one; check folder and pattern")
    return found


def holds_vectors(path: str) -> bool:
    """Whether this may be read as vectors: by its name, or, of a folder, by the metadata of a Zarr array in it."""
    return formats.is_zarr(path) if os.path.isdir(path) else _extension(path) in EXTENSIONS


def _extension(path: str) -> str:
    return os.path.splitext(path)[1].lower()


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Errors of the file system become BadInputError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInputError(
            f"{path}: cannot be read ({reason}); expected a file that all workers see; check the path"
        ) from error


# Vectors


def open_sources(patterns: Sequence[str], *, dataset: str | None = None, allow_empty: bool = False) -> list[VectorFile]:
    """Describe the files that ``patterns`` (paths or globs) name, in order; each glob's matches are sorted.

    All of them must have one dimension and one dtype. ``dataset`` names the HDF5 dataset, parquet column or
    MATLAB variable to read. ``allow_empty`` takes a file of 0 rows for what it is, if it tells its dimension.
    """
    if isinstance(patterns, str) or not patterns:
        raise UsageError(f"patterns={patterns!r}; expected a list of paths or globs; name at least one file")
    paths = [path for pattern in patterns for path in expand(pattern)]
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise UsageError(f"{twice[0]}: named twice, its rows would be read twice; name every file once")
    sources = [_open_source(path, dataset, allow_empty=allow_empty) for path in paths]
    first = sources[0]
    for other in sources[1:]:
        if (other.dim, other.dtype) != (first.dim, first.dtype):
            raise BadInputError(
                f"{other.path} has dim {other.dim} of {other.dtype}, {first.path} has dim {first.dim} of "
                f"{first.dtype}; expected the same in all files; convert one, or read them separately"
            )
    return sources


def _open_source(path: str, dataset: str | None, *, allow_empty: bool) -> VectorFile:
    """Describe one file after its header, size and dtype were checked."""
    extension = _extension(path)
    kind = "zarr" if os.path.isdir(path) else EXTENSIONS.get(extension)
    if kind is None:
        if not extension and not os.path.exists(path):
            raise BadInputError(f"{path} does not exist; check the path, and whether its disk is mounted")
        raise BadInputError(
            f"{path}: unknown extension {extension!r}; expected one of {', '.join(EXTENSIONS)} or a Zarr "
            "array; unpack, convert or rename it"
        )
    if dataset is not None and kind not in NAMED:
        raise UsageError(f"dataset={dataset!r} for {path}: {kind} has no named parts; leave dataset out")
    with readable(path):
        if os.path.isfile(path) and os.path.getsize(path) == 0:
            raise _nothing_in(path, "0 bytes, ")
        with FORMATS[kind](path, dataset) as found:
            rows, dim, dtype = _layout(found, path)
        if rows == 0 and dim == 0:
            raise _nothing_in(path)
        if rows == 0 and not allow_empty:
            raise BadInputError(f"{path}: no rows; expected at least one; leave the file out")
        if dim == 0:
            raise BadInputError(f"{path}: 0 values a row; expected at least 1; check how it was written")
        if kind == "zarr":
            fingerprint, mtime_ns = tree_fingerprint(path)
        else:
            fingerprint, mtime_ns = file_fingerprint(path, dataset=found.dataset), os.stat(path).st_mtime_ns
    return VectorFile(path, kind, rows, dim, dtype, fingerprint, mtime_ns, found.dataset)


def _nothing_in(path: str, what: str = "") -> BadInputError:
    return BadInputError(f"{path}: {what}no rows, and no dimension either; expected vectors; fetch or write it again")


def _layout(found: Opened, path: str) -> tuple[int, int, str]:
    """(rows, dim, little-endian dtype string) of what holds vectors."""
    if not is_accepted(found.dtype):
        where = path if found.dataset is None else f"{path}:{found.dataset}"
        raise BadInputError(
            f"{where}: dtype {found.dtype}; expected one of {', '.join(ACCEPTED_DTYPES)}; convert the file first"
        )
    if len(found.shape) != 2:
        raise BadInputError(f"{path}: shape {found.shape}; expected (rows, dim); reshape the array first")
    rows, dim = map(int, found.shape)
    return rows, dim, found.dtype.newbyteorder("<").str


def read_rows(source: VectorFile, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) as (stop - start, dim), native endian, C-contiguous."""
    if not 0 <= start <= stop <= source.rows:
        raise UsageError(f"rows [{start}, {stop}) of {source.path}; expected a range of [0, {source.rows})")
    if start == stop:
        return np.empty((0, source.dim), source.dtype)
    with readable(source.path), FORMATS[source.format](source.path, source.dataset) as found:
        rows, dim, dtype = _layout(found, source.path)
        if (rows, dim, dtype) != (source.rows, source.dim, source.dtype):
            raise BadInputError(
                f"{source.path}: now {rows} x {dim} of {dtype}, was {source.rows} x {source.dim} of "
                f"{source.dtype} when it was opened; leave input files alone while they are read, and start again"
            )
        return np.ascontiguousarray(found.read(start, stop), source.dtype)


# Ids


def open_ids(path: str, *, column: str | None = None) -> IdFile:
    """Describe a file of ids; ``column`` names the column of a parquet file."""
    extension = _extension(path)
    if extension not in ID_FORMATS or (extension == ".parquet") != (column is not None):
        raise UsageError(
            f"{path}: ids are read from .npy and .txt files, and from a named column of parquet vectors; "
            "give such a file, or --id-column"
        )
    with readable(path), ID_FORMATS[extension](path, column) as found:
        kind = ID_KINDS.get(found.dtype.kind)
        if kind is None or len(found.shape) != 1 or found.dtype.itemsize == 0:
            raise BadInputError(
                f"{path}: {found.dtype} of shape {found.shape}; expected integers or strings of shape (rows,)"
            )
        fingerprint = file_fingerprint(path, dataset=column)
        return IdFile(path, found.shape[0], kind, fingerprint, os.stat(path).st_mtime_ns, column)


def read_ids(source: IdFile, start: int, stop: int) -> np.ndarray:
    """Ids of rows [start, stop): int64 (m,), or UTF-8 bytes (m,) as NumPy strings, none empty, too long or with NUL."""
    path = source.path
    with readable(path), ID_FORMATS[_extension(path)](path, source.column) as found:
        if (found.shape, ID_KINDS.get(found.dtype.kind)) != ((source.rows,), source.kind):
            raise BadInputError(f"{path}: changed since it was opened; leave input files alone and start again")
        values = found.read(start, stop)
    if source.kind == "string":
        texts = values.tolist() if isinstance(values, np.ndarray) else values
        return np.array([_as_utf8(path, row, text) for row, text in enumerate(texts, start)], dtype=np.bytes_)
    largest = int(np.argmax(values)) if len(values) else None
    if largest is not None and int(values[largest]) > np.iinfo(np.int64).max:
        raise BadInputError(
            f"{path}: the id of row {start + largest} is {values[largest]}; expected at most 2^63 - 1; use strings"
        )
    return values.astype("<i8", copy=False)


def _as_utf8(path: str, row: int, value: str | bytes) -> bytes:
    """An id as UTF-8; a NUL would be lost in the padding."""
    try:
        data = value.encode() if isinstance(value, str) else value
        data.decode()
    except UnicodeError:
        raise bad_id(path, row, "is no valid Unicode") from None
    if b"\0" in data:
        raise bad_id(path, row, "holds NUL")
    if not 1 <= len(data) <= MAX_ID_BYTES:
        raise bad_id(path, row, f"has {len(data)} bytes")
    return data


# What a file is known by


def file_fingerprint(path: str | os.PathLike[str], *, dataset: str | None = None) -> str:
    """sha256 over size, first and last MiB and 16 evenly spaced 64 KiB blocks (and the dataset's name).

    Cheap on a file of any size; neither path nor modification time counts, so a copy is the same file.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        digest.update(f"{size}\n".encode())
        digest.update(stream.read(END_BYTES))
        stream.seek(max(0, size - END_BYTES))
        digest.update(stream.read(END_BYTES))
        for index in range(SAMPLES):
            stream.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    # Two datasets of one file hold different rows: they must not look like the same input.
    if dataset is not None:
        digest.update(b"\n" + dataset.encode())
    return digest.hexdigest()


def tree_fingerprint(folder: str) -> tuple[str, int]:
    """(fingerprint, newest mtime_ns) of a Zarr array: metadata, names and sizes of objects, 16 heads.

    Sizes alone say nothing about uncompressed chunks, hence the heads.
    """
    digest = hashlib.sha256()
    newest, objects = 0, []
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            full = os.path.join(parent, name)
            status = os.stat(full)
            newest = max(newest, status.st_mtime_ns)
            digest.update(f"{os.path.relpath(full, folder)} {status.st_size}\n".encode())
            if name in ("zarr.json", ".zarray"):
                with open(full, "rb") as stream:
                    digest.update(stream.read())
            else:
                objects.append(full)
    count = min(SAMPLES, len(objects))
    for index in range(count):
        with open(objects[index * len(objects) // count], "rb") as stream:
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest(), newest
