"""Where the rows of a new segment come from: files, or the generator; and their ids: other files.

:meth:`part` is what travels with a task: of thousands of files only those that it reads.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from och_dist.sources.id_files import IdSource, read_ids
from och_dist.sources.readers import Source, read_rows
from och_dist.store import canonical, sha256


@dataclass(frozen=True)
class Files:
    """Vectors of several files of one dimension and dtype, one after the other; the first has number ``first_row``."""

    sources: tuple[Source, ...]
    first_row: int = 0

    @cached_property
    def _stops(self) -> list[int]:
        return list(accumulate((source.rows for source in self.sources), initial=self.first_row))[1:]

    @property
    def rows(self) -> int:
        return self._stops[-1] - self.first_row

    @property
    def dim(self) -> int:
        return self.sources[0].dim

    @property
    def dtype(self) -> str:
        return self.sources[0].dtype

    def part(self, start: int, stop: int) -> Files:
        """The files that hold rows [start, stop); row numbers stay."""
        first, last = bisect_right(self._stops, start), bisect_left(self._stops, stop)
        return Files(self.sources[first : last + 1], self._stops[first] - self.sources[first].rows)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as (rows, dim)."""
        parts, offset = [], self.first_row
        for source in self.sources:
            low, high = max(start, offset), min(stop, offset + source.rows)
            if low < high:
                parts.append(read_rows(source, low - offset, high - offset))
            offset += source.rows
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def identity(self) -> list[Any]:
        """What a resumed ingest must find unchanged."""
        return [[source.fingerprint, source.mtime_ns, source.dataset] for source in self.sources]

    def describe(self) -> list[dict[str, Any]]:
        return [
            {
                "path": s.path,
                "format": s.format,
                "rows": s.rows,
                "fingerprint": s.fingerprint,
                "dataset": s.dataset,
            }
            for s in self.sources
        ]


@dataclass(frozen=True)
class IdFiles:
    """Ids of one kind from several files, one after the other; the first belongs to row ``first_row``."""

    sources: tuple[IdSource, ...]
    first_row: int = 0

    @cached_property
    def _stops(self) -> list[int]:
        return list(accumulate((source.rows for source in self.sources), initial=self.first_row))[1:]

    @property
    def kind(self) -> str:
        return self.sources[0].kind

    def part(self, start: int, stop: int) -> IdFiles:
        """The files that hold the ids of rows [start, stop), and what is needed to find these; row numbers stay."""
        first, last = bisect_right(self._stops, start), bisect_left(self._stops, stop)
        offset = self._stops[first] - self.sources[first].rows
        before, cut = offset, []
        for source in self.sources[first : last + 1]:
            cut.append(source.cut(max(start - offset, 0), min(stop - offset, source.rows)))
            offset += source.rows
        return IdFiles(tuple(cut), before)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Keys of rows [start, stop): int64 (m,) or bytes (m,)."""
        parts, offset = [], self.first_row
        for source in self.sources:
            low, high = max(start, offset), min(stop, offset + source.rows)
            if low < high:
                parts.append(read_ids(source, low - offset, high - offset))
            offset += source.rows
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def identity(self) -> list[Any]:
        """What a resumed ingest must find unchanged."""
        return [[source.fingerprint, source.mtime_ns, source.column] for source in self.sources]


@dataclass(frozen=True)
class Generated:
    """Rows [first_row, first_row + rows) of the GIST-like generator."""

    rows: int
    dim: int
    seed: int
    first_row: int
    dtype: str = "<f4"

    def part(self, start: int, stop: int) -> Generated:
        """It is small as it is."""
        return self

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop), counted from ``first_row``, as (rows, dim)."""
        from och_dist.kernels.gistlike import gist_rows

        return gist_rows(self.first_row + start, stop - start, dim=self.dim, seed=self.seed)

    def identity(self) -> list[Any]:
        return ["gistlike", self.rows, self.dim, self.seed, self.first_row]

    def describe(self) -> list[dict[str, Any]]:
        fingerprint = sha256(canonical(self.identity()))
        return [
            {
                "format": "gistlike",
                "rows": self.rows,
                "seed": self.seed,
                "first_row": self.first_row,
                "fingerprint": fingerprint,
                "dataset": None,
            }
        ]


Origin = Files | Generated
