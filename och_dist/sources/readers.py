"""Vectors from files: fvecs, bvecs, npy, HDF5, parquet, MATLAB and existing Zarr arrays.

``open_sources`` looks at the files once, on the driver; ``read_rows`` reads a range of rows, on any worker
that sees the same path. Values are not looked at here.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from och_dist.errors import BadInputError, UsageError
from och_dist.sources.base import ACCEPTED_DTYPES, Opened, file_fingerprint, is_accepted, readable, tree_fingerprint
from och_dist.sources.flat import open_npy, open_vecs
from och_dist.sources.id_files import IdFile
from och_dist.sources.nested import open_hdf5, open_mat, open_zarr
from och_dist.sources.parquet import open_lists


class Format(NamedTuple):
    open: Callable[[str, str | None], AbstractContextManager[Opened]]
    extensions: tuple[str, ...] = ()
    named: bool = False  # whether dataset= means anything


FORMATS = {
    "fvecs": Format(partial(open_vecs, kind="fvecs"), (".fvecs",)),
    "bvecs": Format(partial(open_vecs, kind="bvecs"), (".bvecs",)),
    "npy": Format(open_npy, (".npy",)),
    "hdf5": Format(open_hdf5, (".h5", ".hdf5"), named=True),
    "mat": Format(open_mat, (".mat",), named=True),
    "parquet": Format(open_lists, (".parquet",), named=True),
    "zarr": Format(open_zarr),
}
EXTENSIONS = {extension: name for name, format in FORMATS.items() for extension in format.extensions}


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
    for other in sources[1:]:
        first = sources[0]
        if (other.dim, other.dtype) != (first.dim, first.dtype):
            raise BadInputError(
                f"{other.path} has dim {other.dim} of {other.dtype}, {first.path} has dim {first.dim} of "
                f"{first.dtype}; expected the same in all files; convert one, or read them separately"
            )
    return sources


def read_rows(source: VectorFile, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) as (stop - start, dim), native endian, C-contiguous."""
    if not 0 <= start <= stop <= source.rows:
        raise UsageError(f"rows [{start}, {stop}) of {source.path}; expected a range of [0, {source.rows})")
    if start == stop:
        return np.empty((0, source.dim), source.dtype)
    with readable(source.path), FORMATS[source.format].open(source.path, source.dataset) as found:
        rows, dim, dtype = _layout(found, source.path)
        if (rows, dim, dtype) != (source.rows, source.dim, source.dtype):
            raise BadInputError(
                f"{source.path}: now {rows} x {dim} of {dtype}, was {source.rows} x {source.dim} of "
                f"{source.dtype} when it was opened; leave input files alone while they are read, and start again"
            )
        return np.ascontiguousarray(found.read(start, stop), source.dtype)


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


def _format(path: str) -> str:
    if os.path.isdir(path):
        return "zarr"
    extension = os.path.splitext(path)[1].lower()
    if extension not in EXTENSIONS:
        raise BadInputError(
            f"{path}: unknown extension {extension!r}; expected one of {', '.join(EXTENSIONS)} or a Zarr "
            "array; unpack, convert or rename it"
        )
    return EXTENSIONS[extension]


def _open_source(path: str, dataset: str | None, *, allow_empty: bool) -> VectorFile:
    """Describe one file after its header, size and dtype were checked."""
    kind = _format(path)
    if dataset is not None and not FORMATS[kind].named:
        raise UsageError(f"dataset={dataset!r} for {path}: {kind} has no named parts; leave dataset out")
    with readable(path):
        if os.path.isfile(path) and os.path.getsize(path) == 0:
            raise _nothing_in(path, "0 bytes, ")
        with FORMATS[kind].open(path, dataset) as found:
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
