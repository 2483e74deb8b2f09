"""The chunks of a new segment of a corpus: which origin rows make them up, and writing and checking them."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import numpy as np

from och_dist import events
from och_dist.cluster import map_tasks
from och_dist.errors import BadInputError, IntegrityError, NonFiniteError
from och_dist.kernels.moments import nonfinite_rows
from och_dist.sources import IdFiles, Origin
from och_dist.stage import Context
from och_dist.store import (
    ArraySpec,
    IdLayout,
    create_array,
    find_chunk,
    ids_prefix,
    open_objects,
    stored_chunks,
    vectors_prefix,
    write_chunk,
)

SCAN_ROWS_BYTES = 64 << 20
SCAN_IDS = 1 << 17
LISTED_ROWS = 20
MAX_DROPPED = 10_000_000
CHUNKS_PER_CHECK = 16


@dataclass(frozen=True)
class Target:
    """The arrays of a new segment: ``spec`` of its vectors, ``ids`` of its ids."""

    url: str
    segment: str
    spec: ArraySpec
    ids: IdLayout | None = None

    @property
    def ids_spec(self) -> ArraySpec | None:
        return None if self.ids is None else self.ids.spec(self.spec.rows, self.spec.chunk_rows)

    def create(self) -> None:
        """Lay out the arrays, or check that they are laid out so."""
        create_array(open_objects(self.url), vectors_prefix(self.segment), self.spec)
        if self.ids_spec is not None:
            create_array(open_objects(self.url), ids_prefix(self.segment), self.ids_spec)

    def stored(self) -> dict[int, int]:
        """Chunk number -> bytes of every chunk that an earlier run stored, with its ids."""
        objects = open_objects(self.url)
        vectors, ids = stored_chunks(objects, vectors_prefix(self.segment)), {}
        if self.ids is not None:
            ids = stored_chunks(objects, ids_prefix(self.segment))
            vectors = {chunk: size for chunk, size in vectors.items() if chunk in ids}
        return {chunk: size + ids.get(chunk, 0) for chunk, size in vectors.items() if chunk < self.spec.n_chunks}


@dataclass(frozen=True)
class Stored:
    """What was stored: checksums (chunks,) of vectors and of ids, and all bytes."""

    digests: np.ndarray
    id_digests: np.ndarray | None
    nbytes: int


@dataclass(frozen=True)
class WriteChunk:
    """One output chunk: rows [start, stop) of the origin without those in ``skip`` (ascending)."""

    target: Target
    chunk: int
    origin: Origin
    start: int
    stop: int
    skip: np.ndarray
    ids: IdFiles | None = None


def write_corpus_chunk(task: WriteChunk) -> tuple[int, int, int, int]:
    """Read, check, store one chunk, its ids before its vectors; returns (chunk, bytes, crc, crc of the ids)."""
    block = _kept_rows(task, task.origin, _scan_rows(task.origin))
    bad = nonfinite_rows(block)
    if len(bad):
        rows = tuple(int(row) + task.start for row in bad[:LISTED_ROWS])
        raise NonFiniteError(f"{len(bad)} rows are not finite", rows, len(bad))
    objects, target = open_objects(task.target.url), task.target
    ids_crc, nbytes = 0, 0
    if task.ids is not None and target.ids is not None:
        packed = target.ids.pack(_kept_rows(task, task.ids, SCAN_IDS))
        ids = write_chunk(objects, ids_prefix(target.segment), task.chunk, packed)
        ids_crc, nbytes = ids.crc, ids.nbytes
    written = write_chunk(objects, vectors_prefix(target.segment), task.chunk, np.ascontiguousarray(block))
    events.add(rows=len(block))
    return task.chunk, written.nbytes + nbytes, written.crc, ids_crc


def _kept_rows(task: WriteChunk, origin: Origin | IdFiles, step: int) -> np.ndarray:
    """What a chunk takes of an origin; read a few at a time where bad rows lie between, which may be millions."""
    if not len(task.skip):
        return origin.read(task.start, task.stop)
    parts = []
    for low in range(task.start, task.stop, step):
        high = min(low + step, task.stop)
        inside = task.skip[slice(*np.searchsorted(task.skip, (low, high)))]
        if len(inside) < high - low:
            parts.append(np.delete(origin.read(low, high), inside - low, axis=0))
    return np.concatenate(parts)


def _scan_rows(origin: Origin) -> int:
    return max(1, SCAN_ROWS_BYTES // (origin.dim * np.dtype(origin.dtype).itemsize))


def store_chunks(
    target: Target,
    origin: Origin,
    ids: IdFiles | None,
    bad: np.ndarray,
    advance: Callable[[int], None],
    context: Context,
) -> Stored:
    """Write the chunks that an earlier run did not, check those it did."""
    target.create()
    there, spec = target.stored(), target.spec
    tasks = plan(target, origin, ids, bad, there)

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
            inherited=there,
        )
    except NonFiniteError:
        raise _all_nonfinite(origin, context) from None
    nbytes = sum(there.values()) + sum(size for _, size, _, _ in written)
    digests = np.zeros((2, spec.n_chunks), "<u4")
    digests[:, [chunk for chunk, *_ in written]] = np.array([crcs for _, _, *crcs in written], "<u4").reshape(-1, 2).T
    digests[0, list(there)] = _check_stored(target, vectors_prefix(target.segment), list(there), context)
    if target.ids is None:
        return Stored(digests[0], None, nbytes)
    digests[1, list(there)] = _check_stored(target, ids_prefix(target.segment), list(there), context)
    return Stored(digests[0], digests[1], nbytes)


def plan(
    target: Target, origin: Origin, ids: IdFiles | None, bad: np.ndarray, there: Container[int]
) -> list[WriteChunk]:
    """A task for each chunk that is not ``there`` yet: which origin rows, without the ``bad`` ones, make it up."""
    kept_before = bad - np.arange(len(bad))  # number of kept rows before each bad one
    tasks = []
    for chunk in range(target.spec.n_chunks):
        if chunk not in there:
            start, stop = target.spec.bounds(chunk)
            before_first, before_last = np.searchsorted(kept_before, (start, stop - 1), side="right").tolist()
            low, high = start + before_first, stop + before_last
            inside = bad[slice(*np.searchsorted(bad, (low, high)))]
            part = None if ids is None else ids.part(low, high)
            tasks.append(WriteChunk(target, chunk, origin.part(low, high), low, high, inside, part))
    return tasks


@dataclass(frozen=True)
class ScanRows:
    origin: Origin
    start: int
    stop: int


def find_nonfinite_rows(task: ScanRows) -> np.ndarray:
    """Numbers of the rows in [start, stop) that hold NaN or infinity."""
    return nonfinite_rows(task.origin.read(task.start, task.stop)) + task.start


def find_nonfinite(origin: Origin, context: Context) -> np.ndarray:
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
    bad = find_nonfinite(origin, context)
    listed = ", ".join(str(row) for row in bad[:LISTED_ROWS]) + (", ..." if len(bad) > LISTED_ROWS else "")
    return NonFiniteError(
        f"{len(bad)} of {origin.rows} rows hold NaN or infinity: {listed}; nothing was published. "
        "Mend them, or leave them out with --nonfinite=drop",
        tuple(int(row) for row in bad[:LISTED_ROWS]),
        len(bad),
    )


@dataclass(frozen=True)
class CheckChunks:
    """Chunks of an array of a segment that an earlier run stored."""

    target: Target
    prefix: str
    chunks: tuple[int, ...]


def check_stored_chunks(task: CheckChunks) -> list[int]:
    """crc32c of each chunk, after reading it: a machine that lost power may have kept a part of it."""
    objects, segment = open_objects(task.target.url), task.target.segment
    digests = []
    for chunk in task.chunks:
        found = find_chunk(objects, task.prefix, chunk)
        if found.fault is not None:
            raise IntegrityError(
                f"chunk {chunk} of segment {segment}, left in {objects.url} by an earlier run, {found.fault}; nothing "
                f"was published: remove the segment with 'och gc {objects.url} --job {segment}' and ingest again"
            )
        digests.append(found.crc)
    return digests


def _check_stored(target: Target, prefix: str, chunks: list[int], context: Context) -> list[int]:
    size = CHUNKS_PER_CHECK
    tasks = [CheckChunks(target, prefix, tuple(chunks[i : i + size])) for i in range(0, len(chunks), size)]
    parts = map_tasks(check_stored_chunks, tasks, client=context.client, name="check_stored_chunks")
    return [digest for part in parts for digest in part]
