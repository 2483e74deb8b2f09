"""Input that cannot be used: the documented exit code, one sentence that says what is wrong, and nothing published."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from och_dist.store.manifest import seal, unseal
from tests.faults.ground import Ground, Place
from tests.faults.runner import Fault, Harm
from tests.support.command import Job, published, refused, small_rows
from tests.test_illegal_input import BAD_INPUT, INTEGRITY, USAGE, WRITERS, adopted, save

Words = list[object]
Prepare = Callable[[Path, Job], Words]
DIM = 8


@dataclass(frozen=True)
class Case:
    """A command that must be refused; ``prepare`` makes its bad input in a folder of its own and returns its words."""

    name: str
    code: int | tuple[int, ...]
    message: str
    prepare: Prepare


def _ingest(rows: np.ndarray, *options: object) -> Prepare:
    return lambda folder, job: ["ingest", save(folder, rows), folder / "new", *options]


def _append(rows: np.ndarray, *options: object) -> Prepare:
    return lambda folder, job: ["ingest", save(folder, rows), job.corpus, "--append", *options]


def _together(*blocks: np.ndarray) -> Prepare:
    def prepare(folder: Path, job: Job) -> Words:
        paths = [save(folder, rows, f"{number}.npy") for number, rows in enumerate(blocks)]
        return ["ingest", *paths, folder / "new"]

    return prepare


def _search(rows: np.ndarray, *options: object) -> Prepare:
    return lambda folder, job: ["search", job.index, save(folder, rows), *options]


def _with(rows: np.ndarray, row: int, value: float) -> np.ndarray:
    rows = rows.copy()
    rows[row] = value
    return rows


def _written(kind: str, change: Callable[[bytes], bytes]) -> Prepare:
    """A file of some kind whose bytes are then changed."""

    def prepare(folder: Path, job: Job) -> Words:
        path = folder / f"rows.{kind}"
        WRITERS[kind](path, small_rows(50))
        path.write_bytes(change(path.read_bytes()))
        return ["ingest", path, folder / "new"]

    return prepare


def _encode_after(rows: np.ndarray) -> Prepare:
    """A sound corpus whose values are too large for the projection."""

    def prepare(folder: Path, job: Job) -> Words:
        return ["encode", adopted(folder, rows), folder / "new", "--model", job.model]

    return prepare


def _npy_header(shape: str, descr: str = "<f4", body: bytes = bytes(64)) -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + body


def _raw(name: str, data: bytes, *words: str) -> Prepare:
    """A file of chosen bytes, to be ingested, or used as queries."""

    def prepare(folder: Path, job: Job) -> Words:
        (folder / name).write_bytes(data)
        return ["search", job.index, folder / name] if words else ["ingest", folder / name, folder / "new"]

    return prepare


def _zarr_says(**changes: Any) -> Prepare:
    """A Zarr array whose metadata declares something enormous."""

    def prepare(folder: Path, job: Job) -> Words:
        array = adopted(folder, small_rows(40))
        path = array / "zarr.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return ["encode", array, folder / "new", "--model", job.model]

    return prepare


def _manifest(which: str, change: Callable[[dict[str, Any]], object]) -> Prepare:
    """The manifest of a corpus or an index, changed by somebody who knows how to seal it."""

    def prepare(folder: Path, job: Job) -> Words:
        (path,) = Path(getattr(job, which), "versions").iterdir()
        body = unseal(path.read_bytes(), "it")
        change(body)
        path.write_bytes(seal(body))
        return ["verify", getattr(job, which)]

    return prepare


def _segment(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["segments"][0].update(changes)


def _replaced(which: str, data: bytes, size: int = 0) -> Prepare:
    """Other bytes in the place of a manifest, with a hole behind them up to ``size``."""

    def prepare(folder: Path, job: Job) -> Words:
        (path,) = Path(getattr(job, which), "versions").iterdir()
        path.write_bytes(data)
        if size:
            os.truncate(path, size)
        return ["search", job.index, job.queries] if which == "index" else ["verify", job.corpus]

    return prepare


def _in_model(name: str, data: bytes) -> Prepare:
    def prepare(folder: Path, job: Job) -> Words:
        (job.model / name).write_bytes(data)
        return ["encode", job.corpus, folder / "new", "--model", job.model]

    return prepare


def _link(find: Callable[[Job], Path], words: str) -> Prepare:
    """A part of a job lies elsewhere, as it was, and a link leads there."""

    def prepare(folder: Path, job: Job) -> Words:
        path = find(job)
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
        return [*words.format(out=folder / "new", **job._asdict()).split()]

    return prepare


def _strange_job(folder: Path, job: Job) -> Words:
    """A link among the jobs of an index leads to somebody else's folder, which a collection would empty."""
    (folder / "theirs").mkdir()
    (folder / "theirs" / "file").write_text("precious")
    (job.index / "segments" / "0123456789abcdef.0").symlink_to(folder / "theirs")
    return ["gc", job.index, "--job", "0123456789abcdef"]


def _only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def _words(text: str) -> Prepare:
    def prepare(folder: Path, job: Job) -> Words:
        return [*text.format(out=folder / "new", **job._asdict()).split()]

    return prepare


def _same_id(folder: Path, job: Job) -> Words:
    np.save(folder / "ids.npy", np.array([1, 2, 1]))
    return ["ingest", save(folder, small_rows(3)), folder / "new", "--ids", folder / "ids.npy"]


def _pipeline(text: str) -> Prepare:
    def prepare(folder: Path, job: Job) -> Words:
        (folder / "job.toml").write_text(text)
        return ["run", folder / "job.toml"]

    return prepare


def _segment_folder(job: Job) -> Path:
    return _only(job.index / "segments")


def _codes(job: Job) -> Path:
    return _segment_folder(job) / "codes" / "c" / "1" / "0"


def _index_manifest(job: Job) -> Path:
    return _only(job.index / "versions")


def _vectors(job: Job) -> Path:
    return _only(job.corpus / "segments") / "vectors" / "c" / "1" / "0"


ENCODE = "encode {corpus} {out} --model {model}"
NESTED = b"[" * 200_000
DIGITS = b'{"version": ' + b"9" * 100_000 + b"}"
ROWS = small_rows(40)
CASES = [
    Case("a row of NaN", BAD_INPUT, "1 of 40 rows hold NaN", _ingest(_with(ROWS, 5, np.nan))),
    Case("a row of infinity", BAD_INPUT, "rows hold NaN or infinity: 39", _ingest(_with(ROWS, 39, np.inf))),
    Case("appended rows of NaN", BAD_INPUT, "4 of 4 rows hold NaN", _append(np.full((4, DIM), np.nan, "f4"))),
    Case(
        "only rows of NaN, dropped",
        BAD_INPUT,
        "none of the 4 rows is finite",
        _append(np.full((4, DIM), np.nan, "f4"), "--nonfinite=drop"),
    ),
    Case("an adopted array with NaN", BAD_INPUT, "NaN or infinity", _encode_after(_with(ROWS, 5, np.nan))),
    Case("mixed dimensions", BAD_INPUT, "expected the same in all files", _together(ROWS, small_rows(9, dim=7))),
    Case("mixed dtypes", BAD_INPUT, "expected the same in all files", _together(ROWS, ROWS.astype("f8"))),
    Case("mixed dtypes of one size", BAD_INPUT, "expected the same", _together(ROWS.astype("i1"), ROWS.astype("u1"))),
    Case("appended rows of another dimension", BAD_INPUT, "one dimension and one dtype", _append(small_rows(3, dim=7))),
    Case("appended rows of another dtype", BAD_INPUT, "one dimension and one dtype", _append(ROWS.astype("f2"))),
    Case("huge finite float32", BAD_INPUT, "overflow .* row 7", _encode_after(_with(ROWS, 7, 3e38))),
    Case("huge finite float64", BAD_INPUT, "overflow .* row 7", _encode_after(_with(ROWS.astype("f8"), 7, 1e300))),
    Case("huge finite queries", BAD_INPUT, "overflow", _search(_with(ROWS, 7, -3e38))),
    *(Case(f"a cut {kind} file", BAD_INPUT, "och: ", _written(kind, lambda data: data[:-7])) for kind in WRITERS),
    *(Case(f"an empty {kind} file", BAD_INPUT, "0 bytes", _written(kind, lambda data: b"")) for kind in WRITERS),
    *(Case(f"text as {kind}", BAD_INPUT, "och: ", _written(kind, lambda data: b"<html>\n" * 9)) for kind in WRITERS),
    Case("no rows", BAD_INPUT, "no rows; expected at least one", _ingest(np.empty((0, DIM), "f4"))),
    Case("rows of no dimension", BAD_INPUT, "och: ", _ingest(np.empty((4, 0), "f4"))),
    Case("a three-dimensional file", BAD_INPUT, "och: ", _ingest(np.zeros((4, 3, 2), "f4"))),
    Case("integers of 64 bits", BAD_INPUT, "och: ", _ingest(np.zeros((4, DIM), "i8"))),
    Case("complex numbers", BAD_INPUT, "och: ", _ingest(np.zeros((4, DIM), "c8"))),
    Case("records", BAD_INPUT, "och: ", _ingest(np.zeros(4, [("a", "f4"), ("b", "i4")]))),
    Case("text in an array", BAD_INPUT, "och: ", _ingest(np.full((4, 2), "abc"))),
    Case("an id that is there twice", BAD_INPUT, "id 1 belongs to row 0 and to row 2", _same_id),
    Case("a file that is not there", BAD_INPUT, "cannot be read", _words("ingest {out}.npy {out}")),
    Case("queries of another dimension", BAD_INPUT, "9-d, .* 8-d; use queries", _search(small_rows(3, dim=9))),
    Case("queries that are integers", BAD_INPUT, "och: ", _search(np.zeros((3, DIM), "i4"))),
    Case("queries that are complex", BAD_INPUT, "och: ", _search(np.zeros((3, DIM), "c16"))),
    Case("queries of one dimension only", BAD_INPUT, "och: ", _search(np.zeros(DIM, "f4"))),
    Case("queries of NaN", BAD_INPUT, "1 queries .* hold NaN or infinity: 2", _search(_with(ROWS, 2, np.nan))),
    Case("k=0", USAGE, "k=0; use at least 1", _words("search {index} {queries} -k 0")),
    Case("k=-1", USAGE, "k=-1; use at least 1", _words("search {index} {queries} -k -1")),
    Case("a negative radius", USAGE, "och: ", _words("search {index} {queries} --radius -1")),
    Case("truth of k=0", USAGE, "k=0; use at least 1", _words("truth {corpus} {queries} -o {out}.zarr -k 0")),
    Case("no bits", BAD_INPUT, "n_bits=0", _words("train {corpus} --models {out} --bits 0")),
    Case("a row that is not there", USAGE, "does not exist", _words("delete {index} --rows 99999")),
    Case("rows backwards", USAGE, "ends before it starts", _words("delete {index} --rows 9-4")),
    Case(
        "a version that is not there",
        INTEGRITY,
        "version 9 .* is not there",
        _words("search {index} {queries} --version 9"),
    ),
    Case("a negative version", (USAGE, INTEGRITY), "och: ", _words("search {index} {queries} --version -1")),
    Case("a corpus for an index", BAD_INPUT, "of kind 'corpus'", _words("search {corpus} {queries}")),
    Case("a model that is none", BAD_INPUT, "is not a model", _words("encode {corpus} {out} --model {corpus}")),
    Case("an npy file that declares 2^50 rows", BAD_INPUT, "och: ", _raw("x.npy", _npy_header(f"({1 << 50}, 8)"))),
    Case("an npy file that declares 2^70 rows", BAD_INPUT, "och: ", _raw("x.npy", _npy_header(f"({1 << 70}, 8)"))),
    Case("an npy file of negative shape", BAD_INPUT, "och: ", _raw("x.npy", _npy_header("(-1, 8)"))),
    Case("an npy file of nested brackets", BAD_INPUT, "och: ", _raw("x.npy", _npy_header("(" * 90 + ")" * 90))),
    Case("queries that declare 2^50 rows", BAD_INPUT, "och: ", _raw("x.npy", _npy_header(f"({1 << 50}, 8)"), "search")),
    Case("fvecs of 2^31 dimensions", BAD_INPUT, "och: ", _raw("x.fvecs", b"\xff\xff\xff\x7f" + bytes(60))),
    Case("fvecs of negative dimension", BAD_INPUT, "och: ", _raw("x.fvecs", b"\xff\xff\xff\xff" + bytes(60))),
    Case("Zarr that declares 2^60 rows", (BAD_INPUT, INTEGRITY), "och: ", _zarr_says(shape=[1 << 60, DIM])),
    Case(
        "Zarr chunks of 2^50 rows",
        (BAD_INPUT, INTEGRITY),
        "och: ",
        _zarr_says(chunk_grid={"name": "regular", "configuration": {"chunk_shape": [1 << 50, DIM]}}),
    ),
    Case("a manifest of 2^60 rows", INTEGRITY, "och: ", _manifest("corpus", _segment(stop=1 << 60))),
    Case("a manifest of giant chunks", INTEGRITY, "och: ", _manifest("corpus", _segment(chunk_rows=1 << 60))),
    Case("an index of 2^60 rows", INTEGRITY, "och: ", _manifest("index", _segment(stop=1 << 60))),
    Case("an index of 2^40 bits", INTEGRITY, "och: ", _manifest("index", lambda body: body.update(bits=1 << 40))),
    Case("a segment above its store", INTEGRITY, "och: ", _manifest("corpus", _segment(id="../../other"))),
    Case("a segment at the root", INTEGRITY, "och: ", _manifest("corpus", _segment(id="/etc"))),
    Case("a segment with NUL", INTEGRITY, "och: ", _manifest("corpus", _segment(id="a\0b"))),
    Case("a model above its store", INTEGRITY, "och: ", _manifest("index", lambda body: body.update(model="../../m"))),
    Case("a path with NUL", (USAGE, BAD_INPUT), "och: |Invalid", lambda folder, job: ["verify", f"{folder}/a\0b"]),
    Case("a link for a chunk of codes", INTEGRITY, "a link that leads out", _link(_codes, "search {index} {queries}")),
    Case("a link for a segment", INTEGRITY, "a link that leads out", _link(_segment_folder, "verify {index}")),
    Case("a link for a manifest", INTEGRITY, "a link that leads out", _link(_index_manifest, "inspect {index}")),
    Case("a link for a corpus chunk", INTEGRITY, "a link that leads out", _link(_vectors, ENCODE)),
    Case("a link for a model", INTEGRITY, "a link that leads out", _link(lambda job: job.model, ENCODE)),
    Case("a link among the jobs", INTEGRITY, "a link that leads out", _strange_job),
    Case("nested JSON as a corpus manifest", INTEGRITY, "not a sealed JSON", _replaced("corpus", NESTED)),
    Case("nested JSON as an index manifest", INTEGRITY, "not a sealed JSON", _replaced("index", NESTED)),
    Case("a number of 100,000 digits", INTEGRITY, "not a sealed JSON", _replaced("index", DIGITS)),
    Case("a manifest of 1 GB", INTEGRITY, "no manifest is over", _replaced("index", b"{", 1 << 30)),
    Case("nested JSON as a model", INTEGRITY, "och: ", _in_model("model.json", NESTED)),
    Case("a model array of 8 GB", INTEGRITY, "och: ", _in_model("projection.npy", _npy_header(f"({1 << 30}, 2)"))),
    Case("a pipeline file of nested brackets", USAGE, "och: ", _pipeline("name = " + "[" * 100_000)),
    Case("a pipeline with an unknown stage", USAGE, "is not known", _pipeline("[[stages]]\nstage = 'rm'\n")),
]


class BadInput:
    """The command of a case, against a job that it must leave as it is."""

    def __init__(self, ground: Ground, case: Case, job: Callable[[], Job]) -> None:
        self.ground, self.case, self.make = ground, case, job

    def deliver(self) -> None:
        self.folder, self.job = self.ground.fresh(), self.make()
        self.before = [published(self.job.corpus), published(self.job.index)]
        self.words = self.case.prepare(self.folder, self.job)

    def check(self) -> None:
        codes = (self.case.code,) if isinstance(self.case.code, int) else self.case.code
        keeps = [self.job.corpus, self.job.index, self.folder / "new"]
        for number, code in enumerate(codes):
            try:
                refused(code, self.case.message, *self.words, keeps=keeps)
                break
            except AssertionError:
                if number + 1 == len(codes):
                    raise
        if published(self.folder / "new"):
            raise Harm("something was published", wrong=1)
        if (self.folder / "theirs").exists() and not (self.folder / "theirs" / "file").exists():
            raise Harm("a file of somebody else was removed", lost=1)


def faults(ground: Ground) -> Iterator[Fault]:
    queries = ground.fresh() / "queries.npy"
    np.save(queries, small_rows(5, seed=1))

    def job() -> Job:
        place: Place = ground.copy(ground.encoded)
        return Job(Path(place.corpus), Path(place.model()), Path(place.index), queries, queries)

    for case in CASES:
        one = BadInput(ground, case, job)
        yield Fault(case.name, one.deliver, one.check)
