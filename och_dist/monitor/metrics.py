"""Prometheus series beside Dask's own: ``dask_och_...`` on the scheduler, ``dask_och_worker_...`` on workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from distributed import WorkerPlugin
from distributed.http.prometheus import PrometheusCollector

from och_dist import events

Family = Any
Totals = dict[str, dict[str, float]]
Samples = Iterable[tuple[tuple[str, ...], float]]
_served: dict[str, PrometheusCollector] = {}


class OchSeries(PrometheusCollector):
    """The series of one process, as Prometheus asks for them."""

    prefix = "och"

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self.subsystem = self.prefix

    def counter(self, name: str, words: str, labels: tuple[str, ...], samples: Samples) -> Family:
        from prometheus_client.core import CounterMetricFamily

        return self._filled(CounterMetricFamily(self.build_name(name), words, labels=labels), samples)

    def gauge(self, name: str, words: str, labels: tuple[str, ...], samples: Samples) -> Family:
        from prometheus_client.core import GaugeMetricFamily

        return self._filled(GaugeMetricFamily(self.build_name(name), words, labels=labels), samples)

    def _filled(self, family: Family, samples: Samples) -> Family:
        for labels, value in samples:
            family.add_metric(labels, value)
        return family

    def of_tasks(self, totals: Totals) -> Iterator[Family]:
        """The series that scheduler and workers have in common."""
        found = totals.items()
        rows = [((task,), sums["rows"]) for task, sums in found]
        nbytes = [((task, way), sums[way]) for task, sums in found for way in ("read", "written")]
        seconds = [((task,), sums["seconds"]) for task, sums in found]
        yield self.counter("rows", "Rows worked through", ("task",), rows)
        yield self.counter("bytes", "Bytes of vectors read and of chunks written", ("task", "direction"), nbytes)
        yield self.counter("task_seconds", "Seconds that tasks took", ("task",), seconds)


class SchedulerSeries(OchSeries):
    """What all jobs of this scheduler did together, and the chunks of the present one."""

    def collect(self) -> Iterator[Family]:
        plugin = self.server.plugins.get("och-monitor")
        if plugin is None:
            return
        state = plugin.state
        counters, job, totals = state.counters, state.job, state.counters.tasks.copy()
        step = job.step if job is not None else None
        running = sum(known.status == "running" for known in state.jobs.values())
        ratio = step.done / step.total if step is not None and step.total else 0.0
        done = [((task,), sums["done"]) for task, sums in totals.items()]
        stages = [((stage,), seconds) for stage, seconds in list(counters.stages.items())]
        chunks = [((name,), count) for name, count in state.chunk_counts().items()]
        yield from self.of_tasks(totals)
        yield self.counter("chunks_done", "Chunks finished", ("task",), done)
        yield self.counter("stage_seconds", "Seconds that finished stages took", ("stage",), stages)
        failures = "Failed tasks, lost workers with work, failed jobs"
        yield self.counter("failures", failures, (), [((), counters.failures)])
        yield self.counter("queries", "Queries answered", (), [((), counters.queries)])
        yield self.gauge("chunks", "Chunks of the tasks that were begun last, by state", ("state",), chunks)
        yield self.gauge("jobs_running", "Jobs that run now", (), [((), running)])
        yield self.gauge("progress_ratio", "Progress of the present step, 0 to 1", (), [((), ratio)])


class WorkerTaskSeries(OchSeries):
    """What the tasks of this process did."""

    prefix = "och_worker"

    def collect(self) -> Iterator[Family]:
        totals = events.TOTALS.copy()
        ends = [
            ((task, state), sums[state])
            for task, sums in totals.items()
            for state in ("done", "failed", "retry")
            if state in sums
        ]
        failures = sum(count for (_, state), count in ends if state != "done")
        yield from self.of_tasks(totals)
        yield self.counter("chunks", "Tasks that ended here, by how", ("task", "state"), ends)
        yield self.counter("failures", "Tasks that failed here", (), [((), failures)])


def serve_scheduler_series(server: Any) -> None:
    _serve("scheduler", SchedulerSeries, server)


class WorkerSeries(WorkerPlugin):
    """Brings the series of a worker to those that are there and those that join later."""

    name = "och-worker-series"

    def setup(self, worker: Any) -> None:
        with contextlib.suppress(Exception):
            _serve("worker", WorkerTaskSeries, worker)


def _serve(role: str, collector: type[PrometheusCollector], server: Any) -> None:
    """Once a process: a second scheduler or worker in it takes over the series, as with Dask's own."""
    try:
        import prometheus_client
    except ModuleNotFoundError:
        return
    if role in _served:
        _served[role].server = server
        return
    _served[role] = collector(server)
    prometheus_client.REGISTRY.register(_served[role])
