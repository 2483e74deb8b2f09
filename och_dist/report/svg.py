"""Small pieces of drawing: elements, scales, ticks, axes, marks, labels that keep out of each other's way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

MARKS = {
    "circle": "M-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0 -6.8 0z",
    "square": "M-2.6 -2.6h5.2v5.2h-5.2z",
    "diamond": "M0 -3.6L3.6 0L0 3.6L-3.6 0z",
    "up": "M0 -3.4L3.2 2.6H-3.2z",
    "down": "M0 3.4L3.2 -2.6H-3.2z",
    "plus": "M-1 -3.4h2v2.4h2.4v2h-2.4v2.4h-2v-2.4h-2.4v-2h2.4z",
    "hexagon": "M-3.4 0L-1.7 -3H1.7L3.4 0L1.7 3H-1.7z",
    "dot": "M-2.2 0a2.2 2.2 0 1 0 4.4 0a2.2 2.2 0 1 0 -4.4 0z",
}


def element(name: str, *children: str, **attributes: object) -> str:
    """``<name ...>children</name>``; 'data_x' becomes 'data-x', 'class_' 'class'; None is left out.

    Children are markup: text goes through ``escape`` first.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(children)}</{name}>"


def _plain(value: object) -> str:
    """Positions to a hundredth; data go in as text."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Scale:
    """From data ``low..high`` to places ``start..stop``, linear or logarithmic."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (
            (math.log(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.stop - self.start)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers that enclose ``low..high``."""
    if not high > low:
        high = low + (abs(low) or 1.0) * 0.1
    rough = (high - low) / max(1, count)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def short(value: float) -> str:
    """0.25, 3, 10k."""
    if abs(value) >= 1_000_000:
        return f"{value / 1e6:g}M"
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:,g}"


def spaced(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places nearest to the ``wanted`` ones (in the same order) that are ``gap`` apart and within ``low..high``.

    Least squares: after taking i * gap off the i-th, the places must not fall, which pooling neighbours solves.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    pools: list[list[float]] = []
    for rank, i in enumerate(order):
        pools.append([wanted[i] - rank * gap, 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, weight = pools.pop()
            before, count = pools[-1]
            pools[-1] = [(before * count + mean * weight) / (count + weight), count + weight]
    level = [mean for mean, weight in pools for _ in range(int(weight))]
    top = max(low, high - (len(order) - 1) * gap)
    places = [0.0] * len(order)
    for rank, i in enumerate(order):
        places[i] = min(max(level[rank], low), top) + rank * gap
    return places


@dataclass(frozen=True)
class Plot:
    """The area between two scales, in the units of the drawing."""

    x: Scale
    y: Scale

    @property
    def left(self) -> float:
        return min(self.x.start, self.x.stop)

    @property
    def right(self) -> float:
        return max(self.x.start, self.x.stop)

    @property
    def top(self) -> float:
        return min(self.y.start, self.y.stop)

    @property
    def bottom(self) -> float:
        return max(self.y.start, self.y.stop)


def label(x: float, y: float, text: str, *, anchor: str = "start", class_: str | None = None, **more: object) -> str:
    return element("text", escape(text), x=x, y=y, text_anchor=anchor, class_=class_, **more)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def y_axis(plot: Plot, ticks: Sequence[float], title: str) -> str:
    """Hairlines across the plot with their values on the left, and the title above."""
    parts = []
    for tick in ticks:
        place = plot.y(tick)
        parts.append(line(plot.left, place, plot.right, place, "grid"))
        parts.append(label(plot.left - 6, place, short(tick), anchor="end", class_="tick y", data_value=repr(tick)))
    parts.append(label(0.0, plot.top - 16, title, class_="axis"))
    return element("g", *parts)


def x_axis(plot: Plot, ticks: Sequence[float], title: str, *, grid: bool = False) -> str:
    """Values below the plot, the title under them."""
    parts = [] if grid else [line(plot.left, plot.bottom, plot.right, plot.bottom, "base")]
    for tick in ticks:
        place = plot.x(tick)
        parts.append(line(place, plot.top if grid else plot.bottom, place, plot.bottom + 4, "grid" if grid else "base"))
        parts.append(
            label(place, plot.bottom + 16, short(tick), anchor="middle", class_="tick x", data_value=repr(tick))
        )
    parts.append(label((plot.left + plot.right) / 2, plot.bottom + 34, title, anchor="middle", class_="axis"))
    return element("g", *parts)


def polyline(points: Sequence[tuple[float, float]], class_: str = "line") -> str:
    return element("polyline", points=" ".join(f"{x:.2f},{y:.2f}" for x, y in points), class_=class_)


def point(x: float, y: float, mark: str, told: str, **data: object) -> str:
    """A mark with its data, which it tells when pointed at."""
    shape = element("path", d=MARKS[mark])
    data = {name: repr(value) if isinstance(value, float) else value for name, value in data.items()}
    return element(
        "g", element("title", escape(told)), shape, class_="point", transform=f"translate({x:.3f} {y:.3f})", **data
    )


def error_bar(x: float, low: float, high: float) -> str:
    """An upright bar with feet."""
    return element(
        "path", d=f"M{x:.2f} {low:.2f}V{high:.2f}M{x - 3:.2f} {low:.2f}h6M{x - 3:.2f} {high:.2f}h6", class_="error"
    )


def drawing(name: str, width: float, height: float, *parts: str, title: str, description: str) -> str:
    """A whole picture, named and described for those who do not see it."""
    return element(
        "svg",
        element("title", escape(title), id=f"{name}-title"),
        element("desc", escape(description), id=f"{name}-desc"),
        *parts,
        id=name,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
    )
