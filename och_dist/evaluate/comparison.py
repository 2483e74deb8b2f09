"""Methods against each other under the paper's protocol: same splits, same truth, one result per cell, resumable.

A *cell* is one method with one code length on one split. Its result is a sealed JSON file of its own, so that a killed
comparison repeats no finished cell.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

import numpy as np

from och_dist.cluster import map_tasks, reduce_tasks
from och_dist.errors import OchError, UsageError
from och_dist.evaluate.exact import remaining_rows
from och_dist.evaluate.splits import PreparedSplit, Split, prepare_split
from och_dist.kernels.hamming import hamming_histogram, hamming_pairs, lay_out
from och_dist.kernels.packing import code_words, count_ones, unpack_bits
from och_dist.kernels.ranking import bit_balance, bit_entropy, evaluate_histograms
from och_dist.kernels.spheres import spherical_histogram, spherical_levels, spherical_pairs
from och_dist.methods.base import Hasher, one_thread
from och_dist.methods.registry import METHODS, get_method
from och_dist.stage import Context, Report, Stopwatch, logger
from och_dist.store import (
    Corpus,
    CorpusRef,
    LocalObjects,
    canonical,
    load_model,
    model_on_worker,
    open_corpus,
    open_objects,
    save_model,
    seal,
    sha256,
    unseal,
    write_text,
)
from och_dist.train import ArrayRows, make_hasher, training_data

QUERY_BYTES = 32 << 20
WARM_ROWS = 600
CENTRES = (100, 200, 300, 400, 600, 800)
ANCHORS = (10, 20, 40, 80, 160)
SWEEP_BITS = 64
SPHERICAL_QUERIES = 500
TRAINING = 2
"""Goes up when a change of training makes cells that were computed before no longer comparable."""


@dataclass(frozen=True)
class Cell:
    """One method, one code length, one split. ``variant`` says which table or figure it belongs to."""

    method: str
    bits: int
    repeat: int
    variant: str = "main"
    params: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"method": self.method, "bits": self.bits, "repeat": self.repeat, "variant": self.variant,
                "params": dict(self.params)}  # fmt: skip


@dataclass(frozen=True)
class FitCell:
    cell: Cell
    split: PreparedSplit
    models: str
    seed: int


@dataclass(frozen=True)
class Fitted:
    """A trained cell: its model, and the CPU seconds of the statistics and of the solver."""

    address: str
    statistics_seconds: float
    solve_seconds: float
    correlation: float


@lru_cache(maxsize=64)
def _warm(method: str, bits: int, folder: str) -> None:
    """Compile what a method needs before its training is timed."""
    from och_dist.evaluate.splits import get_array

    rows = get_array(LocalObjects(folder), "training.npy")[:WARM_ROWS]
    try:
        hasher = make_hasher(method, bits, 0, {})
        hasher.fit_training(training_data(ArrayRows(rows), centres=min(50, hasher.centres_wanted()), seed=0))
        hasher.encode_block(rows)
    except OchError:
        logger.debug("no warm-up for %s at %d bits", method, bits)


def fit_cell(task: FitCell) -> Fitted | str:
    """Train one cell on the training rows of its split; a setting the method refuses comes back as its sentence."""
    cell = task.cell
    _warm(cell.method, cell.bits, task.split.folder)
    rows = task.split.vectors("training")
    seed = task.seed + cell.repeat
    try:
        hasher = make_hasher(cell.method, cell.bits, seed, cell.params)
        with one_thread():  # one thread's CPU time is then all of it, and k-means does not depend on their number
            start = time.thread_time()
            data = training_data(ArrayRows(rows), centres=hasher.centres_wanted(), seed=seed, train_rows=len(rows))
            between = time.thread_time()
            hasher.fit_training(data)
            end = time.thread_time()
    except OchError as error:
        return str(error)
    address = save_model(open_objects(task.models), hasher, {"cell": cell.to_json()})
    codes = hasher.encode_block(rows)
    return Fitted(address, between - start, end - between, _correlation(codes, cell.bits))


def _correlation(codes: np.ndarray, bits: int) -> float:
    """Mean absolute correlation of two different bits; constant bits count as uncorrelated."""
    values = unpack_bits(codes, bits).astype(np.float32)
    values -= values.mean(axis=0)
    scale = np.sqrt((values**2).sum(axis=0))
    values /= np.where(scale > 0, scale, 1)
    between = np.abs(values.T @ values)
    return float((between.sum() - np.trace(between)) / max(1, bits * (bits - 1)))


@dataclass(frozen=True)
class CountCell:
    """Encode and count one partition for one model."""

    corpus: CorpusRef
    start: int
    stop: int
    models: str
    address: str
    spherical: bool


@dataclass(frozen=True)
class CellQueries:
    """What all tasks of a cell share: the packed codes (q, bytes) of the queries, and the split they are from."""

    codes: np.ndarray
    split: PreparedSplit


@dataclass(frozen=True)
class Counts:
    """Histograms (q, levels) per ranking of database rows and of true neighbours; set bits per bit; rows seen."""

    histograms: tuple[tuple[np.ndarray, np.ndarray], ...]
    ones: np.ndarray
    rows: int

    def merge(self, other: Counts) -> Counts:
        both = zip(self.histograms, other.histograms, strict=True)
        summed = tuple((n + m, g + h) for (n, g), (m, h) in both)
        return Counts(summed, self.ones + other.ones, self.rows + other.rows)


def merge_counts(parts: Iterable[Counts]) -> Counts:
    return reduce(Counts.merge, parts)


def count_cell(task: CountCell, queries: CellQueries) -> Counts:
    """Counts over the database rows of one partition."""
    blocks = task.corpus.open().blocks(task.start, task.stop)
    hasher = model_on_worker(task.models, task.address)
    return merge_counts(_count_block(hasher, first, block, queries, task.spherical) for first, block in blocks)


def _count_block(hasher: Hasher, first: int, block: np.ndarray, queries: CellQueries, spherical: bool) -> Counts:
    rows = remaining_rows(first, len(block), queries.split.query_rows)
    packed = hasher.encode_block(block, first_row=first)[rows - first]
    bits, words, codes = int(hasher.n_bits), code_words(queries.codes), code_words(packed)
    query, place = _true_pairs(queries.split, rows)
    distances = hamming_pairs(words, codes, query, place)
    histogram = hamming_histogram(queries.codes, lay_out(packed, bits))
    pairs = [(histogram, _counted(query, distances, len(words), bits + 1))]
    if spherical:  # thousands of levels: a part of the queries keeps the histograms small
        levels, few = spherical_levels(bits), query < SPHERICAL_QUERIES
        some, query, place = words[:SPHERICAL_QUERIES], query[few], place[few]
        histogram = spherical_histogram(some, codes, bits, levels)
        found = spherical_pairs(some, codes, query, place, bits, levels)
        pairs.append((histogram, _counted(query, found, *histogram.shape)))
    return Counts(tuple(pairs), count_ones(packed, bits), len(rows))


def _true_pairs(split: PreparedSplit, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(query, local place) of every true neighbour among ``rows`` (ascending global numbers)."""
    step = max(1, QUERY_BYTES // (8 * split.truth.width))
    queries, places = [], []
    for start in range(0, split.truth.queries, step):
        true = split.truth.read_rows(start, min(start + step, split.truth.queries))
        query, column = np.nonzero((true >= rows[0]) & (true <= rows[-1])) if len(rows) else (rows, rows)
        queries.append(query + start)
        places.append(np.searchsorted(rows, true[query, column]))
    return np.concatenate(queries), np.concatenate(places)


def _counted(query: np.ndarray, level: np.ndarray, n_queries: int, n_levels: int) -> np.ndarray:
    flat = np.bincount(query * n_levels + level, minlength=n_queries * n_levels)
    return flat.reshape(n_queries, n_levels).astype(np.int64)


def compare(
    corpus: str,
    output: str,
    *,
    methods: Sequence[str] | str = "all",
    bits: Sequence[int] = (32, 64, 128),
    repeats: int = 10,
    queries: int = 2000,
    train_rows: int = 10_000,
    truth_fraction: float = 0.02,
    truth_k: int | None = None,
    sweeps: bool = True,
    seed: int = 0,
    context: Context | None = None,
) -> Report:
    """Compare methods on random splits of ``corpus``; tables, figures and raw results go to the folder ``output``."""
    watch, context = Stopwatch("compare"), context or Context()
    opened, folder = open_corpus(corpus), Path(output).absolute()
    names = _methods(methods)
    if repeats < 1 or not bits or min(bits) < 1 or not 0 < truth_fraction <= 1 or (truth_k is not None and truth_k < 1):
        raise UsageError(
            f"repeats={repeats}, bits={list(bits)}, truth_fraction={truth_fraction}, truth_k={truth_k}; "
            "use at least one repeat, one bit and one true neighbour"
        )
    database = opened.rows - queries
    k = truth_k or max(1, int(truth_fraction * database))
    protocol = {"corpus": opened.fingerprint, "rows": opened.rows, "dim": opened.dim, "queries": queries,
                "database": database, "train_rows": train_rows, "truth_k": k, "seed": seed}  # fmt: skip
    objects, computed = LocalObjects(folder), 0
    results: list[dict[str, Any]] = []
    for repeat in range(repeats):
        keys = {cell_key(protocol, cell): cell for cell in _cells(names, bits, sweeps, repeat)}
        todo = {key: cell for key, cell in keys.items() if objects.size(f"cells/{key}.json") is None}
        if todo:
            drawn = Split.draw(opened.rows, queries=queries, train_rows=train_rows, seed=seed, repeat=repeat)
            place = folder / "splits" / sha256(canonical([protocol, repeat]))[:16]
            split = prepare_split(opened, drawn, place, k=k, context=context)
            _run_cells(opened, split, todo, objects, seed, context)
            computed += len(todo)
        results += [unseal(objects.get(f"cells/{key}.json"), key) for key in keys]
    results = sorted(results, key=lambda cell: (cell["variant"], cell["method"], cell["bits"], cell["repeat"]))
    path = folder / "results.json"
    write_text(path, json.dumps({"protocol": protocol, "machine": _machine(), "cells": results}, indent=1))
    return watch.report(
        "done" if computed else "nothing to do", results=str(path), cells=len(results), computed=computed
    )


def _machine() -> dict[str, Any]:
    return {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()}


def _processor() -> str:
    """The name that the system gives its processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _methods(methods: Sequence[str] | str) -> list[str]:
    names = (
        list(METHODS)
        if methods in ("all", ["all"], ("all",))
        else [methods]
        if isinstance(methods, str)
        else list(methods)
    )
    for name in names:
        get_method(name)
    return names


def _cells(methods: Sequence[str], bits: Sequence[int], sweeps: bool, repeat: int) -> list[Cell]:
    """All cells of one repeat: the tables, and OCH over the number of centres and of relations per step."""
    cells = [Cell(method, r, repeat) for r in bits for method in methods]
    if "agh" in methods:
        cells += [Cell("agh", r, repeat, "two layers", {"n_layers": 2}) for r in bits if r % 2 == 0]
    if sweeps and "och" in methods:
        cells += [Cell("och", SWEEP_BITS, repeat, "centres", {"n_centres": count}) for count in CENTRES]
        cells += [Cell("och", SWEEP_BITS, repeat, "relations", {"n_anchors": count}) for count in ANCHORS]
    return cells


def cell_key(protocol: Mapping[str, Any], cell: Cell) -> str:
    """Where the result of a cell lies: a function of training, corpus, protocol, method and all parameters."""
    defaults = get_method(cell.method)(n_bits=cell.bits).get_params(deep=False)
    settings = {name: value for name, value in defaults.items() if name != "random_state"}
    return sha256(canonical([TRAINING, dict(protocol), cell.to_json(), repr(sorted(settings.items()))]))[:24]


def _run_cells(
    corpus: Corpus, split: PreparedSplit, todo: Mapping[str, Cell], objects: LocalObjects, seed: int, context: Context
) -> None:
    """Train all cells of a split in parallel, then count them one after the other, each on the whole cluster."""
    models = f"{objects.url}/models"
    tasks = [FitCell(cell, split, models, seed) for cell in todo.values()]
    fitted = map_tasks(
        fit_cell, tasks, client=context.client, name="fit_cell", advance=context.progress("train", len(tasks))
    )
    advance = context.progress("evaluate", len(tasks))
    for (key, cell), outcome in zip(todo.items(), fitted, strict=True):
        result = (
            {"refused": outcome, "rankings": {}}
            if isinstance(outcome, str)
            else _count(corpus, split, cell, outcome, models, context)
        )
        objects.put(f"cells/{key}.json", seal({**cell.to_json(), **result}))
        advance(1)


def _count(
    corpus: Corpus, split: PreparedSplit, cell: Cell, fitted: Fitted, models: str, context: Context
) -> dict[str, Any]:
    model = load_model(open_objects(models), fitted.address)
    codes = model.hasher.encode_block(split.vectors("queries"))
    spherical = cell.method == "sph"
    tasks = [
        CountCell(corpus.ref, start, stop, models, fitted.address, spherical) for start, stop in corpus.partitions()
    ]
    counts = reduce_tasks(
        count_cell,
        tasks,
        merge_counts,
        client=context.client,
        name=f"count_{cell.method}",
        shared=CellQueries(codes, split),
    )
    rankings = dict(zip(("hamming", "spherical"), counts.histograms, strict=False))
    balance = bit_balance(counts.ones, counts.rows)
    return {
        "model": fitted.address,
        "statistics_cpu_seconds": fitted.statistics_seconds,
        "solve_cpu_seconds": fitted.solve_seconds,
        "bit_balance": [float(balance.min()), float(np.median(balance)), float(balance.max())],
        "bit_correlation": fitted.correlation,
        "bit_entropy": float(bit_entropy(counts.ones, counts.rows).mean()),
        "rankings": {name: evaluate_histograms(n, g) for name, (n, g) in rankings.items()},
        "notes": model.provenance.get("training", {}).get("notes", []),
    }
