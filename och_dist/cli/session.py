"""What a command runs in: the options that all share, the log they ask for, the cluster, and where the report goes."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from och_dist.cli.parameters import click_parameter
from och_dist.errors import UsageError
from och_dist.logs import adopt_dask, configure_logging
from och_dist.options import Option, read_declared

if TYPE_CHECKING:
    from och_dist.stage import Context, Report

LOCAL = ("workers", "threads", "memory_limit")
OBSERVER = ("scheduler", "tls_ca", "tls_cert", "tls_key", "insecure")
CLUSTER = read_declared("cluster:ClusterOptions")


def output_options() -> list[click.Option]:
    """--json, -v, -q and --log-format."""
    formats = "Log on stderr as lines of text, or as one JSON object a line."
    return [
        click.Option(["as_json", "--json"], is_flag=True, help="Print the report as one JSON object."),
        click.Option(["-v", "--verbose"], is_flag=True, help="More on stderr."),
        click.Option(["-q", "--quiet"], is_flag=True, help="Only warnings and errors on stderr."),
        click.Option(
            ["--log-format"], type=click.Choice(["text", "json"]), default="text", show_default=True, help=formats
        ),
    ]


def cluster_options(names: Sequence[str] = tuple(CLUSTER)) -> list[click.Parameter]:
    """Where the work runs; None where nothing is said, so that a pipeline file or dask.yaml has its say."""
    return [click_parameter(replace(CLUSTER[name], default=None)) for name in names]


def working_options() -> list[click.Parameter]:
    """Output and cluster, as all commands have them that work on one."""
    report = click.Option(
        ["--performance-report"], metavar="FILE", help="Write Dask's performance report (HTML) to FILE."
    )
    cluster = cluster_options()
    place = 1 + list(CLUSTER).index("dashboard")
    return [*output_options(), *cluster[:place], report, *cluster[place:]]


def observer_options() -> list[click.Parameter]:
    """Output, and a scheduler to look at."""
    scheduler, *security = cluster_options(OBSERVER)
    scheduler = click_parameter(
        replace(CLUSTER["scheduler"], option=Option("A running scheduler: address or file.", metavar="ADDRESS|FILE"))
    )
    return [*output_options(), scheduler, *security]


class Session:
    """The options that all commands share, taken out of a command's own."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.as_json: bool = options.pop("as_json")
        self.quiet: bool = options.pop("quiet")
        self.log_format: str = options.pop("log_format")
        self.dashboard: str | None = None
        self.performance_report: str | None = options.pop("performance_report", None)
        given = {name: options.pop(name, None) for name in CLUSTER}
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
            if self.dashboard and not self.quiet:
                self._announce(f"dashboard: {self.dashboard}")
            if self.performance_report:
                if client is None:
                    raise UsageError("--performance-report needs a cluster; leave out --workers 0")
                from distributed import performance_report

                stack.enter_context(client.as_current())
                stack.enter_context(performance_report(filename=self.performance_report))
            if stack.enter_context(monitored(client, job or command_name())) and self.dashboard and not self.quiet:
                self._announce(f"this job:  {self.dashboard.removesuffix('status')}och")
            bars = sys.stderr.isatty() and not self.quiet and self.log_format == "text"
            progress = stack.enter_context(progress_bars()) if bars else log_progress
            yield Context(client=client, progress=reported(progress))

    def _announce(self, text: str) -> None:
        if self.log_format == "json":
            logging.getLogger("och_dist").info("%s", text)
        else:
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
