"""Exact Hamming search against faiss.IndexBinaryFlat through the public API, in one run.

    python -m benchmarks.search --dir DIR [--rows 1000000] [--queries 1000] [--bits 64] [--k 10 100] [--busy]

Three kinds of codes: uniform random bits; OCH codes of generated GIST-like vectors; OCH codes of real GIST descriptors
(tiny100k, copied with a little noise up to the number of rows; left out where the folder named by OCH_SHARED_DATA, or
../shared/data, has none). The indexes are made once, in DIR; ``--prepare`` stops then. Each is opened with
``open_index`` and asked with ``search_codes``; FAISS is asked the same packed codes.

One thread is measured in CPU time, two threads and workers in wall time: the best of some repeats in which all take
turns, with a rest between them, so that no thread of one is still spinning while the other is measured. At the end it
says how busy others kept the machine meanwhile. FAISS is given the better of its two selections (``use_heap``), and for
two threads half of its CPU time with one where that is less, as if it scaled perfectly. Every answer is compared:
distances and, since this FAISS also keeps the lowest rows among equals, rows.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import psutil
from numba import njit

from benchmarks.made_index import write_index
from och_dist import LSH, OCH
from och_dist.cluster import describe_machine
from och_dist.cluster.connection import ClusterOptions, connect
from och_dist.kernels.gistlike import gist_rows
from och_dist.kernels.simd import popcount
from och_dist.methods.base import Hasher
from och_dist.search.searcher import Searcher, open_index
from och_dist.store.index import find_index

GOALS = {(32, 100): 4, (64, 10): 8, (64, 100): 8, (64, 1000): 4, (128, 100): 5, (128, 1000): 3, (256, 100): 4}
"""Wanted ratios by (bits, k); these are what is measured unless told otherwise."""

SHARE = 0.8
"""Of the rate of two threads, two workers are to reach so much."""

BATCHES = (1000, 4000)
SINGLES = 200
SINGLE_GOAL = 2.0
REST = 0.05
OURS = 4
REAL_ROWS = "tiny100k_gist384_f16.npy"
TRAINING_ROWS, BLOCK_ROWS, NOISE, SEED = 10_000, 50_000, 0.1, 0

Answer = tuple[np.ndarray, np.ndarray]
Action = Callable[[], Any]
Made = tuple[Hasher, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Problem:
    """An index at ``path``, its packed ``codes`` (n, bytes) for FAISS, and packed ``queries`` (q, bytes)."""

    name: str
    bits: int
    path: str
    codes: np.ndarray
    queries: np.ndarray

    def describe(self) -> str:
        distinct = len(np.unique(np.ascontiguousarray(self.codes).view(f"V{self.codes.shape[1]}")))
        return f"{self.name}, {self.bits} bits: {distinct / len(self.codes):.0%} of the codes are distinct"


def uniform(rows: int, queries: int, bits: int) -> Made:
    rng = np.random.default_rng(SEED)
    made = rng.integers(0, 256, (rows + queries, bits // 8), dtype=np.uint8)
    hasher = LSH(bits, random_state=SEED).fit(rng.normal(size=(100, 8)).astype(np.float32))
    return hasher, made[:rows], made[rows:]


def generated(rows: int, queries: int, bits: int) -> Made:
    """OCH codes of GIST-like rows; queries are rows of the same world that are not in the database."""
    hasher = OCH(bits, random_state=SEED).fit(gist_rows(0, TRAINING_ROWS, dim=384, seed=SEED))
    starts = range(0, rows + queries, BLOCK_ROWS)
    ends = [min(start + BLOCK_ROWS, rows + queries) for start in starts]
    blocks = (gist_rows(start, end - start, dim=384, seed=SEED) for start, end in zip(starts, ends, strict=True))
    codes = np.concatenate([hasher.transform(block) for block in blocks])
    return hasher, codes[:rows], codes[rows:]


def real(rows: int, queries: int, bits: int) -> Made | None:
    """OCH codes of real rows: first as they are, then again with noise, until there are enough of them."""
    folder = Path(os.environ.get("OCH_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not (folder / REAL_ROWS).exists():
        return None
    vectors = np.load(folder / REAL_ROWS).astype(np.float32)
    base = vectors[queries:]
    hasher, rng = OCH(bits, random_state=SEED).fit(base[:TRAINING_ROWS]), np.random.default_rng(SEED)
    spread = NOISE * base.std(axis=0)
    parts = [hasher.transform(base[:rows])]
    while sum(map(len, parts)) < rows:
        noise = rng.standard_normal(base.shape, dtype=np.float32) * spread
        parts.append(hasher.transform(base + noise))
    return hasher, np.concatenate(parts)[:rows], hasher.transform(vectors[:queries])


KINDS: dict[str, Callable[[int, int, int], Made | None]] = {
    "uniform": uniform, "GIST-like": generated, "tiny100k": real,
}  # fmt: skip


def problem(folder: Path, name: str, rows: int, queries: int, bits: int) -> Problem | None:
    """The problem of a kind, made unless it is in ``folder`` already."""
    path = folder / f"{name}-{rows}-{bits}"
    asked = path.with_suffix(f".{queries}.npy")
    if find_index(str(path)) is None or not asked.exists():
        if (made := KINDS[name](rows, queries, bits)) is None:
            return None
        hasher, codes, packed = made
        np.save(asked, packed)
        if find_index(str(path)) is None:
            write_index(path, hasher, rows, lambda number, start, stop: codes[start:stop])
    with open_index(str(path)) as searcher:
        stored = np.concatenate([block for _, block in searcher.index.blocks()])
    return Problem(name, bits, str(path), stored, np.load(asked))


def best_of(
    actions: dict[str, Action], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Least time of each action; they take turns, so that a busy moment does not hit one of them alone."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            time.sleep(REST)
            start = clock()
            action()
            times[name].append(clock() - start)
    return {name: min(values) for name, values in times.items()}


def compared(ours: Answer, theirs: Answer) -> str:
    same = ("distances", "rows")
    return " and ".join(name for name, a, b in zip(same, ours, theirs, strict=True) if np.array_equal(a, b)) or "NONE"


class Contest:
    """One problem, opened by one and by two threads, by two workers, and by FAISS."""

    def __init__(
        self, given: Problem, client: Any, repeats: int, *, busy: bool = False, batches: Sequence[int] = BATCHES
    ) -> None:
        self.given, self.repeats, self.busy, self.batches = given, repeats, busy, batches
        self.index = faiss.IndexBinaryFlat(given.bits)
        self.index.add(given.codes)
        self.one = open_index(given.path, threads=1)
        self.two = open_index(given.path, threads=2)
        self.workers = open_index(given.path, client=client)

    def close(self) -> None:
        for searcher in (self.one, self.two, self.workers):
            searcher.close()

    def peer(self, k: int, heap: bool, threads: int) -> Answer:
        faiss.omp_set_num_threads(threads)
        self.index.use_heap = heap
        return self.index.search(self.given.queries, k)

    def against_faiss(self, k: int) -> str:
        """A row of the first table."""
        queries = self.given.queries
        right = self.peer(k, True, 1 if self.busy else 2)
        same = {compared(searcher.search_codes(queries, k=k), right) for searcher in (self.one, self.two)}
        one = self._times(self.one, k, 1)
        cells = [self.given.name, f"{self.given.bits}", f"{k}", *_cells(one)]
        if not self.busy:
            two = self._times(self.two, k, 2)
            two["faiss"] = min(two["faiss"], one["faiss"] / 2)
        cells += ["", "", ""] if self.busy else _cells(two)
        return "| " + " | ".join([*cells, f"{GOALS.get((self.given.bits, k), '')}", " / ".join(sorted(same))]) + " |"

    def _times(self, searcher: Searcher, k: int, threads: int) -> dict[str, float]:
        """Seconds of ours and of FAISS' better selection."""
        actions: dict[str, Action] = {f"faiss {heap}": partial(self.peer, k, heap, threads) for heap in (True, False)}
        for number in range(OURS):  # it is much shorter, so it takes more turns
            actions[f"ours {number}"] = partial(searcher.search_codes, self.given.queries, k=k)
        found = best_of(actions, self.repeats, time.thread_time if threads == 1 else time.perf_counter)
        return {name: min(found[key] for key in found if key.startswith(name)) for name in ("ours", "faiss")}

    def on_workers(self, k: int) -> Iterator[str]:
        """Rows of the second table: the same batches by two threads and by two workers."""
        for size in self.batches:
            queries = np.tile(self.given.queries, (-(-size // len(self.given.queries)), 1))[:size]
            same = compared(self.workers.search_codes(queries, k=k), self.two.search_codes(queries, k=k))
            actions: dict[str, Action] = {
                "threads": lambda queries=queries: self.two.search_codes(queries, k=k),  # type: ignore[misc]
                "workers": lambda queries=queries: self.workers.search_codes(queries, k=k),  # type: ignore[misc]
            }
            best_of(actions, 2)
            found = best_of(actions, OURS * self.repeats)
            cells = [self.given.name, f"{self.given.bits}", f"{k}", f"{size:,}"]
            cells += [f"{1e3 * found[name]:.1f}" for name in ("threads", "workers")]
            yield "| " + " | ".join([*cells, f"{found['threads'] / found['workers']:.0%}", f"{SHARE:.0%}", same]) + " |"

    def one_by_one(self, k: int) -> str:
        """A row of the third table: single queries of 64 bits, by one thread."""
        words = np.ascontiguousarray(self.given.codes).view(np.uint64).reshape(-1)
        queries = self.given.queries[:SINGLES]
        values = queries.view(np.uint64)[:, 0]
        bare_scan(words[:1], values[0])
        faiss.omp_set_num_threads(1)
        actions: dict[str, Action] = {
            "bare": lambda: [bare_scan(words, value) for value in values],
            "ours": lambda: [self.one.search_codes(queries[i : i + 1], k=k) for i in range(len(queries))],
            "faiss": lambda: [self.index.search(queries[i : i + 1], k) for i in range(len(queries))],
        }
        found = best_of(actions, self.repeats, time.thread_time)
        bare, ours, theirs = (1e6 * found[name] / len(queries) for name in ("bare", "ours", "faiss"))
        cells = [self.given.name, f"{k}", f"{bare:.0f}", f"{ours:.0f}", f"{theirs:.0f}"]
        return "| " + " | ".join([*cells, f"{ours / bare:.2f}", f"under {SINGLE_GOAL:g}"]) + " |"


def _cells(found: dict[str, float]) -> list[str]:
    ours, theirs = found["ours"], found["faiss"]
    return [f"{1e3 * ours:.1f}", f"{1e3 * theirs:.0f}", f"{theirs / ours:.1f}"]


@njit(nogil=True)
def bare_scan(words, query):  # type: ignore[no-untyped-def]
    """Sum of the distances of ``query`` to ``words`` (n,): the least that any scan must do."""
    total = np.uint64(0)
    for i in range(words.shape[0]):
        total += popcount(words[i] ^ query)
    return total


class Others:
    """The share of all cores that processes other than this one and its children used since it was made."""

    def __init__(self) -> None:
        self.start = self._used()

    def _used(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        here = [psutil.Process(), *psutil.Process().children(recursive=True)]
        own = sum(part for process in here for part in process.cpu_times()[:2])
        return time.perf_counter(), sum(times) - times.idle - times.iowait, own

    def share(self) -> float:
        seconds, busy, own = (after - before for after, before in zip(self._used(), self.start, strict=True))
        return max(0.0, busy - own) / (seconds * psutil.cpu_count())


def wanted(options: argparse.Namespace) -> dict[int, list[int]]:
    """The k of every code length that is measured."""
    bits = options.bits or sorted({bits for bits, _ in GOALS})
    return {b: options.k or [k for other, k in GOALS if other == b] or [100] for b in bits}


def run(options: argparse.Namespace) -> Iterator[str]:
    """The tables, line by line: the first as it is made, the others after it."""
    clustered, singles, notes = [], [], []
    yield "| codes | bits | k | 1 thread, ms | FAISS | ratio | 2 threads, ms | FAISS | ratio | goal | same as FAISS |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|"
    with connect(ClusterOptions(workers=0 if options.busy else 2, dashboard=False)) as client:
        others = Others()
        for bits, ks in wanted(options).items():
            for name in KINDS:
                given = problem(options.dir, name, options.rows, options.queries, bits)
                if given is None:
                    notes.append(f"{name}, {bits} bits: left out, there are no such vectors here")
                    continue
                notes.append(given.describe())
                with ExitStack() as stack:
                    contest = Contest(given, client, options.repeats, busy=options.busy)
                    stack.callback(contest.close)
                    for k in ks:
                        yield contest.against_faiss(k)
                        clustered += [] if options.busy else contest.on_workers(k)
                        singles += [contest.one_by_one(k)] if bits == 64 else []
        notes.append(f"other processes kept {others.share():.0%} of the cores busy meanwhile")
    yield "\nThe same through a LocalCluster of two workers with one thread each, against two threads of this process\n"
    yield "| codes | bits | k | batch | 2 threads, ms | 2 workers, ms | share of the rate | goal | same |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|---|"
    yield from clustered
    yield "\nOne query of 64 bits at a time by one thread, microseconds each\n"
    yield "| codes | k | bare scan | search | FAISS | search / bare scan | goal |\n|---|--:|--:|--:|--:|--:|--:|"
    yield from [*singles, "", *notes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="Where the indexes are kept.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--bits", type=int, nargs="+", help="Code lengths [default: those that have a goal].")
    parser.add_argument("--k", type=int, nargs="+", help="Neighbours [default: those that have a goal].")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="Only CPU times of one thread, for a busy machine.")
    parser.add_argument("--prepare", action="store_true", help="Make the indexes and stop.")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    if options.prepare:
        for bits in wanted(options):
            made = [problem(options.dir, name, options.rows, options.queries, bits) for name in KINDS]
            print("\n".join(given.describe() for given in made if given is not None), flush=True)
        return
    machine = describe_machine()
    versions = {"faiss": faiss.__version__, **machine["versions"]}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version != "none")
    how = f"best of {options.repeats}; one thread in CPU time, the rest in wall time"
    print(f"{options.rows:,} codes, {options.queries:,} queries, seed {SEED}, {how}")
    print(f"{platform.machine()} {machine['processor']}, {machine['cores']} cores; {listed}\n")
    for line in run(options):
        print(line, flush=True)


if __name__ == "__main__":
    main()
