"""All neighbours within a radius: query i has the entries ``indptr[i]`` to ``indptr[i + 1]`` (compressed rows).

How many there are is known only at the end, so entries of Zarr and npz results pass through plain files beside them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from och_dist.store.arrays import ArraySpec, create_array, open_array, read_rows, write_chunk
from och_dist.store.manifest import canonical, seal
from och_dist.store.objects import LocalObjects
from och_dist.store.results import ABOUT, parquet_modules, stored_ids, write_tables, written_beside

CHUNK_ENTRIES = 1 << 20


@dataclass(frozen=True)
class RadiusNeighbors:
    """``indptr`` (q + 1,) int64, ``distances`` (m,) and ``rows`` (m,), sorted by (distance, row) for each query."""

    indptr: np.ndarray
    distances: np.ndarray
    rows: np.ndarray
    ids: np.ndarray | None = None

    def columns(self) -> dict[str, np.ndarray]:
        """What is stored of the entries, by name."""
        return {"distances": self.distances, "rows": self.rows, **({} if self.ids is None else {"ids": self.ids})}

    def lists(self) -> Iterator[dict[str, list[Any]]]:
        """The entries of one query after the other."""
        columns = {name: values.tolist() for name, values in self.columns().items()}
        for low, high in zip(self.indptr[:-1].tolist(), self.indptr[1:].tolist(), strict=True):
            yield {name: values[low:high] for name, values in columns.items()}


def save_radius(path: str, batches: Iterable[RadiusNeighbors], *, about: dict[str, Any]) -> int:
    """Write batches of queries as they come; ``about`` is kept with a Zarr result. Returns the number of entries."""
    with written_beside(path) as (partial, suffix):
        if suffix == ".jsonl":
            return _write_jsonl(partial, batches)
        if suffix == ".parquet":
            return _write_parquet(partial, batches, about)
        return _write_arrays(partial, batches, about, suffix)


def _write_jsonl(path: Path, batches: Iterable[RadiusNeighbors]) -> int:
    total = 0
    with path.open("w") as file:
        for part in batches:
            total += len(part.rows)
            file.writelines(json.dumps(entry) + "\n" for entry in part.lists())
    return total


def _write_parquet(path: Path, batches: Iterable[RadiusNeighbors], about: dict[str, Any]) -> int:
    pa, pq = parquet_modules(path)
    total = 0

    def tables() -> Iterator[Any]:
        nonlocal total
        for part in batches:
            total += len(part.rows)
            yield table(part)

    def table(part: RadiusNeighbors) -> Any:
        offsets = pa.array(part.indptr)
        columns = part.columns()
        return pa.table({name: pa.LargeListArray.from_arrays(offsets, pa.array(v)) for name, v in columns.items()})

    nothing = RadiusNeighbors(np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0, np.int64))
    made = tables()
    write_tables(pq, path, itertools.chain([next(made, table(nothing))], made))
    return total


def _write_arrays(path: Path, batches: Iterable[RadiusNeighbors], about: dict[str, Any], suffix: str) -> int:
    """Spool the entries of every column to a file, then store them as arrays."""
    spool = path.with_name(f"{path.name}.spool")
    spool.mkdir()
    try:
        indptr, specs = _spool(spool, batches, int(about.get("id_width", 0)))
        columns = {
            name: np.memmap(spool / name, dtype, "r").reshape(-1, width)
            if int(indptr[-1])
            else np.empty((0, width), dtype)
            for name, (dtype, width) in specs.items()
        }
        if suffix == ".npz":
            flat = {name: _plain(values, name) for name, values in columns.items()}
            with path.open("wb") as file:
                np.savez(file, indptr=indptr, **flat)  # type: ignore[arg-type]
        else:
            _write_zarr(path, indptr, columns, about)
    finally:
        for file_path in spool.iterdir():
            file_path.unlink()
        spool.rmdir()
    return int(indptr[-1])


def _plain(values: np.ndarray, name: str) -> np.ndarray:
    """Entries (m,) of a column (m, width); the bytes of string ids become NumPy bytes."""
    if name == "ids" and values.dtype == np.uint8:
        return np.strings.decode(np.ascontiguousarray(values).view(f"S{values.shape[1]}")[:, 0], "utf-8")
    return values[:, 0]


def _spool(
    folder: Path, batches: Iterable[RadiusNeighbors], id_width: int
) -> tuple[np.ndarray, dict[str, tuple[np.dtype, int]]]:
    """indptr of all queries, and (dtype, width) of every column, whose entries are appended to files in ``folder``."""
    pointers: list[np.ndarray] = [np.zeros(1, np.int64)]
    specs: dict[str, tuple[np.dtype, int]] = {"distances": (np.dtype("<i4"), 1), "rows": (np.dtype("<i8"), 1)}
    total = 0
    for part in batches:
        pointers.append(part.indptr[1:] + total)
        total += len(part.rows)
        for name, column in part.columns().items():
            values = stored_ids(column[:, None], id_width) if name == "ids" else column[:, None]
            specs[name] = values.dtype.newbyteorder("<"), values.shape[1]
            with (folder / name).open("ab") as file:
                file.write(np.ascontiguousarray(values, specs[name][0]).tobytes())
    return np.concatenate(pointers), specs


def _write_zarr(path: Path, indptr: np.ndarray, columns: dict[str, np.ndarray], about: dict[str, Any]) -> None:
    objects = LocalObjects(path)
    for name, values in {"indptr": indptr.astype("<i8")[:, None], **columns}.items():
        size = max(1, min(CHUNK_ENTRIES, len(values)))
        create_array(objects, name, ArraySpec(len(values), values.shape[1], values.dtype.str, size))
        for number, start in enumerate(range(0, len(values), size)):
            write_chunk(objects, name, number, np.asarray(values[start : start + size]))
    objects.put("zarr.json", canonical({"zarr_format": 3, "node_type": "group", "attributes": {}}))
    objects.put(ABOUT, seal({**about, "queries": len(indptr) - 1, "entries": int(indptr[-1])}))


def load_radius(path: str) -> RadiusNeighbors:
    """A radius result in a Zarr group, whole."""
    objects = LocalObjects(path)
    arrays = {name: open_array(objects, name) for name in ("indptr", "distances", "rows")}
    if objects.size("ids/zarr.json") is not None:
        arrays["ids"] = open_array(objects, "ids")
    return RadiusNeighbors(**{n: _plain(read_rows(array, 0, array.shape[0]), n) for n, array in arrays.items()})
