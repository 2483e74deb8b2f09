"""Real processes for the tests of this folder: schedulers and workers, the command line, and how to end them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.support.crashes import tree as tree

TOP = Path(__file__).parents[2]
ROWS, DIM, CODE_CHUNK = 20_000, 16, 64
PARAMS = {"n_centres": 20, "max_iter": 40}
ROUNDS = 3


def wait_until(condition: Callable[[], Any], seconds: float = 60, *, step: float = 0.005) -> Any:
    """The first true value of ``condition()``; fails when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"nothing happened within {seconds} s")
        time.sleep(step)
    return value


def family(pid: int) -> list[psutil.Process]:
    """A process and all its descendants that are alive."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def workers_of(pid: int) -> list[psutil.Process]:
    """The worker processes of a local cluster whose driver is ``pid``."""
    found = []
    for process in family(pid)[1:]:
        with contextlib.suppress(psutil.Error):
            if "spawn_main" in " ".join(process.cmdline()):
                found.append(process)
    return found


LOOPBACK = ("127.0.0.1", "::1")


def listening(pid: int) -> list[tuple[int, str]]:
    """(process, address) of every socket on which a process and its descendants listen, as the kernel lists them."""
    opened = {}
    for name, kind in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[place] for place in (1, 3, 9))
            if state == "0A":
                raw = bytes.fromhex(local.partition(":")[0])
                words = [raw[place : place + 4][::-1] for place in range(0, len(raw), 4)]  # each in host order
                opened[f"socket:[{inode}]"] = socket.inet_ntop(kind, b"".join(words))
    found = []
    for process in family(pid):
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if (name := os.readlink(link)) in opened:
                    found.append((process.pid, opened[name]))
    return sorted(found)


class Processes:
    """Starts subprocesses, each in a session of its own, and ends them with all their descendants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        self.seen: dict[int, psutil.Process] = {}

    def start(self, *command: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        log = self.folder / f"{len(self.started)}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(TOP), **(env or {})},
            )
        self.started.append(process)
        return process

    def och(self, *arguments: str | Path | int, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        return self.start(sys.executable, "-m", "och_dist.cli", *map(str, arguments), env=env)

    def log(self, process: subprocess.Popen[str]) -> str:
        return (self.folder / f"{self.started.index(process)}.log").read_text()

    def finish(self, process: subprocess.Popen[str], code: int = 0, seconds: float = 90) -> str:
        """stdout of a process that must end with ``code`` in time."""
        out, _ = process.communicate(timeout=seconds)
        assert process.returncode == code, f"{process.args}: {process.returncode}\n{self.log(process)}\n{out}"
        return out

    def report(self, *arguments: str | Path | int, env: dict[str, str] | None = None) -> dict[str, Any]:
        """The report of a command that must succeed."""
        found: dict[str, Any] = json.loads(self.finish(self.och(*arguments, "--json", env=env)))
        return found

    def dask(self, *arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        return self.start(Path(sys.executable).with_name("dask"), *arguments, env=env)

    def remember(self, process: psutil.Process) -> None:
        """Also end this one, which may outlive its parent."""
        self.seen[process.pid] = process

    def stop(self) -> None:
        """End all that is left; again is fine."""
        doomed = list(self.seen.values())
        for process in self.started:
            doomed += family(process.pid)
        for one in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        for process in self.started:
            if process.stdout is None or not process.stdout.closed:
                process.communicate()
            process.wait()
        psutil.wait_procs(doomed, timeout=10)


@dataclass(frozen=True)
class Separate:
    """A scheduler and workers that somebody else started."""

    file: Path
    scheduler: subprocess.Popen[str]
    workers: list[subprocess.Popen[str]]

    @property
    def address(self) -> str:
        return str(json.loads(self.file.read_text())["address"])


def start_separate(
    running: Processes,
    folder: Path,
    *,
    workers: int,
    nanny: bool,
    env: dict[str, str] | None = None,
    scheduler_env: dict[str, str] | None = None,
) -> Separate:
    file = folder / "scheduler.json"
    local = ("--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0", "--scheduler-file", file)
    scheduler = running.dask("scheduler", "--port", "0", *local, env=scheduler_env)
    wait_until(lambda: file.exists() and file.read_text().endswith("}"))
    kind = "--nanny" if nanny else "--no-nanny"
    started = [
        running.dask("worker", "--nthreads", "1", kind, "--local-directory", folder / str(number), *local, env=env)
        for number in range(workers)
    ]
    return Separate(file, scheduler, started)


@dataclass(frozen=True)
class Reference:
    """What an undisturbed run in one process makes of the same vectors."""

    vectors: Path
    more: Path
    corpus: Path
    model: str
    index: Path


def clustered_rows(rows: int, dim: int, seed: int) -> np.ndarray:
    """(rows, dim) float32 around 40 centres, with some exact duplicates."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(7).normal(size=(40, dim)) * 3
    found = (centres[random.integers(40, size=rows)] + random.normal(size=(rows, dim))).astype(np.float32)
    found[rows // 2 : rows // 2 + 50] = found[:50]
    return found
