"""The settings of ``dask.yaml``: defaults beneath whatever the user says in files, variables or code.

Our own are ``och.*`` in Dask's configuration, so that files in ``~/.config/dask`` and variables such as
``DASK_OCH__CONNECT_TIMEOUT`` change them. Dask's own (``distributed.*``) are changed only where the user is silent.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

from och_dist.errors import UsageError

FILE = Path(__file__).with_name("dask.yaml")


@functools.cache
def defaults() -> dict[str, Any]:
    """What ``dask.yaml`` says."""
    import dask

    (found,) = dask.config.collect_yaml([str(FILE)])
    return dict(found)


@functools.cache
def _apply_ours() -> None:
    import dask

    dask.config.update_defaults({"och": defaults()["och"]})


@functools.cache
def apply() -> None:
    """Put all defaults beneath the configuration of this process, Dask's own too; once."""
    import dask
    import distributed  # noqa: F401  (its own defaults first, or they would replace ours)

    _apply_ours()
    dask.config.update_defaults(_where_silent({"distributed": defaults()["distributed"]}, dask.config.collect()))


def _where_silent(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Our defaults where the user says nothing: Dask cannot tell a default from the same value written on purpose."""
    said = {name.replace("_", "-"): value for name, value in theirs.items()}
    found = {}
    for name, value in ours.items():
        if (key := name.replace("_", "-")) not in said:
            found[name] = value
        elif isinstance(value, dict) and isinstance(said[key], dict):
            found[name] = _where_silent(value, said[key])
    return found


def refuse_unknown() -> None:
    """A setting of ours that does not exist is a slip of the pen, and would change nothing."""
    import dask

    found, known = dask.config.get("och", {}), sorted(defaults()["och"])
    if not isinstance(found, dict):
        raise UsageError(f"och: {found!r} in Dask's configuration is no group of settings; see 'och settings --file'")
    if unknown := sorted(name for name in found if name.replace("_", "-") not in known):
        variable = f"DASK_OCH__{unknown[0].upper().replace('-', '_')}"
        raise UsageError(
            f"och.{unknown[0]} (or {variable}) is no setting; use one of {', '.join(known)}, or take it out of Dask's "
            "configuration"
        )


def setting(name: str) -> Any:
    """The value of ``och.NAME`` as it stands."""
    import dask

    _apply_ours()
    return dask.config.get(f"och.{name}", defaults()["och"][name])


def seconds(name: str) -> float:
    """A duration such as ``20s``, ``5 minutes`` or a number of seconds."""
    from dask.utils import parse_timedelta

    value = setting(name)
    try:
        found = float(parse_timedelta(value))
    except (TypeError, ValueError, KeyError, AttributeError):
        found = math.nan
    if isinstance(value, bool) or not 0 <= found < math.inf:
        raise UsageError(f"och.{name}: {value!r} is no duration; write it like 20s or 5 minutes")
    return found


def whole(name: str, least: int = 0) -> int:
    """A whole number from ``least`` on."""
    value = setting(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"och.{name}: {value!r}; use a whole number, {least} or more")
    return value


def flag(name: str) -> bool:
    """True or false."""
    value = setting(name)
    if not isinstance(value, bool):
        raise UsageError(f"och.{name}: {value!r}; use true or false")
    return value


def in_force() -> dict[str, Any]:
    """Every setting that ``dask.yaml`` names, with the value that holds in this process."""
    import dask

    refuse_unknown()
    apply()
    return _values(defaults(), dask.config.config)


def _values(names: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    import dask

    found = {}
    for name, below in names.items():
        value = config.get(dask.config.canonical_name(name, config), below)
        found[name] = _values(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return found
