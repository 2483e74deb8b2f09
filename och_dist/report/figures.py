"""The figures of a comparison, made with Bokeh from its results: every mark tells its value when pointed at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh import models
from bokeh.layouts import column
from bokeh.plotting import figure
from bokeh.themes import Theme
from scipy.optimize import isotonic_regression

from och_dist.report.results import METRICS, OURS, Figure, Results, Series
from och_dist.report.sentences import joined
from och_dist.report.tables import sweep_bits, sweep_map, sweep_seconds

# Name -> colour on light and on dark ground. The style sheet has them as variables.
COLOURS = {
    "paper": ("#fbfaf7", "#131518"),
    "card": ("#ffffff", "#1a1d21"),
    "ink": ("#1c2024", "#e9e7e2"),
    "soft": ("#5b6067", "#a5a9ae"),
    "hair": ("#e4e1da", "#2c3036"),
    "rule": ("#b9b5ac", "#565b62"),
    "accent": ("#b93f0a", "#ff9460"),
    "wash": ("#f6e6dc", "#3a2a21"),
    "lsh": ("#6f6a64", "#aaa49c"),
    "agh": ("#4f678c", "#8fa9d3"),
    "isohash": ("#2f7370", "#76b8b2"),
    "sph": ("#79548a", "#bd9bcd"),
    "sgh": ("#4f7338", "#97bd80"),
    "itq": ("#84651f", "#cfae63"),
    "oeh": ("#93505e", "#d899a5"),
    "other": ("#676c72", "#9ba1a8"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
ACCENT, OTHER, RULE = LIGHT["accent"], LIGHT["other"], LIGHT["rule"]
SHAPES = {"agh": "triangle", "isohash": "diamond", "sph": "hex", "sgh": "inverted_triangle", "itq": "plus"}
SHAPES |= {"och": "circle", "lsh": "square", "oeh": "square"}
FONT = '-apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", "DejaVu Sans", sans-serif'


def _text(ink: str, prefix: str = "") -> dict[str, Any]:
    font = {"font": FONT, "font_size": "12px", "font_style": "normal", "color": ink}
    return {f"{prefix}text_{name}": value for name, value in font.items()}


THEME = Theme(
    json={
        "attrs": {
            "Plot": {
                "background_fill_color": None,
                "border_fill_color": None,
                "outline_line_color": None,
                "sizing_mode": "stretch_width",
                "toolbar_location": "above",
            },
            "Toolbar": {"logo": None, "autohide": True},
            "Axis": {
                **_text(LIGHT["soft"], "major_label_"),
                **_text(LIGHT["ink"], "axis_label_"),
                "axis_line_color": None,
                "major_tick_line_color": None,
                "minor_tick_line_color": None,
            },
            "Grid": {"grid_line_color": LIGHT["hair"]},
            "Title": _text(LIGHT["ink"]),
            "Text": {"text_font": {"value": FONT}, "text_font_size": {"value": "12px"}},
        }
    }
)
HEIGHT, TOP, BOTTOM, LEFT = 380, 40, 52, 48  # of a plot of lines and its borders, in pixels
GUTTER = 0.36  # share of the width for names at the right end of lines
NAME_ROOM, VALUE_ROOM = 15, 22  # upright, of a name at the end of a line, and of a value above a point
NAMES_WIDTH = 116  # of the names on the left of rows
BAR_ROW, BIT_ROW, BIT_STEP = 20, 26, 6
STRENGTHS = {1: (1.0,), 2: (0.7, 1.0), 3: (0.45, 0.7, 1.0)}  # of the code lengths; of more, the last are alike


@dataclass(frozen=True)
class Picture:
    """A figure with the words around it, and, for those who do not see it, what it shows."""

    number: str
    title: str
    caption: str
    name: str
    description: str
    plot: models.LayoutDOM
    key: tuple[tuple[Series, str], ...] = ()  # methods that can be hidden, with their values
    key_title: str = ""


def colour(series: Series) -> str:
    return ACCENT if series.method in ("och", "och-paper") else LIGHT.get(series.method, OTHER)


def with_spread(found: Figure) -> str:
    return f"{found.mean:.4f}" + ("" if found.std is None else f" ± {found.std:.4f}")


def short(value: float) -> str:
    """3, 1,000, 10k."""
    return f"{value / 1000:,g}k" if value >= 10_000 else f"{value:,g}"


def spaced(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places nearest to the ``wanted`` ones (in the same order) that are ``gap`` apart and within ``low..high``.

    Least squares: after taking i * gap off the i-th, the places must not fall.
    """
    if not wanted:
        return []
    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(order))
    level = isotonic_regression(np.asarray(wanted, float)[order] - steps).x
    places = np.empty(len(order))
    places[order] = np.clip(level, low, max(low, high - steps[-1])) + steps
    return [float(place) for place in places]


def _columns(names: str, rows: Iterable[tuple[Any, ...]]) -> models.ColumnDataSource:
    listed = list(rows)
    return models.ColumnDataSource({name: [row[i] for row in listed] for i, name in enumerate(names.split())})


def _telling(plot: figure, marks: models.GlyphRenderer) -> None:
    """The marks, whose source has a name and a text, tell these when pointed at."""
    plot.add_tools(models.HoverTool(renderers=[marks], tooltips="<b>@name</b><br>@told", show_arrow=False))


# Lines over something, with values on the left and zoom


def _plot(
    title: str,
    x: models.Range1d,
    y: tuple[float, float],
    ticks: Sequence[float],
    height: int = HEIGHT,
    *,
    label: str = "",
    log: bool = True,
    right: int = 12,
    bottom: int = BOTTOM,
) -> figure:
    plot = figure(
        title=title,
        x_range=x,
        y_range=models.Range1d(*y),
        x_axis_type="log" if log else "linear",
        x_axis_label=label,
        height=height,
        min_border_left=LEFT,
        min_border_right=right,
        min_border_top=TOP,
        min_border_bottom=bottom,
        tools="box_zoom,pan,wheel_zoom,reset",
        active_drag="box_zoom",
    )
    plot.title.offset = -LEFT
    plot.xgrid.visible = False
    plot.xaxis.axis_line_color = plot.xaxis.major_tick_line_color = RULE
    plot.xaxis.major_tick_in, plot.xaxis.major_tick_out = 0, 4
    plot.xaxis.ticker = models.FixedTicker(ticks=list(ticks))
    plot.xaxis.major_label_overrides = {tick: short(tick) for tick in ticks}
    return plot


def _line(plot: figure, series: Series, values: Sequence[tuple[int, Figure]]) -> None:
    """The line of a method, with bars for the spread over the splits."""
    look = {"color": colour(series), "name": series.slug}
    width = 3 if series.role == "ours" else 1.6
    dash = [4, 3] if series.role == "apart" else "solid"
    means = _columns("x y", [(at, f.mean) for at, f in values])
    plot.line("x", "y", source=means, line_width=width, line_dash=dash, **look)
    spread = [(at, f.mean - f.std, f.mean + f.std) for at, f in values if f.std]
    bars = _columns("x low high", spread)
    plot.segment("x", "low", "x", "high", source=bars, **look)
    for end in ("low", "high"):
        plot.scatter("x", end, source=bars, marker="dash", size=7, **look)


def _points(plot: figure, points: Iterable[tuple[Series, float, float, str, bool]]) -> None:
    """All points of a plot, each with a text that it tells when pointed at; those that are not ``marked`` are seen
    only then. The filter leaves out the points of hidden methods."""
    rows = [(x, y, s.slug, s.label, told, float(marked), colour(s), *_mark(s)) for s, x, y, told, marked in points]
    drawn = plot.scatter(
        "x",
        "y",
        source=_columns("x y series name told alpha ink shape size", rows),
        marker="shape",
        size="size",
        fill_color="ink",
        line_color=LIGHT["paper"],
        alpha="alpha",
        hover_alpha=1.0,
        hit_dilation=1.4,
        view=models.CDSView(filter=models.BooleanFilter([True] * len(rows))),
        name="points",
    )
    _telling(plot, drawn)


def _mark(series: Series) -> tuple[str, int]:
    return ("circle", 6) if series.role == "apart" else (SHAPES.get(series.method, "circle"), 8)


def back_to_front(results: Results) -> list[Series]:
    """What is drawn later lies on top: OCH last."""
    return sorted(results.series, key=lambda series: ("apart", "baseline", "ours").index(series.role))


def map_over_bits(results: Results) -> Picture:
    """Fig. 3a: lines with error bars, named at their right end."""
    key = METRICS[0].key
    found = {s: [(r, f) for r in results.bits if (f := results.figure(s, r, key))] for s in back_to_front(results)}
    found = {series: values for series, values in found.items() if values}
    top = 1.08 * max((f.mean + (f.std or 0) for values in found.values() for _, f in values), default=1.0) or 1.0
    first, last = results.bits[0] * 0.9, results.bits[-1]
    width = (last / first) ** (1 / (1 - GUTTER))  # of the frame, as a ratio
    plot = _plot("mAP", models.Range1d(first, first * width), (0, top), results.bits, label="bits per code", right=0)
    pixel = top / (HEIGHT - TOP - BOTTOM)
    ends = [values[-1][1].mean for values in found.values()]
    places = spaced(ends, NAME_ROOM * pixel, 4 * pixel, top - 6 * pixel)
    points = []
    for (series, values), place in zip(found.items(), places, strict=True):
        at, end = values[-1]
        beside = last * width**0.04
        style = "bold" if series.role == "ours" else "normal"
        look = {"color": colour(series), "name": series.slug}
        plot.segment([at], [end.mean], [beside], [place], line_width=0.7, alpha=0.55, **look)
        plot.text([beside], [place], [series.label], x_offset=3, text_baseline="middle", text_font_style=style, **look)
        _line(plot, series, values)
        points += [(series, bits, f.mean, f"{bits} bits: mAP {with_spread(f)}", True) for bits, f in values]
    _points(plot, points)
    caption = "Mean average precision over the length of the code"
    caption += ", with the standard deviation over the splits." if results.repeats > 1 else "."
    description = f"mAP over {joined(map(str, results.bits))} bits; the values are in Table 1a."
    names = tuple((series, "") for series in results.series if series in found)
    title = "Quality over code length"
    return Picture("3a", title, caption + _dashed(results), "map-over-bits", description, plot, names)


def _dashed(results: Results) -> str:
    return " Dashed: outside the baselines." if results.apart else ""


def recall_curves(results: Results) -> Picture:
    """Fig. 3b: all curves end in 1, so a key in the empty corner ranks them where they differ."""
    bits, truth_k = results.figure_bits, results.protocol["truth_k"]
    curves = {s: c for s in back_to_front(results) if (c := results.curve(s, bits, "recall"))}
    ranks = [k for k, _ in next(iter(curves.values()), [(1, 0.0), (10, 1.0)])]
    decades = [10**e for e in range(len(str(ranks[-1]))) if 10**e <= ranks[-1]]
    x = models.Range1d(ranks[0] * 0.75, max(ranks[-1], 2) * 1.3)
    plot = _plot("recall", x, (0, 1.02), decades, label="K, rows looked at")
    points = []
    for series, curve in curves.items():
        _line(plot, series, [(k, Figure(value, None, 1)) for k, value in curve])
        points += [(series, k, value, f"recall@{k:,}: {value:.4f}", series.role == "ours") for k, value in curve]
    _points(plot, points)
    chosen = min(ranks, key=lambda k: abs(k / truth_k - 1))
    reached = {series: dict(curve)[chosen] for series, curve in curves.items()}
    ranked = sorted(reached, key=lambda series: -reached[series])
    description = f"Recall over the number of rows looked at, at {bits} bits; best first at {chosen}: "
    description += ", ".join(series.label for series in ranked)
    caption = f"Share of the {truth_k:,} true neighbours among the first K rows, at {bits} bits." + _dashed(results)
    key = tuple((series, f"{reached[series]:.3f}") for series in ranked)
    return Picture("3b", "Neighbours found", caption, "recall", description, plot, key, f"recall@{chosen:,}")


def over_centres(results: Results) -> Picture | None:
    """Fig. 4a."""
    values = results.sweep("centres", "n_centres", sweep_map)
    if not values:
        return None
    bits = sweep_bits(results, "centres")
    first, last = values[0][0], values[-1][0]
    margin = 0.06 * (last - first) or 1
    x = models.Range1d(first - margin, last + margin)
    plot = _sweep(results, values, bits, x, HEIGHT, label="k-means centres", log=False)
    best = max(values, key=lambda pair: pair[1].mean)
    description = f"mAP of OCH at {bits} bits over the number of centres; best {best[1].mean:.4f} at {best[0]}."
    caption = f"mAP of OCH at {bits} bits over the number of k-means centres, all else unchanged."
    return Picture("4a", "How many centres", caption, "centres", description, plot)


def over_relations(results: Results) -> Picture | None:
    """Fig. 4b: quality and time over the relations of a step, one above the other."""
    values = results.sweep("relations", "n_anchors", sweep_map)
    times = results.sweep("relations", "n_anchors", sweep_seconds)
    if not values:
        return None
    bits = sweep_bits(results, "relations")
    x = models.Range1d(values[0][0] / 1.2, values[-1][0] * 1.2)
    upper = _sweep(results, values, bits, x, HEIGHT // 2, bottom=8)
    upper.xaxis.visible = False
    lower = _sweep(results, times, None, x, HEIGHT // 2, label="anchors per step")
    ends = [f"{values[i][0]} (mAP {values[i][1].mean:.4f}, {times[i][1].mean:.2f} s)" for i in (0, -1)]
    description = f"mAP and CPU seconds of OCH at {bits} bits over the anchors of a step, from {' to '.join(ends)}."
    caption = f"mAP and training time of OCH at {bits} bits: each anchor adds the same number of relations to a step."
    both = column(upper, lower, sizing_mode="stretch_width", spacing=0)
    return Picture("4b", "How many relations", caption, "relations", description, both)


def _sweep(
    results: Results,
    values: Sequence[tuple[int, Figure]],
    bits: int | None,
    x: models.Range1d,
    height: int,
    **more: Any,
) -> figure:
    """One line of OCH with its values: with ``bits``, of mAP, and the best baseline of that length as a reference;
    else of CPU seconds."""
    reference = results.best_baseline(bits, METRICS[0]) if bits else None
    against = results.figure(reference, bits, METRICS[0].key) if reference and bits else None
    means = [f.mean + sign * (f.std or 0) for _, f in values for sign in (-1, 1)] + ([against.mean] if against else [])
    low, high = min(means) if bits else 0.0, max(means)
    span = (high - low or high or 1.0) / (height - TOP - BOTTOM)
    y = low - bool(bits) * VALUE_ROOM * span, high + VALUE_ROOM * 1.2 * span
    plot = _plot("mAP" if bits else "CPU seconds", x, y, [at for at, _ in values], height, **more)
    if height < HEIGHT:
        plot.yaxis.ticker = models.BasicTicker(desired_num_ticks=3)
    if reference and against:
        ink = colour(reference)
        name = f"best baseline, {reference.label} {against.mean:.3f}"
        plot.add_layout(models.Span(location=against.mean, dimension="width", line_color=ink, line_dash=[5, 3]))
        plot.text([values[-1][0]], [against.mean], [name], y_offset=-5, color=ink, text_align="right")
    _line(plot, OURS, values)
    form = "{:,}: mAP {}" if bits else "{:,}: {} s"
    _points(plot, [(OURS, at, f.mean, form.format(at, with_spread(f)), True) for at, f in values])
    tops = _columns("x y text", [(at, f.mean + (f.std or 0), f"{f.mean:.{3 if bits else 2}f}") for at, f in values])
    plot.text(source=tops, y_offset=-6, color=ACCENT, text_align="center", text_font_style="bold")
    return plot


# A row for each method, named on the left


def coded(results: Results) -> list[Series]:
    """Series with codes of their own: another ranking of the same codes adds nothing here."""
    return [series for series in results.series if series.ranking == "hamming"]


def _ink(series: Series) -> str:
    return ACCENT if series.role == "ours" else OTHER


def _rows(rows: Sequence[Series], x: tuple[float, float], row: int, below: int) -> figure:
    """A plot whose i-th row is at the height i, from the top."""
    plot = figure(
        x_range=models.Range1d(*x),
        y_range=models.Range1d(len(rows) - 0.5, -0.5),
        height=row * len(rows) + 8 + below,
        min_border_left=NAMES_WIDTH,
        min_border_right=8,
        min_border_top=8,
        min_border_bottom=below,
        tools="",
        toolbar_location=None,
    )
    plot.ygrid.visible = plot.yaxis.visible = False
    names = [(x[0], i, s.label, _ink(s), "bold" if s.role == "ours" else "normal") for i, s in enumerate(rows)]
    source = _columns("x y text ink style", names)
    look = {"color": "ink", "text_font_style": "style"}
    plot.text(source=source, x_offset=-8, text_align="right", text_baseline="middle", level="annotation", **look)
    return plot


def training_times(results: Results) -> list[Picture]:
    """Bars per code length on one scale: statistics first, the solver after them."""
    rows = coded(results)
    spent = {
        (series, bits): (statistics, solver)
        for series in rows
        for bits in results.bits
        if (statistics := results.fact(series, bits, "statistics_cpu_seconds"))
        and (solver := results.fact(series, bits, "solve_cpu_seconds"))
    }
    longest = max((a.mean + b.mean for a, b in spent.values()), default=1.0)
    return [_time_bars(bits, rows, spent, longest) for bits in results.bits]


def _time_bars(
    bits: int, rows: Sequence[Series], spent: dict[tuple[Series, int], tuple[Figure, Figure]], longest: float
) -> Picture:
    plot = _rows(rows, (0, 1.3 * longest), BAR_ROW, 8)  # with room for values
    plot.xgrid.visible = plot.xaxis.visible = False
    bars: dict[str, list[tuple[Any, ...]]] = {"statistics": [], "solver": []}
    ends = [(0.0, i, "refused") for i in range(len(rows))]
    slowest = (0.0, "")
    for i, series in enumerate(rows):
        start = 0.0
        for part, found in zip(bars, spent.get((series, bits), ()), strict=False):
            told = f"{part}: {with_spread(found)} s"
            bars[part].append((i, start, start + found.mean, _ink(series), series.label, told))
            start += found.mean
            ends[i] = (start, i, _seconds(start))
        slowest = max(slowest, (start, series.label)) if start else slowest
    for (part, some), alpha in zip(bars.items(), (0.42, 1.0), strict=True):
        source = _columns("y left right ink name told", some)
        look = {"fill_color": "ink", "fill_alpha": alpha, "line_color": None, "name": part}
        _telling(plot, plot.hbar("y", left="left", right="right", height=0.58, source=source, **look))
    plot.text(source=_columns("x y text", ends), x_offset=6, color=LIGHT["soft"], text_baseline="middle")
    plot.add_layout(models.Span(location=0, dimension="height", line_color=RULE))
    description = f"CPU seconds of training at {bits} bits" + (f"; {slowest[1]} takes longest." if slowest[1] else ".")
    return Picture("", f"{bits} bits", "", f"time-{bits}", description, plot)


def _seconds(value: float) -> str:
    if value < 0.1:
        return f"{1000 * value:.0f} ms" if value >= 0.01 else f"{1000 * value:.1f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def bit_pictures(results: Results) -> list[Picture]:
    """What the bits are like, thin rows per method for its code lengths."""
    caption = "from the least to the greatest bit, dot at the median"
    return [
        _bit_panel(results, "balance", "Share of ones", caption, 0.5, (0, 1)),
        _bit_panel(results, "correlation", "Correlation", "mean over pairs of bits, absolute", 0.0, (0, 0)),
        _bit_panel(results, "entropy", "Entropy", "mean over the bits", 1.0, (1, 1)),
    ]


def _bit_panel(
    results: Results, name: str, title: str, caption: str, ideal: float, least: tuple[float, float]
) -> Picture:
    """The horizontal axis holds ``least`` and all values."""
    rows, count = coded(results), len(results.bits)
    strengths = STRENGTHS[min(count, 3)]
    marks, ends = [], list(least)
    for i, series in enumerate(rows):
        for j, bits in enumerate(results.bits):
            parts = (0, 1, 2) if name == "balance" else (None, None, None)
            found = [f.mean for part in parts if (f := results.fact(series, bits, f"bit_{name}", part))]
            if found:
                low, middle, high = found
                told = f"{bits} bits: {middle:.4f}" + (f" ({low:.4f} to {high:.4f})" if high > low else "")
                y = i + (j - (count - 1) / 2) * BIT_STEP / BIT_ROW
                strength = strengths[min(j, len(strengths) - 1)]
                marks.append((middle, y, low, high, _ink(series), strength, series.label, told))
                ends += [low, high]
    margin = 0.05 * (max(ends) - min(ends) or 1.0)
    plot = _rows(rows, (min(ends) - margin, max(ends) + margin), BIT_ROW, 28)
    plot.xaxis.ticker = plot.xgrid.ticker = models.BasicTicker(desired_num_ticks=4)
    plot.add_layout(models.Span(location=ideal, dimension="height", line_color=RULE, line_dash=[3, 2]))
    source = _columns("x y low high ink alpha name told", marks)
    plot.segment("low", "y", "high", "y", source=source, color="ink", alpha="alpha", line_width=2)
    look = {"fill_color": "ink", "fill_alpha": "alpha", "line_color": None, "name": name}
    _telling(plot, plot.scatter("x", "y", source=source, size=6, **look))
    description = f"{title}, {caption}, per method at {joined(map(str, results.bits))} bits; ideal {ideal:g}."
    return Picture("", title, f"{caption}; ideal {ideal:g}", f"bits-{name}", description, plot)
