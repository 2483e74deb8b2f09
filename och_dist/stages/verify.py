"""Find every damaged, cut or lost byte of a corpus, an index or a model store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import google_crc32c

from och_dist.errors import BadInputError, IntegrityError, OchError
from och_dist.graph import map_tasks
from och_dist.stages.common import Context, Report, Stopwatch
from och_dist.stages.publish import CLAIMS, COLLECTED
from och_dist.store.arrays import ArraySpec, chunk_key, open_array, open_layout, read_rows, trailing_crc
from och_dist.store.corpus import Corpus, CorpusRef, open_corpus
from och_dist.store.ids import ids_prefix
from och_dist.store.index import Index, IndexSegment, model_objects, open_version
from och_dist.store.jobs import Job, done_chunks, read_job
from och_dist.store.model import is_address, load_model
from och_dist.store.objects import Objects, open_objects
from och_dist.store.tables import table_arrays
from och_dist.store.tombstones import Tombstones, read_bitmap
from och_dist.store.versions import read_version, unseal, version_numbers

CHUNKS_PER_TASK = 16
LISTED = 20


@dataclass(frozen=True)
class VerifyChunks:
    """Chunks of one array with the checksums that the manifest states for them."""

    url: str
    prefix: str
    chunks: tuple[tuple[int, int], ...]


def verify_chunks(task: VerifyChunks) -> list[str]:
    """One sentence for every chunk whose bytes are not those that were published."""
    objects = open_objects(task.url)
    damage = []
    for chunk, stated in task.chunks:
        data = objects.read(chunk_key(task.prefix, chunk))
        where = f"chunk {chunk} of {task.prefix}"
        if data is None:
            damage.append(f"{where} is missing")
        elif len(data) < 4 or google_crc32c.value(data[:-4]) != trailing_crc(data):
            damage.append(f"{where} is damaged ({len(data)} bytes)")
        elif trailing_crc(data) != stated:
            damage.append(f"{where} is not the one that was published")
    return damage


def verify(path: str, *, context: Context | None = None) -> Report:
    """Check all versions at ``path``, or all models; any damage raises :class:`IntegrityError` with the list."""
    watch, context = Stopwatch("verify"), context or Context()
    objects = open_objects(path)
    numbers = version_numbers(objects)
    if not numbers:
        return _verify_unversioned(watch, objects, context)
    damage = [
        f"versions {low + 1} to {high - 1} are missing" for low, high in pairwise(numbers) if high != low + 1
    ]  # gc removes the oldest only
    opened: list[Corpus | Index] = []
    for number in numbers:
        found = _attempt(damage, partial(_open, path, number))
        if found is not None:
            opened.append(found)
    if not damage and any(isinstance(version, Index) for version in opened):
        damage += _lost_jobs(objects)
    models = sorted({version.model for version in opened if isinstance(version, Index)})
    for model in models:
        _attempt(damage, partial(load_model, model_objects(objects.url), model))
    arrays = {prefix: (spec, digests) for version in opened for prefix, spec, digests in _arrays(version)}
    for index in (version for version in opened if isinstance(version, Index)):
        found = _attempt(damage, partial(_table_arrays, index)) or []
        arrays |= {prefix: (spec, digests) for prefix, spec, digests in found}
    for prefix, (spec, _) in arrays.items():
        _attempt(damage, partial(open_layout, objects, prefix, spec))
        _attempt(damage, partial(_check_folder, objects, prefix))
    tasks = [
        VerifyChunks(objects.url, prefix, group)
        for prefix, (_, digests) in arrays.items()
        for group in _groups(list(enumerate(digests.tolist())))
    ]
    damage += [line for lines in _run(tasks, context) for line in lines]
    damage += _damaged_bitmaps(objects, opened, context)
    _raise_damage(damage, objects.url)
    chunks = sum(len(task.chunks) for task in tasks)
    return watch.report(path=objects.url, versions=numbers, chunks=chunks, models=len(models), damaged=0)


def _table_arrays(index: Index) -> list[tuple[str, ArraySpec, Any]]:
    return list(table_arrays(index))


def _run(tasks: list[VerifyChunks], context: Context) -> list[list[str]]:
    return map_tasks(
        verify_chunks,
        tasks,
        client=context.client,
        name="verify_chunks",
        advance=context.progress("verify", sum(len(task.chunks) for task in tasks)),
        weight=lambda task: len(task.chunks),
    )


def _raise_damage(damage: list[str], url: str) -> None:
    if damage:
        listed = "; ".join(damage[:LISTED]) + ("; ..." if len(damage) > LISTED else "")
        raise IntegrityError(
            f"{len(damage)} faults in {url}: {listed}. Restore these objects from a copy, or make them again"
        )


def _attempt(damage: list[str], action: Callable[[], Any]) -> Any:
    try:
        return action()
    except OchError as error:
        damage.append(str(error))
        return None


def _open(path: str, number: int) -> Corpus | Index:
    kind = read_version(open_objects(path), number).get("kind")
    if kind == "corpus":
        return open_corpus(path, number)
    if kind == "index":
        return open_version(path, number)
    raise BadInputError(f"version {number} of {path} is of kind {kind!r}; a corpus or an index can be verified")


def _arrays(version: Corpus | Index) -> Iterable[tuple[str, ArraySpec, Any]]:
    """(folder, layout, checksums) of every array of a version."""
    if isinstance(version, Corpus):
        for segment in version.segments:
            rows = segment.stop - segment.start
            yield (
                segment.prefix,
                ArraySpec(rows, version.dim, version.dtype, segment.chunk_rows),
                segment.digests,
            )
            if segment.ids_spec is not None:
                yield ids_prefix(segment.id), segment.ids_spec, segment.id_digests
    else:
        for part in (part for part in version.segments if part.job.stored_rows):
            yield f"{part.job.folder}/codes", part.job.spec, part.digests
            if part.row_digests is not None:
                yield f"{part.job.folder}/rows", part.job.rows_spec, part.row_digests


@dataclass(frozen=True)
class VerifyBitmaps:
    """Bitmaps of deleted rows that versions of an index list."""

    url: str
    listed: tuple[Tombstones, ...]


def verify_bitmaps(task: VerifyBitmaps) -> list[str]:
    """One sentence for every bitmap that does not hold what its manifest states."""
    damage: list[str] = []
    for entry in task.listed:
        _attempt(damage, partial(read_bitmap, open_objects(task.url), entry))
    return damage


def _damaged_bitmaps(objects: Objects, opened: list[Corpus | Index], context: Context) -> list[str]:
    listed = {entry for version in opened if isinstance(version, Index) for entry in version.tombstones}
    entries = sorted(listed, key=lambda entry: entry.key)
    groups = [tuple(entries[i : i + CHUNKS_PER_TASK]) for i in range(0, len(entries), CHUNKS_PER_TASK)]
    tasks = [VerifyBitmaps(objects.url, group) for group in groups]
    found = map_tasks(verify_bitmaps, tasks, client=context.client, name="verify_bitmaps")
    return [line for lines in found for line in lines]


def _check_folder(objects: Objects, prefix: str) -> None:
    """Beside codes lie their job and their folded records."""
    folder, _, name = prefix.rpartition("/")
    if name != "codes":
        return
    if read_job(objects, folder) is None:
        raise IntegrityError(f"{folder}/job.json is missing")
    ones = open_array(objects, f"{folder}/ones")
    read_rows(ones, 0, ones.shape[0])


def _lost_jobs(objects: Objects) -> list[str]:
    """Jobs that no version lists although they were published: their records were folded, and then dropped."""
    damage: list[str] = []
    suspects = {}
    for folder in (f"segments/{name}" for name in objects.folders("segments")):
        job = _attempt(damage, partial(read_job, objects, folder))
        if job is not None and _was_published(objects, job):
            suspects[folder] = job.id
    listed: set[str] = set()
    for number in version_numbers(objects):  # read after the jobs: one may have been published meanwhile
        version = _open(objects.url, number)
        listed |= {part.job.folder for part in version.segments if isinstance(part, IndexSegment)}
    lost = [job for folder, job in suspects.items() if folder not in listed]
    return damage + [f"job {job} was published, but no version lists it: a manifest is missing" for job in lost]


def _was_published(objects: Objects, job: Job) -> bool:
    if objects.size(f"{job.folder}/{COLLECTED}") is not None or any(
        True for _ in objects.list(f"{job.folder}/{CLAIMS}")
    ):
        return False
    folded = objects.size(chunk_key(f"{job.folder}/ones", 0)) is not None
    return folded and len(done_chunks(objects, job)) < job.spec.n_chunks


def _groups(chunks: list[tuple[int, int]]) -> list[tuple[tuple[int, int], ...]]:
    return [tuple(chunks[i : i + CHUNKS_PER_TASK]) for i in range(0, len(chunks), CHUNKS_PER_TASK)]


@dataclass(frozen=True)
class ReadPartition:
    corpus: CorpusRef
    start: int
    stop: int


def read_partition(task: ReadPartition) -> int:
    """Decode rows of an adopted Zarr array; its own codecs find what they can."""
    return sum(len(block) for _, block in task.corpus.open().blocks(task.start, task.stop))


def _verify_unversioned(watch: Stopwatch, objects: Objects, context: Context) -> Report:
    """A store of models, an adopted Zarr array, or something of which nothing is published (any more)."""
    if models := [name for name in objects.folders("") if is_address(name)]:
        damage: list[str] = []
        for name in models:
            _attempt(damage, partial(load_model, objects, name))
        for key in (key for key, _, _ in objects.list("trained")):
            _attempt(damage, partial(_check_trained, objects, key))
        _raise_damage(damage, objects.url)
        return watch.report(path=objects.url, versions=[], chunks=0, models=len(models), damaged=0)
    if objects.folders("segments"):
        _raise_damage(_lost_jobs(objects), objects.url)
        raise BadInputError(
            f"{objects.url} holds segments but no version: nothing was published yet, or its manifests are lost; "
            "run the command that makes it again"
        )
    corpus = open_corpus(objects.url)
    tasks = [ReadPartition(corpus.ref, start, stop) for start, stop in corpus.partitions()]
    rows = map_tasks(read_partition, tasks, client=context.client, name="read_partition")
    return watch.report(path=corpus.url, versions=[], chunks=len(tasks), rows=sum(rows), damaged=0)


def _check_trained(objects: Objects, key: str) -> None:
    unseal(objects.get(key), f"{objects.url}/{key}")
