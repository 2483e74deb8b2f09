"""The growth benchmark as a picture: time per row and memory against the number of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from xml.etree.ElementTree import Element, SubElement, tostring

from benchmarks.suite.measure import Outcome

STYLE = (
    "svg{font:12px sans-serif;fill:#333}polyline{fill:none;stroke:#2166ac;stroke-width:2}circle{fill:#2166ac}"
    ".grid{stroke:#ddd}.base{stroke:#333}.title{font-weight:600}text{dominant-baseline:central}"
)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 270, 230, 46, 256, 44, 186


def growth_picture(outcome: Outcome) -> str:
    """SVG with a panel for each quantity that should not grow; every vertical axis begins at 0."""
    facts = outcome.facts
    panels = {
        "moments, us per row": facts["moments_us_per_row"],
        "encode, us per row": facts["encode_us_per_row"],
        "peak memory of a worker, MB": facts["worker_mb"],
        "peak memory of the driver, MB": facts["driver_mb"],
    }
    width = len(panels) * (WIDTH + 20)
    size = {"width": str(width), "viewBox": f"0 0 {width} {HEIGHT}"}
    names = {"role": "img", "aria-labelledby": "growth-title growth-desc"}
    picture = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, **names})
    SubElement(picture, "title", id="growth-title").text = "Time per row and memory against the number of rows"
    SubElement(picture, "desc", id="growth-desc").text = outcome.work
    SubElement(picture, "style").text = STYLE
    for number, (title, values) in enumerate(panels.items()):
        group = SubElement(picture, "g", transform=f"translate({number * (WIDTH + 20)} 0)")
        _panel(group, title, {float(rows): value for rows, value in values.items()})
    return tostring(picture, encoding="unicode")


def _panel(group: Element, title: str, values: Mapping[float, float]) -> None:
    def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        places = zip(("x1", "y1", "x2", "y2"), (x1, y1, x2, y2), strict=True)
        SubElement(group, "line", {name: f"{place:g}" for name, place in places}, **{"class": kind})

    def text(x: float, y: float, words: str, anchor: str = "middle", kind: str = "tick") -> None:
        where = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor, "class": kind}
        SubElement(group, "text", where).text = words

    highest, first, last = max(values.values()), min(values), max(values)
    unit = 10 ** math.floor(math.log10(highest / 4))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if 4 * m * unit >= highest)
    ticks = [i * step for i in range(math.ceil(highest / step) + 1)]

    def at(rows: float, value: float) -> tuple[float, float]:
        share = math.log(rows / first) / math.log(last / first)
        return round(LEFT + share * (RIGHT - LEFT), 2), round(BOTTOM - value / ticks[-1] * (BOTTOM - TOP), 2)

    for tick in ticks:
        _, y = at(first, tick)
        line(LEFT, y, RIGHT, y, "grid")
        text(LEFT - 6, y, f"{tick:,g}", "end")
    line(LEFT, BOTTOM, RIGHT, BOTTOM, "base")
    points = [at(rows, values[rows]) for rows in sorted(values)]
    SubElement(group, "polyline", points=" ".join(f"{x:g},{y:g}" for x, y in points))
    for rows, (x, y) in zip(sorted(values), points, strict=True):
        line(x, BOTTOM, x, BOTTOM + 4, "base")
        text(x, BOTTOM + 16, f"{rows / 1e6:g}M" if rows >= 1e6 else f"{rows / 1e3:g}k" if rows >= 1e4 else f"{rows:,g}")
        point = SubElement(group, "circle", cx=f"{x:g}", cy=f"{y:g}", r="3.4")
        SubElement(point, "title").text = f"{rows:,.0f} rows: {values[rows]:.4g}"
    text((LEFT + RIGHT) / 2, BOTTOM + 34, "rows")
    text(0, 16, title, "start", "title")
