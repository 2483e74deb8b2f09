"""docs/options.md, made from the declared options: ``python -m tests.support.option_tables`` writes it anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from och_dist.catalog import COMMANDS, PIPELINE_ONLY, STAGES, Stage
from och_dist.cli.commands import click_parameter
from och_dist.options import Declared, read_declared

PLACE = Path(__file__).parents[2] / "docs" / "options.md"
HEAD = """# Options

Made from the signatures of the stages by `python -m tests.support.option_tables`; a test holds it equal.

The second column is the key of a `[[stages]]` table of a pipeline file; `och COMMAND --help` shows the same. A value
out of its range ends with exit code 2, before anything is done. Every command also takes `--json`, `-v`, `-q` and
`--log-format`.
"""
COLUMNS = "| command line | key | type | default | what |\n|---|---|---|---|---|\n"


def tables() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, stage in sorted({**STAGES, **COMMANDS}.items()):
        pipeline = STAGES.get(name)
        if pipeline in (None, stage):
            where = "A stage of pipelines only." if name in PIPELINE_ONLY else "" if pipeline else "A command only."
            parts.append(section(name, stage, where))
        else:
            parts += [section(f"{name} (command)", stage, ""), section(f"{name} (stage)", pipeline, "")]
    about = "Where the work runs: options of all commands that work, and the keys of `[cluster]` in a pipeline file."
    parts.append(f"## Cluster\n\n{about}\n\n{COLUMNS}{rows(read_declared('cluster:ClusterOptions').values(), True)}")
    return "\n".join(parts)


def section(name: str, stage: Stage, where: str) -> str:
    said = f"{stage.sentence} {where}".strip()
    command = stage in COMMANDS.values()
    return f"## {name}\n\n{said}\n\n{COLUMNS}{rows(stage.options.values(), command)}"


def rows(options: Iterable[Declared], command: bool) -> str:
    return "".join(f"| {' | '.join(cells(option, command))} |\n" for option in options)


def cells(declared: Declared, command: bool) -> Iterator[str]:
    """The columns of one option."""
    parameter = click_parameter(declared)
    argument = isinstance(parameter, click.Argument)
    flags = declared.name.upper() if argument else ", ".join([*parameter.opts, *parameter.secondary_opts])
    yield f"`{flags}`" if command else ""
    yield f"`{declared.name}`"
    yield type_name(declared)
    yield "required" if declared.required else default_text(declared.default)
    option = declared.option
    yield "" if option is None else option.sentence + (f" Use {option.range}." if option.range else "")


def type_name(declared: Declared) -> str:
    if declared.choices:
        return " or ".join(f"`{choice}`" for choice in declared.choices)
    names = {int: "whole number", float: "number", bool: "yes or no", str: "text", Any: "text or list"}
    return names.get(declared.kind, "table" if "Mapping" in str(declared.kind) else "list")


def default_text(value: Any) -> str:
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"`{','.join(map(str, value)) if isinstance(value, tuple) else value}`"


if __name__ == "__main__":
    PLACE.write_text(tables())
