"""Bucket tables beside the codes of an index: derived data, of which readers of the codes need not know.

The codes of a segment are cut into partitions of whole chunks. Below the segment's folder, so that it goes when the
segment goes, lies for every partition one Zarr array of sorted rows, one of bucket offsets, and, put last, a sealed
record. It states the cut of the bits and the crc32c of every chunk of tables and of the codes they were made from:
tables without a record, or with that of other codes, do not count.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from och_dist.errors import IntegrityError
from och_dist.store.arrays import ArraySpec, create_array, open_layout, read_plain_chunk, write_chunk
from och_dist.store.index import CodeChunk, Index
from och_dist.store.manifest import StoredArray, pack_numbers, read_sealed, seal
from och_dist.store.objects import Objects

if TYPE_CHECKING:  # and else by the functions that compute with tables: Numba takes 60 MB, which few workers need
    from och_dist.kernels.buckets import BucketTables
    from och_dist.kernels.hamming import CodeBlock

FORMAT = 1
TABLES = "tables"
PARTITION_ROWS = 1 << 24
NAME = re.compile(r"([1-9]\d{0,9})x([1-9]\d{0,2})")
DIGESTS = {"rows": "row_digests", "offsets": "offset_digests"}
"""The arrays of tables, and what the record calls their checksums."""


@dataclass(frozen=True)
class TablePartition:
    """Adjoining chunks of one segment: partition ``number`` of those of ``partition_rows`` rows, but a chunk at least.

    Its tables cut the bits into ``substrings``; 0 where there are no tables.
    """

    segment: int
    number: int
    chunks: tuple[CodeChunk, ...]
    rows: int
    partition_rows: int
    substrings: int = 0

    def prefix(self, index: Index) -> str:
        """The folder of its tables; the record is a file of that name."""
        folder = f"{index.segments[self.segment].folder}/{TABLES}"
        return f"{folder}/{self.partition_rows}x{self.substrings}/{self.number:06d}"

    def specs(self, index: Index) -> dict[str, ArraySpec]:
        """Layouts of its arrays, a chunk for each of m tables: sorted rows (m, rows), offsets (m, values + 1)."""
        from och_dist.kernels.buckets import cut_bits

        count = self.substrings
        values = 1 << int(cut_bits(index.bits, count)[1][0])
        return {"rows": ArraySpec(count, self.rows, "<u4", 1), "offsets": ArraySpec(count, values + 1, "<u4", 1)}

    def nbytes(self, index: Index) -> int:
        """Memory of its tables in use, beside the codes; 0 without."""
        from och_dist.kernels.buckets import table_bytes

        return table_bytes(index.bits, self.rows, self.substrings) if self.substrings else 0


def cut_segment(index: Index, segment: int, partition_rows: int, substrings: int = 0) -> list[TablePartition]:
    """The partitions of a segment; one that holds no codes has none."""
    spec = index.segments[segment].job.spec
    first = sum(part.job.spec.n_chunks for part in index.segments[:segment])
    size = max(1, partition_rows // spec.chunk_rows)
    partitions = []
    for number, low in enumerate(range(0, spec.n_chunks, size)):
        high = min(low + size, spec.n_chunks)
        rows = spec.bounds(high - 1)[1] - spec.bounds(low)[0]
        chunks = index.chunks[first + low : first + high]
        partitions.append(TablePartition(segment, number, chunks, rows, partition_rows, substrings))
    return partitions


def find_tables(index: Index) -> list[TablePartition]:
    """All chunks of an index in partitions, in row order; those without tables have 0 substrings.

    A segment may have tables of several cuts: those that cover most rows are taken.
    """
    found: list[TablePartition] = []
    for segment in range(len(index.segments)):
        cuts = [cut_segment(index, segment, PARTITION_ROWS)]
        for parts in _stored_cuts(index, segment):
            cuts.append([part if has_tables(index, part) else replace(part, substrings=0) for part in parts])
        found += max(cuts, key=lambda parts: sum(part.rows for part in parts if part.substrings))
    return found


def _stored_cuts(index: Index, segment: int) -> list[list[TablePartition]]:
    """The partitions of a segment in each way for which there is a folder, '<partition_rows>x<substrings>'."""
    names = index.objects.folders(f"{index.segments[segment].folder}/{TABLES}")
    cuts = [found for found in map(NAME.fullmatch, names) if found is not None]
    return [cut_segment(index, segment, int(found[1]), int(found[2])) for found in cuts]


def expected_record(index: Index, part: TablePartition) -> dict[str, Any]:
    """What the record of a partition must say, but for the checksums of the tables."""
    chunks = [chunk.number for chunk in part.chunks]
    return {
        "format": FORMAT,
        "kind": "bucket tables",
        "bits": index.bits,
        "substrings": part.substrings,
        "partition": part.number,
        "chunks": [chunks[0], chunks[-1] + 1],
        "rows": part.rows,
        "codes": pack_numbers(index.segments[part.segment].digests[chunks]),
    }


def read_record(index: Index, part: TablePartition) -> dict[str, list[int]] | None:
    """Checksums (m,) of the tables, by the array they are in; None unless the tables are of these codes."""
    try:
        body = read_sealed(index.objects, f"{part.prefix(index)}.json")
    except IntegrityError as error:
        raise _damaged(index, part, str(error)) from None
    if body is None:
        return None
    digests = {name: body.pop(field, None) for name, field in DIGESTS.items()}
    if body != expected_record(index, part):
        return None
    if any(not isinstance(found, list) or len(found) != part.substrings for found in digests.values()):
        raise _damaged(index, part, "its record lacks checksums")
    return digests


def has_tables(index: Index, part: TablePartition) -> bool:
    """Whether there is a record of tables of exactly these codes."""
    return read_record(index, part) is not None


def write_tables(index: Index, part: TablePartition, tables: Iterator[tuple[np.ndarray, np.ndarray]]) -> int:
    """Store the (rows, offsets) of every table of a partition and then its record; returns the bytes written."""
    objects, prefix, specs = index.objects, part.prefix(index), part.specs(index)
    digests: dict[str, list[int]] = {name: [] for name in specs}
    total = 0
    for name, spec in specs.items():
        create_array(objects, f"{prefix}/{name}", spec)
    for number, (rows, offsets) in enumerate(tables):
        padded = np.full(specs["offsets"].width, part.rows, np.uint32)
        padded[: len(offsets)] = offsets
        for name, values in (("rows", rows), ("offsets", padded)):
            written = write_chunk(objects, f"{prefix}/{name}", number, values[None])
            digests[name].append(written.crc)
            total += written.nbytes
    checksums = {DIGESTS[name]: values for name, values in digests.items()}
    objects.put(f"{prefix}.json", seal({**expected_record(index, part), **checksums}))
    return total


def open_tables(index: Index, part: TablePartition, block: CodeBlock) -> BucketTables | None:
    """The tables of a partition, checked, for the ``block`` of its codes; None where there are none.

    Damage raises :class:`IntegrityError`; tables that are removed meanwhile are none.
    """
    from och_dist.kernels.buckets import cut_bits, join_tables

    digests = read_record(index, part) if part.substrings else None
    if digests is None:
        return None
    if block.n != part.rows:
        raise IntegrityError(f"{block.n} codes were read of a partition of {part.rows}; run 'och verify {index.url}'")
    try:
        rows, padded = (_read_array(index, part, name, digests[name]) for name in DIGESTS)
        widths = cut_bits(index.bits, len(rows))[1]
        offsets = [own[: (1 << int(width)) + 1] for own, width in zip(padded, widths, strict=True)]
        return join_tables(block, rows, offsets)
    except IntegrityError as error:
        if read_record(index, part) is None:
            return None
        raise _damaged(index, part, str(error)) from error


def _read_array(index: Index, part: TablePartition, name: str, digests: list[int]) -> list[np.ndarray]:
    """The rows of an array, each one chunk, whose checksums must be ``digests``."""
    objects, prefix, spec = index.objects, f"{part.prefix(index)}/{name}", part.specs(index)[name]
    open_layout(objects, prefix, spec)  # its metadata must say what the record does
    return [read_plain_chunk(objects, prefix, spec, n, stated=crc)[0] for n, crc in enumerate(digests)]


def _damaged(index: Index, part: TablePartition, what: str) -> IntegrityError:
    return IntegrityError(
        f"the bucket tables {index.url}/{part.prefix(index)} are damaged ({what}); the codes are not: "
        f"remove the tables with 'och tables {index.url} --remove', and make them again with 'och tables {index.url}'"
    )


def table_arrays(index: Index, segment: int) -> Iterator[StoredArray]:
    """Every array of the tables of a segment."""
    for part in itertools.chain.from_iterable(_stored_cuts(index, segment)):
        digests = read_record(index, part)
        if digests is not None:
            for name, spec in part.specs(index).items():
                yield f"{part.prefix(index)}/{name}", spec, np.array(digests[name], "<u4")


def remove_tables(objects: Objects, folders: Sequence[str] | None = None) -> int:
    """Delete the tables of all segments, or of those in ``folders``, records first; returns the number of objects."""
    if folders is None:
        folders = [f"segments/{name}" for name in objects.folders("segments")]
    removed = 0
    for folder in folders:
        keys = [key for key, _, _ in objects.list(f"{folder}/{TABLES}")]
        records = {key for key in keys if key.count("/") == 4 and key.endswith(".json")}
        objects.delete_all(sorted(records))
        objects.delete_all([key for key in keys if key not in records])
        removed += len(keys)
    return removed
