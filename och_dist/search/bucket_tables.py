"""Bucket tables for multi-index hashing: one task per partition, each of which writes its tables and then a record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from och_dist.cluster import check_memory, map_tasks
from och_dist.errors import ConflictError, UsageError
from och_dist.kernels.buckets import MAX_SUBSTRING_BITS, cut_bits, read_substring, sort_table
from och_dist.kernels.packing import code_words
from och_dist.options import Option, checked
from och_dist.stage import WORKING_BYTES, Context, Report, Stopwatch
from och_dist.store import (
    PARTITION_ROWS,
    TABLES,
    Index,
    IndexRef,
    TablePartition,
    cut_segment,
    default_layout,
    has_tables,
    open_objects,
    open_version,
    remove_tables,
    write_tables,
)

LEAST_ROWS = 1 << 16
"""A partition of fewer rows gets no tables: it is scanned in less time than a few buckets are found."""


@dataclass(frozen=True)
class BuildTables:
    """Make the tables of one partition."""

    index: IndexRef
    partition: TablePartition


def build_partition(task: BuildTables) -> int:
    """Sort the codes of a partition into tables and store them; returns the bytes written."""
    index, part = task.index.open(), task.partition
    if has_tables(index, part):  # another attempt was faster
        return 0
    written = write_tables(index, part, _tables(index, part))
    folder = index.segments[part.segment].job.folder
    if index.objects.size(f"{folder}/job.json") is None:
        index.objects.delete_below(f"{folder}/{TABLES}")
        raise ConflictError(
            f"{index.url}/{folder} was collected while its tables were made; run 'och tables {index.url}' again"
        )
    return written


def _tables(index: Index, part: TablePartition) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    assert part.layout is not None  # given by build_tables
    codes, filled = np.empty((part.rows, -(-index.bits // 8)), np.uint8), 0
    for chunk in part.chunks:
        block = index.read(chunk)
        codes[filled : filled + len(block)] = block
        filled += len(block)
    words = code_words(codes)
    for start, width in zip(*cut_bits(index.bits, part.layout.substrings), strict=True):
        yield sort_table(read_substring(words, start, width), int(width))


def task_bytes(part: TablePartition, index: Index) -> int:
    """Memory of one task: codes and their words, one table with its values, and that again while it is written."""
    _, offsets = part.specs(index)
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
    if remove:
        return _remove(watch, index)
    opened = open_version(index)
    substrings = None if substring_bits is None else _substrings(opened, substring_bits)
    wanted, small = _wanted(opened, partition_rows, substrings, least_rows)
    missing = [part for part in wanted if not has_tables(opened, part)]
    if missing:
        needed = max(task_bytes(part, opened) for part in missing)
        check_memory(context.client, needed + WORKING_BYTES, f"a table of {partition_rows} rows (--partition-rows)")
    written = map_tasks(
        build_partition,
        [BuildTables(opened.ref, part) for part in missing],
        client=context.client,
        name="build_partition",
        advance=context.progress("tables", sum(part.rows for part in missing)),
        weight=lambda task: task.partition.rows,
    )
    return watch.report(
        "done" if missing else "nothing to do",
        index=opened.url,
        version=opened.version,
        partitions=len(wanted),
        built=len(missing),
        rows=sum(part.rows for part in wanted),
        small_rows=small,
        substrings=sorted({part.layout.substrings for part in wanted if part.layout is not None}),
        bytes_out=sum(written),
        memory_bytes=sum(part.nbytes(opened) for part in wanted),
        notes=[] if wanted else [f"no part has {least_rows} rows; so few rows are scanned faster than looked up"],
    )


def _wanted(
    index: Index, partition_rows: int, substrings: int | None, least_rows: int
) -> tuple[list[TablePartition], int]:
    """The partitions that are to have tables, and the rows of those that are too small."""
    parts = [
        part
        for segment in range(len(index.segments))
        for part in cut_segment(
            index, segment, partition_rows, default_layout(index, segment, partition_rows, substrings)
        )
    ]
    wanted = [part for part in parts if part.rows >= least_rows]
    return wanted, sum(part.rows for part in parts) - sum(part.rows for part in wanted)


def _substrings(index: Index, substring_bits: int) -> int:
    if not 1 <= substring_bits <= min(index.bits, MAX_SUBSTRING_BITS):
        raise UsageError(
            f"substring_bits={substring_bits}; use 1 to {min(index.bits, MAX_SUBSTRING_BITS)} for {index.bits} bits"
        )
    return -(-index.bits // substring_bits)


def _remove(watch: Stopwatch, index: str) -> Report:
    opened = open_version(index)
    removed = remove_tables(open_objects(index))
    return watch.report(
        "done" if removed else "nothing to do", index=opened.url, version=opened.version, objects_removed=removed
    )
