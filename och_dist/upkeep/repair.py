"""Mend an index: what is damaged is made again from what is not, and must come out with the published checksums.

A damaged segment is never written to. Its next generation takes over every chunk that is as it was published and
encodes the others again from the corpus; a new version lists it in place of the damaged one. The announcement of a job
and a bitmap of deleted rows are restored where they lie, for their exact bytes are known: the manifest holds the one,
and the sha256 of the other is in its name. Bucket tables are removed, because they can be made again.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from och_dist.encode import check_unmarked, checked_segment, claimed, clear_leftovers, run_job
from och_dist.errors import BadInputError, ConflictError, IncompleteError, IntegrityError, OchError
from och_dist.kernels.packing import count_ones
from och_dist.stage import Context, require_room
from och_dist.store import (
    RANGE_ROWS,
    TABLES,
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
    load_model,
    model_objects,
    model_on_worker,
    next_version,
    open_corpus,
    open_version,
    plain_crc,
    put_bitmap,
    read_bitmap,
    read_job,
    read_plain_chunk,
    remove_tables,
    seal,
    sha256,
    version_numbers,
    write_codes,
)
from och_dist.upkeep.integrity import ANNOUNCEMENT, Scan

GENERATIONS = 20
PARTS = ("codes", "rows", "ones")


def repair_index(index: Index, scan: Scan, *, corpus: str | None, context: Context) -> tuple[list[str], list[str]]:
    """Mend what can be mended of the newest version of an index, and publish it; running it again goes on.

    Returns what was mended, and why the rest was not, each in a sentence.
    """
    objects = index.objects
    objects.require_put_if_absent()
    mended = [*_restore_announcements(objects, scan), *_restore_bitmaps(objects, index)]
    mended += _remove_tables(objects, scan)
    failed: list[str] = []
    made: dict[Job, IndexSegment] = {}
    with ExitStack() as claims:
        for segment in index.segments:
            faults = [fault for fault in scan.damage if fault.folder == segment.folder]
            lost = {part: {fault.chunk for fault in faults if fault.part == part} for part in PARTS}
            if not any(lost.values()):
                continue
            try:
                vectors = _corpus_for(index, segment, len(lost["codes"] - {None}), corpus)
                made[segment.job] = _next_generation(_DamagedSegment(index, segment, lost, vectors), context, claims)
            except (IntegrityError, ConflictError, BadInputError) as error:
                failed.append(str(error))
        published = commit(objects, open_version, partial(_replaced, made))[1]
    jobs = [segment.job for segment in made.values()]
    for job in (part.job for part in published.segments if part.job in jobs):
        clear_leftovers(objects, job)
        mended.append(f"job {job.id} is in version {published.version} as generation {job.generation}")
    return mended, failed


def _restore_announcements(objects: Objects, scan: Scan) -> list[str]:
    """Put the job.json of published segments as their manifests have them."""
    mended = []
    damaged = {damage.folder for damage in scan.damage if damage.part == ANNOUNCEMENT}
    jobs = {part.job for index in scan.indexes for part in index.segments if part.folder in damaged}
    for job in sorted(jobs, key=lambda job: job.folder):
        with suppress(IntegrityError):
            if read_job(objects, job.folder) == job:  # restored by another repair
                continue
        objects.delete(f"{job.folder}/{ANNOUNCEMENT}")
        objects.put(f"{job.folder}/{ANNOUNCEMENT}", seal(job.to_json()))
        mended.append(f"{job.folder}/{ANNOUNCEMENT} was restored from the manifest")
    return mended


def _remove_tables(objects: Objects, scan: Scan) -> list[str]:
    folders = sorted({damage.folder for damage in scan.damage if damage.part == TABLES})
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
        rows = index.all_row_numbers(chunk)
        dropped[rows[(rows >= start) & (rows < stop)] - start] = False
    return dropped


@dataclass(frozen=True)
class _DamagedSegment:
    """A damaged segment of an index version, the chunks that are lost of each part (None: its metadata), and the
    corpus where codes have to be made again."""

    index: Index
    segment: IndexSegment
    lost: dict[str, set[int | None]]
    corpus: Corpus | None


def _corpus_for(index: Index, segment: IndexSegment, lost: int, url: str | None) -> Corpus | None:
    """The corpus that a segment was encoded from, None if no chunk of codes is lost."""
    if not lost:
        return None
    load_model(model_objects(index.url), index.model)
    where = f"{lost} chunks of {index.url}/{segment.folder}/codes have to be encoded again"
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


def _next_generation(damaged: _DamagedSegment, context: Context, claims: ExitStack) -> IndexSegment:
    """The segment made again, checked, and claimed until it is published.

    A generation that an earlier repair left unfinished goes on; one that is itself damaged, or marked by 'och gc', is
    passed over.
    """
    objects, old = damaged.index.objects, damaged.segment.job
    for generation in range(old.generation + 1, old.generation + 1 + GENERATIONS):
        job = replace(old, generation=generation)
        _require_listed(damaged)
        try:
            check_unmarked(objects, [job])
            begin_job(objects, job)
        except (IntegrityError, ConflictError):
            continue
        try:
            _store_chunks(damaged, job, context)
            claims.enter_context(claimed(objects, [job]))
        except ConflictError:
            continue
        try:
            return _checked(damaged, job, context)
        except IncompleteError:  # records are gone: another repair may have published them
            _require_listed(damaged)
            raise
    raise IntegrityError(
        f"{GENERATIONS} generations of job {old.id} in {damaged.index.url} were begun, and each is damaged itself; "
        f"check the storage, remove them with 'och gc {damaged.index.url} --job {old.id}', and repair again"
    )


def _require_listed(damaged: _DamagedSegment) -> None:
    """Stop when the damaged segment is no part of the newest version any more: then nothing is left to be done."""
    if all(part.job != damaged.segment.job for part in open_version(damaged.index.url).segments):
        raise ConflictError(f"{damaged.segment.folder} was replaced meanwhile; run 'och verify {damaged.index.url}'")


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
    index, chunk, rows = task.index.open(), task.chunk, None
    segment = index.segments[task.segment]
    job, stated = segment.job, int(segment.digests[chunk])
    read = partial(read_plain_chunk, index.objects, chunk=chunk)
    if segment.row_digests is not None and "rows" in task.lost:
        rows = _derived_rows(index, segment, chunk)
    elif segment.row_digests is not None:
        rows = read(f"{job.folder}/rows", job.rows_spec, stated=int(segment.row_digests[chunk]))[:, 0]
    if "codes" not in task.lost:
        codes = read(f"{job.folder}/codes", job.spec, stated=stated)
    else:
        codes = _encoded(task, np.arange(*segment.bounds(chunk)) if rows is None else rows)
        if plain_crc(codes, job.spec) != stated:
            raise IntegrityError(
                f"chunk {chunk} of {task.job.folder}/codes was made again and is not the one that was published, so "
                "it was not stored: corpus or model are not what they were, or this package encodes otherwise; "
                "restore the chunk from a copy"
            )
    write_codes(index.objects, task.job, chunk, codes, count_ones(codes, job.bits), job.input, rows=rows)
    return len(codes)


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
        f"chunk {chunk} of {index.url}/{segment.folder}/rows is lost, and no version tells any more which rows it "
        "held; restore it from a copy, or encode the corpus into another index"
    )


def _encoded(task: RepairChunk, rows: np.ndarray) -> np.ndarray:
    """Codes (m, bytes) of ``rows`` (m,) from their vectors, one stored block of these at a time."""
    assert task.corpus is not None  # opened before any chunk is begun
    corpus = task.corpus.open()
    hasher = model_on_worker(model_objects(task.index.url).url, task.job.model)
    codes = np.empty((len(rows), task.job.spec.width), np.uint8)
    try:
        for places, block in corpus.vectors_at(rows):
            codes[places] = hasher.encode_block(block, first_row=int(rows[places[0]]))
    except IntegrityError as error:
        raise IntegrityError(
            f"rows {rows[0]}..{rows[-1] + 1} cannot be encoded again, because their vectors are damaged too ({error}); "
            f"restore {corpus.url} from a copy, or ingest it anew from its sources, and repair again with --corpus"
        ) from error
    return codes


def _store_chunks(damaged: _DamagedSegment, job: Job, context: Context) -> None:
    """Store the chunks that have no record yet."""
    index, corpus = damaged.index, damaged.corpus
    if corpus is not None:
        room = 3 * job.chunk_rows * (job.spec.width + 8)
        require_room(corpus, context, f"encoding a chunk of {job.chunk_rows} codes again", extra_bytes=room)
    number, vectors = index.segments.index(damaged.segment), None if corpus is None else corpus.ref

    def task_of(chunk: int) -> RepairChunk:
        lost = tuple(part for part, chunks in damaged.lost.items() if chunk in chunks)
        return RepairChunk(index.ref, number, job, chunk, lost, vectors)

    run_job(index.objects, replace(damaged.segment, job=job), repair_chunk, task_of, context, verb="repair")


def _checked(damaged: _DamagedSegment, job: Job, context: Context) -> IndexSegment:
    """The new generation as a segment, after its stored chunks were compared with their records and the manifest."""
    published = replace(damaged.segment, job=job)
    made = checked_segment(damaged.index.objects, published, context)
    if made.to_json() != published.to_json():
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
