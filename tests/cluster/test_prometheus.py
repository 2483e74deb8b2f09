"""A real Prometheus with the committed configuration watches a real cluster; only the targets are those of the test."""

from __future__ import annotations

import json
import shutil
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from board import DASK_SERIES, DOCKER, NOT_YET, OCH_SERIES, expressions
from cluster_help import Processes, Reference, wait_until
from deployed import Deployed, client_tls, free_port


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
    wait_until(lambda: value("sum(dask_scheduler_workers)") == "2", step=0.5)
    wait_until(lambda: value("dask_scheduler_client_connections_removed_total >= 1"), step=0.5)
    scraped = set(ask(prometheus, "label/__name__/values"))
    assert scraped | NOT_YET >= DASK_SERIES | OCH_SERIES
    for expression in expressions():  # the board's own queries, parsed and run by the real thing
        ask(prometheus, "query", query=expression)
    rules = ask(prometheus, "rules")["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    assert "OchNoWorkers" in {rule["name"] for rule in rules}
