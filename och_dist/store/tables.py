"""Bucket tables beside the codes of an index: derived data, of which readers of the codes need not know.

The codes of a segment are cut into partitions of whole chunks. Below the segment's folder, so that it goes when the
segment goes, lies for every partition one Zarr array of sorted rows, one of bucket offsets, and, put last, a sealed
record. It states the cut of the bits and the crc32c of every chunk of tables and of the codes they were made from:
tables without a record, or with that of other codes, do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from och_dist.errors import IntegrityError
from och_dist.store.arrays import ArraySpec, create_array, find_chunk, open_layout, write_chunk
from och_dist.store.index import CodeChunk, Index
from och_dist.store.manifest import pack_numbers, read_document, seal, unseal
from och_dist.store.objects import Objects

if TYPE_CHECKING:  # and else by the functions that compute with tables: Numba takes 60 MB, which few workers need
    from och_dist.kernels.buckets import BucketTables
    from och_dist.kernels.hamming import CodeBlock

FORMAT = 1
TABLES = "tables"
PARTITION_ROWS = 1 << 24
NAME = re.compile(r"([1-9]\d{0,9})x([1-9]\d{0,2})")


@dataclass(frozen=True)
class TableLayout:
    """How codes are cut: partitions of ``partition_rows`` (whole chunks, and at least one), ``substrings`` of bits."""

    partition_rows: int
    substrings: int

    @property
    def name(self) -> str:
        return f"{self.partition_rows}x{self.substrings}"

    @classmethod
    def from_name(cls, name: str) -> TableLayout | None:
        found = NAME.fullmatch(name)
        return None if found is None else cls(int(found[1]), int(found[2]))


@dataclass(frozen=True)
class TablePartition:
    """Adjoining chunks of one segment, partition ``number`` of it; ``layout`` is None where there are no tables."""

    segment: int
    number: int
    chunks: tuple[CodeChunk, ...]
    rows: int
    layout: TableLayout | None = None

    def prefix(self, index: Index) -> str:
        """The folder of its tables; the record is a file of that name."""
        assert self.layout is not None  # asked only of partitions that have, or will have, tables
        return f"{index.segments[self.segment].folder}/{TABLES}/{self.layout.name}/{self.number:06d}"

    def specs(self, index: Index) -> tuple[ArraySpec, ArraySpec]:
        """Layout of the sorted rows (m, rows) and of the offsets (m, values + 1), one chunk per table."""
        from och_dist.kernels.buckets import cut_bits

        assert self.layout is not None
        count = self.layout.substrings
        widths = cut_bits(index.bits, count)[1]
        return ArraySpec(count, self.rows, "<u4", 1), ArraySpec(count, (1 << int(widths[0])) + 1, "<u4", 1)

    def nbytes(self, index: Index) -> int:
        """Memory of its tables in use, beside the codes; 0 without."""
        from och_dist.kernels.buckets import table_bytes

        return 0 if self.layout is None else table_bytes(index.bits, self.rows, self.layout.substrings)


def default_layout(index: Index, segment: int, partition_rows: int, substrings: int | None) -> TableLayout:
    """The layout of a segment; the number of substrings follows from the rows of a partition unless it is given."""
    from och_dist.kernels.buckets import substring_count

    rows = min(partition_rows, index.segments[segment].job.stored_rows)
    return TableLayout(partition_rows, substrings or substring_count(index.bits, rows))


def cut_segment(index: Index, segment: int, partition_rows: int, layout: TableLayout | None) -> list[TablePartition]:
    """The partitions of a segment; one that holds no codes has none."""
    spec = index.segments[segment].job.spec
    first = sum(part.job.spec.n_chunks for part in index.segments[:segment])
    size = max(1, partition_rows // spec.chunk_rows)
    partitions = []
    for number, low in enumerate(range(0, spec.n_chunks, size)):
        high = min(low + size, spec.n_chunks)
        rows = spec.bounds(high - 1)[1] - spec.bounds(low)[0]
        partitions.append(TablePartition(segment, number, index.chunks[first + low : first + high], rows, layout))
    return partitions


def find_tables(index: Index) -> list[TablePartition]:
    """All chunks of an index in partitions, in row order; those that have tables say so by their layout.

    A segment may have tables of several layouts: the one that covers most rows is taken.
    """
    found: list[TablePartition] = []
    for segment in range(len(index.segments)):
        best = cut_segment(index, segment, PARTITION_ROWS, None)
        for layout in _stored_layouts(index, segment):
            parts = cut_segment(index, segment, layout.partition_rows, layout)
            parts = [part if has_tables(index, part) else replace(part, layout=None) for part in parts]
            best = max(best, parts, key=lambda parts: sum(part.rows for part in parts if part.layout is not None))
        found += best
    return found


def _stored_layouts(index: Index, segment: int) -> list[TableLayout]:
    names = index.objects.folders(f"{index.segments[segment].folder}/{TABLES}")
    return [layout for layout in map(TableLayout.from_name, names) if layout is not None]


def expected_record(index: Index, part: TablePartition) -> dict[str, Any]:
    """What the record of a partition must say, but for the checksums of the tables."""
    assert part.layout is not None
    chunks = [chunk.chunk for chunk in part.chunks]
    return {
        "format": FORMAT,
        "kind": "bucket tables",
        "bits": index.bits,
        "substrings": part.layout.substrings,
        "partition": part.number,
        "chunks": [chunks[0], chunks[-1] + 1],
        "rows": part.rows,
        "codes": pack_numbers(index.segments[part.segment].digests[chunks]),
    }


def read_record(index: Index, part: TablePartition) -> dict[str, list[int]] | None:
    """Checksums {"row_digests": (m,), "offset_digests": (m,)} of the tables; None unless they are of these codes."""
    key = f"{part.prefix(index)}.json"
    data = read_document(index.objects, key)
    if data is None:
        return None
    try:
        body = unseal(data, f"{index.url}/{key}")
    except IntegrityError as error:
        raise _damaged(index, part, str(error)) from None
    digests = {name: body.pop(name, None) for name in ("row_digests", "offset_digests")}
    count = part.layout.substrings if part.layout is not None else 0
    if body != expected_record(index, part):
        return None
    if any(not isinstance(found, list) or len(found) != count for found in digests.values()):
        raise _damaged(index, part, "its record lacks checksums")
    return digests


def has_tables(index: Index, part: TablePartition) -> bool:
    """Whether there is a record of tables of exactly these codes."""
    return read_record(index, part) is not None


def write_tables(index: Index, part: TablePartition, tables: Iterator[tuple[np.ndarray, np.ndarray]]) -> int:
    """Store the (rows, offsets) of every table of a partition and then its record; returns the bytes written."""
    objects, prefix = index.objects, part.prefix(index)
    rows_spec, offsets_spec = part.specs(index)
    create_array(objects, f"{prefix}/rows", rows_spec)
    create_array(objects, f"{prefix}/offsets", offsets_spec)
    digests: dict[str, list[int]] = {"row_digests": [], "offset_digests": []}
    total = 0
    for number, (rows, offsets) in enumerate(tables):
        padded = np.full((1, offsets_spec.width), part.rows, np.uint32)
        padded[0, : len(offsets)] = offsets
        for array, values in (("row", rows[None]), ("offset", padded)):
            written = write_chunk(objects, f"{prefix}/{array}s", number, values)
            digests[f"{array}_digests"].append(written.crc)
            total += written.nbytes
    objects.put(f"{prefix}.json", seal({**expected_record(index, part), **digests}))
    return total


def open_tables(index: Index, part: TablePartition, block: CodeBlock) -> BucketTables | None:
    """The tables of a partition, checked, for the ``block`` of its codes; None where there are none.

    Damage raises :class:`IntegrityError`; tables that are removed meanwhile are none.
    """
    from och_dist.kernels.buckets import cut_bits, join_tables

    digests = None if part.layout is None else read_record(index, part)
    if digests is None:
        return None
    if block.n != part.rows:
        raise IntegrityError(f"{block.n} codes were read of a partition of {part.rows}; run 'och verify {index.url}'")
    try:
        rows_spec, offsets_spec = part.specs(index)
        widths = cut_bits(index.bits, rows_spec.rows)[1]
        rows = list(_stored(index, f"{part.prefix(index)}/rows", rows_spec, digests["row_digests"]))
        offsets = _stored(index, f"{part.prefix(index)}/offsets", offsets_spec, digests["offset_digests"])
        trimmed = [own[: (1 << int(width)) + 1] for own, width in zip(offsets, widths, strict=True)]
        return join_tables(block, rows, trimmed)
    except IntegrityError as error:
        if read_record(index, part) is None:
            return None
        raise _damaged(index, part, str(error)) from error


def _stored(index: Index, prefix: str, spec: ArraySpec, digests: list[int]) -> Iterator[np.ndarray]:
    """The rows of an array, each one chunk, whose checksums must be ``digests``."""
    open_layout(index.objects, prefix, spec)  # its metadata must say what the record does
    for number, digest in enumerate(digests):
        known = "of its record"
        found = find_chunk(index.objects, prefix, number, stated=digest, nbytes=spec.stored_bytes, known=known)
        if found.fault is not None:
            raise IntegrityError(f"chunk {number} of {index.url}/{prefix} {found.fault}; run 'och verify'")
        yield found.rows(spec, number)[0]


def _damaged(index: Index, part: TablePartition, what: str) -> IntegrityError:
    return IntegrityError(
        f"the bucket tables {index.url}/{part.prefix(index)} are damaged ({what}); the codes are not: "
        f"remove the tables with 'och tables {index.url} --remove', and make them again with 'och tables {index.url}'"
    )


def table_arrays(index: Index, segment: int) -> list[tuple[str, ArraySpec, np.ndarray]]:
    """(folder, layout, checksums) of every stored array of tables of a segment."""
    found = []
    for layout in _stored_layouts(index, segment):
        for part in cut_segment(index, segment, layout.partition_rows, layout):
            if (digests := read_record(index, part)) is not None:
                for name, spec in zip(("row", "offset"), part.specs(index), strict=True):
                    found.append((f"{part.prefix(index)}/{name}s", spec, np.array(digests[f"{name}_digests"], "<u4")))
    return found


def remove_tables(objects: Objects, folders: Sequence[str] | None = None) -> int:
    """Delete the tables of all segments, or of those in ``folders``, records first; returns the number of objects."""
    removed = 0
    for folder in [f"segments/{name}" for name in objects.folders("segments")] if folders is None else folders:
        keys = [key for key, _, _ in objects.list(f"{folder}/{TABLES}")]
        records = [key for key in keys if key.count("/") == 4 and key.endswith(".json")]
        objects.delete_all(records)
        objects.delete_all([key for key in keys if key not in set(records)])
        removed += len(keys)
    return removed
