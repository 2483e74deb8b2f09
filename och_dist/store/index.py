"""The index: packed codes in immutable segments, each made by one job with one model, listed by numbered versions."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from och_dist.errors import BadInputError, IntegrityError
from och_dist.kernels.packing import count_ones
from och_dist.store.arrays import ArraySpec, chunk_key, create_array, open_layout, read_plain_chunk, write_chunk
from och_dist.store.manifest import (
    StoredArray,
    Version,
    VersionRef,
    canonical,
    pack_numbers,
    read_latest,
    read_sealed,
    read_version,
    seal,
    sha256,
    unpack_numbers,
    version_key,
)
from och_dist.store.model import Model, load_model
from och_dist.store.objects import Objects, open_objects

CHUNK_ROWS = 65_536
MODELS = "models"
ANNOUNCEMENT = "job.json"
TOMBSTONES = "tombstones"
RANGE_ROWS = 1 << 20
CACHED_BITMAPS = 64
BITMAP_NAME = re.compile(rf"{TOMBSTONES}/\d{{8}}\.(?:(\d{{8,}})\.)?[0-9a-f]{{16}}")


class ChunkRecord(NamedTuple):
    """What is known of a finished chunk: crc32c of its codes and of its row numbers (0 without any), and its set bits
    (bits,)."""

    crc: int
    rows_crc: int
    ones: np.ndarray


@dataclass(frozen=True)
class CodeChunk:
    """Where one chunk of codes lies, its segment by place, and which global rows it stands for."""

    segment: int
    number: int
    start: int
    stop: int

    def holds(self, rows: np.ndarray) -> bool:
        """Whether row numbers (m,) ascend inside the rows that it stands for."""
        return bool(self.start <= rows[0] and rows[-1] < self.stop and np.all(rows[:-1] < rows[1:]))


@dataclass(frozen=True)
class Job:
    """The work behind a segment: encoding corpus rows [start, stop) with one model; ``id`` is a function of just that.

    With ``kept`` it is a compaction: the work of merging the codes of these rows, of which so many are left. Its
    ``input`` stands for the codes that were merged and the rows that were dropped.
    """

    model: str
    bits: int
    start: int
    stop: int
    chunk_rows: int
    input: str
    generation: int = 0
    kept: int | None = None

    @property
    def id(self) -> str:
        return sha256(f"{self.model} {self.input} {self.start} {self.stop} {self.chunk_rows}".encode())[:16]

    @property
    def folder(self) -> str:
        return f"segments/{self.id}.{self.generation}"

    @property
    def stored_rows(self) -> int:
        return self.stop - self.start if self.kept is None else self.kept

    @property
    def whole(self) -> bool:
        """Whether there is a code for every row."""
        return self.stored_rows == self.stop - self.start

    @property
    def spec(self) -> ArraySpec:
        """Layout of the codes."""
        return ArraySpec(self.stored_rows, -(-self.bits // 8), "|u1", self.chunk_rows)

    @property
    def rows_spec(self) -> ArraySpec:
        """Layout of the row numbers beside the codes, where some rows were dropped."""
        return ArraySpec(self.stored_rows, 1, "<i8", self.chunk_rows)

    @property
    def ones_spec(self) -> ArraySpec:
        """Layout of the folded records: one chunk with the set bits of every chunk of codes."""
        return ArraySpec(self.spec.n_chunks, self.bits, "<i8", self.spec.n_chunks)

    def record_key(self, chunk: int) -> str:
        return f"{self.folder}/done/{chunk:08d}.json"

    def begin(self, objects: Objects) -> None:
        """Announce the job and lay out its arrays; again is fine."""
        objects.put(f"{self.folder}/{ANNOUNCEMENT}", seal(self.to_json()))
        if self.stored_rows:
            create_array(objects, f"{self.folder}/codes", self.spec)
            if not self.whole:
                create_array(objects, f"{self.folder}/rows", self.rows_spec)

    def write(
        self, objects: Objects, chunk: int, codes: np.ndarray, source: str, *, rows: np.ndarray | None = None
    ) -> ChunkRecord:
        """Store one chunk of codes, with its row numbers (m,) where some were dropped, and then its record, which
        names the ``source`` that it was made from.

        All of it is put-if-absent, so every attempt ends in the same bytes.
        """
        ones = count_ones(codes, self.bits)
        record = {"chunk": chunk, "input": source, "ones": ones.tolist()}
        if rows is not None:
            record["rows_crc"] = write_chunk(objects, f"{self.folder}/rows", chunk, rows.reshape(-1, 1)).crc
        written = write_chunk(objects, f"{self.folder}/codes", chunk, codes)
        record |= {"nbytes": written.nbytes, "crc": written.crc}
        objects.put(self.record_key(chunk), canonical(record))
        return ChunkRecord(written.crc, record.get("rows_crc", 0), ones)

    def read_record(self, objects: Objects, chunk: int) -> ChunkRecord:
        """The record of a finished chunk; ValueError, KeyError or TypeError if it is none of this chunk."""
        record = dict(json.loads(objects.get(self.record_key(chunk))))
        rows_crc = 0 if self.whole else int(record["rows_crc"])
        found = ChunkRecord(int(record["crc"]), rows_crc, np.array(record["ones"], "<i8"))
        if record["chunk"] != chunk or found.ones.shape != (self.bits,) or record["nbytes"] != self.spec.stored_bytes:
            raise ValueError("it belongs elsewhere")
        return found

    def done(self, objects: Objects) -> set[int]:
        """Numbers of the chunks that have a completion record."""
        names = (key.rpartition("/")[2].removesuffix(".json") for key, _, _ in objects.list(f"{self.folder}/done"))
        numbers = {int(name) for name in names if name.isascii() and name.isdigit()}
        return {number for number in numbers if number < self.spec.n_chunks}

    def folded(self, objects: Objects) -> bool:
        """Whether the records were made one array: the job was published, or is about to be."""
        return objects.size(chunk_key(f"{self.folder}/ones", 0)) is not None

    @classmethod
    def read(cls, objects: Objects, folder: str) -> Job | None:
        """The job of a segment folder, None if its announcement is not there (yet, or any more)."""
        where = f"{objects.url}/{folder}/{ANNOUNCEMENT}"
        body = read_sealed(objects, f"{folder}/{ANNOUNCEMENT}")
        if body is None:
            return None
        job = cls.from_json(body, where)
        if job.folder != folder:
            raise IntegrityError(
                f"{where} announces {job.folder}; it was copied or renamed: remove the folder {folder}"
            )
        return job

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def from_json(cls, body: dict[str, Any], where: str) -> Job:
        try:
            job = cls(
                model=str(body["model"]),
                input=str(body["input"]),
                kept=int(body["kept"]) if "kept" in body else None,
                **{name: int(body[name]) for name in ("bits", "start", "stop", "chunk_rows", "generation")},
            )
            ranges = 0 <= job.start < job.stop and 0 <= job.stored_rows <= job.stop - job.start
            if not (ranges and job.chunk_rows > 0 and job.bits > 0 and job.generation >= 0):
                raise ValueError(f"{job}")
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{where} does not describe a job ({error}); run 'och verify'") from None
        return job


def list_jobs(objects: Objects) -> list[Job]:
    """Every job that has a folder, published or not."""
    jobs = (Job.read(objects, f"segments/{name}") for name in objects.folders("segments"))
    return [job for job in jobs if job is not None]


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

    def chunks(self, place: int = 0) -> list[CodeChunk]:
        """The chunks, with the rows that each stands for; deleted ones among them may have no code."""
        firsts = range(self.start, self.stop, self.job.chunk_rows) if self.starts is None else self.starts.tolist()
        return [
            CodeChunk(place, chunk, start, stop)
            for chunk, (start, stop) in enumerate(itertools.pairwise([*firsts, self.stop]))
        ]

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
class Tombstones:
    """The deleted rows of range ``number``, that is of rows [number * 2^20, (number + 1) * 2^20): how many, the sha256
    of their bitmap, and the version ``since`` which these are deleted.

    Bitmaps are written once. They go by row number, not by segment: segments change when an index is compacted or
    encoded with another model, row numbers never do. A manifest lists the bitmaps that are in force, so a version keeps
    seeing what it was published with.

    The name of a bitmap holds the version that it was made for. That version lists it or no version ever does, for
    later ones only carry on what it lists. So once it exists, whoever published it, an unlisted bitmap of that name is
    litter; before that, a delete may be about to list it.
    """

    number: int
    digest: str
    deleted: int
    since: int = 0

    @property
    def key(self) -> str:
        version = f"{self.since:08d}." if self.since else ""  # the first bitmaps had none in their names
        return f"{TOMBSTONES}/{self.number:08d}.{version}{self.digest[:16]}"

    @property
    def start(self) -> int:
        return self.number * RANGE_ROWS

    @property
    def stop(self) -> int:
        return self.start + RANGE_ROWS

    def possible(self, rows: int) -> bool:
        """Whether an index of so many ``rows`` can have these."""
        sound = re.fullmatch("[0-9a-f]{64}", self.digest) and min(self.number, self.since) >= 0
        return bool(sound) and 0 < self.deleted <= min(RANGE_ROWS, rows - self.start)

    def to_json(self) -> dict[str, Any]:
        return {"range": self.number, "digest": self.digest, "deleted": self.deleted, "since": self.since}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Tombstones:
        return cls(int(entry["range"]), str(entry["digest"]), int(entry["deleted"]), int(entry.get("since", 0)))


def row_ranges(rows: int) -> Iterator[tuple[int, int, int]]:
    """(number, start, stop) of the ranges that hold the first ``rows`` rows, the last one as long as all others."""
    for number in range(-(-rows // RANGE_ROWS)):
        yield number, number * RANGE_ROWS, (number + 1) * RANGE_ROWS


def read_bitmap(objects: Objects, entry: Tombstones) -> np.ndarray:
    """Packed bits (2^17,) uint8 of one range, little bit order, after comparing them with their digest."""
    data = objects.read(entry.key)
    where = f"{objects.url}/{entry.key}"
    if data is None:
        raise IntegrityError(f"{where}, a bitmap of deleted rows, is missing; restore it from a copy")
    if len(data) != RANGE_ROWS // 8 or sha256(data) != entry.digest:
        raise IntegrityError(f"{where}, a bitmap of deleted rows, is damaged; restore it from a copy")
    bits = np.frombuffer(data, np.uint8)
    if int(np.bitwise_count(bits).sum()) != entry.deleted:
        raise IntegrityError(
            f"{where} does not hold the {entry.deleted} rows that its manifest states; restore it from a copy"
        )
    return bits


@lru_cache(maxsize=CACHED_BITMAPS)
def remembered_bitmap(url: str, entry: Tombstones) -> np.ndarray:
    """:func:`read_bitmap` with a memory of a few megabytes; what it read is known by its content."""
    return read_bitmap(open_objects(url), entry)


def put_bitmap(objects: Objects, number: int, mask: np.ndarray, *, since: int) -> Tombstones:
    """Store which rows of a range, bool (2^20,), are deleted from version ``since`` on; again makes the same object."""
    data = np.packbits(mask, bitorder="little").tobytes()
    entry = Tombstones(number, sha256(data), int(np.count_nonzero(mask)), since)
    objects.put(entry.key, data)
    return entry


def stored_bitmaps(objects: Objects) -> dict[str, int]:
    """Key -> version that it was made for, of all bitmaps that are there."""
    names = (BITMAP_NAME.fullmatch(key) for key, _, _ in objects.list(TOMBSTONES))
    return {name[0]: int(name[1] or 0) for name in names if name}


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
    def fingerprint(self) -> str:
        return sha256(canonical(self.to_json()))

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
        found = None
        for number in range(start // RANGE_ROWS, -(-stop // RANGE_ROWS)):
            if (entry := self._tombstones.get(number)) is None:
                continue
            with self._not_collected():
                bits = remembered_bitmap(self.url, entry)
            low, high = max(start, entry.start), min(stop, entry.stop)
            first = (low - entry.start) // 8 * 8
            whole = np.unpackbits(bits[first // 8 : -(-(high - entry.start) // 8)], bitorder="little")
            mask = whole[low - entry.start - first : high - entry.start - first].view(bool)
            if mask.any():
                found = np.zeros(stop - start, bool) if found is None else found
                found[low - start : high - start] = mask
        return found

    def deleted_in(self, number: int) -> int:
        """How many rows of range ``number`` of 2^20 rows are deleted."""
        return self._tombstones[number].deleted if number in self._tombstones else 0

    @cached_property
    def _tombstones(self) -> dict[int, Tombstones]:
        return {entry.number: entry for entry in self.tombstones}

    def arrays(self) -> Iterator[StoredArray]:
        for part in (part for part in self.segments if part.job.stored_rows):
            yield f"{part.folder}/codes", part.job.spec, part.digests
            if part.row_digests is not None:
                yield f"{part.folder}/rows", part.job.rows_spec, part.row_digests

    @cached_property
    def chunks(self) -> tuple[CodeChunk, ...]:
        """All chunks in row order."""
        return tuple(chunk for place, segment in enumerate(self.segments) for chunk in segment.chunks(place))

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
        low, high = segment.job.spec.bounds(chunk.number)
        if segment.row_digests is None or high - low == chunk.stop - chunk.start:
            return None
        rows = self._read("rows", segment.job.rows_spec, chunk, segment.row_digests)[:, 0]
        if not chunk.holds(rows):
            raise IntegrityError(
                f"the row numbers of chunk {chunk.number} of {self.url}/{segment.folder} are damaged; "
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
            return read_plain_chunk(self.objects, prefix, spec, chunk.number, stated=int(digests[chunk.number]))

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
    def open(cls, url: str, version: int | None = None) -> Index:
        """Open an index, its newest version unless one is named."""
        objects = open_objects(url)
        body = read_latest(objects) if version is None else read_version(objects, version)
        if body is None:
            raise BadInputError(
                f"{objects.url} holds no published index; make one with 'och encode CORPUS {objects.url}'"
            )
        return cls.from_json(objects.url, body)

    @classmethod
    def _parse(cls, url: str, body: dict[str, Any], where: str) -> Index:
        segments = tuple(IndexSegment.from_json(entry, where) for entry in body["segments"])
        gone = tuple(Tombstones.from_json(entry) for entry in body.get("tombstones", ()))
        about = (int(body["version"]), str(body["model"]), int(body["bits"]), dict(body["corpus"]))
        found, numbers = cls(url, *about, segments, gone), [entry.number for entry in gone]
        if {(segment.job.model, segment.job.bits) for segment in segments} != {(found.model, found.bits)}:
            raise IntegrityError(f"{where} mixes models; restore the manifest from a copy")
        if numbers != sorted(set(numbers)) or not all(entry.possible(found.rows) for entry in gone):
            raise IntegrityError(f"{where} lists impossible tombstones; restore the manifest from a copy")
        if found.stored_rows < found.live_rows:
            raise IntegrityError(
                f"{where} holds {found.stored_rows} codes for {found.live_rows} rows; restore the manifest"
            )
        return found


def model_objects(index_url: str) -> Objects:
    """The model store inside an index."""
    return open_objects(f"{str(index_url).rstrip('/')}/{MODELS}")


@lru_cache(maxsize=64)
def _check_layout(url: str, prefix: str, spec: ArraySpec) -> None:
    """The metadata of an array must say what the manifest does."""
    open_layout(open_objects(url), prefix, spec)


open_version, find_index = Index.open, Index.find
IndexRef = VersionRef[Index]


def next_version(index: Index | None, segments: tuple[IndexSegment, ...], corpus: dict[str, Any], url: str) -> Index:
    """The version that follows ``index`` (or the first) and lists ``segments``."""
    job = segments[-1].job
    number, gone = (index.version + 1, index.tombstones) if index else (1, ())
    return Index(url, number, job.model, job.bits, corpus, segments, gone)
