"""Corpus + model -> packed codes: one task per whole chunk of codes, then one publish."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated

import numpy as np

from och_dist import events
from och_dist.cluster import map_tasks
from och_dist.encode.publication import publish_jobs
from och_dist.errors import BadInputError, ConflictError
from och_dist.options import ExpectModel, Option, checked
from och_dist.stage import Context, Report, Stopwatch, require_room
from och_dist.store import (
    CHUNK_ROWS,
    CodeChunk,
    Corpus,
    CorpusRef,
    Index,
    IndexSegment,
    Job,
    Model,
    Objects,
    check_expected,
    copy_model,
    find_index,
    list_jobs,
    load_model,
    model_objects,
    model_on_worker,
    open_corpus,
    open_objects,
    split_model_path,
)


def encode_chunk(corpus: CorpusRef, index: str, job: Job, chunk: CodeChunk) -> int:
    """Encode the rows of one chunk, streaming corpus chunks, and store codes and record; returns the rows.

    The model travels as path and address and is loaded once per worker.
    """
    rows, start, stop = corpus.open(), chunk.start, chunk.stop
    hasher = model_on_worker(model_objects(index).url, job.model)
    codes = np.empty((stop - start, job.spec.width), np.uint8)
    for first, block in rows.blocks(start, stop):
        codes[first - start : first - start + len(block)] = hasher.encode_block(block, first_row=first)
    record = job.write(open_objects(index), chunk.chunk, codes, rows.digest(start, stop))
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
    folder, address = split_model_path(model)
    check_expected(address, expect_model)
    opened, objects = open_corpus(corpus), open_objects(index)
    current, new_rows = find_index(index), 0  # first: nothing is put into a folder that holds something else
    trained, models = open_objects(folder), model_objects(objects.url)
    loaded = load_model(trained, address)
    _check_dimension(loaded, opened)
    objects.require_put_if_absent()
    copy_model(trained, address, models)
    events.say("sample", bits=loaded.n_bits, sample=loaded.provenance.get("sample"))
    jobs: list[Job] = []
    for job in _jobs(opened, objects, current, loaded, chunk_rows):
        job.begin(objects)
        copy_model(trained, address, models)  # again: 'och gc' takes a model for unused that no job has announced
        room = 3 * job.chunk_rows * job.spec.width
        require_room(opened, context, f"encoding a chunk of {job.chunk_rows} codes", extra_bytes=room)
        store = partial(encode_chunk, opened.ref, objects.url, job)
        new_rows += run_job(objects, IndexSegment(job), store, context, verb="encode")
        jobs.append(job)
    if publish and jobs:
        _check_unchanged(opened, jobs)
        publish_jobs(index, jobs, opened, context)
    newest = find_index(index)
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
    unfinished = {
        job.start: job
        for job in sorted(list_jobs(objects), key=lambda job: job.generation)  # a repair replaces what came before
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
    now = open_corpus(corpus.url, 0)
    if any(now.rows < job.stop or now.digest(job.start, job.stop) != job.input for job in jobs):
        raise ConflictError(
            f"{corpus.url} was written to while it was being encoded, and nothing was published; "
            "run the command again when it rests"
        )


def run_job(
    objects: Objects, draft: IndexSegment, store: Callable[[CodeChunk], int], context: Context, *, verb: str
) -> int:
    """``store`` the chunks of a job that have no record yet; returns the sum of it all."""
    chunks, done = draft.chunks(), draft.job.done(objects)
    rows = [chunk.stop - chunk.start for chunk in chunks]
    advance = context.progress(verb, sum(rows))
    advance(sum(rows[chunk] for chunk in done))
    stored = map_tasks(
        store,
        [chunk for chunk in chunks if chunk.chunk not in done],
        client=context.client,
        name=f"{verb}_chunk",
        advance=advance,
        weight=lambda chunk: rows[chunk.chunk],
        inherited=done,
    )
    return sum(stored)
