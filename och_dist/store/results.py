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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from och_dist.errors import BadInputError, ConflictError, IntegrityError, UsageError
from och_dist.store.arrays import ArraySpec, create_array, open_array, read_rows, write_chunk
from och_dist.store.manifest import canonical, read_document, seal, unseal
from och_dist.store.objects import LocalObjects, storage_errors

FORMATS = (".zarr", ".npz", ".parquet", ".jsonl")
ABOUT = "neighbors.json"

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Neighbors:
    """``rows`` (q, k) int64 and ``distances`` (q, k), sorted by (distance, row) for each query.

    ``ids`` (q, k) are the corpus' own names of the rows, where asked for; ``unranked`` (q, k) the rows before they
    were ranked anew.
    """

    distances: np.ndarray
    rows: np.ndarray
    ids: np.ndarray | None = None
    unranked: np.ndarray | None = None

    def columns(self) -> dict[str, np.ndarray]:
        """What is stored, by name."""
        return {"distances": self.distances, "rows": self.rows, **({} if self.ids is None else {"ids": self.ids})}


def no_neighbors(width: int) -> Neighbors:
    """The result of no queries."""
    return Neighbors(np.empty((0, width), np.int32), np.empty((0, width), np.int64))


def join_neighbors(parts: Sequence[Neighbors]) -> Neighbors:
    """Results of queries that follow each other as one."""
    columns = {name: np.concatenate([part.columns()[name] for part in parts]) for name in parts[0].columns()}
    return Neighbors(**columns)


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
    columns = (part.columns() for part in batches)
    _save(path, columns, no_neighbors(width).columns(), (queries, batch), {**about, "width": width})


def save_histograms(
    path: str, batches: Iterable[np.ndarray], *, queries: int, bits: int, batch: int, about: dict[str, Any]
) -> None:
    """Write counts (q, bits + 1) of batches of queries as ``counts``, like neighbours."""
    nothing = {"counts": np.empty((0, bits + 1), np.int64)}
    _save(path, ({"counts": part} for part in batches), nothing, (queries, batch), {**about, "width": bits + 1})


def _save(
    path: str, batches: Iterator[Columns], nothing: Columns, sizes: tuple[int, int], about: dict[str, Any]
) -> None:
    """Write columns (q, width) of batches of queries in the format of the file name; ``nothing`` stands for none."""
    with written_beside(path) as (partial, suffix):
        batches = itertools.chain([next(batches, nothing)], batches)
        if suffix == ".zarr":
            _write_zarr(partial, batches, sizes, about)
        else:
            {".npz": _write_npz, ".parquet": _write_parquet, ".jsonl": _write_jsonl}[suffix](partial, batches)


@contextlib.contextmanager
def written_beside(path: str) -> Iterator[tuple[Path, str]]:
    """(a hidden path to write to, the format); what is there afterwards takes the place of ``path`` at once."""
    with storage_errors(str(path)):
        target = check_output(path)
        partial = _beside(target, "part")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial, target.suffix
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


def _write_zarr(path: Path, batches: Iterable[Columns], sizes: tuple[int, int], about: dict[str, Any]) -> None:
    queries, batch = sizes
    objects = LocalObjects(path)
    for number, part in enumerate(batches):
        for name, column in part.items():
            values = stored_ids(column, int(about.get("id_width", 0))) if name == "ids" else column
            if number == 0:
                dtype = values.dtype.newbyteorder("<").str
                spec = ArraySpec(queries, values.shape[1], dtype, max(1, min(batch, queries)))
                create_array(objects, name, spec)
            if len(values):
                write_chunk(objects, name, number, values)
    objects.put("zarr.json", canonical({"zarr_format": 3, "node_type": "group", "attributes": {}}))
    objects.put(ABOUT, seal({**about, "queries": queries}))


def stored_ids(ids: np.ndarray, width: int) -> np.ndarray:
    """Ids (m, n) as they are stored: int64, or strings as bytes (m, n * width), each padded with NUL to ``width``."""
    if ids.dtype.kind != "U":
        return ids
    return np.strings.encode(ids, "utf-8").astype(f"S{width}").view(np.uint8).reshape(len(ids), -1)


def _write_npz(path: Path, batches: Iterable[Columns]) -> None:
    parts = list(batches)
    with path.open("wb") as file:
        np.savez(file, **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})  # type: ignore[arg-type]


def _write_parquet(path: Path, batches: Iterable[Columns]) -> None:
    pa, pq = parquet_modules(path)

    def column(values: np.ndarray) -> Any:
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        if not values.shape[1]:
            return pa.array([[]] * len(values), pa.list_(flat.type))
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])

    write_tables(pq, path, (pa.table({name: column(values) for name, values in part.items()}) for part in batches))


def parquet_modules(path: Path) -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet, or how to get them."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError(f"{path.name} needs pyarrow; install it with: pip install 'och-dist[parquet]'") from None
    return pa, pq


def write_tables(pq: Any, path: Path, tables: Iterator[Any]) -> None:
    """Write tables of one schema as they come, at least one."""
    head = next(tables)
    with contextlib.closing(pq.ParquetWriter(path, head.schema)) as writer:
        for part in itertools.chain([head], tables):
            writer.write_table(part)


def _write_jsonl(path: Path, batches: Iterable[Columns]) -> None:
    with path.open("w") as file:
        for part in batches:
            columns = {name: values.tolist() for name, values in part.items()}
            for query in range(len(next(iter(part.values())))):
                file.write(json.dumps({name: values[query] for name, values in columns.items()}) + "\n")


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
        found = Neighbors(*(read_rows(self._array(name), start, stop) for name in ("distances", "rows")))
        if not self.about.get("ids"):
            return found
        ids = read_rows(self._array("ids"), start, stop)
        if ids.dtype == np.uint8:
            width = int(self.about["id_width"])
            ids = np.strings.decode(np.ascontiguousarray(ids).view(f"S{width}"), "utf-8").reshape(len(ids), -1)
        return replace(found, ids=ids)

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
        raise IntegrityError(f"{path}/{ABOUT} is incomplete ({error}); make the result again") from None
