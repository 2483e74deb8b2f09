"""Exact Euclidean neighbours over a whole corpus, streaming: the ground truth of an evaluation.

One pass over the rows serves many queries; results come in pieces that the driver can hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np

from och_dist import store
from och_dist.cluster import FAN_IN, reduce_in_pieces, reduce_tasks, thread_shares
from och_dist.errors import UsageError
from och_dist.kernels.euclidean import Candidates, euclidean_top_k, merge_candidates
from och_dist.options import Option, QueryDataset, ResultFile, checked
from och_dist.sources import Queries, open_queries
from och_dist.stage import Context, Report, Stopwatch, require_room
from och_dist.store import Corpus, CorpusRef, Neighbors

PIECE_BYTES = 32 << 20
"""What the driver holds of a result at a time."""

MAX_QUERIES = 2048
"""Queries of one pass; their results come in pieces, as far as the workers have the memory."""

GUIDE_CHUNKS = 4
GUIDE_ROWS = 4096
GUIDE_SLACK = 1.5
NO_ROWS = np.empty(0, np.int64)


@checked
def truth(
    corpus: str,
    queries: Any,
    output: Annotated[str, ResultFile],
    *,
    k: Annotated[int | None, Option("Neighbours per query.", flags="-k", at_least=1)] = None,
    fraction: Annotated[
        float | None, Option("Share of the corpus that counts as neighbours, such as 0.02.", above=0, at_most=1)
    ] = None,
    dataset: QueryDataset = None,
    context: Context | None = None,
) -> Report:
    """Write the ``k`` (or the nearest ``fraction`` of the corpus) exact neighbours of every query."""
    watch, context = Stopwatch("truth"), context or Context()
    store.check_output(output)
    opened, asked = store.open_corpus(corpus), open_queries(queries, dataset=dataset)
    asked.require_dim(opened.dim, "the corpus")
    if fraction is not None and k is None:
        k = max(1, int(fraction * opened.rows))
    elif k is None or fraction is not None:
        raise UsageError(f"k={k}, fraction={fraction}; give exactly one of -k and --fraction")
    width = min(k, opened.rows) if asked.rows else k
    about = {
        "kind": "euclidean",
        "key": store.sha256(store.canonical([opened.fingerprint, asked.fingerprint, k])),
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
    if output.endswith(".zarr") and (store.read_about(output) or {}).get("key") == about["key"]:
        return watch.report("nothing to do", **facts)
    require_room(opened, context, "a pass over the corpus")
    write_neighbors(output, opened, asked, width, about, context)
    return watch.report(**facts)


def write_neighbors(
    path: str,
    corpus: Corpus,
    queries: Queries,
    width: int,
    about: dict[str, Any],
    context: Context,
    *,
    without: np.ndarray = NO_ROWS,
) -> None:
    """Write the ``width`` exact neighbours of every query among the rows that are not in ``without`` (ascending)."""
    with contextlib.closing(exact_neighbors(corpus, queries, width, context, without=without)) as found:
        store.save_neighbors(path, found, queries=queries.rows, width=width, batch=piece_size(width), about=about)


@dataclass(frozen=True)
class LimitedQueries:
    """Query vectors (q, d), per query a squared distance beyond which rows need not be reported, and global rows
    (ascending) that are no candidates at all."""

    vectors: np.ndarray
    limits: np.ndarray
    without: np.ndarray


def queries_of_piece(size: int, found: Candidates, number: int) -> Candidates:
    """The candidates of the ``number``-th ``size`` queries."""
    last = len(found.offsets) - 1
    return found.of_queries(min(number * size, last), min((number + 1) * size, last))


def nearest_rows(
    corpus: CorpusRef, rows: tuple[int, int], batch: LimitedQueries, *, k: int, step: int = 1
) -> Candidates:
    """The ``k`` nearest of each ``step``-th of the corpus rows [start, stop), exact."""
    best: Candidates | None = None
    for first, block in corpus.open().blocks(*rows):
        numbers = remaining_rows(first, len(block), batch.without)[::step]
        kept = block if len(numbers) == len(block) else block[numbers - first]
        found = euclidean_top_k(batch.vectors, kept, k, limit=batch.limits)
        part = Candidates(found.offsets, found.distances, numbers[found.rows])
        best = part if best is None else merge_candidates([best, part], k)
    assert best is not None  # a partition has at least one chunk
    return best


def remaining_rows(first: int, count: int, without: np.ndarray) -> np.ndarray:
    """Global numbers of ``count`` rows from ``first`` on that are not in ``without`` (ascending)."""
    low, high = np.searchsorted(without, (first, first + count))
    return np.delete(np.arange(first, first + count), without[low:high] - first)


def piece_size(width: int) -> int:
    """Queries whose ``width`` neighbours the driver holds at a time."""
    return int(max(1, min(MAX_QUERIES, PIECE_BYTES // (16 * max(1, width)))))


def exact_neighbors(
    corpus: Corpus, queries: Queries, width: int, context: Context, *, without: np.ndarray
) -> Generator[Neighbors, None, None]:
    """The neighbours of all queries, :func:`piece_size` of them at a time.

    Guessed limits keep far rows off the network; where the guess was too low for a query, that query is searched
    again without it, so the answer never depends on the guess.
    """
    size = piece_size(width)
    of_pass = size * _pieces_of_pass(width, size, context)
    advance = context.progress("truth", queries.rows)
    for start in range(0, queries.rows, of_pass):
        vectors = queries.read(start, min(start + of_pass, queries.rows))
        batch = LimitedQueries(vectors, _guess(corpus, vectors, width, without, context), without)
        for number, found in enumerate(_search(corpus, batch, width, size, context)):
            neighbors = _complete(found, vectors[number * size :], width, corpus, without, context)
            yield neighbors
            advance(len(neighbors.rows))


def _pieces_of_pass(width: int, size: int, context: Context) -> int:
    """So many that a merge of FAN_IN parts, all of full width, and its result take half of a thread's memory, at least
    one; one without a cluster, where nothing is gained by more."""
    if context.client is None:
        return 1
    queries = min(MAX_QUERIES, min(thread_shares(context.client)) // (4 * FAN_IN * 16 * max(1, width)))
    return max(1, queries // size)


def _complete(
    found: Candidates, vectors: np.ndarray, width: int, corpus: Corpus, without: np.ndarray, context: Context
) -> Neighbors:
    """The ``width`` nearest of queries, the first of ``vectors``, some of which may have found fewer."""
    counts = np.diff(found.offsets)
    short = np.flatnonzero(counts < width)
    if not len(short):
        distances, rows = found.dense(width)
        return Neighbors(np.sqrt(distances), rows)
    distances, rows = np.empty((len(counts), width)), np.empty((len(counts), width), np.int64)
    missed = LimitedQueries(vectors[short], np.full(len(short), np.inf), without)
    for again in _search(corpus, missed, width, len(counts), context):
        distances[short], rows[short] = again.dense(width)
    whole = counts >= width
    first = found.offsets[:-1][whole, None] + np.arange(width)
    distances[whole], rows[whole] = found.distances[first], found.rows[first]
    return Neighbors(np.sqrt(distances), rows)


def _search(corpus: Corpus, batch: LimitedQueries, k: int, size: int, context: Context) -> Iterator[Candidates]:
    """The ranked candidates of ``size`` queries at a time."""
    return reduce_in_pieces(
        partial(nearest_rows, corpus.ref, k=k),
        corpus.partitions(),
        partial(merge_candidates, k=k),
        pieces=-(-len(batch.vectors) // size),
        cut=partial(queries_of_piece, size),
        finish=Candidates.rank,
        client=context.client,
        name="nearest_rows",
        shared=batch,
    )


def _guess(corpus: Corpus, vectors: np.ndarray, k: int, without: np.ndarray, context: Context) -> np.ndarray:
    """Per query a squared distance that probably exceeds the k-th smallest, from rows of chunks spread over the
    corpus."""
    chunks = list(corpus.chunks())
    chosen = [chunks[place] for place in np.unique(np.linspace(0, len(chunks) - 1, GUIDE_CHUNKS).astype(int))]
    step = max(1, sum(stop - start for start, stop in chosen) // GUIDE_ROWS)
    rows = sum(-(-(stop - start) // step) for start, stop in chosen)
    place, unlimited = int(GUIDE_SLACK * k / (corpus.rows - len(without)) * rows) + 8, np.full(len(vectors), np.inf)
    if place >= rows:
        return unlimited
    nearest = reduce_tasks(
        partial(nearest_rows, corpus.ref, k=place + 1, step=step),
        chosen,
        partial(merge_candidates, k=place + 1),
        client=context.client,
        name="guide_rows",
        shared=LimitedQueries(vectors, unlimited, without),
    )
    distances, _ = nearest.dense(place + 1)
    return distances[:, -1] if distances.shape[1] else unlimited
