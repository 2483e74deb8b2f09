"""Exact nearest codes among a billion, on one machine and in bounded memory.

    python -m benchmarks.billion --dir /data/billion [--rows 1000000000] [--queries 100] [-k 100]

The index (64 bits, 8 GB at a billion rows) is made once, of generated codes: a million centres, each code a centre with
every bit flipped with a probability of 1/8. It is searched as any index, through ``open_index``: first read by chunk
for every batch, then held in memory. Ten queries are compared with a plain scan of the files.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.made_index import write_index
from och_dist import LSH
from och_dist.search.searcher import Searcher, open_index
from och_dist.store.index import find_index

BITS, CHECKED = 64, 10

Answer = tuple[np.ndarray, np.ndarray]


@cache
def centres(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**64, count, np.uint64)


def some_codes(number: int, rows: int, n_centres: int) -> np.ndarray:
    """Codes (rows, 8) uint8 of chunk ``number``."""
    rng = np.random.default_rng((1, number))
    words = centres(n_centres)[rng.integers(0, n_centres, rows)]
    flips = [rng.integers(0, 2**64, rows, np.uint64) for _ in range(3)]
    return (words ^ (flips[0] & flips[1] & flips[2])).view(np.uint8).reshape(-1, 8)


def make_index(path: Path, rows: int, n_centres: int) -> None:
    """Write and publish generated codes; the model only stands for one, as the queries are codes too."""
    vectors = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
    hasher = LSH(BITS, random_state=0).fit(vectors)
    write_index(path, hasher, rows, lambda number, start, stop: some_codes(number, stop - start, n_centres))


def plain_scan(searcher: Searcher, queries: np.ndarray, k: int) -> Answer:
    """The same by NumPy alone, chunk by chunk."""
    words = queries.view(np.uint64)[:, 0]
    best = [(np.empty(0, np.int64), np.empty(0, np.int64)) for _ in words]
    for first, codes in searcher.index.blocks():
        for number, word in enumerate(words):
            distances = np.bitwise_count(codes.view(np.uint64)[:, 0] ^ word).astype(np.int64)
            near = np.flatnonzero(distances <= np.partition(distances, min(k, len(distances) - 1))[k - 1])
            both = [np.concatenate(pair) for pair in zip(best[number], (distances[near], near + first), strict=True)]
            order = np.lexsort((both[1], both[0]))[:k]
            best[number] = both[0][order], both[1][order]
    return np.stack([d for d, _ in best]), np.stack([r for _, r in best])


class PeakMemory:
    """The largest resident memory of this process while it lasts."""

    def __enter__(self) -> PeakMemory:
        self.peak, self._over = psutil.Process().memory_info().rss, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._over.wait(0.05):
            self.peak = max(self.peak, process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def measured(path: Path, queries: np.ndarray, k: int, *, resident: bool, repeats: int) -> tuple[dict[str, Any], Any]:
    with PeakMemory() as memory, open_index(str(path), resident=resident, threads=2) as searcher:
        searcher.search_codes(queries[:1], k=k) if resident else None
        seconds, found = [], None
        for _ in range(repeats):
            started = time.perf_counter()
            found = searcher.search_codes(queries, k=k)
            seconds.append(time.perf_counter() - started)
        pairs = len(queries) * searcher.rows / min(seconds)
    name = "held" if resident else "read"
    facts = {f"{name}_seconds": round(min(seconds), 2), f"{name}_pairs_per_second": f"{pairs:.3g}"}
    return {**facts, f"{name}_peak_mb": round(memory.peak / 1e6)}, found


def main(words: Sequence[str] | None = None, scan: Callable[[Searcher, np.ndarray, int], Answer] = plain_scan) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=10**9)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("-k", type=int, default=100)
    parser.add_argument("--centres", type=int, default=1_000_000)
    options = parser.parse_args(words)
    path = options.dir / f"index-{options.rows}"
    if find_index(str(path)) is None:
        make_index(path, options.rows, options.centres)
    queries = some_codes(-1 % 2**31, options.queries, options.centres)
    facts: dict[str, Any] = {"rows": options.rows, "queries": options.queries, "k": options.k, "cores": os.cpu_count()}
    answers = []
    for resident in (False, True):
        more, found = measured(path, queries, options.k, resident=resident, repeats=2)
        facts |= more
        answers.append(found)
    with open_index(str(path), resident=False) as searcher:
        started = time.perf_counter()
        expected = scan(searcher, queries[:CHECKED], options.k)
        facts["plain_scan_of_10_seconds"] = round(time.perf_counter() - started, 1)
    for found in answers:
        if not all(np.array_equal(a[:CHECKED], b) for a, b in zip(found, expected, strict=True)):
            raise SystemExit("the answers differ from those of a plain scan")
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
