"""How well Hamming order agrees with true order: two additive histograms per query, all metrics from them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from och_dist import store
from och_dist.cluster import reduce_tasks, thread_shares
from och_dist.errors import BadInputError, UsageError
from och_dist.evaluate.exact import truth as exact_truth
from och_dist.kernels.hamming import count_rows, hamming_histogram, lay_out
from och_dist.kernels.packing import code_words
from och_dist.kernels.ranking import evaluate_histograms
from och_dist.options import ExpectModel, Option, QueryDataset, checked
from och_dist.search import Searcher, check_truth, open_index, partitions_of
from och_dist.sources import Queries, open_queries
from och_dist.stage import Context, Report, Stopwatch
from och_dist.store import CodeChunk, Index, IndexRef, StoredNeighbors

QUERY_BYTES = 32 << 20
PARTITION_BYTES = 64 << 20
HELD_TIMES = 10
"""Codes are held packed, twice while they are joined, as words and laid out: five times at most, in half of a thread's
memory."""

TASKS_PER_THREAD = 4
"""Dask spreads only more than 2 over all workers, instead of sending them to the one that has the queries."""


@dataclass(frozen=True)
class CountDistances:
    """Count the Hamming distances of some chunks to queries [start, stop), all rows and true neighbours apart."""

    index: IndexRef
    chunks: tuple[CodeChunk, ...]
    truth: StoredNeighbors
    start: int
    stop: int

    @property
    def pairs(self) -> int:
        """How many distances are counted."""
        return (self.stop - self.start) * (self.chunks[-1].stop - self.chunks[0].start)


@dataclass(frozen=True)
class Histograms:
    """``rows`` and ``true`` (q, levels) int64: how many rows, and how many true neighbours, at each distance."""

    rows: np.ndarray
    true: np.ndarray

    def merge(self, other: Histograms) -> Histograms:
        return Histograms(self.rows + other.rows, self.true + other.true)


def true_rows(truth: StoredNeighbors, start: int, stop: int) -> Iterator[tuple[slice, np.ndarray]]:
    """(which of the queries [start, stop), their true neighbours (q, k)), some at a time."""
    step = max(1, QUERY_BYTES // (8 * max(1, truth.width)))
    for first in range(start, stop, step):
        part = slice(first, min(first + step, stop))
        yield part, truth.read_rows(part.start, part.stop)


def count_distances(task: CountDistances, queries: np.ndarray) -> Histograms:
    """Histograms over some chunks; ``queries`` are the packed codes (q, bytes) of all queries, 0 is counted for those
    that are not of this task."""
    index, first = task.index.open(), task.chunks[0].start
    packed = np.concatenate([index.read(chunk) for chunk in task.chunks])
    words, codes = code_words(queries), code_words(packed)
    found = Histograms(*np.zeros((2, len(queries), index.bits + 1), np.int64))
    found.rows[task.start : task.stop] = hamming_histogram(queries[task.start : task.stop], lay_out(packed, index.bits))
    for part, rows in true_rows(task.truth, task.start, task.stop):
        found.true[part] = count_rows(words[part], codes, rows, first, index.bits)
    return found


def plan_counts(index: Index, truth: StoredNeighbors, threads: int, memory: int) -> list[CountDistances]:
    """As few partitions of the codes as the ``memory`` of a thread allows, for each of them reads all exact neighbours;
    and as many ranges of queries as give every thread something to do."""
    wanted = TASKS_PER_THREAD * threads
    partitions = partitions_of(index, -(-wanted // truth.queries), min(PARTITION_BYTES, memory // HELD_TIMES))
    ranges = min(truth.queries, -(-wanted // len(partitions)))
    cuts = np.linspace(0, truth.queries, ranges + 1).astype(int).tolist()
    return [
        CountDistances(index.ref, part.chunks, truth, start, stop)
        for part in partitions
        for start, stop in itertools.pairwise(cuts)
    ]


@checked
def evaluate(
    index: str,
    queries: Any,
    truth: Annotated[str, Option("The .zarr that 'och truth' wrote.", metavar="DIR")],
    *,
    output: Annotated[
        str | None, Option("Also write the figures to FILE (JSON).", flags="-o --output", metavar="FILE")
    ] = None,
    dataset: QueryDataset = None,
    version: Annotated[int | None, Option("Evaluate this version of the index [default: the newest].")] = None,
    expect_model: ExpectModel = None,
    context: Context | None = None,
) -> Report:
    """mAP, pooled PR area, precision and recall of an index against exact neighbours."""
    watch, context = Stopwatch("evaluate"), context or Context()
    searcher = open_index(index, version=version, expect_model=expect_model)
    opened = open_queries(queries, dataset=dataset)
    stored = store.open_neighbors(truth)
    _check(searcher, opened, stored)
    key = store.sha256(store.canonical([searcher.index.to_json(), opened.fingerprint, stored.about["key"]]))
    if (known := _known(output, key)) is not None:
        return watch.report("nothing to do", **known)
    codes = searcher.encode(opened.read(0, opened.rows))
    shares = thread_shares(context.client)
    tasks = plan_counts(searcher.index, stored, len(shares), min(shares))
    counts = reduce_tasks(
        count_distances,
        tasks,
        partial(reduce, Histograms.merge),
        client=context.client,
        name="count_distances",
        shared=codes,
        advance=context.progress("evaluate", sum(task.pairs for task in tasks)),
        weight=lambda task: task.pairs,
    )
    facts = {
        "index": searcher.index.url,
        "version": searcher.index.version,
        "method": searcher.model.method,
        "bits": searcher.index.bits,
        "rows": searcher.rows,
        "queries": opened.rows,
        "truth_k": stored.width,
        **evaluate_histograms(counts.rows, counts.true),
    }
    if output is not None:
        store.write_text(output, json.dumps({**facts, "key": key}, indent=1))
    return watch.report(**facts)


@checked
def measure_quality(
    corpus: str,
    index: str,
    queries: str,
    folder: str,
    *,
    k: Annotated[int, Option("True neighbours of a query.", at_least=1)] = 100,
    dataset: QueryDataset = None,
    context: Context | None = None,
) -> Report:
    """Evaluate ``index`` on ``queries``; truth and figures are kept in ``folder``, and made anew for a new version.

    Without queries ('') there is nothing to do, and neither is there with deleted rows, which the truth would count.
    """
    watch, current = Stopwatch("quality"), store.find_index(index)
    if not queries:
        return watch.report("nothing to do", why="no queries are named")
    if "://" in folder:
        raise UsageError(f"folder={folder!r}: results are written to a local path; name one")
    if current is None or current.live_rows < current.rows:
        return watch.report("nothing to do", why="no version, or one with deleted rows")
    place = f"{folder}/truth.zarr"
    exact_truth(corpus, queries, place, k=k, dataset=dataset, context=context)
    report = evaluate(index, queries, place, output=f"{folder}/evaluation.json", dataset=dataset, context=context)
    return watch.report(report.status, **report.facts)


def _known(output: str | None, key: str) -> dict[str, Any] | None:
    """The facts of an earlier run with the same inputs."""
    if output is None or not Path(output).is_file():
        return None
    try:
        facts = json.loads(Path(output).read_text())
        return facts if facts.pop("key") == key else None
    except (ValueError, KeyError, AttributeError):
        return None


def _check(searcher: Searcher, queries: Queries, truth: StoredNeighbors) -> None:
    queries.require_dim(searcher.model.hasher.n_features_in_, "the index")
    if not queries.rows:
        raise BadInputError("there are no queries; an evaluation needs at least one")
    check_truth(searcher, queries, truth)
