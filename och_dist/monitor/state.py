"""What the scheduler keeps of our jobs: events in, one small JSON document out. Nothing here uses Dask.

Events come in any order that a network may bring them in, and may be lost. What grows with the work is kept as figures
over time in little space: series of a whole job whose buckets grow, short windows, thinned curves.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np

from och_dist.events import AMOUNTS, Totals

STATES = ("waiting", "running", "done", "inherited", "failed")
WAITING, RUNNING, DONE, INHERITED, FAILED = range(len(STATES))
CELLS = 600

BUCKETS = 240
MOST_SPREAD = 120
WINDOW_SECONDS = 120.0
WINDOW_LENGTH = 4096
CURVE_POINTS = 240

KEPT_JOBS = 8
KEPT_TASKS = 4
EARLY_EVENTS = 20_000
ETA_SECONDS = 90.0
LISTED_STAGES = 40
LISTED_FAILURES = 20
LISTED_WORKERS = 200

Document = dict[str, Any]


def untrained() -> Document:
    """What is told of a training: curves of (step, loss) and (round, inertia), and what they end in."""
    return {"loss": [], "residual": None, "inertia": [], "exact_inertia": None}


def keep_newest(found: dict[Any, Any], count: int) -> None:
    for key in list(found)[:-count]:
        del found[key]


class Chunks:
    """The state of each chunk, one byte each. Tasks fill the places that chunks of earlier runs leave, in order."""

    def __init__(self, name: str, count: int, inherited: Sequence[Sequence[int]] = (), now: float = 0.0) -> None:
        self.name, self.started = name, now
        self.ended: float | None = None
        self.rows, self.nbytes = 0, 0
        self.total = count + sum(stop - start for start, stop in inherited)
        self.states = np.zeros(self.total, np.uint8)
        for start, stop in inherited:
            self.states[start:stop] = INHERITED
        self.places = np.flatnonzero(self.states != INHERITED)
        self.counted = bytearray(self.total)
        self.by_worker: dict[str, set[int]] = {}

    @property
    def counts(self) -> dict[str, int]:
        """Chunks by state."""
        return dict(zip(STATES, np.bincount(self.states, minlength=len(STATES)).tolist(), strict=True))

    def _place(self, number: int) -> int | None:
        """Where the chunk of a task lies; None for a task that does not belong here."""
        return int(self.places[number]) if 0 <= number < len(self.places) else None

    def begin(self, number: int, worker: str) -> None:
        place = self._place(number)
        if place is not None and self.ended is None and self.states[place] != DONE:
            self.states[place] = RUNNING
            self.by_worker.setdefault(worker, set()).add(place)

    def end(self, number: int, worker: str, state: str) -> bool:
        """Whether this is the first end of a chunk that is done."""
        place = self._place(number)
        if place is None:
            return False
        self.by_worker.get(worker, set()).discard(place)
        if state == "done":
            self.states[place] = DONE
            first, self.counted[place] = not self.counted[place], True
            return first
        if self.states[place] in (WAITING, RUNNING):  # it may wait again in the meantime, with the graph given up
            self.states[place] = FAILED if state == "failed" else WAITING
        return False

    def lose(self, worker: str) -> int:
        """Chunks that a lost worker had under way wait again; how many they were."""
        lost = [place for place in self.by_worker.pop(worker, set()) if self.states[place] == RUNNING]
        self.states[lost] = WAITING
        return len(lost)

    def close(self, now: float, *, done: bool) -> None:
        """The driver has all results, or gave up: what it says counts, events may have been lost."""
        self.ended = now
        self.by_worker.clear()
        self.states[self.states == RUNNING] = WAITING
        if done:
            self.states[self.states != INHERITED] = DONE

    def average(self, now: float) -> tuple[float, float]:
        """Rows and bytes per second since the tasks were given out."""
        seconds = max(0.001, (now if self.ended is None else self.ended) - self.started)
        return self.rows / seconds, self.nbytes / seconds

    def document(self) -> dict[str, Any]:
        """Counts by state, and the map: per cell how many of its chunks are in each state."""
        return {
            "task": self.name,
            "total": self.total,
            "over": self.ended is not None,
            "counts": self.counts,
            "states": list(STATES),
            "cells": self._cells(min(CELLS, self.total)),
        }

    def _cells(self, cells: int) -> list[Any]:
        """A digit (the state) for a cell whose chunks are all alike, otherwise the five counts."""
        cell = np.arange(self.total) * cells // max(1, self.total)
        table = np.bincount(cell * len(STATES) + self.states, minlength=cells * len(STATES)).reshape(cells, len(STATES))
        return [row.index(max(row)) if max(row) == sum(row) else row for row in table.tolist()]


class RateSeries:
    """Amounts per second since ``start``, of several kinds, in at most BUCKETS buckets: full, they double in width."""

    def __init__(self, kinds: Sequence[str], start: float) -> None:
        self.start, self.width = start, 1.0
        self.buckets = {kind: [0.0] * BUCKETS for kind in kinds}

    def _bucket(self, when: float) -> int:
        return max(0, int((when - self.start) / self.width))

    def _reach(self, now: float) -> int:
        while self._bucket(now) >= BUCKETS:
            self.width *= 2
            for values in self.buckets.values():
                pairs = zip(values[::2], values[1::2], strict=True)
                values[:] = [*map(sum, pairs), *[0.0] * (BUCKETS // 2)]
        return self._bucket(now)

    def add(self, now: float, seconds: float, amounts: Sequence[float]) -> None:
        """Spread an amount of each kind over the ``seconds`` before ``now`` in which they were worked on."""
        last = self._reach(now)
        first = max(last - MOST_SPREAD, self._bucket(now - seconds))
        share = 1 / (last - first + 1)
        for values, amount in zip(self.buckets.values(), amounts, strict=True):
            for place in range(first, last + 1):
                values[place] += amount * share

    def rates(self, now: float) -> dict[str, list[float]]:
        """Per second, bucket by bucket; the newest one, which is not over, is left out while there are others."""
        complete = max(1, self._reach(now))
        return {
            kind: [round(value / self.width, 3) for value in values[:complete]] for kind, values in self.buckets.items()
        }


class Window:
    """Recent amounts, each with its time and how long it took."""

    def __init__(self) -> None:
        self.entries: deque[tuple[float, float, float, float]] = deque(maxlen=WINDOW_LENGTH)

    def add(self, now: float, seconds: float, amount: float, other: float = 0.0) -> None:
        self.entries.append((now, seconds, amount, other))
        while self.entries[0][0] < now - WINDOW_SECONDS:
            self.entries.popleft()

    def _since(self, when: float) -> list[tuple[float, float, float, float]]:
        return [entry for entry in self.entries if entry[0] >= when]

    def rates(self, now: float) -> tuple[float, float]:
        """Amounts per second of late: over ten seconds, or several times what one takes if that is longer."""
        reach = min(WINDOW_SECONDS, max(10.0, 3 * self.mean_seconds(now)))
        recent = self._since(now - reach)
        if not recent:
            return 0.0, 0.0
        first = min(when - seconds for when, seconds, _, _ in recent)
        span = max(0.2, min(reach, now - first))
        return sum(entry[2] for entry in recent) / span, sum(entry[3] for entry in recent) / span

    def mean_seconds(self, now: float) -> float:
        """How long one takes of late."""
        recent = self._since(now - WINDOW_SECONDS)
        return sum(seconds for _, seconds, _, _ in recent) / len(recent) if recent else 0.0

    def quantiles(self, now: float, shares: Sequence[float]) -> list[float | None]:
        """Quantiles of the seconds that the recent entries took."""
        values = sorted(seconds for _, seconds, _, _ in self._since(now - WINDOW_SECONDS))
        return [values[min(len(values) - 1, int(share * len(values)))] if values else None for share in shares]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """About CURVE_POINTS points of a curve, evenly spread, and always its last one."""
    kept = list(points[:: -(-len(points) // CURVE_POINTS) or 1])
    return [*kept, *points[-1:]] if kept[-1:] != list(points[-1:]) else kept


class Counters:
    """Sums over all jobs, which only grow: amounts by task, seconds by stage, failures, queries."""

    def __init__(self) -> None:
        self.tasks = Totals()
        self.stages: dict[str, float] = defaultdict(float)
        self.failures = 0
        self.queries = 0


class StepProgress:
    """Progress of a part of a stage, as its progress bar has it."""

    def __init__(self, name: str, total: int, id: int | None = None) -> None:
        self.name, self.total, self.done, self.id = name, total, 0, id
        self.recent: deque[tuple[float, int]] = deque(maxlen=512)

    def advance(self, count: int, now: float) -> None:
        self.done = min(self.total, self.done + count) if self.total else self.done + count
        self.recent.append((now, self.done))

    def eta(self, now: float) -> float | None:
        """Seconds left at the speed of late; None while there is nothing to go by."""
        if self.total and self.done >= self.total:
            return 0.0
        when, done = next((entry for entry in self.recent if entry[0] >= now - ETA_SECONDS), (now, self.done))
        if not self.total or self.done <= done or now <= when:
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


class Balance:
    """How often each bit is set: in the codes of this job, and in the sample that the model was trained on."""

    def __init__(self, bits: int, sample: dict[str, Any] | None) -> None:
        self.ones, self.rows = np.zeros(bits, np.int64), 0
        fits = sample and sample.get("rows") and len(sample.get("ones", ())) == bits
        self.sample: dict[str, Any] = dict(sample) if sample and fits else {"rows": 0, "ones": []}

    def count(self, facts: dict[str, Any]) -> None:
        ones = facts.get("ones")
        if ones is not None and len(ones) == len(self.ones):
            self.ones += np.array(ones, np.int64)
            self.rows += facts.get("rows", 0)

    def document(self) -> Document:
        return {
            "bits": len(self.ones),
            "rows": self.rows,
            "ones": (self.ones / self.rows).round(4).tolist() if self.rows else [],
            "sample_rows": self.sample["rows"],
            "sample": [round(count / self.sample["rows"], 4) for count in self.sample["ones"]],
        }


class Searches:
    """Batches of queries that were answered."""

    def __init__(self, start: float) -> None:
        self.batches, self.queries = 0, 0
        self.rates, self.recent = RateSeries(("queries",), start), Window()

    def count(self, queries: int, seconds: float, now: float) -> None:
        self.batches, self.queries = self.batches + 1, self.queries + queries
        self.rates.add(now, seconds, [queries])
        self.recent.add(now, seconds, queries)

    def document(self, now: float) -> Document:
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
        self.step: StepProgress | None = None
        self.tasks: dict[str, Chunks] = {}
        self.totals = Totals()
        self.rates, self.recent = RateSeries(AMOUNTS, now), Window()
        self.train = untrained()
        self.balance: Balance | None = None
        self.searches: Searches | None = None
        self.failures = 0
        self.listed_failures: deque[Document] = deque(maxlen=LISTED_FAILURES)

    # What the driver says

    def hear(self, kind: str, facts: dict[str, Any], now: float) -> None:
        """One event of the driver; kinds that are not known are those of another version, and JSON has no NaN."""
        handle = getattr(self, f"_on_{kind}", None)
        if handle is not None and not any(isinstance(fact, float) and not isfinite(fact) for fact in facts.values()):
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
            self.train = untrained()

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
        self.step = StepProgress(name, int(total), id)

    def _on_advance(self, now: float, id: int, count: int) -> None:
        if self.step is not None and self.step.id == id:
            self.step.advance(int(count), now)

    def _on_tasks(self, now: float, token: str, name: str, count: int, inherited: list[list[int]]) -> None:
        self.tasks[token] = Chunks(name, int(count), inherited, now)
        keep_newest(self.tasks, KEPT_TASKS)

    def _on_tasks_end(self, now: float, token: str, done: bool) -> None:
        if token in self.tasks:
            self.tasks[token].close(now, done=done)

    def _on_loss(self, now: float, step: int, value: float) -> None:
        self.train["loss"].append((int(step), float(value)))

    def _on_residual(self, now: float, value: float | None) -> None:
        self.train["residual"] = value

    def _on_inertia(self, now: float, round: int | None, value: float, rounds: int = 0) -> None:
        if round is None:
            self.train["exact_inertia"] = float(value)
            return
        self.train["inertia"].append((int(round), float(value)))
        if round == 0:  # the rounds are Dask-ML's, which shows no progress
            self.step = StepProgress("k-means", int(rounds))
        if self.step is not None and self.step.name == "k-means":
            self.step.advance(int(round) - self.step.done, now)

    def _on_sample(self, now: float, bits: int, sample: dict[str, Any] | None) -> None:
        self.balance = Balance(int(bits), sample)

    def _on_search(self, now: float, queries: int, seconds: float) -> None:
        self.counters.queries += int(queries)
        self.searches = self.searches or Searches(now - seconds)
        self.searches.count(int(queries), seconds, now)

    def fail(self, now: float, where: str, text: str) -> None:
        self.failures += 1
        self.counters.failures += 1
        self.listed_failures.append({"time": round(now, 1), "where": where, "text": text})

    # What workers say

    def work(self, worker: str, event: list[Any], now: float) -> None:
        """['begin', token, number] or ['end', token, number, state, seconds, facts]."""
        kind, token, number = event[:3]
        chunks = self.tasks[token]
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
        rows, read, written = amounts = [facts.get(kind, 0) for kind in AMOUNTS]
        for totals in (self.totals, self.counters.tasks):
            totals.count(chunks.name, "done", seconds, facts)
        chunks.rows, chunks.nbytes = chunks.rows + rows, chunks.nbytes + read + written
        self.rates.add(now, seconds, amounts)
        self.recent.add(now, seconds, rows, read + written)
        if self.balance is not None:
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
            "chunks": self.shown_tasks.document() if self.shown_tasks else None,
            "train": self.train | {name: thinned(self.train[name]) for name in ("loss", "inertia")},
            "balance": self.balance.document() if self.balance else None,
            "search": self.searches.document(now) if self.searches else None,
            "failures": {"count": self.failures, "recent": list(self.listed_failures)},
        }

    def _speed(self, now: float) -> Document:
        """Speed now while tasks run, the average of the last tasks afterwards."""
        tasks = self.shown_tasks
        runs = tasks is not None and tasks.ended is None and self.ended is None
        rows, nbytes = self.recent.rates(now) if runs else tasks.average(now) if tasks else (0.0, 0.0)
        unknown = self.recent.mean_seconds(now) if runs else 0.0  # what runs now is counted when it ends
        return {
            "is_average": not runs,
            "rows_per_second": round(rows, 1),
            "bytes_per_second": round(nbytes),
            "bucket_seconds": self.rates.width,
            "over_time": self.rates.rates(now - unknown),
        }


class WorkerFigures:
    """What one worker has done."""

    def __init__(self) -> None:
        self.recent = Window()
        self.rows, self.chunks, self.running, self.failures = 0, 0, 0, 0

    def hear(self, event: list[Any], now: float) -> None:
        if event[0] == "begin":
            self.running += 1
            return
        state, seconds, facts = event[3:6]
        self.running = max(0, self.running - 1)
        if state != "done":
            self.failures += 1
            return
        rows = facts.get("rows", 0)
        self.rows, self.chunks = self.rows + rows, self.chunks + 1
        self.recent.add(now, seconds, rows, facts.get("read", 0) + facts.get("written", 0))

    def document(self, now: float) -> Document:
        rows, nbytes = self.recent.rates(now)
        return {
            "rows_per_second": round(rows, 1),
            "bytes_per_second": round(nbytes),
            "rows": self.rows,
            "chunks": self.chunks,
            "running": self.running,
            "failures": self.failures,
        }


class State:
    """Jobs by driver, workers by address. Events of tasks may come before the driver has told of the tasks."""

    def __init__(self) -> None:
        self.jobs: dict[str, ObservedJob] = {}
        self.workers: dict[str, WorkerFigures] = {}
        self.counters = Counters()
        self.early: deque[tuple[str, list[Any], float]] = deque(maxlen=EARLY_EVENTS)
        self.events = 0

    def hear(self, message: dict[str, Any], now: float) -> None:
        """A message: {'driver' or 'worker': who, 'events': [...]}; anything else is not ours.

        Events of a driver are [kind, facts, seconds since then], those of a worker are as :meth:`ObservedJob.work`
        takes them.
        """
        self.events += len(message["events"])
        if "driver" in message:
            for kind, facts, age in message["events"]:
                self._hear_driver(message["driver"], kind, facts, now - age)
            return
        worker = message["worker"]
        figures = self.workers.setdefault(worker, WorkerFigures())
        for event in message["events"]:
            figures.hear(event, now)
            self._hear_task(worker, event, now)

    def _hear_driver(self, driver: str, kind: str, facts: dict[str, Any], now: float) -> None:
        if kind == "job":
            self.jobs.pop(driver, None)
            self.jobs[driver] = ObservedJob(facts["name"], now, self.counters)
            keep_newest(self.jobs, KEPT_JOBS)
        elif driver in self.jobs:
            self.jobs[driver].hear(kind, facts, now)
        if kind == "tasks":
            early = list(self.early)
            self.early.clear()
            for entry in early:
                self._hear_task(*entry)

    def _hear_task(self, worker: str, event: list[Any], now: float) -> None:
        job = next((job for job in self.jobs.values() if event[1] in job.tasks), None)
        if job is None:
            self.early.append((worker, event, now))
        else:
            job.work(worker, event, now)

    def lose_worker(self, worker: str, now: float) -> None:
        self.workers.pop(worker, None)
        for job in self.jobs.values():
            job.lose(worker, now)

    def lose_driver(self, driver: str, now: float) -> None:
        """A driver that disconnects before the end of its job was killed."""
        job = self.jobs.get(driver)
        if job is not None and job.status == "running":
            job.hear("job_end", {"status": "lost", "error": "the driver went away"}, now)

    @property
    def job(self) -> ObservedJob | None:
        """The job to show: the newest that runs, or else the newest."""
        running = [job for job in self.jobs.values() if job.status == "running"]
        return max(running or self.jobs.values(), key=lambda job: job.started, default=None)

    def snapshot(self, now: float, machines: dict[str, Document] | None = None) -> Document:
        """Everything as JSON. ``machines`` tells what the scheduler knows of each worker: name, memory, status."""
        machines = machines or {address: {} for address in self.workers}
        workers = [
            {"address": address, **self.workers.get(address, WorkerFigures()).document(now), **machine}
            for address, machine in list(machines.items())[:LISTED_WORKERS]
        ]
        shown: Document = {"format": 1, "time": round(now, 3), "events": self.events, "job": None, "workers": workers}
        job = self.job
        if job is None:
            return shown
        others = [
            {"name": other.name, "status": other.status, "step": other.step.document(now) if other.step else None}
            for other in self.jobs.values()
            if other is not job
        ]
        return {**shown, **job.document(now), "others": others}
