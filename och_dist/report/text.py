"""Reports as plain text: a stage, a whole run, its plan and its history, and what 'och doctor' found.

Short lines, numbers with units, what to do next.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from och_dist.stage import Report

UNITS = ("B", "kB", "MB", "GB", "TB")
DRIVER_BYTES = 256 << 20  # what the driver needs before any data: the interpreter with NumPy, Dask and compiled kernels
LISTED = 20
LISTED_NEIGHBOURS = 8
LISTED_QUERIES = 10
RATED = {"generate": "new_rows", "ingest": "new_rows", "collect": "new_rows", "train": "rows", "encode": "new_rows"}
LABELS = {
    "generate": "generated vectors",
    "ingest": "vectors read and stored",
    "train": "model trained",
    "encode": "vectors encoded",
    "truth": "exact neighbours",
    "search": "Hamming neighbours",
    "evaluate": "evaluated",
    "compare": "methods compared",
    "fetch": "fetched",
    "verify": "verified",
    "delete": "rows deleted",
    "compact": "segments merged",
    "tables": "bucket tables",
    "collect": "new files stored",
    "model": "model chosen",
    "check": "every byte checked",
    "publish": "version published",
    "quality": "evaluated",
    "gc": "old versions removed",
}


def bytes_text(count: float) -> str:
    """1234567 -> '1.2 MB'."""
    power = 0
    while count >= 1000 and power < len(UNITS) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.1f} {UNITS[power]}" if power else f"{count:.0f} B"


def render(report: Report) -> str:
    """One report as aligned 'name: value' lines; an evaluation as its table."""
    head = f"{report.stage}: {report.status} in {report.seconds:.2f} s"
    if report.stage == "evaluate":
        return "\n".join([head, *_quality(report.facts)])
    lines = [head]
    facts = dict(_flat(report.facts))
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        if name in ("neighbors", "histograms"):
            lines += [f"  query {i}: " + " ".join(_pairs(entry)) for i, entry in enumerate(value[:LISTED_QUERIES])]
            if len(value) > LISTED_QUERIES:
                lines.append(f"  ... {len(value) - LISTED_QUERIES} more queries: use --output or --json")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"  {name}:")
            lines += ["    " + ", ".join(f"{k}={v}" for k, v in entry.items()) for entry in value]
        elif value is not None and value != []:
            lines.append(f"  {name:<{width}}  {_value(name, value)}")
    return "\n".join(lines)


def _flat(facts: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Facts with nested ones under dotted names."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _pairs(entry: dict[str, Any]) -> Iterator[str]:
    """'row(distance)' or, with ids, 'id(distance)' of the first neighbours; of a histogram 'distance:count'."""
    if "counts" in entry:
        pairs = [f"{distance}:{count}" for distance, count in enumerate(entry["counts"]) if count]
    else:
        names = zip(entry.get("ids", entry["rows"]), entry["distances"], strict=True)
        pairs = [f"{name}({distance:.6g})" for name, distance in names]
    yield from pairs[:LISTED_NEIGHBOURS]
    if len(pairs) > LISTED_NEIGHBOURS:
        yield f"... {len(pairs) - LISTED_NEIGHBOURS} more"


def _value(name: str, value: Any) -> str:
    if name.startswith("bytes") or name.endswith("bytes"):
        return f"{bytes_text(value)}"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        shown = [_value("", item) for item in value[:LISTED]]
        return ", ".join(shown + [f"... {len(value) - LISTED} more"] * (len(value) > LISTED))
    return str(value)


def _quality(facts: dict[str, Any]) -> list[str]:
    """The metrics of an evaluation."""
    recalls = dict(zip(facts["ks"], facts["recall"], strict=True))
    shown = [k for k in recalls if k in (100, 1_000, 10_000, 100_000, 1_000_000) and k < facts["rows"]]
    lines = [
        f"  {facts['method']}, {facts['bits']} bits, {facts['rows']:,} rows, {facts['queries']:,} queries, "
        f"truth = nearest {facts['truth_k']:,}",
        f"  mAP             {facts['map']:.4f}",
        f"  precision@100   {facts['precision_at_100']:.4f}",
        f"  pooled PR area  {facts['pr_area']:.4f}",
    ]
    return lines + [f"  {'recall@' + format(k, ','):<15} {recalls[k]:.4f}" for k in shown]


def render_run(name: str, reports: Sequence[tuple[str, Report]], dashboard: str | None) -> str:
    """A whole pipeline: stages with rates, quality, sizes, places, and the commands to go on with."""
    lines = [f"{name}: {_outcome(reports)}", ""]
    for label, report in reports:
        lines.append(f"  {label:<12} {LABELS.get(report.stage, report.stage):<24} {_stage_line(report)}")
    by_stage = {report.stage: report.facts for _, report in reports}
    measured = by_stage.get("evaluate") or by_stage.get("quality", {})
    if "map" in measured:
        lines += ["", *_quality(measured)]
    if "compare" in by_stage:
        lines += ["", f"  {by_stage['compare']['result']}"]
    if "encode" in by_stage:
        facts = by_stage["encode"]
        ratio = facts["bytes_in"] / max(1, facts["bytes_out"])
        lines += [
            "",
            f"  {bytes_text(facts['bytes_in'])} of vectors -> {bytes_text(facts['bytes_out'])} of codes "
            f"({ratio:.0f} times smaller)",
        ]
    first = next((report.facts["corpus"] for _, report in reports if "corpus" in report.facts), None)
    lines += ["", *_places(by_stage, first)]
    if dashboard:
        lines.append(f"  dashboard    {dashboard} (while the cluster runs)")
    return "\n".join([*lines, *_next_commands(by_stage)])


def _outcome(reports: Sequence[tuple[str, Report]]) -> str:
    seconds = sum(report.seconds for _, report in reports)
    if all(report.status == "nothing to do" for _, report in reports):
        return f"nothing to do, everything was there already ({seconds:.1f} s)"
    return f"done in {seconds:.1f} s"


def _stage_line(report: Report) -> str:
    why = f": {report.facts['why']}" if "why" in report.facts else ""
    if report.status == "nothing to do":
        return f"nothing to do{why}"
    facts, seconds = report.facts, max(report.seconds, 1e-9)
    if report.stage in RATED:
        rows = facts[RATED[report.stage]]
        return f"{rows:>11,} rows in {report.seconds:6.1f} s   {rows / seconds:>11,.0f} rows/s"
    if report.stage in ("truth", "search"):
        pairs = facts["queries"] * facts["rows"] / seconds
        return f"{facts['queries']:>11,} queries in {report.seconds:3.1f} s   {pairs / 1e6:>8,.0f} M pairs/s"
    if report.stage in ("evaluate", "quality"):
        return f"{facts['queries']:>11,} queries in {report.seconds:3.1f} s"
    return f"{report.seconds:.1f} s{why}"


def _places(by_stage: dict[str, dict[str, Any]], corpus: str | None) -> list[str]:
    """Where the results lie; of several corpora the first, as the others hold queries."""
    places = {
        "corpus": corpus,
        "model": by_stage.get("train", by_stage.get("model", {})).get("model"),
        "index": by_stage.get("encode", {}).get("index"),
        "neighbours": by_stage.get("search", {}).get("output"),
        "truth": by_stage.get("truth", {}).get("output"),
        "comparison": by_stage.get("compare", {}).get("report"),
    }
    return [f"  {name:<12} {_near(place)}" for name, place in places.items() if place]


def _near(place: str) -> str:
    """A path as seen from the working folder, when it lies below it."""
    relative = "" if "://" in place else os.path.relpath(place)
    return place if not relative or relative.startswith("..") else relative


def _command() -> str:
    """How the reader can call this program: by its name, or by its path where that is not on the PATH."""
    program = sys.argv[0]
    return _near(os.path.abspath(program)) if Path(program).name == "och" and not shutil.which("och") else "och"


def _next_commands(by_stage: dict[str, dict[str, Any]]) -> list[str]:
    index = by_stage.get("encode", {}).get("index")
    if not index:
        return []
    och, quoted = shlex.quote(_command()), shlex.quote(_near(index))
    queries = _near(by_stage.get("search", {}).get("source") or "QUERIES.npy")
    return [
        "",
        "go on with",
        f"  {och} search {quoted} {shlex.quote(queries)} -k 10    # neighbours of your own queries",
        f"  {och} inspect {quoted}    # what is in it",
        f"  {och} verify {quoted}    # every byte checked",
    ]


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


def render_health(report: Report) -> str:
    """Verdict, what, found, a line for each check; below it what to change."""
    checks = report.facts["checks"]
    width = max(len(check["what"]) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"  {check['verdict']:<4}  {check['what']:<{width}}  {check['found']}")
        if check["change"]:
            lines.append(f"  {'':<4}  {'':<{width}}  -> {check['change']}")
    bad = sum(check["verdict"] == "bad" for check in checks)
    end = "all is fit for a job" if not bad else f"{bad} of {len(checks)} checks failed; change what is said there"
    return "\n".join([f"doctor: {end}", *lines])
