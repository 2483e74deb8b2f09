"""The tables of a comparison as data, and as Markdown and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from och_dist.report.results import METRICS, Figure, Lead, Results, Series
from och_dist.report.sentences import caveats, headline, level, protocol_lines, verdicts, winners

ABOVE = "▲"


@dataclass(frozen=True)
class Entry:
    """One place of a table: its text, how far it spreads, whether it is the best, or above the best but apart."""

    text: str
    aside: str = ""
    best: bool = False
    above: bool = False


@dataclass(frozen=True)
class Table:
    """Lines of entries under column heads; ``apart`` are the lines below the rule."""

    number: str
    title: str
    note: str
    heads: tuple[str, ...]
    main: tuple[tuple[str, tuple[Entry, ...]], ...]
    apart: tuple[tuple[str, tuple[Entry, ...]], ...] = ()


def quality(figure: Figure | None, places: int = 4) -> Entry:
    """0.3460 ± 0.0021."""
    if figure is None:
        return Entry("–")
    return Entry(f"{figure.mean:.{places}f}", "" if figure.std is None else f"± {figure.std:.{places}f}")


def seconds(figure: Figure | None) -> Entry:
    """0.59 ± 0.02, with more digits of what is small."""
    mean = figure.mean if figure else 0
    return quality(figure, 1 if mean >= 10 else 2 if mean >= 0.1 else 4)


def tables(results: Results) -> list[Table]:
    """All tables, in order."""
    found = [quality_table(results, f"1{'abc'[i]}", m.key, m.name) for i, m in enumerate(METRICS)]
    found += [
        _cells_table(results, "2a", "Training: solver", "CPU seconds", "solve_cpu_seconds", seconds),
        _cells_table(
            results, "2b", "Training: statistics", "CPU seconds, k-means included", "statistics_cpu_seconds", seconds
        ),
        _cells_table(results, "3a", "Share of ones per bit", "median (least–greatest); ideal 0.5", "bit_balance"),
        _cells_table(results, "3b", "Correlation of bits", "mean over pairs, absolute; ideal 0", "bit_correlation"),
        _cells_table(results, "3c", "Entropy of a bit", "mean over the bits; ideal 1", "bit_entropy"),
    ]
    sweeps = [
        _sweep_table(results, "4a", "centres", "n_centres", "Number of centres"),
        _sweep_table(results, "4b", "relations", "n_anchors", "Anchors per step"),
    ]
    return found + [table for table in sweeps if table.main]


def _heads(results: Results) -> tuple[str, ...]:
    return tuple(f"{bits} bits" for bits in results.bits)


def quality_table(results: Results, number: str, key: str, name: str) -> Table:
    """A measure per method and code length; the best of baselines and OCH in bold."""
    best = {}
    for bits in results.bits:
        means = [figure.mean for series in results.main if (figure := results.figure(series, bits, key))]
        best[bits] = max(means, default=None)

    def entry(series: Series, bits: int) -> Entry:
        figure, limit = results.figure(series, bits, key), best[bits]
        if figure is None or limit is None:
            return quality(figure)
        if series.role == "apart":
            return replace(quality(figure), above=figure.mean > limit)
        return replace(quality(figure), best=figure.mean == limit)

    note = "best of baselines and OCH in bold"
    lines = [[(s.label, tuple(entry(s, r) for r in results.bits)) for s in g] for g in (results.main, results.apart)]
    if any(item.above for _, entries in lines[1] for item in entries):
        note += f"; {ABOVE} above it, though not one of them"
    return Table(number, name, note, _heads(results), tuple(lines[0]), tuple(lines[1]))


def _cells_table(
    results: Results, number: str, title: str, note: str, key: str, told: Callable[[Figure | None], Entry] = quality
) -> Table:
    """Something that belongs to the codes, not to how they are ranked."""

    def entry(series: Series, bits: int) -> Entry:
        return _balance(results, series, bits) if key == "bit_balance" else told(results.fact(series, bits, key))

    groups = ([s for s in group if s.ranking == "hamming"] for group in (results.main, results.apart))
    lines = [[(s.label, tuple(entry(s, r) for r in results.bits)) for s in group] for group in groups]
    return Table(number, title, note, _heads(results), tuple(lines[0]), tuple(lines[1]))


def _balance(results: Results, series: Series, bits: int) -> Entry:
    found = [f"{f.mean:.3f}" for part in range(3) if (f := results.fact(series, bits, "bit_balance", part))]
    return Entry(found[1], f"({found[0]}–{found[2]})") if found else Entry("–")


def sweep_map(cell: dict[str, Any]) -> float:
    return float(cell["rankings"]["hamming"]["map"])


def sweep_seconds(cell: dict[str, Any]) -> float:
    """CPU seconds of the whole training."""
    return float(cell["solve_cpu_seconds"] + cell["statistics_cpu_seconds"])


def sweep_bits(results: Results, variant: str) -> int | None:
    return next((cell["bits"] for cell in results.cells if cell["variant"] == variant), None)


def _sweep_table(results: Results, number: str, variant: str, param: str, title: str) -> Table:
    maps = results.sweep(variant, param, sweep_map)
    times = results.sweep(variant, param, sweep_seconds)
    lines = [
        (f"{value:,}", (quality(found), seconds(spent))) for (value, found), (_, spent) in zip(maps, times, strict=True)
    ]
    note = f"OCH at {sweep_bits(results, variant)} bits; all else as in Table 1"
    return Table(number, title, note, ("mAP", "CPU seconds"), tuple(lines))


def lead_tables(results: Results) -> list[Table]:
    """The lead of OCH over the best baseline, and what is left of it with half the bits; for those who look."""
    full, half = results.leads(), results.half_leads()
    found = [
        _lead_table("1d", "Lead of OCH", "over the best baseline, which is named", full, lambda m: f"{m.bits} bits"),
        _lead_table("1e", "Half the bits", "OCH against the best baseline at twice its length", half,
                    lambda m: f"{m.bits} vs {m.rival_bits}"),
    ]  # fmt: skip
    return [table for table in found if table.heads]


def _lead_table(number: str, title: str, note: str, leads: Sequence[Lead], head: Callable[[Lead], str]) -> Table:
    heads = tuple(dict.fromkeys(head(lead) for lead in leads))
    places = {(lead.metric, head(lead)): _lead_entry(lead) for lead in leads}
    rows = [(metric.name, tuple(places.get((metric, h), Entry("–")) for h in heads)) for metric in METRICS]
    return Table(number, title, note, heads, tuple(rows))


def _lead_entry(lead: Lead) -> Entry:
    sure = "" if lead.percent.std is None else f"± {lead.percent.std:.1f}, "
    return Entry(level(lead.percent), sure + lead.rival.label)


def markdown(results: Results) -> str:
    """tables.md."""
    parts = ["# Comparison of hashing methods", f"**{headline(results)}**"]
    parts.append("\n".join(f"- {name}: {value}" for name, value in protocol_lines(results)))
    found = tables(results)
    parts += [_markdown_table(table) for table in found if table.number.startswith("1")]
    parts.append("\n".join(f"- {line}" for line in [*verdicts(results), *winners(results)]))
    if results.refusals:
        parts.append("## Refused\n\n" + "\n".join(f"- {line}" for line in results.refusals))
    parts += [_markdown_table(table) for table in found if not table.number.startswith("1")]
    if results.notes:
        parts.append("## Notes of the methods\n\n" + "\n".join(f"- {note}" for note in results.notes))
    parts.append("## How to read this\n\n" + "\n".join(f"- {line}" for line in caveats(results)))
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    """A Markdown table has no second rule: a line of dashes stands for it."""

    def line(name: str, entries: tuple[Entry, ...]) -> str:
        return "| " + " | ".join([name, *(_marked(entry) for entry in entries)]) + " |"

    first = "" if table.heads[-1].endswith("bits") else table.title
    lines = [
        "| " + " | ".join([first, *table.heads]) + " |",
        "|---|" + "---:|" * len(table.heads),
        *(line(*row) for row in table.main),
    ]
    if table.apart:
        lines.append("| " + " | ".join(["—"] * (1 + len(table.heads))) + " |")
        lines += [line(*row) for row in table.apart]
    return f"## Table {table.number}: {table.title} ({table.note})\n\n" + "\n".join(lines)


def _marked(entry: Entry) -> str:
    text = f"**{entry.text}**" if entry.best else entry.text
    return " ".join(part for part in (text, entry.aside, ABOVE if entry.above else "") if part)


CELL_COLUMNS = ("method", "variant", "bits", "repeat", "params")
RANKING_COLUMNS = ("queries", "map", "map_group", "pr_area", "pr_area_full", "precision_at_100")
FACT_COLUMNS = ("statistics_cpu_seconds", "solve_cpu_seconds", "bit_correlation", "bit_entropy")
BALANCE_COLUMNS = ("bit_balance_min", "bit_balance_median", "bit_balance_max")


def comma_separated(results: Results) -> str:
    """results.csv: one line per cell and ranking; a refused cell has one line with its sentence."""
    out = io.StringIO()
    columns = [*CELL_COLUMNS, "ranking", *RANKING_COLUMNS, *FACT_COLUMNS, *BALANCE_COLUMNS, "refused"]
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    for cell in results.cells:
        common = {name: cell.get(name) for name in (*CELL_COLUMNS, *FACT_COLUMNS, "refused")}
        common["params"] = json.dumps(cell["params"], sort_keys=True)
        common |= dict(zip(BALANCE_COLUMNS, cell.get("bit_balance", []), strict=False))
        for name, ranking in (cell["rankings"] or {"": {}}).items():
            writer.writerow({**common, "ranking": name, **{key: ranking.get(key) for key in RANKING_COLUMNS}})
    return out.getvalue()
