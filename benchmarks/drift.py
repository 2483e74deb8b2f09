"""How the limits of the drift gate were chosen: false alarms of unchanged rows, and what changed rows cost.

    python benchmarks/drift.py [--data PATH.npy ...] [--generated 60000] [--bits 64] [--nights 400] [--seed 0]
        [--swap]

The first half of a set trains a model (OCH, defaults); nights are taken from the second half. *False alarms*: nights of
n rows that follow each other in the file (a real set keeps what belongs together, such as the descriptors of one
picture, side by side), and of n rows drawn at random. *Drifts*: 8,000 rows changed in one way; beside both statistics
stands what the change costs, the mAP on the changed rows (500 queries, truth = nearest 2 %) under the old model and
under one that was trained on old and changed rows together, as a retraining would. ``--swap`` trains on the second half
and takes nights from the first, and measures false alarms only. Nights may overlap. Output is Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from och_dist.kernels.euclidean import euclidean_top_k
from och_dist.kernels.gistlike import gist_rows
from och_dist.kernels.hamming import hamming_histogram, lay_out
from och_dist.kernels.packing import code_words
from och_dist.kernels.ranking import mean_average_precision
from och_dist.methods.base import Hasher
from och_dist.train.data import training_data
from och_dist.train.drift import (
    MAX_BALANCE_SHIFT,
    MAX_MARGIN_SHIFT,
    SAMPLE_ROWS,
    BitSample,
    Shift,
    sample_block,
    shift_between,
)
from och_dist.train.rows import ArrayRows
from och_dist.train.stage import make_hasher

LIMIT = Shift(MAX_BALANCE_SHIFT, MAX_MARGIN_SHIFT)
NIGHTS = (500, 1_000, 2_000, 8_000)
CHANGED, QUERIES, NEAR_SHARE = 8_000, 500, 0.02

Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def changes(spread: np.ndarray) -> dict[str, Change]:
    """Rows -> changed rows; ``spread`` (d,) is the standard deviation of each dimension at training."""
    found: dict[str, Change] = {"none": lambda rows, rng: rows}
    for factor in (0.9, 0.8, 1.1, 1.25):
        found[f"scaled by {factor}"] = lambda rows, rng, f=factor: rows * f
    for step in (0.1, 0.2, 0.5):
        found[f"moved by {step} sd"] = lambda rows, rng, s=step: rows + s * spread
    for level in (0.5, 1.0):
        found[f"noise of {level} sd"] = lambda rows, rng, n=level: rows + n * spread * rng.standard_normal(rows.shape)
    found["dimensions permuted"] = lambda rows, rng: rows[:, rng.permutation(rows.shape[1])]
    found["Gaussian, same covariance"] = _gaussian
    for share in (0.5, 0.2):
        found[f"only the {share:.0%} nearest to one row"] = lambda rows, rng, s=share: _near(rows, s)
    return found


def _gaussian(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.multivariate_normal(rows.mean(axis=0), np.cov(rows.T), len(rows), method="cholesky")


def _near(rows: np.ndarray, share: float) -> np.ndarray:
    return rows[np.argsort(((rows - rows[0]) ** 2).sum(axis=1))[: int(share * len(rows))]]


def trained(rows: np.ndarray, bits: int) -> Hasher:
    hasher = make_hasher("och", bits, 0, {})
    data = training_data(ArrayRows(rows), centres=hasher.centres_wanted(), seed=0)
    return hasher.fit_training(data)


def mean_precision(hasher: Hasher, rows: np.ndarray, bits: int) -> float:
    """mAP of the first rows as queries against the others."""
    queries, database = rows[:QUERIES], rows[QUERIES:]
    k = max(1, int(NEAR_SHARE * len(database)))
    truth = euclidean_top_k(queries, database, k).dense(k)[1]
    asked, codes = hasher.encode_block(queries), hasher.encode_block(database)
    n = hamming_histogram(asked, lay_out(codes, bits))
    query = np.repeat(np.arange(len(queries)), k)
    differing = code_words(asked)[query] ^ code_words(codes)[truth.ravel()]
    levels = np.bitwise_count(differing).sum(axis=1, dtype=np.int64)
    g = np.bincount(query * (bits + 1) + levels, minlength=n.size).reshape(n.shape)
    return mean_average_precision(n, g)


def false_alarms(hasher: Hasher, before: BitSample, rows: np.ndarray, nights: int, seed: int) -> Iterator[str]:
    yield "| rows | in order: balance 99 % / max | margin 99 % / max | alarms | at random: balance | margin | alarms |"
    yield "|---:|---:|---:|---:|---:|---:|---:|"
    rng = np.random.default_rng(seed)
    for size in (size for size in NIGHTS if size <= len(rows) // 2):
        cells = [f"{size:,}"]
        for ordered in (True, False):
            found = []
            for _ in range(nights):
                start = rng.integers(0, len(rows) - size + 1)
                chosen = np.arange(start, start + size) if ordered else rng.choice(len(rows), size, replace=False)
                found.append(shift_between(before, sample_block(hasher, rows[np.sort(chosen)])))
            for values in ([shift.balance for shift in found], [shift.margin for shift in found]):
                cells.append(f"{np.quantile(values, 0.99):.3f} / {max(values):.3f}")
            alarms = sum(shift.exceeds(LIMIT) for shift in found)
            cells.append(f"{alarms} of {nights}")
        yield f"| {' | '.join(cells)} |"


def drifts(hasher: Hasher, before: BitSample, old: np.ndarray, new: np.ndarray, bits: int, seed: int) -> Iterator[str]:
    yield "| change | balance | margin | alarm | mAP, old model | mAP, retrained | lost |"
    yield "|---|---:|---:|:---:|---:|---:|---:|"
    rng = np.random.default_rng(seed)
    chosen = new[rng.permutation(len(new))[:CHANGED]]
    for name, change in changes(old.std(axis=0)).items():
        rows = np.ascontiguousarray(change(chosen, rng), dtype=np.float32)
        rows = rows[rng.permutation(len(rows))]
        shift = shift_between(before, sample_block(hasher, rows))
        kept = mean_precision(hasher, rows, bits)
        anew = mean_precision(trained(np.concatenate([old, rows]), bits), rows, bits)
        alarm = "yes" if shift.exceeds(LIMIT) else "no"
        figures = (
            f"{shift.balance:.3f} | {shift.margin:.3f} | {alarm} | {kept:.3f} | {anew:.3f} | {1 - kept / anew:.1%}"
        )
        yield f"| {name} | {figures} |"


def run(name: str, vectors: np.ndarray, bits: int, nights: int, seed: int, swap: bool) -> Iterator[str]:
    half = len(vectors) // 2
    old, new = (vectors[half:], vectors[:half]) if swap else (vectors[:half], vectors[half:])
    hasher = trained(old, bits)
    chosen = np.random.default_rng(seed).permutation(len(old))[:SAMPLE_ROWS]
    before = sample_block(hasher, old[np.sort(chosen)])
    yield f"### {name}: {len(vectors):,} x {vectors.shape[1]}, {bits} bits"
    yield ""
    yield from false_alarms(hasher, before, new, nights, seed)
    yield ""
    if not swap:
        yield from drifts(hasher, before, old, new, bits, seed)
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=[], type=Path)
    parser.add_argument("--generated", type=int, default=40_000, help="rows of 960-d GIST-like vectors; 0: none")
    parser.add_argument("--bits", type=int, default=64)
    parser.add_argument("--nights", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--swap", action="store_true", help="false alarms only, halves exchanged")
    options = parser.parse_args()
    print(f"limits: balance {MAX_BALANCE_SHIFT}, margin {MAX_MARGIN_SHIFT}\n")
    with threadpool_limits(1):
        if options.generated:
            made = gist_rows(0, options.generated, dim=960, seed=options.seed)
            print(
                "\n".join(run("generated", made, options.bits, options.nights, options.seed, options.swap)), flush=True
            )
        for path in options.data:
            rows = np.load(path).astype(np.float32)
            print("\n".join(run(path.stem, rows, options.bits, options.nights, options.seed, options.swap)), flush=True)


if __name__ == "__main__":
    main()
