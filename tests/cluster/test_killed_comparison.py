"""kill -9 of a whole comparison: what is finished is kept to the byte, and only the rest is computed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np

from och_dist.evaluate.comparison import compare
from och_dist.ingest import stage as ingest
from tests.support.cluster_help import Processes, clustered_rows, wait_until, workers_of

METHODS, BITS, REPEATS, QUERIES, TRAIN_ROWS = ["lsh", "itq", "pca-frame"], [16, 32], 2, 200, 1500
CELLS = len(METHODS) * len(BITS) * REPEATS


def finished(output: Path) -> dict[str, tuple[int, bytes]]:
    """When each finished cell was written, and what it says."""
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in output.glob("cells/*.json")}


def compare_here(corpus: Path, output: Path) -> dict[str, object]:
    sizes = {"repeats": REPEATS, "queries": QUERIES, "train_rows": TRAIN_ROWS, "sweeps": False}
    return compare(str(corpus), str(output), methods=METHODS, bits=BITS, **sizes).to_json()


def test_a_killed_comparison_repeats_no_finished_cell(processes: Processes, tmp_path: Path) -> None:
    vectors, corpus, output = tmp_path / "vectors.npy", tmp_path / "corpus", tmp_path / "comparison"
    np.save(vectors, clustered_rows(6000, 32, 0))
    ingest.ingest([str(vectors)], str(corpus), chunk_rows=500)
    what = ("--methods", ",".join(METHODS), "--bits", ",".join(map(str, BITS)), "--repeats", REPEATS, "--no-sweeps")
    sizes = ("--queries", QUERIES, "--train-rows", TRAIN_ROWS)
    run = processes.och("compare", corpus, "-o", output, *what, *sizes, "--workers", 1, "--no-dashboard")
    wait_until(lambda: len(finished(output)) >= 2 or run.poll() is not None, 120)
    assert run.poll() is None, processes.log(run)
    for worker in workers_of(run.pid):
        processes.remember(worker)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    before = finished(output)
    assert 0 < len(before) < CELLS
    assert not (output / "results.json").exists(), "half a result must not be visible"

    report = compare_here(corpus, output)
    after = finished(output)
    assert len(after) == CELLS
    assert {name: after[name] for name in before} == before, "finished cells were computed again"
    assert (report["cells"], report["computed"]) == (CELLS, CELLS - len(before))
    cells = json.loads((output / "results.json").read_text())["cells"]
    found = {(cell["method"], cell["bits"], cell["repeat"]) for cell in cells}
    assert found == {(name, r, i) for name in METHODS for r in BITS for i in range(REPEATS)}

    again = compare_here(corpus, output)
    assert (again["status"], again["computed"]) == ("nothing to do", 0)
    assert finished(output) == after
