"""A run of a pipeline as its history tells it: one at a time, with a number, a beginning and a report at the end."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import och_dist
from och_dist.errors import OchError
from och_dist.jobs.pipeline import Pipeline, index_of
from och_dist.stage import Report
from och_dist.stop import exit_code_of
from och_dist.store import Objects, begin_run, end_run, locked, open_objects

logger = logging.getLogger("och_dist")

MAX_FACT_BYTES = 1 << 16


class Record:
    """What is known of a run so far."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.number: int | None = None
        self.stage: str | None = None
        self.reports: list[tuple[str, Report]] = []

    def begun(self, label: str) -> None:
        self.stage = label

    def told(self, label: str, report: Report) -> None:
        self.stage = None
        self.reports.append((label, report))

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


@contextlib.contextmanager
def recorded(pipeline: Pipeline, *, file: str, settings: Sequence[str]) -> Iterator[Record]:
    """Hold the lock of the pipeline's index, and keep a report however this ends; without an index neither."""
    record, index = Record(), index_of(pipeline)
    if index is None:
        yield record
        return
    objects = open_objects(index)
    about = {"name": pipeline.name, "file": os.path.abspath(file), "settings": list(settings), **_here()}
    record.number = begin_run(objects, about)
    error: BaseException | None = None
    try:
        with locked(objects, run=record.number):
            yield record
    except BaseException as raised:
        error = raised
        raise
    finally:
        _keep(objects, record.number, {**about, **record.to_json(error)}, failing=error is not None)


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
