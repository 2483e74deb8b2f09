"""Ids of a new segment: how wide they are stored, and that each of a corpus is there once.

Uniqueness is checked on the workers before a version is published, in bounded memory: a task holds the hashes of one
hash range of the new ids, and compares true ids where two hashes agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from och_dist.cluster import check_memory, map_tasks
from och_dist.errors import BadInputError
from och_dist.ingest.chunks import NewSegment, Part, in_parts
from och_dist.sources import JoinedFiles
from och_dist.stage import Context
from och_dist.store import Corpus, CorpusRef, IdLayout, id_hashes, id_keys

HASHES_PER_TASK = 1 << 24

Duplicate = tuple[Any, int, int]


def measure_ids(part: Part) -> int:
    """Bytes of the longest id among rows [start, stop)."""
    source, start, stop = part
    assert isinstance(source, JoinedFiles)  # narrows the type: generated rows have no ids
    return int(np.strings.str_len(source.read_ids(start, stop)).max())


def id_layout(source: JoinedFiles, context: Context) -> IdLayout:
    """How ids are stored: strings as wide as the longest, which takes a pass over the files."""
    if source.ids == "int64":
        return IdLayout("int64", 8)
    return IdLayout("string", max(map_tasks(measure_ids, in_parts(source), client=context.client, name="measure_ids")))


@dataclass(frozen=True)
class CheckIds:
    """Look for an id that is there twice among those of hash range ``number`` of 2^``bits`` ranges: the new ones, and
    those of rows [start, stop) of a ``parent``."""

    new: NewSegment
    bits: int
    number: int
    parent: CorpusRef | None = None
    start: int = 0
    stop: int = 0

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(first row, ids as they are stored), chunk by chunk in the order of rows."""
        if self.parent is not None:
            yield from self.parent.open().id_blocks(self.start, self.stop)
        yield from self.new.id_blocks()

    def hashes(self, block: np.ndarray) -> np.ndarray:
        """The hashes of a block that are in this range."""
        hashes = id_hashes(block)
        return hashes[hashes >> np.uint64(64 - self.bits) == self.number] if self.bits else hashes


def find_duplicate(task: CheckIds) -> Duplicate | None:
    """(id, first row, second row) of an id that is there twice, None if there is none."""
    hashes = np.sort(np.concatenate([task.hashes(block) for _, block in task.blocks()]))
    for suspect in np.unique(hashes[1:][hashes[1:] == hashes[:-1]]):
        seen: dict[Any, int] = {}  # other ids may have the same hash, which is rare
        for first, block in task.blocks():
            places = np.flatnonzero(id_hashes(block) == suspect)
            for key, place in zip(id_keys(block)[places].tolist(), places.tolist(), strict=True):
                if key in seen:
                    return key, seen[key], first + place
                seen[key] = first + place
    return None


def check_unique(new: NewSegment, parent: Corpus | None, context: Context) -> None:
    """Refuse ids of a new segment that are there twice, in it or in the corpus that it is added to."""
    parts: list[tuple[Any, ...]] = [()]
    rows = new.spec.rows
    if parent is not None:
        ranges = parent.partitions(max(1, parent.rows // max(rows, 1 << 20)))
        parts = [(parent.ref, start, stop) for start, stop in ranges]
        rows += max(stop - start for start, stop in ranges)
    bits = max(0, (-(-rows // HASHES_PER_TASK) - 1).bit_length())
    check_memory(context.client, 32 * min(rows, HASHES_PER_TASK) + (64 << 20), "a check that ids are unique")
    tasks = [CheckIds(new, bits, number, *part) for number in range(1 << bits) for part in parts]
    found = map_tasks(find_duplicate, tasks, client=context.client, name="find_duplicate")
    duplicates = [duplicate for duplicate in found if duplicate is not None]
    if duplicates:
        key, first, second = min(duplicates, key=lambda duplicate: (duplicate[2], duplicate[1]))
        shown = repr(key.decode() if isinstance(key, bytes) else key)
        raise BadInputError(
            f"id {shown} belongs to row {first} and to row {second}; expected each id once, and nothing was published: "
            "mend the ids"
        )
