"""Whole jobs as TOML files: stages in order, each with its parameters, checked before the first one runs.

``{name}`` in a value stands for a variable of ``[vars]``, ``{train.model}`` for a fact that the earlier stage with the
id ``train`` reported.
"""

from __future__ import annotations

import inspect
import re
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from och_dist.cluster import ClusterOptions
from och_dist.errors import UsageError
from och_dist.stage import Context, Report

STAGES = {
    "fetch": "och_dist.ingest.fetch:fetch_archive",
    "generate": "och_dist.ingest.stage:generate",
    "ingest": "och_dist.ingest.stage:ingest",
    "train": "och_dist.train.stage:train",
    "encode": "och_dist.encode.stage:encode",
    "truth": "och_dist.evaluate.exact:truth",
    "search": "och_dist.search.stage:search",
    "evaluate": "och_dist.evaluate.stage:evaluate",
    "compare": "och_dist.report.comparison:compare_with_report",
    "verify": "och_dist.upkeep.verification:verify",
    "delete": "och_dist.upkeep.deletion:delete",
    "compact": "och_dist.upkeep.compaction:compact",
    "tables": "och_dist.search.bucket_tables:build_tables",
    "collect": "och_dist.ingest.stage:collect",
    "model": "och_dist.train.drift_gate:renew",
    "check": "och_dist.upkeep.job_check:check_jobs",
    "publish": "och_dist.encode.publication:publish_new",
    "quality": "och_dist.evaluate.stage:measure_quality",
    "gc": "och_dist.upkeep.housekeeping:gc",
}
PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class Step:
    """One stage of a pipeline: ``id`` names it, ``params`` are the arguments of the stage's function."""

    id: str
    stage: str
    params: dict[str, Any]


@dataclass(frozen=True)
class Pipeline:
    """A checked job."""

    name: str
    variables: dict[str, Any]
    cluster: dict[str, Any]
    steps: tuple[Step, ...]


def load_pipeline(path: str | Path, settings: Sequence[str] = ()) -> Pipeline:
    """Read and check a pipeline file; ``settings`` are 'name=value' or 'stage.parameter=value' changes to it."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; give a pipeline file such as pipelines/demo.toml") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a readable TOML file ({error}); mend it, nothing was run") from None
    _refuse_unknown(document, {"name", "vars", "cluster", "stages"}, str(path))
    variables = _table(document.get("vars", {}), "[vars]")
    steps = _steps(document.get("stages"), str(path))
    cluster = _cluster(_table(document.get("cluster", {}), "[cluster]"))
    pipeline = Pipeline(str(document.get("name", Path(path).stem)), variables, cluster, steps)
    for setting in settings:
        pipeline = _apply(pipeline, setting)
    _check(pipeline)
    return pipeline


def run_pipeline(
    pipeline: Pipeline,
    context: Context,
    *,
    begun: Callable[[str], None] = lambda label: None,
    told: Callable[[str, Report], None] = lambda label, report: None,
) -> list[tuple[str, Report]]:
    """Run the stages in order; ``begun`` hears of each before it begins, ``told`` when it has ended.

    Running it again repeats no finished work.
    """
    reports: list[tuple[str, Report]] = []
    known = dict(pipeline.variables)
    for step in pipeline.steps:
        begun(step.id)
        params = {name: _fill(value, known) for name, value in step.params.items()}
        _check_types(step, params)
        function = stage_function(step.stage)
        surroundings = {"context": context} if "context" in inspect.signature(function).parameters else {}
        report = function(**params, **surroundings)
        known |= {f"{step.id}.{name}": value for name, value in report.facts.items()}
        reports.append((step.id, report))
        told(step.id, report)
    return reports


def index_of(pipeline: Pipeline) -> str | None:
    """The index that a job works on, beside which its reports are kept; None if no stage names one."""
    for step in pipeline.steps:
        value = step.params.get("index")
        if isinstance(value, str) and not _placeholders(filled := fill_known(value, pipeline.variables)):
            return str(filled)
    return None


def stage_function(stage: str) -> Callable[..., Report]:
    module, _, name = STAGES[stage].partition(":")
    function: Callable[..., Report] = getattr(import_module(module), name)
    return function


def _refuse_unknown(table: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(table) - known):
        raise UsageError(f"{where} has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be a table")
    return dict(value)


def bundled(name: str) -> Path:
    """A pipeline file that comes with the package: installed beside it, or at the top of a source tree."""
    here = Path(__file__).parents[1]
    return next(path for path in (here / "pipelines" / name, here.parent / "pipelines" / name) if path.exists())


def _cluster(table: dict[str, Any]) -> dict[str, Any]:
    _refuse_unknown(table, set(ClusterOptions.__dataclass_fields__), "[cluster]")
    hints = get_type_hints(ClusterOptions)
    for name, value in table.items():
        if not _fits(value, hints[name]):
            raise UsageError(f"[cluster] {name}={value!r}; expected {_type_name(hints[name])}")
    ClusterOptions(**table)  # refuses impossible values
    return table


def _steps(entries: Any, where: str) -> tuple[Step, ...]:
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{where} has no [[stages]]; give at least one")
    steps: list[Step] = []
    for entry in entries:
        params = _table(entry, "[[stages]]")
        stage = params.pop("stage", None)
        if not isinstance(stage, str) or stage not in STAGES:
            raise UsageError(f"stage {stage!r} is not known; use one of {', '.join(STAGES)}")
        name = str(params.pop("id", stage))
        if not NAME.fullmatch(name) or name == "cluster":
            raise UsageError(f"a stage cannot be called {name!r}; use letters, digits, - and _, and not 'cluster'")
        if name in {step.id for step in steps}:
            raise UsageError(f'two stages are called {name!r}; give one of them another id = "..."')
        steps.append(Step(name, stage, params))
    return tuple(steps)


def _apply(pipeline: Pipeline, setting: str) -> Pipeline:
    name, separator, text = setting.partition("=")
    if not separator:
        raise UsageError(f"--set {setting}: write name=value or stage.parameter=value")
    value = parse_value(text)
    step_id, dot, parameter = name.partition(".")
    if not dot:
        if name not in pipeline.variables:
            raise UsageError(f"--set {name}: there is no such variable; known are {', '.join(pipeline.variables)}")
        return replace(pipeline, variables={**pipeline.variables, name: value})
    if step_id == "cluster":
        return replace(pipeline, cluster=_cluster({**pipeline.cluster, parameter: value}))
    if step_id not in {step.id for step in pipeline.steps}:
        raise UsageError(f"--set {name}: no stage {step_id!r}; known are {', '.join(s.id for s in pipeline.steps)}")
    steps = tuple(
        replace(step, params={**step.params, parameter: value}) if step.id == step_id else step
        for step in pipeline.steps
    )
    return replace(pipeline, steps=steps)


def parse_value(text: str) -> Any:
    """A value as TOML has it; anything else is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _check(pipeline: Pipeline) -> None:
    """Every key, every value that is known now, and every placeholder, before anything runs."""
    known = dict(pipeline.variables)
    for name, value in known.items():
        if found := _placeholders(value):
            raise UsageError(f"variable {name} refers to {{{found[0]}}}; a variable is a plain value, write it out")
    earlier: set[str] = set()
    for step in pipeline.steps:
        signature = inspect.signature(stage_function(step.stage)).parameters
        accepted = {name for name in signature if name != "context"}
        _refuse_unknown(step.params, accepted, f"stage {step.id}")
        required = {name for name in accepted if signature[name].default is inspect.Parameter.empty}
        if missing := sorted(required - set(step.params)):
            raise UsageError(f"stage {step.id} lacks {', '.join(missing)}")
        for name, value in step.params.items():
            _check_placeholders(step, name, value, set(known), earlier)
        _check_types(step, {n: _fill(v, known) for n, v in step.params.items() if not _refers(v, earlier)})
        earlier.add(step.id)


def _check_placeholders(step: Step, name: str, value: Any, known: set[str], earlier: set[str]) -> None:
    for found in _placeholders(value):
        if found not in known and not _is_fact(found, earlier):
            raise UsageError(
                f"stage {step.id}, {name}: {{{found}}} is neither a variable nor a fact of an earlier stage"
            )


def _placeholders(value: Any) -> list[str]:
    """Names in braces anywhere in a value."""
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return [found for item in items for found in _placeholders(item)]
    return PLACEHOLDER.findall(value) if isinstance(value, str) else []


def _is_fact(name: str, earlier: set[str]) -> bool:
    step_id, _, fact = name.partition(".")
    return bool(fact) and step_id in earlier


def _refers(value: Any, earlier: set[str]) -> bool:
    return any(_is_fact(found, earlier) for found in _placeholders(value))


def _fill(value: Any, known: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {name: _fill(item, known) for name, item in value.items()}
    if isinstance(value, list):
        return [_fill(item, known) for item in value]
    if not isinstance(value, str):
        return value
    whole = PLACEHOLDER.fullmatch(value)
    try:
        return known[whole[1]] if whole else PLACEHOLDER.sub(lambda found: str(known[found[1]]), value)
    except KeyError as error:
        raise UsageError(f"{{{error.args[0]}}} has no value; known are {', '.join(sorted(known))}") from None


def fill_known(value: Any, known: Mapping[str, Any]) -> Any:
    """A value with what is known filled in; one that needs more stays as it is written."""
    return _fill(value, known) if set(_placeholders(value)) <= set(known) else value


def _check_types(step: Step, params: Mapping[str, Any]) -> None:
    hints = get_type_hints(stage_function(step.stage))
    for name, value in params.items():
        if not _fits(value, hints[name]):
            raise UsageError(f"stage {step.id}: {name}={value!r}; expected {_type_name(hints[name])}")


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, dict)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, str) or (
            isinstance(value, list | tuple) and all(_fits(item, get_args(hint)[0]) for item in value)
        )
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    return str(getattr(hint, "__name__", hint)) if get_origin(hint) is None else str(hint).replace("typing.", "")
