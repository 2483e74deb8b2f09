"""Commands for whole jobs: run and demo, and history, which tells what earlier runs did."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from och_dist import events
from och_dist.cli.options import Surroundings, cluster_options, output_options

if TYPE_CHECKING:
    from och_dist.jobs import Pipeline
    from och_dist.stage import Context


@click.command()
@click.argument("file")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a variable, or STAGE.PARAMETER.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done, with sizes and memory.")
@cluster_options
def run(file: str, settings: tuple[str, ...], dry_run: bool, **options: Any) -> None:
    """Run a whole job from a pipeline FILE; running it again repeats no finished work."""
    run_file(file, settings, options, dry_run=dry_run)


@click.command()
@click.option("--dir", "folder", default="demo-data", show_default=True, help="Where the files go.")
@cluster_options
def demo(folder: str, **options: Any) -> None:
    """Do the main job on a generated corpus of 100,000 x 960: generate, train, encode, search, evaluate."""
    from och_dist.jobs import bundled

    run_file(str(bundled("demo.toml")), (f"dir={json.dumps(folder)}",), options)


@click.command()
@click.argument("index")
@click.option("-n", "--last", type=int, metavar="N", help="Only the last N runs.")
@click.option("--run", type=int, metavar="NUMBER", help="Everything about one run.")
@output_options
def history(index: str, **options: Any) -> None:
    """List the runs of pipelines that worked on INDEX: when, how they ended, what they added."""
    from och_dist.jobs import history as stage
    from och_dist.report import render_history

    around = Surroundings(options)
    report = stage(index, **options)
    click.echo(json.dumps(report.to_json()) if around.as_json else render_history(report))


def run_file(file: str, settings: tuple[str, ...], options: dict[str, Any], *, dry_run: bool = False) -> None:
    from och_dist.jobs import load_pipeline, recorded, run_pipeline
    from och_dist.report import render_run

    around = Surroundings(options)
    pipeline = load_pipeline(file, settings)
    if dry_run:
        _show_plan(pipeline, around)
        return
    with recorded(pipeline, file=file, settings=settings) as record, contextlib.ExitStack() as stack:
        context = late_context(lambda: stack.enter_context(_working(around, pipeline)))
        reports = run_pipeline(pipeline, context, begun=record.begun, told=record.told)
    if around.as_json:
        stages = {name: report.to_json() for name, report in reports}
        click.echo(json.dumps({"name": pipeline.name, "run": record.number, "stages": stages}))
    else:
        click.echo(render_run(pipeline.name, reports, around.dashboard))


@contextlib.contextmanager
def _working(around: Surroundings, pipeline: Pipeline) -> Any:
    from och_dist.cluster import warm

    with around.context(pipeline.cluster) as context:
        events.say("job", name=pipeline.name)
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


def _show_plan(pipeline: Pipeline, around: Surroundings) -> None:
    from och_dist.jobs import plan
    from och_dist.report import memory_needed, render_plan

    planned = plan(pipeline)
    cluster = around.settings(pipeline.cluster)
    needed = memory_needed(planned, cluster)
    if around.as_json:
        stages = [stage.to_json() for stage in planned]
        click.echo(json.dumps({"name": pipeline.name, "dry_run": True, "stages": stages, "memory": needed}))
    else:
        click.echo(render_plan(pipeline.name, planned, needed))


COMMANDS: tuple[click.Command, ...] = (run, demo, history)
