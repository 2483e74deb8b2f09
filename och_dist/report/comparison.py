"""``och compare``: the stage, and what people look at: tables, a CSV file and a page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from och_dist.evaluate import compare
from och_dist.options import Option, Seed, checked
from och_dist.report.html import page
from och_dist.report.results import Results
from och_dist.report.tables import comma_separated, markdown
from och_dist.report.words import headline
from och_dist.stage import Context, Report
from och_dist.store import write_text


@checked
def compare_with_report(
    corpus: str,
    output: Annotated[str, Option("Where results, tables and report.html go.", flags="-o --output", metavar="DIR")],
    *,
    methods: Annotated[Sequence[str] | str, Option("Methods, such as och,itq,sph.", commas=True)] = "all",
    bits: Annotated[Sequence[int], Option("Code lengths.", at_least=1, commas=True)] = (32, 64, 128),
    repeats: Annotated[int, Option("Random splits.", at_least=1)] = 10,
    queries: Annotated[int, Option("Query rows of a split.")] = 2000,
    train_rows: Annotated[int, Option("Training rows of a split.")] = 10_000,
    truth_fraction: Annotated[float, Option("Share of rows that is relevant.", above=0, at_most=1)] = 0.02,
    truth_k: Annotated[int | None, Option("Relevant rows of a query, instead of a share.", at_least=1)] = None,
    sweeps: Annotated[bool, Option("Also vary OCH's centres and relations.")] = True,
    seed: Seed = 0,
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
    if path.exists() and path.read_bytes() == text.encode():
        return False
    write_text(path, text)
    return True
