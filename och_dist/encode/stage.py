"""Corpus + model -> packed codes -> the next version of an index.

The life of a segment: its job is announced, one task makes each whole chunk of codes, every chunk is compared with its
record, and one manifest makes it visible. Compactions and repairs make theirs in the same way, by the same functions.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Annotated, Any

import numpy as np

from och_dist import events, store
from och_dist.cluster import map_tasks
from och_dist.errors import BadInputError, ConflictError, IncompleteError, IntegrityError, UsageError
from och_dist.kernels.packing import count_ones
from och_dist.options import ExpectModel, Jobs, Option, checked
from och_dist.stage import Context, Report, Stopwatch, require_room
from och_dist.store import (
    CHUNK_ROWS,
    ChunkRecord,
    CodeChunk,
    Corpus,
    CorpusRef,
    Index,
    IndexSegment,
    Job,
    Model,
    Objects,
)

CHUNKS_PER_CHECK = 8
CHECKED_HERE = 2 << 20
"""Bytes of codes that are read and checked before a task would have been to a worker and back."""

COLLECTED = "collected.json"
CLAIMS = "publishing"


def encode_chunk(corpus: CorpusRef, index: str, job: Job, chunk: CodeChunk) -> int:
    """Encode the rows of one chunk, streaming corpus chunks, and store codes and record; returns the rows.

    The model travels as path and address and is loaded once per worker.
    """
    rows, start, stop = corpus.open(), chunk.start, chunk.stop
    hasher = store.model_on_worker(store.model_objects(index).url, job.model)
    codes = np.empty((stop - start, job.spec.width), np.uint8)
    for first, block in rows.blocks(start, stop):
        codes[first - start : first - start + len(block)] = hasher.encode_block(block, first_row=first)
    record = job.write(store.open_objects(index), chunk.number, codes, rows.digest(start, stop))
    events.add(ones=record.ones.tolist())
    return stop - start


@checked
def encode(
    corpus: str,
    index: str,
    *,
    model: Annotated[str, Option("The model folder that 'och train' printed.", metavar="PATH")],
    chunk_rows: Annotated[int, Option("Rows per chunk of codes.", at_least=1)] = CHUNK_ROWS,
    publish: Annotated[bool, Option("Make the result visible at the end.")] = True,
    expect_model: ExpectModel = None,
    context: Context | None = None,
) -> Report:
    """Encode every row of ``corpus`` that the newest version of ``index`` does not hold under ``model``."""
    watch, context = Stopwatch("encode"), context or Context()
    folder, address = store.split_model_path(model)
    store.check_expected(address, expect_model)
    opened, objects = store.open_corpus(corpus), store.open_objects(index)
    current, new_rows = store.find_index(index), 0  # first: nothing is put into a folder that holds something else
    trained, models = store.open_objects(folder), store.model_objects(objects.url)
    loaded = store.load_model(trained, address)
    _check_dimension(loaded, opened)
    objects.require_put_if_absent()
    store.copy_model(trained, address, models)
    events.say("sample", bits=loaded.n_bits, sample=loaded.provenance.get("sample"))
    jobs: list[Job] = []
    for job in _jobs(opened, objects, current, loaded, chunk_rows):
        job.begin(objects)
        store.copy_model(trained, address, models)  # again: 'och gc' takes a model for unused that no job has announced
        room = 3 * job.chunk_rows * job.spec.width
        require_room(opened, context, f"encoding a chunk of {job.chunk_rows} codes", extra_bytes=room)
        write = partial(encode_chunk, opened.ref, objects.url, job)
        new_rows += run_job(objects, IndexSegment(job), write, context, verb="encode")
        jobs.append(job)
    if publish and jobs:
        _check_unchanged(opened, jobs)
        publish_jobs(index, jobs, opened, context)
    newest = store.find_index(index)
    return watch.report(
        "done" if new_rows or (publish and jobs) else "nothing to do",
        index=objects.url,
        model=loaded.address,
        bits=loaded.n_bits,
        jobs=[job.id for job in jobs],
        rows=opened.rows,
        new_rows=new_rows,
        bytes_in=opened.nbytes,
        bytes_out=opened.rows * -(-loaded.n_bits // 8),
        version=newest.version if newest else None,
        published=publish,
    )


def _check_dimension(model: Model, corpus: Corpus) -> None:
    if model.hasher.n_features_in_ != corpus.dim:
        raise BadInputError(
            f"model {model.address[:16]} takes {model.hasher.n_features_in_}-d vectors, the corpus {corpus.url} is "
            f"{corpus.dim}-d; train a model on this corpus"
        )


def _jobs(corpus: Corpus, objects: Objects, current: Index | None, model: Model, chunk_rows: int) -> Iterator[Job]:
    """The jobs that are still to do, in row order: unfinished ones first, then one for the rest."""
    covered = _covered(corpus, current, model)
    if covered == corpus.rows:
        return
    known = sorted(store.list_jobs(objects), key=lambda job: job.generation)  # a repair replaces what came before
    unfinished = {
        job.start: job
        for job in known
        if job.model == model.address
        and job.kept is None
        and job.stop <= corpus.rows
        and job.input == corpus.digest(job.start, job.stop)
    }
    while covered in unfinished:
        yield unfinished[covered]
        covered = unfinished[covered].stop
    if covered < corpus.rows:
        rows = min(chunk_rows, corpus.rows - covered)
        yield Job(model.address, model.n_bits, covered, corpus.rows, rows, corpus.digest(covered, corpus.rows))


def _covered(corpus: Corpus, current: Index | None, model: Model) -> int:
    """Rows that the index already holds under this model; another model starts at row 0."""
    if current is None:
        return 0
    for start, stop, digest in (source for segment in current.segments for source in segment.inputs):
        if stop > corpus.rows or digest != corpus.digest(start, stop):
            raise ConflictError(
                f"rows {start}..{stop} of {current.url} were made from other vectors than those of "
                f"{corpus.url}; encode this corpus into another index"
            )
    return current.rows if current.model == model.address else 0


def _check_unchanged(corpus: Corpus, jobs: Sequence[Job]) -> None:
    """A version of a corpus never changes; an adopted array may, even while it is being encoded."""
    if corpus.version:
        return
    now = store.open_corpus(corpus.url, 0)
    if any(now.rows < job.stop or now.digest(job.start, job.stop) != job.input for job in jobs):
        raise ConflictError(
            f"{corpus.url} was written to while it was being encoded, and nothing was published; "
            "run the command again when it rests"
        )


def run_job(
    objects: Objects,
    draft: IndexSegment,
    write: Callable[[CodeChunk], int],
    context: Context,
    *,
    verb: str,
) -> int:
    """``write`` the chunks of a job that have no record yet; returns the sum of it all."""
    chunks, done = draft.chunks(), draft.job.done(objects)
    rows = [chunk.stop - chunk.start for chunk in chunks]
    advance = context.progress(verb, sum(rows))
    advance(sum(rows[chunk] for chunk in done))
    stored = map_tasks(
        write,
        [chunk for chunk in chunks if chunk.number not in done],
        client=context.client,
        name=f"{verb}_chunk",
        advance=advance,
        weight=lambda chunk: rows[chunk.number],
        inherited=done,
    )
    return sum(stored)


@checked
def publish(
    index: str,
    job: str,
    *,
    corpus: Annotated[str, Option("The corpus that the job encoded.")],
    context: Context | None = None,
) -> Report:
    """Publish a finished job by its id; publishing it again changes nothing."""
    return _publish(index, corpus, [job], context or Context(), job=job)


@checked
def publish_new(index: str, corpus: str, *, jobs: Jobs, context: Context | None = None) -> Report:
    """Publish finished jobs of adjoining rows, as 'encode' reported them, in one version; none is nothing to do."""
    return _publish(index, corpus, jobs, context or Context(), jobs=list(jobs))


def _publish(index: str, corpus: str, names: Sequence[str], context: Context, **named: Any) -> Report:
    watch, objects = Stopwatch("publish"), store.open_objects(index)
    jobs, before = named_jobs(objects, names), store.find_index(index)
    published = publish_jobs(index, jobs, _corpus_of(corpus, jobs[-1]), context) if jobs else before
    same = published is None or (before is not None and before.version == published.version)
    return watch.report(
        "nothing to do" if same else "done",
        index=objects.url,
        **named,
        version=published.version if published else None,
        rows=published.rows if published else 0,
    )


def named_jobs(objects: Objects, names: Sequence[str]) -> list[Job]:
    """The encodings with these ids, in order of their rows; not the later generations that a repair made of them."""
    known = {job.id: job for job in sorted(store.list_jobs(objects), key=lambda job: -job.generation)}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"{objects.url} has no job {unknown[0]!r}; jobs there: {', '.join(sorted(known)) or 'none'}")
    if merged := [name for name in names if known[name].kept is not None]:
        raise UsageError(
            f"job {merged[0]} is a compaction; run 'och compact {objects.url}', which goes on and publishes it"
        )
    return sorted((known[name] for name in names), key=lambda job: job.start)


def _corpus_of(url: str, job: Job) -> Corpus:
    """The first version of a corpus that has all rows of a job; they must be the ones that the job encoded."""
    numbers = store.version_numbers(store.open_objects(url))
    for corpus in (store.open_corpus(url, number) for number in numbers or [0]):
        if corpus.rows >= job.stop and corpus.digest(job.start, job.stop) == job.input:
            return corpus
    raise ConflictError(f"job {job.id} did not encode rows {job.start}..{job.stop} of {url}; name the corpus it read")


def publish_jobs(index: str, jobs: Sequence[Job], corpus: Corpus, context: Context) -> Index:
    """Check finished jobs of adjoining rows, and commit the version that lists them; again is fine."""
    objects, pending = store.open_objects(index), not_held(store.find_index(index), jobs)
    about: dict[str, Any] = {"url": corpus.url, "version": corpus.version, "fingerprint": corpus.fingerprint}

    @cache
    def segment(job: Job) -> IndexSegment:
        return checked_segment(objects, IndexSegment(job), context)

    def append(current: Index | None) -> Index:
        waiting = not_held(current, pending)
        if current is not None and not waiting:
            return current
        made = tuple(map(segment, waiting))
        store.load_model(store.model_objects(objects.url), made[0].job.model)
        return store.next_version(current, _placed(current, made, objects.url), about, objects.url)

    published = publish_segments(objects, pending, append)
    for job in jobs:
        clear_leftovers(objects, job)
    return published


def publish_segments(objects: Objects, jobs: Sequence[Job], change: Callable[[Index | None], Index]) -> Index:
    """Commit what ``change`` makes of the newest version; ``jobs`` are those that it may add."""

    def checked_change(current: Index | None) -> Index:
        following = change(current)
        held = () if current is None else {segment.job for segment in current.segments}
        check_unmarked(objects, [segment.job for segment in following.segments if segment.job not in held])
        return following

    with claimed(objects, jobs):
        return store.commit(objects, store.find_index, checked_change)[1]


def clear_leftovers(objects: Objects, job: Job) -> int:
    """Drop the records and claims beside codes that are published: their set bits are folded into one array."""
    return sum(objects.delete_below(f"{job.folder}/{leftover}") for leftover in ("done", CLAIMS))


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


def not_held(index: Index | None, jobs: Sequence[Job]) -> list[Job]:
    """The jobs that an index does not list, in whatever generation, nor a compaction that they went into."""
    held = set() if index is None else {segment.job.id for segment in index.segments}
    merged = set() if index is None else {(index.model, *work) for part in index.segments for work in part.sources}
    return [job for job in jobs if job.id not in held and (job.model, job.start, job.stop, job.input) not in merged]


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


def checked_segment(objects: Objects, draft: IndexSegment, context: Context) -> IndexSegment:
    """The ``draft`` of a finished segment with its checksums, after every chunk was compared with its record on the
    workers; folds the records into one array."""
    job = draft.job
    missing = set(range(job.spec.n_chunks)) - job.done(objects)
    if missing:
        again = f"'och verify {objects.url} --repair'" if job.generation else "'och encode'"
        again = f"'och compact {objects.url}'" if job.kept is not None and not job.generation else again
        raise IncompleteError(
            f"job {job.id} has {len(missing)} of {job.spec.n_chunks} chunks still to encode; nothing was published, "
            f"and what is done is kept: run {again} again"
        )
    chunks = draft.chunks()
    client = None if job.spec.n_chunks * job.spec.stored_bytes <= CHECKED_HERE else context.client
    parts = map_tasks(
        partial(check_finished, objects.url, job),
        [chunks[i : i + CHUNKS_PER_CHECK] for i in range(0, len(chunks), CHUNKS_PER_CHECK)],
        client=client,
        name="check_finished",
    )
    found = [record for part in parts for record in part]
    if found:
        store.create_array(objects, f"{job.folder}/ones", job.ones_spec)
        store.write_chunk(objects, f"{job.folder}/ones", 0, np.array([record.ones for record in found], "<i8"))
    row_digests = None if job.whole else np.array([record.rows_crc for record in found], "<u4")
    return replace(draft, digests=np.array([record.crc for record in found], "<u4"), row_digests=row_digests)


def check_finished(index: str, job: Job, chunks: Sequence[CodeChunk]) -> list[ChunkRecord]:
    """The records of chunks whose stored bytes equal them."""
    objects = store.open_objects(index)
    return [check_chunk(objects, job, chunk) for chunk in chunks]


def check_chunk(objects: Objects, job: Job, chunk: CodeChunk) -> ChunkRecord:
    """Read a chunk again, and compare it with its record; row numbers must ascend inside the rows it stands for."""
    record, where = read_record(objects, job, chunk), f"chunk {chunk.number} of job {job.id} in {objects.url}"
    parts = {"codes": (job.spec, record.crc, where)}
    if not job.whole:
        parts["rows"] = job.rows_spec, record.rows_crc, f"the array of row numbers of {where}"
    found = {}
    for part, (spec, crc, what) in parts.items():
        stored = store.find_chunk(
            objects, f"{job.folder}/{part}", chunk.number, stated=crc, nbytes=spec.stored_bytes, known="of its record"
        )
        if stored.fault is not None:
            raise unsound(objects, job, f"{what} {stored.fault}")
        found[part] = stored.rows(spec, chunk.number)
    if not np.array_equal(record.ones, count_ones(found["codes"], job.bits)):
        raise unsound(objects, job, f"the set bits of {where} are not those of its record")
    if not job.whole and not chunk.holds(found["rows"][:, 0]):
        raise unsound(objects, job, f"the row numbers of {where} do not ascend from {chunk.start} to {chunk.stop}")
    return record


def read_record(objects: Objects, job: Job, chunk: CodeChunk) -> ChunkRecord:
    """The record of a finished chunk."""
    try:
        return job.read_record(objects, chunk.number)
    except (ValueError, KeyError, TypeError) as error:
        where = f"chunk {chunk.number} of job {job.id} in {objects.url}"
        raise unsound(objects, job, f"the record of {where} is damaged ({error})") from None


def unsound(objects: Objects, job: Job, what: str) -> IntegrityError:
    """The error that says what is wrong with a finished job, and what to do about it."""
    again = "encode again" if job.kept is None else "compact again"
    again = f"remove the job with 'och gc {objects.url} --job {job.id}' and {again}"
    if job.generation:
        again = f"run 'och verify {objects.url} --repair' again, which begins the next generation of it"
    return IntegrityError(f"{what}; nothing was published; {again}")
