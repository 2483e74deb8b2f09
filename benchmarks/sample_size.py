"""How many rows moments and k-means need: quality of codes against the size of the sample that they are learned from.

    python benchmarks/sample_size.py PATH.npy [PATH.npy ...]

500 random rows are queries, the rest is the database; models are trained on it by ``kmeans_rows`` of each size, with
three seeds. Prints mean and standard deviation of the share of the true 10 nearest among the first 100 codes, and of
precision@100 where the nearest 2 % count, as a Markdown table.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from och_dist.kernels.euclidean import euclidean_top_k
from och_dist.kernels.hamming import hamming_top_k, lay_out
from och_dist.train.data import training_data
from och_dist.train.rows import ArrayRows
from och_dist.train.stage import make_hasher

BITS = 64
QUERIES = 500
FOUND = 100
NEAREST = 10
SEEDS = (0, 1, 2)
SIZES = (10_000, 20_000, 40_000, 65_536, 100_000)


def quality(method: str, size: int, base: np.ndarray, queries: np.ndarray, true: np.ndarray) -> np.ndarray:
    """(seeds, 2): the two shares."""
    shares = []
    for seed in SEEDS:
        hasher = make_hasher(method, BITS, seed, {})
        data = training_data(ArrayRows(base), centres=hasher.centres_wanted(), seed=seed, kmeans_rows=size)
        hasher.fit_training(data)
        codes = lay_out(hasher.encode_block(base), BITS)
        _, rows = hamming_top_k(hasher.encode_block(queries), codes, FOUND)
        near = [np.isin(exact[:NEAREST], found).mean() for exact, found in zip(true, rows, strict=True)]
        right = [np.isin(found, exact).mean() for exact, found in zip(true, rows, strict=True)]
        shares.append((np.mean(near), np.mean(right)))
    return np.array(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("vectors", type=Path, nargs="+")
    options = parser.parse_args()
    print("| set | method | rows | true 10 among 100 | precision@100 |\n|---|---|---:|---:|---:|")
    for path in options.vectors:
        vectors = np.load(path).astype(np.float32)
        order = np.random.default_rng(1).permutation(len(vectors))
        queries, base = vectors[order[:QUERIES]], np.ascontiguousarray(vectors[order[QUERIES:]])
        true = euclidean_top_k(queries, base, len(base) // 50).rank().dense(len(base) // 50)[1]
        for method in ("och", "itq"):
            for size in sorted({min(size, len(base)) for size in SIZES}):
                shares = quality(method, size, base, queries, true)
                cells = [f"{mean:.3f} ± {std:.3f}" for mean, std in zip(shares.mean(0), shares.std(0), strict=True)]
                print(f"| {path.stem} | {method} | {size:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
