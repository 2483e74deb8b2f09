"""What a command runs in: the log it asks for, the cluster, and where its report goes."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from och_dist.errors import UsageError
from och_dist.options import read_declared

if TYPE_CHECKING:
    from och_dist.stage import Context, Report

OURS = "och_dist"
TALKATIVE = (
    *("asyncio", "tornado.application", "distributed.client", "distributed.core", "distributed.batched"),
    *("distributed.comm.tcp", "distributed.scheduler", "distributed.nanny", "distributed.deploy.spec"),
)
DASK = ("distributed", "distributed.client", "bokeh", "tornado", "tornado.application")
LOCAL = ("workers", "threads", "memory_limit")


class Session:
    """The options that all commands share, taken out of a command's own."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.as_json: bool = options.pop("as_json")
        self.quiet: bool = options.pop("quiet")
        self.log_format: str = options.pop("log_format")
        self.dashboard: str | None = None
        self.performance_report: str | None = options.pop("performance_report", None)
        given = {name: options.pop(name, None) for name in read_declared("cluster:ClusterOptions")}
        self.cluster = {name: value for name, value in given.items() if value is not None}
        verbose = options.pop("verbose")
        level = logging.WARNING if self.quiet else logging.DEBUG if verbose else logging.INFO
        configure_logging(level, self.log_format)

    @contextlib.contextmanager
    def context(self, defaults: dict[str, Any] | None = None, *, job: str | None = None) -> Iterator[Context]:
        """Connect, announce the dashboard, and show progress; ``job`` is the name of it on the page /och."""
        from och_dist.cluster import ClusterOptions, connect, dashboard_link
        from och_dist.monitor import log_progress, monitored, progress_bars, reported
        from och_dist.stage import Context

        options = ClusterOptions(**self.settings(defaults or {}))
        adopt_dask()
        with connect(options) as client, contextlib.ExitStack() as stack:
            self.dashboard = dashboard_link(client)
            if self.dashboard:
                self._announce(f"dashboard: {self.dashboard}")
            if self.performance_report:
                if client is None:
                    raise UsageError("--performance-report needs a cluster; leave out --workers 0")
                from distributed import performance_report

                stack.enter_context(client.as_current())
                stack.enter_context(performance_report(filename=self.performance_report))
            if stack.enter_context(monitored(client, job or command_name())) and self.dashboard:
                self._announce(f"this job:  {self.dashboard.removesuffix('status')}och")
            bars = sys.stderr.isatty() and not self.quiet and self.log_format == "text"
            progress = stack.enter_context(progress_bars()) if bars else log_progress
            yield Context(client=client, progress=reported(progress))

    def _announce(self, text: str) -> None:
        if self.log_format == "json":
            logging.getLogger(OURS).info("%s", text)  # at --quiet not shown
        elif not self.quiet:
            click.echo(text, err=True)

    def settings(self, defaults: dict[str, Any]) -> dict[str, Any]:
        """The options of the cluster: those of the command line, before those of a pipeline file.

        Of the file hold those that the command line leaves in force: --scheduler replaces local workers and vice versa.
        """
        from och_dist.cluster import ClusterOptions

        replaced = {*LOCAL, "insecure"} if "scheduler" in self.cluster else set()
        replaced |= {"scheduler", "insecure"} if "workers" in self.cluster else set()
        settings = {name: value for name, value in defaults.items() if name not in replaced} | self.cluster
        ClusterOptions(**settings)  # refuses impossible values, in a dry run too
        return settings

    def show(self, report: Report) -> None:
        """Print what a stage reports."""
        from och_dist.report import render, render_health, render_history

        shown = {"history": render_history, "doctor": render_health}.get(report.stage, render)
        self.print(report.to_json(), lambda: shown(report))

    def print(self, facts: dict[str, Any], text: Callable[[], str]) -> None:
        """One JSON object, or text for a reader."""
        click.echo(json.dumps(facts) if self.as_json else text())


def command_name() -> str:
    """What the operator called, in short: the command and the last part of each path it was given."""
    context = click.get_current_context(silent=True)
    if context is None:
        return "och"
    words = [context.command.name or "och"]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if isinstance(parameter, click.Argument) and value:
            values = value if isinstance(value, tuple) else (value,)
            words += [str(item).rstrip("/").rpartition("/")[2] for item in values[:3]]
    return " ".join(words)[:120]


# The log on stderr: lines for people, or one JSON object a line for a collector of logs


def without_tracebacks(record: logging.LogRecord) -> bool:
    """Leaves out what Dask logs with a traceback when a connection is lost: our last sentence says what happened."""
    return not record.exc_info or logging.getLogger(OURS).level <= logging.DEBUG


class JsonLines(logging.Formatter):
    """time (UTC), level, logger, message, and whatever else a record was given as ``fields``."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        body: dict[str, Any] = {
            "time": when,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str)


def configure_logging(level: int, form: str = "text") -> None:
    """Our own log on stderr. What Dask logs stays as Dask configures it, but for tracebacks (-v shows them): those come
    from the threads behind a client, some of them after all is said. In JSON every line is an object.
    """
    for name in TALKATIVE:
        logging.getLogger(name).filters[:] = [without_tracebacks]
    lines = JsonLines() if form == "json" else logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")
    _take_over(OURS, lines)
    logging.getLogger(OURS).setLevel(level)
    logging.captureWarnings(form == "json")
    if form == "json":
        _take_over("py.warnings", lines)


def adopt_dask() -> None:
    """Dask gives its loggers handlers of their own when it is imported; in a JSON log ours takes their place."""
    if logs_json():
        import distributed  # noqa: F401

        for name in DASK:
            _take_over(name, JsonLines())


def _take_over(name: str, lines: logging.Formatter) -> None:
    """One handler for each logger: a local cluster silences those of Dask while it lives."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(lines)
    logging.getLogger(name).handlers[:] = [handler]
    logging.getLogger(name).propagate = False


def logs_json() -> bool:
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger(OURS).handlers)


def last_words(text: str, exit_code: int, *, unexpected: bool) -> None:
    """Why a command ends: 'och: ...' on stderr, or the last line of a JSON log; the traceback if that is a bug."""
    if logs_json():
        fields = {"fields": {"exit_code": exit_code}}
        logging.getLogger(OURS).error("%s", text, extra=fields, exc_info=unexpected)
        return
    if unexpected:
        traceback.print_exc()
    print(f"och: {text}", file=sys.stderr)
