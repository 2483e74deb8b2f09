"""The index: packed codes in immutable segments, each made by one job with one model, listed by numbered versions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import zarr

from och_dist.errors import BadInputError, IntegrityError
from och_dist.store.arrays import (
    ArraySpec,
    Written,
    create_array,
    open_layout,
    read_rows,
    write_chunk,
)
from och_dist.store.model import Model, load_model
from och_dist.store.objects import Objects, open_objects
from och_dist.store.versions import (
    canonical,
    pack_digests,
    read_document,
    read_latest,
    read_version,
    seal,
    sha256,
    unpack_digests,
    unseal,
    version_key,
)

FORMAT = 1
CHUNK_ROWS = 65_536
MODELS = "models"


@dataclass(frozen=True)
class Job:
    """The work of encoding corpus rows [start, stop) with one model; ``id`` is a function of exactly that."""

    model: str
    bits: int
    start: int
    stop: int
    chunk_rows: int
    input: str
    generation: int = 0

    @property
    def id(self) -> str:
        text = f"{self.model} {self.input} {self.start} {self.stop} {self.chunk_rows}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def folder(self) -> str:
        return f"segments/{self.id}.{self.generation}"

    @property
    def spec(self) -> ArraySpec:
        return ArraySpec(self.stop - self.start, -(-self.bits // 8), "|u1", self.chunk_rows)

    def rows(self, chunk: int) -> tuple[int, int]:
        """Global rows [start, stop) of one chunk."""
        low, high = self.spec.bounds(chunk)
        return self.start + low, self.start + high

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, body: dict[str, Any], where: str) -> Job:
        try:
            job = cls(
                model=str(body["model"]),
                input=str(body["input"]),
                **{name: int(body[name]) for name in ("bits", "start", "stop", "chunk_rows", "generation")},
            )
            if not (0 <= job.start < job.stop and job.chunk_rows > 0 and job.bits > 0 and job.generation >= 0):
                raise ValueError(f"{job}")
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{where} does not describe a job ({error})") from None
        return job


def begin_job(objects: Objects, job: Job) -> None:
    """Announce a job and lay out its array; again is fine."""
    objects.put(f"{job.folder}/job.json", seal(job.to_json()))
    create_array(objects, f"{job.folder}/codes", job.spec)


def read_job(objects: Objects, folder: str) -> Job | None:
    """The job of a segment folder, None if its announcement is not there (yet, or any more)."""
    where = f"{objects.url}/{folder}/job.json"
    data = read_document(objects, f"{folder}/job.json")
    if data is None:
        return None
    job = Job.from_json(unseal(data, where), where)
    if job.folder != folder:
        raise IntegrityError(f"{where} announces {job.folder}; it was copied or renamed: remove the folder {folder}")
    return job


def list_jobs(objects: Objects) -> list[Job]:
    """Every job that has a folder, published or not."""
    jobs = (read_job(objects, f"segments/{name}") for name in objects.folders("segments"))
    return [job for job in jobs if job is not None]


def record_key(job: Job, chunk: int) -> str:
    return f"{job.folder}/done/{chunk:08d}.json"


def write_codes(objects: Objects, job: Job, chunk: int, codes: np.ndarray, ones: np.ndarray, source: str) -> Written:
    """Store one chunk of codes and then its record; both are put-if-absent, so every attempt ends in the same bytes."""
    written = write_chunk(objects, f"{job.folder}/codes", chunk, codes)
    record = {
        "chunk": chunk,
        "nbytes": written.nbytes,
        "crc": written.crc,
        "input": source,
        "ones": ones.tolist(),
    }
    objects.put(record_key(job, chunk), canonical(record))
    return written


def done_chunks(objects: Objects, job: Job) -> set[int]:
    """Numbers of the chunks that have a completion record."""
    names = (key.rpartition("/")[2].removesuffix(".json") for key, _, _ in objects.list(f"{job.folder}/done"))
    numbers = {int(name) for name in names if name.isascii() and name.isdigit()}
    return {number for number in numbers if number < job.spec.n_chunks}


@dataclass(frozen=True)
class IndexSegment:
    """Rows [start, stop) of an index; ``digests`` holds the crc32c of every chunk of codes."""

    job: Job
    digests: np.ndarray = field(repr=False, compare=False)

    @property
    def start(self) -> int:
        return self.job.start

    @property
    def stop(self) -> int:
        return self.job.stop

    def to_json(self) -> dict[str, Any]:
        return {"job": self.job.id, **self.job.to_json(), "digests": pack_digests(self.digests)}

    @classmethod
    def from_json(cls, entry: dict[str, Any], where: str) -> IndexSegment:
        job = Job.from_json(entry, where)
        if entry.get("job") != job.id:
            raise IntegrityError(f"{where} lists job {entry.get('job')!r}, but its content makes {job.id}")
        return cls(job, unpack_digests(entry.get("digests", ""), job.spec.n_chunks, where))


@dataclass(frozen=True)
class CodeChunk:
    """Where one chunk of codes lies and which global rows it holds."""

    segment: int
    chunk: int
    start: int
    stop: int


@dataclass(frozen=True)
class Index:
    """One version of an index. It stays readable and unchanged while later versions are published."""

    url: str
    version: int
    model: str
    bits: int
    corpus: dict[str, Any]
    segments: tuple[IndexSegment, ...]

    @property
    def objects(self) -> Objects:
        return open_objects(self.url)

    @cached_property
    def ref(self) -> IndexRef:
        """What a task carries to a worker in place of all this."""
        return IndexRef(self.url, self.version, sha256(canonical(self.to_json())))

    @property
    def rows(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    @property
    def nbytes(self) -> int:
        return self.rows * -(-self.bits // 8)

    @cached_property
    def chunks(self) -> tuple[CodeChunk, ...]:
        """All chunks in row order."""
        return tuple(
            CodeChunk(number, chunk, *segment.job.rows(chunk))
            for number, segment in enumerate(self.segments)
            for chunk in range(segment.job.spec.n_chunks)
        )

    def read(self, chunk: CodeChunk) -> np.ndarray:
        """Packed codes (rows, bytes) of one chunk."""
        job = self.segments[chunk.segment].job
        try:
            codes = _codes(self.url, job.folder, job.spec)
            return read_rows(codes, chunk.start - job.start, chunk.stop - job.start)
        except IntegrityError as error:
            if self.objects.size(version_key(self.version)) is None:
                raise IntegrityError(
                    f"version {self.version} of {self.url} was collected while it was being read; open the newest"
                ) from error
            raise

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first global row, packed codes) chunk by chunk."""
        for chunk in self.chunks:
            yield chunk.start, self.read(chunk)

    def load_model(self) -> Model:
        """The model that made the codes."""
        model = load_model(model_objects(self.url), self.model)
        if model.n_bits != self.bits:
            raise IntegrityError(
                f"version {self.version} of {self.url} states {self.bits} bits, its model gives {model.n_bits}; "
                "restore the manifest from a copy"
            )
        return model

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "kind": "index",
            "version": self.version,
            "parent": self.version - 1,
            "model": self.model,
            "bits": self.bits,
            "rows": self.rows,
            "corpus": self.corpus,
            "segments": [segment.to_json() for segment in self.segments],
            "tombstones": [],
        }


def model_objects(index_url: str) -> Objects:
    """The model store inside an index."""
    return open_objects(f"{str(index_url).rstrip('/')}/{MODELS}")


@lru_cache(maxsize=64)
def _codes(url: str, folder: str, spec: ArraySpec) -> zarr.Array:
    return open_layout(open_objects(url), f"{folder}/codes", spec)


def open_version(url: str, version: int | None = None) -> Index:
    """Open an index, its newest version unless one is named."""
    objects = open_objects(url)
    body = read_latest(objects) if version is None else read_version(objects, version)
    if body is None:
        raise BadInputError(f"{objects.url} holds no published index; make one with 'och encode CORPUS {objects.url}'")
    return index_from_json(objects.url, body)


def find_index(url: str) -> Index | None:
    """The newest published version at ``url``, None when there is none yet."""
    objects = open_objects(url)
    body = read_latest(objects)
    return None if body is None else index_from_json(objects.url, body)


@dataclass(frozen=True)
class IndexRef:
    """An index version, small enough to travel with every task."""

    url: str
    version: int
    fingerprint: str

    def open(self) -> Index:
        """:func:`open_version` with a memory, by content: an index may be removed and made anew at the same place."""
        return _remembered(self)


@lru_cache(maxsize=16)
def _remembered(ref: IndexRef) -> Index:
    index = open_version(ref.url, ref.version)
    if index.ref != ref:
        raise IntegrityError(
            f"version {ref.version} of {ref.url} is not the one that this job was planned with: it was replaced "
            "meanwhile, or lies at another place on this machine; run the command again"
        )
    return index


def index_from_json(url: str, body: dict[str, Any]) -> Index:
    where = f"version {body.get('version')} of {url}"
    if body.get("kind") != "index" or body.get("format") != FORMAT:
        raise BadInputError(
            f"{where} is of kind {body.get('kind')!r}, format {body.get('format')!r}; "
            f"an index of format {FORMAT} is needed here"
        )
    try:
        segments = tuple(IndexSegment.from_json(entry, where) for entry in body["segments"])
        index = Index(url, int(body["version"]), str(body["model"]), int(body["bits"]), dict(body["corpus"]), segments)
        rows = int(body["rows"])
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"{where} is incomplete ({error})") from None
    starts = [0, *(segment.stop for segment in segments)]
    if [segment.start for segment in segments] != starts[:-1] or starts[-1] != rows or not segments:
        raise IntegrityError(f"{where} does not add up: {rows} rows in segments ending at {starts}")
    if {(segment.job.model, segment.job.bits) for segment in segments} != {(index.model, index.bits)}:
        raise IntegrityError(f"{where} mixes models; restore the manifest from a copy")
    return index


def next_version(index: Index | None, segments: tuple[IndexSegment, ...], corpus: dict[str, Any], url: str) -> Index:
    """The version that follows ``index`` (or the first) and lists ``segments``."""
    job = segments[-1].job
    if index is None:
        return Index(url, 1, job.model, job.bits, corpus, segments)
    return replace(index, version=index.version + 1, model=job.model, bits=job.bits, corpus=corpus, segments=segments)
