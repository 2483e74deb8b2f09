"""Results as a JSON file that a later run can be compared with, and as Markdown for the documentation."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.suite.ground import SUITES
from benchmarks.suite.measure import Figure, Goal, Outcome
from och_dist.cluster import describe_machine

PEERS = ("faiss-cpu", "dask-ml")


def machine() -> dict[str, Any]:
    """Processor, memory and versions, without names of hosts or places."""
    about = describe_machine()
    del about["host"]
    about["versions"] |= {name: metadata.version(name) for name in PEERS}
    about["system"] = f"{platform.system()} {platform.machine()}"
    about["commit"] = _commit()
    return about


def _commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()


def to_json(suite: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "suite": suite,
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load": os.getloadavg()[0],
        "machine": machine(),
        "benchmarks": [outcome.to_json() for outcome in outcomes],
    }


def save(path: Path, body: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1))


def outcomes_of(path: Path) -> list[Outcome]:
    """The outcomes in a file of results."""
    found = []
    for entry in json.loads(path.read_text())["benchmarks"]:
        figures = {
            name: Figure(tuple(figure["values"]), figure["unit"]) for name, figure in entry.pop("figures").items()
        }
        goals = [Goal(**{name: value for name, value in goal.items() if name != "met"}) for goal in entry.pop("goals")]
        found.append(Outcome(figures=figures, goals=goals, **entry))
    return found


def judged(path: Path) -> bool:
    """Whether the goals in a file of results mean anything."""
    return bool(SUITES[json.loads(path.read_text())["suite"]].judged)


def merge(paths: Sequence[Path]) -> list[Outcome]:
    """The newest outcome of each benchmark in several files, given oldest first."""
    newest = {outcome.name: outcome for path in paths for outcome in outcomes_of(path)}
    return list(newest.values())


def table(outcomes: Sequence[Outcome], *, judged: bool) -> str:
    """The Markdown table of the documentation; goals are for the full sizes only."""
    lines = ["| benchmark | work | measured: median (least to most) | goal |", "|---|---|---|---|"]
    for outcome in outcomes:
        figures = "<br>".join(f"{name}: {figure}" for name, figure in outcome.figures.items())
        goals = "<br>".join(map(str, outcome.goals)) if judged else ""
        lines.append(f"| {outcome.name} | {outcome.work} | {figures} | {goals or 'reported'} |")
    notes = [f"- {outcome.name}: {note}" for outcome in outcomes for note in outcome.notes]
    return "\n".join([*lines, "", *notes])


def compared(outcomes: Sequence[Outcome], earlier: Sequence[Outcome]) -> str:
    """Medians beside those of an earlier run."""
    before = {outcome.name: outcome for outcome in earlier}
    lines = ["| benchmark | figure | earlier | now | now / earlier |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        known = before[outcome.name].figures if outcome.name in before else {}
        for name in outcome.figures.keys() & known.keys():
            now, then = outcome.figures[name], known[name]
            lines.append(f"| {outcome.name} | {name} | {then} | {now} | {now.median / then.median:.2f} |")
    return "\n".join(lines)
