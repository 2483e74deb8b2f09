"""Settings of every method against its defaults, on held-out training rows: test queries are never looked at.

    python benchmarks/tuning.py --data PATH.npy [PATH.npy ...] [--methods och itq ...] [--bits 32 64 128]
        [--seeds 3] [--settings '{"och": [{"n_anchors": 40}]}'] [--final 0]

From the 10,000 training rows of the first split of ``och compare`` (seed 0), each seed holds out 500 as queries and
fits on 8,000; the database is the other 9,500, the truth its nearest 2 %. One parameter is varied at a time. The
output is Markdown: for each method and code length mAP / precision@100 / pooled PR area, the changes of mAP and of the
area against the default in per cent with their standard errors over the seeds (same rows, same seed), and CPU seconds
of the solver (median), statistics and k-means not included.

The chosen setting of a method has the largest mean change of mAP over the data sets; it is *clear* when the change
exceeds two standard errors on each of them. ``--final N`` then measures default and choice once, on the queries of the
first N splits of ``och compare``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from och_dist.errors import OchError
from och_dist.evaluate.comparison import Split
from och_dist.kernels.euclidean import euclidean_top_k
from och_dist.kernels.hamming import hamming_histogram, lay_out
from och_dist.kernels.packing import code_words
from och_dist.kernels.ranking import mean_average_precision, pooled_area, precision_at
from och_dist.methods.base import Hasher, TrainingData
from och_dist.train.data import training_data
from och_dist.train.rows import ArrayRows
from och_dist.train.stage import make_hasher

QUERIES = 2_000
TRAIN_ROWS = 10_000
HELD_OUT = 500
FIT_ROWS = 8_000
NEAR_SHARE = 0.02
BLOCK_ROWS = 8_192

Setting = Mapping[str, Any]


def one_by_one(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """Settings that change one parameter each."""
    return [{name: value} for name, options in values.items() for value in options]


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "lsh": [],
    "itq": [],
    "agh": [{"n_layers": layers, "n_neighbours": s} for layers in (1, 2) for s in (2, 5, 10) if (layers, s) != (1, 5)],
    "isohash": one_by_one(solver=("gradient-flow", "givens")),
    "sph": [
        *({"mean_tolerance": a, "std_tolerance": b} for a, b in ((0.2, 0.3), (0.05, 0.1))),
        *one_by_one(n_seed_rows=(1, 20)),
    ],
    "sgh": one_by_one(n_bases=(150, 600), n_sweeps=(0, 2)),
    "oeh": one_by_one(n_components=(16, 24, 32), n_near=(5, 20), penalty=(0.001,)),
    "pca-frame": one_by_one(n_components=(12, 16, 20, 24, 28, 32, 40, 64)),
    "och-paper": one_by_one(n_components=(20, 24, 32), n_near=(5, 20)),
    "och": [
        *one_by_one(
            n_components=(12, 16, 20, 24, 32, 40, 64, 96),
            orthogonal=(True,),
            n_centres=(150, 600),
            landmarks=("centres", "rows"),
            n_members=(2,),
            member_shares=("equal",),
            n_anchors=(20, 40, 160),
            near_fraction=(0.01, 0.04, 0.1),
            cross_weight=(0.0, 0.1, 0.2, 0.3, 0.5),
            offsets=(False,),
            gain=((1.0, 1.0), (1.5, 1.5), (4.0, 4.0), (1.5, 8.0)),
            learning_rate=(0.04, 0.16),
            momentum=(0.0,),
            max_iter=(0, 100, 200, 400, 600),
        ),
        {"landmarks": "rows", "n_landmarks": 1000},
        {"n_centres": 150, "n_anchors": 160},
        {"n_centres": 600, "n_anchors": 40},
        *({"orthogonal": True, "n_components": p} for p in (16, 40)),
    ],
}


@dataclass
class Problem:
    """Rows to fit on, queries (q, d), database (n, d) and its rows (q, k) that are truly near."""

    fit: np.ndarray
    queries: np.ndarray
    database: np.ndarray
    truth: np.ndarray
    seed: int
    _training: dict[int, TrainingData] = field(default_factory=dict)

    @classmethod
    def of(cls, fit: np.ndarray, queries: np.ndarray, database: np.ndarray, seed: int) -> Problem:
        near = max(1, math.floor(NEAR_SHARE * len(database)))
        truth = euclidean_top_k(queries, database, near).dense(near)[1]
        return cls(fit.astype(np.float32), queries, database, truth, seed)

    def training(self, n_centres: int) -> TrainingData:
        """What a method learns from; computed once for all that ask for as many centres."""
        if n_centres not in self._training:
            found = training_data(ArrayRows(self.fit), centres=n_centres, seed=self.seed, train_rows=len(self.fit))
            self._training[n_centres] = found
        return self._training[n_centres]


def held_out(vectors: np.ndarray, *, seed: int, train_rows: int = TRAIN_ROWS, queries: int = QUERIES) -> Problem:
    """A problem made of training rows only; ``seed`` divides them, the rows themselves are always those of split 0."""
    split = Split.draw(len(vectors), queries=queries, train_rows=train_rows, seed=0, repeat=0)
    rows = vectors[split.training]
    # In proportion, so that a small set is divided alike.
    n_queries, n_fit = (math.ceil(train_rows * part / TRAIN_ROWS) for part in (HELD_OUT, FIT_ROWS))
    order = np.random.default_rng([seed, 1]).permutation(train_rows)
    rest = np.sort(order[n_queries:])
    fit = np.sort(order[n_queries : n_queries + n_fit])
    return Problem.of(rows[fit], rows[np.sort(order[:n_queries])], rows[rest], seed)


def compared(vectors: np.ndarray, *, repeat: int, train_rows: int = TRAIN_ROWS, queries: int = QUERIES) -> Problem:
    """The problem of one split of ``och compare``: for the end, when everything is chosen."""
    split = Split.draw(len(vectors), queries=queries, train_rows=train_rows, seed=0, repeat=repeat)
    database = np.delete(vectors, split.queries, axis=0)
    return Problem.of(vectors[split.training], vectors[split.queries], database, repeat)


@dataclass(frozen=True)
class Score:
    """Quality and cost of one model."""

    map: float
    precision: float
    area: float
    seconds: float


def measure(problem: Problem, method: str, bits: int, setting: Setting) -> Score | str:
    """Fit, encode and rank; a setting that the method refuses comes back as its sentence."""
    try:
        hasher = make_hasher(method, bits, problem.seed, setting)
        data = problem.training(hasher.centres_wanted())
        start = time.thread_time()
        hasher.fit_training(data)
        seconds = time.thread_time() - start
    except OchError as error:
        return str(error)
    queries, codes = _encoded(hasher, problem.queries), _encoded(hasher, problem.database)
    n = hamming_histogram(queries, lay_out(codes, bits))
    query = np.repeat(np.arange(len(queries)), problem.truth.shape[1])
    differing = code_words(queries)[query] ^ code_words(codes)[problem.truth.ravel()]
    levels = np.bitwise_count(differing).sum(axis=1, dtype=np.int64)
    g = np.bincount(query * (bits + 1) + levels, minlength=n.size).reshape(n.shape)
    at = min(100, len(codes))
    return Score(mean_average_precision(n, g), float(precision_at(n, g, at).mean()), pooled_area(n, g), seconds)


def _encoded(hasher: Hasher, rows: np.ndarray) -> np.ndarray:
    starts = range(0, len(rows), BLOCK_ROWS)
    blocks = [hasher.encode_block(rows[i : i + BLOCK_ROWS], first_row=i) for i in starts]
    return np.concatenate(blocks)


@dataclass(frozen=True)
class Change:
    """Relative change against the default: mean over the seeds, and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, scores: Sequence[Score], defaults: Sequence[Score], part: str) -> Change:
        pairs = zip(scores, defaults, strict=True)
        ratios = [getattr(score, part) / getattr(default, part) - 1 for score, default in pairs]
        spread = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.inf
        return cls(statistics.fmean(ratios), spread)

    @property
    def clear(self) -> bool:
        return self.mean > 2 * self.error

    @property
    def short(self) -> str:
        value = f"{100 * self.mean:+.1f}"
        return value if abs(self.mean) > 2 * self.error else f"({value})"

    def __str__(self) -> str:
        error = f" ± {100 * self.error:.1f}" if math.isfinite(self.error) else ""
        return f"{100 * self.mean:+.1f}{error}"


@dataclass(frozen=True)
class Trial:
    """One setting at one code length: its scores per data set and seed, or why there are none."""

    setting: Setting
    scores: Mapping[str, Sequence[Score]]
    refused: str = ""

    def changes(self, default: Trial, part: str = "map") -> list[Change]:
        """One for each data set."""
        return [Change.of(scores, default.scores[name], part) for name, scores in self.scores.items()]

    def seconds(self) -> float:
        return statistics.median(score.seconds for scores in self.scores.values() for score in scores)


def trial(problems: Mapping[str, Sequence[Problem]], method: str, bits: int, setting: Setting) -> Trial:
    scores: dict[str, list[Score]] = {}
    for name, some in problems.items():
        scores[name] = []
        for problem in some:
            score = measure(problem, method, bits, setting)
            if isinstance(score, str):
                return Trial(setting, {}, score)
            scores[name].append(score)
    return Trial(setting, scores)


def choose(trials: Sequence[Trial]) -> Trial:
    """The setting with the largest mean change of mAP over the data sets; ``trials[0]`` is the default."""
    usable = [one for one in trials if one.scores]
    return max(usable, key=lambda one: statistics.fmean(change.mean for change in one.changes(trials[0])))


def _name(setting: Setting) -> str:
    return ", ".join(f"{key}={value}" for key, value in setting.items()) or "default"


def _cell(scores: Sequence[Score]) -> str:
    parts = (statistics.fmean(getattr(score, part) for score in scores) for part in ("map", "precision", "area"))
    return " / ".join(f"{part:.4f}"[1:] if part < 1 else "1" for part in parts)


def trial_table(method: str, bits: int, trials: Sequence[Trial], sets: Sequence[str]) -> Iterable[str]:
    """Lines of the table of one method and code length."""
    yield f"### {method}, {bits} bits\n"
    heads = [head for name in sets for head in (f"{name}: mAP / P@100 / area", "mAP, %", "area, %")]
    yield "| " + " | ".join(["setting", *heads, "CPU s"]) + " |"
    yield "|---|" + "---:|" * (len(heads) + 1)
    for one in trials:
        if not one.scores:
            yield f"| {_name(one.setting)} | refused: {one.refused} |" + " |" * len(heads)
            continue
        changes = zip(one.changes(trials[0]), one.changes(trials[0], "area"), strict=True)
        cells = []
        for name, both in zip(sets, changes, strict=True):
            cells += [_cell(one.scores[name]), *(["", ""] if one is trials[0] else map(str, both))]
        yield "| " + " | ".join([_name(one.setting), *cells, f"{one.seconds():.3f}"]) + " |"
    yield ""


def summary_table(method: str, found: Mapping[int, Sequence[Trial]], sets: Sequence[str]) -> Iterable[str]:
    """Lines of the changes at all code lengths together; those within two standard errors are in brackets."""
    lengths = " / ".join(map(str, found))
    yield f"### {method}: changes at {lengths} bits\n"
    heads = [f"{name}: {part}, %" for name in sets for part in ("mAP", "area")]
    yield "| " + " | ".join(["setting", *heads, "CPU s"]) + " |"
    yield "|---|" + "---:|" * (len(heads) + 1)
    for row in zip(*found.values(), strict=True):
        if not all(one.scores for one in row):
            continue
        cells = []
        for place in range(len(sets)):
            for part in ("map", "area"):
                pairs = zip(row, found.values(), strict=True)
                changes = [one.changes(trials[0], part)[place].short for one, trials in pairs]
                cells.append(" / ".join(changes) if row[0].setting else "")
        yield (
            "| " + " | ".join([_name(row[0].setting), *cells, " / ".join(f"{one.seconds():.2f}" for one in row)]) + " |"
        )
    yield ""


def choice_table(
    choices: Mapping[tuple[str, int], tuple[Trial, Trial]], sets: Sequence[str], title: str
) -> Iterable[str]:
    """Lines of the table of defaults and choices of all methods: scores of both, and whether the gain is clear."""
    yield f"## {title}\n"
    yield "| method | bits | setting | " + " | ".join(f"{name}: mAP / P@100 / area" for name in sets) + " | mAP, % |"
    yield "|---|---:|---|" + "---:|" * (len(sets) + 1)
    for (method, bits), (default, chosen) in choices.items():
        for one in (default, chosen) if chosen is not default else (default,):
            changes = one.changes(default)
            gain = "" if one is default else "; ".join(map(str, changes))
            gain += " (clear)" if gain and all(change.clear for change in changes) else ""
            cells = [_cell(one.scores[name]) for name in sets]
            yield "| " + " | ".join([method, str(bits), _name(one.setting), *cells, gain]) + " |"
    yield ""


def run(
    vectors: Mapping[str, np.ndarray],
    *,
    settings: Mapping[str, Sequence[Setting]],
    bits: Sequence[int],
    seeds: int,
    final: int = 0,
    train_rows: int = TRAIN_ROWS,
    queries: int = QUERIES,
) -> Iterable[str]:
    """Lines of the whole report, as they are found."""
    sets, rows = list(vectors), {"train_rows": train_rows, "queries": queries}
    problems = {name: [held_out(x, seed=seed, **rows) for seed in range(seeds)] for name, x in vectors.items()}
    choices: dict[tuple[str, int], tuple[Trial, Trial]] = {}
    yield "## Trials on held-out training rows\n"
    for method, some in settings.items():
        found: dict[int, list[Trial]] = {}
        for n_bits in bits:
            default = trial(problems, method, n_bits, {})
            if not default.scores:
                yield f"### {method}, {n_bits} bits\n\nrefused: {default.refused}\n"
                continue
            trials = [default, *(trial(problems, method, n_bits, setting) for setting in some)]
            choices[method, n_bits] = default, choose(trials)
            found[n_bits] = trials
            yield from trial_table(method, n_bits, trials, sets)
        if some:
            yield from summary_table(method, found, sets)
    yield from choice_table(choices, sets, "Choice on held-out training rows")
    if final:
        problems = {name: [compared(x, repeat=i, **rows) for i in range(final)] for name, x in vectors.items()}
        measured = {
            (method, n_bits): _both(problems, method, n_bits, pair[1].setting)
            for (method, n_bits), pair in choices.items()
        }
        yield from choice_table(measured, sets, "The same settings on the queries of och compare")


def _both(problems: Mapping[str, Sequence[Problem]], method: str, bits: int, chosen: Setting) -> tuple[Trial, Trial]:
    default = trial(problems, method, bits, {})
    return default, trial(problems, method, bits, chosen) if chosen else default


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, type=Path, metavar="PATH.npy")
    parser.add_argument("--methods", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="METHOD")
    parser.add_argument("--bits", nargs="+", type=int, default=[32, 64, 128])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--settings", type=json.loads, help="JSON: settings to try instead, per method")
    parser.add_argument("--final", type=int, default=0, metavar="N", help="splits of och compare for a last table")
    parser.add_argument("--train-rows", type=int, default=TRAIN_ROWS)
    parser.add_argument("--queries", type=int, default=QUERIES, help="queries of och compare, which are left alone")
    options = parser.parse_args()
    settings = options.settings or {method: SETTINGS[method] for method in options.methods}
    with threadpool_limits(1):
        lines = run(
            {path.name.split("_")[0].removesuffix(".npy"): np.load(path, mmap_mode="r") for path in options.data},
            settings=settings,
            bits=options.bits,
            seeds=options.seeds,
            final=options.final,
            train_rows=options.train_rows,
            queries=options.queries,
        )
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    main()
