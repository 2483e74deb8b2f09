"""Flat scan against multi-index hashing: times, the crossover, and how often the planner picks the faster.

    python -m benchmarks.multi_index [--rows 100000 1000000 10000000] [--bits 32 64 128] [--k 1 10 100] [--queries 64]
    python -m benchmarks.multi_index --constants --rows 1000000 10000000      the numbers of kernels.buckets.Costs

Codes: uniform random bits, and skewed ones (signs of projections of points about centres in 20 dimensions, which have
near neighbours, unequal buckets and duplicates, like codes of real descriptors). One thread, CPU time, the better of
two runs. Every answer is compared. Beyond 2^24 rows there are several partitions, each of which is given the k-th
distance of those before. Times are microseconds a query; "tables" is what a search costs that may give up and scan.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from och_dist.kernels.buckets import COSTS, BucketTables, code_bytes, make_tables
from och_dist.kernels.hamming import CodeBlock, hamming_top_k, lay_out, merge_top_k
from och_dist.kernels.packing import pack_bits
from och_dist.search.plan import Sample, predict
from och_dist.store.tables import PARTITION_ROWS

DIMENSIONS, CENTRES, SPREAD = 20, 2000, 0.6
SAMPLE_ROWS, PROBES = 1 << 16, 16

Part = tuple[int, CodeBlock, BucketTables]
Answer = tuple[np.ndarray, np.ndarray]


def uniform(rows: int, bits: int, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, (rows, bits // 8), dtype=np.uint8)


def skewed(rows: int, bits: int, rng: np.random.Generator) -> np.ndarray:
    world = np.random.default_rng(7)
    centres = world.standard_normal((CENTRES, DIMENSIONS), dtype=np.float32)
    directions = world.standard_normal((DIMENSIONS, bits), dtype=np.float32)
    blocks = []
    for size in np.diff(np.append(np.arange(0, rows, 100_000), rows)):
        points = centres[(CENTRES * rng.random(size) ** 2).astype(int)]
        points = points + SPREAD * rng.standard_normal(points.shape, dtype=np.float32)
        blocks.append(pack_bits(points @ directions + 0.4 > 0))
    return np.concatenate(blocks)


KINDS: dict[str, Callable[[int, int, np.random.Generator], np.ndarray]] = {"uniform": uniform, "skewed": skewed}


def cpu_time(action: Callable[[], Any], repeats: int = 2) -> tuple[float, Any]:
    """(seconds, result) of the best run after one that compiles and warms up."""
    best, result = np.inf, action()
    for _ in range(repeats):
        start = time.process_time()
        result = action()
        best = min(best, time.process_time() - start)
    return best, result


def partitions(codes: np.ndarray, bits: int, size: int) -> list[Part]:
    parts = []
    for first in range(0, len(codes), size):
        block = lay_out(codes[first : first + size], bits)
        parts.append((first, block, make_tables(block)))
    return parts


def numbered(first: int, distances: np.ndarray, rows: np.ndarray) -> Answer:
    """An answer by rows of a part that begins at row ``first``; -1 stays."""
    return distances, np.where(rows < 0, -1, rows + first)


def search_flat(parts: list[Part], queries: np.ndarray, k: int) -> Answer:
    return merged(parts, k, lambda block, tables, limits: hamming_top_k(queries, block, k, limits=limits))


def search_tables(parts: list[Part], queries: np.ndarray, k: int) -> Answer:
    return merged(parts, k, lambda block, tables, limits: tables.top_k(queries, k, limits=limits))


def merged(parts: list[Part], k: int, scan: Callable[[CodeBlock, BucketTables, np.ndarray | None], Answer]) -> Answer:
    """The nearest of all parts; each is told what those before it found."""
    best: Answer | None = None
    for first, block, tables in parts:
        limits = None if best is None else np.ascontiguousarray(best[0][:, -1])
        found = numbered(first, *scan(block, tables, limits))
        best = found if best is None else merge_top_k([best, found], k)
    assert best is not None
    return best


def problems(options: argparse.Namespace) -> Iterator[tuple[str, int, int, list[Part], np.ndarray, Sample]]:
    for kind, make in KINDS.items():
        for bits in options.bits:
            for rows in options.rows:
                rng = np.random.default_rng(rows)
                codes, queries = make(rows, bits, rng), make(options.queries, bits, rng)
                sample = Sample(codes[:: max(1, rows // SAMPLE_ROWS)], queries[:PROBES], bits)
                yield kind, bits, rows, partitions(codes, bits, options.partition_rows), queries, sample


def crossover(options: argparse.Namespace, search: Callable[..., Answer]) -> None:
    print("| codes | bits | rows | k | k-th distance | flat us | tables us | ratio | predicted | planner | right |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|---|---|")
    picks = []
    for kind, bits, rows, parts, queries, sample in problems(options):
        cut = [(block.n, len(tables.arrays.starts)) for _, block, tables in parts]
        for k in options.k:
            flat, expected = cpu_time(lambda: search_flat(parts, queries, k))  # noqa: B023
            multi, found = cpu_time(lambda: search(parts, queries, k))  # noqa: B023
            if not all(np.array_equal(one, other) for one, other in zip(expected, found, strict=True)):
                raise SystemExit(f"{kind}, {bits} bits, {rows} rows, k={k}: the answers differ")
            plan = predict(sample, cut, k=k, n_queries=len(queries))
            regret = (flat if plan.method == "flat" else multi) / min(flat, multi)
            picks.append((regret, max(flat, multi) / min(flat, multi)))
            each = 1e6 / len(queries)
            print(
                f"| {kind} | {bits} | {rows} | {k} | {expected[0][:, -1].mean():.1f} (plan {plan.reach:.1f}) | "
                f"{flat * each:.1f} | {multi * each:.1f} | {flat / multi:.2f} | {plan.flat / plan.multi_index:.2f} | "
                f"{plan.method} | {'yes' if regret == 1 else f'{regret:.2f}x'} |",
                flush=True,
            )
    right, clear = [regret == 1 for regret, _ in picks], [regret == 1 for regret, ratio in picks if ratio > 1.25]
    print(
        f"\nThe planner picked the faster in {sum(right)} of {len(right)} cases, in {sum(clear)} of the {len(clear)} "
        "where one is faster by a quarter or more; at worst it took "
        f"{max(regret for regret, _ in picks):.2f} times the faster."
    )


def constants(options: argparse.Namespace) -> None:
    """Least squares over many settings, each weighed by its own time."""
    work, times, scans = [], [], []
    for _, bits, _, parts, queries, _ in problems(options):
        (_, block, tables), bounds = parts[0], np.full(len(queries), bits)
        for k in options.k:
            seconds, found = cpu_time(lambda: tables.search(queries, k, bounds, allowance=None))  # noqa: B023
            lookups, groups, matches = found[3].mean(axis=0)
            times.append(1e9 * seconds / len(queries))
            work.append([1.0, lookups, groups, 64 * code_bytes(bits) * groups, matches])
        for n_queries in (1, len(queries)):
            seconds, _ = cpu_time(lambda: hamming_top_k(queries[:n_queries], block, 10), 5)  # noqa: B023
            size = code_bytes(bits)
            scans.append(([1.0, size, size / n_queries], 1e9 * seconds / n_queries / block.n, block.n))
    names = ("query", "lookup", "group", "group_byte", "match", "scan", "scan_byte", "memory_byte")
    fitted = [*_fit(np.array(work), np.array(times))]
    large = [(row, cost) for row, cost, n in scans if n >= 1_000_000]
    fitted += [*_fit(np.array([row for row, _ in large]), np.array([cost for _, cost in large]))]
    for name, value in zip(names, fitted, strict=True):
        print(f"{name}: {value:.4g}    (in use: {getattr(COSTS, name)})")
    predicted = np.array(work) @ fitted[:5]
    print(
        f"time / prediction: {np.percentile(np.array(times) / predicted, [5, 50, 95]).round(2).tolist()} (5, 50, 95 %)"
    )


def _fit(columns: np.ndarray, times: np.ndarray) -> np.ndarray:
    from scipy.optimize import nnls

    return nnls(columns / times[:, None], np.ones(len(times)))[0]


def main(words: Sequence[str] | None = None, tables: Callable[..., Answer] = search_tables) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--bits", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--k", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--constants", action="store_true", help="Measure the constants of the cost model.")
    parser.add_argument("--partition-rows", type=int, default=PARTITION_ROWS)
    options = parser.parse_args(words)
    if options.constants:
        constants(options)
    else:
        crossover(options, tables)


if __name__ == "__main__":
    main()
