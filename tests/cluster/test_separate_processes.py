"""The command line against `dask scheduler` and `dask worker` processes that somebody else started."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from och_dist.search import stage as search
from och_dist.upkeep.verification import verify
from tests.support.cluster_help import (
    CODE_CHUNK,
    PARAMS,
    ROUNDS,
    ROWS,
    Processes,
    Reference,
    Separate,
    tree,
    wait_until,
)


def test_the_whole_job(separate: Separate, processes: Processes, reference: Reference, tmp_path: Path) -> None:
    address, file = ("--scheduler", separate.address), ("--scheduler", separate.file)
    corpus, index, found = (tmp_path / name for name in ("corpus", "index", "found.npz"))
    assert address[1].startswith("tcp://127.0.0.1:")

    report = processes.report("ingest", reference.vectors, corpus, "--chunk-rows", 1000, *address)
    assert (report["rows"], report["new_rows"]) == (ROWS, ROWS)
    assert tree(corpus / "segments") == tree(reference.corpus / "segments")

    params = [text for name, value in PARAMS.items() for text in ("--param", f"{name}={value}")]
    params += ["--bits", "32", "--kmeans-rounds", str(ROUNDS)]
    trained = processes.report("train", corpus, "--models", tmp_path / "models", *params, *file)
    assert Path(trained["model"]).name == Path(reference.model).name, "same seed, same partitions, another model"

    common = ("--model", trained["model"], "--chunk-rows", CODE_CHUNK)
    report = processes.report("encode", corpus, index, *common, *address)
    assert (report["new_rows"], report["version"]) == (ROWS, 1)
    assert tree(index / "segments") == tree(reference.index / "segments")

    queries = tmp_path / "queries.npy"
    np.save(queries, np.load(reference.more)[:300])
    processes.report("search", index, queries, "-k", 20, "-o", found, *file)
    search.search(str(reference.index), str(queries), k=20, output=str(tmp_path / "expected.npz"))
    with np.load(found) as got, np.load(tmp_path / "expected.npz") as expected:
        for name in ("distances", "rows"):
            assert got[name].shape == (300, 20)
            assert got[name].tobytes() == expected[name].tobytes()

    assert processes.report("verify", index, *address)["damaged"] == 0


@pytest.mark.parametrize("victim", ["scheduler", "worker"])
def test_a_cluster_that_dies_leaves_work_to_go_on_with(
    fragile: Separate, processes: Processes, reference: Reference, tmp_path: Path, victim: str
) -> None:
    index = tmp_path / "index"
    common = (reference.corpus, index, "--model", reference.model, "--chunk-rows", CODE_CHUNK)
    run = processes.och("encode", *common, "--scheduler", fragile.address)
    wait_until(lambda: next(index.glob("segments/*/done/*.json"), None))
    process = fragile.scheduler if victim == "scheduler" else fragile.workers[0]
    os.kill(process.pid, signal.SIGKILL)
    if victim == "worker":  # another one joins and takes over
        local = ("--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0", "--scheduler-file", fragile.file)
        processes.dask("worker", "--nthreads", "1", "--no-nanny", "--local-directory", tmp_path / "new", *local)
        processes.finish(run)
    else:
        processes.finish(run, code=7)
        assert "what is done is kept: run the command again" in processes.log(run)
        done = len(list(index.glob("segments/*/done/*.json")))
        assert done < -(-ROWS // CODE_CHUNK)
        report = processes.report("encode", *common, "--workers", 0)
        assert report["new_rows"] == ROWS - done * CODE_CHUNK
    assert tree(index) == tree(reference.index)
    assert verify(str(index)).facts["damaged"] == 0
