"""Options and arguments of the command line, made from what the signatures of stages declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import click

from och_dist.errors import UsageError
from och_dist.options import Declared, parse_value

TYPES: dict[Any, click.ParamType] = {int: click.INT, float: click.FLOAT}


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
