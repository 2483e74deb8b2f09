"""The commands: those that call one stage, those that do a whole job (run, demo), and those that only look."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

from och_dist.catalog import COMMANDS, OTHERS, Stage
from och_dist.cli.session import Session
from och_dist.errors import UsageError
from och_dist.options import Declared, Option, parse_value, read_declared

if TYPE_CHECKING:
    from och_dist.stage import Context

OBSERVER = ("scheduler", "tls_ca", "tls_cert", "tls_key", "insecure")
TYPES: dict[Any, click.ParamType] = {int: click.INT, float: click.FLOAT}


def make_command(name: str) -> click.Command:
    """A command of the catalogue."""
    made: click.Command = globals()[name] if name in OTHERS else stage_command(name, COMMANDS[name])
    return made


def stage_command(name: str, stage: Stage) -> click.Command:
    """The command of a stage: its arguments and options are those of the stage's signature."""
    declared = stage.options

    def call(**options: Any) -> None:
        session = Session(options)
        for key, value in options.items():
            declared[key].check_range(value)  # before a cluster starts
        with contextlib.ExitStack() as stack:
            brought: dict[str, Any] = {}
            if stage.takes("context"):
                brought["context"] = stack.enter_context(session.context())
            if stage.takes("connect"):
                brought["connect"] = session.context if {"scheduler", "workers"} & set(session.cluster) else None
            report = stage.function(**options, **brought)
        session.show(report)
        if code := report.facts.get("exit_code"):
            click.get_current_context().exit(code)

    works = stage.takes("context") or stage.takes("connect")
    shared = working_options() if works else output_options()
    own = [click_parameter(option) for option in declared.values()]
    return click.Command(name, callback=call, params=[*own, *shared], help=stage.sentence)


# Options and arguments, made from what signatures declare


def click_parameter(declared: Declared) -> click.Parameter:
    """A declared option as Click has it; without one, an argument."""
    name, kind, option = declared.name, declared.kind, declared.option
    origin = get_origin(kind)
    listed = isinstance(origin, type) and issubclass(origin, Sequence)
    if option is None:
        return click.Argument([name], nargs=-1 if listed else 1, required=declared.required)
    dashed = name.replace("_", "-")
    flags = option.flags or (f"--{dashed}/--no-{dashed}" if declared.default is True else f"--{dashed}")
    default = declared.default
    settings: dict[str, Any] = {"help": option.sentence, "metavar": option.metavar}
    if declared.required:
        settings |= {"required": True}
    elif kind is bool:
        settings |= {"is_flag": True, "default": default, "show_default": default is True}
    elif option.commas:
        text = default if isinstance(default, str) else ",".join(map(str, default or ()))
        split = _numbers if get_args(kind)[0] is int else _words
        settings |= {"default": text, "show_default": True, "callback": split}
    elif origin is Mapping:
        settings |= {"multiple": True, "callback": _pairs}
    elif listed:
        settings |= {"multiple": True}
    else:
        settings |= {"default": default, "show_default": default is not None}
        settings["type"] = click.Choice(get_args(kind)) if origin is Literal else TYPES.get(kind, click.STRING)
    return click.Option([name, *flags.split()], **settings)


def _words(ctx: click.Context, option: click.Parameter, text: str) -> list[str]:
    """'a,b,c' as a list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(ctx: click.Context, option: click.Parameter, text: str) -> list[int]:
    """'32,64,128' as a list."""
    try:
        return [int(part) for part in _words(ctx, option, text)]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of whole numbers such as 32,64,128") from None


def _pairs(ctx: click.Context, option: click.Parameter, settings: tuple[str, ...]) -> dict[str, Any]:
    """'name=value', again and again, as a dictionary."""
    found = {}
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator:
            raise UsageError(f"{option.opts[0]} {setting}: write name=value")
        found[name] = parse_value(text)
    return found


def output_options() -> list[click.Parameter]:
    """How a command reports and logs."""
    formats = "Log on stderr as lines of text, or as one JSON object a line."
    kinds = click.Choice(["text", "json"])
    return [
        click.Option(["as_json", "--json"], is_flag=True, help="Print the report as one JSON object."),
        click.Option(["-v", "--verbose"], is_flag=True, help="More on stderr."),
        click.Option(["-q", "--quiet"], is_flag=True, help="Only warnings and errors on stderr."),
        click.Option(["--log-format"], type=kinds, default="text", show_default=True, help=formats),
    ]


def cluster_options() -> dict[str, Declared]:
    """Where the work runs; None where nothing is said, so that a pipeline file or dask.yaml has its say."""
    found = read_declared("cluster:ClusterOptions")
    return {name: replace(option, default=None) for name, option in found.items()}


def working_options() -> list[click.Parameter]:
    """Output and cluster, as all commands have them that work on one."""
    written = "Write Dask's performance report (HTML) to FILE."
    cluster = {name: click_parameter(option) for name, option in cluster_options().items()}
    place = 1 + list(cluster).index("dashboard")
    options = list(cluster.values())
    options.insert(place, click.Option(["--performance-report"], metavar="FILE", help=written))
    return [*output_options(), *options]


def observer_options() -> list[click.Parameter]:
    """Output, and a scheduler to look at."""
    cluster = cluster_options()
    address = Option("A running scheduler: address or file.", metavar="ADDRESS|FILE")
    cluster["scheduler"] = replace(cluster["scheduler"], option=address)
    return [*output_options(), *(click_parameter(cluster[name]) for name in OBSERVER)]


# Commands that are no stage


def command(shared: list[click.Parameter]) -> Callable[[Callable[..., None]], click.Command]:
    """A command of the catalogue's others; the options that it shares come after its own."""

    def make(call: Callable[..., None]) -> click.Command:
        made = click.command(help=OTHERS[call.__name__])(call)
        made.params += shared
        return made

    return make


@command(working_options())
@click.argument("file")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Change a variable, or STAGE.PARAMETER.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done, with sizes and memory.")
def run(file: str, settings: tuple[str, ...], dry_run: bool, **options: Any) -> None:
    (show_plan if dry_run else run_file)(file, settings, Session(options))


@command(working_options())
@click.option("--dir", "folder", default="demo-data", show_default=True, help="Where the files go.")
def demo(folder: str, **options: Any) -> None:
    from och_dist.jobs import bundled

    run_file(str(bundled("demo.toml")), (f"dir={json.dumps(folder)}",), Session(options))


def run_file(file: str, settings: tuple[str, ...], session: Session) -> None:
    from och_dist.cluster import warm
    from och_dist.jobs import load_pipeline, recorded, run_pipeline
    from och_dist.report import render_run
    from och_dist.stage import LateContext

    pipeline = load_pipeline(file, settings)
    with recorded(pipeline, file=file, settings=settings) as record, contextlib.ExitStack() as stack:

        def open_context() -> Context:
            context = stack.enter_context(session.context(pipeline.cluster, job=pipeline.name))
            warm(context.client)
            return context

        reports = run_pipeline(pipeline, LateContext(open_context), record)
    stages = {name: report.to_json() for name, report in reports}
    facts = {"name": pipeline.name, "run": record.number, "stages": stages}
    session.print(facts, lambda: render_run(pipeline.name, reports, session.dashboard))


def show_plan(file: str, settings: tuple[str, ...], session: Session) -> None:
    from och_dist.jobs import load_pipeline, plan
    from och_dist.report import memory_needed, render_plan

    pipeline = load_pipeline(file, settings)
    planned = plan(pipeline)
    needed = memory_needed(planned, session.settings(pipeline.cluster))
    stages = [stage.to_json() for stage in planned]
    facts = {"name": pipeline.name, "dry_run": True, "stages": stages, "memory": needed}
    session.print(facts, lambda: render_plan(pipeline.name, planned, needed))


@command(observer_options())
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


@command(output_options())
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
