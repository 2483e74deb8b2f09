"""The results of a comparison, asked as the tables and figures ask: who, by how much, and how sure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from och_dist.errors import BadInputError

Role = Literal["ours", "baseline", "apart"]
FIGURE_BITS = 64
NAMES = {
    "lsh": "LSH",
    "agh": "AGH",
    "isohash": "IsoHash",
    "sph": "SpH",
    "sgh": "SGH",
    "itq": "ITQ",
    "oeh": "OEH",
    "och": "OCH",
    "och-paper": "OCH as printed",
    "pca-frame": "PCAFrame",
}
BASELINES = ("lsh", "agh", "isohash", "sph", "sgh", "itq", "oeh")


@dataclass(frozen=True)
class Metric:
    """A measure of a ranking: its key in the results and the name people know it by."""

    key: str
    name: str


METRICS = (Metric("map", "mAP"), Metric("precision_at_100", "precision@100"), Metric("pr_area", "pooled PR area"))


@dataclass(frozen=True)
class Series:
    """One line of a table: a method in one variant, its codes ranked by one distance."""

    method: str
    variant: str = "main"
    ranking: str = "hamming"

    @property
    def role(self) -> Role:
        if self.variant != "main" or self.ranking != "hamming":
            return "apart"
        return "ours" if self.method == "och" else "baseline" if self.method in BASELINES else "apart"

    @property
    def label(self) -> str:
        extra = {"two layers": " two layers"}.get(self.variant, "" if self.variant == "main" else f" {self.variant}")
        return NAMES.get(self.method, self.method) + extra + ("" if self.ranking == "hamming" else f" {self.ranking}")

    @property
    def slug(self) -> str:
        """A name for classes and attributes."""
        parts = [self.method, *([self.variant] if self.variant != "main" else [])]
        return "-".join([*parts, *([self.ranking] if self.ranking != "hamming" else [])]).replace(" ", "-")


OURS = Series("och")


class Figure(NamedTuple):
    """Mean over the repeats and sample standard deviation, None for a single repeat."""

    mean: float
    std: float | None
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Lead:
    """One series against another on the same splits; ``percent`` is the mean of the relative differences."""

    metric: Metric
    bits: int
    ours: Figure
    rival: Series
    rival_bits: int
    theirs: Figure
    percent: Figure


class Results:
    """What ``results.json`` holds."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.protocol: dict[str, Any] = document["protocol"]
        self.machine: dict[str, Any] = document["machine"]
        self.cells: list[dict[str, Any]] = document["cells"]

    @classmethod
    def load(cls, path: str | Path) -> Results:
        try:
            return cls(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInputError(f"{path} holds no comparison ({error!r}); make one with 'och compare'") from None

    @cached_property
    def table_cells(self) -> list[dict[str, Any]]:
        return [cell for cell in self.cells if cell["variant"] not in ("centres", "relations")]

    @cached_property
    def bits(self) -> list[int]:
        return sorted({cell["bits"] for cell in self.table_cells})

    @cached_property
    def repeats(self) -> int:
        return len({cell["repeat"] for cell in self.cells})

    @cached_property
    def figure_bits(self) -> int:
        """The code length of the figures that show a single one: the paper's 64 bits, or the nearest there is."""
        return min(self.bits, key=lambda r: (abs(r - FIGURE_BITS), r))

    @cached_property
    def series(self) -> list[Series]:
        """Baselines in the paper's order, then OCH, then what stands apart."""
        found = {
            Series(cell["method"], cell["variant"], ranking)
            for cell in self.table_cells
            for ranking in (cell["rankings"] or {"hamming": {}})
        }
        order, place = [*BASELINES, *(name for name in NAMES if name not in BASELINES)], {"apart": 1}
        return sorted(
            found,
            key=lambda s: (
                place.get(s.role, 0),
                order.index(s.method) if s.method in order else len(order),
                s.variant,
                s.ranking,
                s.method,
            ),
        )

    @property
    def main(self) -> list[Series]:
        return [series for series in self.series if series.role != "apart"]

    @property
    def apart(self) -> list[Series]:
        return [series for series in self.series if series.role == "apart"]

    @property
    def baselines(self) -> list[Series]:
        return [series for series in self.series if series.role == "baseline"]

    def cells_of(self, series: Series, bits: int) -> list[dict[str, Any]]:
        """The cells of a series that were not refused, by repeat."""
        found = [
            cell
            for cell in self.table_cells
            if (cell["method"], cell["variant"], cell["bits"]) == (series.method, series.variant, bits)
            and series.ranking in cell["rankings"]
        ]
        return sorted(found, key=lambda cell: cell["repeat"])

    def by_repeat(self, series: Series, bits: int, key: str) -> dict[int, float]:
        """Repeat -> a measure of the series' ranking."""
        cells = self.cells_of(series, bits)
        return {cell["repeat"]: float(cell["rankings"][series.ranking][key]) for cell in cells}

    def figure(self, series: Series, bits: int, key: str) -> Figure | None:
        """Mean and spread of a measure of the ranking; None when there is no such cell."""
        values = list(self.by_repeat(series, bits, key).values())
        return Figure.of(values) if values else None

    def fact(self, series: Series, bits: int, key: str, part: int | None = None) -> Figure | None:
        """Mean and spread of something that belongs to the cell, such as its time, or of a ``part`` of it."""
        found = [cell[key] for cell in self.cells_of(series, bits)]
        return Figure.of([float(value if part is None else value[part]) for value in found]) if found else None

    def curve(self, series: Series, bits: int, key: str) -> list[tuple[int, float]]:
        """(K, mean over the repeats) of 'recall' or 'precision'."""
        cells = [cell["rankings"][series.ranking] for cell in self.cells_of(series, bits)]
        if not cells:
            return []
        columns = zip(*(cell[key] for cell in cells), strict=True)
        return [(int(k), statistics.fmean(values)) for k, values in zip(cells[0]["ks"], columns, strict=True)]

    def sweep(self, variant: str, param: str, read: Callable[[dict[str, Any]], float]) -> list[tuple[int, Figure]]:
        """(value of the parameter, mean and spread) over a sweep of OCH."""
        found: dict[int, list[float]] = {}
        for cell in self.cells:
            if cell["variant"] == variant and cell["rankings"]:
                found.setdefault(int(cell["params"][param]), []).append(float(read(cell)))
        return [(value, Figure.of(found[value])) for value in sorted(found)]

    @cached_property
    def refusals(self) -> list[str]:
        """Cells that a method refused, in its own words."""
        found: dict[tuple[str, int, str], int] = {}
        for cell in self.cells:
            if cell.get("refused"):
                label = Series(cell["method"], cell["variant"]).label
                label += "".join(f" ({name} = {value})" for name, value in cell["params"].items() if name != "n_layers")
                key = (label, cell["bits"], cell["refused"])
                found[key] = found.get(key, 0) + 1
        return [
            f"{label} at {bits} bits, {count} of {self.repeats} splits: {sentence}"
            for (label, bits, sentence), count in sorted(found.items())
        ]

    @cached_property
    def notes(self) -> list[str]:
        """What methods had to say about their training, once each."""
        found = {f"{NAMES.get(c['method'], c['method'])}: {note}" for c in self.cells for note in c.get("notes", [])}
        return sorted(found)

    def against(self, rival: Series, bits: int, metric: Metric, *, rival_bits: int | None = None) -> Lead | None:
        """OCH at ``bits`` against ``rival`` at ``rival_bits``, over the repeats that both have."""
        other = rival_bits or bits
        ours, theirs = self.by_repeat(OURS, bits, metric.key), self.by_repeat(rival, other, metric.key)
        shared = [repeat for repeat in ours if theirs.get(repeat, 0) > 0]
        if not shared:
            return None
        percent = Figure.of([100 * (ours[repeat] / theirs[repeat] - 1) for repeat in shared])
        return Lead(
            metric, bits, Figure.of([ours[r] for r in shared]), rival, other,
            Figure.of([theirs[r] for r in shared]), percent,
        )  # fmt: skip

    def best_baseline(self, bits: int, metric: Metric) -> Series | None:
        figures = {series: self.figure(series, bits, metric.key) for series in self.baselines}
        known = {series: figure.mean for series, figure in figures.items() if figure}
        return max(known, key=lambda series: known[series]) if known else None

    def lead(self, bits: int, metric: Metric, *, rival_bits: int | None = None) -> Lead | None:
        """OCH against the best baseline at ``rival_bits`` (its own length by default)."""
        best = self.best_baseline(rival_bits or bits, metric)
        return self.against(best, bits, metric, rival_bits=rival_bits) if best else None

    def leads(self) -> list[Lead]:
        """OCH against the best baseline, for every metric and code length."""
        return [lead for metric in METRICS for bits in self.bits if (lead := self.lead(bits, metric))]

    def half_leads(self) -> list[Lead]:
        """OCH at half the bits of the best baseline."""
        pairs = [(metric, bits) for metric in METRICS for bits in self.bits if 2 * bits in self.bits]
        return [lead for metric, bits in pairs if (lead := self.lead(bits, metric, rival_bits=2 * bits))]

    def outdone_apart(self) -> list[Lead]:
        """Where something outside the seven baselines is ahead of OCH."""
        asked = [(rival, bits, metric) for metric in METRICS for bits in self.bits for rival in self.apart]
        return [lead for each in asked if (lead := self.against(*each)) and lead.percent.mean < 0]
