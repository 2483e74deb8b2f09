"""The command line as the tests call it: in this process, with the outcome checked on the spot."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import click
import numpy as np
from click.testing import CliRunner, Result

from och_dist.cli import cli
from och_dist.cli.app import OchGroup

LOCAL = ("inspect", "status", "gc", "history", "settings")
QUICK = ("--param", "n_centres=20", "--param", "max_iter=20")


def och(*words: object, code: int = 0, bare: bool = False) -> Result:
    """Run ``och WORDS``, without a cluster unless WORDS say otherwise (or ``bare``); the exit code must be ``code``."""
    args = [str(word) for word in words]
    if (
        not bare
        and args[0] not in LOCAL
        and not args[0].startswith("-")
        and not {"--workers", "--scheduler", "--help"} & set(args)
    ):
        args += ["--workers", "0"]
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == code, f"{args} ended with {result.exit_code}, not {code}:\n{result.stderr[-2000:]}"
    return result


def ended(work: Callable[[], None]) -> Result:
    """The outcome of a command ``verify`` that does ``work``, as the group of all commands turns it into an exit."""
    group = OchGroup("och")
    group.add_command(click.Command("verify", callback=work))
    return CliRunner().invoke(group, ["verify"])


def facts(*words: object) -> dict[str, Any]:
    """The report of a command that succeeds."""
    return one_object(och(*words, "--json").stdout)


def one_object(text: str) -> dict[str, Any]:
    """``text`` must be one line, one JSON object, without the NaN that JSON does not have."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    assert text.count("\n") == 1
    assert text.endswith("\n")
    found = json.loads(text, parse_constant=refuse)
    assert isinstance(found, dict)
    return found


def published(path: Path) -> dict[str, bytes]:
    """Every version of a corpus or an index, byte for byte."""
    return {file.name: file.read_bytes() for file in sorted((path / "versions").glob("*"))}


def refused(code: int, text: str, *words: object, keeps: Iterable[Path] = ()) -> str:
    """A command that must end with ``code`` and a message like ``text``, publishing nothing; returns stderr."""
    places = list(keeps)
    before = [published(place) for place in places]
    result = och(*words, code=code)
    assert re.search(text, result.stderr), result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert [published(place) for place in places] == before
    return result.stderr


class Job(NamedTuple):
    """A whole small job on disk."""

    corpus: Path
    model: Path
    index: Path
    queries: Path
    truth: Path


def small_rows(count: int = 300, dim: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, dim)).astype("f4")


def small_job(folder: Path) -> Job:
    """300 rows of 8 dimensions in chunks of 64, 12 bits, codes in chunks of 64, 5 queries, 10 true neighbours."""
    rows = small_rows()
    np.save(folder / "rows.npy", rows)
    np.save(folder / "queries.npy", small_rows(5, seed=1))
    job = Job(folder / "corpus", folder, folder / "index", folder / "queries.npy", folder / "truth.zarr")
    och("ingest", folder / "rows.npy", job.corpus, "--chunk-rows", 64)
    model = Path(facts("train", job.corpus, "--models", folder / "models", "--bits", 12, *QUICK)["model"])
    och("encode", job.corpus, job.index, "--model", model, "--chunk-rows", 64)
    och("truth", job.corpus, job.queries, "-k", 10, "-o", job.truth)
    return job._replace(model=model)


def moved(job: Job, old: Path, new: Path) -> Job:
    """The same job after a copy of its folder."""
    return Job(*(new / path.relative_to(old) for path in job))
