"""The scripts on a machine that lacks something: one clear sentence, exit code 2, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parent.parent
TOOLS = ("sh", "dirname", "cat", "cksum", "rm")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What the scripts touch before they install anything, in a folder of their own."""
    top = tmp_path / "clone"
    shutil.copytree(TOP / "script", top / "script")
    shutil.copytree(TOP / "constraints", top / "constraints")
    shutil.copy(TOP / "pyproject.toml", top)
    return top


def make_python(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


OLD = 'case $1 in --version) echo "Python 3.9.1" ;; *) exit 1 ;; esac'


def without_venv(folder: Path) -> str:
    """This interpreter, with an ensurepip that cannot be imported, as on Debian without python3-venv."""
    (folder / "ensurepip.py").write_text("raise ImportError\n")
    return f'PYTHONPATH="{folder}" exec "{sys.executable}" "$@"'


def refused(clone: Path, script: str, **environment: str) -> str:
    """The sentence with which a script refuses to start."""
    settings = {name: value for name, value in os.environ.items() if name != "OCH_PYTHON"}
    command = [shutil.which("sh") or "sh", f"script/{script}"]
    ended = subprocess.run(
        command,
        cwd=clone,
        env=settings | environment,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert not (clone / ".venv").exists()
    return ended.stderr


@pytest.mark.parametrize("script", ["demo", "test"])
def test_a_python_that_is_too_old(clone: Path, tmp_path: Path, script: str) -> None:
    old = make_python(tmp_path / "a folder" / "python3", OLD)
    message = refused(clone, script, OCH_PYTHON=str(old))
    assert message.startswith("och-dist needs Python 3.11 or newer, and found Python 3.9.1; install one")


def test_a_python_that_is_not_there(clone: Path, tmp_path: Path) -> None:
    message = refused(clone, "demo", OCH_PYTHON=str(tmp_path / "python3"))
    assert f"and found no {tmp_path / 'python3'}; install one" in message


@pytest.mark.parametrize(("body", "found"), [(None, "no python3"), (OLD, "Python 3.9.1")])
def test_a_path_without_a_python_that_will_do(clone: Path, tmp_path: Path, body: str | None, found: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(str(shutil.which(tool)))
    if body is not None:
        make_python(folder / "python3", body)
    assert f"and found {found}; install one" in refused(clone, "demo", PATH=str(folder))


def test_a_python_without_venv(clone: Path, tmp_path: Path) -> None:
    bare = make_python(tmp_path / "python3", without_venv(tmp_path))
    message = refused(clone, "test", OCH_PYTHON=str(bare))
    assert message.startswith(f"this Python ({bare}) has no venv module; install it")
    assert "apt install python3-venv" in message
