"""Memory is bounded by the chunk size, whatever the size of the corpus."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from och_dist.ingest import stage as ingest
from och_dist.store.arrays import ArraySpec, chunk_key, create_array
from och_dist.store.corpus import Corpus, Segment, open_corpus, vectors_prefix
from och_dist.store.index import open_version
from och_dist.store.manifest import commit_version
from och_dist.store.objects import open_objects
from och_dist.train import stage as train
from tests.support.cluster_help import Processes, workers_of

GIGABYTE = 1_000_000_000
DIM, CHUNK_ROWS, CHUNKS = 960, 8192, 128


def make_large_corpus(folder: Path) -> tuple[Path, Path]:
    """A corpus of 4 GB whose chunks are hard links to two stored ones, and the small corpus that they come from."""
    small, large = folder / "small", folder / "large"
    ingest.generate(str(small), rows=2 * CHUNK_ROWS, dim=DIM, chunk_rows=CHUNK_ROWS)
    source = open_corpus(str(small))
    (segment,) = source.segments
    prefix, objects = vectors_prefix("linked"), open_objects(str(large))
    create_array(objects, prefix, ArraySpec(CHUNKS * CHUNK_ROWS, DIM, source.dtype, CHUNK_ROWS))
    for chunk in range(CHUNKS):
        path = large / chunk_key(prefix, chunk)
        path.parent.mkdir(parents=True)
        os.link(small / chunk_key(segment.prefix, chunk % 2), path)
    linked = Segment(
        "linked", 0, CHUNKS * CHUNK_ROWS, CHUNK_ROWS, np.resize(segment.digests, CHUNKS), sources=segment.sources
    )
    assert commit_version(objects, Corpus(str(large), 1, DIM, source.dtype, (linked,)).to_json())
    return small, large


def own_memory(process: psutil.Process) -> int:
    """Bytes that only this process uses; 0 when it is gone."""
    with contextlib.suppress(psutil.Error):
        return int(process.memory_full_info().uss)
    return 0


def test_a_corpus_of_four_gigabytes(processes: Processes, tmp_path: Path) -> None:
    small, large = make_large_corpus(tmp_path)
    assert open_corpus(str(large)).nbytes > 4 * GIGABYTE
    params: dict[str, Any] = {"n_centres": 20, "max_iter": 5}
    model = train.train(str(small), str(tmp_path / "models"), bits=64, train_rows=2000, params=params, kmeans_rounds=1)
    index = tmp_path / "index"
    run = processes.och("encode", large, index, "--model", model.facts["model"], "--workers", 2, "--no-dashboard")
    driver, largest, largest_driver, samples = psutil.Process(run.pid), 0, 0, 0
    while run.poll() is None:
        for worker in workers_of(run.pid):
            largest = max(largest, own_memory(worker))
            samples += 1
        largest_driver = max(largest_driver, own_memory(driver))
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(timeout=0.05)
    processes.finish(run)
    codes = open_version(str(index))
    assert codes.rows == CHUNKS * CHUNK_ROWS
    block = np.concatenate([codes.read(chunk) for chunk in codes.chunks[:1]])
    period = 2 * CHUNK_ROWS
    assert block[:period].tobytes() == block[period : 2 * period].tobytes()
    assert samples > 20
    assert CHUNK_ROWS * DIM * 4 < largest < GIGABYTE
    assert 0 < largest_driver < 0.6 * GIGABYTE
