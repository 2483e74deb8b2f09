"""Query vectors, from a file, a corpus or an array, read in batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from och_dist.errors import BadInputError, NonFiniteError
from och_dist.kernels.moments import nonfinite_rows
from och_dist.sources.formats import is_accepted
from och_dist.sources.joined import open_files
from och_dist.store import open_corpus

HASHED_BYTES = 16 << 20


@dataclass(frozen=True)
class Queries:
    """``rows`` query vectors of dimension ``dim``; ``fingerprint`` stands for their content."""

    rows: int
    dim: int
    fingerprint: str
    source: str
    _read: Callable[[int, int], np.ndarray]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Queries [start, stop) as (stop - start, dim), refused when a value is not finite."""
        block = self._read(start, stop)
        bad = nonfinite_rows(block)
        if len(bad):
            raise NonFiniteError.of(f"queries of {self.source}", bad + start, len(bad), "mend or remove them")
        return block

    def require_dim(self, dim: int, what: str) -> None:
        if self.dim != dim:
            raise BadInputError(
                f"the queries of {self.source} are {self.dim}-d, {what} is {dim}-d; use queries of its own dimension"
            )


def open_queries(queries: Any, *, dataset: str | None = None) -> Queries:
    """Queries from an array (n, d), a file, a glob, or a corpus."""
    if not isinstance(queries, str | Path):
        array = _checked_array(queries)
        return _queries(array.shape, array.dtype, "the array", lambda start, stop: array[start:stop])
    text = str(queries)
    if Path(text, "versions").is_dir() or "://" in text:
        corpus = open_corpus(text)
        return Queries(corpus.rows, corpus.dim, corpus.fingerprint, text, corpus.read)
    files = open_files(text, dataset=dataset, allow_empty=True)
    return _queries((files.rows, files.dim), np.dtype(files.dtype), text, files.read)


def _checked_array(queries: Any) -> np.ndarray:
    array = np.asarray(queries)
    if array.ndim != 2 or not is_accepted(array.dtype):
        raise BadInputError(
            f"queries are {array.dtype} of shape {array.shape}; give a 2-D array of float16, float32, float64, "
            "uint8 or int8, one query per row"
        )
    return np.ascontiguousarray(array, array.dtype.newbyteorder("="))


def _queries(shape: tuple[int, ...], dtype: np.dtype, source: str, read: Callable[[int, int], np.ndarray]) -> Queries:
    """With the sha256 of every byte: results are looked up by it, so a changed query must change it."""
    (rows, dim), little = shape, dtype.newbyteorder("<")
    total = hashlib.sha256(f"{little.str} {shape}".encode())
    step = max(1, HASHED_BYTES // max(1, dim * dtype.itemsize))
    for start in range(0, rows, step):
        total.update(np.ascontiguousarray(read(start, min(start + step, rows)), little).data)
    return Queries(rows, dim, total.hexdigest(), source, read)
