"""Every damaged, cut or lost byte of a corpus or an index, found and named, with the place where it lies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    done_chunks,
    find_chunk,
    ids_prefix,
    load_model,
    model_objects,
    open_layout,
    open_objects,
    read_bitmap,
    read_job,
    read_rows,
    read_version,
    table_arrays,
    version_key,
    version_numbers,
)

OBJECTS_PER_TASK = 16
ANNOUNCEMENT = "job.json"

Array = tuple[str, ArraySpec, Any]
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
        found = attempt(damage, version_key(number), partial(open_any, path, number))
        if found is not None:
            opened.append(found)
    indexes = [version for version in opened if isinstance(version, Index)]
    if not damage and indexes:
        damage += lost_jobs(objects)
    for model in sorted({index.model for index in indexes}):
        attempt(damage, f"{MODELS}/{model}", partial(load_model, model_objects(objects.url), model))
    arrays = {prefix: (spec, digests) for version in opened for prefix, spec, digests in _arrays(version)}
    for index in indexes:
        for number, segment in enumerate(index.segments):
            job = segment.job
            tables = attempt(damage, f"{job.folder}/{TABLES}", partial(table_arrays, index, number))
            arrays |= {prefix: (spec, digests) for prefix, spec, digests in tables or ()}  # none where one is damaged
            attempt(damage, f"{job.folder}/{ANNOUNCEMENT}", partial(_check_announcement, objects, job))
            if job.stored_rows:
                attempt(damage, f"{job.folder}/ones", partial(_check_ones, objects, job))
    for prefix, (spec, _) in arrays.items():
        attempt(damage, prefix, partial(open_layout, objects, prefix, spec))
    bitmaps = sorted({entry for index in indexes for entry in index.tombstones}, key=lambda entry: entry.key)
    damage += _compare(objects.url, arrays, bitmaps, context)
    chunks = sum(len(digests) for _, digests in arrays.values())
    # A segment that several versions list is looked at once for each of them.
    return Scan(objects.url, tuple(numbers), tuple(opened), tuple(dict.fromkeys(damage)), chunks)


def _compare(
    url: str, arrays: dict[str, tuple[ArraySpec, Any]], bitmaps: list[Tombstones], context: Context
) -> list[Damage]:
    """Read all chunks and bitmaps on the workers."""
    tasks = [
        VerifyObjects(url, prefix, group)
        for prefix, (_, digests) in arrays.items()
        for group in _groups(list(enumerate(digests.tolist())))
    ]
    tasks += [VerifyObjects(url, bitmaps=group) for group in _groups(bitmaps)]
    found = map_tasks(
        verify_objects,
        tasks,
        client=context.client,
        name="verify_objects",
        advance=context.progress("verify", sum(len(task.chunks) for task in tasks)),
        weight=lambda task: len(task.chunks),
    )
    return [fault for faults in found for fault in faults]


def attempt(damage: list[Damage], place: str, action: Callable[[], Any]) -> Any:
    """What ``action`` returns; None, with its error added to ``damage``, if it raises one of ours."""
    try:
        return action()
    except OchError as error:
        damage.append(Damage(str(error), place))
        return None


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


def _arrays(version: Version) -> Iterable[Array]:
    """(folder, layout, checksums) of every array of a version."""
    if isinstance(version, Corpus):
        for segment in version.segments:
            rows = segment.stop - segment.start
            yield segment.prefix, ArraySpec(rows, version.dim, version.dtype, segment.chunk_rows), segment.digests
            if segment.ids_spec is not None:
                yield ids_prefix(segment.id), segment.ids_spec, segment.id_digests
    else:
        for part in (part for part in version.segments if part.job.stored_rows):
            yield f"{part.folder}/codes", part.job.spec, part.digests
            if part.row_digests is not None:
                yield f"{part.folder}/rows", part.job.rows_spec, part.row_digests


def _check_announcement(objects: Objects, job: Job) -> None:
    if read_job(objects, job.folder) != job:
        raise IntegrityError(
            f"{job.folder}/{ANNOUNCEMENT} is missing or announces another job; 'och verify --repair' restores it"
        )


def _check_ones(objects: Objects, job: Job) -> None:
    read_rows(open_layout(objects, f"{job.folder}/ones", job.ones_spec), 0, job.spec.n_chunks)


@dataclass(frozen=True)
class VerifyObjects:
    """Chunks of one array with the checksums that the manifest states for them, or bitmaps of deleted rows."""

    url: str
    prefix: str = ""
    chunks: tuple[tuple[int, int], ...] = ()
    bitmaps: tuple[Tombstones, ...] = ()


def verify_objects(task: VerifyObjects) -> list[Damage]:
    """Every object whose bytes are not those that were published."""
    objects = open_objects(task.url)
    damage: list[Damage] = []
    for chunk, stated in task.chunks:
        fault = find_chunk(objects, task.prefix, chunk, stated=stated).fault
        if fault is not None:
            damage.append(Damage(f"chunk {chunk} of {task.prefix} {fault}", task.prefix, chunk))
    for entry in task.bitmaps:
        attempt(damage, entry.key, partial(read_bitmap, objects, entry))
    return damage


def _groups(items: list[T]) -> list[tuple[T, ...]]:
    return [tuple(items[i : i + OBJECTS_PER_TASK]) for i in range(0, len(items), OBJECTS_PER_TASK)]


def lost_jobs(objects: Objects) -> list[Damage]:
    """Jobs that no version lists although they were published: their records were folded, and then dropped."""
    damage: list[Damage] = []
    suspects = {}
    for folder in (f"segments/{name}" for name in objects.folders("segments")):
        job = attempt(damage, f"{folder}/{ANNOUNCEMENT}", partial(read_job, objects, folder))
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
    if objects.size(f"{job.folder}/{COLLECTED}") is not None or any(
        True for _ in objects.list(f"{job.folder}/{CLAIMS}")
    ):
        return False
    folded = objects.size(chunk_key(f"{job.folder}/ones", 0)) is not None
    return folded and len(done_chunks(objects, job)) < job.spec.n_chunks
