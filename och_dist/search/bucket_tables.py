"""Bucket tables for multi-index hashing: one task per partition, each of which writes its tables and then a record."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import numpy as np

from och_dist import store
from och_dist.cluster import check_memory, map_tasks
from och_dist.errors import ConflictError, UsageError
from och_dist.kernels.buckets import MAX_SUBSTRING_BITS, cut_bits, read_substring, sort_table, substring_count
from och_dist.kernels.packing import code_words
from och_dist.options import Option, checked
from och_dist.stage import WORKING_BYTES, Context, Report, Stopwatch
from och_dist.store import PARTITION_ROWS, Index, IndexRef, TablePartition

LEAST_ROWS = 1 << 16
"""A partition of fewer rows gets no tables: it is scanned in less time than a few buckets are found."""


def build_partition(ref: IndexRef, part: TablePartition) -> int:
    """Sort the codes of a partition into tables and store them; returns the bytes written."""
    index = ref.open()
    if store.has_tables(index, part):  # another attempt was faster
        return 0
    written = store.write_tables(index, part, _tables(index, part))
    folder = index.segments[part.segment].job.folder
    if index.objects.size(f"{folder}/job.json") is None:
        index.objects.delete_below(f"{folder}/{store.TABLES}")
        raise ConflictError(
            f"{index.url}/{folder} was collected while its tables were made; run 'och tables {index.url}' again"
        )
    return written


def _tables(index: Index, part: TablePartition) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    codes, filled = np.empty((part.rows, -(-index.bits // 8)), np.uint8), 0
    for chunk in part.chunks:
        block = index.read(chunk)
        codes[filled : filled + len(block)] = block
        filled += len(block)
    words = code_words(codes)
    for start, width in zip(*cut_bits(index.bits, part.substrings), strict=True):
        yield sort_table(read_substring(words, start, width), int(width))


def task_bytes(part: TablePartition, index: Index) -> int:
    """Memory of one task: codes and their words, one table with its values, and that again while it is written."""
    offsets = part.specs(index)["offsets"]
    return part.rows * (-(-index.bits // 8) + 8 * -(-index.bits // 64) + 6 * 4) + 5 * 4 * offsets.width


@checked
def build_tables(
    index: str,
    *,
    substring_bits: Annotated[int | None, Option("Bits of a substring [default: by the number of rows].")] = None,
    partition_rows: Annotated[int, Option("Rows that share a table.", at_least=1)] = PARTITION_ROWS,
    least_rows: Annotated[int, Option("Fewer rows get no table.")] = LEAST_ROWS,
    remove: Annotated[bool, Option("Remove all tables instead.")] = False,
    context: Context | None = None,
) -> Report:
    """Make the bucket tables that the newest version of ``index`` lacks, or delete all there are.

    Tables are a copy of what the codes say, sorted: they change no result and no version.
    """
    watch, context = Stopwatch("tables"), context or Context()
    opened, substrings = store.open_version(index), None
    if remove:
        removed = store.remove_tables(store.open_objects(index))
        return watch.report(
            "done" if removed else "nothing to do", index=opened.url, version=opened.version, objects_removed=removed
        )
    if substring_bits is not None:
        most = min(opened.bits, MAX_SUBSTRING_BITS)
        if not 1 <= substring_bits <= most:
            raise UsageError(f"substring_bits={substring_bits}; use 1 to {most} for {opened.bits} bits")
        substrings = -(-opened.bits // substring_bits)
    parts: list[TablePartition] = []
    for number, segment in enumerate(opened.segments):
        count = substring_count(opened.bits, min(partition_rows, segment.job.stored_rows))
        parts += store.cut_segment(opened, number, partition_rows, substrings or count)
    wanted = [part for part in parts if part.rows >= least_rows]
    missing = [part for part in wanted if not store.has_tables(opened, part)]
    if missing:
        needed = max(task_bytes(part, opened) for part in missing)
        check_memory(context.client, needed + WORKING_BYTES, f"a table of {partition_rows} rows (--partition-rows)")
    written = map_tasks(
        partial(build_partition, opened.ref),
        missing,
        client=context.client,
        name="build_partition",
        advance=context.progress("tables", sum(part.rows for part in missing)),
        weight=lambda part: part.rows,
    )
    return watch.report(
        "done" if missing else "nothing to do",
        index=opened.url,
        version=opened.version,
        partitions=len(wanted),
        built=len(missing),
        rows=sum(part.rows for part in wanted),
        small_rows=sum(part.rows for part in parts if part.rows < least_rows),
        substrings=sorted({part.substrings for part in wanted}),
        bytes_out=sum(written),
        memory_bytes=sum(part.nbytes(opened) for part in wanted),
        notes=[] if wanted else [f"no part has {least_rows} rows; so few rows are scanned faster than looked up"],
    )
