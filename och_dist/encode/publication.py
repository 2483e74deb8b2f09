"""Make a finished job visible: check every chunk against its record on the workers, then commit one manifest."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from och_dist.cluster import map_tasks
from och_dist.errors import ConflictError, IncompleteError, IntegrityError, UsageError
from och_dist.kernels.packing import count_ones
from och_dist.stage import Context, Report, Stopwatch
from och_dist.store import (
    ArraySpec,
    Corpus,
    Index,
    IndexSegment,
    Job,
    Objects,
    chunk_key,
    commit_version,
    create_array,
    done_chunks,
    find_index,
    list_jobs,
    load_model,
    model_objects,
    next_version,
    open_corpus,
    open_objects,
    record_key,
    trailing_crc,
    version_numbers,
    write_chunk,
)

CHUNKS_PER_CHECK = 8
CHECKED_HERE = 2 << 20
"""Bytes of codes that are read and checked before a task would have been to a worker and back."""

RACES = 20
COLLECTED = "collected.json"
CLAIMS = "publishing"


@dataclass(frozen=True)
class CheckChunks:
    index: str
    job: Job
    chunks: tuple[int, ...]


def check_chunks(task: CheckChunks) -> tuple[np.ndarray, np.ndarray]:
    """(crcs (c,), ones (c, bits)) of chunks whose stored bytes equal their records."""
    objects = open_objects(task.index)
    crcs = np.zeros(len(task.chunks), "<u4")
    ones = np.zeros((len(task.chunks), task.job.bits), "<i8")
    for place, chunk in enumerate(task.chunks):
        crcs[place], ones[place] = check_chunk(objects, task.job, chunk)
    return crcs, ones


def check_chunk(objects: Objects, job: Job, chunk: int) -> tuple[int, np.ndarray]:
    """crc and set bits of one chunk, after comparing its bytes with its record."""
    where, remedy = chunk_and_remedy(objects, job, chunk)
    record = read_record(objects, job, chunk)
    size, crc, ones = record["nbytes"], record["crc"], record["ones"]
    data = objects.read(chunk_key(f"{job.folder}/codes", chunk))
    if data is None:
        raise IntegrityError(f"{where} is missing; {remedy}")
    whole = len(data) == size == job.chunk_rows * job.spec.width + 4
    if not whole or trailing_crc(data) != crc or google_crc32c.value(data[:-4]) != crc:
        raise IntegrityError(f"{where} does not match its record; {remedy}")
    codes = np.frombuffer(data, np.uint8, size - 4).reshape(-1, job.spec.width).copy()
    if not np.array_equal(ones, count_ones(codes, job.bits)):
        raise IntegrityError(f"the set bits of {where} are not those of its record; {remedy}")
    return crc, ones


def read_record(objects: Objects, job: Job, chunk: int) -> dict[str, Any]:
    """The record of a finished chunk, its ``ones`` as an array."""
    where, remedy = chunk_and_remedy(objects, job, chunk)
    try:
        record = dict(json.loads(objects.get(record_key(job, chunk))))
        numbers = {name: int(record[name]) for name in ("nbytes", "crc", "rows_crc") if name in record}
        ones = np.array(record["ones"], "<i8")
        if record["chunk"] != chunk or ones.shape != (job.bits,) or not {"nbytes", "crc"} <= set(numbers):
            raise ValueError("it belongs elsewhere")
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"the record of {where} is damaged ({error}); {remedy}") from None
    return {**numbers, "ones": ones}


def chunk_and_remedy(objects: Objects, job: Job, chunk: int) -> tuple[str, str]:
    """How to call a chunk, and what to do about it."""
    again = "encode again" if job.kept is None else "compact again"
    again = f"remove the job with 'och gc {objects.url} --job {job.id}' and {again}"
    if job.generation:
        again = f"run 'och verify {objects.url} --repair' again, which begins the next generation of it"
    remedy = f"nothing was published; {again}"
    return f"chunk {chunk} of job {job.id} in {objects.url}", remedy


def publish(index: str, job_id: str, *, corpus: str, context: Context | None = None) -> Report:
    """Publish a finished job by its id; publishing it again changes nothing."""
    watch, context = Stopwatch("publish"), context or Context()
    objects = open_objects(index)
    jobs = {job.id: job for job in sorted(list_jobs(objects), key=lambda job: -job.generation)}  # not that of a repair
    if job_id not in jobs:
        known = ", ".join(sorted(jobs)) or "none"
        raise UsageError(f"{index} has no job {job_id!r}; jobs there: {known}")
    if jobs[job_id].kept is not None:
        raise UsageError(f"job {job_id} is a compaction; run 'och compact {index}', which goes on and publishes it")
    before = find_index(index)
    published = publish_jobs(index, [jobs[job_id]], _corpus_of(corpus, jobs[job_id]), context)
    same = before is not None and before.version == published.version
    return watch.report(
        "nothing to do" if same else "done",
        index=objects.url,
        job=job_id,
        version=published.version,
        rows=published.rows,
    )


def publish_new(index: str, corpus: str, *, jobs: Sequence[str], context: Context | None = None) -> Report:
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
    """Check finished jobs of adjoining rows, fold their records into one array each, commit once, drop the records."""
    objects = open_objects(index)
    published = find_index(index)
    if published is None or not_held(published, jobs):
        with claimed(objects, jobs):
            published = _publish(objects, jobs, corpus, context)
    for job in jobs:
        for leftover in ("done", CLAIMS):
            objects.delete_below(f"{job.folder}/{leftover}")
    return published


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


def _publish(objects: Objects, jobs: Sequence[Job], corpus: Corpus, context: Context) -> Index:
    """Check what no other publisher has published yet, and commit it."""
    for _ in range(RACES):
        current = find_index(objects.url)
        waiting = not_held(current, jobs)
        if current is not None and not waiting:
            return current
        try:
            segments = tuple(checked_segment(objects, job, context) for job in waiting)
        except (IncompleteError, IntegrityError):
            # The records may be gone because another publisher was faster.
            if not_held(find_index(objects.url), waiting) == waiting:
                raise
            continue
        load_model(model_objects(objects.url), jobs[0].model)
        return _commit(objects, segments, corpus)
    raise too_many_races(objects.url)


def checked_segment(objects: Objects, job: Job, context: Context) -> IndexSegment:
    missing = set(range(job.spec.n_chunks)) - done_chunks(objects, job)
    if missing:
        again = f"'och verify {objects.url} --repair'" if job.generation else "'och encode'"
        again = f"'och compact {objects.url}'" if job.kept is not None and not job.generation else again
        raise IncompleteError(
            f"job {job.id} has {len(missing)} of {job.spec.n_chunks} chunks still to encode; nothing was published, "
            f"and what is done is kept: run {again} again"
        )
    crcs, ones = _check_all(objects, job, context)
    _fold(objects, job, ones)
    return IndexSegment(job, crcs)


def not_held(index: Index | None, jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if index is None or not _holds(index, job)]


def _holds(index: Index, job: Job) -> bool:
    """Whether an index lists a job, in whatever generation, or a compaction that it went into."""
    work = (job.start, job.stop, job.input)
    return any(
        segment.job.id == job.id or (segment.job.model == job.model and work in segment.sources)
        for segment in index.segments
    )


def _check_all(objects: Objects, job: Job, context: Context) -> tuple[np.ndarray, np.ndarray]:
    chunks = range(job.spec.n_chunks)
    tasks = [
        CheckChunks(objects.url, job, tuple(chunks[i : i + CHUNKS_PER_CHECK]))
        for i in range(0, len(chunks), CHUNKS_PER_CHECK)
    ]
    client = None if job.spec.n_chunks * job.chunk_rows * job.spec.width <= CHECKED_HERE else context.client
    parts = map_tasks(check_chunks, tasks, client=client, name="check_chunks")
    return np.concatenate([crcs for crcs, _ in parts]), np.concatenate([ones for _, ones in parts])


def ones_spec(job: Job) -> ArraySpec:
    """Layout of the folded records of a job, which are one chunk."""
    return ArraySpec(job.spec.n_chunks, job.bits, "<i8", job.spec.n_chunks)


def _fold(objects: Objects, job: Job, ones: np.ndarray) -> None:
    """Set bits per chunk and bit, from the records, as one small array (chunks, bits)."""
    create_array(objects, f"{job.folder}/ones", ones_spec(job))
    write_chunk(objects, f"{job.folder}/ones", 0, ones)


def _commit(objects: Objects, new: tuple[IndexSegment, ...], corpus: Corpus) -> Index:
    """Publish the next version; a lost race is rebased on what won."""
    about: dict[str, Any] = {"url": corpus.url, "version": corpus.version, "fingerprint": corpus.fingerprint}
    for _ in range(RACES):
        current = find_index(objects.url)
        new = tuple(segment for segment in new if current is None or not _holds(current, segment.job))
        if current is not None and not new:
            return current
        check_unmarked(objects, [segment.job for segment in new])
        index = next_version(current, _rebased(current, new, objects.url), about, objects.url)
        if commit_version(objects, index.to_json()):
            return index
    raise too_many_races(objects.url)


def too_many_races(url: str) -> ConflictError:
    return ConflictError(f"{url} was published {RACES} times while this job tried to; run the command again")


def _rebased(current: Index | None, new: tuple[IndexSegment, ...], url: str) -> tuple[IndexSegment, ...]:
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
