"""The settings: what dask.yaml says holds, unless the user says otherwise in a file, a variable or code."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import dask
import pytest

from och_dist import settings, stop, worker
from och_dist.cluster.connection import ClusterOptions, connect
from och_dist.errors import UsageError
from tests.support.command import och

MEMORY = {"MALLOC_TRIM_THRESHOLD_": 128 << 20, "MALLOC_MMAP_THRESHOLD_": 32 << 20}


def shown(folder: Path, *words: str, code: int = 0, **variables: str) -> Any:
    """What 'och settings --json' prints in a process of its own, whose home is ``folder``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
    ended = subprocess.run(
        [sys.executable, "-m", "och_dist.cli", *(words or ("settings", "--json"))],
        env={**kept, "HOME": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    return json.loads(ended.stdout) if code == 0 else ended.stderr


def test_the_file_is_in_force_by_default(tmp_path: Path) -> None:
    assert shown(tmp_path) == settings.defaults()
    environ = settings.defaults()["distributed"]["nanny"]["pre-spawn-environ"]
    assert environ == dict.fromkeys((*worker.BLAS_LIMITS, "NUMBA_NUM_THREADS"), 1) | MEMORY
    with dask.config.set({"och.grace": settings.defaults()["och"]["grace"]}):
        assert settings.seconds("grace") == stop.GRACE_SECONDS


def test_every_setting_has_its_comment() -> None:
    lines = settings.FILE.read_text().splitlines()
    bare = [
        line
        for before, line in itertools.pairwise(lines)
        if re.match(r" +[a-z-]+: \S", line) and not re.match(r" +#", before)
    ]
    assert [line.strip().partition(":")[0] for line in bare] == ["threads", "memory-limit", "dashboard-address", "tcp"]


def test_variables_and_files_of_the_user_win(tmp_path: Path) -> None:
    (tmp_path / ".config" / "dask").mkdir(parents=True)
    (tmp_path / ".config" / "dask" / "mine.yaml").write_text(
        "och: {workers-timeout: 15m, grace: 1s}\n"
        "distributed: {scheduler: {no-workers-timeout: null}, nanny: {pre-spawn-environ: {NUMBA_NUM_THREADS: 4}}}\n"
    )
    found = shown(tmp_path, DASK_OCH__GRACE="2s", DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES="9")
    assert (found["och"]["workers-timeout"], found["och"]["grace"], found["och"]["retries"]) == ("15m", "2s", 2)
    scheduler = found["distributed"]["scheduler"]
    assert scheduler.pop("preload") == ["och_dist.monitor.dashboard"]
    assert scheduler == {"allowed-failures": 9, "no-workers-timeout": None, "worker-ttl": "5 minutes"}
    expected = settings.defaults()["distributed"]["nanny"]["pre-spawn-environ"] | {"NUMBA_NUM_THREADS": 4}
    assert found["distributed"]["nanny"]["pre-spawn-environ"] == expected


def test_a_setting_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    message = shown(tmp_path, code=2, DASK_OCH__CONECT_TIMEOUT="3s")
    assert re.search(r"och\.conect.timeout \(or DASK_OCH__CONECT_TIMEOUT\) is no setting; use one of answer", message)
    message = shown(tmp_path, "verify", "x", "--workers", "0", code=2, DASK_OCH__CONECT_TIMEOUT="3s")
    assert "is no setting" in message
    assert "is no group of settings" in shown(tmp_path, code=2, DASK_OCH="3")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("grace", "soon", r"och.grace: 'soon' is no duration; write it like 20s or 5 minutes"),
        ("grace", -1, "och.grace: -1 is no duration"),
        ("grace", None, "och.grace: None is no duration"),
        ("grace", True, "och.grace: True is no duration"),
        ("workers", "two", r"och.workers: 'two'; use a whole number, 0 or more"),
        ("threads", 0, "och.threads: 0; use a whole number, 1 or more"),
        ("dashboard", "maybe", r"och.dashboard: 'maybe'; use true or false"),
        ("memory-limit", "much", "a local cluster with --memory-limit much cannot be made"),
    ],
)
def test_values_are_checked(name: str, value: object, sentence: str) -> None:
    with (
        dask.config.set({f"och.{name}": value}),
        pytest.raises(UsageError, match=sentence),
        connect(ClusterOptions()),
    ):
        pytest.fail("connected")


def test_settings_are_the_defaults_of_options(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    file.write_text('{"address": "tcp://127.0.0.1:1"}')
    with dask.config.set({"och.scheduler": str(file), "och.connect-timeout": "1s"}):
        message = och("verify", tmp_path, "--dashboard", "--grace", 1, code=7, bare=True).stderr
        assert f"no scheduler answers at {file} (tcp://127.0.0.1:1) within 1 s" in message
        och("verify", tmp_path, "--workers", 0, code=3)  # the option wins: no cluster, and no corpus there
    with dask.config.set({"och.workers": 0}), connect(ClusterOptions()) as client:
        assert client is None


def test_the_command_names_the_file() -> None:
    assert Path(och("settings", "--file", bare=True).stdout.strip()) == settings.FILE
    text = och("settings", bare=True).stdout
    assert "  grace: 10s\n" in text
    assert settings.defaults()["och"].keys() <= set(re.findall(r"^  (\S+):", text, re.M))
