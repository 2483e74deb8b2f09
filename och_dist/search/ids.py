"""Finding rows of a corpus by the ids that its user gave them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from och_dist.cluster import reduce_tasks
from och_dist.errors import ConflictError, UsageError
from och_dist.sources import expand, open_ids, read_ids
from och_dist.stage import Context
from och_dist.store import (
    Corpus,
    CorpusRef,
    Index,
    id_keys,
    open_corpus,
)

LISTED = 20


@dataclass(frozen=True)
class FindIds:
    corpus: CorpusRef
    start: int
    stop: int


def find_ids(task: FindIds, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(places in ``keys`` (m,), which ascend, and global rows) of the keys that rows [start, stop) have."""
    places, rows = [], []
    for first, block in task.corpus.open().id_blocks(task.start, task.stop):
        theirs = id_keys(block)
        near = np.minimum(np.searchsorted(keys, theirs), len(keys) - 1)
        hit = np.flatnonzero(keys[near] == theirs)
        places.append(near[hit])
        rows.append(hit + first)
    return np.concatenate(places), np.concatenate(rows)


def join_found(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([places for places, _ in parts]), np.concatenate([rows for _, rows in parts])


def find_rows(corpus: Corpus, ids: Any, context: Context | None = None) -> np.ndarray:
    """Global rows (m,) int64 of ``ids`` (m,), in their order; :class:`UsageError` names those that are unknown."""
    if corpus.ids is None:
        raise UsageError(f"{corpus.url} has no ids; give row numbers, or make it anew with 'och ingest --ids'")
    keys = _keys(ids, corpus)
    if not len(keys):
        return np.empty(0, np.int64)
    wanted, order = np.unique(keys, return_inverse=True)
    tasks = [FindIds(corpus.ref, start, stop) for start, stop in corpus.partitions()]
    client = (context or Context()).client
    places, found = reduce_tasks(find_ids, tasks, join_found, client=client, name="find_ids", shared=wanted)
    rows = np.full(len(wanted), -1, np.int64)
    rows[places] = found
    if len(unknown := wanted[rows < 0].tolist()):
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


def read_ids_given(text: str) -> Any:
    """Ids as given on a command line: separated by commas, or '@FILE'."""
    if text.startswith("@"):
        return read_id_list(text[1:])
    return [part.strip() for part in text.split(",") if part.strip()]


def _keys(ids: Any, corpus: Corpus) -> np.ndarray:
    """Ids that a user gives, as keys of the kind that the corpus has; text of whole numbers will do for these."""
    values = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if not values.size:
        return np.empty(0, np.int64)
    if corpus.ids == "int64" and values.dtype.kind == "U":
        with contextlib.suppress(ValueError, OverflowError):
            values = values.astype(np.int64)
    if corpus.ids == "string" and values.dtype.kind == "U" and values.ndim == 1:
        return np.strings.encode(values, "utf-8")
    whole = values.dtype.kind in "iu" and values.ndim == 1 and int(values.max()) <= np.iinfo(np.int64).max
    if corpus.ids == "int64" and whole:
        return values.astype(np.int64)
    expected = "strings" if corpus.ids == "string" else "whole numbers of 64 bits"
    raise UsageError(f"ids are {values.dtype} of shape {values.shape}, but {corpus.url} has {expected}; give such ids")


def corpus_of_index(index: Index) -> Corpus:
    """The corpus version of which an index was made; it must still be there, and the same."""
    url, version = str(index.corpus.get("url")), int(index.corpus.get("version", 0))
    corpus = open_corpus(url, version)
    if corpus.fingerprint != index.corpus.get("fingerprint"):
        raise ConflictError(f"{url} is not the corpus any more that {index.url} was made of; encode it again")
    return corpus
