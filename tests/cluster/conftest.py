"""Clusters for the tests of this folder. Whatever is started here is stopped here, also when a test fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist.cluster.connection import ClusterOptions, connect
from och_dist.encode import stage as encode
from och_dist.ingest import stage as ingest
from och_dist.train import stage as train
from tests.support.cluster_help import (
    CODE_CHUNK,
    DIM,
    PARAMS,
    ROUNDS,
    ROWS,
    Processes,
    Reference,
    Separate,
    clustered_rows,
    start_separate,
)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    running = Processes(tmp_path)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Separate]:
    """A scheduler and two workers for the whole session; leave them alive."""
    folder = tmp_path_factory.mktemp("separate")
    running = Processes(folder)
    try:
        yield start_separate(running, folder, workers=2, nanny=True)
    finally:
        running.stop()


@pytest.fixture
def fragile(processes: Processes, tmp_path: Path) -> Separate:
    """A scheduler and one worker without a nanny, to be killed."""
    return start_separate(processes, tmp_path, workers=1, nanny=False)


@pytest.fixture(scope="session")
def client() -> Iterator[Any]:
    """A local cluster of two workers for the whole session; a worker that is killed comes back."""
    with connect(ClusterOptions(workers=2)) as connected:
        yield connected


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    vectors, more, corpus, index = (folder / name for name in ("vectors.npy", "more.npy", "corpus", "index"))
    np.save(vectors, clustered_rows(ROWS, DIM, 0))
    np.save(more, clustered_rows(ROWS, DIM, 1))
    ingest.ingest([str(vectors)], str(corpus), chunk_rows=1000)
    model = train.train(str(corpus), str(folder / "models"), bits=32, params=PARAMS, kmeans_rounds=ROUNDS).facts[
        "model"
    ]
    encode.encode(str(corpus), str(index), model=model, chunk_rows=CODE_CHUNK)
    return Reference(vectors, more, corpus, model, index)
