"""SIGTERM and Ctrl-C: what is under way may finish, nothing else is begun, and a second signal ends at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster_help import Processes, wait_until
from tests.support.polite_driver import TASKS


def traces(folder: Path, kind: str) -> set[str]:
    return {path.name.partition("-")[2] for path in folder.glob(f"{kind}-*")}


def start(processes: Processes, folder: Path, workers: int, seconds: float, grace: float) -> subprocess.Popen[str]:
    """A driver whose first task is under way."""
    folder.mkdir()
    run = processes.start(
        sys.executable, "-m", "tests.support.polite_driver", folder, str(workers), str(seconds), str(grace)
    )
    wait_until(lambda: traces(folder, "begun") or run.poll() is not None, 120)
    assert run.poll() is None, processes.log(run)
    return run


@pytest.mark.parametrize(
    ("workers", "number", "name"),
    [(0, signal.SIGTERM, "Terminated"), (1, signal.SIGTERM, "Terminated"), (1, signal.SIGINT, "KeyboardInterrupt")],
)
def test_what_is_under_way_is_finished(
    processes: Processes, tmp_path: Path, workers: int, number: int, name: str
) -> None:
    folder = tmp_path / "traces"
    run = start(processes, folder, workers, 0.5, 90)
    (os.killpg if number == signal.SIGINT else os.kill)(run.pid, number)  # as a terminal does
    assert processes.finish(run, seconds=120).strip() == name
    assert 0 < len(traces(folder, "ended")) < TASKS
    assert traces(folder, "ended") == traces(folder, "begun")
    if workers:
        assert "tasks under way have 90 s to finish" in processes.log(run)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_time_of_grace_is_limited(processes: Processes, tmp_path: Path, workers: int) -> None:
    folder = tmp_path / "traces"
    run = start(processes, folder, workers, 600, 0.2)
    os.kill(run.pid, signal.SIGTERM)
    assert processes.finish(run, seconds=120).strip() == "Terminated not all tasks under way ended within 0.2 s"
    assert traces(folder, "ended") == set()


def test_the_second_signal_ends_at_once(processes: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    run = start(processes, folder, 1, 600, 600)
    os.killpg(run.pid, signal.SIGINT)
    wait_until(lambda: "Ctrl-C once more" in processes.log(run))
    os.killpg(run.pid, signal.SIGINT)
    assert processes.finish(run, seconds=120).strip() == "KeyboardInterrupt"
    assert traces(folder, "ended") == set()
