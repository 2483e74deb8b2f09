"""Whole jobs as TOML files: stages in order, each with its parameters, checked before the first one runs.

``{name}`` in a value stands for a variable of ``[vars]``, ``{train.model}`` for a fact that the earlier stage with the
id ``train`` reported.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from och_dist.catalog import STAGES, Stage
from och_dist.cluster import ClusterOptions
from och_dist.errors import UsageError
from och_dist.options import declared, parse_value

PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


@dataclass(frozen=True)
class StageCall:
    """One stage of a pipeline: ``id`` names it, ``params`` are the arguments of the stage's function."""

    id: str
    name: str
    params: dict[str, Any]

    @property
    def stage(self) -> Stage:
        return STAGES[self.name]

    def ready(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments with all placeholders filled in."""
        params = {name: _fill(value, known) for name, value in self.params.items()}
        self._check_values(params)
        return params

    def expected(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, defaults too, as far as they are known; a value that needs more stays as it is written."""
        defaults = {name: option.default for name, option in self.stage.options.items() if not option.required}
        return defaults | {name: _fill_known(value, known) for name, value in self.params.items()}

    def check(self, variables: Mapping[str, Any], earlier: set[str]) -> None:
        """Every key, every placeholder, and every value that is known before the ``earlier`` stages have run."""
        options = self.stage.options
        _refuse_unknown(self.params, options, f"stage {self.id}")
        if missing := sorted({name for name, option in options.items() if option.required} - set(self.params)):
            raise UsageError(f"stage {self.id} lacks {', '.join(missing)}")
        known = {}
        for name, value in self.params.items():
            facts = [found for found in _placeholders(value) if found.partition(".")[0] in earlier and "." in found]
            if unknown := [found for found in _placeholders(value) if found not in {*variables, *facts}]:
                raise UsageError(
                    f"stage {self.id}, {name}: {{{unknown[0]}}} is neither a variable nor a fact of an earlier stage"
                )
            if not facts:
                known[name] = _fill(value, variables)
        self._check_values(known)

    def _check_values(self, params: Mapping[str, Any]) -> None:
        for name, value in params.items():
            self.stage.options[name].check_type(value, f"stage {self.id}: ")
            self.stage.options[name].check_range(value, f"stage {self.id}: ")


@dataclass(frozen=True)
class Pipeline:
    """A checked job."""

    name: str
    variables: dict[str, Any]
    cluster: dict[str, Any]
    steps: tuple[StageCall, ...]

    @property
    def index(self) -> str | None:
        """The index that the job works on, beside which its runs are logged; None if no stage names one."""
        for step in self.steps:
            value = _fill_known(step.params.get("index"), self.variables)
            if isinstance(value, str) and not _placeholders(value):
                return value
        return None


def load_pipeline(path: str | Path, settings: Sequence[str] = ()) -> Pipeline:
    """Read and check a pipeline file; ``settings`` are 'name=value' or 'stage.parameter=value' changes to it."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; give a pipeline file such as pipelines/demo.toml") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a readable TOML file ({error}); mend it, nothing was run") from None
    _refuse_unknown(document, ("name", "vars", "cluster", "stages"), str(path))
    variables = _table(document.get("vars", {}), "[vars]")
    cluster = _table(document.get("cluster", {}), "[cluster]")
    steps = _steps(document.get("stages"), str(path))
    pipeline = Pipeline(str(document.get("name", Path(path).stem)), variables, cluster, steps)
    for setting in settings:
        pipeline = _apply(pipeline, setting)
    _check(pipeline)
    return pipeline


def bundled(name: str) -> Path:
    """A pipeline file that comes with the package: installed beside it, or at the top of a source tree."""
    here = Path(__file__).parents[1]
    return next(path for path in (here / "pipelines" / name, here.parent / "pipelines" / name) if path.exists())


def _refuse_unknown(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    if unknown := sorted(set(table) - set(known)):
        raise UsageError(f"{where} has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}")


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be a table")
    return dict(value)


def _steps(entries: Any, where: str) -> tuple[StageCall, ...]:
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{where} has no [[stages]]; give at least one")
    steps: list[StageCall] = []
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
        steps.append(StageCall(name, stage, params))
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
        return replace(pipeline, cluster={**pipeline.cluster, parameter: value})
    if step_id not in {step.id for step in pipeline.steps}:
        raise UsageError(f"--set {name}: no stage {step_id!r}; known are {', '.join(s.id for s in pipeline.steps)}")
    steps = tuple(
        replace(step, params={**step.params, parameter: value}) if step.id == step_id else step
        for step in pipeline.steps
    )
    return replace(pipeline, steps=steps)


def _check(pipeline: Pipeline) -> None:
    """Every key, every value that is known now, and every placeholder, before anything runs."""
    for name, value in pipeline.variables.items():
        if found := _placeholders(value):
            raise UsageError(f"variable {name} refers to {{{found[0]}}}; a variable is a plain value, write it out")
    cluster = declared(ClusterOptions)
    _refuse_unknown(pipeline.cluster, cluster, "[cluster]")
    for name, value in pipeline.cluster.items():
        cluster[name].check_type(value, "[cluster] ")
    ClusterOptions(**pipeline.cluster)  # refuses impossible values
    earlier: set[str] = set()
    for step in pipeline.steps:
        step.check(pipeline.variables, earlier)
        earlier.add(step.id)


def _placeholders(value: Any) -> list[str]:
    """Names in braces anywhere in a value."""
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return [found for item in items for found in _placeholders(item)]
    return PLACEHOLDER.findall(value) if isinstance(value, str) else []


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


def _fill_known(value: Any, known: Mapping[str, Any]) -> Any:
    return _fill(value, known) if set(_placeholders(value)) <= set(known) else value
