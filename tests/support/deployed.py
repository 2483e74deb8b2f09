"""A cluster made by the scripts of cluster/hosts, with TLS, in two network namespaces where that is allowed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster_help import Processes, wait_until

TOP = Path(__file__).parents[2]
HOSTS = TOP / "cluster" / "hosts"
THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def make_certs(folder: Path) -> Path:
    subprocess.run(
        [sys.executable, TOP / "cluster" / "tls" / "make-certs", folder], check=True, capture_output=True, timeout=60
    )
    return folder


def client_tls(certs: Path) -> dict[str, str]:
    """The variables by which a command shows its certificate."""
    names = {"CA": "ca.pem", "CERT": "client.pem", "KEY": "client.key"}
    return {f"OCH_TLS_{name}": str(certs / file) for name, file in names.items()}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@dataclass(frozen=True)
class Network:
    """Addresses of two machines, and the words that run a program on the second one."""

    first: str
    second: str
    there: tuple[str, ...]


@contextmanager
def two_machines() -> Iterator[Network]:
    """This network namespace and another one, joined by a cable; without the right to make one, loopback twice."""
    ip, name, tag = shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin:/bin"), f"och{os.getpid()}", os.getpid() % 250
    first, second = f"10.213.{tag}.1", f"10.213.{tag}.2"
    steps = [
        ["netns", "add", name],
        ["link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name],
        ["addr", "add", f"{first}/24", "dev", f"{name}a"],
        ["link", "set", f"{name}a", "up"],
        ["-n", name, "addr", "add", f"{second}/24", "dev", f"{name}b"],
        ["-n", name, "link", "set", f"{name}b", "up"],
        ["-n", name, "link", "set", "lo", "up"],
    ]
    made = ip is not None and all(
        subprocess.run([ip, *step], capture_output=True, timeout=30, check=False).returncode == 0 for step in steps
    )
    try:
        if made:
            yield Network(first, second, (str(ip), "netns", "exec", name))
        else:
            yield Network("127.0.0.1", "127.0.0.1", ())
    finally:
        if ip is not None:
            for step in (["link", "del", f"{name}a"], ["netns", "del", name]):
                subprocess.run([ip, *step], capture_output=True, timeout=30, check=False)


@dataclass(frozen=True)
class Deployed:
    """What the scripts started."""

    certs: Path
    file: Path
    port: int
    metrics: tuple[str, str]
    scheduler: subprocess.Popen[str]
    workers: tuple[subprocess.Popen[str], ...]

    @property
    def address(self) -> str:
        return str(json.loads(self.file.read_text())["address"])


def start_scripts(running: Processes, folder: Path, certs: Path, network: Network) -> Deployed:
    """A scheduler and a worker here, another worker there; the first worker's kernels are warm when it appears."""
    file, port, pages = folder / "shared.json", free_port(), (free_port(), free_port())
    common = {"OCH_BIN": str(Path(sys.executable).parent), "OCH_TLS_DIR": str(certs), "OCH_SCHEDULER_FILE": str(file),
              "OCH_WORKERS": "1", "OCH_MEMORY": "1GB", "OCH_SCRATCH": str(folder)}  # fmt: skip
    first = {**common, "OCH_HOST": network.first}
    scheduler = running.start(
        HOSTS / "start-scheduler", env={**first, "OCH_PORT": str(port), "OCH_DASHBOARD": f"127.0.0.1:{pages[0]}"}
    )
    wait_until(lambda: (file.exists() and file.read_text().endswith("}")) or scheduler.poll() is not None)
    assert scheduler.poll() is None, running.log(scheduler)
    unlimited = ("env", *(f"--unset={name}" for name in THREAD_LIMITS))  # the limits are those of dask.yaml
    workers = (
        running.start(*unlimited, HOSTS / "start-worker", env={**first, "OCH_DASHBOARD": f"127.0.0.1:{pages[1]}"}),
        running.start(
            *network.there,
            *unlimited,
            HOSTS / "start-worker",
            env={**common, "OCH_HOST": network.second, "DASK_OCH__WARM_UP": "false"},
        ),
    )
    return Deployed(certs, file, port, (f"127.0.0.1:{pages[0]}", f"127.0.0.1:{pages[1]}"), scheduler, workers)
