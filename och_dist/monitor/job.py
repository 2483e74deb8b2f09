"""One job as an operator sees it, built up from events in any order that a network may bring them in."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Any

import numpy as np

from och_dist.monitor.chunks import Chunks
from och_dist.monitor.series import Curve, Series, Window

KEPT_TASKS = 4
LISTED_STAGES = 40
LISTED_FAILURES = 20
MAX_BITS = 65_536
RATES = ("rows", "read", "written")


class Counters:
    """Sums over all jobs, which only grow: rows, bytes, chunks and seconds by task, seconds by stage, failures."""

    def __init__(self) -> None:
        self.tasks: dict[tuple[str, str], float] = defaultdict(float)
        self.stages: dict[str, float] = defaultdict(float)
        self.failures = 0
        self.queries = 0


class Step:
    """Progress of a part of a stage, as its progress bar has it."""

    def __init__(self, name: str, total: int, now: float) -> None:
        self.name, self.total, self.done = name, max(0, total), 0
        self.started = now
        self.first: tuple[float, int] | None = None
        self.window: deque[tuple[float, int]] = deque(maxlen=240)

    def advance(self, count: int, now: float) -> None:
        self.done = min(self.total, self.done + count) if self.total else self.done + count
        if not self.window or now - self.window[-1][0] > 0.25:
            self.window.append((now, self.done))
        else:
            self.window[-1] = (self.window[-1][0], self.done)

    def eta(self, now: float) -> float | None:
        """Seconds left at the speed of the last minute or so; None while there is nothing to go by."""
        if not self.total or self.done >= self.total:
            return 0.0 if self.total else None
        recent = [entry for entry in self.window if entry[0] >= now - 90] or list(self.window)[-1:]
        if not recent:
            return None
        when, done = recent[0]
        if self.done <= done or now <= when:
            return None
        return (self.total - self.done) * (now - when) / (self.done - done)


class Job:
    """What one driver does: its stages, tasks, rates, curves and failures."""

    def __init__(self, driver: str, name: str, now: float, counters: Counters) -> None:
        self.driver, self.name, self.started, self.seen = driver, name, now, now
        self.counters = counters
        self.ended: float | None = None
        self.status, self.error = "running", ""
        self.open_stages: list[tuple[str, float]] = []
        self.stages: deque[dict[str, Any]] = deque(maxlen=LISTED_STAGES)
        self.steps: dict[int, Step] = {}
        self.step: Step | None = None
        self.tasks: dict[str, Chunks] = {}
        self.rates = Series(RATES, now)
        self.window = Window()
        self.totals: dict[str, dict[str, float]] = {}
        self.loss, self.inertia = Curve(), Curve()
        self.residual: float | None = None
        self.exact_inertia: float | None = None
        self.ones, self.encoded = np.zeros(0, np.int64), 0
        self.sample: tuple[list[int], int] | None = None
        self.searches, self.queries, self.search_seconds = 0, 0, 0.0
        self.search_rates: Series | None = None
        self.search_window = Window()
        self.failures = 0
        self.listed_failures: deque[dict[str, Any]] = deque(maxlen=LISTED_FAILURES)

    # What the driver says

    def hear(self, kind: str, facts: dict[str, Any], now: float) -> None:
        """One event of the driver; kinds that are not known are those of another version."""
        self.seen = now
        handle = getattr(self, f"_on_{kind}", None)
        if handle is not None:
            handle(now, **facts)

    def _on_job_end(self, now: float, status: str, error: str = "") -> None:
        self.status, self.error, self.ended = status, error, now
        if status == "failed":
            self.fail(now, "job", error)
        for name, started in reversed(self.open_stages):
            self._finish_stage(name, status, now - started)
        self.open_stages.clear()

    def _on_stage(self, now: float, name: str) -> None:
        self.open_stages.append((name, now))
        self.step = None
        if name == "train":
            self.loss, self.inertia, self.residual, self.exact_inertia = Curve(), Curve(), None, None

    def _on_stage_end(self, now: float, name: str, status: str, seconds: float) -> None:
        while self.open_stages:
            closed, started = self.open_stages.pop()
            if closed == name:
                self._finish_stage(name, status, seconds)
                return
            self._finish_stage(closed, "left", now - started)

    def _finish_stage(self, name: str, status: str, seconds: float) -> None:
        self.stages.append({"stage": name, "status": status, "seconds": round(seconds, 3)})
        self.counters.stages[name] += seconds

    def _on_step(self, now: float, id: int, name: str, total: int) -> None:
        self.step = self.steps[id] = Step(name, int(total), now)
        for old in list(self.steps)[:-8]:
            del self.steps[old]

    def _on_advance(self, now: float, id: int, count: int) -> None:
        if id in self.steps:
            self.steps[id].advance(int(count), now)

    def _on_tasks(self, now: float, token: str, name: str, count: int, inherited: list[list[int]]) -> None:
        self.tasks[token] = Chunks(name, int(count), inherited, now)
        for old in list(self.tasks)[:-KEPT_TASKS]:
            del self.tasks[old]

    def _on_tasks_end(self, now: float, token: str, done: bool) -> None:
        if token in self.tasks:
            self.tasks[token].close(now, done=done)

    def _on_loss(self, now: float, step: int, value: float) -> None:
        if math.isfinite(value):
            self.loss.add(int(step), float(value))

    def _on_residual(self, now: float, value: float | None) -> None:
        self.residual = None if value is None else float(value)

    def _on_inertia(self, now: float, round: int | None, value: float, rounds: int = 0) -> None:
        if round is None:
            self.exact_inertia = float(value)
            return
        self.inertia.add(int(round), float(value))
        if round == 0:  # the rounds are Dask-ML's, which shows no progress
            self.step = Step("k-means", int(rounds), now)
        if self.step is not None and self.step.name == "k-means":
            self.step.advance(int(round) - self.step.done, now)

    def _on_sample(self, now: float, bits: int, sample: dict[str, Any] | None) -> None:
        self.ones, self.encoded, self.sample = np.zeros(min(int(bits), MAX_BITS), np.int64), 0, None
        if sample and sample.get("rows") and len(sample.get("ones", ())) == bits:
            self.sample = (list(sample["ones"]), int(sample["rows"]))

    def _on_search(self, now: float, queries: int, seconds: float) -> None:
        self.searches, self.queries = self.searches + 1, self.queries + int(queries)
        self.counters.queries += int(queries)
        self.search_seconds += seconds
        self.search_rates = self.search_rates or Series(("queries",), now - seconds)
        self.search_rates.add(now, seconds, {"queries": queries})
        self.search_window.add(now, seconds, queries)

    def fail(self, now: float, where: str, text: str) -> None:
        self.failures += 1
        self.counters.failures += 1
        self.listed_failures.append({"time": round(now, 1), "where": where, "text": text})

    # What workers say

    def work(self, worker: str, event: list[Any], now: float) -> None:
        """['begin', token, number] or ['end', token, number, state, seconds, facts]."""
        self.seen = now
        kind, token, number = event[:3]
        chunks = self.tasks.get(token)
        if chunks is None:
            return
        if kind == "begin":
            chunks.begin(number, worker)
            return
        state, seconds, facts = event[3:6]
        first = chunks.end(number, worker, state)
        if state != "done":
            self.fail(now, f"{chunks.name} {number}", str(facts.get("error", "")))
        elif first:
            self._count(chunks, float(seconds), facts, now)

    def _count(self, chunks: Chunks, seconds: float, facts: dict[str, Any], now: float) -> None:
        amounts = {kind: facts.get(kind, 0) for kind in RATES}
        nbytes = amounts["read"] + amounts["written"]
        totals = self.totals.setdefault(chunks.name, dict.fromkeys((*RATES, "chunks", "seconds"), 0))
        for kind, amount in (*amounts.items(), ("chunks", 1), ("seconds", seconds)):
            totals[kind] += amount
            self.counters.tasks[chunks.name, kind] += amount
        chunks.rows, chunks.nbytes = chunks.rows + amounts["rows"], chunks.nbytes + nbytes
        self.rates.add(now, seconds, amounts)
        self.window.add(now, seconds, amounts["rows"], nbytes)
        ones = facts.get("ones")
        if ones is not None and len(ones) == len(self.ones):
            self.ones += np.array(ones, np.int64)
            self.encoded += facts.get("rows", 0)

    def lose(self, worker: str, now: float) -> None:
        """A worker is gone; what it had under way is done again elsewhere."""
        lost = sum(chunks.lose(worker) for chunks in self.tasks.values())
        if lost:
            self.fail(now, worker, f"worker lost with {lost} tasks under way")

    @property
    def shown_tasks(self) -> Chunks | None:
        """The tasks of the map: the newest."""
        return next(reversed(self.tasks.values()), None)
