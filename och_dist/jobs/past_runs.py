"""What the runs of a pipeline did to an index, night after night."""

from __future__ import annotations

from typing import Any

from och_dist.errors import BadInputError, UsageError
from och_dist.stage import Report, Stopwatch
from och_dist.store import holder, open_objects, read_run, run_numbers


def history(index: str, *, last: int | None = None, run: int | None = None) -> Report:
    """The runs that are recorded beside ``index``, oldest first: all, the ``last`` ones, or all about one ``run``."""
    watch, objects = Stopwatch("history"), open_objects(index)
    if last is not None and last < 1:
        raise UsageError(f"last={last}; use at least 1")
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
