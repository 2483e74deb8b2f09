"""What the tests of cluster/ share: its files, certificates as make-certs writes them, and commands parsed for real."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from distributed.cli.dask_scheduler import main as dask_scheduler
from distributed.cli.dask_worker import main as dask_worker

from och_dist.cli import cli
from tests.support.deployed import make_certs as make_certs

TOP = Path(__file__).parents[2]
CLUSTER = TOP / "cluster"
DASK = {"scheduler": dask_scheduler, "worker": dask_worker}


def documents(path: Path) -> list[dict[str, Any]]:
    """All documents of a YAML file."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [document for document in yaml.load_all(path.read_text(), loader) if document is not None]


def parse(words: Sequence[str], moved: dict[str, Path]) -> dict[str, Any]:
    """The parameters of a command of och or dask, which must exist; ``moved`` says where its folders are here."""
    here = [_moved(word, moved) for word in words]
    if here[0] == "dask":
        command: click.Command = DASK[here[1]]
        here = here[1:]
    else:
        assert here[0] == "och", words
        found = cli.get_command(click.Context(cli), here[1])
        assert found is not None, words
        command, here = found, here[1:]
    found = command.make_context(here[0], here[1:]).params
    assert not found.get("preload_argv"), f"dask takes {found['preload_argv']} for something else"
    return found


def _moved(word: str, moved: dict[str, Path]) -> str:
    for old, new in moved.items():
        word = word.replace(old, str(new))
    return word


def tool(name: str) -> str:
    """The path of a program, or the test is skipped."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed (see .ci/run)")
    return found


def run(*words: object, **options: Any) -> str:
    """stdout and stderr of a program that must succeed."""
    ended = subprocess.run(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
        **options,
    )
    assert ended.returncode == 0, f"{words}: {ended.returncode}\n{ended.stdout}"
    return ended.stdout


def scripts() -> Iterator[tuple[Path, str]]:
    """Every script in cluster/ with its language: sh, bash or python."""
    for path in sorted(CLUSTER.rglob("*")):
        if path.is_file() and path.suffix not in (".json", ".pem", ".key"):
            first = path.read_text().partition("\n")[0]
            if first.startswith("#!"):
                yield path, "python" if "python" in first else first.rsplit("/", 1)[1]
            elif path.suffix == ".sh":
                yield path, "sh"
