"""Exact Euclidean neighbours of queries over a whole corpus, streaming: the ground truth of an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from och_dist.errors import UsageError
from och_dist.graph import reduce_tasks
from och_dist.kernels.euclidean import Candidates, euclidean_top_k, merge_candidates
from och_dist.stages.common import Context, Report, Stopwatch, require_room
from och_dist.stages.queries import Queries, open_queries
from och_dist.store.corpus import Corpus, CorpusRef, open_corpus
from och_dist.store.neighbors import Neighbors, check_output, read_about, save_neighbors
from och_dist.store.versions import canonical, sha256

BATCH_BYTES = 64 << 20
MAX_BATCH = 1024
GUIDE_CHUNKS = 4
GUIDE_ROWS = 4096
GUIDE_SLACK = 1.5
NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class NearestRows:
    """Search corpus rows [start, stop) for the ``k`` nearest vectors."""

    corpus: CorpusRef
    start: int
    stop: int
    k: int


@dataclass(frozen=True)
class QueryBatch:
    """Query vectors (q, d), per query a squared distance beyond which rows need not be reported, and global rows
    (ascending) that are no candidates at all."""

    vectors: np.ndarray
    limits: np.ndarray
    without: np.ndarray


@dataclass(frozen=True)
class MergeCandidates:
    k: int

    def __call__(self, parts: Sequence[Candidates]) -> Candidates:
        return merge_candidates(parts, self.k)


def nearest_rows(task: NearestRows, batch: QueryBatch) -> Candidates:
    """The nearest rows of one partition, exact, sorted by (distance, row)."""
    best: Candidates | None = None
    for first, block in task.corpus.open().blocks(task.start, task.stop):
        rows = remaining_rows(first, len(block), batch.without)
        kept = block if len(rows) == len(block) else block[rows - first]
        found = euclidean_top_k(batch.vectors, kept, task.k, limit=batch.limits)
        part = Candidates(found.offsets, found.distances, rows[found.rows])
        best = part if best is None else merge_candidates([best, part], task.k)
    assert best is not None  # a partition has at least one chunk
    return best


def remaining_rows(first: int, count: int, without: np.ndarray) -> np.ndarray:
    """Global numbers of ``count`` rows from ``first`` on that are not in ``without`` (ascending)."""
    low, high = np.searchsorted(without, (first, first + count))
    return np.delete(np.arange(first, first + count), without[low:high] - first)


def truth(
    corpus: str,
    queries: Any,
    output: str,
    *,
    k: int | None = None,
    fraction: float | None = None,
    dataset: str | None = None,
    context: Context | None = None,
) -> Report:
    """Write the ``k`` (or the nearest ``fraction`` of the corpus) exact neighbours of every query."""
    watch, context = Stopwatch("truth"), context or Context()
    check_output(output)
    opened, asked = open_corpus(corpus), open_queries(queries, dataset=dataset)
    asked.require_dim(opened.dim, "the corpus")
    k = _resolve_k(opened.rows, k, fraction)
    width = min(k, opened.rows) if asked.rows else k
    about = {
        "kind": "euclidean",
        "key": sha256(canonical([opened.fingerprint, asked.fingerprint, k])),
        "k": k,
        "rows": opened.rows,
        "corpus_fingerprint": opened.fingerprint,
        "queries_fingerprint": asked.fingerprint,
    }
    facts: dict[str, Any] = {
        "corpus": opened.url,
        "queries": asked.rows,
        "k": width,
        "rows": opened.rows,
        "output": output,
    }
    if output.endswith(".zarr") and (read_about(output) or {}).get("key") == about["key"]:
        return watch.report("nothing to do", **facts)
    require_room(opened, context, "a pass over the corpus")
    size = int(max(1, min(MAX_BATCH, BATCH_BYTES // (16 * width))))
    batches = _batches(opened, asked, k, size, context)
    save_neighbors(output, batches, queries=asked.rows, width=width, batch=size, about=about)
    return watch.report(**facts)


def _resolve_k(rows: int, k: int | None, fraction: float | None) -> int:
    if (k is None) == (fraction is None):
        raise UsageError(f"k={k}, fraction={fraction}; give exactly one of -k and --fraction")
    if k is not None:
        if k < 1:
            raise UsageError(f"k={k}; use at least 1")
        return k
    if fraction is None or not 0 < fraction <= 1:
        raise UsageError(f"fraction={fraction}; use a share of the corpus above 0 and up to 1, such as 0.02")
    return max(1, int(fraction * rows))


def _batches(corpus: Corpus, queries: Queries, k: int, size: int, context: Context) -> Iterator[Neighbors]:
    guide = guide_rows(corpus)
    advance = context.progress("truth", queries.rows)
    for start in range(0, queries.rows, size):
        vectors = queries.read(start, min(start + size, queries.rows))
        distances, rows = exact_neighbors(corpus, vectors, k, guide, context)
        yield Neighbors(np.sqrt(distances), rows)
        advance(len(vectors))


def exact_neighbors(
    corpus: Corpus,
    vectors: np.ndarray,
    k: int,
    guide: np.ndarray,
    context: Context,
    *,
    without: np.ndarray = NO_ROWS,
) -> tuple[np.ndarray, np.ndarray]:
    """Squared distances and rows (q, min(k, n)) over the n rows that are not in ``without`` (ascending).

    ``guide`` rows give a guess of the k-th distance that keeps far rows off the network; where the guess was too
    low for a query, that query is searched again without it, so the answer never depends on the guess.
    """
    width = min(k, corpus.rows - len(without))
    guess = _guess(vectors, guide, width, corpus.rows - len(without))
    found = _search(corpus, QueryBatch(vectors, guess, without), width, context)
    short = np.flatnonzero(np.diff(found.offsets) < width)
    if len(short) == 0:
        return found.dense(width)
    distances, rows = np.empty((len(vectors), width)), np.empty((len(vectors), width), np.int64)
    again = _search(corpus, QueryBatch(vectors[short], np.full(len(short), np.inf), without), width, context)
    distances[short], rows[short] = again.dense(width)
    for query in np.setdiff1d(np.arange(len(vectors)), short):
        place = slice(found.offsets[query], found.offsets[query] + width)
        distances[query], rows[query] = found.distances[place], found.rows[place]
    return distances, rows


def _search(corpus: Corpus, batch: QueryBatch, k: int, context: Context) -> Candidates:
    tasks = [NearestRows(corpus.ref, start, stop, k) for start, stop in corpus.partitions()]
    return reduce_tasks(
        nearest_rows, tasks, MergeCandidates(k), client=context.client, name="nearest_rows", shared=batch
    )


def guide_rows(corpus: Corpus) -> np.ndarray:
    """Some rows from chunks spread over the corpus."""
    chunks = list(corpus.chunks())
    places = np.unique(np.linspace(0, len(chunks) - 1, GUIDE_CHUNKS).astype(int))
    blocks = [corpus.read(*chunks[place]) for place in places]
    return np.concatenate([block[:: max(1, len(block) * len(places) // GUIDE_ROWS)] for block in blocks])


def _guess(vectors: np.ndarray, guide: np.ndarray, k: int, rows: int) -> np.ndarray:
    """Per query a squared distance that probably exceeds the k-th smallest of the corpus."""
    place = int(GUIDE_SLACK * k / rows * len(guide)) + 8
    if place >= len(guide):
        return np.full(len(vectors), np.inf)
    nearest = euclidean_top_k(vectors, guide, place + 1)
    return nearest.dense(place + 1)[0][:, place]
