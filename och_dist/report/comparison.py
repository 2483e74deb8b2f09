"""``och compare``: the stage, and what people look at: tables, a CSV file and a page."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from och_dist.evaluate import compare
from och_dist.report.html import page
from och_dist.report.results import Results
from och_dist.report.tables import comma_separated, markdown
from och_dist.report.words import headline
from och_dist.stage import Context, Report


def compare_with_report(
    corpus: str,
    output: str,
    *,
    methods: Sequence[str] | str = "all",
    bits: Sequence[int] = (32, 64, 128),
    repeats: int = 10,
    queries: int = 2000,
    train_rows: int = 10_000,
    truth_fraction: float = 0.02,
    truth_k: int | None = None,
    sweeps: bool = True,
    seed: int = 0,
    context: Context | None = None,
) -> Report:
    """Compare methods on random splits of ``corpus``; results.json, results.csv, tables.md and report.html go to the
    folder ``output``."""
    started = time.perf_counter()
    report = compare(
        corpus,
        output,
        methods=methods,
        bits=bits,
        repeats=repeats,
        queries=queries,
        train_rows=train_rows,
        truth_fraction=truth_fraction,
        truth_k=truth_k,
        sweeps=sweeps,
        seed=seed,
        context=context,
    )
    results = Results.load(report.facts["results"])
    written, changed = write_reports(results, Path(report.facts["results"]).parent)
    status = "done" if changed else report.status
    facts = {"result": headline(results), **report.facts, **written}
    return Report(report.stage, status, time.perf_counter() - started, facts)


def write_reports(results: Results, folder: Path) -> tuple[dict[str, str], bool]:
    """Write the reports beside the results; returns their paths and whether any is new or other than before.

    They are functions of the results alone.
    """
    contents = {
        "csv": ("results.csv", comma_separated(results)),
        "tables": ("tables.md", markdown(results)),
        "report": ("report.html", page(results)),
    }
    changed = [_replace(folder / name, text) for name, text in contents.values()]
    return {key: str(folder / name) for key, (name, _) in contents.items()}, any(changed)


def _replace(path: Path, text: str) -> bool:
    """Put ``text`` at ``path`` as a whole; False if it is there already."""
    data = text.encode()
    if path.exists() and path.read_bytes() == data:
        return False
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.write_bytes(data)
    os.replace(partial, path)
    return True
