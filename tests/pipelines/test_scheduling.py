"""The ready files for schedulers: each is read as its scheduler reads it, and the command in it by our own parser."""

from __future__ import annotations

import ast
import configparser
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from och_dist.cli import cli
from och_dist.errors import IncompleteError
from och_dist.jobs.pipeline import load_pipeline

PIPELINES = Path(__file__).resolve().parents[2] / "pipelines"
FOLDER = PIPELINES / "scheduling"
PROGRAM = "/opt/och/bin/och"
RETRIED = {5, 7}
SYSTEMD = shutil.which("systemd-analyze")


def parsed(words: list[str]) -> dict[str, Any]:
    """The parameters of 'och run WORDS' as click understands them; the settings must fit nightly.toml."""
    assert words[0] == "run"
    assert words[1].endswith("/nightly.toml")
    command = cli.get_command(click.Context(cli), "run")
    assert command is not None
    context = command.make_context("run", words[1:])
    load_pipeline(PIPELINES / "nightly.toml", context.params["settings"])
    names = {setting.partition("=")[0] for setting in context.params["settings"]}
    assert names == {"inbox", "dir"}
    return context.params


def cron_fields(text: str) -> None:
    """Five fields, each a star, a number, a list or a range in its limits, with or without a step."""
    fields = text.split()
    assert len(fields) == 5, text
    for field, (low, high) in zip(fields, [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)], strict=True):
        for part in field.split(","):
            found = re.fullmatch(r"(?:\*|(\d+)(?:-(\d+))?)(?:/([1-9]\d*))?", part)
            assert found, f"{part!r} in {text!r}"
            assert all(low <= int(number) <= high for number in found.groups()[:2] if number), text


def test_a_typo_would_be_found() -> None:
    with pytest.raises(click.UsageError, match="No such option"):
        parsed(["run", "/etc/och/nightly.toml", "--quite"])
    with pytest.raises(click.UsageError):
        parsed(["run", "/etc/och/nightly.toml", "--log-format", "jsno"])
    with pytest.raises(Exception, match="there is no such variable"):
        parsed(["run", "/etc/och/nightly.toml", "--set", "inbxo=x"])
    for text in ("15 2 * *", "61 2 * * *", "15 2 * * * *", "15 2 * JAN *", "*/0 2 * * *"):
        with pytest.raises(AssertionError):
            cron_fields(text)


def test_crontab() -> None:
    lines = [line for line in (FOLDER / "crontab").read_text().splitlines() if line and not line.startswith("#")]
    settings = [line for line in lines if re.fullmatch(r"[A-Z]+=\S+", line)]
    assert settings == ["MAILTO=ops@example.org"]
    (line,) = [line for line in lines if line not in settings]
    *fields, command = line.split(maxsplit=5)
    cron_fields(" ".join(fields))
    assert "%" not in command, "cron takes it for the end of the line"
    words, _, target = command.partition(" >> ")
    program, *words = shlex.split(words)
    assert program == PROGRAM
    assert target == "/srv/och/nightly.jsonl"
    assert parsed(words)["quiet"]


def unit(name: str) -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=True)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(FOLDER / name)
    return found


def test_systemd_units() -> None:
    service, timer = unit("och-nightly.service"), unit("och-nightly.timer")
    program, *words = shlex.split(service["Service"]["ExecStart"])
    assert program == PROGRAM
    assert parsed(words)["log_format"] == "json"
    assert service["Service"]["KillMode"] == "mixed"
    assert {int(code) for code in service["Service"]["RestartForceExitStatus"].split()} == RETRIED
    assert int(service["Service"]["SuccessExitStatus"]) == IncompleteError.exit_code
    assert timer["Install"]["WantedBy"] == "timers.target"


@pytest.mark.skipif(SYSTEMD is None, reason="systemd-analyze is not installed (Debian package systemd)")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """Unknown keys and values are warnings to systemd, so nothing may be said at all."""

    def verify(folder: Path) -> subprocess.CompletedProcess[str]:
        units = [folder / "och-nightly.timer", folder / "och-nightly.service"]
        command = [SYSTEMD, "verify", "--man=no", *units]
        return subprocess.run(map(str, command), capture_output=True, text=True, timeout=60)

    for name in ("och-nightly.service", "och-nightly.timer"):
        text = (FOLDER / name).read_text().replace(PROGRAM, str(Path(sys.executable).with_name("och")))
        (tmp_path / name).write_text(text)
    ended = verify(tmp_path)
    assert (ended.returncode, "och-nightly" in ended.stderr) == (0, False), ended.stderr
    service = tmp_path / "och-nightly.service"
    service.write_text(service.read_text().replace("KillMode=", "KilMode="))
    assert "och-nightly.service" in verify(tmp_path).stderr, "a typo is not found"
    calendar = unit("och-nightly.timer")["Timer"]["OnCalendar"]
    assert subprocess.run([str(SYSTEMD), "calendar", calendar], capture_output=True, timeout=60).returncode == 0


def table(required: str = "", **fields: Any) -> dict[str, Any]:
    """A schema of an object that has these fields and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": fields,
        "required": required.split(),
    }


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": schema}


TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
SIZES = table("cpu memory", cpu=TEXT, memory={"type": "string", "pattern": r"^\d+(Ki|Mi|Gi)$"})
CONTAINER = table(
    "name image args",
    name=TEXT,
    image=TEXT,
    command=items(TEXT),
    args=items(TEXT),
    env=items(table("name value", name=TEXT, value=TEXT)),
    resources=table("requests limits", requests=SIZES, limits=SIZES),
    volumeMounts=items(table("name mountPath", name=TEXT, mountPath=TEXT, readOnly=FLAG)),
)
POD = table(
    "restartPolicy containers",
    restartPolicy={"enum": ["Never"]},  # a pod failure policy allows no other
    terminationGracePeriodSeconds=COUNT,
    securityContext=table(runAsNonRoot=FLAG, runAsUser=COUNT, fsGroup=COUNT),
    containers=items(CONTAINER),
    volumes=items(
        table(
            "name",
            name=TEXT,
            persistentVolumeClaim=table("claimName", claimName=TEXT),
            configMap=table("name", name=TEXT),
            emptyDir=table(),
        )
    ),
)
RULE = table(
    "action",
    action={"enum": ["FailJob", "Ignore", "Count"]},
    onExitCodes=table(
        "operator values", containerName=TEXT, operator={"enum": ["In", "NotIn"]}, values=items({"type": "integer"})
    ),
    onPodConditions=items(table("type", type=TEXT, status={"enum": ["True", "False", "Unknown"]})),
)
JOB = table(
    "template",
    backoffLimit=COUNT,
    podFailurePolicy=table("rules", rules=items(RULE)),
    template=table("spec", spec=POD),
)
CRONJOB = table(
    "apiVersion kind metadata spec",
    apiVersion={"const": "batch/v1"},
    kind={"const": "CronJob"},
    metadata=table("name", name=TEXT),
    spec=table(
        "schedule jobTemplate",
        schedule=TEXT,
        timeZone=TEXT,
        concurrencyPolicy={"enum": ["Allow", "Forbid", "Replace"]},
        startingDeadlineSeconds=COUNT,
        successfulJobsHistoryLimit=COUNT,
        failedJobsHistoryLimit=COUNT,
        jobTemplate=table("spec", spec=JOB),
    ),
)


def test_cronjob() -> None:
    """Against the part of the Kubernetes API that it uses, field by field."""
    body = yaml.safe_load((FOLDER / "cronjob.yaml").read_text())
    jsonschema.validate(body, CRONJOB)
    cron_fields(body["spec"]["schedule"])
    assert body["spec"]["concurrencyPolicy"] == "Forbid"
    job = body["spec"]["jobTemplate"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["och"]
    assert parsed(container["args"])["workers"] == 4
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    places = [word.partition("=")[2] for word in container["args"] if "=" in word] + [container["args"][1]]
    assert all(any(place.startswith(f"{mount}/") for mount in mounts) for place in places)
    codes = job["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert codes["containerName"] == container["name"]
    assert not RETRIED & set(codes["values"])


@pytest.mark.parametrize("name", ["airflow_dag.py", "prefect_flow.py"])
def test_python_files(name: str) -> None:
    """They compile, use no name that they do not define, and call a command that we understand."""
    source = (FOLDER / name).read_text()
    tree = ast.parse(source)
    compile(tree, name, "exec")
    (command,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "OCH"
    ]
    program, *words = shlex.split(command)
    assert program == PROGRAM
    assert command.split() == [program, *words], "it is split at blanks"
    assert parsed(words)["as_json"]
    assert "OCH.split()" in source
    schedules = [
        node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg in ("schedule", "cron")
    ]
    assert len(schedules) == 1
    cron_fields(ast.literal_eval(schedules[0]))
    retried = [
        set(ast.literal_eval(node.comparators[0]))
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In)
    ]
    assert retried == [RETRIED]
    assert len(source.splitlines()) < 30
    ruff = Path(sys.executable).with_name("ruff")
    ended = subprocess.run(
        [ruff, "check", "--isolated", "--select", "F,E9", FOLDER / name], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stdout
