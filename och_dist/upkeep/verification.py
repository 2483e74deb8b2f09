"""Find every damaged, cut or lost byte of a corpus, an index or a model store, name the place where it lies, and mend
what can be mended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Annotated, TypeVar

from och_dist import store
from och_dist.cluster import map_tasks
from och_dist.encode import CLAIMS, COLLECTED, checked_segment, clear_leftovers, named_jobs, not_held
from och_dist.errors import BadInputError, IntegrityError, OchError, UsageError
from och_dist.options import Jobs, Option, checked
from och_dist.stage import Context, Report, Stopwatch
from och_dist.store import Corpus, CorpusRef, Index, IndexSegment, Job, Objects, StoredArray, Tombstones, Version
from och_dist.upkeep.repair import repair_index

LISTED = 20
OBJECTS_PER_TASK = 16

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
        """The faults of segments that a repair has replaced: a version holds a later generation; older ones list them.

        The newest version need not hold it any more: its rows may have been compacted since, or encoded anew. What the
        newest version itself lists always counts.
        """
        listed = set() if self.newest is None else self.newest.folders
        latest: dict[str, int] = {}
        for part in (part for index in self.indexes for part in index.segments):
            latest[part.job.id] = max(latest.get(part.job.id, 0), part.job.generation)
        found = []
        for damage in self.damage:
            job, _, generation = damage.folder.removeprefix("segments/").partition(".")
            replaced = generation.isdigit() and int(generation) < latest.get(job, 0) and damage.folder not in listed
            if replaced and damage.part != store.ANNOUNCEMENT:  # others than readers look at announcements
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
    objects = store.open_objects(path)
    numbers = store.version_numbers(objects)
    damage = [
        Damage(f"versions {low + 1} to {high - 1} are missing", "versions")
        for low, high in pairwise(numbers)
        if high != low + 1
    ]  # gc removes the oldest only
    opened: list[Version] = []
    for number in numbers:
        with noted(damage, store.version_key(number)):
            opened.append(open_any(path, number))
    indexes = [version for version in opened if isinstance(version, Index)]
    if not damage and indexes:
        damage += lost_jobs(objects)
    for model in sorted({index.model for index in indexes}):
        with noted(damage, f"{store.MODELS}/{model}"):
            store.load_model(store.model_objects(objects.url), model)
    arrays = {array[0]: array for version in opened for array in version.arrays()}
    for index in indexes:
        for number, segment in enumerate(index.segments):
            with noted(damage, f"{segment.folder}/{store.TABLES}"):  # none is looked at where a record is damaged
                arrays |= {array[0]: array for array in store.table_arrays(index, number)}
            _check_job(objects, segment.job, damage)
    for prefix, spec, _ in arrays.values():
        with noted(damage, prefix):
            store.open_layout(objects, prefix, spec)
    bitmaps = sorted({entry for index in indexes for entry in index.tombstones}, key=lambda entry: entry.key)
    damage += _compare(objects.url, list(arrays.values()), bitmaps, context)
    chunks = sum(len(digests) for _, _, digests in arrays.values())
    # A segment that several versions list is looked at once for each of them.
    return Scan(objects.url, tuple(numbers), tuple(opened), tuple(dict.fromkeys(damage)), chunks)


def open_any(path: str, number: int) -> Version:
    """A version of a corpus or of an index."""
    objects = store.open_objects(path)
    body = store.read_version(objects, number)
    for kind in (Corpus, Index):
        if body.get("kind") == kind.kind:
            return kind.from_json(objects.url, body)
    raise BadInputError(
        f"version {number} of {path} is of kind {body.get('kind')!r}; a corpus or an index can be verified"
    )


def _check_job(objects: Objects, job: Job, damage: list[Damage]) -> None:
    """The announcement of a job and its folded records."""
    with noted(damage, f"{job.folder}/{store.ANNOUNCEMENT}"):
        if Job.read(objects, job.folder) != job:
            raise IntegrityError(
                f"{job.folder}/{store.ANNOUNCEMENT} is missing or announces another job; "
                "'och verify --repair' restores it"
            )
    if job.stored_rows:
        ones = f"{job.folder}/ones"
        with noted(damage, ones):
            store.read_rows(store.open_layout(objects, ones, job.ones_spec), 0, job.spec.n_chunks)


def _compare(url: str, arrays: Sequence[StoredArray], bitmaps: Sequence[Tombstones], context: Context) -> list[Damage]:
    """Read all chunks and bitmaps on the workers."""
    found = map_tasks(
        partial(verify_chunks, url),
        [(prefix, part) for prefix, _, digests in arrays for part in _groups(list(enumerate(digests.tolist())))],
        client=context.client,
        name="verify_chunks",
        advance=context.progress("verify", sum(len(digests) for _, _, digests in arrays)),
        weight=lambda task: len(task[1]),
    )
    found += map_tasks(partial(verify_bitmaps, url), _groups(bitmaps), client=context.client, name="verify_bitmaps")
    return [fault for faults in found for fault in faults]


def verify_chunks(url: str, task: tuple[str, Sequence[tuple[int, int]]]) -> list[Damage]:
    """The (number, checksum) of chunks of one array whose bytes are not those that were published, as faults."""
    objects, damage, (prefix, chunks) = store.open_objects(url), [], task
    for chunk, stated in chunks:
        fault = store.find_chunk(objects, prefix, chunk, stated=stated).fault
        if fault is not None:
            damage.append(Damage(f"chunk {chunk} of {prefix} {fault}", prefix, chunk))
    return damage


def verify_bitmaps(url: str, bitmaps: Sequence[Tombstones]) -> list[Damage]:
    """The bitmaps of deleted rows that are not those that were published, as faults."""
    damage: list[Damage] = []
    for entry in bitmaps:
        with noted(damage, entry.key):
            store.read_bitmap(store.open_objects(url), entry)
    return damage


def _groups(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[i : i + OBJECTS_PER_TASK] for i in range(0, len(items), OBJECTS_PER_TASK)]


def lost_jobs(objects: Objects) -> list[Damage]:
    """Jobs that no version lists although they were published: their records were folded, and then dropped."""
    damage: list[Damage] = []
    suspects = {}
    for folder in (f"segments/{name}" for name in objects.folders("segments")):
        job = None
        with noted(damage, f"{folder}/{store.ANNOUNCEMENT}"):
            job = Job.read(objects, folder)
        if job is not None and _was_published(objects, job):
            suspects[folder] = job.id
    listed: set[str] = set()
    for number in store.version_numbers(objects):  # read after the jobs: one may have been published meanwhile
        listed |= open_any(objects.url, number).folders
    return damage + [
        Damage(f"job {job} was published, but no version lists it: a manifest is missing", "versions")
        for folder, job in suspects.items()
        if folder not in listed
    ]


def _was_published(objects: Objects, job: Job) -> bool:
    if objects.size(f"{job.folder}/{COLLECTED}") is not None or any(objects.list(f"{job.folder}/{CLAIMS}")):
        return False
    return job.folded(objects) and len(job.done(objects)) < job.spec.n_chunks


@checked
def verify(
    path: str,
    *,
    repair: Annotated[bool, Option("Mend the newest version of an index, and publish it as the next one.")] = False,
    corpus: Annotated[
        str | None, Option("Where the vectors for a repair lie [default: where the index says].", metavar="PATH")
    ] = None,
    context: Context | None = None,
) -> Report:
    """Check all versions at ``path``, or all models; any damage raises :class:`IntegrityError` with the list.

    With ``repair`` the newest version of an index is mended first, from its ``corpus`` (the one that it names, unless
    another place is given) and from itself, and published as a new version; then everything is checked once more.
    """
    watch, context = Stopwatch("verify"), context or Context()
    if corpus is not None and not repair:
        raise UsageError("a corpus is needed for a repair only; add --repair, or leave out --corpus")
    objects = store.open_objects(path)
    if not store.version_numbers(objects):
        return _verify_unversioned(watch, objects, context)
    scan, found = find_damage(path, context), 0
    mended: list[str] = []
    failed: list[str] = []
    index = scan.newest
    if repair and isinstance(index, Index):
        for segment in index.segments:
            if segment.job.generation:  # of a repair that was killed after it had published
                clear_leftovers(objects, segment.job)
        if scan.standing:
            found = len(scan.standing)
            mended, failed = repair_index(index, scan, corpus=corpus, context=context)
            scan = find_damage(path, context)
    if scan.standing:
        raise IntegrityError(_account(scan, mended, failed))
    facts = {"repaired": found, "mended": mended} if repair else {}
    return watch.report(
        "nothing to do" if repair and not found else "done",
        path=scan.url,
        versions=list(scan.numbers),
        chunks=scan.chunks,
        models=len(scan.models),
        damaged=0,
        **facts,
        superseded=[f"{damage.text}, in older versions only" for damage in scan.superseded],
    )


@checked
def check_jobs(index: str, *, jobs: Jobs, context: Context | None = None) -> Report:
    """Check every chunk of finished ``jobs`` against its record, and every byte of all versions; nothing is published.

    Without jobs there is nothing to do: 'och verify' checks an index that does not change.
    """
    watch, context = Stopwatch("check"), context or Context()
    objects = store.open_objects(index)
    found = not_held(store.find_index(index), named_jobs(objects, jobs))
    chunks = sum(len(checked_segment(objects, IndexSegment(job), context).digests) for job in found)
    if found and store.version_numbers(objects):
        try:
            chunks += verify(index, context=context).facts["chunks"]
        except IntegrityError as error:
            raise IntegrityError(f"{error} Nothing new was published.") from error
    return watch.report("done" if found else "nothing to do", index=objects.url, chunks=chunks, damaged=0)


def _account(scan: Scan, mended: Sequence[str], failed: Sequence[str]) -> str:
    """All faults, what was mended, and what to do about the rest."""
    text = _listing(scan.standing, scan.url)
    if mended:
        text = f"repaired: {'; '.join(mended[:LISTED])}. There remain {text}"
    if failed:
        return f"{text} Not repaired: {'; '.join(failed[:LISTED])}."
    return f"{text} {' '.join(_remedies(scan, tried=bool(mended)))}"


def _listing(damage: Sequence[Damage], url: str) -> str:
    listed = "; ".join(fault.text for fault in damage[:LISTED]) + ("; ..." if len(damage) > LISTED else "")
    return f"{len(damage)} faults in {url}: {listed}."


def _remedies(scan: Scan, *, tried: bool) -> list[str]:
    """A sentence for every kind of fault."""
    newest, faults, url = scan.newest, scan.standing, scan.url
    if isinstance(newest, Corpus):
        return [_corpus_remedy(newest, faults)]
    remedies = []
    in_segments = [fault for fault in faults if fault.place.startswith("segments/")]
    in_models = [fault.place for fault in faults if fault.place.startswith(f"{store.MODELS}/")]
    if isinstance(newest, Index):
        older = [fault for fault in in_segments if fault.folder not in newest.folders]
        if not tried and len(older) < len(in_segments):
            remedies.append(f"'och verify {url} --repair' makes codes again from the corpus.")
        if older and newest.version > 1:
            remedies.append(f"What only older versions list goes with 'och gc {url} --keep 1'.")
    if in_models:
        names = ", ".join(sorted({place.removeprefix(f"{store.MODELS}/") for place in in_models}))
        remedies.append(f"A model is the same in every copy: bring {names} from where 'och train' put it.")
    if len(in_segments) + len(in_models) < len(faults) or not remedies:
        remedies.append("Restore these objects from a copy, or make them again.")
    return remedies


def _corpus_remedy(corpus: Corpus, faults: Sequence[Damage]) -> str:
    """Which rows are lost, and where they came from: a corpus can be made from its sources alone."""
    ranges, sources = [], []
    for segment in corpus.segments:
        mine = [fault for fault in faults if fault.folder == segment.folder]
        if not mine:
            continue
        sources += [str(source["path"]) for source in segment.sources if "path" in source]
        for fault in mine:
            low = segment.start + (fault.chunk or 0) * segment.chunk_rows
            high = segment.stop if fault.chunk is None else min(low + segment.chunk_rows, segment.stop)
            ranges.append(f"{low}..{high}")
    if not ranges:
        return "Restore these objects from a copy, or ingest the corpus anew."
    rows, files = ", ".join(dict.fromkeys(ranges)), " ".join(dict.fromkeys(sources)) or "SOURCES"
    return (
        f"Nothing here can make rows {rows} again: restore these objects from a copy, or take all rows anew from their "
        f"source with 'och ingest {files} NEW_CORPUS'."
    )


def _verify_unversioned(watch: Stopwatch, objects: Objects, context: Context) -> Report:
    """A store of models, an adopted Zarr array, or something of which nothing is published (any more)."""
    remedy = "Restore these objects from a copy, or make them again."
    if models := [name for name in objects.folders("") if store.is_address(name)]:
        damage: list[Damage] = []
        for name in models:
            with noted(damage, name):
                store.load_model(objects, name)
        for key, _, _ in objects.list("trained"):
            with noted(damage, key):
                store.unseal(objects.get(key), f"{objects.url}/{key}")
        if damage:
            raise IntegrityError(f"{_listing(damage, objects.url)} {remedy}")
        return watch.report(path=objects.url, versions=[], chunks=0, models=len(models), damaged=0)
    if objects.folders("segments"):
        if lost := lost_jobs(objects):
            raise IntegrityError(f"{_listing(lost, objects.url)} {remedy}")
        raise BadInputError(
            f"{objects.url} holds segments but no version: nothing was published yet, or its manifests are lost; "
            "run the command that makes it again"
        )
    corpus = store.open_corpus(objects.url)
    parts = corpus.partitions()
    rows = map_tasks(partial(read_partition, corpus.ref), parts, client=context.client, name="read_partition")
    return watch.report(path=corpus.url, versions=[], chunks=len(parts), rows=sum(rows), damaged=0)


def read_partition(corpus: CorpusRef, rows: tuple[int, int]) -> int:
    """Decode rows [start, stop) of an adopted Zarr array; its own codecs find what they can."""
    return sum(len(block) for _, block in corpus.open().blocks(*rows))
