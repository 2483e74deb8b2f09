"""'och run' as an operator meets it: history, lock, dry run, JSON log, and no cluster for a night without work."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist.cli.session import configure_logging
from och_dist.jobs.pipeline import load_pipeline, recorded
from och_dist.stage import Context, LateContext
from och_dist.stop import Terminated
from och_dist.store.objects import open_objects
from och_dist.store.runs import begin_run, locked
from tests.support.command import ended, facts, och, one_object, refused, small_rows

PIPELINES = Path(__file__).parents[2] / "pipelines"
ROWS, DIM = 1_200, 8


def words(folder: Path, *settings: str) -> tuple[object, ...]:
    every = (
        f"inbox={folder / 'inbox'}",
        f"dir={folder / 'data'}",
        "bits=12",
        "model.params={n_centres=20,max_iter=20}",
        *settings,
    )
    return ("run", PIPELINES / "nightly.toml", *(word for setting in every for word in ("--set", setting)))


def stored(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the nightly job has run once, with an evaluation on fixed queries."""
    folder = tmp_path_factory.mktemp("night")
    (folder / "inbox").mkdir()
    np.save(folder / "inbox" / "a.npy", small_rows(ROWS, DIM))
    np.save(folder / "queries.npy", small_rows(5, DIM, seed=1))
    stages = facts(*words(folder, f"queries={folder / 'queries.npy'}"))["stages"]
    assert [stage["status"] for stage in stages.values()] == ["done"] * 6 + ["nothing to do"]
    assert stages["quality"]["truth_k"] == 100
    assert 0 < stages["quality"]["map"] <= 1
    return folder


@pytest.fixture(autouse=True)
def plain_log() -> Iterator[None]:
    """A JSON log is for the command that asks for it, not for the tests after it."""
    yield
    configure_logging(logging.INFO)


def history(folder: Path, *more: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = facts("history", folder / "data" / "index", *more)["runs"]
    return found


def test_a_night_without_work_needs_no_cluster(night: Path) -> None:
    """Not even one that cannot be reached; and the evaluation is not made again."""
    before = stored(night / "data")
    result = och(*words(night, f"queries={night / 'queries.npy'}"), "--scheduler", "tcp://nowhere.invalid:1")
    assert result.stdout.startswith("nightly: nothing to do, everything was there already")
    after = stored(night / "data")
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} <= {
        name for name in after if name.startswith(("index/runs/", "index/.tmp/"))
    }


def test_a_late_context_has_all_that_a_context_has() -> None:
    given: dict[str, Any] = {item.name: object() for item in dataclasses.fields(Context)}
    opened: list[Context] = []
    late = LateContext(lambda: opened.append(Context(**given)) or opened[0])
    assert opened == []
    assert all(getattr(late, name) is value for name, value in given.items())
    assert len(opened) == 1


def test_history(night: Path) -> None:
    och(*words(night))
    first, *_, last = history(night)
    assert (first["run"], first["status"], first["exit_code"], first["name"]) == (1, "done", 0, "nightly")
    assert (first["new_files"], first["new_rows"], first["index_version"], first["trained"]) == (1, ROWS, 1, True)
    assert (last["status"], last["new_files"], last["new_rows"]) == ("nothing to do", 0, 0)
    lines = och("history", night / "data" / "index").stdout.splitlines()
    assert lines[1].split()[:4] == ["run", "started", "(UTC)", "seconds"]
    assert lines[2].split()[4:] == ["0", "done", "1", "1,200", "1", "nightly,", "trained", "a", "model"]
    (whole,) = history(night, "--run", 1)
    assert whole["stages"]["quality"]["queries"] == 5
    assert whole["settings"][2] == "bits=12"
    assert whole["file"] == str(PIPELINES / "nightly.toml")
    assert [run["run"] for run in history(night, "-n", 1)] == [last["run"]]
    assert "  quality      done in" in och("history", night / "data" / "index", "--run", 1).stdout


def test_history_of_nothing(tmp_path: Path, night: Path) -> None:
    refused(3, "has no history; 'och run' keeps one", "history", tmp_path)
    refused(2, "has no run 99; it has 1 to ", "history", night / "data" / "index", "--run", 99)
    refused(2, "last=0; use at least 1", "history", night / "data" / "index", "-n", 0)


def test_overlapping_runs(night: Path) -> None:
    """The second does nothing, says who works, and is in the history too."""
    objects = open_objects(str(night / "data" / "index"))
    with locked(objects, run=begin_run(objects, {"name": "other"})):
        refused(5, "another run works on .*nothing was begun", *words(night))
        running, refusal = history(night, "-n", 2)
        assert (running["status"], running["exit_code"]) == ("running", None)
        assert (refusal["status"], refusal["exit_code"]) == ("failed", 5)
    assert history(night, "-n", 2)[0]["status"] == "killed"
    assert "killed" in och("history", night / "data" / "index").stdout
    assert och(*words(night)).exit_code == 0


@pytest.mark.parametrize("number", [3, 2])
def test_failures_are_in_the_history(tmp_path: Path, number: int) -> None:
    (tmp_path / "inbox").mkdir()
    np.save(tmp_path / "inbox" / "a.npy", np.full((5, 3), np.nan, "f4") if number == 3 else small_rows(50))
    settings = [] if number == 3 else ["model.params={nope=1}"]
    message = refused(number, "NaN|has no parameter nope", *words(tmp_path, *settings)).splitlines()[-1]
    (run,) = history(tmp_path)
    assert (run["exit_code"], run["status"], run["stage"]) == (number, "failed", "collect" if number == 3 else "model")
    assert message == f"och: {run['message']}"


def test_unexpected_failures_and_interruptions(night: Path) -> None:
    pipeline = load_pipeline(PIPELINES / "nightly.toml", [f"dir={night / 'data'}"])
    for error, code in ((RuntimeError("oops"), 1), (KeyboardInterrupt(), 130), (Terminated(), 5)):
        with contextlib.suppress(type(error)), recorded(pipeline, file="nightly.toml", settings=[]) as log:
            log.stage = "collect"
            raise error
        (run,) = history(night, "-n", 1)
        assert (run["exit_code"], run["stage"]) == (code, "collect")
        assert run["message"] == ("RuntimeError: oops" if code == 1 else type(error).__name__)


def test_a_report_that_cannot_be_kept_hides_no_failure(night: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("och_dist.store.end_run", full)
    text = refused(2, "has no parameter nope", *words(night, "model.params={nope=1}"))
    assert "could not be kept" in text
    assert "what is done is kept" in och(*words(night), code=5).stderr


def test_jobs_without_an_index_have_no_history(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text("[[stages]]\nstage = 'generate'\ncorpus = 'here'\nrows = 5\ndim = 3\n")
    report = facts("run", tmp_path / "job.toml", "--set", f"generate.corpus={tmp_path / 'c'}")
    assert report["run"] is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "job.toml"]


def test_an_index_that_is_a_corpus(tmp_path: Path) -> None:
    och("generate", tmp_path / "c", "--rows", 5, "--dim", 3)
    before = stored(tmp_path)
    (tmp_path / "inbox").mkdir()
    settings = [f"{stage}.index={tmp_path / 'c'}" for stage in ("model", "encode", "check", "publish", "quality")]
    refused(3, "is of kind 'corpus'; name an index", *words(tmp_path, *settings))
    assert stored(tmp_path) == before


# Dry runs


def plan(folder: Path, *settings: str) -> dict[str, dict[str, Any]]:
    """The plan by stage; making it must not change a byte."""
    before = stored(folder)
    report = facts(*words(folder, *settings), "--dry-run")
    assert stored(folder) == before
    assert report["dry_run"] is True
    assert report["memory"]["driver"] > 1 << 26
    return {stage["id"]: stage for stage in report["stages"]}


def test_plan_of_a_first_night(tmp_path: Path) -> None:
    (tmp_path / "inbox").mkdir()
    assert "holds no file" not in plan(tmp_path)["collect"]["does"]
    np.save(tmp_path / "inbox" / "a.npy", small_rows(700))
    np.save(tmp_path / "inbox" / "b.npy", small_rows(300, seed=1))
    stages = plan(tmp_path)
    assert (stages["collect"]["files"], stages["collect"]["rows"], stages["collect"]["bytes"]) == (2, 1000, 32_000)
    assert stages["collect"]["task_memory"] == 4 * 32_000
    assert (stages["model"]["does"], stages["model"]["rows"]) == ("train: there is no model yet", 1000)
    assert stages["encode"]["rows"] == 1000
    assert stages["encode"]["task_memory"] > 3 * 32_000
    text = och(*words(tmp_path), "--dry-run").stdout
    assert text.startswith("nightly: a dry run, nothing was changed\n")
    assert "store 1,000 rows of 8-d vectors" in text
    assert "expected memory: " in text


def test_plan_of_later_nights(night: Path, tmp_path: Path) -> None:
    stages = plan(night)
    assert all("nothing to do" in stages[name]["does"] for name in ("collect", "model", "encode", "quality", "gc"))
    assert plan(night, "bits=16")["model"]["does"] == "train: other parameters are asked for"
    assert plan(night, "bits=16")["encode"]["rows"] == ROWS
    np.save(tmp_path / "b.npy", small_rows(1_100, seed=2))
    stages = plan(night, f"inbox={tmp_path}", "on_drift=retrain")
    assert (stages["collect"]["rows"], stages["encode"]["rows"]) == (1_100, 1_100)
    assert "unless the new rows have drifted: then train anew" in stages["model"]["does"]


@pytest.mark.parametrize("name", ["demo", "gist1m", "compare_labelme", "nightly"])
def test_every_pipeline_has_a_plan(name: str, tmp_path: Path) -> None:
    settings = ["--set", f"dir={tmp_path / 'd'}"]
    report = facts("run", PIPELINES / f"{name}.toml", *settings, "--dry-run")
    assert report["name"] == name
    assert all(stage["does"] for stage in report["stages"])
    assert not list(tmp_path.iterdir())


def test_plan_of_the_demo(tmp_path: Path) -> None:
    report = facts("run", PIPELINES / "demo.toml", "--set", f"dir={tmp_path / 'd'}", "--dry-run")
    stages = {stage["id"]: stage for stage in report["stages"]}
    assert (stages["generate"]["rows"], stages["generate"]["bytes"]) == (100_000, 100_000 * 960 * 4)
    assert stages["encode"]["rows"] == 100_000
    assert report["memory"]["driver"] > stages["train"]["task_memory"] > 3 * (8192 * 960 * 4)


# Logs


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_log(night: Path) -> None:
    result = och(*words(night), "--log-format", "json", "--json")
    one_object(result.stdout)
    found = lines(result.stderr)
    assert [line["message"].partition(":")[0] for line in found][-1] == "gc"
    assert {line["level"] for line in found} == {"info"}
    assert all(set(line) == {"time", "level", "logger", "message"} for line in found)


def test_json_log_of_a_failure(night: Path) -> None:
    result = och(*words(night, "model.params={nope=1}"), "--log-format", "json", code=2)
    last = lines(result.stderr)[-1]
    assert (last["level"], last["exit_code"]) == ("error", 2)
    assert "has no parameter nope" in last["message"]

    def fail() -> None:
        configure_logging(logging.INFO, "json")
        raise RuntimeError("oops")

    last = lines(ended(fail).stderr)[-1]
    assert (last["exit_code"], "RuntimeError: oops" in last["traceback"]) == (1, True)


LOUD = """
import logging, warnings
from och_dist.cli.session import adopt_dask, configure_logging
configure_logging(logging.INFO, "json")
adopt_dask()
logging.getLogger("distributed.worker").warning("worker is %s", "paused")
from distributed.utils import silence_logging_cmgr
with silence_logging_cmgr(logging.WARNING):  # as a local cluster does while it lives
    logging.getLogger("och_dist").info("at work")
    logging.getLogger("distributed.worker").info("silenced")
warnings.warn("careful")
"""


def test_warnings_and_dask_are_in_the_json_log() -> None:
    ended = subprocess.run([sys.executable, "-c", LOUD], capture_output=True, text=True, timeout=60, check=True)
    found = lines(ended.stderr)
    assert [line["logger"] for line in found] == ["distributed.worker", "och_dist", "py.warnings"]
    assert [line["message"] for line in found][:2] == ["worker is paused", "at work"]
