"""Real GIST descriptors beside generated ones, in the statistics that decide how well they hash.

    python benchmarks/fit_generator.py PATH.npy [--rows 10000] [--seed 0] [--dim 960]

PATH.npy holds one descriptor per row. Columns: the real set, generated rows of the same dimension, generated
rows of ``--dim``. The output is a Markdown table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import KMeans, MiniBatchKMeans
from threadpoolctl import threadpool_limits

from och_dist import OCH
from och_dist.kernels.gistlike import gist_rows

Rows = NDArray[np.float32]
Bits = NDArray[np.bool_]

COMPONENTS = (1, 4, 16, 24, 32, 64, 128)
N_QUERIES = 500
N_BITS = 64
NEAR_SHARE = 0.02  # the neighbours that hashing is judged by


def marginals(rows: Rows) -> dict[str, float]:
    """Location, range and shape of single coordinates."""
    mean, std = rows.mean(axis=0), rows.std(axis=0)
    skew = ((rows - mean) ** 3).mean(axis=0) / np.maximum(std, 1e-12) ** 3
    norms = np.linalg.norm(rows, axis=1)
    return {
        "mean": float(rows.mean()),
        "minimum": float(rows.min()),
        "maximum": float(rows.max()),
        "share of zeros": float(np.mean(rows == 0)),
        "std / mean of a coordinate, median": float(np.median(std / mean)),
        "skewness of a coordinate, median": float(np.median(skew)),
        "norm: std / mean": float(norms.std() / norms.mean()),
        "norm: 1 % quantile / median": float(np.percentile(norms, 1) / np.median(norms)),
        "norm: 99 % quantile / median": float(np.percentile(norms, 99) / np.median(norms)),
    }


def spectrum(rows: Rows) -> dict[str, float]:
    """Shares of variance and the slope of log eigenvalue over log rank, ranks 4 to 64."""
    values = np.linalg.eigvalsh(np.cov(rows.astype(np.float64), rowvar=False))[::-1]
    shares = np.cumsum(values) / values.sum()
    result = {f"variance in top {k}": float(shares[k - 1]) for k in COMPONENTS if k <= len(shares)}
    rank = np.arange(4, min(64, len(values)) + 1)
    result["power-law exponent, ranks 4-64"] = float(-np.polyfit(np.log(rank), np.log(values[rank - 1]), 1)[0])
    result["participation ratio"] = float(values.sum() ** 2 / np.sum(values**2))
    return result


def squared_distances(queries: Rows, rows: Rows) -> Rows:
    """Squared Euclidean distances, shape (queries, rows)."""
    cross = queries @ rows.T
    result: Rows = np.sum(queries**2, axis=1)[:, None] + np.sum(rows**2, axis=1)[None] - 2 * cross
    return np.maximum(result, 0)


def neighbourhood(rows: Rows, *, k: int = 20, step: int = 1000) -> dict[str, float]:
    """Neighbour contrast, local intrinsic dimension by maximum likelihood (k neighbours), hubness (10)."""
    rows = rows - rows.mean(axis=0)
    n = len(rows)
    popularity = np.zeros(n)
    contrast, dimension, mean_distance = [], [], []
    for start in range(0, n, step):
        squared = squared_distances(rows[start : start + step], rows)
        own = np.arange(len(squared))
        squared[own, start + own] = np.inf
        nearest = np.argpartition(squared, 10, axis=1)[:, :10]
        popularity += np.bincount(nearest.ravel(), minlength=n)
        distance = np.sqrt(np.sort(squared, axis=1)[:, :-1])
        mean = distance.mean(axis=1)
        near = distance[:, [0, 9, int(NEAR_SHARE * n) - 1]]
        contrast.append(near / mean[:, None])
        close = np.maximum(distance[:, :k], 1e-9)
        dimension.append(1 / np.maximum(np.log(close[:, -1:] / close[:, :-1]).mean(axis=1), 1e-9))
        mean_distance.append(mean)
    one, ten, share = np.median(np.vstack(contrast), axis=0)
    p10 = np.percentile(np.vstack(contrast)[:, 2], 10)
    lid = np.percentile(np.concatenate(dimension), [10, 50, 90])
    means = np.concatenate(mean_distance)
    centred = popularity - popularity.mean()
    return {
        "1-NN / mean distance, median": float(one),
        "10-NN / mean distance, median": float(ten),
        "2 % quantile / mean distance, median": float(share),
        "2 % quantile / mean distance, lowest tenth": float(p10),
        "mean distance: std / mean": float(means.std() / means.mean()),
        "local intrinsic dimension, median": float(lid[1]),
        "local intrinsic dimension, lowest tenth": float(lid[0]),
        "local intrinsic dimension, highest tenth": float(lid[2]),
        "hubness skewness": float(np.mean(centred**3) / popularity.std() ** 3),
    }


def clustering(rows: Rows, *, n_centres: int = 300) -> dict[str, float]:
    """Share of the variance that k-means leaves inside its clusters."""
    start = MiniBatchKMeans(n_centres, random_state=0, n_init=1, batch_size=2048, max_iter=30).fit(rows)
    model = KMeans(n_centres, init=start.cluster_centers_, n_init=1, max_iter=5).fit(rows)
    total = float(np.sum((rows - rows.mean(axis=0)) ** 2))
    return {f"variance inside {n_centres} k-means clusters": float(model.inertia_) / total}


def random_projection(train: Rows, generator: np.random.Generator) -> NDArray[np.float64]:
    return generator.standard_normal((train.shape[1], N_BITS))


def principal_axes(train: Rows, n_axes: int) -> NDArray[np.float64]:
    return np.linalg.eigh(np.cov(train, rowvar=False))[1][:, ::-1][:, :n_axes]


def principal_signs(train: Rows, generator: np.random.Generator) -> NDArray[np.float64]:
    return principal_axes(train, N_BITS)


def tight_frame(train: Rows, generator: np.random.Generator) -> NDArray[np.float64]:
    frame = np.linalg.qr(generator.standard_normal((N_BITS, 24)))[0].T
    return principal_axes(train, 24) @ frame


def quantised_rotation(train: Rows, generator: np.random.Generator) -> NDArray[np.float64]:
    """Rotate the principal axes until their signs are the nearest corners of the cube, 50 rounds."""
    axes = principal_axes(train, N_BITS)
    projected = (train - train.mean(axis=0)) @ axes
    rotation = np.linalg.qr(generator.standard_normal((N_BITS, N_BITS)))[0]
    for _ in range(50):
        left, _, right = np.linalg.svd(projected.T @ np.sign(projected @ rotation))
        rotation = left @ right
    return axes @ rotation


METHODS: dict[str, Callable[[Rows, np.random.Generator], NDArray[np.float64]]] = {
    "random projections": random_projection,
    "signs of principal axes": principal_signs,
    "rotated principal axes (as ITQ)": quantised_rotation,
    "24 axes + random tight frame": tight_frame,
}


def hamming_distances(queries: Bits, rows: Bits) -> NDArray[np.int_]:
    """Differing bits, shape (queries, rows)."""
    left, right = queries.astype(np.float32), rows.astype(np.float32)
    return (left @ (1 - right).T + (1 - left) @ right.T).astype(np.int_)


def mean_average_precision(hamming: NDArray[np.int_], near: Bits) -> float:
    """Mean over queries; ties in order of row number. Both inputs (queries, rows)."""
    order = np.argsort(hamming, axis=1, kind="stable")
    hit = np.take_along_axis(near, order, axis=1)
    precision = np.cumsum(hit, axis=1) / np.arange(1, hit.shape[1] + 1)
    return float(np.mean(np.sum(precision * hit, axis=1) / hit.sum(axis=1)))


def hashing(rows: Rows, *, seed: int = 0) -> dict[str, float]:
    """Retrieval quality of simple linear hashes and of OCH: their order should be that of the real set."""
    queries, base = rows[:N_QUERIES], rows[N_QUERIES:]
    squared = squared_distances(queries, base)
    n_near = int(NEAR_SHARE * len(base))
    near = squared <= np.partition(squared, n_near - 1, axis=1)[:, n_near - 1 : n_near]
    centre = base.mean(axis=0)
    codes = {}
    for name, learn in METHODS.items():
        projection = learn(base, np.random.default_rng(seed))
        codes[name] = (rows - centre) @ projection > 0
    model = OCH(n_bits=N_BITS, random_state=seed).fit(base)
    codes["OCH"] = (rows - model.mean_) @ model.projection_ + model.offsets_ > 0
    return {
        f"mAP, {N_BITS} bits, {name}": mean_average_precision(
            hamming_distances(bits[:N_QUERIES], bits[N_QUERIES:]), near
        )
        for name, bits in codes.items()
    }


def measure(rows: Rows) -> dict[str, float]:
    """All statistics of rows (n, d), name -> value."""
    parts = (marginals, spectrum, neighbourhood, clustering, hashing)
    return {name: value for part in parts for name, value in part(rows).items()}


def load_sample(path: Path, n_rows: int, *, seed: int) -> Rows:
    """n_rows rows of a .npy file without replacement, in file order, as float32."""
    stored = np.load(path, mmap_mode="r")
    chosen = np.random.default_rng(seed).choice(len(stored), size=min(n_rows, len(stored)), replace=False)
    return np.asarray(stored[np.sort(chosen)], dtype=np.float32)


def table(columns: dict[str, dict[str, float]]) -> str:
    """A Markdown table, one column per data set; a dash where a statistic does not exist."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for name in names:
        cells = [f"{column[name]:.3g}" if name in column else "-" for column in columns.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare generated rows with a real GIST set.")
    parser.add_argument("path", type=Path, help=".npy file, one descriptor per row")
    parser.add_argument("--rows", type=int, default=10_000, help="rows of each set")
    parser.add_argument("--seed", type=int, default=0, help="of the sample and of the generator")
    parser.add_argument("--dim", type=int, default=960, help="of the last column")
    options = parser.parse_args()
    if options.rows < 2 * N_QUERIES:
        parser.error(f"--rows {options.rows}; the statistics need at least {2 * N_QUERIES} rows")
    real = load_sample(options.path, options.rows, seed=options.seed)
    sets = {f"real, {options.path.stem}": real}
    for dim in dict.fromkeys((real.shape[1], options.dim)):
        sets[f"generated, d={dim}"] = gist_rows(0, len(real), dim=dim, seed=options.seed)
    with threadpool_limits(limits=1):
        print(table({name: measure(rows) for name, rows in sets.items()}))


if __name__ == "__main__":
    main()
