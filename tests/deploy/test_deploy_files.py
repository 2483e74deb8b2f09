"""Scripts, units, Prometheus and Grafana files, and the README of cluster/, each read by the tool that will read it."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.board import DASK_SERIES, DOCKER, OCH_SERIES, board, expressions
from tests.support.deploy_help import CLUSTER, TOP, documents, parse, run, scripts, tool

SCRIPTS = [pytest.param(path, language, id=str(path.relative_to(CLUSTER))) for path, language in scripts()]

# Every file of cluster/, by the test that reads or runs it.
COVERED = {
    "README.md": "test_deploy_files",
    "tls/make-certs": "cluster/test_tls",
    "hosts/common.sh": "cluster/test_hosts",
    "hosts/start-scheduler": "cluster/test_hosts",
    "hosts/start-worker": "cluster/test_hosts",
    "hosts/ssh-cluster": "cluster/test_hosts",
    "hosts/cluster.env": "test_deploy_files",
    "hosts/och-scheduler.service": "test_deploy_files",
    "hosts/och-worker.service": "test_deploy_files",
    "slurm/och.sbatch": "cluster/test_slurm",
    "slurm/och-runner": "cluster/test_slurm",
    "slurm/elastic": "cluster/test_slurm",
    "slurm/jobqueue.yaml": "cluster/test_slurm",
    "kubernetes/base.yaml": "test_kubernetes",
    "kubernetes/cronjob.yaml": "test_kubernetes",
    "kubernetes/daskcluster.yaml": "test_kubernetes",
    "kubernetes/daskjob.yaml": "test_kubernetes",
    "kubernetes/kustomization.yaml": "test_kubernetes",
    "kubernetes/s3.yaml": "test_kubernetes",
    "kubernetes/servicemonitor.yaml": "test_kubernetes",
    "docker/Dockerfile": "test_compose",
    "docker/Dockerfile.dockerignore": "test_compose",
    "docker/compose.yaml": "test_compose",
    "docker/prometheus/prometheus.yml": "cluster/test_hosts",
    "docker/prometheus/rules.yml": "test_deploy_files",
    "docker/prometheus/targets/scheduler.yml": "test_deploy_files",
    "docker/prometheus/targets/workers.yml": "test_deploy_files",
    "docker/grafana/dashboards/och.json": "test_deploy_files",
    "docker/grafana/provisioning/dashboards/och.yml": "test_deploy_files",
    "docker/grafana/provisioning/datasources/prometheus.yml": "test_deploy_files",
}


def test_every_file_of_a_deployment_has_its_test() -> None:
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "cluster", cwd=TOP).splitlines()
    assert {name.removeprefix("cluster/") for name in tracked if (TOP / name).exists()} == set(COVERED)
    for name in set(COVERED.values()):
        folder = TOP / "tests" if "/" in name else TOP / "tests" / "deploy"
        assert (folder / f"{name}.py").exists(), name


# Scripts and units


@pytest.mark.parametrize(("path", "language"), SCRIPTS)
def test_scripts_are_clean(path: Path, language: str) -> None:
    if language == "python":
        run(sys.executable, "-m", "ruff", "check", "--no-cache", path, cwd=TOP)
        run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", path, cwd=TOP)
    else:
        run(language, "-n", path)
        run(tool("shellcheck"), "--external-sources", "--source-path=SCRIPTDIR", path)
    if path.suffix != ".sh" and path.suffix != ".sbatch":
        assert path.stat().st_mode & 0o111 == 0o111, "cannot be executed"


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_units_are_valid(role: str, tmp_path: Path) -> None:
    text = (CLUSTER / "hosts" / f"och-{role}.service").read_text()
    start = f"/opt/och/cluster/hosts/start-{role}"
    assert f"\nExecStart={start}\n" in text
    assert (CLUSTER / "hosts" / f"start-{role}").exists()
    here = text.replace("/opt/och/cluster", str(CLUSTER)).replace("User=och", "User=root")
    unit = tmp_path / f"och-{role}.service"
    unit.write_text(here)
    analyze = tool("systemd-analyze")
    assert run(analyze, "verify", "--man=no", unit).strip() == ""
    unit.write_text(here.replace("RestartSec=5", "RestartSecs=5"))
    assert "Unknown key" in run(analyze, "verify", "--man=no", unit)


def test_the_environment_of_the_units_is_known_to_the_scripts() -> None:
    lines = (CLUSTER / "hosts" / "cluster.env").read_text().splitlines()
    names = {line.partition("=")[0] for line in lines if line and not line.startswith("#")}
    known = "".join((CLUSTER / "hosts" / f"start-{role}").read_text() for role in ("scheduler", "worker"))
    assert names <= set(re.findall(r"^#   (OCH_\w+) ", known, re.M))


# Prometheus and Grafana


def test_prometheus_reads_its_files() -> None:
    promtool = tool("promtool")
    told = run(promtool, "check", "config", DOCKER / "prometheus" / "prometheus.yml")
    assert "rules found" in told
    (config,) = documents(DOCKER / "prometheus" / "prometheus.yml")
    files = {name for job in config["scrape_configs"] for one in job["file_sd_configs"] for name in one["files"]}
    assert {
        str(path.relative_to(DOCKER / "prometheus")) for path in (DOCKER / "prometheus" / "targets").iterdir()
    } == files
    (compose,) = documents(DOCKER / "compose.yaml")
    assert documents(DOCKER / "prometheus" / "targets" / "scheduler.yml") == [[{"targets": ["scheduler:8787"]}]]
    (dns,) = config["scrape_configs"][1]["dns_sd_configs"]
    assert set(dns["names"]) <= set(compose["services"])
    assert f"--dashboard-address=:{dns['port']}" in compose["services"]["worker"]["command"]


def alert(name: str, at: str, labels: dict[str, str], **annotations: str) -> dict[str, Any]:
    return {"eval_time": at, "alertname": name, "exp_alerts": [{"exp_labels": labels, "exp_annotations": annotations}]}


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    (rules,) = documents(DOCKER / "prometheus" / "rules.yml")
    texts = {rule["alert"]: rule["annotations"] for rule in rules["groups"][0]["rules"] if "alert" in rule}
    one = {"instance": "s:8787"}

    def fires(name: str, at: str, severity: str, summary: str, **labels: str) -> dict[str, Any]:
        return alert(
            name, at, {"severity": severity, **labels}, summary=summary, description=texts[name]["description"]
        )

    series = {
        'up{job="och-scheduler",instance="s:8787"}': "1 1 1 0 0 0 0 0 0 0 0",
        'dask_scheduler_workers{instance="s:8787",state="idle"}': "2 2 0x8",
        'dask_scheduler_workers{instance="s:8787",state="paused"}': "0x10",
        'dask_scheduler_clients{instance="s:8787"}': "1x10",
        'dask_och_failures_total{instance="s:8787"}': "0 0 0 0 0 0 3 3 3 3 3",
        'dask_och_rows_total{instance="s:8787",task="encode"}': "0+60x10",
    }
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": "2m", "alertname": "OchSchedulerDown", "exp_alerts": []},
            fires("OchSchedulerDown", "5m", "page", "The scheduler s:8787 does not answer", **one, job="och-scheduler"),
            {"eval_time": "1m", "alertname": "OchNoWorkers", "exp_alerts": []},
            fires("OchNoWorkers", "4m", "page", "A job waits, and s:8787 has no worker", **one),
            {"eval_time": "5m", "alertname": "OchFailures", "exp_alerts": []},
        ],
        "promql_expr_test": [
            {
                "expr": "och:rows:rate1m",
                "eval_time": "5m",
                "exp_samples": [{"labels": 'och:rows:rate1m{task="encode"}', "value": 1}],
            }
        ],
    }
    checks = tmp_path / "checks.yml"
    checks.write_text(
        yaml.safe_dump(
            {
                "rule_files": [str(DOCKER / "prometheus" / "rules.yml")],
                "evaluation_interval": "1m",
                "tests": [case],
            }
        )
    )
    run(tool("promtool"), "test", "rules", checks)


def test_every_query_of_the_board_is_promql(tmp_path: Path) -> None:
    promtool = tool("promtool")
    file = tmp_path / "board.yml"

    def rules(queries: list[str]) -> str:
        listed = [{"record": f"board:q{number}", "expr": expr} for number, expr in enumerate(queries)]
        return yaml.safe_dump({"groups": [{"name": "board", "rules": listed}]})

    file.write_text(rules(expressions()))
    assert f"{len(expressions())} rules found" in run(promtool, "check", "rules", file)
    file.write_text(rules(["sum by (task (rate(x[1m]))"]))
    with pytest.raises(AssertionError, match="parse error"):
        run(promtool, "check", "rules", file)


def test_rules_and_board_use_series_that_exist() -> None:
    text = "\n".join([*expressions(), (DOCKER / "prometheus" / "rules.yml").read_text()])
    assert set(re.findall(r"\bdask_\w+", text)) == DASK_SERIES | OCH_SERIES


def test_the_board_is_provisioned() -> None:
    (source,) = documents(DOCKER / "grafana" / "provisioning" / "datasources" / "prometheus.yml")
    (provider,) = documents(DOCKER / "grafana" / "provisioning" / "dashboards" / "och.yml")
    (compose,) = documents(DOCKER / "compose.yaml")
    uid = source["datasources"][0]["uid"]
    uses = [item["datasource"]["uid"] for panel in board()["panels"] for item in [panel, *panel["targets"]]]
    assert set(uses) == {uid}
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    mounts = {volume.split(":")[1]: volume.split(":")[0] for volume in compose["services"]["grafana"]["volumes"]}
    folder = provider["providers"][0]["options"]["path"]
    assert (DOCKER / mounts[folder] / "och.json").exists()
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/och.json"
    panels = board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    cells = [(p["x"] + x, p["y"] + y) for p in places for x in range(p["w"]) for y in range(p["h"])]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24


# The README


def test_the_readme_names_what_is_there(certs: Path) -> None:
    text = (CLUSTER / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (CLUSTER / target).exists(), target
    for anchor in re.findall(r"\]\(#(\w+)\)", text):
        assert f"\n## {anchor}\n" in text, anchor
    for name in re.findall(r"\bcluster/[\w./-]*\w", text):
        assert (TOP / name).exists() or name.endswith("/certs"), name
    known = {"och", "sbatch", "kubectl", "docker", "cd", "export", "cluster/"}
    for block in re.findall(r"```sh\n(.*?)```", text, re.S):
        for line in block.splitlines():
            words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
            assert any(words[0].startswith(name) for name in known), line
            if words[0] == "och":
                parse(words, {})
            if "och.sbatch" in line or "elastic" in line or "runner" in line:
                parse(["och", *words[words.index("encode") :]], {})
            if "ssh-cluster" in line:
                options = run(sys.executable, TOP / words[0], "--help")
                assert all(word in options for word in words if word.startswith("--"))
