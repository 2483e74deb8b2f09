"""The scripts of cluster/hosts, run for real: a cluster with TLS, in two network namespaces where that is allowed.

The same cluster is watched by Prometheus in test_prometheus.py.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_help import CODE_CHUNK, ROWS, Processes, Reference, family, tree, wait_until
from deployed import HOSTS, Deployed, client_tls

pytest.importorskip("cryptography")


def test_a_cluster_of_scripts(hosts: Deployed, processes: Processes, reference: Reference, tmp_path: Path) -> None:
    """Scheduler and workers on different machines as far as the network can tell; nothing else listens beyond them."""
    index, tls = tmp_path / "index", client_tls(hosts.certs)
    words = (reference.corpus, index, "--model", reference.model, "--chunk-rows", CODE_CHUNK)
    report = processes.report("encode", *words, "--scheduler", hosts.file, env=tls)
    assert (report["new_rows"], report["version"]) == (ROWS, 1)
    assert tree(index / "segments") == tree(reference.index / "segments")
    verified = processes.report("verify", index, "--scheduler", hosts.address, env=tls)
    assert verified["damaged"] == 0
    for started in hosts.workers:
        for process in family(started.pid):
            if any("spawn_main" in word for word in process.cmdline()):
                environ = process.environ()
                assert {environ[name] for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")} == {"1"}
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
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = int(taken.getsockname()[1])
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
