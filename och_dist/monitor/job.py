"""One job as an operator sees it, built up from events in any order that a network may bring them in."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from typing import Any

import numpy as np

from och_dist.events import AMOUNTS, Totals
from och_dist.monitor.chunks import Chunks
from och_dist.monitor.series import Curve, RateSeries, Window

KEPT_TASKS = 4
KEPT_STEPS = 8
LISTED_STAGES = 40
LISTED_FAILURES = 20
MAX_BITS = 65_536

Document = dict[str, Any]


def drop_oldest(found: dict[Any, Any], kept: int) -> None:
    """Leave the ``kept`` newest entries."""
    for key in list(found)[:-kept]:
        del found[key]


class Counters:
    """Sums over all jobs, which only grow: amounts by task, seconds by stage, failures, queries."""

    def __init__(self) -> None:
        self.tasks = Totals()
        self.stages: dict[str, float] = defaultdict(float)
        self.failures = 0
        self.queries = 0


class StepProgress:
    """Progress of a part of a stage, as its progress bar has it."""

    def __init__(self, name: str, total: int, now: float) -> None:
        self.name, self.total, self.done = name, max(0, total), 0
        self.recent: deque[tuple[float, int]] = deque(maxlen=240)

    def advance(self, count: int, now: float) -> None:
        self.done = min(self.total, self.done + count) if self.total else self.done + count
        if not self.recent or now - self.recent[-1][0] > 0.25:
            self.recent.append((now, self.done))
        else:
            self.recent[-1] = (self.recent[-1][0], self.done)

    def eta(self, now: float) -> float | None:
        """Seconds left at the speed of the last minute or so; None while there is nothing to go by."""
        if not self.total or self.done >= self.total:
            return 0.0 if self.total else None
        recent = [entry for entry in self.recent if entry[0] >= now - 90] or list(self.recent)[-1:]
        if not recent:
            return None
        when, done = recent[0]
        if self.done <= done or now <= when:
            return None
        return (self.total - self.done) * (now - when) / (self.done - done)

    def document(self, now: float) -> Document:
        eta = self.eta(now)
        return {
            "name": self.name,
            "done": self.done,
            "total": self.total,
            "progress": round(self.done / self.total, 4) if self.total else None,
            "eta_seconds": None if eta is None else round(eta, 1),
        }


class Training:
    """The curves of a training."""

    def __init__(self) -> None:
        self.loss, self.inertia = Curve(), Curve()
        self.residual: float | None = None
        self.exact_inertia: float | None = None

    def document(self) -> Document:
        return {
            "loss": self.loss.all(),
            "residual": self.residual,
            "inertia": self.inertia.all(),
            "exact_inertia": self.exact_inertia,
        }


class Balance:
    """How often each bit is set: in the codes of this job, and in the sample that the model was trained on."""

    def __init__(self, bits: int = 0, sample: dict[str, Any] | None = None) -> None:
        self.ones, self.rows = np.zeros(min(bits, MAX_BITS), np.int64), 0
        self.sample: list[int] = []
        self.sample_rows = 0
        if sample and sample.get("rows") and len(sample.get("ones", ())) == bits:
            self.sample, self.sample_rows = list(sample["ones"]), int(sample["rows"])

    def count(self, facts: dict[str, Any]) -> None:
        ones = facts.get("ones")
        if ones is not None and len(ones) == len(self.ones):
            self.ones += np.array(ones, np.int64)
            self.rows += facts.get("rows", 0)

    def document(self) -> Document | None:
        if not len(self.ones):
            return None
        return {
            "bits": len(self.ones),
            "rows": self.rows,
            "ones": (self.ones / self.rows).round(4).tolist() if self.rows else [],
            "sample_rows": self.sample_rows,
            "sample": [round(count / self.sample_rows, 4) for count in self.sample],
        }


class Searches:
    """Batches of queries that were answered."""

    def __init__(self) -> None:
        self.batches, self.queries = 0, 0
        self.rates: RateSeries | None = None
        self.recent = Window()

    def count(self, queries: int, seconds: float, now: float) -> None:
        self.batches, self.queries = self.batches + 1, self.queries + queries
        self.rates = self.rates or RateSeries(("queries",), now - seconds)
        self.rates.add(now, seconds, {"queries": queries})
        self.recent.add(now, seconds, queries)

    def document(self, now: float) -> Document | None:
        if self.rates is None:
            return None
        p50, p95 = self.recent.quantiles(now, (0.5, 0.95))
        return {
            "batches": self.batches,
            "queries": self.queries,
            "queries_per_second": round(self.recent.rates(now)[0], 1),
            "p50_seconds": p50,
            "p95_seconds": p95,
            "bucket_seconds": self.rates.width,
            "over_time": self.rates.rates(now)["queries"],
        }


class ObservedJob:
    """What one driver does: its stages, steps, tasks, speed, training, searches and failures."""

    def __init__(self, name: str, now: float, counters: Counters) -> None:
        self.name, self.started, self.counters = name, now, counters
        self.ended: float | None = None
        self.status, self.error = "running", ""
        self.open_stages: list[tuple[str, float]] = []
        self.stages: deque[Document] = deque(maxlen=LISTED_STAGES)
        self.steps: dict[int, StepProgress] = {}
        self.step: StepProgress | None = None
        self.tasks: dict[str, Chunks] = {}
        self.totals = Totals()
        self.rates, self.recent = RateSeries(AMOUNTS, now), Window()
        self.training, self.balance, self.searches = Training(), Balance(), Searches()
        self.failures = 0
        self.listed_failures: deque[Document] = deque(maxlen=LISTED_FAILURES)

    # What the driver says

    def hear(self, kind: str, facts: dict[str, Any], now: float) -> None:
        """One event of the driver; kinds that are not known are those of another version."""
        handle = getattr(self, f"_on_{kind}", None)
        if handle is not None:
            handle(now, **facts)

    def _on_job_end(self, now: float, status: str, error: str = "") -> None:
        self.status, self.error, self.ended = status, error, now
        if status == "failed":
            self.fail(now, "job", error)
        while self.open_stages:
            name, started = self.open_stages.pop()
            self._finish_stage(name, status, now - started)

    def _on_stage(self, now: float, name: str) -> None:
        self.open_stages.append((name, now))
        self.step = None
        if name == "train":
            self.training = Training()

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
        self.step = self.steps[id] = StepProgress(name, int(total), now)
        drop_oldest(self.steps, KEPT_STEPS)

    def _on_advance(self, now: float, id: int, count: int) -> None:
        if id in self.steps:
            self.steps[id].advance(int(count), now)

    def _on_tasks(self, now: float, token: str, name: str, count: int, inherited: list[list[int]]) -> None:
        self.tasks[token] = Chunks(name, int(count), inherited, now)
        drop_oldest(self.tasks, KEPT_TASKS)

    def _on_tasks_end(self, now: float, token: str, done: bool) -> None:
        if token in self.tasks:
            self.tasks[token].close(now, done=done)

    def _on_loss(self, now: float, step: int, value: float) -> None:
        if math.isfinite(value):
            self.training.loss.add(int(step), float(value))

    def _on_residual(self, now: float, value: float | None) -> None:
        self.training.residual = None if value is None else float(value)

    def _on_inertia(self, now: float, round: int | None, value: float, rounds: int = 0) -> None:
        if round is None:
            self.training.exact_inertia = float(value)
            return
        self.training.inertia.add(int(round), float(value))
        if round == 0:  # the rounds are Dask-ML's, which shows no progress
            self.step = StepProgress("k-means", int(rounds), now)
        if self.step is not None and self.step.name == "k-means":
            self.step.advance(int(round) - self.step.done, now)

    def _on_sample(self, now: float, bits: int, sample: dict[str, Any] | None) -> None:
        self.balance = Balance(int(bits), sample)

    def _on_search(self, now: float, queries: int, seconds: float) -> None:
        self.counters.queries += int(queries)
        self.searches.count(int(queries), seconds, now)

    def fail(self, now: float, where: str, text: str) -> None:
        self.failures += 1
        self.counters.failures += 1
        self.listed_failures.append({"time": round(now, 1), "where": where, "text": text})

    # What workers say

    def work(self, worker: str, event: list[Any], now: float) -> None:
        """['begin', token, number] or ['end', token, number, state, seconds, facts]."""
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
        amounts = {kind: facts.get(kind, 0) for kind in AMOUNTS}
        nbytes = amounts["read"] + amounts["written"]
        for totals in (self.totals, self.counters.tasks):
            totals.count(chunks.name, "done", seconds, facts)
        chunks.rows, chunks.nbytes = chunks.rows + amounts["rows"], chunks.nbytes + nbytes
        self.rates.add(now, seconds, amounts)
        self.recent.add(now, seconds, amounts["rows"], nbytes)
        self.balance.count(facts)

    def lose(self, worker: str, now: float) -> None:
        """A worker is gone; what it had under way is done again elsewhere."""
        lost = sum(chunks.lose(worker) for chunks in self.tasks.values())
        if lost:
            self.fail(now, worker, f"worker lost with {lost} tasks under way")

    # What is shown

    @property
    def shown_tasks(self) -> Chunks | None:
        """The tasks of the map: the newest."""
        return next(reversed(self.tasks.values()), None)

    def document(self, now: float) -> Document:
        """All of it as JSON, as it is now or was at the end of the job."""
        now = now if self.ended is None else self.ended
        stage, begun = self.open_stages[-1] if self.open_stages else (None, now)
        totals = self.totals.copy().items()
        return {
            "job": {
                "name": self.name,
                "status": self.status,
                "error": self.error,
                "started": round(self.started, 3),
                "seconds": round(now - self.started, 2),
            },
            "stage": {"name": stage, "seconds": round(now - begun, 2), "finished": list(self.stages)},
            "step": self.step.document(now) if self.step else None,
            "speed": self._speed(now),
            "totals": {name: {"chunks": sums.pop("done"), **sums} for name, sums in totals},
            "chunks": self.shown_tasks.summary() if self.shown_tasks else None,
            "train": self.training.document(),
            "balance": self.balance.document(),
            "search": self.searches.document(now),
            "failures": {"count": self.failures, "recent": list(self.listed_failures)},
        }

    def _speed(self, now: float) -> Document:
        """Speed now while tasks run, the average of the last tasks afterwards."""
        tasks = self.shown_tasks
        runs = tasks is not None and not tasks.over and self.ended is None
        rows, nbytes = self.recent.rates(now) if runs else tasks.average(now) if tasks else (0.0, 0.0)
        unknown = self.recent.mean_seconds(now) if runs else 0.0  # what runs now is counted when it ends
        return {
            "is_average": not runs,
            "rows_per_second": round(rows, 1),
            "bytes_per_second": round(nbytes),
            "bucket_seconds": self.rates.width,
            "over_time": self.rates.rates(now - unknown),
        }
