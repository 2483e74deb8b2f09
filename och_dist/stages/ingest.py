"""Files or the generator -> a new immutable segment of a corpus, published as the next version."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import google_crc32c
import numpy as np

from och_dist.cluster import check_memory
from och_dist.errors import BadInputError, ConflictError, IntegrityError, NonFiniteError, UsageError
from och_dist.graph import map_tasks
from och_dist.kernels.moments import nonfinite_rows
from och_dist.stages.common import Context, Report, Stopwatch
from och_dist.stages.origins import Files, Generated, Origin
from och_dist.store.arrays import (
    CODECS,
    ArraySpec,
    Codec,
    chunk_key,
    create_array,
    stored_chunks,
    trailing_crc,
    write_chunk,
)
from och_dist.store.corpus import Corpus, Segment, find_corpus, vectors_prefix
from och_dist.store.objects import Objects, open_objects
from och_dist.store.readers import Source, open_sources
from och_dist.store.versions import canonical, commit_version, sha256

CHUNK_BYTES = 32 << 20
SCAN_ROWS_BYTES = 64 << 20
LISTED_ROWS = 20
MAX_DROPPED = 10_000_000
CHUNKS_PER_CHECK = 16


def ingest(
    sources: Sequence[str],
    corpus: str,
    *,
    append: bool = False,
    dataset: str | None = None,
    chunk_rows: int | None = None,
    codec: Codec = "none",
    nonfinite: Literal["error", "drop"] = "error",
    context: Context | None = None,
) -> Report:
    """Bring files into ``corpus``; files it already holds are not taken twice."""
    if nonfinite not in ("error", "drop"):
        raise UsageError(f"nonfinite={nonfinite!r}; use 'error' or 'drop'")
    watch = Stopwatch("ingest")
    found = open_sources([sources] if isinstance(sources, str) else sources, dataset=dataset)
    _check_copies(found)
    known = _known_sources(find_corpus(corpus))
    fresh = tuple(source for source in found if (source.fingerprint, source.dataset) not in known)
    if not fresh:
        return _nothing(watch, corpus)
    if known and not append:
        raise ConflictError(f"{corpus} already holds other rows; add these with --append, or write to another place")
    return _write_segment(
        watch,
        corpus,
        Files(fresh),
        chunk_rows=chunk_rows,
        codec=codec,
        drop=nonfinite == "drop",
        context=context or Context(),
    )


def generate(
    corpus: str,
    *,
    rows: int = 100_000,
    dim: int = 960,
    seed: int = 0,
    first_row: int = 0,
    append: bool = False,
    chunk_rows: int | None = None,
    codec: Codec = "none",
    context: Context | None = None,
) -> Report:
    """Make a GIST-like corpus: row i is a function of (seed, dim, first_row + i) alone."""
    if rows < 1 or dim < 1 or first_row < 0 or seed < 0:
        raise UsageError(
            f"rows={rows}, dim={dim}, first_row={first_row}, seed={seed}; rows and dim start at 1, seed at 0"
        )
    watch = Stopwatch("generate")
    origin = Generated(rows, dim, seed, first_row)
    known = _known_sources(find_corpus(corpus))
    if (origin.describe()[0]["fingerprint"], None) in known:
        return _nothing(watch, corpus)
    if known and not append:
        raise ConflictError(f"{corpus} already holds other rows; add these with --append, or write to another place")
    return _write_segment(
        watch, corpus, origin, chunk_rows=chunk_rows, codec=codec, drop=False, context=context or Context()
    )


def _check_copies(sources: Iterable[Source]) -> None:
    """A file that the corpus holds is not taken twice; neither is one that lies twice in one call."""
    seen: dict[tuple[str, str | None], str] = {}
    for source in sources:
        first = seen.setdefault((source.fingerprint, source.dataset), source.path)
        if first != source.path:
            raise UsageError(f"{source.path} has the content of {first}; name one of them, so that no row comes twice")


def _known_sources(corpus: Corpus | None) -> set[tuple[str, str | None]]:
    segments = corpus.segments if corpus else ()
    return {(source["fingerprint"], source["dataset"]) for segment in segments for source in segment.sources}


def _nothing(watch: Stopwatch, url: str) -> Report:
    corpus = find_corpus(url)
    assert corpus is not None  # narrows the type: sources were found in it
    return watch.report("nothing to do", **_facts(corpus, 0))


def _facts(corpus: Corpus, new_rows: int) -> dict[str, Any]:
    return {
        "corpus": corpus.url,
        "version": corpus.version,
        "rows": corpus.rows,
        "new_rows": new_rows,
        "dim": corpus.dim,
        "dtype": np.dtype(corpus.dtype).name,
        "bytes": corpus.nbytes,
    }


def default_chunk_rows(dim: int, dtype: str) -> int:
    """The power of two whose chunk is nearest below 32 MiB, at least one row."""
    rows = max(1, CHUNK_BYTES // (dim * np.dtype(dtype).itemsize))
    return 1 << (rows.bit_length() - 1)


@dataclass(frozen=True)
class WriteChunk:
    """One output chunk: rows [start, stop) of the origin without those in ``skip`` (ascending)."""

    url: str
    prefix: str
    chunk: int
    origin: Origin
    start: int
    stop: int
    skip: np.ndarray


def write_corpus_chunk(task: WriteChunk) -> tuple[int, int, int]:
    """Read, check, store one chunk; returns (chunk, bytes, crc)."""
    block = _kept_rows(task)
    bad = nonfinite_rows(block)
    if len(bad):
        rows = tuple(int(row) + task.start for row in bad[:LISTED_ROWS])
        raise NonFiniteError(f"{len(bad)} rows are not finite", rows, len(bad))
    written = write_chunk(open_objects(task.url), task.prefix, task.chunk, np.ascontiguousarray(block))
    return task.chunk, written.nbytes, written.crc


def _kept_rows(task: WriteChunk) -> np.ndarray:
    """The rows of a chunk (rows, dim); read a few at a time where bad rows lie between, which may be millions."""
    if not len(task.skip):
        return task.origin.read(task.start, task.stop)
    parts, step = [], _scan_rows(task.origin)
    for low in range(task.start, task.stop, step):
        high = min(low + step, task.stop)
        inside = task.skip[slice(*np.searchsorted(task.skip, (low, high)))]
        if len(inside) < high - low:
            parts.append(np.delete(task.origin.read(low, high), inside - low, axis=0))
    return np.concatenate(parts)


def _scan_rows(origin: Origin) -> int:
    return max(1, SCAN_ROWS_BYTES // (origin.dim * np.dtype(origin.dtype).itemsize))


def _write_segment(
    watch: Stopwatch,
    url: str,
    origin: Origin,
    *,
    chunk_rows: int | None,
    codec: Codec,
    drop: bool,
    context: Context,
) -> Report:
    objects = open_objects(url)
    parent = find_corpus(url)
    _check_fits(parent, origin, codec, chunk_rows)
    objects.require_put_if_absent()
    bad = _scan(origin, context) if drop else np.empty(0, np.int64)
    rows = origin.rows - len(bad)
    if rows < 1:
        raise BadInputError(f"none of the {origin.rows} rows is finite; the corpus would be empty")
    size = min(chunk_rows or default_chunk_rows(origin.dim, origin.dtype), rows)
    spec = ArraySpec(rows, origin.dim, origin.dtype, size, codec)
    check_memory(context.client, 4 * size * origin.dim * np.dtype(origin.dtype).itemsize, f"a chunk of {size} rows")
    start = parent.rows if parent else 0
    segment_id = sha256(canonical([origin.identity(), start, rows, size, codec, sha256(bad.tobytes())]))[:16]
    prefix = vectors_prefix(segment_id)
    create_array(objects, prefix, spec)
    digests, stored = _store_chunks(
        objects, segment_id, spec, origin, bad, context.progress(watch.stage, rows), context
    )
    segment = Segment(segment_id, start, start + rows, size, digests, codec, tuple(origin.describe()), len(bad), prefix)
    corpus = _publish(url, segment, origin)
    return watch.report(
        **_facts(corpus, rows), stored_bytes=stored, dropped=len(bad), dropped_rows=bad[:LISTED_ROWS].tolist()
    )


def _store_chunks(
    objects: Objects,
    segment: str,
    spec: ArraySpec,
    origin: Origin,
    bad: np.ndarray,
    advance: Callable[[int], None],
    context: Context,
) -> tuple[np.ndarray, int]:
    """Write the chunks that an earlier run did not, check those it did; checksums (chunks,) and bytes of them all."""
    prefix = vectors_prefix(segment)
    there = {chunk: size for chunk, size in stored_chunks(objects, prefix).items() if chunk < spec.n_chunks}
    tasks = _plan(objects.url, prefix, spec, origin, bad, there)

    def rows_of(task: WriteChunk) -> int:
        low, high = spec.bounds(task.chunk)
        return high - low

    advance(spec.rows - sum(map(rows_of, tasks)))
    try:
        written = map_tasks(
            write_corpus_chunk,
            tasks,
            client=context.client,
            name="write_corpus_chunk",
            advance=advance,
            weight=rows_of,
        )
    except NonFiniteError:
        raise _all_nonfinite(origin, context) from None
    digests = np.zeros(spec.n_chunks, "<u4")
    digests[[chunk for chunk, _, _ in written]] = [crc for _, _, crc in written]
    digests[list(there)] = _check_stored(objects.url, segment, list(there), context)
    return digests, sum(there.values()) + sum(nbytes for _, nbytes, _ in written)


def _check_fits(parent: Corpus | None, origin: Origin, codec: Codec, chunk_rows: int | None) -> None:
    if codec not in CODECS:
        raise UsageError(f"codec {codec!r} is not known; use one of {', '.join(CODECS)}")
    if chunk_rows is not None and chunk_rows < 1:
        raise UsageError(f"chunk_rows={chunk_rows}; use at least 1")
    if parent and (parent.dim, parent.dtype) != (origin.dim, origin.dtype):
        raise BadInputError(
            f"the new rows are {origin.dim}-d {origin.dtype}, the corpus {parent.url} is {parent.dim}-d "
            f"{parent.dtype}; a corpus has one dimension and one dtype"
        )


def _plan(
    url: str, prefix: str, spec: ArraySpec, origin: Origin, bad: np.ndarray, there: Container[int]
) -> list[WriteChunk]:
    """A task for each chunk that is not ``there`` yet: which origin rows, without the ``bad`` ones, make it up."""
    kept_before = bad - np.arange(len(bad))  # number of kept rows before each bad one
    tasks = []
    for chunk in range(spec.n_chunks):
        if chunk not in there:
            start, stop = spec.bounds(chunk)
            before_first, before_last = np.searchsorted(kept_before, (start, stop - 1), side="right").tolist()
            low, high = start + before_first, stop + before_last
            inside = bad[slice(*np.searchsorted(bad, (low, high)))]
            tasks.append(WriteChunk(url, prefix, chunk, origin.part(low, high), low, high, inside))
    return tasks


@dataclass(frozen=True)
class ScanRows:
    origin: Origin
    start: int
    stop: int


def find_nonfinite_rows(task: ScanRows) -> np.ndarray:
    """Numbers of the rows in [start, stop) that hold NaN or infinity."""
    return nonfinite_rows(task.origin.read(task.start, task.stop)) + task.start


def _scan(origin: Origin, context: Context) -> np.ndarray:
    """One pass over the files for rows that are not finite; ascending row numbers."""
    step = _scan_rows(origin)
    ranges = ((start, min(start + step, origin.rows)) for start in range(0, origin.rows, step))
    tasks = [ScanRows(origin.part(start, stop), start, stop) for start, stop in ranges]
    advance = context.progress("scan", origin.rows)
    found = map_tasks(
        find_nonfinite_rows,
        tasks,
        client=context.client,
        name="find_nonfinite_rows",
        advance=advance,
        weight=lambda task: task.stop - task.start,
    )
    bad = np.concatenate(found)
    if len(bad) > MAX_DROPPED:
        raise BadInputError(f"{len(bad)} of {origin.rows} rows are not finite; mend the files before ingesting them")
    return bad


def _all_nonfinite(origin: Origin, context: Context) -> NonFiniteError:
    """The full list, from a pass of its own: which chunks were still to do must not decide what is reported."""
    bad = _scan(origin, context)
    listed = ", ".join(str(row) for row in bad[:LISTED_ROWS]) + (", ..." if len(bad) > LISTED_ROWS else "")
    return NonFiniteError(
        f"{len(bad)} of {origin.rows} rows hold NaN or infinity: {listed}; nothing was published. "
        "Mend them, or leave them out with --nonfinite=drop",
        tuple(int(row) for row in bad[:LISTED_ROWS]),
        len(bad),
    )


@dataclass(frozen=True)
class CheckChunks:
    """Chunks of a segment that an earlier run stored."""

    url: str
    segment: str
    chunks: tuple[int, ...]


def check_stored_chunks(task: CheckChunks) -> list[int]:
    """crc32c of each chunk, after reading it: a machine that lost power may have kept a part of it."""
    objects = open_objects(task.url)
    digests = []
    for chunk in task.chunks:
        data = objects.read(chunk_key(vectors_prefix(task.segment), chunk))
        if data is None or len(data) < 4 or google_crc32c.value(data[:-4]) != trailing_crc(data):
            raise IntegrityError(
                f"chunk {chunk} of segment {task.segment}, left in {task.url} by an earlier run, is damaged; nothing "
                f"was published: remove the segment with 'och gc {task.url} --job {task.segment}' and ingest again"
            )
        digests.append(trailing_crc(data))
    return digests


def _check_stored(url: str, segment: str, chunks: list[int], context: Context) -> list[int]:
    size = CHUNKS_PER_CHECK
    tasks = [CheckChunks(url, segment, tuple(chunks[i : i + size])) for i in range(0, len(chunks), size)]
    parts = map_tasks(check_stored_chunks, tasks, client=context.client, name="check_stored_chunks")
    return [digest for part in parts for digest in part]


def _publish(url: str, segment: Segment, origin: Origin) -> Corpus:
    """Commit the next version. Losing the race means that another ingest put rows where these were planned."""
    parent = find_corpus(url)
    if parent and segment.id in {other.id for other in parent.segments}:
        return parent
    if (parent.rows if parent else 0) == segment.start:
        version = (parent.version if parent else 0) + 1
        segments = (*(parent.segments if parent else ()), segment)
        corpus = Corpus(open_objects(url).url, version, origin.dim, origin.dtype, segments)
        if commit_version(open_objects(url), corpus.to_json(version)):
            return corpus
    raise ConflictError(
        f"another ingest published rows from {segment.start} on in {url} meanwhile; "
        "nothing was mixed: run the command again to append after them"
    )
