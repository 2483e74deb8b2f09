"""Ids of a new segment: how wide they are stored, and that each of a corpus is there once.

Uniqueness is checked on the workers before a version is published, in bounded memory: a task holds the hashes of one
hash range of the new ids, and compares true ids where two hashes agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from och_dist.cluster import check_memory, map_tasks
from och_dist.errors import BadInputError
from och_dist.ingest.chunks import NewSegment
from och_dist.sources import JoinedFiles
from och_dist.stage import Context
from och_dist.store import Corpus, CorpusRef, IdLayout, id_hashes, id_keys

MEASURED_ROWS = 1 << 18
HASHES_PER_TASK = 1 << 24
SUSPECTS = 1000

Duplicate = tuple[Any, int, int]


@dataclass(frozen=True)
class MeasureIds:
    source: JoinedFiles
    start: int
    stop: int


def measure_ids(task: MeasureIds) -> int:
    """Bytes of the longest id among rows [start, stop)."""
    return int(np.strings.str_len(task.source.read_ids(task.start, task.stop)).max())


def id_layout(source: JoinedFiles, context: Context) -> IdLayout:
    """How ids are stored: strings as wide as the longest, which takes a pass over the files."""
    if source.ids == "int64":
        return IdLayout("int64", 8)
    cuts = range(0, source.rows, MEASURED_ROWS)
    ranges = [(start, min(start + MEASURED_ROWS, source.rows)) for start in cuts]
    tasks = [MeasureIds(source.part(start, stop), start, stop) for start, stop in ranges]
    return IdLayout("string", max(map_tasks(measure_ids, tasks, client=context.client, name="measure_ids")))


@dataclass(frozen=True)
class CheckIds:
    """Look for the new ids of hash range ``number`` of 2^``bits`` ranges among each other, or, with a ``parent``, among
    its rows [start, stop)."""

    new: NewSegment
    bits: int
    number: int
    parent: CorpusRef | None = None
    start: int = 0
    stop: int = 0

    def hashes(self, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(hashes of this range, their places in the block)."""
        hashes = id_hashes(block)
        if not self.bits:
            return hashes, np.arange(len(hashes))
        places = np.flatnonzero(hashes >> np.uint64(64 - self.bits) == self.number)
        return hashes[places], places


def find_duplicate(task: CheckIds) -> Duplicate | None:
    """(id, first row, second row) of an id that is there twice, None if there is none."""
    hashes = np.sort(np.concatenate([task.hashes(block)[0] for _, block in task.new.id_blocks()]))
    if task.parent is None:
        return _among_themselves(task, np.unique(hashes[1:][hashes[1:] == hashes[:-1]]))
    for first, block in task.parent.open().id_blocks(task.start, task.stop):
        theirs, places = task.hashes(block)
        near = np.searchsorted(hashes, theirs)
        hit = near < len(hashes)
        hit[hit] = hashes[near[hit]] == theirs[hit]
        if hit.any():
            seen = dict(zip(id_keys(block)[places[hit]].tolist(), (places[hit] + first).tolist(), strict=True))
            if (found := _first_seen(task, np.unique(theirs[hit]), seen)) is not None:
                return found
    return None


def _among_themselves(task: CheckIds, suspects: np.ndarray) -> Duplicate | None:
    for start in range(0, len(suspects), SUSPECTS):
        if (found := _first_seen(task, suspects[start : start + SUSPECTS], {}, remember=True)) is not None:
            return found
    return None


def _first_seen(
    task: CheckIds, suspects: np.ndarray, seen: dict[Any, int], *, remember: bool = False
) -> Duplicate | None:
    """The first new id, of those whose hash is a suspect, that was ``seen`` already: the true ids are compared."""
    for first, block in task.new.id_blocks():
        hashes, places = task.hashes(block)
        places = places[np.isin(hashes, suspects)]
        for key, place in zip(id_keys(block)[places].tolist(), places.tolist(), strict=True):
            if key in seen:
                return key, seen[key], first + place
            if remember:
                seen[key] = first + place
    return None


def check_unique(new: NewSegment, parent: Corpus | None, context: Context) -> None:
    """Refuse ids of a new segment that are there twice, in it or in the corpus that it is added to."""
    bits = max(0, (-(-new.spec.rows // HASHES_PER_TASK) - 1).bit_length())
    check_memory(context.client, 32 * min(new.spec.rows, HASHES_PER_TASK) + (64 << 20), "a check that ids are unique")
    tasks = [CheckIds(new, bits, number) for number in range(1 << bits)]
    if parent is not None:
        ranges = parent.partitions(max(1, parent.rows // max(new.spec.rows, 1 << 20)))
        tasks += [CheckIds(new, bits, number, parent.ref, *part) for number in range(1 << bits) for part in ranges]
    found = map_tasks(find_duplicate, tasks, client=context.client, name="find_duplicate")
    duplicates = [duplicate for duplicate in found if duplicate is not None]
    if duplicates:
        key, first, second = min(duplicates, key=lambda duplicate: (duplicate[2], duplicate[1]))
        shown = repr(key.decode() if isinstance(key, bytes) else key)
        raise BadInputError(
            f"id {shown} belongs to row {first} and to row {second}; expected each id once, and nothing was published: "
            "mend the ids"
        )
