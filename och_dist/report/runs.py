"""The history of an index and the plan of a run as tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from och_dist.report.text import bytes_text
from och_dist.stage import Report

DRIVER_BYTES = 256 << 20
"""What the driver needs before any data: the interpreter with NumPy, Dask and compiled kernels."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Aligned columns; the last one is as long as it likes."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    return [
        "  ".join(
            cell.rjust(widths[place]) if place in right else cell.ljust(widths[place])
            for place, cell in enumerate(line)
        ).rstrip()
        for line in lines
    ]


def render_history(report: Report) -> str:
    """One line a run; a single run with its stages."""
    runs = report.facts["runs"]
    head = ("run", "started (UTC)", "seconds", "exit", "outcome", "files", "new rows", "version", "what")
    lines = table(head, [_line(run) for run in runs], right=(0, 2, 3, 5, 6, 7))
    for run in runs if len(runs) == 1 else ():
        for label, stage in run.get("stages", {}).items():
            lines.append(f"  {label:<12} {stage['status']} in {stage['seconds']:.2f} s")
    return "\n".join([f"{report.facts['index']}", *lines])


def _line(run: dict[str, Any]) -> tuple[str, ...]:
    def number(name: str, form: str = ",") -> str:
        return "-" if run.get(name) is None else format(run[name], form)

    started = str(run.get("started", "-")).partition("+")[0].replace("T", " ")
    return (
        number("run", "d"),
        started,
        number("seconds", ".1f"),
        number("exit_code", "d"),
        str(run["status"]),
        number("new_files"),
        number("new_rows"),
        number("index_version", "d"),
        _what(run),
    )


def _what(run: dict[str, Any]) -> str:
    if "message" in run:
        at = f"{run['stage']}: " if run.get("stage") else ""
        return at + str(run["message"])
    if run["status"] in ("killed", "running"):
        return "no report: what is done is kept, the next run goes on" if run["status"] == "killed" else ""
    notes = ["trained a model"] if run.get("trained") else []
    if "balance_shift" in run:
        notes.append(f"drift {run['balance_shift']:.3f} / {run['margin_shift']:.3f}")
    return ", ".join([str(run.get("name", "")), *notes])


def memory_needed(planned: Sequence[Any], cluster: dict[str, Any]) -> dict[str, int]:
    """Bytes that a worker and the driver are expected to need at most; without workers it is one process."""
    threads = int(cluster.get("threads", 1))
    worker = max((stage.task_memory or 0 for stage in planned), default=0) * threads
    driver = DRIVER_BYTES + max((stage.driver_memory or 0 for stage in planned), default=0)
    return {"driver": driver + worker} if cluster.get("workers") == 0 else {"driver": driver, "worker": worker}


def render_plan(name: str, planned: Sequence[Any], memory: dict[str, int]) -> str:
    rows = [
        (
            stage.id,
            "" if stage.files is None else f"{stage.files:,}",
            "" if stage.rows is None else f"{stage.rows:,}",
            "" if stage.bytes is None else bytes_text(stage.bytes),
            "" if stage.task_memory is None else bytes_text(stage.task_memory),
            stage.does,
        )
        for stage in planned
    ]
    head = ("stage", "files", "rows", "bytes", "a task", "what it would do")
    needs = ", ".join(
        f"{bytes_text(size)} on {'each' if who == 'worker' else 'the'} {who}" for who, size in memory.items()
    )
    body = [f"  {line}" for line in table(head, rows, right=(1, 2, 3, 4))]
    return "\n".join([f"{name}: a dry run, nothing was changed", "", *body, "", f"  expected memory: {needs}"])
