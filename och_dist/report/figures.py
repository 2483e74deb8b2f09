"""The figures of a comparison, drawn from its results. Every mark carries the value it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from och_dist.report.results import METRICS, OURS, Figure, Results, Series
from och_dist.report.svg import (
    Plot,
    Scale,
    drawing,
    element,
    error_bar,
    label,
    line,
    nice_ticks,
    point,
    polyline,
    spaced,
    x_axis,
    y_axis,
)
from och_dist.report.tables import sweep_bits, sweep_map, sweep_seconds
from och_dist.report.words import joined, level

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 420.0, 320.0, 36.0, 30.0, 276.0
GUTTER = 106.0  # for labels at the right end of lines
LABEL_GAP = 14.0
SHAPES = {
    "och": "circle",
    "lsh": "square",
    "agh": "up",
    "isohash": "diamond",
    "sph": "hexagon",
    "sgh": "down",
    "itq": "plus",
    "oeh": "square",
}


@dataclass(frozen=True)
class Picture:
    """A drawing with the words around it."""

    number: str
    title: str
    caption: str
    svg: str


def group(series: Series, *parts: str) -> str:
    """The marks of a series, in its colour."""
    return element("g", *parts, class_=f"series {series.role} c-{series.method}", data_series=series.slug)


def shape(series: Series) -> str:
    return SHAPES.get(series.method, "dot") if series.role != "apart" else "dot"


def with_spread(figure: Figure, places: int = 4) -> str:
    return f"{figure.mean:.{places}f}" + ("" if figure.std is None else f" ± {figure.std:.{places}f}")


def back_to_front(results: Results) -> list[Series]:
    """What is drawn later lies on top: OCH last."""
    return [*results.apart, *results.baselines, *(s for s in results.main if s.role == "ours")]


def map_over_bits(results: Results) -> Picture:
    """Fig. 3a: lines with error bars, named at their right end."""
    key = METRICS[0].key
    found = {s: [(r, f) for r in results.bits if (f := results.figure(s, r, key))] for s in back_to_front(results)}
    found = {series: values for series, values in found.items() if values}
    top = max((f.mean + (f.std or 0) for values in found.values() for _, f in values), default=1.0)
    ticks = nice_ticks(0, top)
    x = Scale(results.bits[0] * 0.9, results.bits[-1] * 1.06, LEFT, WIDTH - GUTTER, log=True)
    plot = Plot(x, Scale(ticks[0], ticks[-1], BOTTOM, TOP))
    ends = [plot.y(values[-1][1].mean) for values in found.values()]
    places = spaced(ends, LABEL_GAP, TOP + 2, BOTTOM - 2)
    parts = [y_axis(plot, ticks, "mAP"), x_axis(plot, results.bits, "bits per code")]
    for (series, values), place in zip(found.items(), places, strict=True):
        last_bits, last = values[-1]
        from_, to = (plot.x(last_bits) + 4, plot.y(last.mean)), (WIDTH - GUTTER + 12, place)
        name = label(WIDTH - GUTTER + 15, place, series.label, class_="name")
        parts.append(group(series, polyline([from_, to], "leader"), name, *_marks(plot, series, values, key)))
    description = f"mAP over {joined(map(str, results.bits))} bits; the values are in Table 1a."
    caption = "Mean average precision over the length of the code"
    caption += ", with the standard deviation over the splits." if results.repeats > 1 else "."
    caption += _dashed(results)
    svg = drawing("map-over-bits", WIDTH, HEIGHT, *parts, title="mAP over code length", description=description)
    return Picture("3a", "Quality over code length", caption, svg)


def _dashed(results: Results) -> str:
    return " Dashed: outside the baselines." if results.apart else ""


def _marks(plot: Plot, series: Series, values: Sequence[tuple[int, Figure]], key: str) -> list[str]:
    """Line, error bars and points of (x, figure) pairs."""
    parts = [polyline([(plot.x(at), plot.y(f.mean)) for at, f in values])]
    for at, figure in values:
        place = plot.x(at)
        if figure.std:
            parts.append(error_bar(place, plot.y(figure.mean - figure.std), plot.y(figure.mean + figure.std)))
        told = f"{series.label}, {at:,}: {with_spread(figure)}"
        data = {"data_series": series.slug, "data_key": key, "data_x": at, "data_y": figure.mean}
        parts.append(point(place, plot.y(figure.mean), shape(series), told, **data))
    return parts


def recall_curves(results: Results) -> Picture:
    """Fig. 3b: all curves end in 1, so a key in the empty corner ranks them where they differ."""
    bits = results.figure_bits
    curves = {s: c for s in back_to_front(results) if (c := results.curve(s, bits, "recall"))}
    ranks = [k for k, _ in next(iter(curves.values()), [(1, 0.0), (10, 1.0)])]
    plot = Plot(Scale(ranks[0], max(ranks[-1], 2), LEFT, WIDTH - 12, log=True), Scale(0, 1, BOTTOM, TOP))
    decades = [10**e for e in range(len(str(ranks[-1]))) if 10**e <= ranks[-1]]
    parts = [y_axis(plot, nice_ticks(0, 1), "recall"), x_axis(plot, decades, "K, rows looked at")]
    for series, curve in curves.items():
        marks = [polyline([(plot.x(k), plot.y(value)) for k, value in curve])]
        for k, value in curve:
            told = f"{series.label}, recall@{k:,}: {value:.4f}"
            data = {"data_series": series.slug, "data_key": "recall", "data_x": k, "data_y": value}
            marks.append(point(plot.x(k), plot.y(value), shape(series), told, **data))
        parts.append(group(series, *marks))
    chosen = min(ranks, key=lambda k: abs(k / results.protocol["truth_k"] - 1))
    parts.append(_key({series: dict(curve)[chosen] for series, curve in curves.items()}, f"recall@{chosen:,}"))
    description = f"Recall over the number of rows looked at, at {bits} bits; best first at {chosen}: " + ", ".join(
        s.label for s in sorted(curves, key=lambda s: -dict(curves[s])[chosen])
    )
    caption = f"Share of the {results.protocol['truth_k']:,} true neighbours among the first K rows, at {bits} bits."
    svg = drawing("recall", WIDTH, HEIGHT, *parts, title=f"Recall at {bits} bits", description=description)
    return Picture("3b", "Neighbours found", caption + _dashed(results), svg)


def _key(values: dict[Series, float], title: str) -> str:
    """Names with values, best first, on a plate in the upper left corner."""
    left, top = LEFT + 10, TOP + 6
    ranked = sorted(values, key=lambda series: -values[series])
    plate = element(
        "rect", x=left - 4, y=top - 8, width=158.0, height=LABEL_GAP * (len(ranked) + 1) + 4, rx=4, class_="plate"
    )
    rows = [plate, label(left + 150, top, title, anchor="end", class_="axis")]
    for i, series in enumerate(ranked, start=1):
        y = top + i * LABEL_GAP
        swatch = polyline([(left, y), (left + 16, y)])
        name, value = label(left + 22, y, series.label, class_="name"), f"{values[series]:.3f}"
        rows.append(group(series, swatch, name, label(left + 150, y, value, anchor="end", class_="name")))
    return element("g", *rows)


def over_centres(results: Results) -> Picture | None:
    """Fig. 4a."""
    values = results.sweep("centres", "n_centres", sweep_map)
    if not values:
        return None
    bits = sweep_bits(results, "centres") or 0
    panel = _sweep_panel(results, values, bits, TOP, BOTTOM, title="mAP", log=False)
    axis = x_axis(panel[0], [value for value, _ in values], "k-means centres")
    best = max(values, key=lambda pair: pair[1].mean)
    description = f"mAP of OCH at {bits} bits over the number of centres; best {best[1].mean:.4f} at {best[0]}."
    svg = drawing("centres", WIDTH, HEIGHT, *panel[1], axis, title="mAP over centres", description=description)
    caption = f"mAP of OCH at {bits} bits over the number of k-means centres, all else unchanged."
    return Picture("4a", "How many centres", caption, svg)


def over_relations(results: Results) -> Picture | None:
    """Fig. 4b: quality and time over the relations of a step, one above the other."""
    values = results.sweep("relations", "n_anchors", sweep_map)
    times = results.sweep("relations", "n_anchors", sweep_seconds)
    if not values:
        return None
    bits = sweep_bits(results, "relations") or 0
    upper = _sweep_panel(results, values, bits, TOP, 140, title="mAP", log=True)
    lower = _sweep_panel(results, times, None, 186, BOTTOM, title="CPU seconds", log=True)
    axis = x_axis(lower[0], [value for value, _ in values], "anchors per step")
    description = (
        f"mAP and CPU seconds of OCH at {bits} bits over the anchors of a step, from {values[0][0]} "
        f"(mAP {values[0][1].mean:.4f}, {times[0][1].mean:.2f} s) to {values[-1][0]} (mAP {values[-1][1].mean:.4f}, "
        f"{times[-1][1].mean:.2f} s)."
    )
    svg = drawing(
        "relations",
        WIDTH,
        HEIGHT,
        *upper[1],
        *lower[1],
        axis,
        title="mAP and time over relations",
        description=description,
    )
    caption = f"mAP and training time of OCH at {bits} bits: each anchor adds the same number of relations to a step."
    return Picture("4b", "How many relations", caption, svg)


def _sweep_panel(
    results: Results,
    values: Sequence[tuple[int, Figure]],
    bits: int | None,
    top: float,
    bottom: float,
    *,
    title: str,
    log: bool,
) -> tuple[Plot, list[str]]:
    """One line of OCH with its values; with ``bits``, the best baseline of that length as a reference."""
    reference = results.best_baseline(bits, METRICS[0]) if bits else None
    against = results.figure(reference, bits, METRICS[0].key) if reference and bits else None
    means = [f.mean + sign * (f.std or 0) for _, f in values for sign in (-1, 1)] + ([against.mean] if against else [])
    ticks = nice_ticks(min(means) if bits else 0, max(means), 4 if bottom - top > 150 else 3)
    first, last = values[0][0], values[-1][0]
    margin = 0.06 * (last - first) or 1
    low, high = (first / 1.2, last * 1.2) if log else (first - margin, last + margin)
    plot = Plot(Scale(low, high, LEFT, WIDTH - 12, log=log), Scale(ticks[0], ticks[-1], bottom, top))
    key = "map" if bits else "seconds"
    parts = [y_axis(plot, ticks, title)]
    if reference and against:
        place = plot.y(against.mean)
        name = label(
            plot.right, place - 7, f"best baseline, {reference.label} {against.mean:.3f}", anchor="end", class_="name"
        )
        rule = line(plot.left, place, plot.right, place, "line")
        parts.append(group(reference, rule, name))
    names = [
        label(plot.x(at), plot.y(f.mean + (f.std or 0)) - 9, f"{f.mean:.3f}" if bits else f"{f.mean:.2f}",
              anchor="middle", class_="name")
        for at, f in values
    ]  # fmt: skip
    parts.append(group(OURS, *_marks(plot, OURS, values, key), *names))
    return plot, parts


def headline_cards(results: Results) -> list[tuple[str, str, str, float, float]]:
    """(percent, what, values, share of OCH, share of the rival) of the mAP leads, then of half the bits."""
    cards = []
    for bits in results.bits:
        lead = results.lead(bits, METRICS[0])
        if lead:
            what = f"mAP at {bits} bits, against {lead.rival.label}, the best baseline"
            cards.append((lead, what))
    for lead in results.half_leads():
        if lead.metric == METRICS[0]:
            cards.append((lead, f"mAP with half the bits: OCH {lead.bits}, {lead.rival.label} {lead.rival_bits}"))
    scale = max((max(lead.ours.mean, lead.theirs.mean) for lead, _ in cards), default=1.0)
    return [
        (level(lead.percent), what, f"{lead.ours.mean:.3f} against {lead.theirs.mean:.3f}",
         lead.ours.mean / scale, lead.theirs.mean / scale)
        for lead, what in cards
    ]  # fmt: skip
