"""Every damaged, cut or lost byte of a corpus or an index, found and named, with the place where it lies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, TypeVar

from och_dist.cluster import map_tasks
from och_dist.encode import CLAIMS, COLLECTED
from och_dist.errors import BadInputError, IntegrityError, OchError
from och_dist.stage import Context
from och_dist.store import (
    MODELS,
    TABLES,
    ArraySpec,
    Corpus,
    Index,
    Job,
    Objects,
    Tombstones,
    Version,
    chunk_key,
    find_chunk,
    load_model,
    model_objects,
    open_layout,
    open_objects,
    read_bitmap,
    read_rows,
    read_version,
    table_arrays,
    version_key,
    version_numbers,
)

OBJECTS_PER_TASK = 16
ANNOUNCEMENT = "job.json"

T = TypeVar("T")


@dataclass(frozen=True)
class Damage:
    """One fault in words, the key or folder that it lies in, and the number of the chunk if it is one."""

    text: str
    place: str
    chunk: int | None = None

    @property
    def folder(self) -> str:
        """The segment that it lies in, or something that is none."""
        return "/".join(self.place.split("/")[:2])

    @property
    def part(self) -> str:
        """What is damaged of a segment: codes, rows, ones, tables, vectors, ids or job.json."""
        return (*self.place.split("/"), "", "", "")[2]


@dataclass(frozen=True)
class Scan:
    """What was found at a place: the versions that there are, those that can be opened, and every fault."""

    url: str
    numbers: tuple[int, ...]
    opened: tuple[Version, ...]
    damage: tuple[Damage, ...]
    chunks: int

    @property
    def newest(self) -> Version | None:
        """The newest version, None if its manifest is damaged."""
        found = self.opened[-1] if self.opened else None
        return found if found is not None and found.version == self.numbers[-1] else None

    @property
    def indexes(self) -> list[Index]:
        return [version for version in self.opened if isinstance(version, Index)]

    @property
    def models(self) -> list[str]:
        return sorted({index.model for index in self.indexes})

    @cached_property
    def superseded(self) -> list[Damage]:
        """The faults of segments that the newest version holds in a later generation; only older versions list them."""
        if not isinstance(self.newest, Index):
            return []
        newest = {part.job.id: part.job.generation for part in self.newest.segments}
        found = []
        for damage in self.damage:
            job, _, generation = damage.folder.removeprefix("segments/").partition(".")
            replaced = generation.isdigit() and int(generation) < newest.get(job, 0)
            if replaced and damage.part != ANNOUNCEMENT:  # others than readers look at announcements
                found.append(damage)
        return found

    @cached_property
    def standing(self) -> list[Damage]:
        """The faults that count: all others."""
        superseded = set(self.superseded)
        return [damage for damage in self.damage if damage not in superseded]


@contextlib.contextmanager
def noted(damage: list[Damage], place: str) -> Iterator[None]:
    """An error of ours becomes a fault at ``place``."""
    try:
        yield
    except OchError as error:
        damage.append(Damage(str(error), place))


def find_damage(path: str, context: Context) -> Scan:
    """Look at every version at ``path``, at all that they list, and at the jobs beside them."""
    objects = open_objects(path)
    numbers = version_numbers(objects)
    damage = [
        Damage(f"versions {low + 1} to {high - 1} are missing", "versions")
        for low, high in pairwise(numbers)
        if high != low + 1
    ]  # gc removes the oldest only
    opened: list[Version] = []
    for number in numbers:
        with noted(damage, version_key(number)):
            opened.append(open_any(path, number))
    indexes = [version for version in opened if isinstance(version, Index)]
    if not damage and indexes:
        damage += lost_jobs(objects)
    for model in sorted({index.model for index in indexes}):
        with noted(damage, f"{MODELS}/{model}"):
            load_model(model_objects(objects.url), model)
    arrays = {prefix: (spec, digests) for version in opened for prefix, spec, digests in version.arrays()}
    for index in indexes:
        for number, segment in enumerate(index.segments):
            with noted(damage, f"{segment.folder}/{TABLES}"):  # none of them is looked at where a record is damaged
                arrays |= {prefix: (spec, digests) for prefix, spec, digests in table_arrays(index, number)}
            _check_job(objects, segment.job, damage)
    for prefix, (spec, _) in arrays.items():
        with noted(damage, prefix):
            open_layout(objects, prefix, spec)
    bitmaps = sorted({entry for index in indexes for entry in index.tombstones}, key=lambda entry: entry.key)
    damage += _compare(objects.url, arrays, bitmaps, context)
    chunks = sum(len(digests) for _, digests in arrays.values())
    # A segment that several versions list is looked at once for each of them.
    return Scan(objects.url, tuple(numbers), tuple(opened), tuple(dict.fromkeys(damage)), chunks)


def open_any(path: str, number: int) -> Version:
    """A version of a corpus or of an index."""
    objects = open_objects(path)
    body = read_version(objects, number)
    for kind in (Corpus, Index):
        if body.get("kind") == kind.kind:
            return kind.from_json(objects.url, body)
    raise BadInputError(
        f"version {number} of {path} is of kind {body.get('kind')!r}; a corpus or an index can be verified"
    )


def _check_job(objects: Objects, job: Job, damage: list[Damage]) -> None:
    """The announcement of a job and its folded records."""
    with noted(damage, f"{job.folder}/{ANNOUNCEMENT}"):
        if Job.read(objects, job.folder) != job:
            raise IntegrityError(
                f"{job.folder}/{ANNOUNCEMENT} is missing or announces another job; 'och verify --repair' restores it"
            )
    if job.stored_rows:
        ones = f"{job.folder}/ones"
        with noted(damage, ones):
            read_rows(open_layout(objects, ones, job.ones_spec), 0, job.spec.n_chunks)


def _compare(
    url: str, arrays: dict[str, tuple[ArraySpec, Any]], bitmaps: list[Tombstones], context: Context
) -> list[Damage]:
    """Read all chunks and bitmaps on the workers."""
    found = map_tasks(
        partial(verify_chunks, url),
        [
            (prefix, group)
            for prefix, (_, digests) in arrays.items()
            for group in _groups(list(enumerate(digests.tolist())))
        ],
        client=context.client,
        name="verify_chunks",
        advance=context.progress("verify", sum(len(digests) for _, digests in arrays.values())),
        weight=lambda task: len(task[1]),
    )
    found += map_tasks(partial(verify_bitmaps, url), _groups(bitmaps), client=context.client, name="verify_bitmaps")
    return [fault for faults in found for fault in faults]


def verify_chunks(url: str, task: tuple[str, Sequence[tuple[int, int]]]) -> list[Damage]:
    """The (number, checksum) of chunks of one array whose bytes are not those that were published, as faults."""
    objects, damage, (prefix, chunks) = open_objects(url), [], task
    for chunk, stated in chunks:
        fault = find_chunk(objects, prefix, chunk, stated=stated).fault
        if fault is not None:
            damage.append(Damage(f"chunk {chunk} of {prefix} {fault}", prefix, chunk))
    return damage


def verify_bitmaps(url: str, bitmaps: Sequence[Tombstones]) -> list[Damage]:
    """The bitmaps of deleted rows that are not those that were published, as faults."""
    damage: list[Damage] = []
    for entry in bitmaps:
        with noted(damage, entry.key):
            read_bitmap(open_objects(url), entry)
    return damage


def _groups(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[i : i + OBJECTS_PER_TASK] for i in range(0, len(items), OBJECTS_PER_TASK)]


def lost_jobs(objects: Objects) -> list[Damage]:
    """Jobs that no version lists although they were published: their records were folded, and then dropped."""
    damage: list[Damage] = []
    suspects = {}
    for folder in (f"segments/{name}" for name in objects.folders("segments")):
        with noted(damage, f"{folder}/{ANNOUNCEMENT}"):
            job = Job.read(objects, folder)
            if job is not None and _was_published(objects, job):
                suspects[folder] = job.id
    listed: set[str] = set()
    for number in version_numbers(objects):  # read after the jobs: one may have been published meanwhile
        listed |= open_any(objects.url, number).folders
    return damage + [
        Damage(f"job {job} was published, but no version lists it: a manifest is missing", "versions")
        for folder, job in suspects.items()
        if folder not in listed
    ]


def _was_published(objects: Objects, job: Job) -> bool:
    if objects.size(f"{job.folder}/{COLLECTED}") is not None or any(objects.list(f"{job.folder}/{CLAIMS}")):
        return False
    folded = objects.size(chunk_key(f"{job.folder}/ones", 0)) is not None
    return folded and len(job.done(objects)) < job.spec.n_chunks
