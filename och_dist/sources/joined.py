"""Where the rows of a corpus come from: several files joined to one range of rows, or the generator.

Both answer the same questions. :meth:`part` is what travels with a task: of thousands of files only those it reads.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from och_dist.errors import BadInputError, UsageError
from och_dist.sources.files import VectorFile, expand, open_ids, open_sources, read_ids, read_rows
from och_dist.store import canonical, sha256


@dataclass(frozen=True)
class JoinedFiles:
    """Files of one dimension and dtype, one after the other; all with ids of one kind, or all without.

    The first row has number ``first_row``.
    """

    files: tuple[VectorFile, ...]
    first_row: int = 0

    @cached_property
    def _stops(self) -> list[int]:
        return list(accumulate((file.rows for file in self.files), initial=self.first_row))[1:]

    @property
    def rows(self) -> int:
        return self._stops[-1] - self.first_row

    @property
    def dim(self) -> int:
        return self.files[0].dim

    @property
    def dtype(self) -> str:
        return self.files[0].dtype

    @property
    def ids(self) -> str | None:
        """``'int64'`` or ``'string'`` where the rows have ids, else None."""
        ids = self.files[0].ids if self.files else None
        return ids.kind if ids else None

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[VectorFile, int, int]]:
        """(file, first row in it, last row in it + 1) of every file that holds some of rows [start, stop)."""
        first, last = bisect_right(self._stops, start), bisect_left(self._stops, stop)
        for file, end in zip(self.files[first : last + 1], self._stops[first : last + 1], strict=True):
            offset = end - file.rows
            yield file, max(start - offset, 0), min(stop - offset, file.rows)

    def part(self, start: int, stop: int) -> JoinedFiles:
        """The files that hold rows [start, stop); row numbers stay."""
        pieces = list(self._pieces(start, stop))
        return JoinedFiles(tuple(file for file, _, _ in pieces), start - pieces[0][1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as (rows, dim)."""
        parts = [read_rows(file, low, high) for file, low, high in self._pieces(start, stop)]
        return _joined(parts or [np.empty((0, self.dim), self.dtype)])

    def read_ids(self, start: int, stop: int) -> np.ndarray:
        """Keys of rows [start, stop): int64 (m,) or bytes (m,)."""
        return _joined([read_ids(file.ids, low, high) for file, low, high in self._pieces(start, stop) if file.ids])

    def identity(self) -> list[Any]:
        """What a resumed ingest must find unchanged."""
        return [[file.fingerprint, file.mtime_ns, file.dataset] for file in self.files]

    def id_identity(self) -> list[Any]:
        """The same of the ids."""
        return [[file.ids.fingerprint, file.ids.mtime_ns, file.ids.column] for file in self.files if file.ids]

    def describe(self) -> list[dict[str, Any]]:
        """The files as a manifest lists them, each with its ids."""
        return [file.describe() for file in self.files]


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(frozen=True)
class GeneratedRows:
    """Rows [first_row, first_row + rows) of the GIST-like generator."""

    rows: int
    dim: int
    seed: int
    first_row: int
    dtype: str = "<f4"
    ids: None = None

    def part(self, start: int, stop: int) -> GeneratedRows:
        """The same: a generator is small enough to travel whole."""
        return self

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop), counted from ``first_row``, as (rows, dim)."""
        from och_dist.kernels.gistlike import gist_rows

        return gist_rows(self.first_row + start, stop - start, dim=self.dim, seed=self.seed)

    def identity(self) -> list[Any]:
        return ["gistlike", self.rows, self.dim, self.seed, self.first_row]

    def describe(self) -> list[dict[str, Any]]:
        about = {"format": "gistlike", "rows": self.rows, "seed": self.seed, "first_row": self.first_row}
        return [{**about, "fingerprint": sha256(canonical(self.identity())), "dataset": None}]


RowSource = JoinedFiles | GeneratedRows


def open_files(
    patterns: Sequence[str] | str,
    *,
    dataset: str | None = None,
    allow_empty: bool = False,
    ids: Sequence[str] | str | None = None,
    id_column: str | None = None,
) -> JoinedFiles:
    """Files of vectors, and beside them files of ids or a column of their own; see :func:`open_sources`."""
    files = open_sources(_listed(patterns), dataset=dataset, allow_empty=allow_empty)
    if ids and id_column is not None:
        raise UsageError("ids come from files or from a column, not from both; give --ids or --id-column")
    if not ids and id_column is None:
        return JoinedFiles(tuple(files))
    if ids:
        id_files = [open_ids(path) for pattern in _listed(ids) for path in expand(pattern)]
        if len(id_files) != len(files):
            raise UsageError(
                f"{len(id_files)} files of ids for {len(files)} files of vectors; give one for each, in order"
            )
    else:
        id_files = [open_ids(file.path, column=id_column) for file in files]
    first = id_files[0]
    for file, its in zip(files, id_files, strict=True):
        if its.rows != file.rows:
            raise BadInputError(
                f"{its.path} holds {its.rows} ids, {file.path} has {file.rows} rows; expected one id for each "
                "row: make them anew from the same data"
            )
        if its.kind != first.kind:
            raise BadInputError(
                f"{its.path} holds ids of kind {its.kind}, {first.path} of kind {first.kind}; "
                "expected one kind: convert one of them"
            )
    return JoinedFiles(tuple(replace(file, ids=its) for file, its in zip(files, id_files, strict=True)))


def _listed(names: Sequence[str] | str) -> Sequence[str]:
    return [names] if isinstance(names, str) else names
