"""What readers of all formats share: an open file, the accepted dtypes, the fingerprint of content, and errors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from typing import Any

import numpy as np

from och_dist.errors import BadInputError, UsageError

ACCEPTED_DTYPES = ("float16", "float32", "float64", "uint8", "int8")
END_BYTES = 1 << 20
SAMPLE_BYTES = 1 << 16
SAMPLES = 16


@dataclass(frozen=True)
class Opened:
    """An open file: the shape and dtype of what it holds, and what reads rows [start, stop) as they lie there.

    ``dataset`` is the name that was chosen, in a file that holds arrays by name. The reader of a format is a context
    manager of ``(path, dataset)`` that gives this; it checks the file, but not whether shape and dtype are of use.
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


def read_exactly(stream: FileIO, into: np.ndarray, path: str) -> None:
    """Fill the C-contiguous array ``into`` from a raw ``stream``; BadInputError when the file ends."""
    view = into.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):
        got = stream.readinto(view[done:])
        if not got:
            raise BadInputError(
                f"{path}: the file ends {len(view) - done} bytes early; it was cut short; fetch it again"
            )
        done += got


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
