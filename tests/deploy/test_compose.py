"""The image and compose.yaml: no container engine runs here, so every word is checked against what it refers to."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from dask.utils import parse_bytes

from tests.support.deploy_help import CLUSTER, TOP, documents, parse

DOCKER = CLUSTER / "docker"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    (found,) = documents(DOCKER / "compose.yaml")
    return found


def instructions() -> list[tuple[str, str]]:
    """(instruction, rest) of the Dockerfile, lines joined and comments left out."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in whole.splitlines() if line.strip()]


def copied() -> list[str]:
    """What the build takes from the repository."""
    rests = [shlex.split(rest) for name, rest in instructions() if name == "COPY"]
    return sorted({source for words in rests if not words[0].startswith("--from") for source in words[:-1]})


def test_the_dockerfile_refers_to_what_is_there() -> None:
    known = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "CMD"}
    found = instructions()
    assert {name for name, _ in found} <= known
    stages = [rest.split(" AS ")[1] for name, rest in found if name == "FROM" and " AS " in rest]
    for name, rest in found:
        words = shlex.split(rest)
        if name == "FROM":
            assert re.fullmatch(r"python:3\.\d+-slim-\w+", words[0])
        elif name == "COPY" and words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
        elif name == "RUN":
            subprocess.run(["sh", "-n", "-c", rest], check=True, timeout=10)
    assert all((TOP / source).exists() for source in copied())
    users = [number for number, (name, rest) in enumerate(found) if name == "USER" and rest == "10001:10001"]
    assert users
    assert [name for name, _ in found[users[0] :] if name == "USER"] == ["USER"]


def test_the_image_installs_what_the_project_names() -> None:
    (install,) = [rest for name, rest in instructions() if name == "RUN" and "pip install" in rest]
    words = shlex.split(install)
    pins = words[words.index("--constraint") + 1]
    assert (TOP / pins).exists()
    version = next(rest for name, rest in instructions() if name == "FROM").removeprefix("python:").split("-")[0]
    assert pins == f"constraints/py{version.replace('.', '')}.txt"
    extras = re.fullmatch(r"\.\[(.*)\]", words[-1])
    assert extras
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    (code,) = [shlex.split(rest)[-1] for name, rest in instructions() if rest.startswith("python -c")]
    (imported, call) = ast.parse(code).body
    assert isinstance(imported, ast.ImportFrom)
    module = __import__(str(imported.module), fromlist=["x"])
    assert callable(getattr(module, imported.names[0].name))
    assert ast.unparse(call) == f"{imported.names[0].name}()"


def test_only_what_is_copied_reaches_the_build() -> None:
    lines = [line for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] not in "#"]
    assert lines[0] == "*"
    assert sorted(line[1:] for line in lines if line.startswith("!")) == copied()
    assert any(fnmatch("och_dist/__pycache__", line.removeprefix("**/").join(("*/", ""))) for line in lines)


def test_the_copied_files_make_the_whole_package(tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in copied():
        if (TOP / name).is_dir():
            shutil.copytree(TOP / name, source / name, ignore=ignored)
        else:
            shutil.copy(TOP / name, source)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "out")],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=60,
    )
    (wheel,) = (tmp_path / "out").glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    ours = {str(path.relative_to(TOP)) for path in (TOP / "och_dist").rglob("*") if path.is_file()}
    assert {name for name in ours if "__pycache__" not in name} <= held
    assert "och_dist/dask.yaml" in held
    assert {f"och_dist/pipelines/{path.name}" for path in (TOP / "pipelines").glob("*.toml")} <= held


def test_compose_fits_its_schema(compose: dict[str, Any]) -> None:
    builtin = pytest.importorskip("check_jsonschema.builtin_schemas")
    schema = builtin.get_builtin_schema("vendor.compose-spec")
    jsonschema.validate(compose, schema)
    with pytest.raises(jsonschema.ValidationError):  # the schema sees a slip of the pen
        jsonschema.validate({**compose, "services": {"worker": {"imagee": "x"}}}, schema)


def test_commands_of_compose(compose: dict[str, Any], certs: Path) -> None:
    moved = {"/run/secrets": certs}
    services = compose["services"]
    scheduler = parse(services["scheduler"]["command"], moved)
    assert (scheduler["port"], scheduler["protocol"], scheduler["dashboard_address"]) == ("8786", "tls", ":8787")
    worker = parse(services["worker"]["command"], moved)
    assert worker["scheduler"] == "tls://scheduler:8786"
    assert (worker["nanny"], worker["dashboard_address"], worker["preload"]) == (
        True,
        ":8788",
        ("och_dist.worker",),
    )
    limit = services["worker"]["deploy"]["resources"]["limits"]["memory"]
    assert int(worker["n_workers"]) * parse_bytes(worker["memory_limit"]) < parse_bytes(f"{limit}ib")
    runner = services["runner"]
    parse([*runner["entrypoint"], *runner["command"]], moved)
    parse(shlex.split("och encode /data/corpus /data/index --model /data/models/x"), moved)
    assert runner["environment"]["DASK_OCH__SCHEDULER"] == worker["scheduler"]


def test_names_in_compose_are_there(compose: dict[str, Any], certs: Path) -> None:
    services = compose["services"]
    for name, service in services.items():
        for secret in service.get("secrets", []):
            assert secret in compose["secrets"], name
        given = json.dumps([service.get("command"), service.get("environment")])
        used = set(re.findall(r"/run/secrets/([\w.]+)", given))
        assert used == set(service.get("secrets", [])), name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "nothing is published beyond this machine"
        for other in service.get("depends_on", {}):
            assert other in services
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or source.startswith("${OCH_DATA") or (DOCKER / source).is_dir()
    for name, secret in compose["secrets"].items():
        assert (certs / name).exists()
        assert secret == {"file": f"certs/{name}"}
    build = services["scheduler"]["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).resolve() == DOCKER / "Dockerfile"
