"""CPU time of the kernels under the stages, one thread, per 8,192 rows; and how many centres bounds leave in k-means.

    python -m benchmarks.kernels [--dim 960] [--centres 300] [--rows 8192]

CPU time, so that a busy machine disturbs less; the least of some repeats.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import faiss
import numpy as np
from scipy.linalg.blas import dsyrk
from threadpoolctl import threadpool_limits

from och_dist.kernels.euclidean import euclidean_top_k
from och_dist.kernels.gistlike import gist_rows
from och_dist.kernels.kmeans import assign, begin_round, block_sums, next_centres
from och_dist.kernels.moments import block_moments
from och_dist.kernels.project import encode_linear
from och_dist.store.arrays import ArraySpec, create_array, open_array, read_plain_chunk, read_rows, write_chunk
from och_dist.store.objects import LocalObjects


def cpu_ms(action: Callable[[], Any], repeats: int = 5) -> float:
    """Least CPU time in milliseconds, after a first call that compiles."""
    action()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def reading(rows: np.ndarray, folder: str) -> Iterator[tuple[str, float]]:
    objects, spec = LocalObjects(folder), ArraySpec(len(rows), rows.shape[1], "<f4", len(rows))
    create_array(objects, "a", spec)
    write_chunk(objects, "a", 0, rows)
    array = open_array(objects, "a")
    yield "read a chunk through Zarr", cpu_ms(lambda: read_rows(array, 0, len(rows)))
    yield "read a chunk in one copy", cpu_ms(lambda: read_plain_chunk(objects, "a", spec, 0))


def arithmetic(rows: np.ndarray, centres: np.ndarray, n_queries: int) -> Iterator[tuple[str, float]]:
    d = rows.shape[1]
    mean, offsets = rows.mean(axis=0), np.zeros(64, np.float32)
    projection = np.random.default_rng(0).standard_normal((d, 64)).astype(np.float32)
    shared, pilot = begin_round(centres), mean.astype(np.float64)
    index, queries = faiss.IndexFlatL2(d), gist_rows(1 << 40, n_queries, dim=d)
    index.add(centres)
    near = np.sort(euclidean_top_k(queries, rows, 9).dense(9)[0], axis=1)[:, -1]
    yield "codes, 64 bits", cpu_ms(lambda: encode_linear(rows, mean, projection, offsets))
    yield "  bare product, signs, packing", cpu_ms(lambda: np.packbits((rows - mean) @ projection > 0, axis=1))
    yield "moments", cpu_ms(lambda: block_moments(rows, pilot))
    yield "  bare dsyrk", cpu_ms(lambda: dsyrk(1.0, (rows.astype(np.float64) - pilot).T))
    yield "a round of k-means", cpu_ms(lambda: block_sums(rows, shared))
    yield "  bare product of all centres", cpu_ms(lambda: rows @ centres.T)
    yield "  faiss assignment alone", cpu_ms(lambda: index.search(rows, 1))
    yield "exact labels and distances", cpu_ms(lambda: assign(rows, centres, shared=shared))
    yield "  by the exact search for one neighbour", cpu_ms(lambda: euclidean_top_k(rows, centres, 1))
    yield f"exact neighbours of {n_queries:,} queries", cpu_ms(lambda: euclidean_top_k(queries, rows, 100, limit=near))
    yield "  bare product", cpu_ms(lambda: queries @ rows.T)


def rounds_of_kmeans(rows: np.ndarray, n_centres: int, rounds: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Centres before and after each round, from random rows."""
    centres = rows[np.random.default_rng(0).choice(len(rows), n_centres, replace=False)].copy()
    for _ in range(rounds):
        moved = next_centres(block_sums(rows, begin_round(centres)), centres)
        yield centres, moved
        centres = moved


def bounds_left(rows: np.ndarray, centres: np.ndarray, moved: np.ndarray) -> str:
    """A line: what bounds would spare in this round (axes) and in the next one (Hamerly, Elkan)."""
    shared = begin_round(centres)
    about = (rows - shared.origin) * np.float32(shared.scale)
    squared = (about.astype(np.float64) ** 2).sum(axis=1)
    scores = shared.squared - 2.0 * about @ shared.centres.T
    distances = np.sqrt(np.maximum(scores + squared[:, None], 0.0))
    labels, best = distances.argmin(axis=1), distances.min(axis=1)
    second = np.partition(distances, 1, axis=1)[:, 1]
    moves = np.sqrt(((moved.astype(np.float64) - centres) ** 2).sum(axis=1)) * shared.scale
    hamerly = np.mean(best + moves[labels] < second - moves.max())
    elkan = np.mean((distances - moves <= (best + moves[labels])[:, None]).sum(axis=1))
    left = float(len(centres))
    if shared.axes.size:
        p = shared.axes.shape[1] - 2
        places = about @ shared.axes[:, :p]
        rest = np.sqrt(np.maximum(squared - (places.astype(np.float64) ** 2).sum(axis=1), 0.0))
        features = np.column_stack([places, np.ones(len(rows)), rest]).astype(np.float32)
        left = float(np.mean((features @ shared.bounds <= scores.min(axis=1)[:, None]).sum(axis=1)))
    return f"{max(0, shared.axes.shape[1] - 2)} | {left:.1f} | {hamerly:.1%} | {elkan:.1f}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=960)
    parser.add_argument("--centres", type=int, default=300)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args(words)
    faiss.omp_set_num_threads(1)
    many = gist_rows(0, 2 * options.rows, dim=options.dim)
    rows = many[: options.rows]
    with threadpool_limits(1), tempfile.TemporaryDirectory() as folder:
        history = list(rounds_of_kmeans(many, options.centres, options.rounds))
        print(f"| {len(rows):,} x {options.dim} float32, {options.centres} centres | CPU ms |\n|---|---|")
        for name, value in (*reading(rows, folder), *arithmetic(rows, history[-1][0], options.queries)):
            print(f"| {name} | {value:.1f} |")
        print(f"\n{len(many):,} rows, rounds from random rows\n")
        print("| round | axes | centres left per row | rows Hamerly would skip next | centres left to Elkan next |")
        print("|---|---|---|---|---|")
        for number, (centres, moved) in enumerate(history, 1):
            print(f"| {number} | {bounds_left(many, centres, moved)} |")


if __name__ == "__main__":
    main()
