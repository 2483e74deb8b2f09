"""Make a finished job visible: check every chunk against its record on the workers, then commit one manifest."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np

from och_dist.cluster import map_tasks
from och_dist.errors import ConflictError, IncompleteError, IntegrityError, UsageError
from och_dist.kernels.packing import count_ones
from och_dist.options import Jobs, Option, checked
from och_dist.stage import Context, Report, Stopwatch
from och_dist.store import (
    ArraySpec,
    Corpus,
    Index,
    IndexSegment,
    Job,
    Objects,
    commit,
    create_array,
    done_chunks,
    find_chunk,
    find_index,
    list_jobs,
    load_model,
    model_objects,
    next_version,
    open_corpus,
    open_objects,
    record_key,
    version_numbers,
    write_chunk,
)

CHUNKS_PER_CHECK = 8
CHECKED_HERE = 2 << 20
"""Bytes of codes that are read and checked before a task would have been to a worker and back."""

COLLECTED = "collected.json"
CLAIMS = "publishing"


@dataclass(frozen=True)
class CheckFinished:
    """Finished chunks of a job, each as (chunk, start, stop) with the global rows that it stands for."""

    index: str
    job: Job
    chunks: tuple[tuple[int, int, int], ...]


def check_finished(task: CheckFinished) -> list[CheckedChunk]:
    """What is known of chunks whose stored bytes equal their records."""
    objects = open_objects(task.index)
    return [check_chunk(objects, task.job, *chunk) for chunk in task.chunks]


class CheckedChunk(NamedTuple):
    """crc32c of the codes and of the row numbers (0 without any) of a chunk, and its set bits (bits,)."""

    crc: int
    rows_crc: int
    ones: np.ndarray


def check_chunk(objects: Objects, job: Job, chunk: int, start: int, stop: int) -> CheckedChunk:
    """Read a chunk again, and compare it with its record; row numbers must ascend inside [start, stop)."""
    where, remedy = chunk_and_remedy(objects, job, chunk)
    record = read_record(objects, job, chunk)
    codes = _checked(objects, f"{job.folder}/codes", job.spec, chunk, record.crc, where, remedy)
    if not np.array_equal(record.ones, count_ones(codes, job.bits)):
        raise IntegrityError(f"the set bits of {where} are not those of its record; {remedy}")
    if not job.whole:
        what = f"the array of row numbers of {where}"
        rows = _checked(objects, f"{job.folder}/rows", job.rows_spec, chunk, record.rows_crc, what, remedy)[:, 0]
        if rows[0] < start or rows[-1] >= stop or np.any(rows[1:] <= rows[:-1]):
            raise IntegrityError(f"the row numbers of {where} do not ascend from {start} to {stop}; {remedy}")
    return record


def _checked(
    objects: Objects, prefix: str, spec: ArraySpec, chunk: int, stated: int, where: str, remedy: str
) -> np.ndarray:
    found = find_chunk(objects, prefix, chunk, stated=stated, nbytes=spec.stored_bytes, known="of its record")
    if found.fault is not None:
        raise IntegrityError(f"{where} {found.fault}; {remedy}")
    return found.rows(spec, chunk)


def read_record(objects: Objects, job: Job, chunk: int) -> CheckedChunk:
    """The record of a finished chunk."""
    where, remedy = chunk_and_remedy(objects, job, chunk)
    try:
        record = dict(json.loads(objects.get(record_key(job, chunk))))
        rows_crc = 0 if job.whole else int(record["rows_crc"])
        found = CheckedChunk(int(record["crc"]), rows_crc, np.array(record["ones"], "<i8"))
        if record["chunk"] != chunk or found.ones.shape != (job.bits,) or record["nbytes"] != job.spec.stored_bytes:
            raise ValueError("it belongs elsewhere")
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"the record of {where} is damaged ({error}); {remedy}") from None
    return found


def chunk_and_remedy(objects: Objects, job: Job, chunk: int) -> tuple[str, str]:
    """How to call a chunk, and what to do about it."""
    again = "encode again" if job.kept is None else "compact again"
    again = f"remove the job with 'och gc {objects.url} --job {job.id}' and {again}"
    if job.generation:
        again = f"run 'och verify {objects.url} --repair' again, which begins the next generation of it"
    remedy = f"nothing was published; {again}"
    return f"chunk {chunk} of job {job.id} in {objects.url}", remedy


@checked
def publish(
    index: str,
    job: str,
    *,
    corpus: Annotated[str, Option("The corpus that the job encoded.")],
    context: Context | None = None,
) -> Report:
    """Publish a finished job by its id; publishing it again changes nothing."""
    watch, context = Stopwatch("publish"), context or Context()
    objects = open_objects(index)
    jobs = {job.id: job for job in sorted(list_jobs(objects), key=lambda job: -job.generation)}  # not that of a repair
    if job not in jobs:
        known = ", ".join(sorted(jobs)) or "none"
        raise UsageError(f"{index} has no job {job!r}; jobs there: {known}")
    if jobs[job].kept is not None:
        raise UsageError(f"job {job} is a compaction; run 'och compact {index}', which goes on and publishes it")
    before = find_index(index)
    published = publish_jobs(index, [jobs[job]], _corpus_of(corpus, jobs[job]), context)
    same = before is not None and before.version == published.version
    return watch.report(
        "nothing to do" if same else "done",
        index=objects.url,
        job=job,
        version=published.version,
        rows=published.rows,
    )


@checked
def publish_new(index: str, corpus: str, *, jobs: Jobs, context: Context | None = None) -> Report:
    """Publish finished jobs of adjoining rows, as 'encode' reported them, in one version; none is nothing to do."""
    watch, context = Stopwatch("publish"), context or Context()
    found, before = named_jobs(open_objects(index), jobs), find_index(index)
    published = publish_jobs(index, found, _corpus_of(corpus, found[-1]), context) if found else before
    same = published is None or (before is not None and before.version == published.version)
    return watch.report(
        "nothing to do" if same else "done",
        index=open_objects(index).url,
        jobs=[job.id for job in found],
        version=published.version if published else None,
        rows=published.rows if published else 0,
    )


def named_jobs(objects: Objects, names: Sequence[str]) -> list[Job]:
    """The encodings with these ids, in order of their rows."""
    known = {job.id: job for job in list_jobs(objects) if job.kept is None and not job.generation}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"{objects.url} has no job {unknown[0]!r}; jobs there: {', '.join(sorted(known)) or 'none'}")
    return sorted((known[name] for name in names), key=lambda job: job.start)


def _corpus_of(url: str, job: Job) -> Corpus:
    """The first version of a corpus that has all rows of a job; they must be the ones that the job encoded."""
    numbers = version_numbers(open_objects(url))
    for corpus in (open_corpus(url, number) for number in numbers or [0]):
        if corpus.rows >= job.stop and corpus.digest(job.start, job.stop) == job.input:
            return corpus
    raise ConflictError(f"job {job.id} did not encode rows {job.start}..{job.stop} of {url}; name the corpus it read")


def publish_jobs(index: str, jobs: Sequence[Job], corpus: Corpus, context: Context) -> Index:
    """Check finished jobs of adjoining rows, and commit the version that lists them; again is fine."""
    objects = open_objects(index)
    pending = not_held(find_index(index), jobs)
    about: dict[str, Any] = {"url": corpus.url, "version": corpus.version, "fingerprint": corpus.fingerprint}
    checked: dict[Job, IndexSegment] = {}

    def append(current: Index | None) -> Index:
        waiting = not_held(current, pending)
        if current is not None and not waiting:
            return current
        for job in waiting:
            if job not in checked:
                checked[job] = checked_segment(objects, IndexSegment(job), context)
        load_model(model_objects(objects.url), waiting[0].model)
        check_unmarked(objects, waiting)
        segments = _placed(current, tuple(checked[job] for job in waiting), objects.url)
        return next_version(current, segments, about, objects.url)

    with claimed(objects, pending):
        published = commit(objects, find_index, append)[1]
    for job in jobs:
        clear_leftovers(objects, job)
    return published


def clear_leftovers(objects: Objects, job: Job) -> None:
    """Drop the records and claims beside codes that are published: their set bits are folded into one array."""
    for leftover in ("done", CLAIMS):
        objects.delete_below(f"{job.folder}/{leftover}")


@contextlib.contextmanager
def claimed(objects: Objects, jobs: Sequence[Job]) -> Iterator[None]:
    """Keep 'och gc' away from jobs while they are published.

    Here a claim is put before the mark of gc is looked for; gc puts its mark before it looks for claims and
    versions. So one of the two sees the other, and nothing is collected between the check and the commit.
    """
    name = uuid.uuid4().hex
    claims = [f"{job.folder}/{CLAIMS}/{name}.json" for job in jobs]
    try:
        for claim in claims:
            objects.put(claim, b"{}")
        check_unmarked(objects, jobs)
        yield
    finally:
        for claim in claims:
            objects.delete(claim)


def check_unmarked(objects: Objects, jobs: Sequence[Job]) -> None:
    for job in jobs:
        if objects.size(f"{job.folder}/{COLLECTED}") is not None:
            raise ConflictError(
                f"job {job.id} is being removed by 'och gc', and nothing was published; run 'och gc {objects.url}' to "
                "the end, then this command again"
            )


def checked_segment(objects: Objects, draft: IndexSegment, context: Context) -> IndexSegment:
    """The ``draft`` of a finished segment with its checksums, after every chunk was compared with its record on the
    workers; folds the records into one array."""
    job = draft.job
    missing = set(range(job.spec.n_chunks)) - done_chunks(objects, job)
    if missing:
        again = f"'och verify {objects.url} --repair'" if job.generation else "'och encode'"
        again = f"'och compact {objects.url}'" if job.kept is not None and not job.generation else again
        raise IncompleteError(
            f"job {job.id} has {len(missing)} of {job.spec.n_chunks} chunks still to encode; nothing was published, "
            f"and what is done is kept: run {again} again"
        )
    chunks = [(chunk, *draft.bounds(chunk)) for chunk in range(job.spec.n_chunks)]
    tasks = [
        CheckFinished(objects.url, job, tuple(chunks[i : i + CHUNKS_PER_CHECK]))
        for i in range(0, len(chunks), CHUNKS_PER_CHECK)
    ]
    client = None if job.spec.n_chunks * job.spec.stored_bytes <= CHECKED_HERE else context.client
    parts = map_tasks(check_finished, tasks, client=client, name="check_finished")
    found = [chunk for part in parts for chunk in part]
    if found:
        create_array(objects, f"{job.folder}/ones", ones_spec(job))
        write_chunk(objects, f"{job.folder}/ones", 0, np.array([chunk.ones for chunk in found], "<i8"))
    row_digests = None if job.whole else np.array([chunk.rows_crc for chunk in found], "<u4")
    return replace(draft, digests=np.array([chunk.crc for chunk in found], "<u4"), row_digests=row_digests)


def not_held(index: Index | None, jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if index is None or not _holds(index, job)]


def _holds(index: Index, job: Job) -> bool:
    """Whether an index lists a job, in whatever generation, or a compaction that it went into."""
    work = (job.start, job.stop, job.input)
    return any(
        segment.job.id == job.id or (segment.job.model == job.model and work in segment.sources)
        for segment in index.segments
    )


def ones_spec(job: Job) -> ArraySpec:
    """Layout of the folded records of a job, which are one chunk."""
    return ArraySpec(job.spec.n_chunks, job.bits, "<i8", job.spec.n_chunks)


def _placed(current: Index | None, new: tuple[IndexSegment, ...], url: str) -> tuple[IndexSegment, ...]:
    """The segments of the next version: another model replaces all rows, the same model goes on where they end."""
    start, stop, model = new[0].start, new[-1].stop, new[0].job.model
    if current is None or current.model != model:
        if start == 0 and (current is None or stop >= current.rows):
            return new
    elif current.rows == start:
        return (*current.segments, *new)
    held = "nothing" if current is None else f"rows 0..{current.rows} of model {current.model[:16]}"
    raise ConflictError(
        f"the job holds rows {start}..{stop} of model {model[:16]}, but {url} holds {held}: they do not fit "
        "together, and nothing was published; run 'och encode' again"
    )
