"""Methods against each other under the paper's protocol: same splits, same truth, one result per cell, resumable.

A *split* is a random cut of a corpus into queries, database and training rows. A *cell* is one method with one code
length on one split. Its result is a sealed JSON file of its own, so that a killed comparison repeats no finished cell.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache, partial, reduce
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from och_dist import store
from och_dist.cluster import map_tasks, reduce_tasks
from och_dist.errors import BadInputError, NonFiniteError, OchError, UsageError
from och_dist.evaluate.exact import remaining_rows, write_neighbors
from och_dist.evaluate.stage import Histograms, true_rows
from och_dist.kernels.hamming import count_rows, hamming_histogram, lay_out
from och_dist.kernels.moments import nonfinite_rows
from och_dist.kernels.packing import code_words, count_ones, unpack_bits
from och_dist.kernels.ranking import bit_balance, bit_entropy, evaluate_histograms
from och_dist.kernels.spheres import spherical_histogram, spherical_levels, spherical_pairs
from och_dist.methods import METHODS, get_method
from och_dist.methods.base import Hasher, one_thread
from och_dist.options import Option, Seed, checked
from och_dist.report import Results, headline, write_reports
from och_dist.sources import open_queries
from och_dist.stage import Context, Report, Stopwatch, logger
from och_dist.store import Corpus, CorpusRef, LocalObjects, StoredNeighbors
from och_dist.train import ArrayRows, make_hasher, training_data

WARM_ROWS = 600
CENTRES = (100, 200, 300, 400, 600, 800)
ANCHORS = (10, 20, 40, 80, 160)
SWEEP_BITS = 64
SPHERICAL_QUERIES = 500
TRAINING = 2
"""Goes up when a change of training makes cells that were computed before no longer comparable."""


@dataclass(frozen=True)
class Split:
    """Rows of one repeat: ascending global numbers of queries and of training rows; the database is all but queries."""

    queries: np.ndarray
    training: np.ndarray

    @classmethod
    def draw(cls, rows: int, *, queries: int, train_rows: int, seed: int, repeat: int) -> Split:
        """A function of these numbers alone, the same for every method."""
        if queries < 1 or train_rows < 1 or queries + train_rows > rows:
            raise BadInputError(
                f"{queries} queries and {train_rows} training rows need {queries + train_rows} rows, the corpus has "
                f"{rows}; lower --queries or --train-rows"
            )
        drawn = np.random.default_rng([seed, repeat]).permutation(rows)[: queries + train_rows]
        return cls(np.sort(drawn[:queries]), np.sort(drawn[queries:]))


def gather_rows(corpus: CorpusRef, rows: np.ndarray) -> np.ndarray:
    """The vectors (m, dim) of some rows."""
    return corpus.open().read_at(rows)


def read_some(corpus: Corpus, rows: np.ndarray, context: Context) -> np.ndarray:
    """The vectors (m, dim) of ascending global ``rows``, fetched by the cluster."""
    parts = np.split(rows, np.searchsorted(rows, [start for start, _ in corpus.partitions()]))
    tasks = [part for part in parts if len(part)]
    vectors = np.concatenate(
        map_tasks(partial(gather_rows, corpus.ref), tasks, client=context.client, name="gather_rows")
    )
    bad = nonfinite_rows(vectors)
    if len(bad):
        raise NonFiniteError.of(f"rows of {corpus.url}", rows[bad], len(bad), "ingest with --nonfinite=drop")
    return vectors


@dataclass(frozen=True)
class PreparedSplit:
    """A split on disk: query and training vectors, and the truth over the database."""

    folder: str
    query_rows: np.ndarray

    def vectors(self, name: str) -> np.ndarray:
        """'queries' (q, dim) or 'training' (t, dim)."""
        return np.load(f"{self.folder}/{name}.npy", allow_pickle=False)

    @cached_property
    def truth(self) -> StoredNeighbors:
        return store.open_neighbors(f"{self.folder}/truth.zarr")


def prepare_split(corpus: Corpus, split: Split, folder: Path, *, k: int, context: Context) -> PreparedSplit:
    """Fetch the rows of a split and compute its truth, once; a second call finds both."""
    objects, prepared = LocalObjects(folder), PreparedSplit(str(folder), split.queries)
    for name, rows in (("queries", split.queries), ("training", split.training)):
        if objects.size(f"{name}.npy") is None:
            buffer = io.BytesIO()
            np.save(buffer, read_some(corpus, rows, context), allow_pickle=False)
            objects.put(f"{name}.npy", buffer.getvalue())
    path = str(folder / "truth.zarr")
    key = store.sha256(store.canonical([corpus.fingerprint, split.queries.tolist(), k]))
    if (store.read_about(path) or {}).get("key") != key:
        width, about = min(k, corpus.rows - len(split.queries)), {"kind": "euclidean", "key": key}
        queries = open_queries(prepared.vectors("queries"))
        write_neighbors(path, corpus, queries, width, about, context, without=split.queries)
    return prepared


@dataclass(frozen=True)
class Cell:
    """One method, one code length, one split. ``variant`` says which table or figure it belongs to."""

    method: str
    bits: int
    repeat: int
    variant: str = "main"
    params: Mapping[str, Any] = field(default_factory=dict)


@lru_cache(maxsize=64)
def _warm(method: str, bits: int, folder: str) -> None:
    """Compile what a method needs before its training is timed."""
    rows = PreparedSplit(folder, np.empty(0, np.int64)).vectors("training")[:WARM_ROWS]
    try:
        hasher = make_hasher(method, bits, 0, {})
        hasher.fit_training(training_data(ArrayRows(rows), centres=min(50, hasher.centres_wanted()), seed=0))
        hasher.encode_block(rows)
    except OchError:
        logger.debug("no warm-up for %s at %d bits", method, bits)


def fit_cell(split: PreparedSplit, models: str, first_seed: int, cell: Cell) -> dict[str, Any]:
    """Train one cell on the training rows of its split: its model, and the CPU seconds of statistics and solver. A
    setting the method refuses comes back as its sentence."""
    _warm(cell.method, cell.bits, split.folder)
    rows, seed = split.vectors("training"), first_seed + cell.repeat
    try:
        hasher = make_hasher(cell.method, cell.bits, seed, cell.params)
        with one_thread():  # one thread's CPU time is then all of it, and k-means does not depend on their number
            start = time.thread_time()
            data = training_data(ArrayRows(rows), centres=hasher.centres_wanted(), seed=seed, train_rows=len(rows))
            between = time.thread_time()
            hasher.fit_training(data)
            end = time.thread_time()
    except OchError as error:
        return {"refused": str(error), "rankings": {}}
    return {
        "model": store.save_model(store.open_objects(models), hasher, {"cell": asdict(cell)}),
        "statistics_cpu_seconds": between - start,
        "solve_cpu_seconds": end - between,
        "bit_correlation": _correlation(hasher.encode_block(rows), cell.bits),
    }


def _correlation(codes: np.ndarray, bits: int) -> float:
    """Mean absolute correlation of two different bits; constant bits count as uncorrelated."""
    values = unpack_bits(codes, bits).astype(np.float32)
    values -= values.mean(axis=0)
    scale = np.sqrt((values**2).sum(axis=0))
    values /= np.where(scale > 0, scale, 1)
    between = np.abs(values.T @ values)
    return float((between.sum() - np.trace(between)) / max(1, bits * (bits - 1)))


@dataclass(frozen=True)
class CellQueries:
    """What all tasks of a cell share: its model, and the packed codes (q, bytes) of the queries of its split."""

    models: str
    address: str
    split: PreparedSplit
    codes: np.ndarray
    spherical: bool


@dataclass(frozen=True)
class Counts:
    """Histograms per ranking; set bits per bit; rows seen."""

    histograms: tuple[Histograms, ...]
    ones: np.ndarray
    rows: int

    def merge(self, other: Counts) -> Counts:
        both = zip(self.histograms, other.histograms, strict=True)
        return Counts(tuple(a.merge(b) for a, b in both), self.ones + other.ones, self.rows + other.rows)


def count_cell(corpus: CorpusRef, rows: tuple[int, int], queries: CellQueries) -> Counts:
    """Counts over those of the rows [start, stop) that are in the database."""
    hasher = store.model_on_worker(queries.models, queries.address)
    blocks = corpus.open().blocks(*rows)
    return reduce(Counts.merge, (_count_block(hasher, first, block, queries) for first, block in blocks))


def _count_block(hasher: Hasher, first: int, block: np.ndarray, queries: CellQueries) -> Counts:
    bits, truth = int(hasher.n_bits), queries.split.truth
    packed = hasher.encode_block(block, first_row=first)
    words, codes = code_words(queries.codes), code_words(packed)
    database = remaining_rows(first, len(block), queries.split.query_rows) - first
    kept = packed[database]
    by_distance = hamming_histogram(queries.codes, lay_out(kept, bits))
    hamming = Histograms(by_distance, np.empty_like(by_distance))
    for part, rows in true_rows(truth, 0, len(words)):  # no query is among them: they are counted in all codes
        hamming.true[part] = count_rows(words[part], codes, rows, first, bits)
    if not queries.spherical:
        return Counts((hamming,), count_ones(kept, bits), len(kept))
    # Thousands of levels: a part of the queries keeps the histograms small.
    levels, words = spherical_levels(bits), words[:SPHERICAL_QUERIES]
    by_level = spherical_histogram(words, codes[database], bits, levels)
    spherical = Histograms(by_level, np.zeros_like(by_level))
    for part, rows in true_rows(truth, 0, len(words)):
        query, place = np.nonzero((rows >= first) & (rows < first + len(codes)))
        level = spherical_pairs(words[part], codes, query, rows[query, place] - first, bits, levels)
        np.add.at(spherical.true[part], (query, level), 1)
    return Counts((hamming, spherical), count_ones(kept, bits), len(kept))


@checked
def compare(
    corpus: str,
    output: Annotated[str, Option("Where results, tables and report.html go.", flags="-o --output", metavar="DIR")],
    *,
    methods: Annotated[Sequence[str] | str, Option("Methods, such as och,itq,sph.", commas=True)] = "all",
    bits: Annotated[Sequence[int], Option("Code lengths.", at_least=1, commas=True)] = (32, 64, 128),
    repeats: Annotated[int, Option("Random splits.", at_least=1)] = 10,
    queries: Annotated[int, Option("Query rows of a split.")] = 2000,
    train_rows: Annotated[int, Option("Training rows of a split.")] = 10_000,
    truth_fraction: Annotated[float, Option("Share of rows that is relevant.", above=0, at_most=1)] = 0.02,
    truth_k: Annotated[int | None, Option("Relevant rows of a query, instead of a share.", at_least=1)] = None,
    sweeps: Annotated[bool, Option("Also vary OCH's centres and relations.")] = True,
    seed: Seed = 0,
    context: Context | None = None,
) -> Report:
    """Compare methods on random splits of ``corpus``; results.json, results.csv, tables.md and report.html go to the
    folder ``output``."""
    watch, context = Stopwatch("compare"), context or Context()
    opened, folder = store.open_corpus(corpus), Path(output).absolute()
    names = [methods] if isinstance(methods, str) else list(methods)
    if names == ["all"]:
        names = list(METHODS)
    if not bits:
        raise UsageError("bits=[]; name at least one code length")
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
            place = folder / "splits" / store.sha256(store.canonical([protocol, repeat]))[:16]
            split = prepare_split(opened, drawn, place, k=k, context=context)
            _run_cells(opened, split, todo, objects, seed, context)
            computed += len(todo)
        results += [store.unseal(objects.get(f"cells/{key}.json"), key) for key in keys]
    results = sorted(results, key=lambda cell: (cell["variant"], cell["method"], cell["bits"], cell["repeat"]))
    path = folder / "results.json"
    machine = {"processor": _processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    store.write_text(path, json.dumps({"protocol": protocol, "machine": machine, "cells": results}, indent=1))
    found = Results.load(path)
    written, changed = write_reports(found, folder)
    facts = {"result": headline(found), "results": str(path), "cells": len(results), "computed": computed, **written}
    return watch.report("done" if computed or changed else "nothing to do", **facts)


def _processor() -> str:
    """The name that the system gives its processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


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
    return store.sha256(store.canonical([TRAINING, dict(protocol), asdict(cell), repr(sorted(settings.items()))]))[:24]


def _run_cells(
    corpus: Corpus,
    split: PreparedSplit,
    todo: Mapping[str, Cell],
    objects: LocalObjects,
    seed: int,
    context: Context,
) -> None:
    """Train all cells of a split in parallel, then count them one after the other, each on the whole cluster."""
    models = f"{objects.url}/models"
    cells = list(todo.values())
    fitted = map_tasks(
        partial(fit_cell, split, models, seed),
        cells,
        client=context.client,
        name="fit_cell",
        advance=context.progress("train", len(cells)),
    )
    advance = context.progress("evaluate", len(cells))
    for (key, cell), result in zip(todo.items(), fitted, strict=True):
        if "model" in result:
            result |= _count(corpus, split, cell, models, result["model"], context)
        objects.put(f"cells/{key}.json", store.seal({**asdict(cell), **result}))
        advance(1)


def _count(
    corpus: Corpus, split: PreparedSplit, cell: Cell, models: str, address: str, context: Context
) -> dict[str, Any]:
    """What the codes of the database tell of a model."""
    model = store.load_model(store.open_objects(models), address)
    codes = model.hasher.encode_block(split.vectors("queries"))
    counts = reduce_tasks(
        partial(count_cell, corpus.ref),
        corpus.partitions(),
        partial(reduce, Counts.merge),
        client=context.client,
        name=f"count_{cell.method}",
        shared=CellQueries(models, address, split, codes, cell.method == "sph"),
    )
    rankings = dict(zip(("hamming", "spherical"), counts.histograms, strict=False))
    balance = bit_balance(counts.ones, counts.rows)
    return {
        "bit_balance": [float(balance.min()), float(np.median(balance)), float(balance.max())],
        "bit_entropy": float(bit_entropy(counts.ones, counts.rows).mean()),
        "rankings": {name: evaluate_histograms(found.rows, found.true) for name, found in rankings.items()},
        "notes": model.provenance.get("training", {}).get("notes", []),
    }
