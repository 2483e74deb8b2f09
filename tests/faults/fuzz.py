"""Arrays, files, documents, pipeline files and options that hypothesis thinks of: a command does what it says or ends
with the exit code of its error, never with a traceback, and what it refuses publishes nothing."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import numpy as np
import zarr
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from och_dist.catalog import STAGES
from och_dist.cli import cli
from och_dist.encode.stage import encode
from och_dist.sources.formats import is_accepted
from och_dist.store.corpus import open_corpus
from och_dist.store.manifest import seal
from och_dist.upkeep.verification import verify
from tests.faults.ground import CHUNK, Ground, Place
from tests.faults.runner import Fault, Harm, NotDelivered
from tests.support.command import published, small_rows
from tests.test_illegal_input import WRITERS

DONE, USAGE, BAD_INPUT, INTEGRITY, INCOMPLETE = 0, 2, 3, 4, 5
DIM = 8
BATCH = 50
MEMORY = 6 << 30
TYPED = {DONE, USAGE, BAD_INPUT, INTEGRITY, INCOMPLETE}
LOCAL = ("inspect", "status", "gc")  # commands that need no cluster, and have no option for one

# Kinds of examples, and how many batches of each make up the long form.
BATCHES = {"ingest": 5, "search": 3, "encode": 3, "files": 3, "documents": 7, "pipelines": 4, "options": 6}


@dataclass
class Scratch:
    """A folder of one example, with a copy of a small job where it needs one."""

    ground: Ground
    queries: Path
    pieces: dict[str, Place] = field(default_factory=dict)

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        folder = self.ground.fresh()
        try:
            with contextlib.chdir(folder):
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @cached_property
    def waiting(self) -> Place:
        """Rows that are encoded and not published, beside two versions and some deleted rows."""
        place = self.ground.copy(self.ground.deleted)
        encode(place.corpus, place.index, model=place.model(1), chunk_rows=CHUNK, publish=False)
        return place

    def job(self, folder: Path) -> Place:
        shutil.copytree(self.waiting.folder, folder, dirs_exist_ok=True)
        return Place(folder)


def command(*words: object, allowed: set[int], keeps: tuple[str, ...] = (), may_publish: bool = False) -> Result:
    """Run ``och WORDS``, which must end with one of the ``allowed`` codes; a refusal leaves versions as they are."""
    args = [str(word) for word in words]
    before = [published(Path(place)) for place in keeps]
    result = CliRunner().invoke(cli, args if args[0] in LOCAL else [*args, "--workers", "0"])
    said = f"och {' '.join(map(repr, args))} ended with {result.exit_code}:\n{result.stderr[-2500:]}"
    if result.exit_code not in allowed or "Traceback" in result.stderr:
        raise AssertionError(f"{said}\n{result.exception!r}")
    if result.exit_code != DONE:
        if result.stdout or not ("och: " in result.stderr or "Error: " in result.stderr):
            raise AssertionError(f"no sentence, or something on stdout: {said}")
        if not may_publish and [published(Path(place)) for place in keeps] != before:
            raise Harm(f"something was published: {said}", wrong=1)
    return result


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """What asks for more than a few GB fails, instead of taking them from everybody else."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


# Arrays: dtype x endian x shape x values

KINDS = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16", "S3", "U2", "M8[s]", "O"]
VALUES = ["normal", "zero", "NaN", "infinity", "huge", "tiny", "one"]
SPECIAL = {"zero": 0.0, "NaN": np.nan, "infinity": -np.inf, "tiny": 1e-40, "one": 1.0}


@st.composite
def arrays(draw: st.DrawFn) -> tuple[np.ndarray, str]:
    """An array, and what is special about its values; half of them could be vectors."""
    likely = draw(st.booleans())
    kind = draw(st.sampled_from(["f2", "f4", "f8", "i1", "u1"] if likely else KINDS))
    dtype = np.dtype(draw(st.sampled_from("<>")) + kind) if kind not in ("?", "O") else np.dtype(kind)
    sides = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    shape = draw(st.tuples(st.integers(0, 40), st.just(DIM))) if likely else draw(sides)
    values = np.random.default_rng(draw(st.integers(0, 99))).normal(0, 40, size=shape)
    special = draw(st.sampled_from(VALUES))
    if special != "normal" and values.size:
        most = float(np.finfo(dtype).max) if dtype.kind == "f" else 1e300
        place = draw(st.integers(0, values.size - 1))
        flat = values.reshape(-1)
        flat[place :: draw(st.sampled_from([1, 7, 1000]))] = SPECIAL.get(special, most)
    with np.errstate(all="ignore"):
        array = np.asarray(values).astype(dtype)
    return (np.asfortranarray(array) if draw(st.booleans()) else array), special


def _finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(array.astype("f8")).all())


def _usable(array: np.ndarray) -> bool:
    return array.ndim == 2 and is_accepted(array.dtype) and _finite(array)


def ingest_examples(scratch: Scratch) -> Callable[..., None]:
    @given(arrays())
    def example(made: tuple[np.ndarray, str]) -> None:
        array, _ = made
        legal = _usable(array) and all(array.shape)
        with scratch.folder() as folder:
            np.save(folder / "rows.npy", array)
            command("ingest", folder / "rows.npy", folder / "new", allowed={DONE if legal else BAD_INPUT})
            if legal:
                found = open_corpus(str(folder / "new")).read(0, len(array))
                if found.tobytes() != np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"))).tobytes():
                    raise Harm("the corpus is not what the file was", wrong=len(array))
            elif published(folder / "new"):
                raise Harm("something was published", wrong=1)

    return example


def search_examples(scratch: Scratch) -> Callable[..., None]:
    @given(arrays(), st.integers(1, 300))
    def example(made: tuple[np.ndarray, str], k: int) -> None:
        array, special = made
        legal = _usable(array) and array.shape[1] == DIM
        allowed = {DONE if legal else BAD_INPUT} | ({BAD_INPUT} if special == "huge" else set())
        with scratch.folder() as folder:
            np.save(folder / "queries.npy", array)
            index = scratch.ground.encoded.index
            command("search", index, folder / "queries.npy", "-k", k, allowed=allowed, keeps=(index,))

    return example


def encode_examples(scratch: Scratch) -> Callable[..., None]:
    @given(arrays(), st.integers(1, 30))
    def example(made: tuple[np.ndarray, str], chunk: int) -> None:
        array, special = made
        if array.dtype.kind in "OSUM":  # Zarr cannot hold these, or not without warnings
            array = array.astype("U4").view() if array.dtype.kind == "U" else np.zeros(array.shape, "i2")
        if array.dtype.kind == "U":
            array = np.zeros(array.shape, "?")
        legal = _usable(array) and all(array.shape) and array.shape[1] == DIM
        allowed = {DONE if legal else BAD_INPUT} | ({BAD_INPUT} if special == "huge" else set())
        with scratch.folder() as folder:
            chunks = tuple(min(chunk, max(1, side)) for side in array.shape)
            stored = zarr.create_array(folder / "array", shape=array.shape, chunks=chunks, dtype=array.dtype)
            stored[...] = array
            model = scratch.ground.trained.model()
            result = command(
                "encode", folder / "array", folder / "new", "--model", model, allowed=allowed | _rest(array, chunks)
            )
            if result.exit_code == DONE:
                verify(str(folder / "new"))
            elif published(folder / "new"):
                raise Harm("something was published", wrong=1)

    return example


def _rest(array: np.ndarray, chunks: tuple[int, ...]) -> set[int]:
    """Chunks that cut rows into pieces, and chunks that are zero and so not stored, may be refused."""
    return {BAD_INPUT, INTEGRITY} if chunks[1:] != array.shape[1:] or not array.all() else set()


# Files: bytes cut out, put in, or changed


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[float, int, bytes]]:
    """(place as a share of the file, bytes that go, bytes that come)."""
    edit = st.tuples(st.floats(0, 1), st.integers(0, 12), st.binary(max_size=12))
    return draw(st.lists(edit, min_size=1, max_size=4))


def edited(data: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
    for share, cut, new in changes:
        place = int(share * len(data))
        data = data[:place] + new + data[place + cut :]
    return data


def file_examples(scratch: Scratch) -> Callable[..., None]:
    sound: dict[str, bytes] = {}
    for kind, write in WRITERS.items():
        write(scratch.queries.parent / f"rows.{kind}", small_rows(20))
        sound[kind] = (scratch.queries.parent / f"rows.{kind}").read_bytes()

    @given(st.sampled_from(sorted(WRITERS)), edits())
    def example(kind: str, changes: list[tuple[float, int, bytes]]) -> None:
        with scratch.folder() as folder:
            (folder / f"rows.{kind}").write_bytes(edited(sound[kind], changes))
            result = command("ingest", folder / f"rows.{kind}", folder / "new", allowed={DONE, BAD_INPUT})
            if result.exit_code == DONE:
                verify(str(folder / "new"))
            elif published(folder / "new"):
                raise Harm("something was published", wrong=1)

    return example


# Documents: manifests, jobs, models, records, layouts

NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 31, 33, 1 << 31, 1 << 40, 1 << 63, 1 << 70, -(1 << 63)])
WORDS = st.sampled_from(["", "..", "../..", "/etc", "a/../b", "a\0b", "\\", "0" * 64, "f" * 16, "<f4", "|O", "pickle"])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
LOOKS = (
    "verify {index}",
    "verify {corpus}",
    "verify {index} --repair",
    "inspect {index}",
    "inspect {corpus}",
    "inspect {index}/models/{model}",
    "status {index}",
    "gc {index} --keep 1",
    "gc {index} --dry-run",
    "search {index} {queries} -k 3",
    "encode {corpus} {index} --model {models}/{model} --chunk-rows 32",
    "encode {corpus} {index} --model {models}/{other} --chunk-rows 32",
    "delete {index} --rows 0",
    "compact {index} --chunk-rows 50",
    "truth {corpus} {queries} -k 3 -o new.zarr",
)


def _documents(place: Place) -> list[Path]:
    """Every JSON text of a corpus, an index and their models."""
    return sorted(path for path in place.folder.rglob("*.json") if path.name != "provenance.json")


def _nodes(value: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [where, *(node for key, child in children for node in _nodes(child, (*where, key)))]


def _changed(body: Any, where: tuple[Any, ...], value: Any, *, drop: bool) -> Any:
    if not where:
        return value
    parent = body
    for key in where[:-1]:
        parent = parent[key]
    if drop:
        del parent[where[-1]]
    else:
        parent[where[-1]] = value
    return body


def document_examples(scratch: Scratch) -> Callable[..., None]:
    """A value is changed and the document sealed again, or left unsealed, or a few of its bytes are changed."""
    numbers, how = st.integers(0, 10_000), st.sampled_from(["forged", "unsealed", "edited"])

    @given(numbers, numbers, JSON, st.booleans(), st.sampled_from(LOOKS), how)
    def example(which: int, node: int, value: Any, drop: bool, look: str, how: str) -> None:
        with scratch.folder() as folder:
            place = scratch.job(folder)
            paths = _documents(place)
            path = paths[which % len(paths)]
            old = path.read_bytes()
            if how == "edited":
                new = edited(old, [(node / 10_000, len(str(value)) % 3, repr(value).encode("utf-8", "replace"))])
            else:
                body = json.loads(old)
                sealed = body.pop("sha256", None) if how == "forged" else None
                nodes = _nodes(body)
                new = _text(_changed(body, nodes[node % len(nodes)], value, drop=drop), sealed=sealed is not None)
            path.write_bytes(new)
            models = sorted(path.name for path in Path(place.models).iterdir() if len(path.name) == 64)
            names = {"index": place.index, "corpus": place.corpus, "models": place.models, "queries": scratch.queries}
            words = look.format(**names, model=models[0], other=models[1]).split()
            damaged = how != "forged" and path.parent.name == "versions" and _meaning(new) != _meaning(old)
            found = damaged and words[0] == "verify" and Path(words[1]) in path.parents
            # A repair publishes what it could mend, and then tells of the rest.
            keeps, may_publish = (place.index, place.corpus), "--repair" in words
            command(*words, allowed={INTEGRITY} if found else TYPED, keeps=keeps, may_publish=may_publish)

    return example


def _meaning(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _text(body: Any, *, sealed: bool) -> bytes:
    if sealed and isinstance(body, dict):
        with contextlib.suppress(ValueError):  # NaN cannot be sealed
            return seal(body)
    return json.dumps(body).encode("utf-8", "replace")


# Pipeline files

NAMES = st.sampled_from(
    [
        *("corpus", "index", "model", "models", "queries", "output", "k", "bits", "method", "seed", "rows", "dim"),
        *("chunk_rows", "keep", "sources", "append", "params", "truth", "fraction", "path", "repair", "ids"),
        *("nonfinite", "codec", "version", "only", "radius", "context", "self"),
    ]
)
SCALARS = st.booleans() | st.integers(-2, 40) | st.floats(width=16) | st.text(st.characters(codec="utf-8"), max_size=6)


@st.composite
def pipelines(draw: st.DrawFn) -> str:
    """TOML of stages with right and wrong parameters; the paths of a real job among their values."""
    paths = st.sampled_from(
        ["{corpus}", "{index}", "{model}", "{queries}", "new", "new.zarr", "{train.model}", "{", "{x}"]
    )
    values = SCALARS | paths | st.lists(SCALARS | paths, max_size=3) | st.dictionaries(NAMES, SCALARS, max_size=2)
    stages = st.sampled_from([*sorted(set(STAGES) - {"fetch", "compare"}), "rm", ""])
    lines = []
    for _ in range(draw(st.integers(0, 3))):
        stage = draw(stages)
        right = _right(stage) if draw(st.booleans()) else {}
        params = {**right, **draw(st.dictionaries(NAMES, values, max_size=3))}
        lines += ["[[stages]]", f"stage = {json.dumps(stage)}"]
        lines += [f"{json.dumps(name)} = {_toml(value)}" for name, value in params.items()]
    cluster = draw(st.dictionaries(st.sampled_from(["workers", "threads", "grace", "x"]), SCALARS, max_size=1))
    head = ["[cluster]", *(f"{name} = {_toml(value)}" for name, value in cluster.items())]
    return "\n".join([*head, "[vars]", *(f"{n} = {json.dumps('@' + n)}" for n in PATHS), *lines])


PATHS = ("corpus", "index", "model", "queries")


def _right(stage: str) -> dict[str, Any]:
    """Parameters with which a stage runs."""
    known: dict[str, dict[str, Any]] = {
        "generate": {"corpus": "made", "rows": 9, "dim": 4},
        "ingest": {"sources": "{queries}", "corpus": "made"},
        "train": {"corpus": "{corpus}", "models": "made", "bits": 8, "method": "lsh"},
        "encode": {"corpus": "{corpus}", "index": "made-index", "model": "{model}"},
        "truth": {"corpus": "{corpus}", "queries": "{queries}", "output": "made.zarr", "k": 3},
        "search": {"index": "{index}", "queries": "{queries}", "k": 3},
        "evaluate": {"index": "{index}", "queries": "{queries}", "truth": "made.zarr"},
        "verify": {"path": "{index}"},
        "delete": {"index": "{index}", "rows": "0-4"},
        "compact": {"index": "{index}", "chunk_rows": 40},
    }
    return known.get(stage, {})


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def pipeline_examples(scratch: Scratch) -> Callable[..., None]:
    @given(pipelines(), st.none() | edits())
    def example(text: str, changes: list[tuple[float, int, bytes]] | None) -> None:
        with scratch.folder() as folder:
            place = scratch.job(folder)
            real = {"corpus": place.corpus, "index": place.index, "model": place.model(), "queries": scratch.queries}
            for name, path in real.items():
                text = text.replace(f'"@{name}"', json.dumps(str(path)))
            data = text.encode() if changes is None else edited(text.encode(), changes)
            (folder / "job.toml").write_bytes(data)
            command("run", folder / "job.toml", allowed=TYPED)
            for store in (place.index, place.corpus):
                verify(store)

    return example


# Options

BASES = {
    "generate": "generate new --rows 9 --dim 4",
    "ingest": "ingest {queries} new",
    "train": "train {corpus} --models new --bits 8 --method lsh",
    "encode": "encode {corpus} new --model {model}",
    "publish": "publish {index} 0123456789abcdef --corpus {corpus}",
    "truth": "truth {corpus} {queries} -k 3 -o new.zarr",
    "search": "search {index} {queries}",
    "evaluate": "evaluate {index} {queries} --truth new.zarr",
    "verify": "verify {index}",
    "inspect": "inspect {index}",
    "status": "status {index}",
    "gc": "gc {index}",
    "delete": "delete {index}",
    "compact": "compact {index}",
    "tables": "tables {index}",
}
NOT_GIVEN = {"scheduler", "workers", "help", "dashboard"}
TEXTS = st.sampled_from(
    [
        *("", "0", "-1", "5", "3-9", "9-3", "199", "200", "9" * 30, "-" + "9" * 30, "0-" + "9" * 30, "1e400", "nan"),
        *(
            "@none.npy",
            "@",
            "@{queries}",
            "{corpus}",
            "{index}",
            "{queries}",
            ".",
            "\0",
            "é\u2028",
            "a,b",
            "=",
            "x=1",
            "x=",
        ),
        *("n_centres=[", "och", "itq", "lsh", "2GB", "lz4", "drop", "asymmetric", "multi-index"),
        *("new", "new.zarr", "new.npz", "new.jsonl", "new.parquet"),
    ]
)


def parameters(name: str) -> list[click.Parameter]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command.params


SHARED = {option.name for option in parameters("compact")} - {"index", "chunk_rows"}


def _options(name: str) -> list[click.Option]:
    """The options of a command, those of its own several times as likely as those that all commands share."""
    options = [param for param in parameters(name) if isinstance(param, click.Option)]
    own = [option for option in options if option.name not in SHARED]
    return [option for option in (*options, *own, *own, *own) if option.name not in NOT_GIVEN]


@st.composite
def commands(draw: st.DrawFn) -> tuple[list[str], bool]:
    """Words of a command with options, and whether one of these is no number although it must be."""
    name = draw(st.sampled_from(sorted(BASES)))
    words, broken = BASES[name].split(), False
    for option in draw(st.lists(st.sampled_from(_options(name)), max_size=3, unique_by=lambda option: option.name)):
        words.append(draw(st.sampled_from([*option.opts, *option.secondary_opts])))
        if not option.is_flag:
            number = option.type in (click.INT, click.FLOAT)
            value = draw(TEXTS | st.integers(-3, 40).map(str) if number else TEXTS)
            broken |= option.type is click.INT and not value.strip().lstrip("+-").isdigit()
            words.append(value)
    if draw(st.integers(0, 9)) == 0:
        words[draw(st.integers(1, len(words) - 1))] = draw(TEXTS)
        broken = False
    return words, broken


def option_examples(scratch: Scratch) -> Callable[..., None]:
    @given(commands())
    def example(made: tuple[list[str], bool]) -> None:
        words, broken = made
        with scratch.folder() as folder:
            place = scratch.job(folder)
            names = {"corpus": place.corpus, "index": place.index, "model": place.model(), "queries": scratch.queries}
            for name, path in names.items():
                words = [word.replace("{" + name + "}", str(path)) for word in words]
            command(*words, allowed={USAGE} if broken else TYPED, keeps=(place.index, place.corpus))
            for store in (place.index, place.corpus):
                verify(store)

    return example


EXAMPLES: dict[str, Callable[[Scratch], Callable[..., None]]] = {
    "ingest": ingest_examples,
    "search": search_examples,
    "encode": encode_examples,
    "files": file_examples,
    "documents": document_examples,
    "pipelines": pipeline_examples,
    "options": option_examples,
}


class Examples:
    """A batch of examples of one kind, from one seed."""

    def __init__(self, scratch: Scratch, kind: str, count: int, number: int) -> None:
        self.scratch, self.kind, self.count, self.number = scratch, kind, count, number
        self.run = 0

    def deliver(self) -> int:
        example = EXAMPLES[self.kind](self.scratch)
        inner = example.hypothesis.inner_test  # type: ignore[attr-defined]

        def counted(*args: Any, **kwargs: Any) -> None:
            self.run += 1
            inner(*args, **kwargs)

        example.hypothesis.inner_test = counted  # type: ignore[attr-defined]
        chosen = settings(
            max_examples=self.count,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),
        )
        with bounded_memory():
            seed(self.number)(chosen(example))()
        if self.run < self.count:
            raise NotDelivered(f"{self.run} examples of {self.count}")
        return self.count

    def check(self) -> None:
        """Every example has looked for itself."""


def faults(ground: Ground) -> Iterator[Fault]:
    queries = ground.fresh() / "queries.npy"
    np.save(queries, small_rows(5, seed=1))
    scratch, draw = Scratch(ground, queries), random.Random(None if ground.long else 9)
    for kind, batches in BATCHES.items():
        for _ in range(batches if ground.long else 1):
            number, count = draw.randrange(1 << 32), BATCH if ground.long else 5 * batches
            one = Examples(scratch, kind, count, number)
            yield Fault(f"{count} {kind} from seed {number}", one.deliver, one.check, seconds=240)
