"""All benchmarks by name, in the order in which they run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.suite import scale_rows, stage_rows
from benchmarks.suite.ground import Ground
from benchmarks.suite.measure import Figure, Outcome

BENCHMARKS: dict[str, Callable[[Ground], Outcome]] = {
    "ingest": stage_rows.ingest_row,
    "moments": stage_rows.moments_row,
    "kmeans": stage_rows.kmeans_row,
    "solve": stage_rows.solve_row,
    "encode": stage_rows.encode_row,
    "truth": stage_rows.truth_row,
    "evaluate": stage_rows.evaluate_row,
    "network": stage_rows.network_row,
    "job": scale_rows.job_row,
    "overhead": scale_rows.overhead_row,
    "growth": scale_rows.growth_row,
    "workers": scale_rows.workers_row,
    "scheduler": scale_rows.scheduler_row,
    "startup": scale_rows.startup_row,
}

SCRIPTS = {
    "search": ["benchmarks.search"],
    "load": ["benchmarks.load", "--seconds", "120"],
    "multi_index": ["benchmarks.multi_index"],
    "codecs": ["benchmarks.codecs"],
}
"""Benchmarks with tables of their own; they run only when they are named, in a process of their own."""


def run_script(name: str) -> Outcome:
    """Run a script and keep what it prints."""
    start = time.perf_counter()
    result = subprocess.run([sys.executable, "-m", *SCRIPTS[name]], capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{name} ended with {result.returncode}:\n{result.stderr}")
    outcome = Outcome(
        name, f"python -m {' '.join(SCRIPTS[name])}", {"all of it": Figure((time.perf_counter() - start,))}
    )
    outcome.facts["printed"] = result.stdout
    return outcome
