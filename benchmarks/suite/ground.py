"""What the benchmarks stand on: sizes, data made once per run, two workers, two bare processes."""

from __future__ import annotations

import shutil
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.suite import bare
from och_dist.cluster.connection import ClusterOptions, connect
from och_dist.ingest.stage import default_chunk_rows, generate
from och_dist.kernels.gistlike import gist_rows
from och_dist.methods.base import TrainingData
from och_dist.stage import Context
from och_dist.store.corpus import Corpus, open_corpus
from och_dist.train.data import moments_of, training_data
from och_dist.train.rows import CorpusRows
from och_dist.train.stage import train

SEED = 0
QUERY_ROW = 1 << 40
"""Queries are rows of the same world from here on, so none is in a corpus."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything; see :data:`SUITES`."""

    dim: int
    bits: int
    centres: int
    rounds: int
    ingest_rows: int
    moment_rows: int
    kmeans_rows: int
    solve_rows: int
    encode_rows: int
    truth_rows: int
    truth_queries: int
    truth_k: int
    evaluate_rows: int
    evaluate_queries: int
    job_rows: int
    partitions: int
    scheduler_tasks: int
    growth: tuple[int, ...]
    chunk_rows: int | None
    code_chunk_rows: int
    repeats: int
    judged: bool
    """Whether goals mean anything at this size; then kernels are compiled before anything is measured."""


SUITES = {
    "short": Sizes(
        dim=96,
        bits=64,
        centres=30,
        rounds=5,
        ingest_rows=8_000,
        moment_rows=16_000,
        kmeans_rows=8_000,
        solve_rows=2_000,
        encode_rows=16_000,
        truth_rows=8_000,
        truth_queries=50,
        truth_k=20,
        evaluate_rows=16_000,
        evaluate_queries=50,
        job_rows=8_000,
        partitions=200,
        scheduler_tasks=500,
        growth=(8_000, 16_000),
        chunk_rows=1024,
        code_chunk_rows=4096,
        repeats=1,
        judged=False,
    ),
    "full": Sizes(
        dim=960,
        bits=64,
        centres=300,
        rounds=10,
        ingest_rows=500_000,
        moment_rows=1_000_000,
        kmeans_rows=200_000,
        solve_rows=10_000,
        encode_rows=1_000_000,
        truth_rows=1_000_000,
        truth_queries=1_000,
        truth_k=100,
        evaluate_rows=1_000_000,
        evaluate_queries=2_000,
        job_rows=1_000_000,
        partitions=10_000,
        scheduler_tasks=100_000,
        growth=(125_000, 250_000, 500_000, 1_000_000, 2_000_000),
        chunk_rows=None,
        code_chunk_rows=65_536,
        repeats=3,
        judged=True,
    ),
}


class Ground:
    """Shared by all benchmarks of a run; everything is made when it is first asked for."""

    def __init__(self, sizes: Sizes, folder: Path) -> None:
        self.sizes, self.folder = sizes, folder
        self.stack = ExitStack()
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Ground:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stack.close()

    @cached_property
    def client(self) -> Any:
        """A client of two workers with one thread each."""
        client = self.stack.enter_context(connect(ClusterOptions(workers=2, dashboard=False)))
        if self.sizes.judged:
            client.run(bare.warm)
        return client

    @cached_property
    def pool(self) -> ProcessPoolExecutor:
        """Two plain processes, without Dask, warmed up like the workers."""
        pool = ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=bare.one_blas_thread)
        self.stack.enter_context(pool)
        if self.sizes.judged:
            list(pool.map(bare.warm_slowly, range(2)))
        return pool

    @property
    def context(self) -> Context:
        return Context(self.client)

    @property
    def chunk_rows(self) -> int:
        return self.sizes.chunk_rows or default_chunk_rows(self.sizes.dim, "<f4")

    def corpus(self, rows: int) -> Corpus:
        """A generated corpus, kept for all benchmarks that ask for the same number of rows."""
        url = str(self.folder / f"corpus-{rows}-{self.sizes.dim}")
        generate(url, rows=rows, dim=self.sizes.dim, seed=SEED, chunk_rows=self.chunk_rows, context=self.context)
        return open_corpus(url)

    def fvecs(self, rows: int) -> Path:
        """The same rows as a file of records."""
        path = self.folder / f"base-{rows}-{self.sizes.dim}.fvecs"
        if not path.exists():
            partial = path.with_suffix(".part")
            with partial.open("wb") as file:
                for start in range(0, rows, 8192):
                    block = gist_rows(start, min(8192, rows - start), dim=self.sizes.dim, seed=SEED)
                    heads = np.full((len(block), 1), self.sizes.dim, "<i4").view("<f4")
                    file.write(np.hstack([heads, block]).tobytes())
            partial.rename(path)
        return path

    def queries(self, count: int) -> np.ndarray:
        """(count, dim) rows of the same world that no corpus holds."""
        return gist_rows(QUERY_ROW, count, dim=self.sizes.dim, seed=SEED)

    def model(self, rows: int) -> str:
        """Path of an OCH model learned from the corpus of so many rows."""
        corpus = self.corpus(rows)
        params = {"n_centres": self.sizes.centres} if self.sizes.dim < 960 else {}
        report = train(
            corpus.url,
            str(self.folder / "models"),
            bits=self.sizes.bits,
            train_rows=self.sizes.solve_rows,
            params=params,
            context=self.context,
        )
        return str(report.facts["model"])

    def training(self, rows: int) -> TrainingData:
        """Moments, centres and pool of a corpus: what a solver is given."""
        source = CorpusRows(self.corpus(rows), self.context)
        return training_data(source, centres=self.sizes.centres, seed=SEED, train_rows=self.sizes.solve_rows)

    def scratch(self, name: str) -> Path:
        """An empty place for output, removed first if an earlier repeat filled it."""
        path = self.folder / "scratch" / name
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def sum_moments(corpus: Corpus, context: Context) -> None:
    """One pass over all rows for their moments, as ``kmeans_rows=0`` has it."""
    source = CorpusRows(corpus, context)
    with source.dask():
        moments_of(source.stored(), corpus.read(0, 1024).mean(axis=0, dtype=np.float64))
