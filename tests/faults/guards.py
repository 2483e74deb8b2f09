"""The guards that keep data safe, switched off one at a time: the matrix must notice each of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.codecs import Crc32cCodec

from och_dist import store
from och_dist.encode import stage as publish
from och_dist.store import arrays, corpus, index
from och_dist.store.objects import BucketObjects, LocalObjects, Objects

# All modules that look at checksums, so that none of them is imported later, with its guard up.
from och_dist.upkeep import verification as verify  # noqa: F401


class Anything:
    """Equal to whatever it is compared with."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class NoChecksum:
    @staticmethod
    def value(data: bytes) -> Anything:
        return Anything()

    @staticmethod
    def extend(crc: Any, data: bytes) -> Anything:
        return Anything()


def _crc32c(patch: pytest.MonkeyPatch) -> None:
    """Nobody computes a checksum any more, neither our modules nor Zarr's codec."""
    for name, module in list(sys.modules.items()):
        if name.startswith("och_dist.") and hasattr(module, "google_crc32c"):
            patch.setattr(module, "google_crc32c", NoChecksum)
    patch.setattr(store, "plain_crc", lambda block, spec: Anything())
    patch.setattr(Crc32cCodec, "_decode_sync", _without_looking)


def _without_looking(self: Crc32cCodec, chunk_bytes: Any, chunk_spec: Any) -> Any:
    return chunk_spec.prototype.buffer.from_array_like(chunk_bytes.as_numpy_array()[:-4])


def _write_once(patch: pytest.MonkeyPatch) -> None:
    def overwrite(self: Objects, key: str, data: bytes, *, begun: bool = True) -> bool:
        self.delete(key)
        self._create(key, data)
        return True

    for kind in (LocalObjects, BucketObjects):
        patch.setattr(kind, "put", overwrite)


def _strict_reads(patch: pytest.MonkeyPatch) -> None:
    """A missing chunk is read as the fill value, through Zarr and beside it."""
    plain, plain_chunk = arrays.ObjectZarrStore.__init__, arrays.read_plain_chunk

    def lenient(self: Any, objects: Objects, prefix: str = "", *, strict: bool = True) -> None:
        plain(self, objects, prefix, strict=False)

    def chunk_or_zeros(
        objects: Objects, prefix: str, spec: arrays.ArraySpec, chunk: int, *, stated: int | None = None
    ) -> np.ndarray:
        if objects.size(arrays.chunk_key(prefix, chunk)) is None:
            low, high = spec.bounds(chunk)
            return np.zeros((high - low, spec.width), spec.dtype)
        return plain_chunk(objects, prefix, spec, chunk, stated=stated)

    patch.setattr(arrays.ObjectZarrStore, "__init__", lenient)
    for module in (index, corpus):
        patch.setattr(module, "read_plain_chunk", chunk_or_zeros)


class Unwritten(dict[str, arrays.Written]):
    """What was written, and something for the chunks that Zarr left out."""

    def __missing__(self, key: str) -> arrays.Written:
        return arrays.Written(0, 0)


def _stored_empty_chunks(patch: pytest.MonkeyPatch) -> None:
    """Zarr leaves out, and would delete, a chunk that is all zero, and nobody minds."""
    plain, plain_init = zarr.Array.with_config, arrays.ObjectZarrStore.__init__

    def forgetful(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        self.written = Unwritten()

    async def ignore(self: Any, key: str) -> None:
        return None

    patch.setattr(zarr.Array, "with_config", lambda self, config: plain(self, {**config, "write_empty_chunks": False}))
    patch.setattr(arrays.ObjectZarrStore, "__init__", forgetful)
    patch.setattr(arrays.ObjectZarrStore, "delete", ignore)
    patch.setattr(arrays, "is_plain", lambda array: False)  # chunks without compression go past Zarr


def _publish_check(patch: pytest.MonkeyPatch) -> None:
    def believe(objects: Objects, job: Any, chunk: index.CodeChunk) -> index.ChunkRecord:
        return publish.read_record(objects, job, chunk)

    patch.setattr(publish, "check_chunk", believe)


@dataclass(frozen=True)
class Guard:
    """How to switch a guard off, the group whose faults it guards against, and words of some of these: those that are
    not survived without it, and others that are."""

    switch_off: Callable[[pytest.MonkeyPatch], None]
    group: str
    not_survived: tuple[str, ...]
    survived: str


GUARDS = {
    "crc32c": Guard(_crc32c, "store_damage", ("corpus chunk, flip", "code chunk, flip"), "code chunk, cut"),
    "write-once": Guard(_write_once, "concurrency", ("a publisher is overtaken",), "a reader during 12 publishes"),
    "strict-reads": Guard(
        _strict_reads, "store_damage", ("corpus chunk, delete", "code chunk, delete"), "code chunk, cut"
    ),
    "stored-empty-chunks": Guard(
        _stored_empty_chunks, "store_damage", ("chunk of zeros, delete",), "code chunk, delete"
    ),
    "publish-check": Guard(
        _publish_check,
        "store_damage",
        ("codes/c/1/0 of a job, flip", "codes/c/1/0 of a job, delete"),
        "code chunk, flip",
    ),
}


@contextmanager
def broken(guard: str) -> Iterator[Guard]:
    """Work without a guard."""
    with pytest.MonkeyPatch.context() as patch:
        GUARDS[guard].switch_off(patch)
        yield GUARDS[guard]
