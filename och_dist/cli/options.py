"""What all commands share: the options of output and cluster, and the surroundings they describe."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from och_dist.errors import UsageError
from och_dist.logs import adopt_dask, configure_logging

if TYPE_CHECKING:
    from och_dist.stage import Context, Report

Command = Callable[..., Any]

LOCAL = ("workers", "threads", "memory_limit")
CLUSTER = ("scheduler", *LOCAL, "dashboard", "tls_ca", "tls_cert", "tls_key", "insecure", "grace")

ROWS = "such as 5,10-20 (10 and 20 included), or @FILE (.npy of numbers or a mask, or a text file)"
IDS = "such as a17,b4, or @FILE (.npy, or .txt with one id a line)"


def expect_model(command: Command) -> Command:
    """--expect-model."""
    text = "Refuse another model than this one: its address, as 'och train' printed it."
    return click.option("--expect-model", metavar="sha256:DIGITS", help=text)(command)


def output_options(command: Command) -> Command:
    """--json, --log-format, -v and -q."""
    for option in (
        click.option(
            "--log-format",
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            help="Log on stderr as lines of text, or as one JSON object a line.",
        ),
        click.option("-q", "--quiet", is_flag=True, help="Only warnings and errors on stderr."),
        click.option("-v", "--verbose", is_flag=True, help="More on stderr."),
        click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object."),
    ):
        command = option(command)
    return command


def _security(command: Command) -> Command:
    for option in (
        click.option("--insecure", is_flag=True, default=None, help="Allow a scheduler elsewhere without TLS."),
        click.option("--tls-key", metavar="FILE", help="The key of --tls-cert [default: OCH_TLS_KEY]."),
        click.option("--tls-cert", metavar="FILE", help="Our certificate (PEM) [default: OCH_TLS_CERT]."),
        click.option(
            "--tls-ca", metavar="FILE", help="Authority of a tls:// scheduler and its clients [default: OCH_TLS_CA]."
        ),
    ):
        command = option(command)
    return command


def observer_options(command: Command) -> Command:
    """A scheduler to look at, and how to reach it."""
    scheduler = click.option("--scheduler", metavar="ADDRESS|FILE", help="A running scheduler: address or file.")
    return output_options(scheduler(_security(command)))


def cluster_options(command: Command) -> Command:
    """Where the work runs, and what is shown meanwhile."""
    grace = click.option(
        "--grace",
        type=float,
        metavar="SECONDS",
        help="Time for the tasks under way to finish after SIGTERM or Ctrl-C [default: och.grace, 10 s].",
    )
    command = _security(grace(command))
    for option in (
        click.option("--performance-report", metavar="FILE", help="Write Dask's performance report (HTML) to FILE."),
        click.option(
            "--dashboard/--no-dashboard",
            default=None,
            help="Dask dashboard of a local cluster (on loopback).",
        ),
        click.option(
            "--memory-limit",
            metavar="SIZE",
            help="Memory of each local worker, such as 2GB [default: share].",
        ),
        click.option("--threads", type=int, help="Threads of each local worker [default: 1]."),
        click.option("--workers", type=int, help="Local worker processes [default: one per core]; 0: this process."),
        click.option("--scheduler", metavar="ADDRESS|FILE", help="Use a running cluster: address or scheduler file."),
    ):
        command = option(command)
    return output_options(command)


class Surroundings:
    """The options that all commands share, taken out of a command's own."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.as_json: bool = options.pop("as_json")
        self.quiet: bool = options.pop("quiet")
        self.verbose: bool = options.pop("verbose")
        self.dashboard: str | None = None
        self.performance_report: str | None = options.pop("performance_report", None)
        given = {name: options.pop(name, None) for name in CLUSTER}
        self.cluster = {name: value for name, value in given.items() if value is not None}
        self.log_format: str = options.pop("log_format")
        level = logging.WARNING if self.quiet else logging.DEBUG if self.verbose else logging.INFO
        configure_logging(level, self.log_format)

    @contextlib.contextmanager
    def context(self, defaults: dict[str, Any] | None = None) -> Iterator[Context]:
        """Connect, announce the dashboard, and show progress."""
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
            if stack.enter_context(monitored(client, command_name())) and self.dashboard and not self.quiet:
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
        """The options of the cluster: those of the command line, before those of a pipeline file."""
        from och_dist.cluster import ClusterOptions

        settings = {**self._applicable(defaults), **self.cluster}
        ClusterOptions(**settings)  # refuses impossible values, in a dry run too
        return settings

    def _applicable(self, defaults: dict[str, Any]) -> dict[str, Any]:
        """The defaults that the command line leaves in force: --scheduler replaces local workers, and vice versa."""
        replaced = {*LOCAL, "insecure"} if "scheduler" in self.cluster else set()
        replaced |= {"scheduler", "insecure"} if "workers" in self.cluster else set()
        return {name: value for name, value in defaults.items() if name not in replaced}

    def show(self, report: Report) -> None:
        from och_dist.report import render

        click.echo(json.dumps(report.to_json()) if self.as_json else render(report))


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


def run_stage(options: dict[str, Any], stage: Callable[..., Report], *args: Any, **params: Any) -> None:
    """Run one stage on the chosen cluster and print its report."""
    around = Surroundings(options)
    with around.context() as context:
        report = stage(*args, **options, **params, context=context)
    around.show(report)
