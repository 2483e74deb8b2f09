"""A stage report or a whole run as plain text: short lines, numbers with units, what to do next."""

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
    for unit in UNITS:
        if count < 1000 or unit == UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


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
