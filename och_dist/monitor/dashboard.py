"""The page /och of the Dask dashboard, /och/status.json, and what feeds them.

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
from functools import partial
from typing import Any

import distributed.http
from distributed import Scheduler, SchedulerPlugin
from distributed.http.utils import RequestHandler
from jinja2 import Environment, FileSystemLoader

from och_dist import events
from och_dist.monitor.metrics import SchedulerSeries, serve_series
from och_dist.monitor.state import State

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
        for install in (add_routes, add_navigation, partial(serve_series, SchedulerSeries)):
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
