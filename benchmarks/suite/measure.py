"""Repeated measurements, goals, and what one benchmark of the suite returns."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil


@dataclass(frozen=True)
class Figure:
    """One thing measured several times."""

    values: tuple[float, ...]
    unit: str = "s"

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def to_json(self) -> dict[str, Any]:
        return {"unit": self.unit, "values": list(self.values), "median": self.median}

    def __str__(self) -> str:
        if len(self.values) == 1:
            return f"{_number(self.median)} {self.unit}"
        return f"{_number(self.median)} {self.unit} ({_number(min(self.values))} to {_number(max(self.values))})"


@dataclass(frozen=True)
class Goal:
    """``value`` should be at most (or, with ``at_least``, at least) ``limit``; ``words`` say what is compared."""

    words: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "met": self.met}

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        verdict = "met" if self.met else f"**missed by {abs(self.value / self.limit - 1):.0%}**"
        return f"{self.words}: {_number(self.value)} (goal {sign} {self.limit:g}), {verdict}"


@dataclass
class Outcome:
    """What a benchmark found: figures by name, goals, notes, and further facts for the JSON file."""

    name: str
    work: str
    figures: dict[str, Figure] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def ratio(self, words: str, top: str, bottom: str, limit: float, *, at_least: bool = False) -> None:
        """Add a goal on the quotient of the medians of two figures."""
        self.goals.append(Goal(words, self.figures[top].median / self.figures[bottom].median, limit, at_least))

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "work": self.work,
            "seconds": round(self.seconds, 1),
            "figures": {name: figure.to_json() for name, figure in self.figures.items()},
            "goals": [goal.to_json() for goal in self.goals],
            "notes": self.notes,
            "facts": self.facts,
        }


def take_turns(
    actions: Mapping[str, Callable[[], Any]],
    repeats: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], Any] = lambda: None,
) -> dict[str, Figure]:
    """Time every action ``repeats`` times, in turns, so that a busy moment does not hit one of them alone.

    ``before`` runs untimed ahead of each.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            before()
            gc.collect()
            start = clock()
            action()
            times[name].append(clock() - start)
    return {name: Figure(tuple(values)) for name, values in times.items()}


@contextmanager
def peak_memory(pids: list[int], every: float = 0.05) -> Iterator[dict[int, float]]:
    """Largest resident bytes of some processes while the block runs, sampled."""
    peaks = dict.fromkeys(pids, 0.0)
    over = threading.Event()

    def watch() -> None:
        processes = {pid: psutil.Process(pid) for pid in pids}
        while not over.is_set():
            for pid, process in processes.items():
                peaks[pid] = max(peaks[pid], float(process.memory_info().rss))
            over.wait(every)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
