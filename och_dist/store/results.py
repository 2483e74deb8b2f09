"""Results on disk: neighbours and histograms of queries, in Zarr (any size), npz, parquet or JSON lines, chosen by the
file name. Results are written beside their final name and moved there when they are whole.

Most have a fixed number of values for each query, and are chunked by query. All neighbours within a radius do not: how
many there are is known only at the end, so those of Zarr and npz results pass through plain files beside them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from och_dist.errors import BadInputError, ConflictError, IntegrityError, UsageError
from och_dist.store.arrays import ArraySpec, create_array, open_array, read_rows, write_chunk
from och_dist.store.manifest import canonical, read_document, seal, unseal
from och_dist.store.objects import LocalObjects, replacing

FORMATS = (".zarr", ".npz", ".parquet", ".jsonl")
ABOUT = "neighbors.json"
CHUNK_ENTRIES = 1 << 20

Columns = dict[str, np.ndarray]


def _columns(distances: np.ndarray, rows: np.ndarray, ids: np.ndarray | None) -> Columns:
    """What is stored of neighbours, by name."""
    return {"distances": distances, "rows": rows, **({} if ids is None else {"ids": ids})}


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

    def columns(self) -> Columns:
        return _columns(self.distances, self.rows, self.ids)


@dataclass(frozen=True)
class RadiusNeighbors:
    """All neighbours within a radius: query i has the entries ``indptr[i]`` to ``indptr[i + 1]`` (compressed rows).

    ``indptr`` (q + 1,) int64, ``distances`` (m,) and ``rows`` (m,), sorted by (distance, row) for each query.
    """

    indptr: np.ndarray
    distances: np.ndarray
    rows: np.ndarray
    ids: np.ndarray | None = None

    def columns(self) -> Columns:
        return _columns(self.distances, self.rows, self.ids)

    def lists(self) -> Iterator[dict[str, list[Any]]]:
        """The entries of one query after the other."""
        return _entries(self.columns(), self.indptr)


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
    _save_fixed(path, columns, no_neighbors(width).columns(), (queries, batch), {**about, "width": width})


def save_histograms(
    path: str, batches: Iterable[np.ndarray], *, queries: int, bits: int, batch: int, about: dict[str, Any]
) -> None:
    """Write counts (q, bits + 1) of batches of queries as ``counts``, like neighbours."""
    nothing = {"counts": np.empty((0, bits + 1), np.int64)}
    _save_fixed(path, ({"counts": part} for part in batches), nothing, (queries, batch), {**about, "width": bits + 1})


def _save_fixed(
    path: str, batches: Iterator[Columns], nothing: Columns, sizes: tuple[int, int], about: dict[str, Any]
) -> None:
    """Write columns (q, width) of batches of queries; ``nothing`` stands for none."""
    target = check_output(path)
    with replacing(target) as partial:
        batches = itertools.chain([next(batches, nothing)], batches)
        if target.suffix == ".zarr":
            _write_zarr(partial, batches, sizes, about)
        elif target.suffix == ".npz":
            parts = list(batches)
            _write_npz(partial, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
        else:
            _write_lists(partial, target.suffix, ((part, None) for part in batches))


def save_radius(path: str, batches: Iterable[RadiusNeighbors], *, about: dict[str, Any]) -> int:
    """Write batches of queries as they come; ``about`` is kept with a Zarr result. Returns the number of entries."""
    target, total = check_output(path), 0

    def counted() -> Iterator[tuple[Columns, np.ndarray]]:
        nonlocal total
        for part in batches:
            total += len(part.rows)
            yield part.columns(), part.indptr

    with replacing(target) as partial:
        if target.suffix in (".jsonl", ".parquet"):
            nothing = _columns(np.empty(0, np.int32), np.empty(0, np.int64), None), np.zeros(1, np.int64)
            made = counted()
            _write_lists(partial, target.suffix, itertools.chain([next(made, nothing)], made))
        else:
            _write_spooled(partial, target.suffix, counted(), about)
    return total


def _write_lists(path: Path, suffix: str, batches: Iterable[tuple[Columns, np.ndarray | None]]) -> None:
    """Write a list of values for each query and column; columns are (q, width), or (m,) in lists by ``indptr``."""
    if suffix == ".jsonl":
        with path.open("w") as file:
            for columns, indptr in batches:
                file.writelines(json.dumps(entry) + "\n" for entry in _entries(columns, indptr))
        return
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UsageError(f"{path.name} needs pyarrow; install it with: pip install 'och-dist[parquet]'") from None

    def column(values: np.ndarray, indptr: np.ndarray | None) -> Any:
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        if indptr is not None:
            return pa.LargeListArray.from_arrays(pa.array(indptr), flat)
        if not values.shape[1]:
            return pa.array([[]] * len(values), pa.list_(flat.type))
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])

    with contextlib.ExitStack() as stack:
        writer: Any = None
        for columns, indptr in batches:
            table = pa.table({name: column(values, indptr) for name, values in columns.items()})
            writer = writer or stack.enter_context(pq.ParquetWriter(path, table.schema))
            writer.write_table(table)


def _entries(columns: Columns, indptr: np.ndarray | None) -> Iterator[dict[str, list[Any]]]:
    """The values of one query after the other."""
    lists = {name: values.tolist() for name, values in columns.items()}
    if indptr is None:
        yield from (dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True))
        return
    for low, high in itertools.pairwise(indptr.tolist()):
        yield {name: values[low:high] for name, values in lists.items()}


def _write_npz(path: Path, columns: Columns) -> None:
    with path.open("wb") as file:
        np.savez(file, **columns)  # type: ignore[arg-type]


def _write_zarr(path: Path, batches: Iterable[Columns], sizes: tuple[int, int], about: dict[str, Any]) -> None:
    queries, batch = sizes
    objects = LocalObjects(path)
    for number, part in enumerate(batches):
        for name, column in part.items():
            values = _stored_ids(column, int(about.get("id_width", 0))) if name == "ids" else column
            if number == 0:
                dtype = values.dtype.newbyteorder("<").str
                spec = ArraySpec(queries, values.shape[1], dtype, max(1, min(batch, queries)))
                create_array(objects, name, spec)
            if len(values):
                write_chunk(objects, name, number, values)
    _describe(objects, {**about, "queries": queries})


def _describe(objects: LocalObjects, about: dict[str, Any]) -> None:
    """Make a group of the arrays, and say what they are."""
    objects.put("zarr.json", canonical({"zarr_format": 3, "node_type": "group", "attributes": {}}))
    objects.put(ABOUT, seal(about))


def _stored_ids(ids: np.ndarray, width: int) -> np.ndarray:
    """Ids (m, n) as they are stored: int64, or strings as bytes (m, n * width), each padded with NUL to ``width``."""
    if ids.dtype.kind != "U":
        return ids
    return np.strings.encode(ids, "utf-8").astype(f"S{width}").view(np.uint8).reshape(len(ids), -1)


def _read_ids(stored: np.ndarray, width: int) -> np.ndarray:
    """Ids (m, n) of stored ones: int64, or strings."""
    if stored.dtype != np.uint8:
        return stored
    return np.strings.decode(np.ascontiguousarray(stored).view(f"S{width}"), "utf-8").reshape(len(stored), -1)


def _write_spooled(
    path: Path, suffix: str, batches: Iterator[tuple[Columns, np.ndarray]], about: dict[str, Any]
) -> None:
    """Spool the entries of every column to a file, then store them as arrays."""
    width = int(about.get("id_width", 0))
    spool = path.with_name(f"{path.name}.spool")
    spool.mkdir()
    try:
        indptr, columns = _spool(spool, batches, width)
        if suffix == ".npz":
            flat = {name: (_read_ids(v, width) if name == "ids" else v)[:, 0] for name, v in columns.items()}
            _write_npz(path, {"indptr": indptr, **flat})
            return
        objects = LocalObjects(path)
        for name, values in {"indptr": indptr.astype("<i8")[:, None], **columns}.items():
            size = max(1, min(CHUNK_ENTRIES, len(values)))
            create_array(objects, name, ArraySpec(len(values), values.shape[1], values.dtype.str, size))
            for number, start in enumerate(range(0, len(values), size)):
                write_chunk(objects, name, number, np.asarray(values[start : start + size]))
        _describe(objects, {**about, "queries": len(indptr) - 1, "entries": int(indptr[-1])})
    finally:
        shutil.rmtree(spool)


def _spool(
    folder: Path, batches: Iterator[tuple[Columns, np.ndarray]], id_width: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """indptr (q + 1,) of all queries, and the columns (m, width), whose entries are in files in ``folder``."""
    pointers: list[np.ndarray] = [np.zeros(1, np.int64)]
    specs: dict[str, tuple[np.dtype, int]] = {"distances": (np.dtype("<i4"), 1), "rows": (np.dtype("<i8"), 1)}
    total = 0
    for columns, indptr in batches:
        pointers.append(indptr[1:] + total)
        total += int(indptr[-1])
        for name, column in columns.items():
            values = _stored_ids(column[:, None], id_width) if name == "ids" else column[:, None]
            specs[name] = values.dtype.newbyteorder("<"), values.shape[1]
            with (folder / name).open("ab") as file:
                file.write(np.ascontiguousarray(values, specs[name][0]).tobytes())
    found = {
        name: np.memmap(folder / name, dtype, "r").reshape(-1, width) if total else np.empty((0, width), dtype)
        for name, (dtype, width) in specs.items()
    }
    return np.concatenate(pointers), found


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
        width = int(self.about.get("id_width", 0))
        return replace(found, ids=_read_ids(read_rows(self._array("ids"), start, stop), width))

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
