"""The guards that keep data safe, switched off one at a time: the matrix must notice each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from och_dist.stages import publish, verify
from och_dist.store import arrays, corpus
from och_dist.store.objects import LocalObjects, Objects, Put


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


def _crc32c(patch: pytest.MonkeyPatch) -> None:
    for module in (arrays, publish, verify):
        if hasattr(module, "google_crc32c"):
            patch.setattr(module, "google_crc32c", NoChecksum)


def _write_once(patch: pytest.MonkeyPatch) -> None:
    def overwrite(self: Objects, key: str, data: bytes) -> Put:
        self.delete(key)
        self._create(key, data)
        return Put.WON

    patch.setattr(LocalObjects, "put", overwrite)


def _strict_reads(patch: pytest.MonkeyPatch) -> None:
    plain = arrays.ObjectZarrStore.__init__

    def lenient(self: Any, objects: Objects, prefix: str = "", *, strict: bool = True) -> None:
        plain(self, objects, prefix, strict=False)

    patch.setattr(arrays.ObjectZarrStore, "__init__", lenient)
    _through_zarr(patch)


def _through_zarr(patch: pytest.MonkeyPatch) -> None:
    """Vectors without compression go past Zarr, on a way of their own that has no such guard to switch off."""
    patch.setattr(arrays, "is_plain", lambda array: False)
    patch.setattr(corpus, "_plain", lambda *layout: False)


def _stored_empty_chunks(patch: pytest.MonkeyPatch) -> None:
    import zarr

    plain = zarr.Array.with_config
    patch.setattr(zarr.Array, "with_config", lambda self, config: plain(self, {**config, "write_empty_chunks": False}))
    _through_zarr(patch)


def _publish_check(patch: pytest.MonkeyPatch) -> None:
    def believe(objects: Objects, job: Any, chunk: int) -> tuple[int, np.ndarray]:
        record = publish.read_record(objects, job, chunk)
        return record["crc"], record["ones"]

    patch.setattr(publish, "check_chunk", believe)


GUARDS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "crc32c": (_crc32c, "store_damage"),
    "write-once": (_write_once, "concurrency"),
    "strict-reads": (_strict_reads, "store_damage"),
    "stored-empty-chunks": (_stored_empty_chunks, "store_damage"),
    "publish-check": (_publish_check, "store_damage"),
}


@contextmanager
def broken(guard: str) -> Iterator[str]:
    """Work without a guard; yields the group whose faults it guards against."""
    switch_off, group = GUARDS[guard]
    with pytest.MonkeyPatch.context() as patch:
        switch_off(patch)
        yield group
