"""The commands that are no single stage: whole jobs (run, demo), and what only looks (status, settings)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from och_dist.catalog import OTHERS
from och_dist.cli.session import Session, observer_options, output_options, working_options
from och_dist.errors import UsageError

if TYPE_CHECKING:
    from och_dist.jobs import Pipeline
    from och_dist.stage import Context


def sharing(options: list[Any]) -> Callable[[click.Command], click.Command]:
    """A command with options that others have too, after its own."""

    def add(command: click.Command) -> click.Command:
        command.params += options
        return command

    return add


@sharing(working_options())
@click.command(help=OTHERS["run"])
@click.argument("file")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a variable, or STAGE.PARAMETER.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done, with sizes and memory.")
def run(file: str, settings: tuple[str, ...], dry_run: bool, **options: Any) -> None:
    run_file(file, settings, Session(options), dry_run=dry_run)


@sharing(working_options())
@click.command(help=OTHERS["demo"])
@click.option("--dir", "folder", default="demo-data", show_default=True, help="Where the files go.")
def demo(folder: str, **options: Any) -> None:
    from och_dist.jobs import bundled

    run_file(str(bundled("demo.toml")), (f"dir={json.dumps(folder)}",), Session(options))


def run_file(file: str, settings: tuple[str, ...], session: Session, *, dry_run: bool = False) -> None:
    from och_dist.jobs import load_pipeline, recorded, run_pipeline
    from och_dist.report import render_run

    pipeline = load_pipeline(file, settings)
    if dry_run:
        _show_plan(pipeline, session)
        return
    with recorded(pipeline, file=file, settings=settings) as record, contextlib.ExitStack() as stack:
        context = late_context(lambda: stack.enter_context(_working(session, pipeline)))
        reports = run_pipeline(pipeline, context, record)
    stages = {name: report.to_json() for name, report in reports}
    facts = {"name": pipeline.name, "run": record.number, "stages": stages}
    session.print(facts, lambda: render_run(pipeline.name, reports, session.dashboard))


@contextlib.contextmanager
def _working(session: Session, pipeline: Pipeline) -> Any:
    from och_dist.cluster import warm

    with session.context(pipeline.cluster, job=pipeline.name) as context:
        warm(context.client)
        yield context


def late_context(opened: Callable[[], Context]) -> Context:
    """A context whose cluster starts when a stage first asks for it: a night with nothing to do starts none."""
    from och_dist.stage import Context

    opened = cache(opened)

    def late(name: str) -> property:
        return property(lambda self: getattr(opened(), name))

    fields: dict[str, Any] = {name: late(name) for name in Context.__dataclass_fields__}
    made: Context = type("LateContext", (Context,), {**fields, "__init__": lambda self: None})()
    return made


def _show_plan(pipeline: Pipeline, session: Session) -> None:
    from och_dist.jobs import plan
    from och_dist.report import memory_needed, render_plan

    planned = plan(pipeline)
    needed = memory_needed(planned, session.settings(pipeline.cluster))
    stages = [stage.to_json() for stage in planned]
    facts = {"name": pipeline.name, "dry_run": True, "stages": stages, "memory": needed}
    session.print(facts, lambda: render_plan(pipeline.name, planned, needed))


@sharing(observer_options())
@click.command(help=OTHERS["status"])
@click.argument("index", required=False)
@click.option("--watch", is_flag=True, help="Go on showing the jobs of --scheduler, until Ctrl-C.")
def status(index: str | None, watch: bool, **options: Any) -> None:
    session = Session(options)
    connected = "scheduler" in session.cluster
    if index is None and not connected:
        raise UsageError("nothing to look at; give an INDEX, a --scheduler, or both")
    if watch and not connected:
        raise UsageError("--watch shows a --scheduler; give one, or leave it out")
    report = None
    if index is not None:
        from och_dist.upkeep import status as stage

        report = stage(index)
        if not (session.as_json and connected):
            session.show(report)
    if connected:
        from och_dist.cluster import ClusterOptions
        from och_dist.monitor import show_scheduler

        about = None if report is None else report.to_json()
        show_scheduler(ClusterOptions(**session.cluster), watch=watch, as_json=session.as_json, about=about)


@sharing(output_options())
@click.command(help=OTHERS["settings"])
@click.option("--file", "as_file", is_flag=True, help="Print the path of the file with the defaults and their meaning.")
def settings(as_file: bool, **options: Any) -> None:
    from och_dist.settings import FILE, in_force

    session = Session(options)
    if as_file:
        click.echo(FILE)
        return
    found = in_force()
    session.print(found, lambda: "\n".join(_lines(found)))


def _lines(group: dict[str, Any], depth: int = 0) -> list[str]:
    lines: list[str] = []
    for name, value in group.items():
        text = value if isinstance(value, str) else "" if isinstance(value, dict) else json.dumps(value)
        lines.append(f"{'  ' * depth}{name}: {text}".rstrip())
        lines += _lines(value, depth + 1) if isinstance(value, dict) else []
    return lines
