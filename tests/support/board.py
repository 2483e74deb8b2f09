"""The queries of the Grafana board, and the series that it and the rules of Prometheus use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCKER = Path(__file__).parents[2] / "cluster" / "docker"

# Series of Dask's own.
DASK_SERIES = {
    "dask_scheduler_workers",
    "dask_scheduler_clients",
    "dask_scheduler_tasks",
    "dask_scheduler_tasks_forgotten_total",
    "dask_scheduler_tick_duration_maximum_seconds",
    "dask_worker_memory_bytes",
}
# Series of och_dist.monitor.
OCH_SERIES = {
    "dask_och_rows_total",
    "dask_och_bytes_total",
    "dask_och_chunks",
    "dask_och_stage_seconds_total",
    "dask_och_failures_total",
    "dask_och_queries_total",
    "dask_och_jobs_running",
    "dask_och_progress_ratio",
}


def board() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCKER / "grafana" / "dashboards" / "och.json").read_text())
    return found


def expressions() -> list[str]:
    """Every query of the board as Prometheus gets it."""
    found = [target["expr"] for panel in board()["panels"] for target in panel["targets"]]
    assert len(found) >= len(board()["panels"])
    return [expr.replace("$__rate_interval", "1m").replace("$instance", ".*") for expr in found]
