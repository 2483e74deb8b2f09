"""Whole jobs as TOML files: stages in order, each with its parameters, checked before the first one runs; and the log
of their runs beside the index of a job.

``{name}`` in a value stands for a variable of ``[vars]``, ``{train.model}`` for a fact that the earlier stage with the
id ``train`` reported.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import och_dist
from och_dist import store
from och_dist.catalog import STAGES, Stage
from och_dist.cluster import ClusterOptions
from och_dist.errors import BadInputError, OchError, UsageError
from och_dist.options import Option, checked, declared, parse_value
from och_dist.stage import Context, Report, Stopwatch
from och_dist.stop import exit_code_of
from och_dist.store import Objects

logger = logging.getLogger("och_dist")

MAX_FACT_BYTES = 1 << 16
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
                where = f"stage {self.id}, {name}"
                raise UsageError(f"{where}: {{{unknown[0]}}} is neither a variable nor a fact of an earlier stage")
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
        _change(pipeline, setting)
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


def _change(pipeline: Pipeline, setting: str) -> None:
    """Set a variable, or a parameter of the cluster or of a stage."""
    name, separator, text = setting.partition("=")
    if not separator:
        raise UsageError(f"--set {setting}: write name=value or stage.parameter=value")
    owner, dot, parameter = name.partition(".")
    if not dot and name not in pipeline.variables:
        raise UsageError(f"--set {name}: there is no such variable; known are {', '.join(pipeline.variables)}")
    stages = {step.id: step.params for step in pipeline.steps}
    if dot and owner not in {"cluster", *stages}:
        raise UsageError(f"--set {name}: no stage {owner!r}; known are {', '.join(stages)}")
    table = {"cluster": pipeline.cluster, **stages}[owner] if dot else pipeline.variables
    table[parameter if dot else name] = parse_value(text)


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


# Running, and the log of the runs beside the index: one at a time, each with a number, a beginning and a report


class RunLog:
    """What is known of a run so far: its number, the stage at work, and the reports of those before."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.number: int | None = None
        self.stage: str | None = None
        self.reports: list[tuple[str, Report]] = []

    def to_json(self, error: BaseException | None) -> dict[str, Any]:
        quiet = all(report.status == "nothing to do" for _, report in self.reports)
        body: dict[str, Any] = {
            "status": "failed" if error else "nothing to do" if quiet else "done",
            "exit_code": exit_code_of(error) if error else 0,
            "seconds": round(time.perf_counter() - self.started, 3),
            "stages": {label: _brief(report.to_json()) for label, report in self.reports},
        }
        if error is not None:
            text = str(error) if isinstance(error, OchError) else f"{type(error).__name__}: {error}".rstrip(": ")
            body |= {"stage": self.stage, "message": text}
        return body


def run_pipeline(pipeline: Pipeline, context: Context, log: RunLog | None = None) -> list[tuple[str, Report]]:
    """Run the stages in order; running them again repeats no finished work."""
    log = log or RunLog()
    known = dict(pipeline.variables)
    for step in pipeline.steps:
        log.stage = step.id
        brought = {"context": context} if step.stage.takes("context") else {}
        report = step.stage.function(**step.ready(known), **brought)
        known |= {f"{step.id}.{name}": value for name, value in report.facts.items()}
        log.reports.append((step.id, report))
    log.stage = None
    return log.reports


@contextlib.contextmanager
def recorded(pipeline: Pipeline, *, file: str, settings: Sequence[str]) -> Iterator[RunLog]:
    """Hold the lock of the pipeline's index, and keep a report however this ends; without an index neither."""
    log, index = RunLog(), pipeline.index
    if index is None:
        yield log
        return
    objects = store.open_objects(index)
    about = {"name": pipeline.name, "file": os.path.abspath(file), "settings": list(settings), **_here()}
    log.number = store.begin_run(objects, about)
    error: BaseException | None = None
    try:
        with store.locked(objects, run=log.number):
            yield log
    except BaseException as raised:
        error = raised
        raise
    finally:
        _keep(objects, log.number, {**about, **log.to_json(error)}, failing=error is not None)


def _keep(objects: Objects, number: int, report: dict[str, Any], *, failing: bool) -> None:
    """A report that cannot be kept must not hide why the run failed."""
    try:
        store.end_run(objects, number, report)
    except (OchError, OSError) as error:
        if not failing:
            raise
        logger.warning("the report of run %d could not be kept (%s)", number, error)


def _here() -> dict[str, Any]:
    """Who runs, where and when; the time is for people only."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"started": now, "host": platform.node(), "pid": os.getpid(), "version": och_dist.__version__}


def _brief(facts: dict[str, Any]) -> dict[str, Any]:
    """Without what belongs into a result file, such as the neighbours of a search."""
    return {name: value for name, value in facts.items() if len(json.dumps(value)) <= MAX_FACT_BYTES}


@checked
def history(
    index: str,
    *,
    last: Annotated[int | None, Option("Only the last N runs.", flags="-n --last", metavar="N", at_least=1)] = None,
    run: Annotated[int | None, Option("Everything about one run.", metavar="NUMBER")] = None,
) -> Report:
    """The runs that are logged beside ``index``, oldest first."""
    watch, objects = Stopwatch("history"), store.open_objects(index)
    numbers = store.run_numbers(objects)
    if not numbers:
        raise BadInputError(f"{objects.url} has no history; 'och run' keeps one beside the index of a pipeline")
    if run is not None:
        if run not in numbers:
            raise UsageError(f"{objects.url} has no run {run}; it has {numbers[0]} to {numbers[-1]}")
        numbers = [run]
    now = (store.holder(objects) or {}).get("run")
    runs = []
    for number in numbers[-(last or len(numbers)) :]:
        start, end = store.read_run(objects, number)
        whole = {**start, **(end or {"status": "running" if number == now else "killed", "exit_code": None})}
        runs.append({**whole, **_result(whole)} if run is not None else _line(whole))
    return watch.report(index=objects.url, runs=runs)


def _line(run: dict[str, Any]) -> dict[str, Any]:
    """A run in short."""
    names = ("run", "started", "name", "status", "exit_code", "seconds", "stage", "message")
    return {name: run[name] for name in names if name in run} | _result(run)


def _result(run: dict[str, Any]) -> dict[str, Any]:
    """What the stages of a run made: the version and its rows, and how many rows and files were new."""
    stages = list(run.get("stages", {}).values())
    found: dict[str, Any] = {}
    for stage in stages:
        if stage["stage"] == "publish" or (stage["stage"] == "encode" and stage["published"]):
            found |= {"index_version": stage["version"], "rows": stage["rows"]}
        if stage["stage"] == "encode":
            found["new_rows"] = stage["new_rows"]
        if stage["stage"] == "collect":
            found["new_files"] = stage["new_files"]
        if stage["stage"] == "model":
            found |= {name: stage[name] for name in ("trained", "balance_shift", "margin_shift") if name in stage}
    return found
