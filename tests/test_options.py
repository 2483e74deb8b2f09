"""Options are declared in the signatures of stages, read from there with and without importing the stage, and checked
whoever calls."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest

from och_dist.catalog import COMMANDS, STAGES, Stage
from och_dist.errors import UsageError
from och_dist.options import BROUGHT, Option, checked, declared, read_declared
from tests.support.option_tables import PLACE, tables

EVERY = {**STAGES, **COMMANDS}


@pytest.mark.parametrize("name", EVERY)
def test_source_text_and_signature_say_the_same(name: str) -> None:
    stage = EVERY[name]
    found = {key: option for key, option in declared(stage.function).items() if key not in BROUGHT}
    assert stage.options == found
    assert all(option.option is None or option.option.sentence for option in found.values())


def test_reading_options_imports_no_stage() -> None:
    check = (
        "import sys; from och_dist.catalog import COMMANDS; [stage.options for stage in COMMANDS.values()]; "
        "print(sorted({'numpy', 'dask', 'zarr', 'sklearn', 'click'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@checked
def stage(
    place: str,
    *,
    rows: Annotated[int | None, Option("Rows.", at_least=1)] = None,
    share: Annotated[float, Option("Share.", above=0, at_most=1)] = 0.5,
    sizes: Annotated[tuple[int, ...], Option("Sizes.", at_least=2)] = (2, 3),
    context: object = None,
) -> tuple[object, ...]:
    return place, rows, share, sizes, context


def test_values_in_their_range_go_through() -> None:
    assert stage("x", rows=1, share=1, sizes=(2,), context=0) == ("x", 1, 1, (2,), 0)
    assert stage("x") == ("x", None, 0.5, (2, 3), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows=0; use at least 1"),
        ({"share": 0}, "share=0; use a number above 0 and at most 1"),
        ({"share": 1.5}, "share=1.5; use a number above 0 and at most 1"),
        ({"share": float("nan")}, "share=nan; use a number above 0 and at most 1"),
        ({"sizes": (2, 1)}, "sizes=1; use at least 2"),
    ],
)
def test_values_out_of_their_range(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        stage("x", **options)  # type: ignore[arg-type]


LIMITED = [
    (name, key)
    for name, stage in EVERY.items()
    for key, item in stage.options.items()
    if item.choices or (item.option and item.option.range)
]


@pytest.mark.parametrize(("name", "key"), LIMITED)
def test_every_stage_refuses_them_from_python_too(
    name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = EVERY[name].options
    given = {needed: "x" for needed, item in options.items() if item.required}
    wrong = "neither" if options[key].choices else math.nan
    with pytest.raises(UsageError, match=f"{key}={wrong}|{key}='{wrong}'"):
        EVERY[name].function(**{**given, key: wrong})
    assert not list(tmp_path.iterdir())


def test_a_class_is_read_like_a_function() -> None:
    found = read_declared("cluster:ClusterOptions")
    assert found["workers"].default is None
    assert not found["workers"].required
    assert Stage("encode:encode", "").options["model"].required


def test_the_tables_of_the_docs() -> None:
    assert PLACE.read_text() == tables(), "run: python -m tests.support.option_tables"
