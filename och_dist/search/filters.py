"""Which rows a search may return: sets of row numbers, what of them concerns one partition, and rows found by id."""

from __future__ import annotations

import contextlib
import hashlib
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from och_dist.cluster import reduce_tasks
from och_dist.errors import BadInputError, UsageError
from och_dist.sources import expand, open_ids, read_ids
from och_dist.stage import Context
from och_dist.store import Corpus, CorpusRef, id_keys

LISTED = 20
"""Unknown ids that an error names."""

RANGE = re.compile(r"\s*(\d{1,18})\s*(?:-\s*(\d{1,18})\s*)?", re.ASCII)


@dataclass(frozen=True, eq=False)
class RowSet:
    """Row numbers as ranges: ``starts`` and ``stops`` (m,) int64, ascending, disjoint and not touching.

    A mask of n rows needs at most 16 bytes for every second row, a list of rows 16 bytes each; what travels to a
    worker is only the part that concerns it.
    """

    starts: np.ndarray
    stops: np.ndarray

    @property
    def count(self) -> int:
        """Number of rows in the set."""
        return int((self.stops - self.starts).sum())

    @property
    def stop(self) -> int:
        """One more than the largest row, 0 for the empty set."""
        return int(self.stops[-1]) if len(self.stops) else 0

    def within(self, start: int, stop: int) -> RowSet:
        """The rows of the set in [start, stop)."""
        low = int(np.searchsorted(self.stops, start, side="right"))
        high = int(np.searchsorted(self.starts, stop, side="left"))
        return RowSet(np.maximum(self.starts[low:high], start), np.minimum(self.stops[low:high], stop))

    def mask(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) bool: which of the rows [start, stop) are in the set."""
        part = self.within(start, stop)
        steps = np.zeros(stop - start + 1, np.int8)
        steps[part.starts - start] += 1
        steps[part.stops - start] -= 1
        return np.cumsum(steps[:-1], dtype=np.int8).astype(bool)

    def contains(self, rows: np.ndarray) -> np.ndarray:
        """(m,) bool: which of ``rows`` (m,) are in the set."""
        place = np.searchsorted(self.starts, rows, side="right") - 1
        return (place >= 0) & (rows < self.stops[place]) if len(self.starts) else np.zeros(len(rows), bool)


def row_set(rows: Any) -> RowSet:
    """A set of rows from numbers (any order), a ``range``, a bool mask (n,), or a text like '5,10-20' or '@FILE' (an
    .npy of numbers or a mask, or a text file)."""
    if isinstance(rows, RowSet):
        return rows
    if isinstance(rows, str):
        return _of_file(Path(rows[1:])) if rows.startswith("@") else _of_text(rows)
    if isinstance(rows, range) and rows.step == 1:
        return _of_ranges(np.array([rows.start]), np.array([rows.stop]))
    array = np.asarray(rows)
    if array.dtype == bool and array.ndim == 1:
        edges = np.flatnonzero(np.diff(np.concatenate(([0], array.view(np.int8), [0]))))
        return RowSet(edges[0::2].astype(np.int64), edges[1::2].astype(np.int64))
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadInputError(
            f"rows are {array.dtype} of shape {array.shape}; give whole numbers, a range, or one True or False per row"
        )
    numbers = array.astype(np.int64)
    return _of_ranges(numbers, numbers + 1)


def _of_text(text: str) -> RowSet:
    pairs = []
    for word in text.split(","):
        if (match := RANGE.fullmatch(word)) is None:
            raise UsageError(f"{word!r} is not a row or a range of rows; write them like 5,10-20 (20 included)")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"the range {word.strip()} ends before it starts; write the smaller row first")
        pairs.append((first, last + 1))
    starts, stops = np.array(pairs, np.int64).T
    return _of_ranges(starts, stops)


def _of_ranges(starts: np.ndarray, stops: np.ndarray) -> RowSet:
    """The union of ranges in any order."""
    keep = stops > starts
    starts, stops = starts[keep].astype(np.int64), stops[keep].astype(np.int64)
    if not len(starts):
        return RowSet(starts, stops)
    if starts.min() < 0:
        raise UsageError(f"row {starts.min()} does not exist; rows count from 0")
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(stops[order])
    first = np.concatenate(([True], starts[1:] > reach[:-1]))
    return RowSet(starts[first], reach[np.append(first[1:], True)])


def _of_file(path: Path) -> RowSet:
    try:
        if path.suffix == ".npy":
            rows: Any = np.lib.format.open_memmap(path, mode="r")  # no more is allocated than the file has
        else:
            words = path.read_text().split()
            rows = ",".join(words) if words else words
    except (OSError, ValueError, EOFError) as error:
        raise BadInputError(
            f"{path} cannot be read ({error}); give an .npy of rows or a mask, or a text file"
        ) from None
    return row_set(rows)


@dataclass(frozen=True)
class Selection:
    """The rows that a search may return: those in ``only`` (None: all) that are not in ``without``."""

    only: RowSet | None = None
    without: RowSet | None = None

    def __bool__(self) -> bool:
        return self.only is not None or self.without is not None

    def check(self, rows: int) -> None:
        """Refuse rows that an index of ``rows`` rows does not have."""
        for part in (self.only, self.without):
            if part is not None and part.stop > rows:
                raise UsageError(f"row {part.stop - 1} does not exist; the index has rows 0 to {rows - 1}")

    def share(self, rows: int) -> float:
        """About what share of ``rows`` rows it leaves; above 0."""
        chosen = rows if self.only is None else self.only.count
        dropped = 0 if self.without is None else self.without.count
        return max(chosen - dropped, 1) / max(1, rows)

    def within(self, start: int, stop: int) -> Selection:
        """What concerns the rows [start, stop)."""
        return Selection(*(None if part is None else part.within(start, stop) for part in (self.only, self.without)))

    def live(self, start: int, stop: int, row_numbers: np.ndarray | None = None) -> np.ndarray:
        """(n,) bool: which of the rows [start, stop), or of ``row_numbers`` (n,), may be returned."""

        def held(part: RowSet) -> np.ndarray:
            return part.mask(start, stop) if row_numbers is None else part.contains(row_numbers)

        live = np.ones(stop - start if row_numbers is None else len(row_numbers), bool)
        if self.only is not None:
            live &= held(self.only)
        if self.without is not None:
            live &= ~held(self.without)
        return live

    @property
    def fingerprint(self) -> str:
        """Stands for its content: results are told apart by it."""
        total = hashlib.sha256()
        for part in (self.only, self.without):
            total.update(b"all" if part is None else np.stack([part.starts, part.stops]).astype("<i8").tobytes())
            total.update(b";")
        return total.hexdigest()


EVERYTHING = Selection()


def selection(only: Any = None, without: Any = None) -> Selection:
    """A selection from anything that :func:`row_set` takes."""
    return Selection(*(None if rows is None else row_set(rows) for rows in (only, without)))


def find_ids(corpus: CorpusRef, rows: tuple[int, int], keys: np.ndarray) -> np.ndarray:
    """(2, m) int64: places in ``keys``, which ascend, and the global rows that have these keys, among rows
    [start, stop) of a corpus."""
    found = [np.empty((2, 0), np.int64)]
    for first, block in corpus.open().id_blocks(*rows):
        theirs = id_keys(block)
        near = np.minimum(np.searchsorted(keys, theirs), len(keys) - 1)
        hit = np.flatnonzero(keys[near] == theirs)
        found.append(np.stack([near[hit], hit + first]))
    return np.concatenate(found, axis=1)


def find_rows(corpus: Corpus, ids: Any, context: Context | None = None) -> np.ndarray:
    """Global rows (m,) int64 of ``ids`` (m,), in their order; :class:`UsageError` names those that are unknown."""
    if corpus.ids is None:
        raise UsageError(f"{corpus.url} has no ids; give row numbers, or make it anew with 'och ingest --ids'")
    keys = _keys(ids, corpus)
    if not len(keys):
        return np.empty(0, np.int64)
    wanted, order = np.unique(keys, return_inverse=True)
    places, found = reduce_tasks(
        partial(find_ids, corpus.ref),
        corpus.partitions(),
        partial(np.concatenate, axis=1),
        client=(context or Context()).client,
        name="find_ids",
        shared=wanted,
    )
    rows = np.full(len(wanted), -1, np.int64)
    rows[places] = found
    unknown = wanted[rows < 0].tolist()
    if unknown:
        listed = ", ".join(repr(key.decode() if isinstance(key, bytes) else key) for key in unknown[:LISTED])
        raise UsageError(
            f"{len(unknown)} ids are unknown to {corpus.url}: {listed}{', ...' * (len(unknown) > LISTED)}; "
            "give ids of its rows"
        )
    return rows[order]


def read_id_list(path: str) -> np.ndarray:
    """All ids of a file (m,), int64 or str."""
    source = open_ids(expand(path)[0])
    keys = read_ids(source, 0, source.rows)
    return keys if source.kind == "int64" else np.strings.decode(keys, "utf-8")


def _keys(ids: Any, corpus: Corpus) -> np.ndarray:
    """Ids that a user gives, also as text, 'a,b' or '@FILE', as keys of the kind that the corpus has."""
    if isinstance(ids, str):
        words = (word.strip() for word in ids.split(","))
        ids = read_id_list(ids[1:]) if ids.startswith("@") else [word for word in words if word]
    values = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if not values.size:
        return np.empty(0, np.int64)
    text = values.dtype.kind == "U"
    if text and corpus.ids == "string" and values.ndim == 1:
        return np.strings.encode(values, "utf-8")
    if text and corpus.ids == "int64":
        with contextlib.suppress(ValueError, OverflowError):
            values = values.astype(np.int64)
    whole = values.dtype.kind in "iu" and values.ndim == 1 and int(values.max()) <= np.iinfo(np.int64).max
    if whole and corpus.ids == "int64":
        return values.astype(np.int64)
    expected = "strings" if corpus.ids == "string" else "whole numbers of 64 bits"
    raise UsageError(f"ids are {values.dtype} of shape {values.shape}, but {corpus.url} has {expected}; give such ids")
