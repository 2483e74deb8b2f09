"""Small pictures side by side: training time per code length, and what the bits are like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from och_dist.report.figures import Picture, group
from och_dist.report.results import Figure, Results, Series
from och_dist.report.svg import Plot, Scale, drawing, element, label, line, nice_ticks, point, x_axis
from och_dist.report.tables import balance
from och_dist.report.words import joined

WIDTH, LEFT, RIGHT, TOP = 300.0, 92.0, 288.0, 8.0
BAR_ROW, BIT_ROW, BIT_STEP = 17.0, 21.0, 5.0
VALUE_ROOM = 44.0
DIM = (0.45, 0.7, 1.0)


def coded(results: Results) -> list[Series]:
    """Series with codes of their own: another ranking of the same codes adds nothing here."""
    return [series for series in results.series if series.ranking == "hamming"]


def _solve(cell: dict[str, Any]) -> float:
    return float(cell["solve_cpu_seconds"])


def _statistics(cell: dict[str, Any]) -> float:
    return float(cell["statistics_cpu_seconds"])


def training_times(results: Results) -> list[Picture]:
    """Bars per code length on one scale: statistics first, the solver after them."""
    rows = coded(results)
    spent = {
        (series, bits): (statistics, solver)
        for series in rows
        for bits in results.bits
        if (statistics := results.fact(series, bits, _statistics)) and (solver := results.fact(series, bits, _solve))
    }
    longest = max((a.mean + b.mean for a, b in spent.values()), default=1.0)
    return [_time_bars(bits, rows, spent, longest) for bits in results.bits]


def _time_bars(
    bits: int, rows: Sequence[Series], spent: dict[tuple[Series, int], tuple[Figure, Figure]], longest: float
) -> Picture:
    bottom = TOP + BAR_ROW * len(rows)
    scale = Scale(0, longest, LEFT, RIGHT - VALUE_ROOM)
    parts = []
    for i, series in enumerate(rows):
        middle = TOP + (i + 0.5) * BAR_ROW
        name = label(LEFT - 8, middle, series.label, anchor="end", class_="name")
        figures = spent.get((series, bits))
        if figures is None:
            parts.append(group(series, name, label(LEFT, middle, "refused", class_="tick")))
            continue
        total, bars, start = sum(figure.mean for figure in figures), [], 0.0
        for part, figure in zip(("statistics", "solve"), figures, strict=True):
            left, right = scale(start), scale(start + figure.mean)
            told = element("title", escape(f"{series.label}, {part}: {figure.mean:.4f} s"))
            bars.append(
                element("rect", told, x=left, y=middle - 5, width=max(0.4, right - left), height=10.0,
                        class_=f"bar {part}", data_series=series.slug, data_bits=bits, data_key=part,
                        data_y=repr(figure.mean))
            )  # fmt: skip
            start += figure.mean
        value = label(scale(total) + 5, middle, _seconds(total), class_="tick")
        parts.append(group(series, name, *bars, value))
    parts.append(line(LEFT, TOP, LEFT, bottom, "base"))
    slowest = max(
        (s for s in rows if (s, bits) in spent), key=lambda s: sum(f.mean for f in spent[s, bits]), default=None
    )
    description = f"CPU seconds of training at {bits} bits" + (f"; {slowest.label} takes longest." if slowest else ".")
    svg = drawing(f"time-{bits}", WIDTH, bottom + 8, *parts, title=f"Training at {bits} bits", description=description)
    return Picture("", f"{bits} bits", "", svg)


def _seconds(value: float) -> str:
    if value < 0.1:
        return f"{1000 * value:.0f} ms" if value >= 0.01 else f"{1000 * value:.1f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def bit_pictures(results: Results) -> list[Picture]:
    """What the bits are like, three thin rows per method for its code lengths."""
    entropies = [f.mean for s in coded(results) for r in results.bits if (f := results.fact(s, r, _entropy))]
    correlations = [f.mean for s in coded(results) for r in results.bits if (f := results.fact(s, r, _correlation))]
    low = min(entropies, default=0.0)
    return [
        _bit_panel(results, "balance", "Share of ones", "from the least to the greatest bit, dot at the median",
                   nice_ticks(0, 1, 4), 0.5, balance),
        _bit_panel(results, "correlation", "Correlation", "mean over pairs of bits, absolute",
                   nice_ticks(0, max(correlations, default=1.0), 3), 0.0, _one(_correlation)),
        _bit_panel(results, "entropy", "Entropy", "mean over the bits", nice_ticks(low, 1, 3), 1.0, _one(_entropy)),
    ]  # fmt: skip


def _entropy(cell: dict[str, Any]) -> float:
    return float(cell["bit_entropy"])


def _correlation(cell: dict[str, Any]) -> float:
    return float(cell["bit_correlation"])


Read = Callable[[Results, Series, int], tuple[Figure, Figure, Figure] | None]


def _one(read: Callable[[dict[str, Any]], float]) -> Read:
    """A single figure as a range without width."""

    def found(results: Results, series: Series, bits: int) -> tuple[Figure, Figure, Figure] | None:
        figure = results.fact(series, bits, read)
        return (figure, figure, figure) if figure else None

    return found


def _bit_panel(
    results: Results, name: str, title: str, caption: str, ticks: Sequence[float], ideal: float, read: Read
) -> Picture:
    rows = coded(results)
    bottom = TOP + BIT_ROW * len(rows)
    plot = Plot(Scale(ticks[0], ticks[-1], LEFT, RIGHT), Scale(0, 1, bottom, TOP))
    place = plot.x(ideal)
    parts = [x_axis(plot, ticks, "", grid=True), line(place, TOP, place, bottom + 4, "ideal")]
    for i, series in enumerate(rows):
        middle = TOP + (i + 0.5) * BIT_ROW
        marks = [label(LEFT - 8, middle, series.label, anchor="end", class_="name")]
        for j, bits in enumerate(results.bits):
            found = read(results, series, bits)
            if found:
                y = middle + (j - (len(results.bits) - 1) / 2) * BIT_STEP
                marks.append(_range(plot, series, bits, y, name, found, DIM[min(j, 2) - min(len(results.bits), 3)]))
        parts.append(group(series, *marks))
    description = f"{title}, {caption}, per method at {joined(map(str, results.bits))} bits; ideal {ideal:g}."
    svg = drawing(f"bits-{name}", WIDTH, bottom + 24, *parts, title=title, description=description)
    return Picture("", title, f"{caption}; ideal {ideal:g}", svg)


def _range(
    plot: Plot, series: Series, bits: int, y: float, key: str, found: tuple[Figure, Figure, Figure], strength: float
) -> str:
    low, middle, high = (figure.mean for figure in found)
    told = f"{series.label}, {bits} bits: {middle:.4f}" + (f" ({low:.4f} to {high:.4f})" if high > low else "")
    data = {"data_series": series.slug, "data_bits": bits, "data_key": key, "data_y": middle}
    if high > low:
        data |= {"data_low": low, "data_high": high}
    rule = [line(plot.x(low), y, plot.x(high), y, "range")] if high > low else []
    return element("g", *rule, point(plot.x(middle), y, "dot", told, **data), opacity=strength)
