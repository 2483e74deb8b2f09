"""Splits of a corpus into queries, database and training rows, as the paper draws them, with their exact truth."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from och_dist.cluster import map_tasks
from och_dist.errors import BadInputError, NonFiniteError
from och_dist.evaluate.exact import exact_neighbors, piece_size
from och_dist.kernels.moments import nonfinite_rows
from och_dist.stage import Context
from och_dist.store import (
    Corpus,
    CorpusRef,
    LocalObjects,
    StoredNeighbors,
    canonical,
    open_neighbors,
    read_about,
    save_neighbors,
    sha256,
)


@dataclass(frozen=True)
class Split:
    """Rows of one repeat: ascending global numbers of queries and of training rows; the database is all but queries."""

    queries: np.ndarray
    training: np.ndarray

    @classmethod
    def draw(cls, rows: int, *, queries: int, train_rows: int, seed: int, repeat: int) -> Split:
        """A function of these numbers alone, the same for every method."""
        if queries < 1 or train_rows < 1 or queries + train_rows > rows:
            raise BadInputError(
                f"{queries} queries and {train_rows} training rows need {queries + train_rows} rows, the corpus has "
                f"{rows}; lower --queries or --train-rows"
            )
        drawn = np.random.default_rng([seed, repeat]).permutation(rows)[: queries + train_rows]
        return cls(np.sort(drawn[:queries]), np.sort(drawn[queries:]))


@dataclass(frozen=True)
class GatherRows:
    corpus: CorpusRef
    start: int
    stop: int
    rows: np.ndarray


def gather_rows(task: GatherRows) -> np.ndarray:
    """The vectors (m, dim) of some rows of a partition; ``rows`` ascend."""
    corpus = task.corpus.open()
    parts = [np.empty((0, corpus.dim), corpus.dtype)]
    for first, block in corpus.blocks(task.start, task.stop):
        low, high = np.searchsorted(task.rows, (first, first + len(block)))
        parts.append(block[task.rows[low:high] - first])
    return np.concatenate(parts)


def read_some(corpus: Corpus, rows: np.ndarray, context: Context) -> np.ndarray:
    """The vectors (m, dim) of ascending global ``rows``, fetched by the cluster."""
    tasks = [
        GatherRows(corpus.ref, start, stop, rows[slice(*np.searchsorted(rows, (start, stop)))])
        for start, stop in corpus.partitions()
    ]
    tasks = [task for task in tasks if len(task.rows)]
    vectors = np.concatenate(map_tasks(gather_rows, tasks, client=context.client, name="gather_rows"))
    bad = nonfinite_rows(vectors)
    if len(bad):
        listed = tuple(int(row) for row in rows[bad[:20]])
        raise NonFiniteError(f"rows {', '.join(map(str, listed))} hold NaN or infinity", listed, len(bad))
    return vectors


def put_array(objects: LocalObjects, key: str, array: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    objects.put(key, buffer.getvalue())


def get_array(objects: LocalObjects, key: str) -> np.ndarray:
    return np.load(io.BytesIO(objects.get(key)), allow_pickle=False)


@dataclass(frozen=True)
class PreparedSplit:
    """A split on disk: query and training vectors, and the truth over the database."""

    folder: str
    query_rows: np.ndarray
    truth: StoredNeighbors

    def vectors(self, name: str) -> np.ndarray:
        """'queries' (q, dim) or 'training' (t, dim)."""
        return get_array(LocalObjects(self.folder), f"{name}.npy")


def prepare_split(corpus: Corpus, split: Split, folder: Path, *, k: int, context: Context) -> PreparedSplit:
    """Fetch the rows of a split and compute its truth, once; a second call finds both."""
    objects = LocalObjects(folder)
    for name, rows in (("queries", split.queries), ("training", split.training)):
        if objects.size(f"{name}.npy") is None:
            put_array(objects, f"{name}.npy", read_some(corpus, rows, context))
    path = str(folder / "truth.zarr")
    key = sha256(canonical([corpus.fingerprint, split.queries.tolist(), k]))
    if (read_about(path) or {}).get("key") != key:
        vectors = get_array(objects, "queries.npy")
        width, about = min(k, corpus.rows - len(split.queries)), {"kind": "euclidean", "key": key}
        neighbors = exact_neighbors(
            corpus, lambda start, stop: vectors[start:stop], len(vectors), k, context, without=split.queries
        )
        with contextlib.closing(neighbors) as found:
            save_neighbors(path, found, queries=len(vectors), width=width, batch=piece_size(width), about=about)
    return PreparedSplit(str(folder), split.queries, open_neighbors(path))
