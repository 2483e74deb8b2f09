"""Readers of HDF5 and MATLAB files, which hold arrays by name, and of Zarr arrays.

Optional dependencies are imported where they are used, so that the other formats work without them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from och_dist.errors import BadInputError, IntegrityError
from och_dist.sources.base import Opened, choose_dataset, is_accepted, missing_extra
from och_dist.store import open_array, open_objects

TRAIN = "train"
MAT_CLASSES = {"double": "<f8", "single": "<f4", "uint8": "|u1", "int8": "|i1"}


# HDF5


@contextmanager
def _open_hdf5(path: str) -> Iterator[Any]:
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


def _hdf5_arrays(file: Any) -> dict[str, Any]:
    """All datasets of the file by full name, those with 2 axes of numbers only."""
    import h5py

    found: dict[str, Any] = {}

    def visit(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset) and len(node.shape or ()) == 2 and node.dtype.kind in "fiu":
            found[name] = node

    file.visititems(visit)
    return found


@contextmanager
def open_hdf5(path: str, dataset: str | None) -> Iterator[Opened]:
    """One dataset: the named one, else ``train``, else the only one with 2 axes of numbers."""
    with _open_hdf5(path) as file:
        arrays = _hdf5_arrays(file)
        wanted = dataset.strip("/") if dataset is not None else (TRAIN if TRAIN in arrays else None)
        listed = {name: f"{'x'.join(map(str, node.shape))} {node.dtype}" for name, node in arrays.items()}
        name = choose_dataset(path, listed, wanted, kind="dataset")
        node = arrays[name]
        yield Opened(node.shape, node.dtype, lambda start, stop: node[start:stop], name)


# MATLAB

Variables = dict[str, tuple[tuple[int, ...], str]]  # name -> (shape, MATLAB class)


@contextmanager
def open_mat(path: str, dataset: str | None) -> Iterator[Opened]:
    """One variable: the named one, else the only numeric one with 2 axes and more than 1 row.

    Version 7.3 is HDF5, with the axes the other way round, and is sliced. Version 5 is compressed as one stream, so the
    whole variable is loaded and the last one stays in memory (one per process): such a file must fit into a worker.
    """
    if _mat_major(path) == 2:
        with _open_hdf5(path) as file:
            name = _choose_variable(path, _mat73_variables(file), dataset)
            node = file[name]
            yield Opened(node.shape[::-1], node.dtype, lambda start, stop: node[:, start:stop].T, name)
        return
    variables = _mat5_variables(path)
    name = _choose_variable(path, variables, dataset)
    shape, kind = variables[name]
    whole = (
        _mat5_variable(path, name, kind, os.stat(path).st_mtime_ns)
        if all(shape)
        else np.empty(shape, MAT_CLASSES[kind])
    )
    # A copy: the cached variable is not for writing.
    yield Opened(shape, whole.dtype, lambda start, stop: np.array(whole[start:stop], order="C"), name)


def _mat_major(path: str) -> int:
    """1 for a version 5 file, 2 for version 7.3 (HDF5), else BadInputError."""
    with open(path, "rb") as stream:
        head = stream.read(128)
    order = {b"IM": "little", b"MI": "big"}.get(head[126:128])
    major = int.from_bytes(head[124:126], order) >> 8 if order else 0  # type: ignore[arg-type]
    if major not in (1, 2):
        raise BadInputError(
            f"{path}: no MATLAB 5 or 7.3 header; expected a file of save -v6, -v7 or -v7.3; save it again"
        )
    return major


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
    import h5py

    found = {}
    for name, node in file.items():
        kind = node.attrs.get("MATLAB_class", b"")
        kind = kind.decode() if isinstance(kind, bytes) else str(kind)
        if isinstance(node, h5py.Dataset) and "MATLAB_empty" not in node.attrs:
            kind = kind if is_accepted(node.dtype) else f"{kind} stored as {node.dtype}"
            found[name] = (node.shape[::-1], kind)
    return found


def _mat5_variables(path: str) -> Variables:
    from scipy.io import whosmat

    with _scipy_errors(path):
        return {name: (tuple(shape), kind) for name, shape, kind in whosmat(path)}


@functools.lru_cache(maxsize=1)
def _mat5_variable(path: str, name: str, kind: str, mtime_ns: int) -> np.ndarray:
    """The whole variable, kept for the next read of the same file."""
    from scipy.io import loadmat

    with _scipy_errors(path):
        stored = np.asarray(loadmat(path, variable_names=[name])[name])
    # MATLAB stores whole-numbered doubles as small integers: the declared class decides.
    return stored if stored.dtype.kind == "c" else stored.astype(MAT_CLASSES[kind], copy=False)


@contextmanager
def _scipy_errors(path: str) -> Iterator[None]:
    """scipy answers a damaged file with whatever its parser stumbles over: any of it means bad input."""
    try:
        yield
    except Exception as error:
        raise BadInputError(
            f"{path}: not readable as MATLAB 5 ({error}); expected a whole file; fetch or save it again"
        ) from error


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
