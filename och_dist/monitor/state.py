"""What the scheduler keeps of our jobs: events in, one small JSON document out. Nothing here uses Dask."""

from __future__ import annotations

from typing import Any

from och_dist.monitor.chunks import STATES
from och_dist.monitor.job import Counters, ObservedJob, drop_oldest
from och_dist.monitor.series import Window

KEPT_JOBS = 8
KEPT_TOKENS = 64
EARLY_TOKENS = 8
EARLY_EVENTS = 20_000
LISTED_WORKERS = 200
LATEST_SECONDS = 30.0


class WorkerFigures:
    """What one worker has done."""

    def __init__(self) -> None:
        self.window = Window()
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
        self.rows, self.chunks = self.rows + facts.get("rows", 0), self.chunks + 1
        self.window.add(now, seconds, facts.get("rows", 0), facts.get("read", 0) + facts.get("written", 0))


class State:
    """Jobs by driver, workers by address. Events of tasks may come before the driver has told of the tasks."""

    def __init__(self) -> None:
        self.jobs: dict[str, ObservedJob] = {}
        self.workers: dict[str, WorkerFigures] = {}
        self.counters = Counters()
        self.drivers: dict[str, str] = {}
        self.early: dict[str, list[tuple[str, list[Any], float]]] = {}
        self.events = 0

    def hear(self, message: dict[str, Any], now: float) -> None:
        """A message: {'driver' or 'worker': who, 'events': [...]}; anything else is not ours.

        Events of a driver are [kind, facts, seconds between then and 'sent'], those of a worker are as
        :meth:`ObservedJob.work` takes them.
        """
        events = message["events"]
        self.events += len(events)
        if "driver" in message:
            way = now - message.get("sent", now)
            now -= way if 0 < way < LATEST_SECONDS else 0.0  # beyond that it is a clock that differs
            for kind, facts, age in events:
                self._hear_driver(str(message["driver"]), str(kind), facts, now - age)
        else:
            worker = str(message["worker"])
            figures = self.workers.setdefault(worker, WorkerFigures())
            for event in events:
                figures.hear(event, now)
                self._hear_task(worker, event, now)

    def _hear_driver(self, driver: str, kind: str, facts: dict[str, Any], now: float) -> None:
        if kind == "job" or driver not in self.jobs:
            known = self.jobs.get(driver)
            if known is not None and known.status == "running" and not known.stages and not known.open_stages:
                known.name = str(facts.get("name", known.name))  # the same job, by a better name
                return
            self.jobs.pop(driver, None)
            self.jobs[driver] = ObservedJob(str(facts.get("name", "a job")), now, self.counters)
            drop_oldest(self.jobs, KEPT_JOBS)
            if kind == "job":
                return
        self.jobs[driver].hear(kind, facts, now)
        if kind == "tasks":
            token = facts["token"]
            self.drivers[token] = driver
            drop_oldest(self.drivers, KEPT_TOKENS)
            for worker, event, when in self.early.pop(token, []):
                self.jobs[driver].work(worker, event, when)

    def _hear_task(self, worker: str, event: list[Any], now: float) -> None:
        job = self.jobs.get(self.drivers.get(event[1], ""))
        if job is not None:
            job.work(worker, event, now)
            return
        early = self.early.setdefault(event[1], [])
        if len(early) < EARLY_EVENTS:
            early.append((worker, event, now))
        drop_oldest(self.early, EARLY_TOKENS)

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

    def chunk_counts(self) -> dict[str, int]:
        """Chunks of the map by state."""
        tasks = self.job.shown_tasks if self.job is not None else None
        return dict(zip(STATES, tasks.counts if tasks else [0] * len(STATES), strict=True))

    def snapshot(self, now: float, machines: dict[str, dict[str, Any]] | None = None) -> dict[str, Any]:
        """Everything as JSON. ``machines`` tells what the scheduler knows of each worker: name, memory, status."""
        job = self.job
        document: dict[str, Any] = {"format": 1, "time": round(now, 3), "events": self.events, "job": None}
        document["workers"] = self._workers(now, machines or {})
        if job is None:
            return document
        others = [other for other in self.jobs.values() if other is not job]
        shown = [
            {"name": other.name, "status": other.status, "step": other.step.document(now) if other.step else None}
            for other in others
        ]
        return {**document, **job.document(now), "others": shown}

    def _workers(self, now: float, machines: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        listed = []
        for address in list(machines or self.workers)[:LISTED_WORKERS]:
            figures = self.workers.get(address) or WorkerFigures()
            rows, nbytes = figures.window.rates(now)
            listed.append(
                {
                    "address": address,
                    "rows_per_second": round(rows, 1),
                    "bytes_per_second": round(nbytes),
                    "rows": figures.rows,
                    "chunks": figures.chunks,
                    "running": figures.running,
                    "failures": figures.failures,
                    **machines.get(address, {}),
                }
            )
        return listed
