"""One streaming pass over a corpus: moments, rows that are not finite, a row sample by global row number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from och_dist.cluster import scan_tasks
from och_dist.errors import NonFiniteError
from och_dist.kernels.moments import Moments, block_moments, nonfinite_rows
from och_dist.stage import Context, require_room
from och_dist.store import Corpus, CorpusRef

LISTED_ROWS = 20
PILOT_ROWS = 1024


@dataclass(frozen=True)
class ScanPartition:
    """Rows [start, stop) of a corpus version, and which of them belong to the sample (ascending)."""

    corpus: CorpusRef
    start: int
    stop: int
    sample: np.ndarray


@dataclass(frozen=True)
class Statistics:
    """Moments of the finite rows, the first few rows that are not finite, and how many there are."""

    moments: Moments
    nonfinite: tuple[int, ...]
    n_nonfinite: int

    def merge(self, other: Statistics) -> Statistics:
        rows = tuple(sorted(self.nonfinite + other.nonfinite)[:LISTED_ROWS])
        return Statistics(self.moments.merge(other.moments), rows, self.n_nonfinite + other.n_nonfinite)

    def check_finite(self, source: str, remedy: str) -> None:
        """Raise with the numbers of the rows that are not finite, if there are any."""
        if not self.n_nonfinite:
            return
        listed = ", ".join(map(str, self.nonfinite)) + (", ..." if self.n_nonfinite > LISTED_ROWS else "")
        raise NonFiniteError(
            f"{self.n_nonfinite} rows of {source} hold NaN or infinity: {listed}; {remedy}",
            self.nonfinite,
            self.n_nonfinite,
        )


def merge_statistics(parts: Sequence[Statistics]) -> Statistics:
    return reduce(Statistics.merge, parts)


def scan_partition(task: ScanPartition, pilot: np.ndarray) -> tuple[Statistics, np.ndarray]:
    """Statistics of a partition, and its rows of the sample (s, dim) float32."""
    corpus = task.corpus.open()
    total = Statistics(Moments.empty(pilot), (), 0)
    sample = np.empty((len(task.sample), corpus.dim), np.float32)
    for first, block in corpus.blocks(task.start, task.stop):
        low, high = np.searchsorted(task.sample, (first, first + len(block)))
        part, sample[low:high] = scan_block(block, pilot, task.sample[low:high] - first, first)
        total = total.merge(part)  # at once: a part holds (dim, dim) numbers, a partition many chunks
    return total, sample


def scan_block(
    block: np.ndarray, pilot: np.ndarray, chosen: np.ndarray, first_row: int
) -> tuple[Statistics, np.ndarray]:
    """Statistics of ``block`` (n, d), counted from ``first_row``, and its rows ``chosen`` as float32."""
    bad = nonfinite_rows(block)
    finite = np.delete(block, bad, axis=0) if len(bad) else block
    rows = tuple(int(row) + first_row for row in bad[:LISTED_ROWS])
    with np.errstate(over="ignore"):
        sample = block[chosen].astype(np.float32)
    return Statistics(block_moments(finite, pilot), rows, len(bad)), sample


def pilot_of(head: np.ndarray) -> np.ndarray:
    """(d,) float64 near the mean: that of the finite rows among the first ones, ``head`` (n, d)."""
    head = head[:PILOT_ROWS].astype(np.float64)
    finite = head[np.isfinite(head).all(axis=1)]
    return finite.mean(axis=0) if len(finite) else np.zeros(head.shape[1])


def scan_corpus(corpus: Corpus, sample: np.ndarray, context: Context) -> tuple[Moments, list[Any]]:
    """Moments of the whole corpus, and its sampled rows in blocks, on the workers (futures) or here (arrays).

    ``sample`` holds ascending global row numbers. Rows with NaN or infinity raise, with their numbers.
    """
    require_room(corpus, context, "a pass over the corpus", extra_bytes=3 * 8 * corpus.dim**2)
    pilot = pilot_of(corpus.read(0, min(PILOT_ROWS, corpus.rows)))
    partitions = corpus.partitions()
    tasks = [
        ScanPartition(corpus.ref, start, stop, sample[slice(*np.searchsorted(sample, (start, stop)))])
        for start, stop in partitions
    ]
    statistics, blocks = scan_tasks(
        scan_partition,
        tasks,
        merge_statistics,
        client=context.client,
        name="scan_partition",
        shared=pilot,
        advance=context.progress("statistics", corpus.rows),
        weight=lambda task: task.stop - task.start,
    )
    statistics.check_finite(corpus.url, "ingest the data with --nonfinite=drop to leave them out")
    kept = [block for block, task in zip(blocks, tasks, strict=True) if len(task.sample)]
    return statistics.moments, kept


def draw_rows(rows: int, count: int, seed: int) -> np.ndarray:
    """``min(count, rows)`` distinct global row numbers, ascending; a function of these three numbers."""
    if count >= rows:
        return np.arange(rows)
    return np.sort(np.random.default_rng(seed).choice(rows, count, replace=False, shuffle=False))
