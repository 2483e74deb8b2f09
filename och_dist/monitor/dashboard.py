"""The page /och of the Dask dashboard, /och/status.json, Prometheus series beside Dask's own, and what feeds them.

``dask scheduler --preload och_dist.monitor.dashboard`` has them from the start; on any other scheduler that can import
this package, a job registers them when it begins. Either way twice is once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import distributed.http
import prometheus_client
from distributed import Scheduler, SchedulerPlugin, WorkerPlugin
from distributed.http.prometheus import PrometheusCollector
from distributed.http.utils import RequestHandler
from jinja2 import Environment, FileSystemLoader
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge

from och_dist import events
from och_dist.monitor.state import STATES, State

logger = logging.getLogger("och_dist")

NAME = "och-monitor"
PAGE = "och"
FRESH_SECONDS = 0.4
POLICY = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'"
)


class OchMonitor(SchedulerPlugin):
    """Takes the events of our jobs into one small state. It costs the scheduler a few microseconds for each."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.state = State()
        self.scheduler: Scheduler | None = None
        self.document = b""
        self.made = -math.inf

    async def start(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        for install in (add_routes, add_navigation, serve_scheduler_series):
            try:
                install(scheduler)
            except Exception:
                logger.warning("%r failed; the rest of the monitoring works", install, exc_info=True)

    def log_event(self, topic: str, msg: Any) -> None:
        if topic == events.TOPIC:
            with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):  # of another version
                self.state.hear(msg, time.time())

    def remove_worker(self, scheduler: Scheduler, worker: str, *, stimulus_id: str, **kwargs: Any) -> None:
        self.state.lose_worker(worker, time.time())

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        self.state.lose_driver(client, time.time())

    def status(self) -> bytes:
        """The state as JSON, made at most a few times a second however many look at it."""
        now = time.time()
        if now - self.made > FRESH_SECONDS:
            document = self.state.snapshot(now, machines(self.scheduler))
            self.document, self.made = json.dumps(document, separators=(",", ":")).encode(), now
        return self.document


async def dask_setup(scheduler: Scheduler) -> None:
    """Entry of ``--preload``."""
    if NAME not in scheduler.plugins:
        plugin = OchMonitor()
        await plugin.start(scheduler)
        scheduler.add_plugin(plugin, name=NAME, idempotent=True)


def machines(scheduler: Any) -> dict[str, dict[str, Any]]:
    """What the scheduler knows of its workers, by address."""
    return {
        address: {
            "name": str(worker.name),
            "status": worker.status.name,
            "threads": worker.nthreads,
            "cpu": worker.metrics.get("cpu", 0.0),
            "memory": worker.metrics.get("memory", 0),
            "memory_limit": worker.memory_limit,
        }
        for address, worker in (scheduler.workers if scheduler is not None else {}).items()
    }


def read_status(dask_scheduler: Any = None) -> bytes | None:
    """The same from a client, by ``run_on_scheduler``; None where no job of ours was seen."""
    plugin = dask_scheduler.plugins.get(NAME)
    return None if plugin is None else bytes(plugin.status())


class StatusHandler(RequestHandler):
    """/och/status.json"""

    def get(self) -> None:
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")
        self.write(read_status(self.server) or b"{}")


class PageHandler(RequestHandler):
    """/och: a page that asks for status.json every second and loads nothing from elsewhere."""

    def get(self) -> None:
        self.set_header("Content-Security-Policy", POLICY)
        folders = [os.path.dirname(__file__), os.path.join(os.path.dirname(distributed.http.__file__), "templates")]
        template = Environment(loader=FileSystemLoader(folders), autoescape=True).get_template("page.html")
        self.write(template.render(**navigation(self.server)))


def navigation(scheduler: Any) -> dict[str, Any]:
    """Variables of the stock pages' template; empty where the scheduler has no dashboard."""
    if not any(hasattr(application, "app_paths") for application in scheduler.http_application.applications):
        return {"pages": [PAGE], "plots": []}
    from distributed.dashboard.scheduler import template_variables

    found: dict[str, Any] = template_variables(scheduler)
    return found


def add_navigation(scheduler: Any) -> None:
    """An entry beside the stock ones: all stock pages share one list of them."""
    pages = navigation(scheduler)["pages"]
    if PAGE not in pages:
        pages.insert(1, PAGE)


def add_routes(scheduler: Any) -> None:
    """Serve page and status from the scheduler's own web server."""
    application, given = scheduler.http_application, {"dask_server": scheduler}
    page = f"{_prefix(application)}{PAGE}"
    application.add_handlers(".*$", [(page, PageHandler, given), (rf"{page}/status\.json", StatusHandler, given)])


def _prefix(application: Any) -> str:
    """Where the stock pages begin: '/', or what --dashboard-prefix says."""
    for host in application.default_router.rules:
        for rule in getattr(host.target, "rules", ()):
            pattern = getattr(getattr(rule.matcher, "regex", None), "pattern", "")
            if pattern.endswith("/health$"):
                return str(pattern.removesuffix("health$"))
    return "/"


# Prometheus: dask_och_... on the scheduler, dask_och_worker_... on workers

Samples = Iterable[tuple[tuple[str, ...], float]]
Series = tuple[type, str, str, tuple[str, ...], Samples]
"""Kind, name, sentence, names of the labels, and (labels, value) of each sample."""


def of_tasks(totals: dict[str, dict[str, float]]) -> Iterator[Series]:
    """The series that scheduler and workers have in common."""

    def sums(name: str) -> Samples:
        return [((task,), found[name]) for task, found in totals.items()]

    nbytes = [((task, way), found[way]) for task, found in totals.items() for way in ("read", "written")]
    yield Counter, "rows", "Rows worked through", ("task",), sums("rows")
    yield Counter, "bytes", "Bytes of vectors read and of chunks written", ("task", "direction"), nbytes
    yield Counter, "task_seconds", "Seconds that tasks took", ("task",), sums("seconds")


def series_of_scheduler(scheduler: Any) -> Iterator[Series]:
    """What all jobs of this scheduler did together, and the chunks of the present one."""
    plugin = scheduler.plugins.get(NAME)
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


def series_of_worker(worker: Any) -> Iterator[Series]:
    """What the tasks of this process did."""
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


class OchSeries(PrometheusCollector):
    """The series of one process, as Prometheus asks for them."""

    def __init__(self, server: Any, prefix: str, series: Callable[[Any], Iterator[Series]]) -> None:
        super().__init__(server)
        self.subsystem, self.series = prefix, series

    def collect(self) -> Iterator[Any]:
        for kind, name, sentence, labels, samples in self.series(self.server):
            family = kind(self.build_name(name), sentence, labels=labels)
            for values, amount in samples:
                family.add_metric(values, amount)
            yield family


_served: dict[str, OchSeries] = {}


def serve_series(server: Any, prefix: str, series: Callable[[Any], Iterator[Series]]) -> None:
    """Once a process: a second scheduler or worker in it takes over the series, as with Dask's own."""
    if prefix in _served:
        _served[prefix].server = server
        return
    _served[prefix] = OchSeries(server, prefix, series)
    prometheus_client.REGISTRY.register(_served[prefix])


def serve_scheduler_series(scheduler: Any) -> None:
    serve_series(scheduler, "och", series_of_scheduler)


class WorkerSeries(WorkerPlugin):
    """Brings the series of a worker to those that are there and those that join later."""

    name = "och-worker-series"

    def setup(self, worker: Any) -> None:
        with contextlib.suppress(Exception):
            serve_series(worker, "och_worker", series_of_worker)
