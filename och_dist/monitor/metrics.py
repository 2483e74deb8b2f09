"""Prometheus series beside Dask's own: ``dask_och_...`` on the scheduler, ``dask_och_worker_...`` on workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from distributed import WorkerPlugin
from distributed.http.prometheus import PrometheusCollector

from och_dist.cluster import TOTALS

Family = Any
_served: dict[str, PrometheusCollector] = {}
DIRECTIONS = ("read", "written")


class SchedulerSeries(PrometheusCollector):
    """What all jobs of this scheduler did together, and the chunks of the present one."""

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self.subsystem = "och"

    def collect(self) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        plugin = self.server.plugins.get("och-monitor")
        if plugin is None:
            return
        state = plugin.state
        counters, job = state.counters, state.job
        yield from _task_families(self, dict(counters.tasks))
        seconds = CounterMetricFamily(
            self.build_name("stage_seconds"), "Seconds that finished stages took", labels=["stage"]
        )
        for stage, value in list(counters.stages.items()):
            seconds.add_metric([stage], value)
        yield seconds
        yield CounterMetricFamily(
            self.build_name("failures"), "Failed tasks, lost workers with work, failed jobs", value=counters.failures
        )
        yield CounterMetricFamily(self.build_name("queries"), "Queries answered", value=counters.queries)
        chunks = GaugeMetricFamily(
            self.build_name("chunks"), "Chunks of the tasks that were begun last, by state", labels=["state"]
        )
        for state_name, count in state.chunk_counts().items():
            chunks.add_metric([state_name], count)
        yield chunks
        running = sum(known.status == "running" for known in state.jobs.values())
        yield GaugeMetricFamily(self.build_name("jobs_running"), "Jobs that run now", value=running)
        step = job.step if job is not None else None
        ratio = step.done / step.total if step is not None and step.total else 0.0
        yield GaugeMetricFamily(self.build_name("progress_ratio"), "Progress of the present step, 0 to 1", value=ratio)


class WorkerTaskSeries(PrometheusCollector):
    """What the tasks of this process did."""

    def __init__(self, server: Any) -> None:
        super().__init__(server)
        self.subsystem = "och_worker"

    def collect(self) -> Iterator[Family]:
        from prometheus_client.core import CounterMetricFamily

        totals = TOTALS.copy()
        yield from _task_families(self, {key: value for key, value in totals.items() if key[1] not in OUTCOMES})
        chunks = CounterMetricFamily(
            self.build_name("chunks"), "Tasks that ended here, by how", labels=["task", "state"]
        )
        failures = 0.0
        for (task, kind), value in totals.items():
            if kind in OUTCOMES:
                chunks.add_metric([task, kind], value)
                failures += value if kind != "done" else 0
        yield chunks
        yield CounterMetricFamily(self.build_name("failures"), "Tasks that failed here", value=failures)


OUTCOMES = ("done", "failed", "retry")


def _task_families(collector: PrometheusCollector, totals: dict[tuple[str, str], float]) -> Iterator[Family]:
    from prometheus_client.core import CounterMetricFamily

    rows = CounterMetricFamily(collector.build_name("rows"), "Rows worked through", labels=["task"])
    nbytes = CounterMetricFamily(
        collector.build_name("bytes"), "Bytes of vectors read and of chunks written", labels=["task", "direction"]
    )
    seconds = CounterMetricFamily(collector.build_name("task_seconds"), "Seconds that tasks took", labels=["task"])
    done = CounterMetricFamily(collector.build_name("chunks_done"), "Chunks finished", labels=["task"])
    for (task, kind), value in totals.items():
        if kind == "rows":
            rows.add_metric([task], value)
        elif kind in DIRECTIONS:
            nbytes.add_metric([task, kind], value)
        elif kind == "seconds":
            seconds.add_metric([task], value)
        elif kind == "chunks":
            done.add_metric([task], value)
    yield from (rows, nbytes, seconds, done) if collector.subsystem == "och" else (rows, nbytes, seconds)


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
