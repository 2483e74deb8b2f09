"""The scripts of cluster/hosts, run for real: a cluster with TLS, in two network namespaces where that is allowed.

A real Prometheus with the committed configuration watches it; only the targets are those of the test.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.board import DASK_SERIES, DOCKER, OCH_SERIES, expressions
from tests.support.cluster_help import CODE_CHUNK, ROWS, Processes, Reference, tree, wait_until, workers_of
from tests.support.deployed import (
    HOSTS,
    THREAD_LIMITS,
    Deployed,
    client_tls,
    free_port,
    make_certs,
    start_scripts,
    two_machines,
)

pytest.importorskip("cryptography")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    """A cluster with TLS as the scripts of cluster/hosts make it; leave it alive."""
    folder = tmp_path_factory.mktemp("hosts")
    running = Processes(folder)
    with two_machines() as network:
        try:
            yield start_scripts(running, folder, make_certs(folder / "certs"), network)
        finally:
            running.stop()


def test_a_cluster_of_scripts(hosts: Deployed, processes: Processes, reference: Reference, tmp_path: Path) -> None:
    """Scheduler and workers on different machines as far as the network can tell; nothing else listens beyond them."""
    index, tls = tmp_path / "index", client_tls(hosts.certs)
    words = (reference.corpus, index, "--model", reference.model, "--chunk-rows", CODE_CHUNK)
    report = processes.report("encode", *words, "--scheduler", hosts.file, env=tls)
    assert (report["new_rows"], report["version"]) == (ROWS, 1)
    assert tree(index / "segments") == tree(reference.index / "segments")
    verified = processes.report("verify", index, "--scheduler", hosts.address, env=tls)
    assert verified["damaged"] == 0
    spawned = [process for started in hosts.workers for process in workers_of(started.pid)]
    assert len(spawned) == 2
    for environ in (process.environ() for process in spawned):
        assert [environ[name] for name in THREAD_LIMITS] == ["1"] * len(THREAD_LIMITS)
    listening = [entry for entry in psutil.Process(hosts.scheduler.pid).net_connections() if entry.status == "LISTEN"]
    assert {entry.laddr.ip for entry in listening if entry.laddr.port != hosts.port} == {"127.0.0.1"}
    assert hosts.port in {entry.laddr.port for entry in listening}


def refusal(script: str, **variables: str) -> str:
    """stderr of a script that refuses to start."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OCH_")}
    programs = {"OCH_BIN": str(Path(sys.executable).parent)}
    ended = subprocess.run(
        [HOSTS / script],
        env={**kept, **programs, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_scripts_refuse(tmp_path: Path) -> None:
    for script in ("start-scheduler", "start-worker"):
        assert "0.0.0.0 can be reached from elsewhere" in refusal(script, OCH_HOST="0.0.0.0")
        assert "ca.pem cannot be read; make the certificates" in refusal(script, OCH_TLS_DIR=str(tmp_path))
        path = f"{tmp_path}:/usr/bin:/bin"
        assert "och and dask are not on the PATH; name the folder" in refusal(script, OCH_BIN="", PATH=path)
    assert "no scheduler; name its address" in refusal("start-worker")


# Prometheus


@pytest.fixture
def prometheus(hosts: Deployed, processes: Processes, tmp_path: Path) -> str:
    """Address of a Prometheus that scrapes the cluster of the scripts."""
    program = shutil.which("prometheus", path="/usr/bin:/usr/local/bin:/usr/sbin")
    if program is None:
        pytest.skip("prometheus is not installed (see .ci/run)")
    folder = tmp_path / "prometheus"
    shutil.copytree(DOCKER / "prometheus", folder)
    for name, address in zip(("scheduler", "workers"), hosts.metrics, strict=True):
        (folder / "targets" / f"{name}.yml").write_text(json.dumps([{"targets": [address]}]))
    address = f"127.0.0.1:{free_port()}"
    started = processes.start(
        program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address={address}",
    )  # fmt: skip
    wait_until(lambda: "ready to receive web requests" in processes.log(started) or started.poll() is not None)
    assert started.poll() is None, processes.log(started)
    return f"http://{address}"


def ask(prometheus: str, route: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{prometheus}/api/v1/{route}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
        found = json.load(answer)
    assert found["status"] == "success"
    return found["data"]


def test_prometheus_scrapes_a_run(prometheus: str, hosts: Deployed, processes: Processes, reference: Reference) -> None:
    processes.report("verify", reference.index, "--scheduler", hosts.file, env=client_tls(hosts.certs))

    def value(query: str) -> str | None:
        samples = ask(prometheus, "query", query=query)["result"]
        return samples[0]["value"][1] if samples else None

    wait_until(lambda: value('sum(up{job="och-scheduler"})') == value('sum(up{job="och-worker"})') == "1", step=0.5)
    wait_until(lambda: value("sum(dask_scheduler_workers)") == "2", 120, step=0.5)
    wait_until(lambda: value("dask_scheduler_client_connections_removed_total >= 1"), step=0.5)
    scraped = set(ask(prometheus, "label/__name__/values"))
    assert scraped >= DASK_SERIES | OCH_SERIES
    for expression in expressions():  # the board's own queries, parsed and run by the real thing
        ask(prometheus, "query", query=expression)
    rules = ask(prometheus, "rules")["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    assert "OchNoWorkers" in {rule["name"] for rule in rules}


# SSH


@pytest.fixture
def ssh(tmp_path: Path, processes: Processes) -> dict[str, Path | int]:
    """An SSH server on loopback, with keys of its own."""
    sshd = shutil.which("sshd", path="/usr/sbin:/sbin:/usr/bin")
    if sshd is None or shutil.which("ssh-keygen") is None:
        pytest.skip("sshd is not installed (see .ci/run)")
    pytest.importorskip("asyncssh")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True, timeout=30)
    port = free_port()
    kind, key = (tmp_path / "host.pub").read_text().split()[:2]
    (tmp_path / "known").write_text(f"[127.0.0.1]:{port} {kind} {key}\n")
    (tmp_path / "user.pub").rename(tmp_path / "authorized")
    settings = {"HostKey": tmp_path / "host", "AuthorizedKeysFile": tmp_path / "authorized", "StrictModes": "no",
                "UsePAM": "no", "PidFile": "none", "ListenAddress": "127.0.0.1", "Port": port}  # fmt: skip
    (tmp_path / "sshd.conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd locks itself in
    server = processes.start(sshd, "-D", "-e", "-f", tmp_path / "sshd.conf")
    wait_until(lambda: "Server listening" in processes.log(server) or server.poll() is not None)
    assert server.poll() is None, processes.log(server)
    return {"port": port, "key": tmp_path / "user", "known": tmp_path / "known"}


def test_a_cluster_over_ssh(
    ssh: dict[str, Any], hosts: Deployed, processes: Processes, reference: Reference, tmp_path: Path
) -> None:
    file = tmp_path / "scheduler.json"
    started = processes.start(
        sys.executable, HOSTS / "ssh-cluster", "127.0.0.1", "127.0.0.1", "--tls", hosts.certs, "--scheduler-file", file,
        "--port", "0", "--dashboard", "127.0.0.1:0", "--workers", "1", "--scratch", tmp_path, "--ssh-port", ssh["port"],
        "--ssh-key", ssh["key"], "--known-hosts", ssh["known"],
        env={"DASK_OCH__WARM_UP": "false", "USER": getpass.getuser()},
    )  # fmt: skip
    wait_until(lambda: file.exists() or started.poll() is not None)
    assert started.poll() is None, processes.log(started)
    verified = processes.report("verify", reference.index, "--scheduler", file, env=client_tls(hosts.certs))
    assert verified["damaged"] == 0
    started.send_signal(signal.SIGTERM)
    assert processes.finish(started, seconds=30).startswith("tls://127.0.0.1:")
    assert not file.exists()


def test_ssh_to_other_machines_wants_certificates() -> None:
    words = ["192.0.2.1", "--scheduler-file", "s.json"]
    ended = subprocess.run(
        [sys.executable, HOSTS / "ssh-cluster", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "make certificates and give --tls DIR" in ended.stderr
