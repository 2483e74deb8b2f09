"""Neighbour lists on disk: Zarr (chunked by query, any size), npz, parquet or JSON lines, chosen by the file name.

Results are written beside their final name and moved there when they are whole.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from och_dist.errors import BadInputError, ConflictError, IntegrityError, UsageError
from och_dist.store.arrays import ArraySpec, create_array, open_array, read_rows, write_chunk
from och_dist.store.objects import LocalObjects, storage_errors
from och_dist.store.versions import canonical, read_document, seal, unseal

FORMATS = (".zarr", ".npz", ".parquet", ".jsonl")
ABOUT = "neighbors.json"


@dataclass(frozen=True)
class Neighbors:
    """``rows`` (q, k) int64 and ``distances`` (q, k), sorted by (distance, row) for each query."""

    distances: np.ndarray
    rows: np.ndarray


def check_output(path: str) -> Path:
    """The output path, or an error when it is in a bucket, of no known format, or a folder that is no result."""
    target = Path(path)
    if "://" in str(path):
        raise UsageError(f"{path}: results are written to a local path; copy them to a bucket afterwards")
    if target.suffix not in FORMATS:
        raise UsageError(f"{path}: cannot tell the format; end the name with one of {', '.join(FORMATS)}")
    if target.is_dir() and (target.suffix != ".zarr" or (any(target.iterdir()) and not (target / ABOUT).exists())):
        raise ConflictError(f"{path} is a folder that holds something else, and is not replaced; use another name")
    return target


def save_neighbors(
    path: str, batches: Iterable[Neighbors], *, queries: int, width: int, batch: int, about: dict[str, Any]
) -> None:
    """Write batches of ``batch`` queries as they come; ``about`` (JSON values) is kept with a Zarr result."""
    with storage_errors(str(path)):
        target = check_output(path)
        partial = _beside(target, "part")
        target.parent.mkdir(parents=True, exist_ok=True)
        writer = {".zarr": _write_zarr, ".npz": _write_npz, ".parquet": _write_parquet, ".jsonl": _write_jsonl}
        try:
            writer[target.suffix](partial, batches, (queries, width, batch), about)
            _replace(partial, target)
        finally:
            _remove(partial)


def _beside(target: Path, kind: str) -> Path:
    """A hidden name next to ``target`` that no other writer has, on whatever machine."""
    return target.with_name(f".{target.name}.{uuid.uuid4().hex}.{kind}")


def _replace(partial: Path, target: Path) -> None:
    if not target.is_dir():
        os.replace(partial, target)
        return
    old = _beside(target, "old")
    os.rename(target, old)
    try:
        os.rename(partial, target)
    except OSError:
        os.rename(old, target)
        raise
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write_zarr(path: Path, batches: Iterable[Neighbors], shape: tuple[int, int, int], about: dict[str, Any]) -> None:
    queries, width, batch = shape
    objects = LocalObjects(path)
    numbered = enumerate(batches)
    for number, part in itertools.chain([next(numbered, (0, _all([], width)))], numbered):
        for name in ("distances", "rows"):
            values = getattr(part, name)
            if number == 0:
                spec = ArraySpec(queries, width, values.dtype.newbyteorder("<").str, max(1, min(batch, queries)))
                create_array(objects, name, spec)
            if len(values):
                write_chunk(objects, name, number, values)
    objects.put("zarr.json", canonical({"zarr_format": 3, "node_type": "group", "attributes": {}}))
    objects.put(ABOUT, seal({**about, "queries": queries, "width": width}))


def _all(batches: Iterable[Neighbors], width: int) -> Neighbors:
    parts = list(batches)
    if not parts:
        return Neighbors(np.empty((0, width), np.int32), np.empty((0, width), np.int64))
    return Neighbors(np.concatenate([p.distances for p in parts]), np.concatenate([p.rows for p in parts]))


def _write_npz(path: Path, batches: Iterable[Neighbors], shape: tuple[int, int, int], about: dict[str, Any]) -> None:
    whole = _all(batches, shape[1])
    with path.open("wb") as file:
        np.savez(file, distances=whole.distances, rows=whole.rows)


def _write_parquet(
    path: Path, batches: Iterable[Neighbors], shape: tuple[int, int, int], about: dict[str, Any]
) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError(f"{path.name} needs pyarrow; install it with: pip install 'och-dist[parquet]'") from None

    def table(part: Neighbors) -> Any:
        columns = [
            pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), max(shape[1], 1))
            if shape[1] else pa.array([[]] * len(values), pa.list_(pa.from_numpy_dtype(values.dtype)))
            for values in (part.distances, part.rows)
        ]  # fmt: skip
        return pa.table(columns, names=["distances", "rows"])

    parts = iter(batches)
    head = table(next(parts, _all([], shape[1])))
    with contextlib.closing(pq.ParquetWriter(path, head.schema)) as writer:
        writer.write_table(head)
        for part in parts:
            writer.write_table(table(part))


def _write_jsonl(path: Path, batches: Iterable[Neighbors], shape: tuple[int, int, int], about: dict[str, Any]) -> None:
    with path.open("w") as file:
        for part in batches:
            for distances, rows in zip(part.distances.tolist(), part.rows.tolist(), strict=True):
                file.write(json.dumps({"distances": distances, "rows": rows}) + "\n")


def read_about(path: str) -> dict[str, Any] | None:
    """What a Zarr result says about itself, None if there is no (whole) result at ``path``."""
    data = read_document(LocalObjects(path), ABOUT)
    return None if data is None else unseal(data, f"{path}/{ABOUT}")


@dataclass(frozen=True)
class StoredNeighbors:
    """A Zarr result, read a few queries at a time."""

    path: str
    queries: int
    width: int
    about: dict[str, Any]

    def _array(self, name: str) -> zarr.Array:
        return open_array(LocalObjects(self.path), name)

    def read(self, start: int, stop: int) -> Neighbors:
        """Neighbours of queries [start, stop)."""
        return Neighbors(*(read_rows(self._array(name), start, stop) for name in ("distances", "rows")))

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Row numbers (stop - start, width) of queries [start, stop)."""
        return read_rows(self._array("rows"), start, stop)


def open_neighbors(path: str) -> StoredNeighbors:
    about = read_about(path)
    if about is None:
        raise BadInputError(f"{path} holds no neighbours; make them with 'och truth' or 'och search -o {path}'")
    try:
        return StoredNeighbors(str(Path(path).absolute()), int(about["queries"]), int(about["width"]), about)
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"{path}/{ABOUT} is incomplete ({error})") from None
