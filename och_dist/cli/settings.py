"""The command that shows the settings in force."""

from __future__ import annotations

import json
from typing import Any

import click

from och_dist.cli.options import output_options


@click.command()
@click.option("--file", "as_file", is_flag=True, help="Print the path of the file with the defaults and their meaning.")
@output_options
def settings(as_file: bool, as_json: bool, **output: Any) -> None:
    """Show the settings in force, of och and of Dask; DASK_OCH__GRACE=30s and the like change them."""
    from och_dist.settings import FILE, in_force

    if as_file:
        click.echo(FILE)
        return
    found = in_force()
    if as_json:
        click.echo(json.dumps(found))
        return
    lines: list[str] = []
    _list(found, 0, lines)
    click.echo("\n".join(lines))


def _list(group: dict[str, object], depth: int, lines: list[str]) -> None:
    for name, value in group.items():
        if isinstance(value, dict):
            lines.append(f"{'  ' * depth}{name}:")
            _list(value, depth + 1, lines)
        else:
            lines.append(f"{'  ' * depth}{name}: {value if isinstance(value, str) else json.dumps(value)}")
