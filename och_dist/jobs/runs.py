"""Running a pipeline, and the log of its runs beside its index: one at a time, each with a number, a beginning and a
report at the end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import och_dist
from och_dist.errors import BadInputError, OchError, UsageError
from och_dist.jobs.pipeline import Pipeline
from och_dist.options import Option, checked
from och_dist.stage import Context, Report, Stopwatch
from och_dist.stop import exit_code_of
from och_dist.store import Objects, begin_run, end_run, holder, locked, open_objects, read_run, run_numbers

logger = logging.getLogger("och_dist")

MAX_FACT_BYTES = 1 << 16


class RunLog:
    """What is known of a run so far: its number, the stage at work, and the reports of those before."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.number: int | None = None
        self.stage: str | None = None
        self.reports: list[tuple[str, Report]] = []

    def to_json(self, error: BaseException | None) -> dict[str, Any]:
        quiet = all(report.status == "nothing to do" for _, report in self.reports)
        body: dict[str, Any] = {
            "status": "failed" if error else "nothing to do" if quiet else "done",
            "exit_code": exit_code_of(error) if error else 0,
            "seconds": round(time.perf_counter() - self.started, 3),
            "stages": {label: _brief(report.to_json()) for label, report in self.reports},
        }
        if error is not None:
            text = str(error) if isinstance(error, OchError) else f"{type(error).__name__}: {error}".rstrip(": ")
            body |= {"stage": self.stage, "message": text}
        return body


def run_pipeline(pipeline: Pipeline, context: Context, log: RunLog | None = None) -> list[tuple[str, Report]]:
    """Run the stages in order; running them again repeats no finished work."""
    log = log or RunLog()
    known = dict(pipeline.variables)
    for step in pipeline.steps:
        log.stage = step.id
        brought = {"context": context} if step.stage.takes("context") else {}
        report = step.stage.function(**step.ready(known), **brought)
        known |= {f"{step.id}.{name}": value for name, value in report.facts.items()}
        log.reports.append((step.id, report))
    log.stage = None
    return log.reports


@contextlib.contextmanager
def recorded(pipeline: Pipeline, *, file: str, settings: Sequence[str]) -> Iterator[RunLog]:
    """Hold the lock of the pipeline's index, and keep a report however this ends; without an index neither."""
    log, index = RunLog(), pipeline.index
    if index is None:
        yield log
        return
    objects = open_objects(index)
    about = {"name": pipeline.name, "file": os.path.abspath(file), "settings": list(settings), **_here()}
    log.number = begin_run(objects, about)
    error: BaseException | None = None
    try:
        with locked(objects, run=log.number):
            yield log
    except BaseException as raised:
        error = raised
        raise
    finally:
        _keep(objects, log.number, {**about, **log.to_json(error)}, failing=error is not None)


def _keep(objects: Objects, number: int, report: dict[str, Any], *, failing: bool) -> None:
    """A report that cannot be kept must not hide why the run failed."""
    try:
        end_run(objects, number, report)
    except (OchError, OSError) as error:
        if not failing:
            raise
        logger.warning("the report of run %d could not be kept (%s)", number, error)


def _here() -> dict[str, Any]:
    """Who runs, where and when; the time is for people only."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"started": now, "host": platform.node(), "pid": os.getpid(), "version": och_dist.__version__}


def _brief(facts: dict[str, Any]) -> dict[str, Any]:
    """Without what belongs into a result file, such as the neighbours of a search."""
    sizes = {name: len(json.dumps(value)) for name, value in facts.items()}
    return {name: value for name, value in facts.items() if sizes[name] <= MAX_FACT_BYTES}


@checked
def history(
    index: str,
    *,
    last: Annotated[int | None, Option("Only the last N runs.", flags="-n --last", metavar="N", at_least=1)] = None,
    run: Annotated[int | None, Option("Everything about one run.", metavar="NUMBER")] = None,
) -> Report:
    """The runs that are logged beside ``index``, oldest first."""
    watch, objects = Stopwatch("history"), open_objects(index)
    numbers = run_numbers(objects)
    if not numbers:
        raise BadInputError(f"{objects.url} has no history; 'och run' keeps one beside the index of a pipeline")
    if run is not None:
        if run not in numbers:
            raise UsageError(f"{objects.url} has no run {run}; it has {numbers[0]} to {numbers[-1]}")
        numbers = [run]
    now = (holder(objects) or {}).get("run")
    runs = []
    for number in numbers[-(last or len(numbers)) :]:
        start, end = read_run(objects, number)
        whole = {**start, **(end or {"status": "running" if number == now else "killed", "exit_code": None})}
        runs.append({**whole, **_result(whole)} if run is not None else _line(whole))
    return watch.report(index=objects.url, runs=runs)


def _line(run: dict[str, Any]) -> dict[str, Any]:
    """A run in short."""
    names = ("run", "started", "name", "status", "exit_code", "seconds", "stage", "message")
    return {name: run[name] for name in names if name in run} | _result(run)


def _result(run: dict[str, Any]) -> dict[str, Any]:
    """What the stages of a run made: the version and its rows, and how many rows and files were new."""
    stages = list(run.get("stages", {}).values())
    found: dict[str, Any] = {}
    for stage in stages:
        if stage["stage"] == "publish" or (stage["stage"] == "encode" and stage["published"]):
            found |= {"index_version": stage["version"], "rows": stage["rows"]}
        if stage["stage"] == "encode":
            found["new_rows"] = stage["new_rows"]
        if stage["stage"] == "collect":
            found["new_files"] = stage["new_files"]
        if stage["stage"] == "model":
            found |= {name: stage[name] for name in ("trained", "balance_shift", "margin_shift") if name in stage}
    return found
