"""Rows deleted for good: one bitmap for every range of 2^20 rows that has lost any, written once.

Bitmaps go by row number, not by segment: segments change when an index is compacted or encoded with another model, row
numbers never do. A manifest lists the bitmaps that are in force, so a version keeps seeing what it was published with.

The name of a bitmap holds the version that it was made for. That version lists it or no version ever does, for later
ones only carry on what it lists. So once it exists, whoever published it, an unlisted bitmap of that name is litter;
before that, a delete may be about to list it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from och_dist.errors import IntegrityError
from och_dist.store.manifest import sha256
from och_dist.store.objects import Objects, open_objects

FOLDER = "tombstones"
RANGE_ROWS = 1 << 20
BITMAP_BYTES = RANGE_ROWS // 8
CACHED_BITMAPS = 64
NAME = re.compile(rf"{FOLDER}/\d{{8}}\.(?:(\d{{8,}})\.)?[0-9a-f]{{16}}")


@dataclass(frozen=True)
class Tombstones:
    """The deleted rows of range ``number``, that is of rows [number * 2^20, (number + 1) * 2^20): how many, the sha256
    of their bitmap, and the version ``since`` which these are deleted."""

    number: int
    digest: str
    deleted: int
    since: int = 0

    @property
    def key(self) -> str:
        version = f"{self.since:08d}." if self.since else ""  # the first bitmaps had none in their names
        return f"{FOLDER}/{self.number:08d}.{version}{self.digest[:16]}"

    @property
    def start(self) -> int:
        return self.number * RANGE_ROWS

    @property
    def stop(self) -> int:
        return self.start + RANGE_ROWS

    def to_json(self) -> dict[str, Any]:
        return {"range": self.number, "digest": self.digest, "deleted": self.deleted, "since": self.since}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Tombstones:
        return cls(int(entry["range"]), str(entry["digest"]), int(entry["deleted"]), int(entry.get("since", 0)))


def row_ranges(rows: int) -> Iterator[tuple[int, int, int]]:
    """(number, start, stop) of the ranges that hold the first ``rows`` rows, the last one as long as all others."""
    for number in range(-(-rows // RANGE_ROWS)):
        yield number, number * RANGE_ROWS, (number + 1) * RANGE_ROWS


def check_tombstones(listed: Sequence[Tombstones], rows: int, where: str) -> None:
    """:class:`IntegrityError` unless the ranges ascend, lie inside ``rows`` and hold as many rows as they can."""
    numbers = [entry.number for entry in listed]
    if numbers != sorted(set(numbers)) or not all(
        re.fullmatch("[0-9a-f]{64}", entry.digest)
        and 0 < entry.deleted <= min(RANGE_ROWS, rows - entry.start)
        and min(entry.number, entry.since) >= 0
        for entry in listed
    ):
        raise IntegrityError(f"{where} lists impossible tombstones; restore the manifest from a copy")


def read_bitmap(objects: Objects, entry: Tombstones) -> np.ndarray:
    """Packed bits (2^17,) uint8 of one range, little bit order, after comparing them with their digest."""
    data = objects.read(entry.key)
    where = f"{objects.url}/{entry.key}"
    if data is None:
        raise IntegrityError(f"{where}, a bitmap of deleted rows, is missing; restore it from a copy")
    if len(data) != BITMAP_BYTES or sha256(data) != entry.digest:
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


def deleted_rows(url: str, listed: Mapping[int, Tombstones], start: int, stop: int) -> np.ndarray | None:
    """bool (stop - start,): which of the global rows [start, stop) are deleted; None if none of them is.

    ``listed`` are the tombstones of a version by the number of their range.
    """
    found = None
    for number in range(start // RANGE_ROWS, -(-stop // RANGE_ROWS)):
        if (entry := listed.get(number)) is None:
            continue
        low, high = max(start, entry.start), min(stop, entry.stop)
        mask = _unpacked(remembered_bitmap(url, entry), low - entry.start, high - entry.start)
        if mask.any():
            found = np.zeros(stop - start, bool) if found is None else found
            found[low - start : high - start] = mask
    return found


def _unpacked(bits: np.ndarray, low: int, high: int) -> np.ndarray:
    """Bits [low, high) as bool."""
    whole = np.unpackbits(bits[low // 8 : -(-high // 8)], bitorder="little")
    return whole[low % 8 : low % 8 + high - low].view(bool)


def put_bitmap(objects: Objects, number: int, mask: np.ndarray, *, since: int) -> Tombstones:
    """Store which rows of a range, bool (2^20,), are deleted from version ``since`` on; again makes the same object."""
    data = np.packbits(mask, bitorder="little").tobytes()
    entry = Tombstones(number, sha256(data), int(np.count_nonzero(mask)), since)
    objects.put(entry.key, data)
    return entry


def stored_bitmaps(objects: Objects) -> dict[str, int]:
    """Key -> version that it was made for, of all bitmaps that are there."""
    names = (NAME.fullmatch(key) for key, _, _ in objects.list(FOLDER))
    return {name[0]: int(name[1] or 0) for name in names if name}
