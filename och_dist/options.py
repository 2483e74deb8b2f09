"""The options of stages. Each is declared once, in the signature of its stage:

    chunk_rows: Annotated[int, Option("Rows per chunk of codes.", at_least=1)] = 65_536

The command line, the keys of pipeline files, the checks of a call and the tables of ``docs/options.md`` follow from it.
A signature is read from its source text where the stage itself is not needed, for ``och COMMAND --help`` and to check a
pipeline file: importing a stage takes a second or two.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import numbers
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin

from och_dist.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

PACKAGE = Path(__file__).parent
BROUGHT = ("context", "connect")  # parameters of a stage that its caller brings, and no user
REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Option:
    """What a declaration says beside name, type and default.

    ``flags`` are those of the command line where they are not made of the name, such as ``-o --output``. ``commas``:
    there a list is one text, such as 32,64.
    """

    sentence: str = ""
    flags: str = ""
    metavar: str | None = None
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    at_most: float | None = None
    commas: bool = False

    @property
    def _limits(self) -> list[tuple[str, Callable[[Any, Any], bool], float]]:
        """Words, comparison and number of each limit that there is."""
        named = [
            ("at least", operator.ge, self.at_least),
            ("a number above", operator.gt, self.above),
            ("below", operator.lt, self.below),
            ("at most", operator.le, self.at_most),
        ]
        return [(words, holds, number) for words, holds, number in named if number is not None]

    @property
    def range(self) -> str:
        """'at least 1', 'a number above 0 and at most 1', or nothing."""
        return " and ".join(f"{words} {number}" for words, _, number in self._limits)

    def holds(self, value: Any) -> bool:
        """Whether a number is in the range; NaN is in none."""
        return all(holds(value, number) for _, holds, number in self._limits)


# What more than one stage has.
ExpectModel = Annotated[
    str | None,
    Option("Refuse another model than this one: its address, as 'och train' printed it.", metavar="sha256:DIGITS"),
]
Jobs = Annotated[Sequence[str], Option("Finished jobs, as 'encode' reports them.")]
QueryDataset = Annotated[str | None, Option("Dataset, column or variable of the query file.")]
Seed = Annotated[int, Option("The same seed gives the same result.")]
ResultFile = Option("Write to FILE (.zarr, .npz, .parquet or .jsonl).", flags="-o --output", metavar="FILE")
ROWS = "such as 5,10-20 (10 and 20 included), or @FILE (.npy of numbers or a mask, or a text file)"
IDS = "such as a17,b4, or @FILE (.npy, or .txt with one id a line)"


@dataclass(frozen=True)
class Declared:
    """A parameter as a signature has it; one without an option is an argument of the command line."""

    name: str
    type: Any
    default: Any
    option: Option | None

    @classmethod
    def of(cls, name: str, annotation: Any, default: Any) -> Declared:
        kind, *others = _alternatives(annotation)  # of Annotated[int, Option(...)] | None
        if get_origin(kind) is not Annotated:
            return cls(name, annotation, default, None)
        kind, option = get_args(kind)[:2]
        return cls(name, Union[kind, *others] if others else kind, default, option)

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def kind(self) -> Any:
        """The type without None and, for a list, without the text that may stand for it."""
        kinds = [kind for kind in _alternatives(self.type) if kind is not types.NoneType]
        return next((kind for kind in kinds if get_origin(kind) is not None), kinds[0])

    @property
    def choices(self) -> tuple[Any, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    def check_type(self, value: Any, where: str) -> None:
        if not _fits(value, self.type):
            raise UsageError(f"{where}{self.name}={value!r}; expected {_type_name(self.type)}")

    def check_range(self, value: Any, where: str = "") -> None:
        """Numbers in their range, words among their choices; of a list each."""
        for item in value if isinstance(value, list | tuple) else (value,):
            if self.choices and item is not None and item not in self.choices:
                raise UsageError(f"{where}{self.name}={item!r}; use one of {', '.join(map(str, self.choices))}")
            if self.option and isinstance(item, numbers.Real) and not self.option.holds(item):
                raise UsageError(f"{where}{self.name}={item}; use {self.option.range}")


@functools.cache
def declared(place: Callable[..., Any]) -> dict[str, Declared]:
    """The parameters of a function or of a dataclass."""
    parameters = inspect.signature(place, eval_str=True).parameters.values()
    return {item.name: Declared.of(item.name, item.annotation, item.default) for item in parameters}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Refuse options out of their range, whoever calls: the command line, a pipeline or Python."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        known = declared(function)
        for name, value in options.items():
            if name in known:
                known[name].check_range(value)
        return function(*args, **options)

    return call


@functools.cache
def read_declared(place: str) -> dict[str, Declared]:
    """The parameters of ``room:name``, a function or a dataclass, from its source text, without importing it."""
    room, _, name = place.partition(":")
    module, found = _find(f"och_dist.{room}", name)
    if isinstance(found, ast.FunctionDef):
        args = [*found.args.args, *found.args.kwonlyargs]
        parts = [(arg.arg, arg.annotation) for arg in args]
        values: list[ast.expr | None] = [*found.args.defaults, *found.args.kw_defaults]
        values[:0] = [None] * (len(args) - len(values))
    else:
        fields = [node for node in getattr(found, "body", ()) if isinstance(node, ast.AnnAssign)]
        parts, values = [(ast.unparse(field.target), field.annotation) for field in fields], [f.value for f in fields]
    names = _Names(module)
    return {
        label: Declared.of(
            label,
            Any if annotation is None or label in BROUGHT else names.value(annotation),
            REQUIRED if default is None else names.value(default),
        )
        for (label, annotation), default in zip(parts, values, strict=True)
    }


def _find(module: str, name: str) -> tuple[str, ast.AST]:
    """Where a name of a module is defined, past all imports, and the syntax of its definition."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return _find(str(node.module), name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if getattr(node, "name", None) == name or name in {getattr(target, "id", None) for target in targets}:
            return module, getattr(node, "value", node)
    raise KeyError(name)


class _Names(dict[str, Any]):
    """The names that a signature uses: those of this module, or else as the signature's module defines them."""

    def __init__(self, module: str) -> None:
        super().__init__(globals())
        self.module = module

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        module, found = _find(self.module, name)
        return _Names(module).value(found)

    def value(self, node: ast.AST) -> Any:
        return eval(compile(ast.Expression(cast(ast.expr, node)), self.module, "eval"), {}, self)


def parse_value(text: str) -> Any:
    """A value as TOML has it; anything else is a string."""
    import tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


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
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    return str(getattr(hint, "__name__", hint)) if get_origin(hint) is None else str(hint).replace("typing.", "")
