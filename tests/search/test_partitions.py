"""Partitions of many chunks: what a task holds depends on the size of a chunk, never on how many it goes through."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from och_dist.encode.stage import encode
from och_dist.errors import UsageError
from och_dist.evaluate.exact import NO_ROWS, LimitedQueries, nearest_rows, truth
from och_dist.stage import Context
from och_dist.store.corpus import Corpus, open_corpus
from och_dist.train import rows
from och_dist.train.stage import train
from tests.support.stage_data import clustered, corpus_of

WIDE, CHUNK, CHUNKS = 200, 40, 30


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """30 chunks of 32 kB."""
    values = clustered(CHUNK * CHUNKS, dim=WIDE)
    return open_corpus(corpus_of(tmp_path_factory.mktemp("wide"), values, chunk_rows=CHUNK))


def take(corpus: Corpus, stop: int) -> Any:
    return rows.take_partition(corpus.ref, (0, stop), np.arange(3))


def nearest(corpus: Corpus, stop: int) -> Any:
    queries = clustered(300, dim=WIDE, seed=2)
    return nearest_rows(corpus.ref, (0, stop), LimitedQueries(queries, np.full(300, np.inf), NO_ROWS), k=CHUNK)


def peak(action: Callable[[], Any]) -> int:
    """The least of three peaks: what other threads of the test process allocate meanwhile does not count."""
    return min(peak_of_one(action) for _ in range(3))


def peak_of_one(action: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("task", [take, nearest])
def test_memory_does_not_grow_with_the_chunks_of_a_partition(task: Callable[[Corpus, int], Any], wide: Corpus) -> None:
    task(wide, wide.rows)  # compiles the kernels
    few, many = (peak(lambda chunks=chunks: task(wide, chunks * CHUNK)) for chunks in (4, CHUNKS))
    assert many < 1.5 * few


def test_k_means_over_all_rows_reads_bounded_parts(wide: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more chunks than partitions, several make up a part, as long as it stays small."""
    monkeypatch.setattr(rows, "MAX_PARTITIONS", 3)
    monkeypatch.setattr(rows, "PART_BYTES", 2 * CHUNK * WIDE * 4)
    stored = rows.CorpusRows(wide, Context()).stored()
    assert stored.chunks[0] == (2 * CHUNK,) * (CHUNKS // 2)
    assert np.array_equal(stored.compute(scheduler="synchronous"), wide.read(0, wide.rows))


def test_whole_rows_keep_their_type(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.uint8).reshape(20, 3)
    stored = rows.CorpusRows(open_corpus(corpus_of(tmp_path, values, chunk_rows=8)), Context()).stored()
    found = stored.compute(scheduler="synchronous")
    assert stored.dtype == found.dtype == np.uint8
    assert np.array_equal(found, values)


def narrow_client(limit: int) -> Any:
    """A cluster whose only worker has ``limit`` bytes; it must not be asked to do anything."""
    worker = {"memory_limit": limit, "nthreads": 1}
    return SimpleNamespace(scheduler_info=lambda n_workers: {"workers": {"tcp://worker:1": worker}})


@pytest.mark.parametrize("stage", ["train", "encode", "truth"])
def test_chunks_that_no_worker_can_hold_are_refused_before_the_start(
    stage: str, corpus: str, model: str, vectors: np.ndarray, tmp_path: Path
) -> None:
    narrow = Context(client=narrow_client(80 << 20))
    actions = {
        "train": lambda: train(corpus, str(tmp_path / "models"), bits=8, context=narrow),
        "encode": lambda: encode(corpus, str(tmp_path / "index"), model=model, context=narrow),
        "truth": lambda: truth(corpus, vectors[:3], str(tmp_path / "truth.zarr"), k=5, context=narrow),
    }
    with pytest.raises(UsageError, match=r"needs about 67 MB per thread, but a worker has 84 MB"):
        actions[stage]()
    assert not (tmp_path / "truth.zarr").exists()
