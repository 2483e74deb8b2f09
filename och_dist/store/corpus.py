"""The corpus: vectors in immutable segments, listed by numbered versions. Row numbers never change."""

from __future__ import annotations

import hashlib
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import zarr

from och_dist import events
from och_dist.errors import BadInputError, IntegrityError
from och_dist.store.arrays import METADATA, ArraySpec, is_plain, open_array, open_layout, read_plain_chunk, read_rows
from och_dist.store.manifest import (
    StoredArray,
    Version,
    VersionRef,
    pack_numbers,
    read_document,
    read_latest,
    read_version,
    unpack_numbers,
)
from och_dist.store.objects import Objects, open_objects

DTYPES = ("<f2", "<f4", "<f8", "|u1", "|i1")
MAX_PARTITIONS = 4096
MAX_ADOPTED_CHUNKS = 1 << 26
ID_KINDS = ("int64", "string")
MAX_ID_BYTES = 256


@dataclass(frozen=True)
class IdLayout:
    """External ids of the rows of a segment: their kind, and the bytes of the longest.

    They are stored beside the vectors in the same chunks: int64 as (rows, 1), strings as NUL-padded UTF-8 (rows,
    width). A *key* is what ids are compared by: int64, or NumPy bytes, for which padding does not count.
    """

    kind: str
    width: int

    def spec(self, rows: int, chunk_rows: int) -> ArraySpec:
        if self.kind == "int64":
            return ArraySpec(rows, 1, "<i8", chunk_rows)
        return ArraySpec(rows, self.width, "|u1", chunk_rows)

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "width": self.width}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> IdLayout:
        layout = cls(str(entry["kind"]), int(entry["width"]))
        if layout.kind not in ID_KINDS or not 1 <= layout.width <= MAX_ID_BYTES:
            raise ValueError(f"ids of kind {layout.kind!r}, width {layout.width}")
        return layout

    def pack(self, keys: np.ndarray) -> np.ndarray:
        """Keys (m,) as they are stored: int64 (m, 1) or uint8 (m, width)."""
        if self.kind == "int64":
            return keys.astype("<i8").reshape(-1, 1)
        return keys.astype(f"S{self.width}").view(np.uint8).reshape(-1, self.width)


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of a corpus in one Zarr array; ``digests`` holds a checksum per chunk."""

    id: str
    start: int
    stop: int
    chunk_rows: int
    digests: np.ndarray = field(repr=False, compare=False)
    codec: str = "none"
    sources: tuple[dict[str, Any], ...] = ()
    dropped: int = 0
    prefix: str = ""
    ids: IdLayout | None = None
    id_digests: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def folder(self) -> str:
        return f"segments/{self.id}"

    @property
    def ids_spec(self) -> ArraySpec | None:
        """Layout of the ids, None without any."""
        return None if self.ids is None else self.ids.spec(self.stop - self.start, self.chunk_rows)

    def describe(self) -> dict[str, Any]:
        """What people are told of it."""
        names = ("id", "start", "stop", "chunk_rows", "codec", "dropped")
        return {**{name: getattr(self, name) for name in names}, "sources": list(self.sources)}

    def to_json(self) -> dict[str, Any]:
        body = {**self.describe(), "digests": pack_numbers(self.digests)}
        if self.ids is not None and self.id_digests is not None:
            body["ids"] = {**self.ids.to_json(), "digests": pack_numbers(self.id_digests)}
        return body

    @classmethod
    def from_json(cls, entry: dict[str, Any], where: str) -> Segment:
        try:
            start, stop, chunk_rows = int(entry["start"]), int(entry["stop"]), int(entry["chunk_rows"])
            name, sources = str(entry["id"]), tuple(entry["sources"])
            if not (name.isascii() and name.isalnum() and len(name) <= 64 and 0 <= start < stop and chunk_rows > 0):
                raise ValueError(f"segment {name!r} [{start}, {stop}) by {chunk_rows}")
            if not all(isinstance(source, dict) and {"fingerprint", "dataset"} <= set(source) for source in sources):
                raise ValueError(f"segment {name!r} does not name its sources")
            n_chunks, ids = -(-(stop - start) // chunk_rows), entry.get("ids")
            return cls(
                id=name,
                start=start,
                stop=stop,
                chunk_rows=chunk_rows,
                codec=str(entry["codec"]),
                digests=unpack_numbers(entry["digests"], n_chunks, where),
                sources=sources,
                dropped=int(entry["dropped"]),
                prefix=vectors_prefix(name),
                ids=None if ids is None else IdLayout.from_json(ids),
                id_digests=None if ids is None else unpack_numbers(ids["digests"], n_chunks, where),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{where} lists an impossible segment ({error}); restore it from a copy") from None


def vectors_prefix(segment_id: str) -> str:
    return f"segments/{segment_id}/vectors"


def ids_prefix(segment_id: str) -> str:
    return f"segments/{segment_id}/ids"


@dataclass(frozen=True)
class Corpus(Version):
    """One version of a corpus, or a single existing Zarr array used as it is (``version`` 0)."""

    kind = "corpus"

    url: str
    version: int
    dim: int
    dtype: str
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the vectors before any codec."""
        return self.rows * self.dim * np.dtype(self.dtype).itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the vectors of the largest chunk, before any codec."""
        rows = max(min(segment.chunk_rows, segment.stop - segment.start) for segment in self.segments)
        return rows * self.dim * np.dtype(self.dtype).itemsize

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of everything that decides the content: dimension, dtype, rows and chunk digests."""
        total = hashlib.sha256(f"{self.dim} {self.dtype} ".encode() + self.digest(0, self.rows).encode())
        for segment in self.segments:
            if segment.ids is not None and segment.id_digests is not None:
                total.update(f" {segment.ids.kind} {segment.ids.width} ".encode())
                total.update(segment.id_digests.astype("<u4").tobytes())
        return total.hexdigest()

    @property
    def ids(self) -> str | None:
        """``'int64'`` or ``'string'`` where the rows have ids of their own, else None."""
        layout = self.segments[0].ids if self.segments else None
        return None if layout is None else layout.kind

    def arrays(self) -> Iterator[StoredArray]:
        for segment in self.segments:
            yield segment.prefix, self._spec(segment), segment.digests
            if segment.ids_spec is not None and segment.id_digests is not None:
                yield ids_prefix(segment.id), segment.ids_spec, segment.id_digests

    def _spec(self, segment: Segment) -> ArraySpec:
        return ArraySpec(segment.stop - segment.start, self.dim, self.dtype, segment.chunk_rows)

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Global rows [start, stop) of every stored chunk, in order."""
        for segment in self.segments:
            for start in range(segment.start, segment.stop, segment.chunk_rows):
                yield start, min(start + segment.chunk_rows, segment.stop)

    def partitions(self, maximum: int = MAX_PARTITIONS) -> list[tuple[int, int]]:
        """At most ``maximum`` row ranges of whole chunks; a function of the corpus alone, never of the cluster."""
        chunks = list(self.chunks())
        group = max(1, -(-len(chunks) // maximum))
        return [(chunks[i][0], chunks[min(i + group, len(chunks)) - 1][1]) for i in range(0, len(chunks), group)]

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """(first global row, block) for rows [start, stop), one stored chunk at a time."""
        for first, block in self._blocks(start, stop, self._vectors):
            events.add(rows=len(block), read=block.nbytes)
            yield first, block

    def id_blocks(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """(first global row, ids as they are stored) for rows [start, stop), one stored chunk at a time."""
        self._require_ids()
        return self._blocks(start, stop, self._ids)

    def _blocks(
        self, start: int, stop: int, read: Callable[[Segment, int, int], np.ndarray]
    ) -> Iterator[tuple[int, np.ndarray]]:
        if not 0 <= start <= stop <= self.rows:
            raise IntegrityError(
                f"rows {start}..{stop} are asked for, but {self.url} had {self.rows} when it was opened; "
                "if it grew since, run the command again"
            )
        for segment in self._segments(start, stop):
            before = max(0, start - segment.start) // segment.chunk_rows  # chunks that are not asked for
            first = segment.start + before * segment.chunk_rows
            for chunk in range(first, min(stop, segment.stop), segment.chunk_rows):
                low, high = max(start, chunk), min(stop, chunk + segment.chunk_rows, segment.stop)
                yield low, read(segment, low - segment.start, high - segment.start)

    def _vectors(self, segment: Segment, low: int, high: int) -> np.ndarray:
        """Vectors (high - low, dim) of local rows of a segment."""
        return _read_stored(self.url, segment.prefix, self._spec(segment), low, high).astype(self.dtype, copy=False)

    def _ids(self, segment: Segment, low: int, high: int) -> np.ndarray:
        """Ids (high - low, width) of local rows of a segment, as they are stored."""
        assert segment.ids_spec is not None  # narrows the type: all segments have ids, or none
        return _read_stored(self.url, ids_prefix(segment.id), segment.ids_spec, low, high)

    def _require_ids(self) -> None:
        if self.ids is None:
            raise BadInputError(
                f"{self.url} has no ids; use row numbers, or make the corpus anew with 'och ingest --ids'"
            )

    def read_at(self, rows: np.ndarray) -> np.ndarray:
        """Vectors (m, dim) of any global ``rows`` (m,), repeats allowed; each chunk that is needed is read once."""
        out = np.empty((len(rows), self.dim), self.dtype)
        for places, block in self._gather(rows, self._vectors):
            out[places] = block
        return out

    def vectors_at(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(places in ``rows`` (m,), their vectors), one stored chunk at a time, in ascending order of rows."""
        return self._gather(rows, self._vectors)

    @property
    def id_width(self) -> int:
        """Bytes of the longest id; 8 where they are numbers, 0 where there are none."""
        return max((segment.ids.width for segment in self.segments if segment.ids is not None), default=0)

    def read_ids(self, rows: np.ndarray) -> np.ndarray:
        """Ids (m,), int64 or str, of any global ``rows`` (m,), repeats allowed; each chunk needed is read once."""
        self._require_ids()
        parts = [(places, ids_text(block)) for places, block in self._gather(rows, self._ids)]
        kinds = [ids.dtype for _, ids in parts] or [np.dtype("<i8" if self.ids == "int64" else "<U1")]
        out = np.empty(len(rows), np.result_type(*kinds))
        for places, ids in parts:
            out[places] = ids
        return out

    def _gather(
        self, rows: np.ndarray, read: Callable[[Segment, int, int], np.ndarray]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(places in ``rows``, what is stored for them), chunk by chunk."""
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.rows:
            wrong = rows[(rows < 0) | (rows >= self.rows)][0]
            raise BadInputError(f"row {wrong} is asked for, but {self.url} has rows 0 to {self.rows - 1}")
        order = np.argsort(rows, kind="stable")
        ascending, done = rows[order], 0
        while done < len(rows):
            segment = self.segments[bisect_right(self._stops, int(ascending[done]))]
            low = (int(ascending[done]) - segment.start) // segment.chunk_rows * segment.chunk_rows
            high = min(low + segment.chunk_rows, segment.stop - segment.start)
            end = int(np.searchsorted(ascending, segment.start + high))
            yield order[done:end], read(segment, low, high)[ascending[done:end] - segment.start - low]
            done = end

    def _segments(self, start: int, stop: int) -> Sequence[Segment]:
        """The segments that hold rows [start, stop); a corpus that grows every night has thousands of them."""
        first, last = bisect_right(self._stops, start), bisect_left(self._stops, stop)
        return self.segments[first : last + 1] if start < stop else ()

    @cached_property
    def _stops(self) -> list[int]:
        return [segment.stop for segment in self.segments]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as one array (rows, dim)."""
        blocks = [block for _, block in self.blocks(start, stop)]
        return np.concatenate(blocks) if blocks else np.empty((0, self.dim), self.dtype)

    def digest(self, start: int, stop: int) -> str:
        """sha256 over the checksums of the chunks that hold rows [start, stop), with their row ranges."""
        total = hashlib.sha256()
        for segment in self._segments(start, stop):
            low, high = max(start, segment.start), min(stop, segment.stop)
            first = (low - segment.start) // segment.chunk_rows
            last = -(-(high - segment.start) // segment.chunk_rows)
            total.update(f"{low} {high} {segment.start} {segment.chunk_rows} ".encode())
            total.update(segment.digests[first:last].astype("<u4").tobytes())
        return total.hexdigest()

    def to_json(self) -> dict[str, Any]:
        ids = 1 if self.ids is None else 2  # 2: with ids, which a writer of 1 would drop
        return {**super().to_json(), "format": ids, "dim": self.dim, "dtype": self.dtype}

    @classmethod
    def open(cls, url: str, version: int | None = None) -> Corpus:
        """A published version, the newest unless one is named, or else a 2-D Zarr array that is there."""
        objects = open_objects(url)
        body = read_latest(objects) if version is None else read_version(objects, version) if version else None
        if body is not None:
            return cls.from_json(objects.url, body)
        if _metadata(objects) is not None:
            return _adopt(objects)
        raise BadInputError(
            f"{objects.url} holds no corpus; make one with 'och ingest FILES {objects.url}' "
            f"or 'och generate {objects.url}', or name an existing 2-D Zarr array"
        )

    @classmethod
    def layout(cls, url: str, version: int) -> bytes | None:
        return None if version else _metadata(open_objects(url))

    @classmethod
    def _parse(cls, url: str, body: dict[str, Any], where: str) -> Corpus:
        segments = tuple(Segment.from_json(entry, where) for entry in body["segments"])
        found = cls(url, int(body["version"]), int(body["dim"]), str(body["dtype"]), segments)
        if found.dtype not in DTYPES or found.dim < 1 or len(found.folders) < len(segments):
            raise IntegrityError(f"{where} does not add up: dim {found.dim}, dtype {found.dtype}, {found.folders}")
        if len({segment.ids and segment.ids.kind for segment in segments}) > 1:
            raise IntegrityError(f"{where} mixes kinds of ids; restore the manifest from a copy")
        return found


@lru_cache(maxsize=64)
def _opened(url: str, prefix: str, spec: ArraySpec) -> tuple[zarr.Array, bool]:
    """An array of a segment, checked against the manifest (that of an adopted corpus against what was opened), and
    whether its chunks can be read without Zarr."""
    if prefix:
        array = open_layout(open_objects(url), prefix, spec)
        return array, is_plain(array)
    array = open_array(open_objects(url), prefix)
    if (array.shape, _little(array)) != ((spec.rows, spec.width), spec.dtype):
        raise IntegrityError(f"{url} is now {array.dtype} {array.shape}: it changed since it was opened; run again")
    return array, False


def _read_stored(url: str, prefix: str, spec: ArraySpec, low: int, high: int) -> np.ndarray:
    """Rows [low, high) of an array, which lie in one chunk."""
    array, plain = _opened(url, prefix, spec)
    if not plain:
        return read_rows(array, low, high)
    chunk, first = divmod(low, spec.chunk_rows)
    return read_plain_chunk(open_objects(url), prefix, spec, chunk)[first : first + high - low]


def _little(array: zarr.Array) -> str:
    """The dtype of an array as our manifests name it."""
    return np.dtype(array.dtype).newbyteorder("<").str


def open_corpus(url: str, version: int | None = None) -> Corpus:
    """Open a corpus (its newest version unless one is named) or a 2-D Zarr array at ``url``."""
    return Corpus.open(url, version)


find_corpus = Corpus.find
CorpusRef = VersionRef[Corpus]


def _metadata(objects: Objects) -> bytes | None:
    return next((data for name in ("zarr.json", ".zarray") if (data := read_document(objects, name)) is not None), None)


def _adopt(objects: Objects) -> Corpus:
    """A single Zarr array as a corpus. Its chunks have no crc of ours: size and tag of each object stand in."""
    array = open_array(objects, "")
    dtype = _little(array)
    if array.ndim != 2 or dtype not in DTYPES:
        raise BadInputError(
            f"{objects.url} is a Zarr array of shape {array.shape} and dtype {array.dtype}; "
            "a corpus is 2-D, of float16, float32, float64, uint8 or int8"
        )
    rows, dim = array.shape
    if not rows or not dim:
        raise BadInputError(f"{objects.url} is a Zarr array of shape {array.shape}: a corpus needs at least one row")
    chunk_rows = min((getattr(array, "shards", None) or array.chunks)[0], rows)
    n_chunks = -(-rows // chunk_rows)
    if n_chunks > MAX_ADOPTED_CHUNKS:  # before anything of that length is allocated
        raise BadInputError(
            f"{objects.url} is a Zarr array that states {n_chunks} chunks of rows, of which {MAX_ADOPTED_CHUNKS} are "
            "read at most; store it again in larger chunks"
        )
    segment = Segment("array", 0, rows, chunk_rows, _tag_digests(objects, n_chunks))
    return Corpus(objects.url, 0, dim, dtype, (segment,))


def _tag_digests(objects: Objects, n_chunks: int) -> np.ndarray:
    digests = np.zeros(n_chunks, dtype="<u4")
    for key, size, tag in objects.list(""):
        if key.endswith(METADATA):
            digests ^= np.uint32(zlib.crc32(objects.get(key)))
            continue
        index = next((int(part) for part in key.replace(".", "/").split("/") if part.isascii() and part.isdigit()), -1)
        if 0 <= index < n_chunks:
            digests[index] ^= np.uint32(zlib.crc32(f"{key} {size} {tag}".encode()))
    return digests


def id_keys(block: np.ndarray) -> np.ndarray:
    """Keys (m,) of stored ids (m, width): int64, or bytes."""
    if block.dtype != np.uint8:
        return block[:, 0]
    return np.ascontiguousarray(block).view(f"S{block.shape[1]}")[:, 0]


def ids_text(block: np.ndarray) -> np.ndarray:
    """Ids (m,) of stored ids (m, width) as a user sees them: int64, or str."""
    keys = id_keys(block)
    if keys.dtype.kind != "S":
        return keys
    try:
        return np.strings.decode(keys, "utf-8")
    except UnicodeDecodeError as error:
        raise IntegrityError(f"stored ids are no UTF-8 ({error}); run 'och verify' on the corpus") from None


def id_hashes(block: np.ndarray) -> np.ndarray:
    """(m,) uint64 of stored ids (m, width): equal ids have equal hashes, whatever the width they are stored in."""
    if block.dtype != np.uint8:
        return _mixed(block[:, 0].astype(np.int64).view(np.uint64))
    words = np.zeros((len(block), -(-block.shape[1] // 8)), "<u8")
    words.view(np.uint8)[:, : block.shape[1]] = block
    total = np.zeros(len(block), np.uint64)
    for column in words.T:
        # A word of zeros only lies behind the end of an id: another width must not change the hash.
        total = np.where(column == 0, total, _mixed(total ^ column))
    return total


def _mixed(values: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words that spreads every bit (the finaliser of splitmix64)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
