"""Find every damaged, cut or lost byte of a corpus, an index or a model store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import google_crc32c

from och_dist.errors import BadInputError, IntegrityError, OchError
from och_dist.graph import map_tasks
from och_dist.stages.common import Context, Report, Stopwatch
from och_dist.store.arrays import ArraySpec, chunk_key, create_array, open_array, read_rows, trailing_crc
from och_dist.store.corpus import Corpus, open_corpus
from och_dist.store.index import Index, Job, model_objects, open_version, read_job
from och_dist.store.model import load_model
from och_dist.store.objects import open_objects
from och_dist.store.versions import read_version, version_numbers

CHUNKS_PER_TASK = 16
LISTED = 20


@dataclass(frozen=True)
class VerifyChunks:
    """Chunks of one array with the checksums that the manifest states for them."""

    url: str
    prefix: str
    chunks: tuple[tuple[int, int], ...]
    nbytes: int


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
    """Check all versions at ``path``; any damage raises :class:`IntegrityError` with the list."""
    watch, context = Stopwatch("verify"), context or Context()
    objects = open_objects(path)
    numbers = version_numbers(objects)
    if not numbers:
        return _verify_array(watch, open_corpus(path), context)
    damage: list[str] = []
    opened: list[Corpus | Index] = []
    for number in numbers:
        found = _attempt(damage, partial(_open, path, number))
        if found is not None:
            opened.append(found)
    tasks: dict[tuple[str, tuple[tuple[int, int], ...]], VerifyChunks] = {}
    models: set[str] = set()
    for version in opened:
        if isinstance(version, Index) and version.model not in models:
            models.add(version.model)
            _attempt(damage, partial(load_model, model_objects(objects.url), version.model))
        for prefix, spec, digests in _arrays(version):
            key = (prefix, ())
            if key in tasks:
                continue
            tasks[key] = VerifyChunks(objects.url, prefix, (), 0)
            _attempt(damage, partial(_check_layout, path, prefix, spec))
            _attempt(damage, partial(_check_folder, path, prefix))
            width = spec.width * spec.chunk_rows
            for group in _groups(list(enumerate(digests.tolist()))):
                tasks[prefix, group] = VerifyChunks(objects.url, prefix, group, width * len(group))
    work = [task for task in tasks.values() if task.chunks]
    advance = context.progress("verify", sum(len(task.chunks) for task in work))
    found_damage = map_tasks(
        verify_chunks,
        work,
        client=context.client,
        name="verify_chunks",
        advance=advance,
        weight=lambda task: len(task.chunks),
    )
    damage += [line for lines in found_damage for line in lines]
    if damage:
        listed = "; ".join(damage[:LISTED]) + ("; ..." if len(damage) > LISTED else "")
        raise IntegrityError(
            f"{len(damage)} faults in {objects.url}: {listed}. Restore these objects from a copy, or make them again"
        )
    return watch.report(
        path=objects.url,
        versions=numbers,
        chunks=sum(len(task.chunks) for task in work),
        models=len(models),
        damaged=0,
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
    else:
        for part in version.segments:
            yield f"{part.job.folder}/codes", part.job.spec, part.digests


def _check_layout(path: str, prefix: str, spec: ArraySpec) -> None:
    """The metadata exists and says what the manifest says."""
    open_array(open_objects(path), prefix)
    create_array(open_objects(path), prefix, spec)


def _check_folder(path: str, prefix: str) -> None:
    """Beside codes lie their job and their folded records."""
    folder, _, name = prefix.rpartition("/")
    if name != "codes":
        return
    job: Job | None = read_job(open_objects(path), folder)
    if job is None or job.folder != folder:
        raise IntegrityError(f"{folder}/job.json is missing or belongs elsewhere")
    ones = open_array(open_objects(path), f"{folder}/ones")
    read_rows(ones, 0, ones.shape[0])


def _groups(chunks: list[tuple[int, int]]) -> list[tuple[tuple[int, int], ...]]:
    return [tuple(chunks[i : i + CHUNKS_PER_TASK]) for i in range(0, len(chunks), CHUNKS_PER_TASK)]


@dataclass(frozen=True)
class ReadPartition:
    url: str
    start: int
    stop: int


def read_partition(task: ReadPartition) -> int:
    """Decode rows of an adopted Zarr array; its own codecs find what they can."""
    return sum(len(block) for _, block in open_corpus(task.url).blocks(task.start, task.stop))


def _verify_array(watch: Stopwatch, corpus: Corpus, context: Context) -> Report:
    tasks = [ReadPartition(corpus.url, start, stop) for start, stop in corpus.partitions()]
    rows = map_tasks(read_partition, tasks, client=context.client, name="read_partition")
    return watch.report(path=corpus.url, versions=[], chunks=len(tasks), rows=sum(rows), damaged=0)
