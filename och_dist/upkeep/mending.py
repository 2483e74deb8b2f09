"""Mend an index: what is damaged is made again from what is not, and must come out with the published checksums.

A damaged segment is never written to. Its next generation takes over every chunk that is as it was published and
encodes the others again from the corpus; a new version lists it in place of the damaged one. The announcement of a job
and a bitmap of deleted rows are restored where they lie, for their exact bytes are known: the manifest holds the one,
and the sha256 of the other is in its name. Bucket tables are removed, because they can be made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from och_dist.cluster import map_tasks
from och_dist.encode import check_unmarked, checked_segment, claimed, clear_leftovers
from och_dist.errors import BadInputError, ConflictError, IncompleteError, IntegrityError, OchError
from och_dist.kernels.packing import count_ones
from och_dist.stage import Context, require_room
from och_dist.store import FOLDER as TABLES
from och_dist.store import (
    RANGE_ROWS,
    ArraySpec,
    Corpus,
    CorpusRef,
    Index,
    IndexRef,
    IndexSegment,
    Job,
    Objects,
    Tombstones,
    begin_job,
    commit,
    done_chunks,
    find_chunk,
    load_model,
    model_objects,
    model_on_worker,
    next_version,
    open_corpus,
    open_objects,
    open_version,
    plain_crc,
    put_bitmap,
    read_bitmap,
    read_job,
    remove_tables,
    seal,
    sha256,
    version_numbers,
    write_codes,
)
from och_dist.upkeep.integrity import ANNOUNCEMENT, Damage, Findings

GENERATIONS = 20
PARTS = ("codes", "rows", "ones")


@dataclass(frozen=True)
class Repaired:
    """What was mended, and why the rest was not, each in a sentence."""

    mended: tuple[str, ...]
    failed: tuple[str, ...]


def repair_index(index: Index, findings: Findings, *, corpus: str | None, context: Context) -> Repaired:
    """Mend what can be mended of the newest version of an index, and publish it; running it again goes on."""
    objects = open_objects(index.url)
    objects.require_put_if_absent()
    mended = [*_restore_announcements(objects, findings), *_restore_bitmaps(objects, index)]
    mended += _remove_tables(objects, findings)
    failed: list[str] = []
    with ExitStack() as claims:
        made: dict[Job, IndexSegment] = {}
        for segment in index.segments:
            faults = [d for d in findings.damage if d.folder == segment.job.folder and d.part in PARTS]
            if not faults:
                continue
            try:
                work = _Work(objects, index, segment, faults, _corpus_for(index, segment, faults, corpus))
                made[segment.job] = _next_generation(work, context, claims)
            except (IntegrityError, ConflictError, BadInputError) as error:
                failed.append(str(error))
        published = commit(objects, open_version, partial(_replaced, made))[1]
    for part in published.segments:
        if part.job in {segment.job for segment in made.values()}:
            clear_leftovers(objects, part.job)
            mended.append(f"job {part.job.id} is in version {published.version} as generation {part.job.generation}")
    return Repaired(tuple(mended), tuple(failed))


def _restore_announcements(objects: Objects, findings: Findings) -> list[str]:
    """Put the job.json of published segments as their manifests have them."""
    mended = []
    damaged = {damage.folder for damage in findings.damage if damage.part == ANNOUNCEMENT}
    jobs = {part.job for index in findings.indexes for part in index.segments if part.job.folder in damaged}
    for job in sorted(jobs, key=lambda job: job.folder):
        with suppress(IntegrityError):
            if read_job(objects, job.folder) == job:  # restored by another repair
                continue
        objects.delete(f"{job.folder}/{ANNOUNCEMENT}")
        objects.put(f"{job.folder}/{ANNOUNCEMENT}", seal(job.to_json()))
        mended.append(f"{job.folder}/{ANNOUNCEMENT} was restored from the manifest")
    return mended


def _remove_tables(objects: Objects, findings: Findings) -> list[str]:
    folders = sorted({damage.folder for damage in findings.damage if damage.part == TABLES})
    remove_tables(objects, folders)
    return [
        f"the bucket tables of {folder} were removed: make them again with 'och tables {objects.url}'"
        for folder in folders
    ]


def _restore_bitmaps(objects: Objects, index: Index) -> list[str]:
    """Put back the bitmaps whose rows are exactly those that a compaction dropped; their sha256 tells."""
    mended = []
    for entry in index.tombstones:
        try:
            read_bitmap(objects, entry)
        except IntegrityError:
            with suppress(IntegrityError):  # the row numbers are damaged too
                mask = _dropped_rows(index, entry)
                if sha256(np.packbits(mask, bitorder="little").tobytes()) == entry.digest:
                    objects.delete(entry.key)
                    put_bitmap(objects, entry.number, mask, since=entry.since)
                    mended.append(f"{entry.key} was restored from the row numbers of the compacted codes")
    return mended


def _dropped_rows(index: Index, entry: Tombstones) -> np.ndarray:
    """bool (2^20,): which rows of a range have no code."""
    start, stop = entry.start, min(entry.start + RANGE_ROWS, index.rows)
    dropped = np.zeros(RANGE_ROWS, bool)
    dropped[: stop - start] = True
    for chunk in index.chunks_between(start, stop):
        rows = index.row_numbers(chunk)
        rows = np.arange(chunk.start, chunk.stop) if rows is None else rows
        dropped[rows[(rows >= start) & (rows < stop)] - start] = False
    return dropped


@dataclass(frozen=True)
class _Work:
    """A damaged segment of an index version; ``corpus`` only where codes have to be made again."""

    objects: Objects
    index: Index
    segment: IndexSegment
    faults: Sequence[Damage]
    corpus: Corpus | None

    def damaged(self, part: str) -> set[int]:
        return {fault.chunk for fault in self.faults if fault.part == part and fault.chunk is not None}


def _corpus_for(index: Index, segment: IndexSegment, faults: Sequence[Damage], url: str | None) -> Corpus | None:
    """The corpus that a segment was encoded from, None if no chunk of codes is lost."""
    lost = sorted(fault.chunk for fault in faults if fault.part == "codes" and fault.chunk is not None)
    if not lost:
        return None
    load_model(model_objects(index.url), index.model)
    where = f"{len(lost)} chunks of {index.url}/{segment.job.folder}/codes have to be encoded again"
    given, url = url, url or str(index.corpus.get("url"))
    try:
        corpus = open_corpus(url)
    except OchError as error:
        raise IntegrityError(
            f"{where}, but their corpus cannot be opened ({error}); bring it back, or name a copy of it with --corpus"
        ) from error
    for start, stop, digest in segment.inputs:
        if stop > corpus.rows or corpus.digest(start, stop) != digest:
            named = "" if given else ", and name it with --corpus"
            raise ConflictError(
                f"{where}, but rows {start}..{stop} of {corpus.url} are not the vectors that they were made from; "
                f"bring back the corpus as it was{named}"
            )
    return corpus


def _next_generation(work: _Work, context: Context, claims: ExitStack) -> IndexSegment:
    """The segment made again, checked, and claimed until it is published.

    A generation that an earlier repair left unfinished goes on; one that is itself damaged, or marked by 'och gc', is
    passed over.
    """
    old = work.segment.job
    for generation in range(old.generation + 1, old.generation + 1 + GENERATIONS):
        job = replace(old, generation=generation)
        _require_listed(work)
        try:
            check_unmarked(work.objects, [job])
            begin_job(work.objects, job)
        except (IntegrityError, ConflictError):
            continue
        try:
            _run(work, job, context)
            claims.enter_context(claimed(work.objects, [job]))
        except ConflictError:
            continue
        try:
            return _checked(work, job, context)
        except IncompleteError:  # records are gone: another repair may have published them
            _require_listed(work)
            raise
        except (IntegrityError, ConflictError):
            continue
    raise IntegrityError(
        f"{GENERATIONS} generations of job {old.id} in {work.objects.url} were begun, and each is damaged itself; "
        f"check the storage, remove them with 'och gc {work.objects.url} --job {old.id}', and repair again"
    )


def _require_listed(work: _Work) -> None:
    """Stop when the damaged segment is no part of the newest version any more: then nothing is left to be done."""
    if all(part.job != work.segment.job for part in open_version(work.objects.url).segments):
        raise ConflictError(f"{work.segment.job.folder} was replaced meanwhile; run 'och verify {work.objects.url}'")


@dataclass(frozen=True)
class RepairChunk:
    """One chunk of the new generation ``job``: taken over, or made again where ``lost`` names its codes or rows."""

    index: IndexRef
    segment: int
    job: Job
    chunk: int
    lost: tuple[str, ...]
    corpus: CorpusRef | None


def repair_chunk(task: RepairChunk) -> int:
    """Store one chunk, with its record, compared with the published checksums first; returns the number of codes."""
    index = task.index.open()
    segment = index.segments[task.segment]
    job, chunk, rows = segment.job, task.chunk, None
    if segment.row_digests is not None and "rows" in task.lost:
        rows = _derived_rows(index, segment, chunk)
    elif segment.row_digests is not None:
        rows = _kept(index, f"{job.folder}/rows", job.rows_spec, chunk, int(segment.row_digests[chunk]))[:, 0]
    stated = int(segment.digests[chunk])
    if "codes" in task.lost:
        codes = _encoded(task, segment, rows)
        _require_published(task, codes, stated)
    else:
        codes = _kept(index, f"{job.folder}/codes", job.spec, chunk, stated)
    ones = count_ones(codes, task.job.bits)
    write_codes(open_objects(index.url), task.job, task.chunk, codes, ones, task.job.input, rows=rows)
    return len(codes)


def _kept(index: Index, prefix: str, spec: ArraySpec, chunk: int, stated: int) -> np.ndarray:
    """The rows (m, width) of a chunk that is as it was published."""
    found = find_chunk(index.objects, prefix, chunk, stated=stated, nbytes=spec.stored_bytes)
    if found.fault is not None:
        raise IntegrityError(
            f"chunk {chunk} of {index.url}/{prefix} {found.fault} by now; run 'och verify --repair' again"
        )
    return found.rows(spec, chunk)


def _derived_rows(index: Index, segment: IndexSegment, chunk: int) -> np.ndarray:
    """Row numbers (m,) int64 of the codes of a compacted chunk: those that some version had not deleted."""
    assert segment.row_digests is not None
    start, stop = segment.bounds(chunk)
    low, high = segment.job.rows_spec.bounds(chunk)
    candidates = [np.arange(start, stop)]
    for number in reversed(version_numbers(index.objects)):
        with suppress(OchError):  # a damaged version or bitmap tells nothing
            deleted = open_version(index.url, number).deleted(start, stop)
            candidates.append(np.arange(start, stop) if deleted is None else start + np.flatnonzero(~deleted))
    for rows in candidates:
        known = len(rows) == high - low
        if known and plain_crc(rows.astype("<i8"), segment.job.rows_spec) == segment.row_digests[chunk]:
            return rows.astype("<i8")
    raise IntegrityError(
        f"chunk {chunk} of {index.url}/{segment.job.folder}/rows is lost, and no version tells any more which rows it "
        "held; restore it from a copy, or encode the corpus into another index"
    )


def _encoded(task: RepairChunk, segment: IndexSegment, rows: np.ndarray | None) -> np.ndarray:
    """Codes (m, bytes) of a chunk from the vectors, one stored block of these at a time."""
    assert task.corpus is not None  # opened before any chunk is begun
    corpus = task.corpus.open()
    hasher = model_on_worker(model_objects(task.index.url).url, task.job.model)
    start, stop = segment.bounds(task.chunk)
    codes = np.empty((stop - start if rows is None else len(rows), task.job.spec.width), np.uint8)
    try:
        if rows is None:
            for first, block in corpus.blocks(start, stop):
                codes[first - start : first - start + len(block)] = hasher.encode_block(block, first_row=first)
        else:
            for places, block in corpus.vectors_at(rows):
                codes[places] = hasher.encode_block(block, first_row=int(rows[places[0]]))
    except IntegrityError as error:
        raise IntegrityError(
            f"rows {start}..{stop} cannot be encoded again, because their vectors are damaged too ({error}); restore "
            f"{corpus.url} from a copy, or ingest it anew from its sources, and repair again with --corpus"
        ) from error
    return codes


def _require_published(task: RepairChunk, codes: np.ndarray, stated: int) -> None:
    if plain_crc(codes, task.job.spec) != stated:
        raise IntegrityError(
            f"chunk {task.chunk} of {task.job.folder}/codes was made again and is not the one that was published, so "
            "it was not stored: corpus or model are not what they were, or this package encodes otherwise; restore "
            "the chunk from a copy"
        )


def _run(work: _Work, job: Job, context: Context) -> None:
    """Store the chunks that have no record yet."""
    if work.corpus is not None:
        room = 3 * job.chunk_rows * (job.spec.width + 8)
        require_room(work.corpus, context, f"encoding a chunk of {job.chunk_rows} codes again", extra_bytes=room)
    done, lost = done_chunks(work.objects, job), {part: work.damaged(part) for part in ("codes", "rows")}
    tasks = [
        RepairChunk(
            work.index.ref,
            work.index.segments.index(work.segment),
            job,
            chunk,
            tuple(part for part, chunks in lost.items() if chunk in chunks),
            None if work.corpus is None else work.corpus.ref,
        )
        for chunk in range(job.spec.n_chunks)
        if chunk not in done
    ]
    advance = context.progress("repair", len(tasks))
    map_tasks(repair_chunk, tasks, client=context.client, name="repair_chunk", advance=advance)


def _checked(work: _Work, job: Job, context: Context) -> IndexSegment:
    """The new generation as a segment, after its stored chunks were compared with their records and the manifest."""
    published = work.segment
    made = checked_segment(work.objects, replace(published, job=job), context)
    same = np.array_equal(made.digests, published.digests)
    if published.row_digests is not None and made.row_digests is not None:
        same = same and np.array_equal(made.row_digests, published.row_digests)
    if not same:
        raise IntegrityError(f"{job.folder} does not hold what was published; run 'och verify --repair' again")
    return made


def _replaced(made: dict[Job, IndexSegment], current: Index) -> Index:
    """The next version lists the new generations, beside what was appended or deleted meanwhile.

    A damaged segment that is not listed any more is left alone: another repair was faster, or the index was made anew.
    """
    waiting = [part.job for part in current.segments if part.job in made]
    if not waiting:
        return current
    check_unmarked(current.objects, [made[job].job for job in waiting])
    segments = tuple(made.get(part.job, part) for part in current.segments)
    return next_version(current, segments, current.corpus, current.url)
