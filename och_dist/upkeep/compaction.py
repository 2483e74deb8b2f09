"""Merge the segments of an index into one with full chunks, without the codes of deleted rows. Row numbers stay.

The work has a place of its own, named by what it merges and what it drops, so it goes on after a kill; it is published
as the next version after the same checks as an encoding, and older versions stay as they are until 'och gc'.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import numpy as np

from och_dist import store
from och_dist.cluster import check_memory
from och_dist.encode import checked_segment, clear_leftovers, publish_segments, run_job
from och_dist.errors import ConflictError, IntegrityError
from och_dist.options import Option, checked
from och_dist.stage import WORKING_BYTES, Context, Report, Stopwatch
from och_dist.store import CodeChunk, Index, IndexRef, IndexSegment, Job


def compact_chunk(source: IndexRef, job: Job, chunk: CodeChunk) -> int:
    """Gather the codes of one chunk and store them, with their row numbers where some are missing; returns how many."""
    codes, rows = live_codes(source.open(), chunk.start, chunk.stop)
    low, high = job.spec.bounds(chunk.number)
    if len(rows) != high - low:
        raise IntegrityError(
            f"rows {chunk.start}..{chunk.stop} of {source.url} have {len(rows)} codes, expected {high - low}; "
            f"run 'och verify {source.url}'"
        )
    job.write(store.open_objects(source.url), chunk.number, codes, job.input, rows=None if job.whole else rows)
    return len(rows)


def live_codes(index: Index, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes (m, bytes) and global rows (m,) int64 of what is not deleted among rows [start, stop)."""
    codes = [np.empty((0, -(-index.bits // 8)), np.uint8)]
    rows = [np.empty(0, np.int64)]
    for chunk in index.chunks_between(start, stop):
        numbers, deleted = index.all_row_numbers(chunk), index.deleted(chunk.start, chunk.stop)
        wanted = (numbers >= start) & (numbers < stop)
        if deleted is not None:
            wanted &= ~deleted[numbers - chunk.start]
        codes.append(index.read(chunk)[wanted])
        rows.append(numbers[wanted])
    return np.concatenate(codes), np.concatenate(rows)


@checked
def compact(
    index: str,
    *,
    chunk_rows: Annotated[int | None, Option("Rows per chunk of codes [default: 65536].", at_least=1)] = None,
    context: Context | None = None,
) -> Report:
    """Merge all segments of ``index`` into one, chunk by chunk on the workers, and publish it as the next version."""
    watch, context = Stopwatch("compact"), context or Context()
    before = store.open_version(index)
    rows = min(chunk_rows or store.CHUNK_ROWS, max(1, before.live_rows))
    chunk_sizes = [segment.job.chunk_rows for segment in before.segments]
    if chunk_sizes == [rows] and before.stored_rows == before.live_rows:
        return watch.report("nothing to do", **_facts(before, before))
    objects, draft = store.open_objects(index), _draft(before, rows)
    job, merged = draft.job, [segment.job.id for segment in before.segments]  # a repair changes the generation alone
    objects.require_put_if_absent()
    job.begin(objects)
    room = 4 * (rows + max(chunk_sizes)) * (job.spec.width + 8) + WORKING_BYTES
    check_memory(context.client, room, f"merging a chunk of {rows} codes")
    run_job(objects, draft, partial(compact_chunk, before.ref, job), context, verb="compact")

    def replaced(current: Index | None) -> Index:
        """The next version; what was appended or deleted meanwhile is kept."""
        jobs = [] if current is None else [segment.job.id for segment in current.segments]
        if current is not None and job.id in jobs:
            return current
        if current is None or jobs[: len(merged)] != merged:
            raise ConflictError(
                f"{objects.url} was encoded anew or compacted otherwise meanwhile, and nothing was published; "
                "run 'och compact' again"
            )
        segments = (checked_segment(objects, draft, context), *current.segments[len(merged) :])
        return store.next_version(current, segments, current.corpus, objects.url)

    after = publish_segments(objects, [job], replaced)
    clear_leftovers(objects, job)
    return watch.report(**_facts(before, after), job=job.id)


def _facts(before: Index, after: Index) -> dict[str, Any]:
    return {
        "index": after.url,
        "version": after.version,
        "rows": after.rows,
        "live_rows": after.live_rows,
        "segments_before": len(before.segments),
        "segments": len(after.segments),
        "dropped": before.stored_rows - sum(s.job.stored_rows for s in after.segments if s.start < before.rows),
        "bytes_before": before.nbytes,
        "bytes": after.nbytes,
    }


def _draft(index: Index, chunk_rows: int) -> IndexSegment:
    """What is to be made of an index version. Its job is known by every code that goes into it and every row that
    does not."""
    job = Job(index.model, index.bits, 0, index.rows, chunk_rows, compaction_input(index), kept=index.live_rows)
    sources = tuple(source for segment in index.segments for source in segment.inputs)
    return IndexSegment(job, sources=sources, starts=None if job.whole else chunk_starts(index, chunk_rows))


def compaction_input(index: Index) -> str:
    """What a compaction of this version would be made from: a job with another input does not belong to it."""
    merged = [[s.job.id, s.job.generation, store.pack_numbers(s.digests)] for s in index.segments]
    gone = [entry.to_json() for entry in index.tombstones]
    return store.sha256(store.canonical({"compaction": merged, "tombstones": gone}))


def chunk_starts(index: Index, chunk_rows: int) -> np.ndarray:
    """(chunks,) int64: 0, and the global row of every ``chunk_rows``-th row that is not deleted."""
    starts = np.zeros(-(-index.live_rows // chunk_rows), np.int64)
    seen, chunk = 0, 1
    for number, low, stop in store.row_ranges(index.rows):  # one bitmap at a time
        high = min(stop, index.rows)
        live = high - low - index.deleted_in(number)
        last = min(-(-(seen + live) // chunk_rows), len(starts))  # chunks that begin before the end of this range
        if chunk < last:
            places = np.arange(chunk, last) * chunk_rows - seen
            deleted = index.deleted(low, high)
            starts[chunk:last] = low + (places if deleted is None else np.flatnonzero(~deleted)[places])
            chunk = last
        seen += live
    return starts
