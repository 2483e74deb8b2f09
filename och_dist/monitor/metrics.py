"""Prometheus series beside Dask's own: ``dask_och_...`` on the scheduler, ``dask_och_worker_...`` on workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import prometheus_client
from distributed import WorkerPlugin
from distributed.http.prometheus import PrometheusCollector
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from och_dist import events
from och_dist.monitor.chunks import STATES

Samples = Iterable[tuple[tuple[str, ...], float]]
Series = tuple[type, str, str, tuple[str, ...], Samples]
"""Kind, name, sentence, names of the labels, and (labels, value) of each sample."""


class OchSeries(PrometheusCollector):
    """The series of one process, as Prometheus asks for them."""

    prefix = "och"

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self.subsystem = self.prefix

    def series(self) -> Iterator[Series]:
        raise NotImplementedError

    def collect(self) -> Iterator[Any]:
        for kind, name, sentence, labels, samples in self.series():
            family = kind(self.build_name(name), sentence, labels=labels)
            for values, amount in samples:
                family.add_metric(values, amount)
            yield family


def of_tasks(totals: dict[str, dict[str, float]]) -> Iterator[Series]:
    """The series that scheduler and workers have in common."""

    def sums(name: str) -> Samples:
        return [((task,), found[name]) for task, found in totals.items()]

    nbytes = [((task, way), found[way]) for task, found in totals.items() for way in ("read", "written")]
    yield Counter, "rows", "Rows worked through", ("task",), sums("rows")
    yield Counter, "bytes", "Bytes of vectors read and of chunks written", ("task", "direction"), nbytes
    yield Counter, "task_seconds", "Seconds that tasks took", ("task",), sums("seconds")


class SchedulerSeries(OchSeries):
    """What all jobs of this scheduler did together, and the chunks of the present one."""

    def series(self) -> Iterator[Series]:
        plugin = self.server.plugins.get("och-monitor")
        if plugin is None:
            return
        state, counters, job = plugin.state, plugin.state.counters, plugin.state.job
        step, tasks = (job.step, job.shown_tasks) if job is not None else (None, None)
        totals = counters.tasks.copy()
        done = [((task,), sums["done"]) for task, sums in totals.items()]
        stages = [((stage,), seconds) for stage, seconds in list(counters.stages.items())]
        chunks = tasks.counts if tasks else dict.fromkeys(STATES, 0)
        states = [((name,), count) for name, count in chunks.items()]
        running = sum(known.status == "running" for known in state.jobs.values())
        ratio = step.done / step.total if step is not None and step.total else 0.0
        failures = "Failed tasks, lost workers with work, failed jobs"
        yield from of_tasks(totals)
        yield Counter, "chunks_done", "Chunks finished", ("task",), done
        yield Counter, "stage_seconds", "Seconds that finished stages took", ("stage",), stages
        yield Counter, "failures", failures, (), [((), counters.failures)]
        yield Counter, "queries", "Queries answered", (), [((), counters.queries)]
        yield Gauge, "chunks", "Chunks of the tasks that were begun last, by state", ("state",), states
        yield Gauge, "jobs_running", "Jobs that run now", (), [((), running)]
        yield Gauge, "progress_ratio", "Progress of the present step, 0 to 1", (), [((), ratio)]


class WorkerTaskSeries(OchSeries):
    """What the tasks of this process did."""

    prefix = "och_worker"

    def series(self) -> Iterator[Series]:
        totals = events.TOTALS.copy()
        ends = [
            ((task, state), sums[state])
            for task, sums in totals.items()
            for state in ("done", "failed", "retry")
            if state in sums
        ]
        failures = sum(count for (_, state), count in ends if state != "done")
        yield from of_tasks(totals)
        yield Counter, "chunks", "Tasks that ended here, by how", ("task", "state"), ends
        yield Counter, "failures", "Tasks that failed here", (), [((), failures)]


class WorkerSeries(WorkerPlugin):
    """Brings the series of a worker to those that are there and those that join later."""

    name = "och-worker-series"

    def setup(self, worker: Any) -> None:
        with contextlib.suppress(Exception):
            serve_series(WorkerTaskSeries, worker)


_served: dict[type, PrometheusCollector] = {}


def serve_series(collector: type[PrometheusCollector], server: Any) -> None:
    """Once a process: a second scheduler or worker in it takes over the series, as with Dask's own."""
    if collector in _served:
        _served[collector].server = server
        return
    _served[collector] = collector(server)
    prometheus_client.REGISTRY.register(_served[collector])
