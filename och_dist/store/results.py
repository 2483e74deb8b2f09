"""Results on disk: neighbours and histograms of queries, in Zarr (any size), npz, parquet or JSON lines, chosen by the
file name. Results are written beside their final name and moved there when they are whole.

Most have a fixed number of values for each query, and are chunked by query. All neighbours within a radius do not: how
many there are is known only at the end, so those of Zarr and npz results pass through plain files beside them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from och_dist.errors import BadInputError, ConflictError, IntegrityError, UsageError
from och_dist.store.arrays import ArraySpec, create_array, open_array, read_rows, write_chunk
from och_dist.store.corpus import ids_text
from och_dist.store.manifest import canonical, read_sealed, seal
from och_dist.store.objects import LocalObjects, replacing

FORMATS = (".zarr", ".npz", ".parquet", ".jsonl")
ABOUT = "neighbors.json"
CHUNK_ENTRIES = 1 << 20

Columns = dict[str, np.ndarray]
Lists = tuple[Columns, np.ndarray | None]
"""One list of values for each query and column: columns are (q, width), or (m,) in lists by ``indptr``."""


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
    lists = ((part.columns(), None) for part in batches)
    _save(path, lists, no_neighbors(width).columns(), {**about, "width": width}, sizes=(queries, batch))


def save_histograms(
    path: str, batches: Iterable[np.ndarray], *, queries: int, bits: int, batch: int, about: dict[str, Any]
) -> None:
    """Write counts (q, bits + 1) of batches of queries as ``counts``, like neighbours."""
    lists = (({"counts": part}, None) for part in batches)
    nothing = {"counts": np.empty((0, bits + 1), np.int64)}
    _save(path, lists, nothing, {**about, "width": bits + 1}, sizes=(queries, batch))


def save_radius(path: str, batches: Iterable[RadiusNeighbors], *, about: dict[str, Any]) -> int:
    """Write batches of queries as they come; ``about`` is kept with a Zarr result. Returns the number of entries."""
    total = 0

    def lists() -> Iterator[Lists]:
        nonlocal total
        for part in batches:
            total += len(part.rows)
            yield part.columns(), part.indptr

    _save(path, lists(), _columns(np.empty(0, np.int32), np.empty(0, np.int64), None), about)
    return total


def _save(
    path: str,
    batches: Iterator[Lists],
    nothing: Columns,
    about: dict[str, Any],
    *,
    sizes: tuple[int, int] | None = None,
) -> None:
    """Write batches of lists; ``nothing`` stands for none. ``sizes`` (queries in all, in a batch) where all lists are
    of one length."""
    target = check_output(path)
    empty: Lists = nothing, np.zeros(1, np.int64) if sizes is None else None
    with replacing(target) as partial:
        batches = itertools.chain([next(batches, empty)], batches)
        if target.suffix in (".jsonl", ".parquet"):
            _write_lists(partial, target.suffix, batches)
        elif sizes is None:
            _write_spooled(partial, target.suffix, batches, about)
        elif target.suffix == ".npz":
            parts = [columns for columns, _ in batches]
            _write_npz(partial, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
        else:
            _write_zarr(partial, (columns for columns, _ in batches), sizes, about)


def _write_lists(path: Path, suffix: str, batches: Iterable[Lists]) -> None:
    """Write a list of values for each query and column."""
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
    return np.strings.encode(ids, "utf-8").astype(f"S{width}").view(np.uint8).reshape(len(ids), ids.shape[1] * width)


def _read_ids(stored: np.ndarray, width: int) -> np.ndarray:
    """Ids (m, n) of stored ones: int64, or strings."""
    width = width if stored.dtype == np.uint8 else 1
    return ids_text(stored.reshape(-1, width)).reshape(len(stored), stored.shape[1] // width)


def _write_spooled(path: Path, suffix: str, batches: Iterator[Lists], about: dict[str, Any]) -> None:
    """Spool the entries of every column to a file, then store them as arrays."""
    width = int(about.get("id_width", 0))
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as spool:
        indptr, columns = _spool(Path(spool), batches, width)
        if suffix == ".npz":
            flat = {name: (_read_ids(v, width) if name == "ids" else v)[:, 0] for name, v in columns.items()}
            _write_npz(path, {"indptr": indptr, **flat})
            return
        objects = LocalObjects(path)
        for name, values in {"indptr": indptr.astype("<i8")[:, None], **columns}.items():
            size = max(1, min(CHUNK_ENTRIES, len(values)))
            spec = ArraySpec(len(values), values.shape[1], values.dtype.str, size)
            create_array(objects, name, spec)
            for number in range(spec.n_chunks):
                write_chunk(objects, name, number, np.asarray(values[slice(*spec.bounds(number))]))
        _describe(objects, {**about, "queries": len(indptr) - 1, "entries": int(indptr[-1])})


def _spool(folder: Path, batches: Iterator[Lists], id_width: int) -> tuple[np.ndarray, Columns]:
    """indptr (q + 1,) of all queries, and the columns (m, width), whose entries are in files in ``folder``."""
    pointers: list[np.ndarray] = [np.zeros(1, np.int64)]
    specs: dict[str, tuple[np.dtype, int]] = {}
    total = 0
    for columns, indptr in batches:
        assert indptr is not None  # lists of one length are not spooled
        pointers.append(indptr[1:] + total)
        total += int(indptr[-1])
        for name, column in columns.items():
            values = _stored_ids(column[:, None], id_width) if name == "ids" else column[:, None]
            specs[name] = values.dtype.newbyteorder("<"), values.shape[1]
            with (folder / name).open("ab") as file:
                file.write(np.ascontiguousarray(values, specs[name][0]).tobytes())
    found: Columns = {
        name: np.memmap(folder / name, dtype, "r").reshape(-1, width) if total else np.empty((0, width), dtype)
        for name, (dtype, width) in specs.items()
    }
    return np.concatenate(pointers), found


def read_about(path: str) -> dict[str, Any] | None:
    """What a Zarr result says about itself, None if there is no (whole) result at ``path``."""
    return read_sealed(LocalObjects(path), ABOUT)


@dataclass(frozen=True)
class StoredNeighbors:
    """A Zarr result, read a few queries at a time."""

    path: str
    queries: int
    width: int
    about: dict[str, Any]

    def read(self, start: int, stop: int) -> Neighbors:
        """Neighbours of queries [start, stop)."""
        ids = None
        if self.about.get("ids"):
            ids = _read_ids(self._read("ids", start, stop), int(self.about.get("id_width", 0)))
        return Neighbors(self._read("distances", start, stop), self.read_rows(start, stop), ids)

    def read_rows(self, start: int, stop: int) -> np.ndarray:
        """Row numbers (stop - start, width) of queries [start, stop)."""
        return self._read("rows", start, stop)

    def _read(self, name: str, start: int, stop: int) -> np.ndarray:
        return read_rows(open_array(LocalObjects(self.path), name), start, stop)


def open_neighbors(path: str) -> StoredNeighbors:
    about = read_about(path)
    if about is None:
        raise BadInputError(f"{path} holds no neighbours; make them with 'och truth' or 'och search -o {path}'")
    try:
        return StoredNeighbors(str(Path(path).absolute()), int(about["queries"]), int(about["width"]), about)
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"{path}/{ABOUT} is incomplete ({error}); make the result again") from None
