"""The command line: what goes to stdout and stderr, exit codes, a whole session, and being stopped half-way."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import zarr

from och_dist.cli import cli
from och_dist.cli.session import configure_logging
from och_dist.sources.queries import open_queries
from och_dist.stop import reader_is_gone
from och_dist.store import results as neighbors
from och_dist.store.corpus import open_corpus
from och_dist.store.index import open_version
from tests.support.command import QUICK, Job, ended, facts, och, one_object, published, refused, small_job, small_rows

BIN = Path(sys.executable).parent
NAMES = cli.list_commands(click.Context(cli))
FORMATS = ("zarr", "npz", "parquet", "jsonl")
ROWS = 300
LOG_LINE = re.compile(r"^\d\d:\d\d:\d\d ", re.MULTILINE)


def test_help_lists_every_command() -> None:
    text = och("--help").stdout
    assert "Exit codes: 0 done" in text
    assert all(re.search(rf"^  {name}  +\w", text, re.MULTILINE) for name in NAMES)
    assert "..." not in text.partition("Commands:")[2], "a sentence is cut off"


def test_version() -> None:
    assert och("--version").stdout == f"och, version {importlib.metadata.version('och-dist')}\n"


@pytest.mark.parametrize("name", NAMES)
def test_help_of_a_command(name: str) -> None:
    text = och(name, "--help").stdout
    assert text.startswith(f"Usage: och {name} [OPTIONS]")
    options = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)
    assert {"--json", "--quiet", "--verbose"} <= set(options)
    assert ("--scheduler" in options) == (name not in ("inspect", "gc", "history", "settings"))
    undocumented = [line for line in re.findall(r"^  -.*$", text, re.MULTILINE) if not re.search(r"\S  +\S", line)]
    assert [line for line in undocumented if len(line) < 30] == []


def test_dask_och() -> None:
    ended = subprocess.run([BIN / "dask", "och", "--help"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "Usage: dask och [OPTIONS] COMMAND" in ended.stdout
    ended = subprocess.run([BIN / "dask", "och", "inspect", "/nowhere"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr.startswith("och: /nowhere holds no corpus")


# A whole session


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("session")


def session(place: Path, model: str) -> dict[str, tuple[object, ...]]:
    """The commands of a session by name, in order."""
    corpus, index, queries, truth = place / "corpus", place / "index", place / "queries", place / "truth.zarr"
    searches = {f"search-{kind}": ("search", index, queries, "-k", 5, "-o", place / f"f.{kind}") for kind in FORMATS}
    return {
        "generate": ("generate", corpus, "--rows", 500, "--dim", 16, "--chunk-rows", 128),
        "queries": ("generate", queries, "--rows", 7, "--dim", 16, "--first-row", 10**9),
        "train": ("train", corpus, "--models", place / "models", "--bits", 20, *QUICK),
        "encode": ("encode", corpus, index, "--model", model, "--chunk-rows", 100),
        "status": ("status", index),
        **searches,
        "search": ("search", index, queries, "-k", 5),
        "truth": ("truth", corpus, queries, "--fraction", 0.02, "-o", truth),
        "evaluate": ("evaluate", index, queries, "--truth", truth, "-o", place / "evaluation.json"),
        "inspect-corpus": ("inspect", corpus),
        "inspect-index": ("inspect", index),
        "inspect-model": ("inspect", model),
        "verify-corpus": ("verify", corpus),
        "verify-index": ("verify", index),
        "gc": ("gc", index),
    }


@pytest.fixture(scope="module")
def reports(place: Path) -> dict[str, dict[str, Any]]:
    """Reports of the first time that all commands ran, one after the other."""
    found: dict[str, dict[str, Any]] = {}
    for name in session(place, ""):
        found[name] = facts(*session(place, found["train"]["model"] if "train" in found else "")[name])
    return found


def test_session_reports(place: Path, reports: dict[str, dict[str, Any]]) -> None:
    assert {name: report["stage"] for name, report in reports.items()} == {
        name: "generate" if name == "queries" else name.partition("-")[0] for name in reports
    }
    done = [name for name, report in reports.items() if report["status"] == "done"]
    assert done == [name for name in reports if name != "gc"]
    assert (reports["generate"]["new_rows"], reports["generate"]["dtype"]) == (500, "float32")
    assert (reports["encode"]["new_rows"], reports["encode"]["version"], reports["encode"]["bits"]) == (500, 1, 20)
    assert (reports["encode"]["bytes_in"], reports["encode"]["bytes_out"]) == (500 * 16 * 4, 500 * 3)
    [job] = reports["status"]["jobs"]
    assert (job["state"], job["chunks"], job["done"], job["rows"]) == ("published", 5, 5, [0, 500])
    assert reports["truth"]["k"] == 10
    assert json.loads((place / "evaluation.json").read_text())["map"] == reports["evaluate"]["map"]
    assert reports["verify-index"]["chunks"] == 5
    assert reports["gc"]["versions_kept"] == [1]


def test_session_results_are_the_same_in_every_format(place: Path, reports: dict[str, dict[str, Any]]) -> None:
    rows = np.array([entry["rows"] for entry in reports["search"]["neighbors"]])
    distances = np.array([entry["distances"] for entry in reports["search"]["neighbors"]])
    assert rows.shape == (7, 5)
    parquet = pytest.importorskip("pyarrow.parquet").read_table(place / "f.parquet").to_pydict()
    lines = [json.loads(line) for line in (place / "f.jsonl").read_text().splitlines()]
    with np.load(place / "f.npz") as npz:
        stored = {
            "zarr": (zarr.open_array(place / "f.zarr/rows")[:], zarr.open_array(place / "f.zarr/distances")[:]),
            "npz": (npz["rows"], npz["distances"]),
            "parquet": (parquet["rows"], parquet["distances"]),
            "jsonl": ([line["rows"] for line in lines], [line["distances"] for line in lines]),
        }
    for kind, (found_rows, found_distances) in stored.items():
        assert np.array_equal(found_rows, rows), kind
        assert np.array_equal(found_distances, distances), kind


REPEATABLE = ("generate", "queries", "train", "encode", "search-zarr", "truth", "evaluate", "gc")


def test_running_everything_again_does_nothing(place: Path, reports: dict[str, dict[str, Any]]) -> None:
    files = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file() and "f." not in path.name}
    for name, words in session(place, reports["train"]["model"]).items():
        again = facts(*words)
        if name not in REPEATABLE:
            assert again["status"] == "done", name
            continue
        assert again["status"] == "nothing to do", name
        same = set(reports[name]) - {"status", "seconds", "new_rows", "jobs", "stored_bytes", "dropped", "dropped_rows"}
        same -= {"plan"}  # nothing was searched
        assert {key: again[key] for key in same} == {key: reports[name][key] for key in same}
        assert "nothing to do" in och(*words).stdout
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_stdout_is_the_result_and_stderr_the_log(place: Path, reports: dict[str, dict[str, Any]]) -> None:
    for name, words in session(place, reports["train"]["model"]).items():
        result = och(*words)
        assert result.stdout.startswith(f"{reports[name]['stage']}: "), name
        assert not LOG_LINE.search(result.stdout), name
        assert LOG_LINE.search(result.stderr), name


def test_quiet_leaves_stderr_empty(place: Path, reports: dict[str, dict[str, Any]]) -> None:
    for words in session(place, reports["train"]["model"]).values():
        result = och(*words, "-q", "--json")
        one_object(result.stdout)
        assert result.stderr == ""


def test_progress_is_a_line_per_tenth(tmp_path: Path) -> None:
    stderr = och("generate", tmp_path, "--rows", 40, "--dim", 4, "--chunk-rows", 1).stderr
    assert re.findall(r"generate: (\d+) % \((\d+) of 40\)", stderr) == [(str(10 * i), str(4 * i)) for i in range(1, 11)]


def test_changed_query_is_a_new_search(tmp_path: Path) -> None:
    """Results are looked up by the content of the queries, all of it, whatever the format."""
    rows = small_rows(50_000, dim=32)
    np.save(tmp_path / "rows.npy", rows)
    before = open_queries(str(tmp_path / "rows.npy")).fingerprint
    zarr.create_array(tmp_path / "array", data=rows, chunks=(1000, 32))
    assert open_queries(rows).fingerprint == before
    assert open_queries(str(tmp_path / "array")).fingerprint == before
    assert open_queries(rows.astype(">f4")).fingerprint == before
    assert open_queries(rows.astype("f8")).fingerprint != before
    for row in range(0, 50_000, 4321):
        changed = rows.copy()
        changed[row, 7] += 1
        np.save(tmp_path / "rows.npy", changed)
        assert open_queries(str(tmp_path / "rows.npy")).fingerprint != before, row


# Publishing later, growing, another model


def test_publish_later(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    index = tmp_path / "later"
    report = facts("encode", job.corpus, index, "--model", job.model, "--chunk-rows", 64, "--no-publish")
    assert (report["version"], report["published"], published(index)) == (None, False, {})
    status = facts("status", index)
    assert (status["version"], status["rows"], status["versions"]) == (None, 0, [])
    [found] = status["jobs"]
    assert (found["state"], found["done"], found["chunks"]) == ("finished", 5, 5)
    refused(3, "holds no published index", "search", index, job.queries)
    words = ("publish", index, found["job"], "--corpus", job.corpus)
    assert (facts(*words)["status"], facts(*words)["status"]) == ("done", "nothing to do")
    assert facts("status", index)["jobs"][0]["state"] == "published"
    first = facts("search", job.index, job.queries, "-k", 9)["neighbors"]
    assert facts("search", index, job.queries, "-k", 9)["neighbors"] == first


def test_publish_names_the_version_that_was_encoded(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    [name] = facts("encode", job.corpus, tmp_path / "later", "--model", job.model, "--no-publish")["jobs"]
    np.save(tmp_path / "more.npy", small_rows(20, seed=3))
    och("ingest", tmp_path / "more.npy", job.corpus, "--append")
    och("publish", tmp_path / "later", name, "--corpus", job.corpus)
    assert facts("inspect", tmp_path / "later")["corpus"]["version"] == 1
    assert facts("evaluate", tmp_path / "later", job.queries, "--truth", job.truth)["rows"] == 300


def test_only_new_rows_are_encoded(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    old = {path: path.stat().st_mtime_ns for path in job.index.rglob("c/*/0")}
    before = [codes for _, codes in open_version(str(job.index)).blocks()]
    np.save(tmp_path / "more.npy", small_rows(50, seed=3))
    report = facts("ingest", tmp_path / "more.npy", job.corpus, "--append")
    assert (report["rows"], report["new_rows"], report["version"]) == (350, 50, 2)
    words = ("ingest", tmp_path / "rows.npy", tmp_path / "more.npy", job.corpus, "--append")
    assert facts(*words)["status"] == "nothing to do"
    words = ("encode", job.corpus, job.index, "--model", job.model, "--chunk-rows", 64)
    report = facts(*words)
    assert (report["rows"], report["new_rows"], report["version"]) == (350, 50, 2)
    assert facts(*words)["status"] == "nothing to do"
    assert {path: path.stat().st_mtime_ns for path in old} == old
    after = [codes for _, codes in open_version(str(job.index)).blocks()]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=False))
    assert sum(map(len, after)) == 350
    assert facts("search", job.index, job.queries, "--version", 1)["rows"] == 300
    assert np.array_equal(open_corpus(str(job.corpus)).read(300, 350), np.load(tmp_path / "more.npy"))


def test_another_model_makes_a_version_of_its_own(tmp_path: Path) -> None:
    job = small_job(tmp_path)
    model = facts("train", job.corpus, "--models", tmp_path / "models", "--bits", 9, *QUICK)["model"]
    report = facts("encode", job.corpus, job.index, "--model", model)
    assert (report["new_rows"], report["version"]) == (300, 2)
    assert (facts("inspect", job.index)["bits"], facts("inspect", job.index)["model"]) == (9, Path(model).name)
    dry = facts("gc", job.index, "--keep", 1, "--dry-run")
    assert (dry["versions_removed"], dry["objects_removed"]) == ([1], 0)
    removed = facts("gc", job.index, "--keep", 1)
    assert (removed["versions_removed"], removed["versions_kept"]) == ([1], [2])
    refused(4, "version 1 of .* may have been collected.*present: 2", "search", job.index, job.queries, "--version", 1)
    assert facts("verify", job.index)["versions"] == [2]
    assert [path.parent.name for path in job.index.glob("models/*/model.json")] == [Path(model).name]


# Ends that no stage foresees


@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (RuntimeError("a bug"), 1, "RuntimeError: a bug\noch: an unexpected error"),
        (KeyboardInterrupt(), 130, "och: interrupted; what is done is kept"),
        (ConnectionResetError(104, "reset"), 7, "the cluster was lost .*run the same command again"),
        (TimeoutError("late"), 7, "the cluster was lost .*run the same command again"),
        (OSError(5, "Input/output error"), 5, "storage failed .*run the same command again"),
    ],
)
def test_ends_that_no_stage_foresees(raised: BaseException, code: int, text: str) -> None:
    def fail() -> None:
        raise raised

    result = ended(fail)
    assert result.exit_code == code
    assert re.search(text, result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize("swallow", [False, True])
def test_sigterm_is_not_taken_for_a_failed_task(swallow: bool) -> None:
    def stopped() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except Exception:
            if not swallow:
                raise

    before = signal.getsignal(signal.SIGTERM)
    result = ended(stopped)
    assert result.exit_code == 5
    assert result.stderr == "och: terminated; what is done is kept: run the same command again to go on\n"
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return small_job(tmp_path_factory.mktemp("searched"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 5), (signal.SIGINT, 130)])
@pytest.mark.parametrize("suffix", ["zarr", "npz", "jsonl"])
def test_a_stopped_search_leaves_nothing_half_written(
    searched: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int, suffix: str
) -> None:
    """The signal comes between two batches of a result that is being written."""
    job, before = searched, signal.getsignal(signal.SIGINT)
    words = ("search", job.index, job.queries, "-k", 3, "-o", tmp_path / f"found.{suffix}")
    save = neighbors.save_neighbors

    def stop_between(path: str, batches: Any, **params: Any) -> None:
        def two() -> Any:
            yield from batches
            os.kill(os.getpid(), number)
            time.sleep(10)

        save(path, two(), **params)

    monkeypatch.setattr("och_dist.store.save_neighbors", stop_between)
    result = och(*words, code=code)
    assert "; nothing half-written is left: run the same command again" in result.stderr
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.undo()
    och(*words)


@pytest.fixture(scope="module")
def slow_job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A corpus that takes seconds to encode in chunks of one row."""
    place = tmp_path_factory.mktemp("slow")
    och("generate", place / "corpus", "--rows", ROWS, "--dim", 8)
    return place / "corpus", facts("train", place / "corpus", "--models", place / "models", "--bits", 16, *QUICK)[
        "model"
    ]


@pytest.mark.parametrize(("number", "workers", "code"), [(signal.SIGTERM, 0, 5), (signal.SIGINT, 1, 130)])
def test_stopped_half_way(slow_job: tuple[Path, str], tmp_path: Path, number: int, workers: int, code: int) -> None:
    """SIGTERM goes to the driver alone, as from a scheduler; SIGINT to all its processes, as from a terminal."""
    corpus, model = slow_job
    index = tmp_path / "index"
    words = ("encode", corpus, index, "--model", model, "--chunk-rows", 1)
    process = subprocess.Popen(
        [BIN / "och", *map(str, words), "--workers", str(workers), "--no-dashboard", "-q"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not list(index.glob("segments/*/done/*.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert stdout == ""
    assert re.search(r"^och: (terminated|interrupted); what is done is kept", stderr, re.MULTILINE)
    assert "Traceback" not in stderr
    assert published(index) == {}
    [job] = facts("status", index)["jobs"]
    assert job["state"] == "unfinished"
    assert 0 < job["done"] < ROWS
    report = facts(*words)
    assert (report["status"], report["version"], report["new_rows"]) == ("done", 1, ROWS - job["done"])
    assert facts(*words)["status"] == "nothing to do"


def test_local_cluster(slow_job: tuple[Path, str], tmp_path: Path) -> None:
    """The dashboard is announced on stderr, Dask's report is written, the codes are those of a run in one process."""
    corpus, model = slow_job
    words = ("--workers", "1", "--json", "--performance-report", tmp_path / "report.html")
    command = [BIN / "och", "encode", corpus, tmp_path / "index", "--model", model, *words]
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert one_object(ended.stdout)["new_rows"] == ROWS
    assert re.search(r"^dashboard: http://127\.0\.0\.1:\d+/status$", ended.stderr, re.MULTILINE)
    assert "<html" in (tmp_path / "report.html").read_text()[:1000]
    och("encode", corpus, tmp_path / "here", "--model", model)
    codes = [open_version(str(tmp_path / name)).segments[0].digests.tolist() for name in ("index", "here")]
    assert codes[0] == codes[1]


def test_tracebacks_of_dask_are_shown_on_demand() -> None:
    """A lost connection is told in one sentence, the last; Dask's threads would add theirs before and after it."""
    cause = ValueError("lost")
    lost = logging.LogRecord("distributed.client", logging.ERROR, "", 0, "", (), (ValueError, cause, None))
    plain = logging.LogRecord("distributed.client", logging.WARNING, "", 0, "rescheduled", (), None)
    for level, shown in ((logging.WARNING, False), (logging.INFO, False), (logging.DEBUG, True)):
        configure_logging(level)
        for name in ("distributed.client", "asyncio"):
            assert bool(logging.getLogger(name).filter(lost)) is shown
            assert logging.getLogger(name).filter(plain)
            assert len(logging.getLogger(name).filters) == 1


def test_accidents_outside_of_tasks(tmp_path: Path) -> None:
    """What a system call says reaches the user as a sentence, with the code of what can be done about it."""
    np.save(tmp_path / "rows.npy", small_rows(4))
    said = refused(
        5, "storage failed .*what is done is kept: mend the cause", "ingest", tmp_path / "rows.npy", "/proc/no"
    )
    assert said.count("\n") == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_without_threads_are_refused(workers: int) -> None:
    refused(2, "--threads 0; give each worker 1 thread", "verify", "x", "--workers", workers, "--threads", 0)


@pytest.mark.parametrize("words", [("status", "{index}", "--json"), ("inspect", "{index}"), ("settings",)])
def test_a_reader_that_goes_away_is_no_failure(words: tuple[str, ...], reports: Any, place: Path) -> None:
    """As with 'och status --json | head -0': quiet, and with the code of a program that SIGPIPE ended."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        ended = subprocess.run(
            [sys.executable, "-m", "och_dist.cli", *(word.format(index=place / "index") for word in words)],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in ended.stderr
    assert "och: " not in ended.stderr


def test_a_reader_that_has_seen_enough_of_a_large_output(reports: Any, place: Path) -> None:
    """As with 'och search ... --json | head -c 10', when far more is written than a pipe holds."""
    zarr.create_array(place / "many", data=small_rows(600, dim=16), chunks=(600, 16))
    words = ("search", place / "index", place / "many", "-k", 500, "--json", "--workers", 0)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [BIN / "och", *map(str, words)], env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == b"{"
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in said
    assert "och: " not in said
    shutil.rmtree(place / "many")


def test_a_lost_connection_is_not_taken_for_a_reader_that_goes_away() -> None:
    assert not reader_is_gone(BrokenPipeError(errno.EPIPE, "the scheduler"))
