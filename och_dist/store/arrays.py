"""Plain Zarr v3 arrays of whole rows, one object per chunk, on :class:`Objects`.

Chunks are written once (put-if-absent), carry a crc32c as their last four bytes, are stored even when they are all
zero, and raise when they are missing: nothing ever reads as a fill value.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import google_crc32c
import numpy as np
import zarr
from google_crc32c import extend as extend_checksum
from google_crc32c import value as checksum
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, ZstdCodec
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.errors import ContainsArrayError

from och_dist import events
from och_dist.errors import BadInputError, IntegrityError, OchError, UsageError
from och_dist.store.objects import LocalObjects, Objects, storage_errors

Codec = Literal["none", "lz4", "zstd"]
CODECS: dict[Codec, tuple[Any, ...]] = {
    "none": (),
    "lz4": (BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle"),),
    "zstd": (ZstdCodec(level=1),),
}
# What a foreign array may be stored with: numbers in, numbers out, and nothing that could run what it decodes.
SAFE_CODECS = {
    *("adler32", "astype", "bitround", "blosc", "bytes", "bz2", "crc32", "crc32c", "delta", "fixedscaleoffset"),
    *("fletcher32", "gzip", "jenkins_lookup3", "lz4", "lzma", "packbits", "quantize", "sharding_indexed"),
    *("shuffle", "transpose", "zlib", "zstd"),
}
READ_BYTES = 512 << 10
MISSING = "is missing"
METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")


@dataclass(frozen=True)
class ArraySpec:
    """Shape and storage of one array: (rows, width), chunks of ``chunk_rows`` whole rows."""

    rows: int
    width: int
    dtype: str
    chunk_rows: int
    codec: Codec = "none"

    @property
    def n_chunks(self) -> int:
        return -(-self.rows // self.chunk_rows)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """Local rows [start, stop) of a chunk."""
        start = chunk * self.chunk_rows
        return start, min(start + self.chunk_rows, self.rows)

    @property
    def row_bytes(self) -> int:
        return self.width * np.dtype(self.dtype).itemsize

    @property
    def stored_bytes(self) -> int:
        """Size of every chunk as it is stored without compression: whole, also the last one, and its crc32c."""
        return self.chunk_rows * self.row_bytes + 4


@dataclass(frozen=True)
class Written:
    """What a stored chunk is known by: its size and the crc32c at its end."""

    nbytes: int
    crc: int


def chunk_key(prefix: str, chunk: int) -> str:
    return f"{prefix}/c/{chunk}/0"


def _missing(objects: Objects, key: str) -> IntegrityError:
    return IntegrityError(
        f"chunk {objects.url}/{key} is missing; a missing chunk is never read as zeros: run 'och verify {objects.url}'"
    )


def trailing_crc(data: bytes) -> int:
    return int.from_bytes(data[-4:], "little")


class ObjectZarrStore(Store):
    """Zarr's view of a folder of :class:`Objects`: writes are put-if-absent, a missing chunk raises when ``strict``."""

    supports_writes = True
    supports_deletes = False
    supports_listing = False

    def __init__(self, objects: Objects, prefix: str = "", *, strict: bool = True) -> None:
        super().__init__(read_only=False)
        self.objects = objects
        self.prefix = f"{prefix}/" if prefix else ""
        self.strict = strict
        self.written: dict[str, Written] = {}

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def with_read_only(self, read_only: bool = False) -> ObjectZarrStore:
        return self

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        data = await asyncio.to_thread(self._read, self.prefix + key, byte_range)
        if data is None:
            if self.strict and not key.endswith(METADATA):
                raise _missing(self.objects, self.prefix + key)
            return None
        return prototype.buffer.from_bytes(data)

    def _read(self, key: str, byte_range: ByteRequest | None) -> bytes | None:
        match byte_range:
            case RangeByteRequest(start, end):
                return self.objects.read(key, start, end)
            case OffsetByteRequest(offset):
                return self.objects.read(key, offset)
            case SuffixByteRequest(suffix):
                return self.objects.read(key, -suffix)
        return self.objects.read(key)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        return await asyncio.to_thread(self.objects.size, self.prefix + key) is not None

    async def set(self, key: str, value: Buffer) -> None:
        data = value.to_bytes()
        await asyncio.to_thread(self.objects.put, self.prefix + key, data)
        self.written[key] = Written(len(data), trailing_crc(data))

    async def delete(self, key: str) -> None:
        raise UsageError(f"{key} cannot be deleted through Zarr; segments are immutable, use 'och gc'")

    def list_prefix(self, prefix: str = "") -> AsyncIterator[str]:
        raise UsageError("our arrays are opened by their names and never listed through Zarr")

    list = list_dir = list_prefix


def create_array(objects: Objects, prefix: str, spec: ArraySpec) -> None:
    """Write the metadata of an array, or check that what is there says the same."""
    if objects.size(f"{prefix}/zarr.json") is None:
        with contextlib.suppress(ContainsArrayError):  # another writer came first: its layout is checked below
            zarr.create_array(
                ObjectZarrStore(objects, prefix, strict=False),
                shape=(spec.rows, spec.width),
                chunks=(spec.chunk_rows, spec.width),
                dtype=np.dtype(spec.dtype),
                serializer=BytesCodec(endian="little" if np.dtype(spec.dtype).itemsize > 1 else None),
                compressors=[*CODECS[spec.codec], Crc32cCodec()],
                fill_value=0,
            )
    open_layout(objects, prefix, spec)


def open_layout(objects: Objects, prefix: str, spec: ArraySpec) -> zarr.Array:
    """Open one of our own arrays; :class:`IntegrityError` when its metadata says anything but ``spec``."""
    array = open_array(objects, prefix)
    others = (array.metadata.encode_chunk_key((0, 0)), float(array.fill_value), dict(array.attrs))
    found = (array.shape, array.chunks, np.dtype(array.dtype), list(_codec_names(array))[-1:], *others)
    shapes = ((spec.rows, spec.width), (spec.chunk_rows, spec.width))
    expected: tuple[Any, ...] = (*shapes, np.dtype(spec.dtype), ["crc32c"], "c/0/0", 0.0, {})
    if found != expected:
        raise IntegrityError(
            f"{objects.url}/{prefix} is an array of {found}, expected {expected}; "
            "restore its zarr.json, or remove its job with 'och gc'"
        )
    return array


def open_array(objects: Objects, prefix: str, *, strict: bool = True) -> zarr.Array:
    """Open an existing array; :class:`IntegrityError` when its metadata is missing or unreadable."""
    where = f"{objects.url}/{prefix}" if prefix else objects.url
    with _damage(f"{where} is not a readable Zarr array"):
        array = zarr.open_array(ObjectZarrStore(objects, prefix, strict=strict), mode="r+")
        unsafe = {name.removeprefix("numcodecs.") for name in _codec_names(array)} - SAFE_CODECS
    if unsafe:
        raise BadInputError(
            f"{where} is stored with {', '.join(sorted(unsafe))}; only {', '.join(sorted(SAFE_CODECS))} are read: "
            "store it again with one of them"
        )
    return array


def _codec_names(array: zarr.Array) -> Iterator[str]:
    """Names of the codecs of an array in order, those inside a shard after the sharding itself."""
    metadata: Any = array.metadata
    if array.metadata.zarr_format == 2:
        yield from (codec.codec_id for codec in (*(metadata.filters or ()), metadata.compressor) if codec is not None)
        return
    waiting = list(metadata.codecs)
    while waiting:
        codec = waiting.pop(0)
        yield str(codec.to_dict()["name"])
        waiting += (*getattr(codec, "codecs", ()), *getattr(codec, "index_codecs", ()))


@contextlib.contextmanager
def _damage(what: str) -> Iterator[None]:
    """Whatever a parser or a codec says of stored bytes becomes :class:`IntegrityError`; accidents stay as they are."""
    try:
        yield
    except (OchError, MemoryError):
        raise
    except Exception as error:  # every codec has exceptions of its own
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise
        text = str(error) or type(error).__name__
        raise IntegrityError(f"{what} ({text}); run 'och verify', restore it from a copy or make it again") from error


def write_chunk(objects: Objects, prefix: str, chunk: int, block: np.ndarray) -> Written:
    """Write one whole chunk of an existing array; ``block`` is (rows of the chunk, width)."""
    array = open_array(objects, prefix, strict=False).with_config({"write_empty_chunks": True})
    start = chunk * array.chunks[0]
    stop = min(start + array.chunks[0], array.shape[0])
    if chunk < 0 or block.shape != (stop - start, array.shape[1]) or block.dtype != array.dtype:
        raise IntegrityError(
            f"chunk {chunk} of {prefix} takes {(stop - start, array.shape[1])} {array.dtype}, "
            f"got {block.shape} {block.dtype}"
        )
    if is_plain(array):
        # What Zarr would store, not copied thrice.
        values, padding, crc = _plain_parts(block, array.chunks[0])
        parts = cast(bytes, values.data), padding, crc.to_bytes(4, "little")
        objects.put(chunk_key(prefix, chunk), parts)
        written = Written(sum(map(len, parts)), crc)
    else:
        array[start:stop] = block
        store = array.store
        assert isinstance(store, ObjectZarrStore)  # narrows the type: open_array made it
        written = store.written[f"c/{chunk}/0"]
    events.add(written=written.nbytes)
    return written


def _plain_parts(block: np.ndarray, chunk_rows: int) -> tuple[np.ndarray, bytes, int]:
    """(bytes of the rows (n,), padding with zeros, crc32c of both) of a chunk without compression."""
    values = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
    padding = bytes(values.size // max(1, len(block)) * (chunk_rows - len(block)))
    return values, padding, int(extend_checksum(checksum(values), padding))


def plain_crc(block: np.ndarray, spec: ArraySpec) -> int:
    """The crc32c that a chunk of these rows is stored with."""
    return _plain_parts(block, spec.chunk_rows)[2]


def read_rows(array: zarr.Array, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of an array, all of them; a damaged chunk becomes :class:`IntegrityError`."""
    store = array.store
    where = f"{store.objects.url}/{store.prefix}" if isinstance(store, ObjectZarrStore) else str(store)
    if not 0 <= start <= stop <= array.shape[0]:  # Zarr would return fewer rows
        raise IntegrityError(f"rows {start}..{stop} of {where} are asked for, but it has {array.shape[0]} rows")
    with _damage(f"rows {start}..{stop} of {where} are damaged"):
        return np.asarray(array[start:stop])


def is_plain(array: zarr.Array) -> bool:
    """Whether chunks are the bytes of the rows and their crc32c, so that :func:`read_plain_chunk` may read them."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    expected = ([little, {"name": "crc32c"}], [{"name": "bytes"}, {"name": "crc32c"}])
    if array.metadata.zarr_format == 2:
        return False
    return [codec.to_dict() for codec in array.metadata.codecs] == expected[np.dtype(array.dtype).itemsize == 1]


@dataclass(frozen=True)
class FoundChunk:
    """The bytes (n,) uint8 of a chunk as they are stored, the crc32c at their end, and what is wrong with them in
    words that go on from 'chunk 3 of ...'; None if nothing is."""

    data: np.ndarray
    crc: int
    fault: str | None

    def rows(self, spec: ArraySpec, chunk: int) -> np.ndarray:
        """The rows (m, width) of a chunk without compression."""
        low, high = spec.bounds(chunk)
        return self.data[: (high - low) * spec.row_bytes].view(spec.dtype).reshape(-1, spec.width)


def find_chunk(
    objects: Objects,
    prefix: str,
    chunk: int,
    *,
    stated: int | None = None,
    nbytes: int | None = None,
    known: str = "that was published",
) -> FoundChunk:
    """Read a whole chunk and compare it with the crc32c at its end, and with what is known of it: its size ``nbytes``,
    and the crc32c ``stated`` by what ``known`` names."""
    size, data, crc = _load(objects, chunk_key(prefix, chunk), nbytes)
    if size is None:
        return FoundChunk(data, 0, MISSING)
    trailing = trailing_crc(data[-4:].tobytes())
    if len(data) < 4 or nbytes not in (None, size) or crc != trailing:
        return FoundChunk(data, trailing, f"is damaged ({size} bytes)")
    return FoundChunk(data, trailing, None if stated in (None, trailing) else f"is not the one {known}")


def read_plain_chunk(
    objects: Objects, prefix: str, spec: ArraySpec, chunk: int, *, stated: int | None = None
) -> np.ndarray:
    """A chunk (rows, width) of one of our own arrays without compression, checked by its crc32c and that ``stated``.

    The same as :func:`read_rows`, without Zarr's machinery, which takes 3 ms a chunk and copies it once more.
    """
    found = find_chunk(objects, prefix, chunk, stated=stated, nbytes=spec.stored_bytes)
    if found.fault == MISSING:
        raise _missing(objects, chunk_key(prefix, chunk))
    if found.fault is not None:
        low, high = spec.bounds(chunk)
        raise IntegrityError(
            f"rows {low}..{high} of {objects.url}/{prefix} are damaged; run 'och verify', restore them from a copy or "
            "make them again"
        )
    return found.rows(spec, chunk)


def _load(objects: Objects, key: str, expected: int | None) -> tuple[int | None, np.ndarray, int]:
    """(size, bytes (n,), crc32c of all but the last four of them) of an object; its size is None if it is absent.

    One of another size than ``expected`` is not read. The crc is taken of each piece while it is in the processor's
    cache.
    """
    nothing = np.empty(0, np.uint8)
    if not isinstance(objects, LocalObjects):
        found = objects.read(key)
        if found is None:
            return None, nothing, 0
        return len(found), np.frombuffer(found, np.uint8).copy(), google_crc32c.value(found[:-4])
    with storage_errors(f"{objects.url}/{key}"):
        try:
            with objects.path(key).open("rb", buffering=0) as file:
                size, done, crc = os.fstat(file.fileno()).st_size, 0, 0
                data = np.empty(size if expected in (None, size) else 0, np.uint8)
                while done < len(data):
                    count = file.readinto(data.data[done : done + READ_BYTES])
                    if not count:  # it was cut meanwhile
                        return done, nothing, 0
                    crc = google_crc32c.extend(crc, data[done : max(done, min(done + count, size - 4))])
                    done += count
                return size, data, crc
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None, nothing, 0


def stored_chunks(objects: Objects, prefix: str) -> dict[int, int]:
    """Chunk number -> size of every chunk object that is there."""
    found: dict[int, int] = {}
    for key, size, _ in objects.list(f"{prefix}/c"):
        name = key.removeprefix(f"{prefix}/c/").partition("/")[0]
        if name.isascii() and name.isdigit():
            found[int(name)] = size
    return found
