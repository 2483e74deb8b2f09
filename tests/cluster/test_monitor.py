"""Monitoring on schedulers of every kind: our own, preloaded, with a prefix, and one that cannot have it."""

from __future__ import annotations

import json
import logging
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist import events
from och_dist.cluster.connection import ClusterOptions, connect, dashboard_link
from och_dist.cluster.tasks import map_tasks, reduce_tasks
from och_dist.errors import BadInputError
from och_dist.monitor.forward import log_progress, monitored, reported
from och_dist.search.searcher import open_index
from och_dist.stage import Context
from och_dist.train.stage import train
from tests.support import cluster_tasks as work
from tests.support.cluster_help import PARAMS, ROUNDS, ROWS, Processes, Reference, start_separate, wait_until


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def home(client: Any) -> str:
    link = dashboard_link(client)
    assert link is not None
    return link.removesuffix("status")


def status(client: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(f"{home(client)}och/status.json"))
    return found


def ended(client: Any, name: str, failures: int = 0, **chunks: int) -> dict[str, Any]:
    """The status once that job is over, with so many failures and chunks: the last events may come after its end."""

    def over() -> dict[str, Any] | None:
        found = status(client)
        if found["job"]["name"] != name or found["job"]["status"] == "running":
            return None
        counted = {task: totals["chunks"] for task, totals in found["totals"].items()}
        heard = all(counted.get(task) == count for task, count in chunks.items())
        return found if heard and found["failures"]["count"] == failures else None

    return wait_until(over, step=0.1)


def test_a_local_cluster(client: Any) -> None:
    with monitored(client, "a map and a reduction") as shown:
        assert shown
        assert events.heard()
        advance = reported(log_progress)("mapping", 30)
        assert map_tasks(work.same, range(30), client=client, name="same", advance=advance, inherited={0, 5}) == [
            *range(30)
        ]
        reduce_tasks(work.describe, range(9), work.bracket, client=client, name="describe",
                     advance=reported(log_progress)("reducing", 9))  # fmt: skip
    assert not events.heard()
    found = ended(client, "a map and a reduction", same=30, describe=9)
    assert found["job"]["status"] == "done"
    assert found["chunks"]["counts"]["done"] == 9
    assert found["step"] == {"name": "reducing", "done": 9, "total": 9, "progress": 1.0, "eta_seconds": 0.0}
    assert get(f"{home(client)}status").count('<a href="och">') == 1


def test_failures_are_shown_and_raised(client: Any, tmp_path: Path) -> None:
    tasks = [work.Attempt(str(tmp_path), n, BadInputError("row 7 is odd") if n == 1 else None) for n in range(3)]
    with pytest.raises(BadInputError, match="row 7"), monitored(client, "bad"):
        map_tasks(work.attempt, tasks, client=client, name="attempt", advance=lambda count: None)
    found = ended(client, "bad", failures=2, attempt=2)
    assert found["job"]["status"] == "failed"
    assert found["job"]["error"] == "row 7 is odd"
    assert found["chunks"]["counts"] == {"waiting": 0, "running": 0, "done": 2, "inherited": 0, "failed": 1}
    assert {entry["where"] for entry in found["failures"]["recent"]} == {"attempt 1", "job"}


def test_a_task_that_is_tried_again_counts_as_a_failure_and_is_done(client: Any, tmp_path: Path) -> None:
    tasks = [work.Attempt(str(tmp_path), number) for number in range(2)]
    with monitored(client, "again"):
        map_tasks(work.attempt_twice, tasks, client=client, name="attempt_twice", advance=lambda count: None)
    found = ended(client, "again", failures=2, attempt_twice=2)
    assert found["chunks"]["counts"]["done"] == 2


def test_nothing_is_told_without_a_listener(client: Any) -> None:
    with monitored(client, "before"):
        pass
    before = ended(client, "before")["events"]
    map_tasks(work.same, range(5), client=client, name="same", advance=lambda count: None)
    with monitored(None, "nothing") as shown:
        assert not shown
        assert not events.heard()
        assert map_tasks(work.same, range(5), client=None, name="same", advance=lambda count: None) == [*range(5)]
    assert status(client)["events"] == before


def test_a_training_and_a_search(client: Any, reference: Reference, tmp_path: Path) -> None:
    queries = np.load(reference.vectors)[:40]
    context = Context(client=client, progress=reported(log_progress))
    with monitored(client, "train and search"):
        made = train(str(reference.corpus), str(tmp_path), bits=16, params={**PARAMS, "orthogonal": True},
                     kmeans_rounds=ROUNDS, context=context)  # fmt: skip
        with open_index(str(reference.index), threads=1) as searcher:  # what is said counts, wherever it is done
            for _ in range(2):
                searcher.search(queries, k=3)
    found = ended(client, "train and search", take_rows=20)
    trained, searched = found["train"], found["search"]
    assert [step for step, _ in trained["loss"]] == [*range(PARAMS["max_iter"])]
    assert trained["loss"][-1][1] == made.facts["last_loss"]
    assert trained["residual"] == made.facts["manifold_residual"] < 1e-6
    assert [number for number, _ in trained["inertia"]][:ROUNDS] == [*range(ROUNDS)]
    values = [value for _, value in trained["inertia"]]
    assert values == sorted(values, reverse=True)
    assert trained["exact_inertia"] == pytest.approx(values[-1], rel=0.2)
    assert found["stage"]["finished"][0]["stage"] == "train"
    assert found["totals"]["take_rows"]["rows"] == ROWS
    assert (searched["queries"], searched["batches"]) == (80, 2)
    assert 0 < searched["p50_seconds"] <= searched["p95_seconds"]


@pytest.mark.parametrize("prefix", ["", "dask"])
def test_a_preloaded_scheduler_has_the_page_before_any_job(processes: Processes, tmp_path: Path, prefix: str) -> None:
    file = tmp_path / "scheduler.json"
    more = ("--dashboard-prefix", prefix) if prefix else ()
    processes.dask("scheduler", "--port", "0", "--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0",
                   "--scheduler-file", file, "--preload", "och_dist.monitor.dashboard", *more)  # fmt: skip
    wait_until(lambda: file.exists() and file.read_text().endswith("}"))
    port = json.loads(file.read_text())["services"]["dashboard"]
    top = f"http://127.0.0.1:{port}/{prefix + '/' if prefix else ''}"
    wait_until(lambda: "och" in get(f"{top}status"))
    assert 'id="rows-rate"' in get(f"{top}och")
    assert json.loads(get(f"{top}och/status.json"))["job"] is None
    assert get(f"{top}status").count('<a href="och">') == 1
    assert "dask_och_chunks" in get(f"{top}metrics")


def test_a_scheduler_that_cannot_have_it_costs_one_warning(
    processes: Processes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its och_dist has no monitor, as one of an older version."""
    blocked = tmp_path / "site"
    blocked.mkdir()
    (blocked / "sitecustomize.py").write_text("import sys\nsys.modules['och_dist.monitor'] = None\n")
    started = start_separate(processes, tmp_path, workers=1, nanny=False, env={"PYTHONPATH": str(blocked)},
                             scheduler_env={"PYTHONPATH": str(blocked)})  # fmt: skip
    with (
        connect(ClusterOptions(scheduler=started.address)) as client,
        caplog.at_level(logging.WARNING, "och_dist"),
        monitored(client, "on it goes") as shown,
    ):
        assert not shown
        assert not events.heard()
        found = map_tasks(abs, [-1, 2], client=client, name="abs", advance=lambda count: None)
    assert found == [1, 2]
    (record,) = caplog.records
    assert "the page /och cannot be shown by tcp://127.0.0.1" in record.getMessage()
    assert "the job goes on without" in record.getMessage()
