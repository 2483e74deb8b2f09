"""Stored bucket tables: what is read back searches exactly, what does not belong is not taken, damage is found."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from och_dist.errors import IntegrityError
from och_dist.kernels.buckets import cut_bits, make_tables, read_substring, sort_table
from och_dist.kernels.hamming import CodeBlock, hamming_top_k, lay_out
from och_dist.kernels.packing import code_words
from och_dist.store.index import Index, IndexSegment, Job, next_version, open_version
from och_dist.store.manifest import commit_version, seal, unseal
from och_dist.store.objects import LocalObjects, open_objects
from och_dist.store.tables import (
    TablePartition,
    cut_segment,
    expected_record,
    find_tables,
    has_tables,
    open_tables,
    read_record,
    remove_tables,
    table_arrays,
    write_tables,
)

BITS = 20
LAYOUT = 16, 3


def make_index(url: str, sizes: tuple[int, ...] = (40, 25), seed: int = 0) -> Index:
    """An index of one segment per size, in chunks of 8 rows."""
    objects, index, segments = LocalObjects(url), None, ()
    rng = np.random.default_rng(seed)
    for number, size in enumerate(sizes):
        start = sum(sizes[:number])
        job = Job("ab" * 32, BITS, start, start + size, 8, f"digest {seed} {start}")
        job.begin(objects)
        codes = rng.integers(0, 256, (size, 3), dtype=np.uint8) & np.array([255, 255, 15], np.uint8)
        crcs = [
            job.write(objects, chunk, codes[slice(*job.spec.bounds(chunk))], "source").crc
            for chunk in range(job.spec.n_chunks)
        ]
        segments = (*segments, IndexSegment(job, np.array(crcs, "<u4")))
        index = next_version(index, segments, {"url": "/corpus", "version": 1, "fingerprint": "f"}, objects.url)
        assert commit_version(objects, index.to_json())
    return open_version(url)


def codes_of(index: Index, part: TablePartition) -> np.ndarray:
    return np.concatenate([index.read(chunk) for chunk in part.chunks])


def block_of(index: Index, part: TablePartition) -> CodeBlock:
    return lay_out(codes_of(index, part), index.bits)


def sorted_tables(index: Index, part: TablePartition) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    words = code_words(codes_of(index, part))
    for start, width in zip(*cut_bits(index.bits, part.substrings), strict=True):
        yield sort_table(read_substring(words, start, width), int(width))


def layout(part: TablePartition) -> tuple[int, int] | None:
    return (part.partition_rows, part.substrings) if part.substrings else None


def build(index: Index) -> list[TablePartition]:
    parts = [part for segment in range(len(index.segments)) for part in cut_segment(index, segment, *LAYOUT)]
    for part in parts:
        write_tables(index, part, sorted_tables(index, part))
    return parts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    build(make_index(str(folder / "index")))
    return folder


@pytest.fixture
def index(made: Path, tmp_path: Path) -> Index:
    """A copy to write to: 40 and 25 rows with tables of 16 rows a partition."""
    shutil.copytree(made / "index", tmp_path / "index")
    return open_version(str(tmp_path / "index"))


def test_partitions_are_whole_chunks_and_never_cross_segments(index: Index) -> None:
    parts = find_tables(index)
    assert [(part.segment, part.number, part.rows) for part in parts] == [
        (0, 0, 16),
        (0, 1, 16),
        (0, 2, 8),
        (1, 0, 16),
        (1, 1, 9),
    ]
    assert [(part.chunks[0].start, part.chunks[-1].stop) for part in parts] == [
        (0, 16),
        (16, 32),
        (32, 40),
        (40, 56),
        (56, 65),
    ]
    assert {layout(part) for part in parts} == {LAYOUT}
    assert tuple(chunk for part in parts for chunk in part.chunks) == index.chunks
    assert [part.rows for part in cut_segment(index, 1, 1, 3)] == [8, 8, 8, 1]  # at least one chunk


def test_tables_are_read_back_as_they_were_made(index: Index) -> None:
    queries = np.random.default_rng(5).integers(0, 256, (6, 3), dtype=np.uint8) & np.array([255, 255, 15], np.uint8)
    for part in find_tables(index):
        block = block_of(index, part)
        tables = open_tables(index, part, block)
        assert tables is not None
        fresh = make_tables(block, LAYOUT[1])
        for stored, made_now in zip(tables.arrays, fresh.arrays, strict=True):
            np.testing.assert_array_equal(stored, made_now)
        assert 0 <= tables.nbytes - part.nbytes(index) < 4096
        expected = hamming_top_k(queries, block, 4)
        found = tables.top_k(queries, 4, allowance=None)
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)


def test_versions_do_not_change_and_writing_again_is_fine(index: Index) -> None:
    before = {key: index.objects.read(key) for key, _, _ in index.objects.list("")}
    for part in find_tables(index):
        write_tables(index, part, sorted_tables(index, part))
    assert {key: index.objects.read(key) for key, _, _ in index.objects.list("")} == before
    assert open_version(index.url).to_json() == index.to_json()


def test_without_a_record_there_are_no_tables(index: Index) -> None:
    part = find_tables(index)[0]
    index.objects.delete(f"{part.prefix(index)}.json")
    assert not has_tables(index, part)
    assert open_tables(index, part, block_of(index, part)) is None
    found = find_tables(index)
    assert [layout(part) is None for part in found] == [True, False, False, False, False]
    assert found[0].nbytes(index) == 0
    assert open_tables(index, found[0], block_of(index, part)) is None


def test_tables_of_other_codes_do_not_count(index: Index, tmp_path: Path) -> None:
    """The same job folder, restored from elsewhere: the checksums of its codes differ."""
    other = make_index(str(tmp_path / "other"), seed=1)
    build(other)
    mine, theirs = (found.segments[0].job.folder for found in (index, other))
    shutil.rmtree(tmp_path / "index" / mine / "tables")
    shutil.copytree(tmp_path / "other" / theirs / "tables", tmp_path / "index" / mine / "tables")
    assert [layout(part) is None for part in find_tables(index)] == [True, False, False]
    assert [part.rows for part in find_tables(index)] == [40, 16, 9]


def test_the_layout_that_covers_most_is_taken(index: Index) -> None:
    larger = 24, 4
    first = cut_segment(index, 0, *larger)[0]
    write_tables(index, first, sorted_tables(index, first))
    assert {layout(part) for part in find_tables(index)} == {LAYOUT}
    gone = find_tables(index)[1]
    index.objects.delete(f"{gone.prefix(index)}.json")
    index.objects.delete(f"{find_tables(index)[0].prefix(index)}.json")
    found = find_tables(index)
    assert [layout(part) for part in found] == [larger, None, LAYOUT, LAYOUT]
    assert tuple(chunk for part in found for chunk in part.chunks) == index.chunks


def test_folders_that_are_no_layouts_are_left_alone(index: Index) -> None:
    for name in ("16x3.old", "x", "0x3", "16x0", "016x3"):
        index.objects.put(f"{index.segments[0].job.folder}/tables/{name}/000000.json", b"{}")
    assert {layout(part) for part in find_tables(index)} == {LAYOUT}


@pytest.mark.parametrize("array", ["rows", "offsets"])
@pytest.mark.parametrize("harm", ["flip", "cut", "lose", "swap"])
def test_damage_is_found_and_the_sentence_says_what_to_do(index: Index, array: str, harm: str) -> None:
    part = find_tables(index)[0]
    path = Path(index.url, part.prefix(index), array, "c", "1", "0")
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[5] ^= 1
        path.write_bytes(data)
    elif harm == "cut":
        path.write_bytes(data[:-3])
    elif harm == "swap":  # sound in itself, but of another table
        path.write_bytes(path.parents[1].joinpath("0", "0").read_bytes())
    else:
        path.unlink()
    with pytest.raises(IntegrityError, match=r"och tables \S+ --remove', and make them again with 'och tables "):
        open_tables(index, part, block_of(index, part))


def test_a_damaged_record_is_found(index: Index) -> None:
    part = find_tables(index)[0]
    path = Path(index.url, f"{part.prefix(index)}.json")
    good = path.read_bytes()
    path.write_bytes(good.replace(b'"rows": 16', b'"rows": 17'))
    with pytest.raises(IntegrityError, match=r"does not match its own sha256.*--remove"):
        open_tables(index, part, block_of(index, part))
    body = unseal(good, "record")
    path.write_bytes(seal({**body, "row_digests": body["row_digests"][:1]}))
    with pytest.raises(IntegrityError, match="its record lacks checksums"):
        read_record(index, part)


def test_tables_removed_while_they_are_opened_are_none(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    part, block = find_tables(index)[0], block_of(index, find_tables(index)[0])
    first = read_record(index, part)
    answers = iter([first, None])
    remove_tables(index.objects)
    monkeypatch.setattr("och_dist.store.tables.read_record", lambda *args: next(answers))
    assert open_tables(index, part, block) is None


def test_codes_that_are_not_the_published_ones_are_refused(index: Index) -> None:
    part = find_tables(index)[1]
    codes_of(index, part)
    path = Path(index.url, index.segments[0].job.folder, "codes", "c", "2", "0")
    path.write_bytes(path.with_name("0").parents[1].joinpath("1", "0").read_bytes())
    with pytest.raises(IntegrityError, match=r"rows 16\.\.24 of .* are damaged; run 'och verify"):
        codes_of(index, part)
    with pytest.raises(IntegrityError, match="5 codes were read of a partition of 16"):
        open_tables(index, part, lay_out(np.zeros((5, 3), np.uint8), BITS))


def test_what_verify_is_told(index: Index) -> None:
    listed = [entry for segment in range(2) for entry in table_arrays(index, segment)]
    assert len(listed) == 2 * 5
    for prefix, spec, digests in listed:
        assert len(digests) == spec.n_chunks == LAYOUT[1]
        for chunk, digest in enumerate(digests):
            data = index.objects.get(f"{prefix}/c/{chunk}/0")
            assert int.from_bytes(data[-4:], "little") == digest


def test_removing_leaves_the_codes(index: Index) -> None:
    codes = [index.read(chunk) for chunk in index.chunks]
    assert remove_tables(open_objects(index.url)) == 5 * (1 + 2 * (1 + 3))
    assert remove_tables(open_objects(index.url)) == 0
    assert {layout(part) for part in find_tables(index)} == {None}
    for chunk, expected in zip(index.chunks, codes, strict=True):
        np.testing.assert_array_equal(index.read(chunk), expected)
    assert not list(Path(index.url).rglob("tables"))


def test_the_record_names_all_that_matters(index: Index) -> None:
    part = find_tables(index)[1]
    body = expected_record(index, part)
    assert (body["bits"], body["substrings"], body["chunks"], body["rows"]) == (BITS, 3, [2, 4], 16)
