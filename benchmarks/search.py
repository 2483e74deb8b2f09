"""Exact Hamming search against faiss.IndexBinaryFlat, in one process and one run.

    python -m benchmarks.search [--rows 1000000] [--queries 1000] [--bits 32 64 128 256] [--k 10 100 1000]

Codes: uniform random bits; OCH codes of generated GIST-like rows; OCH codes of real GIST rows (tiny100k, copied with a
little noise up to the number of rows), where the folder named by OCH_SHARED_DATA or ../shared/data has them. One thread
is measured in CPU time, two threads in wall time, the best of some repeats taken in turn. FAISS is given the better of
its two selections (``use_heap`` True and False). Every answer is compared: distances and, since this FAISS also keeps
the lowest rows among equals, rows.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
from numba import njit

from och_dist import OCH
from och_dist.kernels.gistlike import gist_rows
from och_dist.kernels.hamming import CodeBlock, hamming_top_k, lay_out, popcount

GOALS = {(64, 10): 8, (64, 100): 8, (64, 1000): 4, (128, 100): 5, (128, 1000): 3, (32, 100): 4, (256, 100): 4}
"""Wanted ratios by (bits, k)."""

REAL_ROWS = "tiny100k_gist384_f16.npy"
TRAINING_ROWS, BLOCK_ROWS, NOISE = 10_000, 50_000, 0.1

Answer = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Problem:
    """``codes`` (n, bytes) and ``queries`` (q, bytes), packed."""

    name: str
    bits: int
    codes: np.ndarray
    queries: np.ndarray

    def describe(self) -> str:
        distinct = len(np.unique(np.ascontiguousarray(self.codes).view(f"V{self.codes.shape[1]}")))
        return f"{self.name}, {self.bits} bits: {distinct / len(self.codes):.0%} of the codes are distinct"


def uniform(rows: int, queries: int, bits: int) -> Problem:
    made = np.random.default_rng(0).integers(0, 256, (rows + queries, bits // 8), dtype=np.uint8)
    return Problem("uniform", bits, made[:rows], made[rows:])


def generated(rows: int, queries: int, bits: int) -> Problem:
    """OCH codes of GIST-like rows; queries are rows of the same world that are not in the database."""
    hasher = OCH(bits).fit(gist_rows(0, TRAINING_ROWS, dim=384, seed=0))
    starts = range(0, rows + queries, BLOCK_ROWS)
    ends = [min(start + BLOCK_ROWS, rows + queries) for start in starts]
    blocks = (gist_rows(start, end - start, dim=384, seed=0) for start, end in zip(starts, ends, strict=True))
    codes = np.concatenate([hasher.transform(block) for block in blocks])
    return Problem("GIST-like", bits, codes[:rows], codes[rows:])


def real(rows: int, queries: int, bits: int) -> Problem | None:
    """OCH codes of real rows: first as they are, then again with noise, until there are enough of them."""
    folder = Path(os.environ.get("OCH_SHARED_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not (folder / REAL_ROWS).exists():
        return None
    vectors = np.load(folder / REAL_ROWS).astype(np.float32)
    base = vectors[queries:]
    hasher, rng = OCH(bits).fit(base[:TRAINING_ROWS]), np.random.default_rng(0)
    spread = NOISE * base.std(axis=0)
    parts = [hasher.transform(base[:rows])]
    while sum(map(len, parts)) < rows:
        noise = rng.standard_normal(base.shape, dtype=np.float32) * spread
        parts.append(hasher.transform(base + noise))
    return Problem("tiny100k", bits, np.concatenate(parts)[:rows], hasher.transform(vectors[:queries]))


def best_of(actions: dict[str, Callable[[], Answer]], clock: Callable[[], float], repeats: int) -> dict[str, float]:
    """Least time of each action; they take turns, so that a busy moment does not hit one of them alone."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            start = clock()
            action()
            times[name].append(clock() - start)
    return {name: min(values) for name, values in times.items()}


def in_threads(pool: ThreadPoolExecutor, queries: np.ndarray, block: CodeBlock, k: int) -> Answer:
    """Halves of the queries side by side."""
    middle = len(queries) // 2
    halves = list(pool.map(lambda part: hamming_top_k(part, block, k), (queries[:middle], queries[middle:])))
    return np.concatenate([part[0] for part in halves]), np.concatenate([part[1] for part in halves])


def measure(problem: Problem, ks: list[int], repeats: int) -> Iterator[str]:
    """Rows of the table."""
    block, index = lay_out(problem.codes, problem.bits), faiss.IndexBinaryFlat(problem.bits)
    index.add(problem.codes)
    queries = problem.queries

    def peer(k: int, heap: bool) -> Answer:
        index.use_heap = heap
        return index.search(queries, k)

    with ThreadPoolExecutor(2) as pool:
        for k in ks:
            same = compared(hamming_top_k(queries, block, k), peer(k, True))
            peers = {f"faiss {heap}": lambda k=k, heap=heap: peer(k, heap) for heap in (True, False)}  # type: ignore[misc]
            faiss.omp_set_num_threads(1)
            one = best_of({"ours": lambda k=k: hamming_top_k(queries, block, k), **peers}, time.process_time, repeats)  # type: ignore[misc]
            faiss.omp_set_num_threads(2)
            two = best_of(
                {"ours": lambda k=k: in_threads(pool, queries, block, k), **peers}, time.perf_counter, repeats
            )  # type: ignore[misc]
            cells = [problem.name, f"{problem.bits}", f"{k}"]
            for found in (one, two):
                theirs = min(found[name] for name in peers)
                cells += [f"{1e3 * found['ours']:.1f}", f"{1e3 * theirs:.0f}", f"{theirs / found['ours']:.1f}"]
            yield "| " + " | ".join([*cells, f"{GOALS.get((problem.bits, k), '')}", same]) + " |"


def compared(ours: Answer, theirs: Answer) -> str:
    same = ("distances", "rows")
    return " and ".join(name for name, a, b in zip(same, ours, theirs, strict=True) if np.array_equal(a, b)) or "NONE"


@njit(nogil=True)
def bare_scan(words, query):  # type: ignore[no-untyped-def]
    """Sum of the distances of ``query`` to ``words`` (n,): the least that any scan must do."""
    total = np.uint64(0)
    for i in range(words.shape[0]):
        total += popcount(words[i] ^ query)
    return total


def one_by_one(problem: Problem, ks: list[int], repeats: int) -> Iterator[str]:
    """Rows of the table for single queries of 64 bits."""
    block, index = lay_out(problem.codes, problem.bits), faiss.IndexBinaryFlat(problem.bits)
    index.add(problem.codes)
    words = np.ascontiguousarray(problem.codes).view(np.uint64).reshape(-1)
    queries = problem.queries[:200]
    values = queries.view(np.uint64)[:, 0]
    faiss.omp_set_num_threads(1)
    for k in ks:
        actions = {
            "bare": lambda: [bare_scan(words, value) for value in values],
            "ours": lambda k=k: [hamming_top_k(queries[i : i + 1], block, k) for i in range(len(queries))],  # type: ignore[misc]
            "faiss": lambda k=k: [index.search(queries[i : i + 1], k) for i in range(len(queries))],  # type: ignore[misc]
        }
        bare_scan(words[:1], values[0])
        found = best_of(actions, time.process_time, repeats)  # type: ignore[arg-type]
        per_query = [1e6 * found[name] / len(queries) for name in ("bare", "ours", "faiss")]
        cells = [problem.name, f"{k}", *(f"{value:.0f}" for value in per_query), f"{per_query[1] / per_query[0]:.2f}"]
        yield "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--k", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    notes, singles = [], []
    print(f"{options.rows:,} codes, {options.queries:,} queries, faiss {faiss.__version__}; times in ms\n")
    print("| codes | bits | k | 1 thread | faiss | ratio | 2 threads | faiss | ratio | goal | same |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for bits in options.bits:
        for make in (uniform, generated, real):
            problem = make(options.rows, options.queries, bits)
            if problem is None:
                continue
            notes.append(problem.describe())
            for line in measure(problem, options.k, options.repeats):
                print(line, flush=True)
            if bits == 64:
                singles += one_by_one(problem, options.k, options.repeats)
    print("\nOne query of 64 bits at a time, microseconds each, one thread\n")
    print("| codes | k | bare scan | search | faiss | search / bare scan |\n|---|---|---|---|---|---|")
    print("\n".join([*singles, "", *notes]))


if __name__ == "__main__":
    main()
