"""Vectors from files: fvecs, bvecs, npy, HDF5, parquet, MATLAB and existing Zarr arrays.

``open_sources`` looks at the files once, on the driver; ``read_rows`` reads a range of rows, on any worker
that sees the same path. Values are not looked at here.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from och_dist.errors import BadInputError, UsageError
from och_dist.sources import flat, nested, parquet
from och_dist.sources.base import Layout, VectorFile, file_fingerprint, tree_fingerprint


class _Reader(NamedTuple):
    describe: Callable[[str, str | None], Layout]
    read: Callable[[VectorFile, int, int], np.ndarray]
    named: bool  # whether dataset= means anything


READERS = {
    "fvecs": _Reader(partial(flat.describe_vecs, kind="fvecs"), flat.read_vecs, named=False),
    "bvecs": _Reader(partial(flat.describe_vecs, kind="bvecs"), flat.read_vecs, named=False),
    "npy": _Reader(flat.describe_npy, flat.read_npy, named=False),
    "hdf5": _Reader(nested.describe_hdf5, nested.read_hdf5, named=True),
    "mat": _Reader(nested.describe_mat, nested.read_mat, named=True),
    "parquet": _Reader(parquet.describe_parquet, parquet.read_parquet, named=True),
    "zarr": _Reader(nested.describe_zarr, nested.read_zarr, named=False),
}
EXTENSIONS = {
    ".fvecs": "fvecs",
    ".bvecs": "bvecs",
    ".npy": "npy",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".mat": "mat",
    ".parquet": "parquet",
}


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
    try:
        block = READERS[source.format].read(source, start, stop)
        return np.ascontiguousarray(block, source.dtype)
    except OSError as error:
        raise _unreadable(source.path, error) from error


def _unreadable(path: str, error: OSError) -> BadInputError:
    reason = error.strerror or str(error)
    return BadInputError(f"{path}: cannot be read ({reason}); expected a file that all workers see; check the path")


def _refuse_empty(path: str) -> None:
    if os.path.isfile(path) and os.path.getsize(path) == 0:
        raise _nothing_in(path, "0 bytes, ")


def _nothing_in(path: str, what: str = "") -> BadInputError:
    return BadInputError(f"{path}: {what}no rows, and no dimension either; expected vectors; fetch or write it again")


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
    if dataset is not None and not READERS[kind].named:
        raise UsageError(f"dataset={dataset!r} for {path}: {kind} has no named parts; leave dataset out")
    try:
        _refuse_empty(path)
        layout = READERS[kind].describe(path, dataset)
        if layout.rows == 0 and layout.dim == 0:
            raise _nothing_in(path)
        if layout.rows == 0 and not allow_empty:
            raise BadInputError(f"{path}: no rows; expected at least one; leave the file out")
        if layout.dim == 0:
            raise BadInputError(f"{path}: 0 values a row; expected at least 1; check how it was written")
        if kind == "zarr":
            fingerprint, mtime_ns = tree_fingerprint(path)
        else:
            fingerprint = file_fingerprint(path, dataset=layout.dataset)
            mtime_ns = os.stat(path).st_mtime_ns
    except OSError as error:
        raise _unreadable(path, error) from error
    return VectorFile(path, kind, layout.rows, layout.dim, layout.dtype, fingerprint, mtime_ns, layout.dataset)
