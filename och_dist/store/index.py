"""The index: packed codes in immutable segments, each made by one job with one model, listed by numbered versions."""

from __future__ import annotations

import contextlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from och_dist.errors import BadInputError, IntegrityError
from och_dist.store.arrays import ArraySpec, open_layout, read_plain_chunk
from och_dist.store.jobs import Job
from och_dist.store.manifest import (
    Version,
    VersionRef,
    canonical,
    open_remembered,
    pack_numbers,
    read_latest,
    read_version,
    sha256,
    unpack_numbers,
    version_key,
)
from och_dist.store.model import Model, load_model
from och_dist.store.objects import Objects, open_objects
from och_dist.store.tombstones import Tombstones, check_tombstones, deleted_rows

CHUNK_ROWS = 65_536
MODELS = "models"


@dataclass(frozen=True)
class IndexSegment:
    """Rows [start, stop) of an index; ``digests`` holds the crc32c of every chunk of codes.

    A compacted segment names the rows of its ``sources``, each with the digest of the vectors they were encoded from.
    Where rows were dropped, ``starts`` holds the first of the global rows that each chunk stands for, and
    ``row_digests`` the crc32c of every chunk of row numbers.
    """

    job: Job
    digests: np.ndarray = field(default_factory=lambda: np.empty(0, "<u4"), repr=False, compare=False)
    sources: tuple[tuple[int, int, str], ...] = ()
    starts: np.ndarray | None = field(default=None, repr=False, compare=False)
    row_digests: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def start(self) -> int:
        return self.job.start

    @property
    def stop(self) -> int:
        return self.job.stop

    @property
    def folder(self) -> str:
        return self.job.folder

    @property
    def inputs(self) -> tuple[tuple[int, int, str], ...]:
        """(start, stop, digest of the vectors) of all rows, as they were encoded."""
        return self.sources or ((self.start, self.stop, self.job.input),)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """The global rows [start, stop) that a chunk stands for; deleted ones among them may have no code."""
        if self.starts is None:
            return self.job.rows(chunk)
        last = chunk + 1 == len(self.starts)
        return int(self.starts[chunk]), self.stop if last else int(self.starts[chunk + 1])

    def to_json(self) -> dict[str, Any]:
        body = {"job": self.job.id, **self.job.to_json(), "digests": pack_numbers(self.digests)}
        if self.sources:
            body["sources"] = [list(source) for source in self.sources]
        if self.starts is not None and self.row_digests is not None:
            body["starts"] = pack_numbers(self.starts, "<i8")
            body["row_digests"] = pack_numbers(self.row_digests)
        return body

    @classmethod
    def from_json(cls, entry: dict[str, Any], where: str) -> IndexSegment:
        job = Job.from_json(entry, where)
        if entry.get("job") != job.id:
            raise IntegrityError(
                f"{where} lists job {entry.get('job')!r}, but its content makes {job.id}; restore it from a copy"
            )
        digests = unpack_numbers(entry.get("digests", ""), job.spec.n_chunks, where)
        if job.kept is None:
            return cls(job, digests)
        sources = tuple((int(start), int(stop), str(source)) for start, stop, source in entry["sources"])
        ends = [job.start, *(stop for _, stop, _ in sources)]
        if [start for start, _, _ in sources] != ends[:-1] or ends[-1] != job.stop or ends != sorted(set(ends)):
            raise IntegrityError(
                f"{where} lists a compacted segment whose sources do not adjoin; restore it from a copy"
            )
        if job.whole:
            return cls(job, digests, sources)
        starts = unpack_numbers(entry["starts"], job.spec.n_chunks, where, "<i8")
        counts = np.diff(np.append(np.arange(0, job.stored_rows, job.chunk_rows), job.stored_rows))
        room = np.diff(np.append(starts, job.stop))
        if len(starts) and (starts[0] != job.start or np.any(room < counts)):
            raise IntegrityError(
                f"{where} lists a compacted segment whose chunks do not adjoin; restore it from a copy"
            )
        return cls(job, digests, sources, starts, unpack_numbers(entry["row_digests"], job.spec.n_chunks, where))


@dataclass(frozen=True)
class CodeChunk:
    """Where one chunk of codes lies and which global rows it stands for."""

    segment: int
    chunk: int
    start: int
    stop: int


@dataclass(frozen=True)
class Index(Version):
    """One version of an index."""

    kind = "index"

    url: str
    version: int
    model: str
    bits: int
    corpus: dict[str, Any]
    segments: tuple[IndexSegment, ...]
    tombstones: tuple[Tombstones, ...] = ()

    @cached_property
    def ref(self) -> IndexRef:
        """What a task carries to a worker in place of all this."""
        return IndexRef(self.url, self.version, sha256(canonical(self.to_json())))

    @property
    def live_rows(self) -> int:
        """Rows that are not deleted."""
        return self.rows - sum(entry.deleted for entry in self.tombstones)

    @property
    def stored_rows(self) -> int:
        """Rows that have a code: all but those that a compaction dropped."""
        return sum(segment.job.stored_rows for segment in self.segments)

    @property
    def nbytes(self) -> int:
        return self.stored_rows * -(-self.bits // 8)

    def deleted(self, start: int, stop: int) -> np.ndarray | None:
        """bool (stop - start,): which of the global rows [start, stop) are deleted; None if none of them is."""
        with self._not_collected():
            return deleted_rows(self.url, self._tombstones, start, stop)

    def deleted_in(self, number: int) -> int:
        """How many rows of range ``number`` of 2^20 rows are deleted."""
        return self._tombstones[number].deleted if number in self._tombstones else 0

    @cached_property
    def _tombstones(self) -> dict[int, Tombstones]:
        return {entry.number: entry for entry in self.tombstones}

    @cached_property
    def chunks(self) -> tuple[CodeChunk, ...]:
        """All chunks in row order."""
        return tuple(
            CodeChunk(number, chunk, *segment.bounds(chunk))
            for number, segment in enumerate(self.segments)
            for chunk in range(segment.job.spec.n_chunks)
        )

    def chunks_between(self, start: int, stop: int) -> tuple[CodeChunk, ...]:
        """The chunks that stand for any of the global rows [start, stop)."""
        first = bisect_right(self.chunks, start, key=lambda chunk: chunk.stop)
        return self.chunks[first : bisect_left(self.chunks, stop, key=lambda chunk: chunk.start)]

    def read(self, chunk: CodeChunk) -> np.ndarray:
        """Packed codes (rows, bytes) of one chunk."""
        segment = self.segments[chunk.segment]
        return self._read("codes", segment.job.spec, chunk, segment.digests)

    def row_numbers(self, chunk: CodeChunk) -> np.ndarray | None:
        """Global rows (m,) int64, ascending, of the codes of a chunk; None when they are all of [start, stop)."""
        segment = self.segments[chunk.segment]
        low, high = segment.job.spec.bounds(chunk.chunk)
        if segment.row_digests is None or high - low == chunk.stop - chunk.start:
            return None
        rows = self._read("rows", segment.job.rows_spec, chunk, segment.row_digests)[:, 0]
        if rows[0] < chunk.start or rows[-1] >= chunk.stop or np.any(rows[1:] <= rows[:-1]):
            raise IntegrityError(
                f"the row numbers of chunk {chunk.chunk} of {self.url}/{segment.folder} are damaged; "
                "'och verify --repair' mends them"
            )
        return rows

    def all_row_numbers(self, chunk: CodeChunk) -> np.ndarray:
        """Global rows (m,) int64, ascending, of the codes of a chunk."""
        rows = self.row_numbers(chunk)
        return np.arange(chunk.start, chunk.stop) if rows is None else rows

    def _read(self, part: str, spec: ArraySpec, chunk: CodeChunk, digests: np.ndarray) -> np.ndarray:
        prefix = f"{self.segments[chunk.segment].folder}/{part}"
        with self._not_collected():
            _check_layout(self.url, prefix, spec)
            return read_plain_chunk(self.objects, prefix, spec, chunk.chunk, stated=int(digests[chunk.chunk]))

    def live(self, chunk: CodeChunk) -> np.ndarray | None:
        """bool (m,): which of the codes that :meth:`read` returns are not deleted; None if none of them is."""
        deleted = self.deleted(chunk.start, chunk.stop)
        if deleted is None:
            return None
        rows = self.row_numbers(chunk)
        here = deleted if rows is None else deleted[rows - chunk.start]
        return ~here if here.any() else None

    @contextlib.contextmanager
    def _not_collected(self) -> Iterator[None]:
        """Say so when what is missing was collected with its version."""
        try:
            yield
        except IntegrityError as error:
            if self.objects.size(version_key(self.version)) is None:
                raise IntegrityError(
                    f"version {self.version} of {self.url} was collected while it was being read; open the newest"
                ) from error
            raise

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first global row, packed codes) chunk by chunk; where rows were dropped see :meth:`row_numbers`."""
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
            **super().to_json(),
            # 2: with deleted rows or compacted segments, which a reader of 1 would not see
            "format": 2 if self.tombstones or any(segment.sources for segment in self.segments) else 1,
            "model": self.model,
            "bits": self.bits,
            "corpus": self.corpus,
            "tombstones": [entry.to_json() for entry in self.tombstones],
        }

    @classmethod
    def _parse(cls, url: str, body: dict[str, Any], where: str) -> Index:
        segments = tuple(IndexSegment.from_json(entry, where) for entry in body["segments"])
        gone = tuple(Tombstones.from_json(entry) for entry in body.get("tombstones", ()))
        about = (int(body["version"]), str(body["model"]), int(body["bits"]), dict(body["corpus"]))
        return cls(url, *about, segments, gone)

    def _check(self, where: str) -> None:
        if {(segment.job.model, segment.job.bits) for segment in self.segments} != {(self.model, self.bits)}:
            raise IntegrityError(f"{where} mixes models; restore the manifest from a copy")
        check_tombstones(self.tombstones, self.rows, where)
        if self.stored_rows < self.live_rows:
            raise IntegrityError(
                f"{where} holds {self.stored_rows} codes for {self.live_rows} rows; restore the manifest"
            )


def model_objects(index_url: str) -> Objects:
    """The model store inside an index."""
    return open_objects(f"{str(index_url).rstrip('/')}/{MODELS}")


@lru_cache(maxsize=64)
def _check_layout(url: str, prefix: str, spec: ArraySpec) -> None:
    """The metadata of an array must say what the manifest does."""
    open_layout(open_objects(url), prefix, spec)


def open_version(url: str, version: int | None = None) -> Index:
    """Open an index, its newest version unless one is named."""
    objects = open_objects(url)
    body = read_latest(objects) if version is None else read_version(objects, version)
    if body is None:
        raise BadInputError(f"{objects.url} holds no published index; make one with 'och encode CORPUS {objects.url}'")
    return Index.from_json(objects.url, body)


find_index = Index.find


class IndexRef(VersionRef):
    """An index version as tasks carry it."""

    def open(self) -> Index:
        index: Index = open_remembered(self, open_version)
        return index


def next_version(index: Index | None, segments: tuple[IndexSegment, ...], corpus: dict[str, Any], url: str) -> Index:
    """The version that follows ``index`` (or the first) and lists ``segments``."""
    job = segments[-1].job
    number, gone = (index.version + 1, index.tombstones) if index else (1, ())
    return Index(url, number, job.model, job.bits, corpus, segments, gone)
