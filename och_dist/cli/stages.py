"""The commands that call one stage and print its report."""

from __future__ import annotations

import contextlib
from typing import Any

import click

from och_dist.catalog import Stage
from och_dist.cli.parameters import click_parameter
from och_dist.cli.session import Session, output_options, working_options


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
