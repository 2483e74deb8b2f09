"""The chunks of a new segment of a corpus: which rows make them up, and writing and checking them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from och_dist import events, store
from och_dist.cluster import map_tasks
from och_dist.errors import BadInputError, IntegrityError, NonFiniteError
from och_dist.kernels.moments import nonfinite_rows
from och_dist.sources import JoinedFiles, RowSource
from och_dist.stage import Context
from och_dist.store import ArraySpec, IdLayout

PART_BYTES = 64 << 20
PART_ROWS = 1 << 17
MAX_DROPPED = 10_000_000

Part = tuple[RowSource, int, int]  # rows [start, stop) of a source
Written = tuple[int, int, list[int]]  # number of a chunk, its bytes in all arrays, its crc32c in each


def in_parts(source: RowSource) -> list[Part]:
    """All rows of a source in parts that a task reads at once."""
    step = _part_rows(source)
    ranges = ((start, min(start + step, source.rows)) for start in range(0, source.rows, step))
    return [(source.part(start, stop), start, stop) for start, stop in ranges]


def _part_rows(source: RowSource) -> int:
    return min(max(1, PART_BYTES // (source.dim * np.dtype(source.dtype).itemsize)), PART_ROWS)


@dataclass(frozen=True)
class NewSegment:
    """The arrays of a segment that is not published yet: ``spec`` of its vectors, ``ids`` of its ids.

    Its first row will be row ``start`` of the corpus.
    """

    url: str
    id: str
    start: int
    spec: ArraySpec
    ids: IdLayout | None = None

    @property
    def arrays(self) -> dict[str, ArraySpec]:
        """Prefix -> layout: the vectors, then the ids where there are some."""
        found = {store.vectors_prefix(self.id): self.spec}
        if self.ids is not None:
            found[store.ids_prefix(self.id)] = self.ids.spec(self.spec.rows, self.spec.chunk_rows)
        return found

    def rows_of(self, chunk: int) -> int:
        low, high = self.spec.bounds(chunk)
        return high - low

    def stored(self) -> list[int]:
        """Numbers of the chunks that an earlier run stored in all arrays."""
        objects, chunks = store.open_objects(self.url), set(range(self.spec.n_chunks))
        return sorted(chunks.intersection(*(store.stored_chunks(objects, prefix) for prefix in self.arrays)))

    def id_blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """(global row, ids as they are stored), chunk by chunk."""
        prefix = store.ids_prefix(self.id)
        array = store.open_layout(store.open_objects(self.url), prefix, self.arrays[prefix])
        for chunk in range(self.spec.n_chunks):
            low, high = self.spec.bounds(chunk)
            yield self.start + low, store.read_rows(array, low, high)


@dataclass(frozen=True)
class WriteChunk:
    """One output chunk: rows [start, stop) of the source without those in ``skip`` (ascending)."""

    segment: NewSegment
    chunk: int
    source: RowSource
    start: int
    stop: int
    skip: np.ndarray


def write_corpus_chunk(task: WriteChunk) -> Written:
    """Read, check and store one chunk, its ids before its vectors."""
    segment, source = task.segment, task.source
    block = _kept_rows(task, source.read)
    bad = nonfinite_rows(block)
    if len(bad):
        raise NonFiniteError(f"{len(bad)} rows are not finite", (), len(bad))
    blocks = {store.vectors_prefix(segment.id): block}
    if segment.ids is not None and isinstance(source, JoinedFiles):
        blocks[store.ids_prefix(segment.id)] = segment.ids.pack(_kept_rows(task, source.read_ids))
    objects = store.open_objects(segment.url)
    written = [store.write_chunk(objects, prefix, task.chunk, rows) for prefix, rows in reversed(blocks.items())]
    events.add(rows=len(block))
    return task.chunk, sum(part.nbytes for part in written), [part.crc for part in reversed(written)]


def _kept_rows(task: WriteChunk, read: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """What a chunk takes of a source; read a few at a time where bad rows lie between, which may be millions."""
    if not len(task.skip):
        return read(task.start, task.stop)
    parts, step = [], _part_rows(task.source)
    for low in range(task.start, task.stop, step):
        high = min(low + step, task.stop)
        inside = task.skip[slice(*np.searchsorted(task.skip, (low, high)))]
        if len(inside) < high - low:
            parts.append(np.delete(read(low, high), inside - low, axis=0))
    return np.concatenate(parts)


def store_chunks(
    segment: NewSegment, source: RowSource, bad: np.ndarray, stage: str, context: Context
) -> tuple[np.ndarray, int]:
    """Write the chunks that an earlier run did not, check those it did; (crcs (arrays, chunks), bytes of all)."""
    for prefix, spec in segment.arrays.items():
        store.create_array(store.open_objects(segment.url), prefix, spec)
    there = segment.stored()
    tasks = plan(segment, source, bad, frozenset(there))
    advance = context.progress(stage, segment.spec.rows)
    advance(sum(map(segment.rows_of, there)))
    try:
        stored = map_tasks(
            write_corpus_chunk,
            tasks,
            client=context.client,
            name="write_corpus_chunk",
            advance=advance,
            weight=lambda task: segment.rows_of(task.chunk),
            inherited=there,
        )
    except NonFiniteError:
        # The full list, from a pass of its own: which chunks were still to do must not decide what is reported.
        bad = find_nonfinite(source, context)
        remedy = "nothing was published. Mend them, or leave them out with --nonfinite=drop"
        raise NonFiniteError.of(f"of {source.rows} rows", bad, len(bad), remedy) from None
    check = partial(check_stored_chunk, segment)
    stored += map_tasks(check, there, client=context.client, name="check_stored_chunk")
    digests = np.array([crcs for _, _, crcs in sorted(stored)], "<u4").T
    return digests, sum(nbytes for _, nbytes, _ in stored)


def plan(segment: NewSegment, source: RowSource, bad: np.ndarray, there: Container[int]) -> list[WriteChunk]:
    """A task for each chunk that is not ``there`` yet: which rows, without the ``bad`` ones, make it up."""
    kept_before = bad - np.arange(len(bad))  # number of kept rows before each bad one
    tasks = []
    for chunk in range(segment.spec.n_chunks):
        if chunk not in there:
            start, stop = segment.spec.bounds(chunk)
            before_first, before_last = np.searchsorted(kept_before, (start, stop - 1), side="right").tolist()
            low, high = start + before_first, stop + before_last
            inside = bad[slice(*np.searchsorted(bad, (low, high)))]
            tasks.append(WriteChunk(segment, chunk, source.part(low, high), low, high, inside))
    return tasks


def check_stored_chunk(segment: NewSegment, chunk: int) -> Written:
    """Read a chunk again: a machine that lost power may have kept a part of it."""
    objects, name = store.open_objects(segment.url), segment.id
    found = [store.find_chunk(objects, prefix, chunk) for prefix in segment.arrays]
    for part in found:
        if part.fault is not None:
            raise IntegrityError(
                f"chunk {chunk} of segment {name}, left in {objects.url} by an earlier run, {part.fault}; nothing "
                f"was published: remove the segment with 'och gc {objects.url} --job {name}' and ingest again"
            )
    return chunk, sum(len(part.data) for part in found), [part.crc for part in found]


def find_nonfinite_rows(part: Part) -> np.ndarray:
    """Numbers of the rows in [start, stop) that hold NaN or infinity."""
    source, start, stop = part
    return nonfinite_rows(source.read(start, stop)) + start


def find_nonfinite(source: RowSource, context: Context) -> np.ndarray:
    """One pass over the files for rows that are not finite; ascending row numbers."""
    found = map_tasks(
        find_nonfinite_rows,
        in_parts(source),
        client=context.client,
        name="find_nonfinite_rows",
        advance=context.progress("scan", source.rows),
        weight=lambda part: part[2] - part[1],
    )
    bad = np.concatenate(found)
    if len(bad) > MAX_DROPPED:
        raise BadInputError(f"{len(bad)} of {source.rows} rows are not finite; mend the files before ingesting them")
    return bad
