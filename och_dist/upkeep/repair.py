"""Mend an index: what is damaged is made again from what is not, and must come out with the published checksums.

A damaged segment is never written to. Its next generation takes over every chunk that is as it was published and
encodes the others again from the corpus; a new version lists it in place of the damaged one. The announcement of a job
and a bitmap of deleted rows are restored where they lie, for their exact bytes are known: the manifest holds the one,
and the sha256 of the other is in its name. Bucket tables are removed, because they can be made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from och_dist import store
from och_dist.encode import check_unmarked, checked_segment, claimed, clear_leftovers, publish_segments, run_job
from och_dist.errors import BadInputError, ConflictError, IncompleteError, IntegrityError, OchError
from och_dist.stage import Context, require_room
from och_dist.store import (
    ArraySpec,
    CodeChunk,
    Corpus,
    CorpusRef,
    Index,
    IndexRef,
    IndexSegment,
    Job,
    Objects,
    Tombstones,
)

if TYPE_CHECKING:
    from och_dist.upkeep.verification import Scan

GENERATIONS = 20
PARTS = ("codes", "rows", "ones")


def repair_index(index: Index, scan: Scan, *, corpus: str | None, context: Context) -> tuple[list[str], list[str]]:
    """Mend what can be mended of the newest version of an index, and publish it; running it again goes on.

    Returns what was mended, and why the rest was not, each in a sentence.
    """
    objects = index.objects
    objects.require_put_if_absent()
    mended = [*_restore_announcements(objects, scan), *_restore_bitmaps(objects, index), *_remove_tables(objects, scan)]
    failed: list[str] = []
    made: dict[Job, IndexSegment] = {}
    with ExitStack() as claims:
        for segment in index.segments:
            faults = [fault for fault in scan.damage if fault.folder == segment.folder and fault.part in PARTS]
            if not faults:
                continue
            lost = {fault.chunk for fault in faults if fault.part == "codes" and fault.chunk is not None}
            try:
                vectors = _corpus_for(index, segment, len(lost), corpus) if lost else None
                made[segment.job] = _next_generation(index, segment, vectors, context, claims)
            except (IntegrityError, ConflictError, BadInputError) as error:
                failed.append(str(error))
        published = publish_segments(objects, (), partial(_replaced, made))
    jobs = [segment.job for segment in made.values()]
    for job in (part.job for part in published.segments if part.job in jobs):
        clear_leftovers(objects, job)
        mended.append(f"job {job.id} is in version {published.version} as generation {job.generation}")
    return mended, failed


def _restore_announcements(objects: Objects, scan: Scan) -> Iterator[str]:
    """Put the job.json of published segments as their manifests have them."""
    damaged = {damage.folder for damage in scan.damage if damage.part == store.ANNOUNCEMENT}
    jobs = {part.job for index in scan.indexes for part in index.segments if part.folder in damaged}
    for job in sorted(jobs, key=lambda job: job.folder):
        with suppress(IntegrityError):
            if Job.read(objects, job.folder) == job:  # restored by another repair
                continue
        key = f"{job.folder}/{store.ANNOUNCEMENT}"
        objects.delete(key)
        objects.put(key, store.seal(job.to_json()))
        yield f"{key} was restored from the manifest"


def _remove_tables(objects: Objects, scan: Scan) -> Iterator[str]:
    for folder in sorted({damage.folder for damage in scan.damage if damage.part == store.TABLES}):
        store.remove_tables(objects, [folder])
        yield f"the bucket tables of {folder} were removed: make them again with 'och tables {objects.url}'"


def _restore_bitmaps(objects: Objects, index: Index) -> Iterator[str]:
    """Put back the bitmaps whose rows are exactly those that a compaction dropped; their sha256 tells."""
    for entry in index.tombstones:
        try:
            store.read_bitmap(objects, entry)
        except IntegrityError:
            with suppress(IntegrityError):  # the row numbers are damaged too
                mask = _dropped_rows(index, entry)
                if store.sha256(np.packbits(mask, bitorder="little").tobytes()) == entry.digest:
                    objects.delete(entry.key)
                    store.put_bitmap(objects, entry.number, mask, since=entry.since)
                    yield f"{entry.key} was restored from the row numbers of the compacted codes"


def _dropped_rows(index: Index, entry: Tombstones) -> np.ndarray:
    """bool (2^20,): which rows of a range have no code."""
    start, stop = entry.start, min(entry.stop, index.rows)
    dropped = np.arange(entry.start, entry.stop) < stop
    for chunk in index.chunks_between(start, stop):
        rows = index.all_row_numbers(chunk)
        dropped[rows[(rows >= start) & (rows < stop)] - start] = False
    return dropped


def _corpus_for(index: Index, segment: IndexSegment, lost: int, url: str | None) -> Corpus:
    """The corpus that a segment was encoded from, of which so many chunks of codes are ``lost``."""
    store.load_model(store.model_objects(index.url), index.model)
    where = f"{lost} chunks of {index.url}/{segment.folder}/codes have to be encoded again"
    given, url = url, url or str(index.corpus.get("url"))
    try:
        corpus = store.open_corpus(url)
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


def _next_generation(
    index: Index, damaged: IndexSegment, corpus: Corpus | None, context: Context, claims: ExitStack
) -> IndexSegment:
    """The segment made again, from the ``corpus`` where codes are lost, checked, and claimed until it is published.

    A generation that an earlier repair left unfinished goes on; one that is itself damaged, or marked by 'och gc', is
    passed over.
    """
    objects, old = index.objects, damaged.job
    if corpus is not None:
        room = 3 * old.chunk_rows * (old.spec.width + 8)
        require_room(corpus, context, f"encoding a chunk of {old.chunk_rows} codes again", extra_bytes=room)
    for generation in range(old.generation + 1, old.generation + 1 + GENERATIONS):
        draft = replace(damaged, job=replace(old, generation=generation))
        _require_listed(index, old)
        try:
            check_unmarked(objects, [draft.job])
            draft.job.begin(objects)
        except (IntegrityError, ConflictError):
            continue
        vectors = None if corpus is None else corpus.ref
        remake = partial(repair_chunk, index.ref, index.segments.index(damaged), draft.job, vectors)
        try:
            run_job(objects, draft, remake, context, verb="repair")
            claims.enter_context(claimed(objects, [draft.job]))
        except ConflictError:
            continue
        try:
            made = checked_segment(objects, draft, context)
        except IncompleteError:  # records are gone: another repair may have published them
            _require_listed(index, old)
            raise
        if made.to_json() != draft.to_json():
            raise IntegrityError(f"{draft.folder} does not hold what was published; run 'och verify --repair' again")
        return made
    raise IntegrityError(
        f"{GENERATIONS} generations of job {old.id} in {index.url} were begun, and each is damaged itself; "
        f"check the storage, remove them with 'och gc {index.url} --job {old.id}', and repair again"
    )


def _require_listed(index: Index, job: Job) -> None:
    """Stop when the damaged segment is no part of the newest version any more: then nothing is left to be done."""
    if all(part.job != job for part in store.open_version(index.url).segments):
        raise ConflictError(f"{job.folder} was replaced meanwhile; run 'och verify {index.url}'")


def repair_chunk(source: IndexRef, place: int, job: Job, corpus: CorpusRef | None, chunk: CodeChunk) -> int:
    """Store one chunk of segment ``place`` in the new generation ``job``, with its record; returns the number of codes.

    What is as it was published is taken over; the rest is made again, and compared with the published checksums.
    """
    index = source.open()
    segment, rows = index.segments[place], None
    if segment.row_digests is not None:
        found = _as_published(index, segment, "rows", job.rows_spec, chunk, int(segment.row_digests[chunk.number]))
        rows = _derived_rows(index, segment, chunk) if found is None else found[:, 0]
    stated = int(segment.digests[chunk.number])
    codes = _as_published(index, segment, "codes", job.spec, chunk, stated)
    if codes is None:
        if corpus is None:
            raise IntegrityError(
                f"chunk {chunk.number} of {segment.folder}/codes was damaged meanwhile; run 'och verify --repair' again"
            )
        codes = _encoded(index, job, corpus, np.arange(chunk.start, chunk.stop) if rows is None else rows)
        if store.plain_crc(codes, job.spec) != stated:
            raise IntegrityError(
                f"chunk {chunk.number} of {job.folder}/codes was made again and is not the one that was published, so "
                "it was not stored: corpus or model are not what they were, or this package encodes otherwise; "
                "restore the chunk from a copy"
            )
    job.write(index.objects, chunk.number, codes, job.input, rows=rows)
    return len(codes)


def _as_published(
    index: Index,
    segment: IndexSegment,
    part: str,
    spec: ArraySpec,
    chunk: CodeChunk,
    stated: int,
) -> np.ndarray | None:
    """A chunk (m, width) of the damaged segment, None if it is not the one that was published."""
    prefix = f"{segment.folder}/{part}"
    found = store.find_chunk(index.objects, prefix, chunk.number, stated=stated, nbytes=spec.stored_bytes)
    return found.rows(spec, chunk.number) if found.fault is None else None


def _derived_rows(index: Index, segment: IndexSegment, chunk: CodeChunk) -> np.ndarray:
    """Row numbers (m,) int64 of the codes of a compacted chunk: those that some version had not deleted."""
    assert segment.row_digests is not None
    every, spec = np.arange(chunk.start, chunk.stop, dtype="<i8"), segment.job.rows_spec
    low, high = spec.bounds(chunk.number)
    candidates = [every]
    for number in reversed(store.version_numbers(index.objects)):
        with suppress(OchError):  # a damaged version or bitmap tells nothing
            deleted = store.open_version(index.url, number).deleted(chunk.start, chunk.stop)
            candidates.append(every if deleted is None else every[~deleted])
    for rows in candidates:
        if len(rows) == high - low and store.plain_crc(rows, spec) == segment.row_digests[chunk.number]:
            return rows
    raise IntegrityError(
        f"chunk {chunk.number} of {index.url}/{segment.folder}/rows is lost, and no version tells any more which rows "
        "it held; restore it from a copy, or encode the corpus into another index"
    )


def _encoded(index: Index, job: Job, source: CorpusRef, rows: np.ndarray) -> np.ndarray:
    """Codes (m, bytes) of ``rows`` (m,) from their vectors, one stored block of these at a time."""
    corpus = source.open()
    hasher = store.model_on_worker(store.model_objects(index.url).url, job.model)
    codes = np.empty((len(rows), job.spec.width), np.uint8)
    try:
        for places, block in corpus.vectors_at(rows):
            codes[places] = hasher.encode_block(block, first_row=int(rows[places[0]]))
    except IntegrityError as error:
        raise IntegrityError(
            f"rows {rows[0]}..{rows[-1] + 1} cannot be encoded again, because their vectors are damaged too ({error}); "
            f"restore {corpus.url} from a copy, or ingest it anew from its sources, and repair again with --corpus"
        ) from error
    return codes


def _replaced(made: dict[Job, IndexSegment], current: Index | None) -> Index:
    """The next version lists the new generations, beside what was appended or deleted meanwhile.

    A damaged segment that is not listed any more is left alone: another repair was faster, or the index was made anew.
    """
    if current is None:
        raise BadInputError("the index was removed while it was repaired; bring it back from a copy and repair that")
    if not any(part.job in made for part in current.segments):
        return current
    segments = tuple(made.get(part.job, part) for part in current.segments)
    return store.next_version(current, segments, current.corpus, current.url)
