"""The growth benchmark as a picture: time per row and memory against the number of rows."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.suite.measure import Outcome
from och_dist.report.svg import Plot, Scale, drawing, element, label, nice_ticks, point, polyline, x_axis, y_axis

STYLE = (
    "svg{font:12px sans-serif;fill:#333}.line{fill:none;stroke:#2166ac;stroke-width:2}.grid{stroke:#ddd}"
    ".base{stroke:#333}.point path{fill:#2166ac}.axis{font-weight:600}"
)
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 270.0, 230.0, 46.0, 44.0, 44.0


def growth_picture(outcome: Outcome) -> str:
    """SVG with a panel for each quantity that should not grow; every vertical axis begins at 0."""
    facts = outcome.facts
    panels = {
        "moments, us per row": facts["moments_us_per_row"],
        "encode, us per row": facts["encode_us_per_row"],
        "peak memory of a worker, MB": facts["worker_mb"],
        "peak memory of the driver, MB": facts["driver_mb"],
    }
    parts = [
        element("g", _panel(title, values), transform=f"translate({number * (WIDTH + 20):g} 0)")
        for number, (title, values) in enumerate(panels.items())
    ]
    width = len(panels) * (WIDTH + 20)
    text = "Time per row and memory against the number of rows"
    picture = drawing("growth", width, HEIGHT, element("style", STYLE), *parts, title=text, description=outcome.work)
    return picture.replace("<svg", f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}"', 1)


def _panel(title: str, values: Mapping[str | int, float]) -> str:
    points = sorted((float(rows), value) for rows, value in values.items())
    ticks = nice_ticks(0.0, max(value for _, value in points), 4)
    x = Scale(points[0][0], points[-1][0], LEFT, WIDTH - 14, log=True)
    plot = Plot(x, Scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP))
    places = [(plot.x(rows), plot.y(value)) for rows, value in points]
    marks = [
        point(*place, "circle", f"{rows:,.0f} rows: {value:.4g}")
        for place, (rows, value) in zip(places, points, strict=True)
    ]
    axes = y_axis(plot, ticks, ""), x_axis(plot, [rows for rows, _ in points], "rows")
    return element("g", *axes, polyline(places), *marks, label(0.0, 16.0, title, class_="axis"))
