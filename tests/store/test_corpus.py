"""Corpora: row numbers over segments and chunks, digests, adopted arrays, manifests that lie."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, IntegrityError, OchError
from och_dist.store.arrays import (
    ArraySpec,
    chunk_key,
    create_array,
    is_plain,
    open_array,
    read_plain_chunk,
    read_rows,
    write_chunk,
)
from och_dist.store.corpus import Corpus, Segment, find_corpus, open_corpus, vectors_prefix
from och_dist.store.manifest import commit_version, open_remembered, pack_numbers, seal, version_key
from och_dist.store.objects import LocalObjects

Layout = list[tuple[int, int]]
"""(rows, rows per chunk) of each segment."""


def some_values(rows: int, dim: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, dim)).astype("<f4")


def append(url: str, values: np.ndarray, chunk_rows: int) -> Corpus:
    """Add a segment and publish it, as plainly as it can be done."""
    objects, parent = LocalObjects(url), find_corpus(url)
    start, segments = (parent.rows, parent.segments) if parent else (0, ())
    name = f"segment{len(segments)}"
    spec = ArraySpec(len(values), values.shape[1], values.dtype.str, chunk_rows)
    create_array(objects, vectors_prefix(name), spec)
    crcs = [
        write_chunk(objects, vectors_prefix(name), chunk, values[slice(*spec.bounds(chunk))]).crc
        for chunk in range(spec.n_chunks)
    ]
    segment = Segment(name, start, start + len(values), chunk_rows, np.array(crcs, "<u4"), prefix=vectors_prefix(name))
    corpus = Corpus(objects.url, len(segments) + 1, values.shape[1], values.dtype.str, (*segments, segment))
    assert commit_version(objects, corpus.to_json())
    return corpus


def build(url: str, layout: Layout, seed: int = 0) -> np.ndarray:
    values = some_values(sum(rows for rows, _ in layout), seed=seed)
    start = 0
    for rows, chunk_rows in layout:
        append(url, values[start : start + rows], min(rows, chunk_rows))
        start += rows
    return values


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "corpus")


LAYOUTS = st.lists(st.tuples(st.integers(1, 25), st.integers(1, 30)), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(layout=LAYOUTS, maximum=st.integers(1, 12), data=st.data())
def test_any_layout(
    tmp_path_factory: pytest.TempPathFactory, layout: Layout, maximum: int, data: st.DataObject
) -> None:
    url = str(tmp_path_factory.mktemp("corpus"))
    values = build(url, layout)
    corpus = open_corpus(url)
    assert (corpus.rows, corpus.dim, corpus.version) == (len(values), 3, len(layout))
    assert corpus.nbytes == values.nbytes
    ranges = [list(range(*part)) for part in corpus.partitions(maximum)]
    assert len(ranges) <= maximum
    assert all(ranges)
    assert list(chain(*ranges)) == list(chain(*(range(*part) for part in corpus.chunks()))) == list(range(len(values)))
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    assert np.array_equal(corpus.read(start, stop), values[start:stop])
    for first, block in corpus.blocks(start, stop):
        assert len(block)
        assert np.array_equal(block, values[first : first + len(block)])


@pytest.mark.parametrize(("start", "stop"), [(0, 8), (7, 8), (-1, 3), (5, 4)])
def test_rows_that_are_not_there(url: str, start: int, stop: int) -> None:
    build(url, [(7, 3)])
    with pytest.raises(IntegrityError, match="had 7 when it was opened"):
        open_corpus(url).read(start, stop)


def test_versions_stay(url: str) -> None:
    values = build(url, [(10, 4), (3, 4), (5, 5)])
    assert [open_corpus(url, version).rows for version in (1, 2, 3)] == [10, 13, 18]
    assert open_corpus(url).version == 3
    assert find_corpus(url) == open_corpus(url)
    assert np.array_equal(open_corpus(url, 2).read(0, 13), values[:13])
    with pytest.raises(IntegrityError, match=r"version 9 .* is not there .* present: 1, 2, 3"):
        open_corpus(url, 9)


def test_digests_are_stable_under_appends(url: str) -> None:
    build(url, [(10, 4)])
    before = open_corpus(url)
    append(url, some_values(6, seed=1), 4)
    after = open_corpus(url)
    assert [after.digest(*part) for part in before.chunks()] == [before.digest(*part) for part in before.chunks()]
    assert after.digest(0, 10) == before.digest(0, 10)
    assert after.fingerprint != before.fingerprint
    assert open_corpus(url, 1).fingerprint == before.fingerprint


def test_digests_tell_ranges_and_contents_apart(tmp_path: Path) -> None:
    build(str(tmp_path / "a"), [(10, 4)])
    build(str(tmp_path / "b"), [(10, 4)])
    build(str(tmp_path / "c"), [(10, 4)], seed=1)
    build(str(tmp_path / "d"), [(10, 5)])
    build(str(tmp_path / "e"), [(4, 4), (6, 4)])
    a, b, *others = (open_corpus(str(tmp_path / name)) for name in "abcde")
    assert a.fingerprint == b.fingerprint
    assert len({a.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert len({a.digest(start, stop) for start in range(10) for stop in range(start + 1, 11)}) == 55
    changed = some_values(10)
    changed[9, 2] += 1
    append(str(tmp_path / "f"), changed, 4)
    f = open_corpus(str(tmp_path / "f"))
    assert f.digest(0, 8) == a.digest(0, 8)
    assert f.digest(8, 10) != a.digest(8, 10)


def test_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"holds no corpus; make one with 'och ingest"):
        open_corpus(str(tmp_path / "nothing"))
    assert find_corpus(str(tmp_path / "nothing")) is None


def test_damage_is_found_when_it_is_read(url: str) -> None:
    values = build(url, [(10, 4)])
    path = Path(url, chunk_key(vectors_prefix("segment0"), 1))
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    corpus = open_corpus(url)
    assert np.array_equal(corpus.read(0, 4), values[:4])
    with pytest.raises(IntegrityError, match=r"rows 4\.\.8 .* damaged"):
        corpus.read(0, 10)
    path.unlink()
    with pytest.raises(IntegrityError, match="is missing"):
        corpus.read(5, 6)


def test_an_array_that_is_not_the_one_of_the_manifest(url: str) -> None:
    build(url, [(10, 4)])
    path = Path(url, vectors_prefix("segment0"), "zarr.json")
    path.write_text(path.read_text().replace('"float32"', '"int32"').replace('"fill_value": 0.0', '"fill_value": 0'))
    assert zarr.open_array(path.parent, mode="r").dtype == np.int32
    with pytest.raises(IntegrityError, match=r"is an array of .* expected .* restore its zarr\.json"):
        open_corpus(url).read(0, 10)


def lie(url: str, changes: dict[str, Any], segment: dict[str, Any] | None = None) -> None:
    """Publish a well-sealed manifest of two segments that is not true."""
    build(url, [(10, 4), (6, 4)])
    body = {**open_corpus(url).to_json(), "version": 3, **changes}
    if segment is not None:
        body["segments"][1] = {**body["segments"][1], **segment}
    LocalObjects(url).put(version_key(3), seal(body))


DIGESTS = {count: pack_numbers(np.zeros(count, "<u4")) for count in (1, 2, 3, 4)}
FALSE_SEGMENTS = {
    "gap": {"start": 11, "stop": 17},
    "overlap": {"start": 9, "stop": 15},
    "negative": {"start": -6, "stop": 0},
    "backwards": {"start": 16, "stop": 10},
    "empty": {"start": 10, "stop": 10},
    "too long": {"stop": 17},
    "huge": {"stop": 10**18},
    "no rows a chunk": {"chunk_rows": 0},
    "other chunks": {"chunk_rows": 6},
    "few digests": {"digests": DIGESTS[1]},
    "many digests": {"digests": DIGESTS[4]},
    "no digests": {"digests": None},
    "odd digests": {"digests": base64.b64encode(b"12345").decode()},
    "climbing": {"id": "../../elsewhere"},
    "slash": {"id": "a/b"},
    "no name": {"id": ""},
    "dots": {"id": ".."},
    "long name": {"id": "x" * 300},
    "not ascii": {"id": "é"},
    "twice": {"id": "segment0"},
    "text": {"start": "ten"},
    "nothing": {"start": None},
    "sources of text": {"sources": ["gist.fvecs"]},
    "sources without fingerprint": {"sources": [{}]},
    "no sources": {"sources": None},
}


@pytest.mark.parametrize("segment", FALSE_SEGMENTS.values(), ids=FALSE_SEGMENTS)
def test_segments_that_lie(url: str, segment: dict[str, Any]) -> None:
    lie(url, {}, segment)
    for action in (open_corpus, find_corpus):
        with pytest.raises(IntegrityError, match="version 3 of"):
            action(url)
    assert open_corpus(url, 2).rows == 16


FALSE_MANIFESTS = {
    "dim": {"dim": 0},
    "no dim": {"dim": None},
    "dtype": {"dtype": "<c8"},
    "object": {"dtype": "|O"},
    "big endian": {"dtype": ">f4"},
    "structured": {"dtype": "[('a', '<f4')]"},
}


@pytest.mark.parametrize("changes", FALSE_MANIFESTS.values(), ids=FALSE_MANIFESTS)
def test_manifests_that_lie(url: str, changes: dict[str, Any]) -> None:
    lie(url, changes)
    with pytest.raises(IntegrityError):
        open_corpus(url)


@pytest.mark.parametrize("changes", [{"dim": 4}, {"dim": 10**15}, {"dtype": "<f8"}, {"dtype": "|u1"}])
def test_lies_that_only_the_array_shows(url: str, changes: dict[str, Any]) -> None:
    lie(url, changes)
    with pytest.raises(IntegrityError, match="expected"):
        open_corpus(url).read(0, 16)


FOREIGN: dict[str, dict[str, Any]] = {
    "v3": {"chunks": (4, 3)},
    "v3 plain": {"chunks": (4, 3), "compressors": None},
    "v2": {"chunks": (4, 3), "zarr_format": 2},
    "v2 fortran": {"chunks": (4, 3), "zarr_format": 2, "order": "F"},
    "v2 slashes": {"chunks": (4, 3), "zarr_format": 2, "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "columns": {"chunks": (4, 2)},
    "v2 columns": {"chunks": (4, 1), "zarr_format": 2},
    "sharded": {"chunks": (2, 3), "shards": (4, 3)},
    "sharded columns": {"chunks": (2, 1), "shards": (4, 3)},
    "dots": {"chunks": (4, 3), "chunk_key_encoding": {"name": "default", "separator": "."}},
    "one chunk": {"chunks": (30, 3)},
}


def foreign(path: Path, values: np.ndarray, **options: Any) -> None:
    array = zarr.create_array(path, shape=values.shape, dtype=values.dtype, overwrite=True, **options)
    array[:] = values


@pytest.mark.parametrize("options", FOREIGN.values(), ids=FOREIGN)
def test_adopted_arrays(tmp_path: Path, options: dict[str, Any]) -> None:
    values = some_values(10)
    foreign(tmp_path / "a", values, **options)
    corpus = open_corpus(str(tmp_path / "a"))
    assert (corpus.version, corpus.rows, corpus.dim, corpus.dtype) == (0, 10, 3, "<f4")
    expected = [(0, 10)] if options["chunks"][0] > 10 else [(0, 4), (4, 8), (8, 10)]
    assert list(corpus.chunks()) == expected
    assert np.array_equal(corpus.read(0, 10), values)
    assert np.array_equal(corpus.read(3, 9), values[3:9])
    assert open_corpus(str(tmp_path / "a")).fingerprint == corpus.fingerprint
    files = sorted(path for path in (tmp_path / "a").rglob("*") if path.is_file())
    last = [path for path in files if not path.name.startswith((".z", "zarr"))][-1]
    os.utime(last, ns=(5, 5))
    changed = open_corpus(str(tmp_path / "a"))
    assert changed.digest(8, 10) != corpus.digest(8, 10)
    if len(expected) > 1:
        assert changed.digest(0, 8) == corpus.digest(0, 8)
    last.unlink()
    with pytest.raises(IntegrityError, match="is missing; a missing chunk is never read as zeros"):
        open_corpus(str(tmp_path / "a")).read(0, 10)


@pytest.mark.parametrize("dtype", ["<f2", ">f2", "<f4", ">f4", "<f8", ">f8", "u1", "i1"])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_adopted_dtypes(tmp_path: Path, dtype: str, zarr_format: Any) -> None:
    values = (some_values(5) * 50).astype(dtype)
    foreign(tmp_path / "a", values, chunks=(2, 3), zarr_format=zarr_format)
    corpus = open_corpus(str(tmp_path / "a"))
    found = corpus.read(0, 5)
    assert found.dtype.str == corpus.dtype == np.dtype(dtype).newbyteorder("<").str
    assert np.array_equal(found, values)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((5,), "f4"), ((5, 2, 2), "f4"), ((5, 2), "i4"), ((5, 2), "c8"), ((5, 2), "bool"), ((5, 2), "U3"), ((0, 2), "f4"),
     ((5, 0), "f4")],
)  # fmt: skip
def test_arrays_that_are_no_corpus(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    zarr.create_array(tmp_path / "a", shape=shape, chunks=tuple(max(size, 1) for size in shape), dtype=dtype)
    with pytest.raises(BadInputError, match="corpus"):
        open_corpus(str(tmp_path / "a"))


def test_a_group_is_no_corpus(tmp_path: Path) -> None:
    zarr.create_group(tmp_path / "a")
    with pytest.raises((BadInputError, IntegrityError)):
        open_corpus(str(tmp_path / "a"))


@pytest.mark.parametrize("compressor", ["zlib", "gzip", "bz2", "lzma", "lz4", "blosc", "zstd"])
def test_damage_in_adopted_arrays_is_never_a_raw_error(tmp_path: Path, compressor: str) -> None:
    """Blosc has no checksum and may decode what was cut; the others notice."""
    import numcodecs

    values = np.zeros((6, 4), "<f4")
    options = {"typesize": 4} if compressor == "blosc" else {}
    codec = numcodecs.get_codec({"id": compressor, **options})
    foreign(tmp_path / "a", values + 1, chunks=(6, 4), zarr_format=2, compressors=codec)
    sound = (tmp_path / "a" / "0.0").read_bytes()
    corpus = open_corpus(str(tmp_path / "a"))
    for data in (b"", sound[:5], sound[: len(sound) // 2], b"\xff" * len(sound), sound[::-1]):
        (tmp_path / "a" / "0.0").write_bytes(data)
        with contextlib.suppress(OchError) if compressor == "blosc" else pytest.raises(OchError):
            corpus.read(0, 6)


def test_an_adopted_array_that_grows(tmp_path: Path) -> None:
    """A worker lives longer than a job: the next job must see the rows that were added meanwhile."""
    url, values = str(tmp_path / "a"), some_values(12)
    foreign(tmp_path / "a", values[:8], chunks=(4, 3))
    old = open_corpus(url).ref.open()
    assert np.array_equal(old.read(0, 8), values[:8])
    array = zarr.open_array(tmp_path / "a", mode="r+")
    array.append(values[8:])
    new = open_corpus(url).ref.open()
    assert new.rows == 12
    assert np.array_equal(new.read(0, 12), values)
    assert new.digest(0, 8) != old.digest(0, 8)  # the metadata is part of every digest
    with pytest.raises(IntegrityError, match="had 8 when it was opened"):
        old.read(0, 12)


def test_an_adopted_array_that_was_replaced(tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    foreign(tmp_path / "a", some_values(8), chunks=(4, 3))
    old = open_corpus(url)
    foreign(tmp_path / "a", some_values(8, dim=5), chunks=(4, 5))
    with pytest.raises(IntegrityError, match="it changed since it was opened"):
        old.read(0, 8)


def test_workers_remember_published_versions(url: str) -> None:
    build(url, [(10, 4)])
    first = open_corpus(url).ref
    assert first.open() is first.open()
    append(url, some_values(3), 3)
    assert (first.open().rows, open_corpus(url).ref.open().rows) == (10, 13)


def test_workers_notice_a_corpus_made_anew_at_the_same_place(url: str) -> None:
    """A worker lives longer than a corpus: version 1 of the next one has the same number, and other rows."""
    build(url, [(10, 4)])
    old = open_corpus(url).ref
    assert old.open().rows == 10
    shutil.rmtree(url)
    values = build(url, [(7, 3)])
    new = open_corpus(url).ref
    assert np.array_equal(new.open().read(0, 7), values)
    open_remembered.cache_clear()  # a worker that joined later
    with pytest.raises(IntegrityError, match="not the one that this job was planned with"):
        old.open()


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=6), st.data())
@settings(deadline=None, max_examples=30)
def test_digests_over_any_rows(sizes: list[tuple[int, int]], data: st.DataObject) -> None:
    """Against the plain walk over all segments."""
    stops = np.cumsum([rows for rows, _ in sizes]).tolist()
    segments = tuple(
        Segment(f"s{i}", stop - rows, stop, chunk, np.arange(-(-rows // chunk), dtype="<u4") + 100 * i)
        for i, ((rows, chunk), stop) in enumerate(zip(sizes, stops, strict=True))
    )
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, stops[-1])] * 2)))
    expected = hashlib.sha256()
    for s in segments:
        low, high = max(start, s.start), min(stop, s.stop)
        if low < high:
            chunks = sorted({(row - s.start) // s.chunk_rows for row in range(low, high)})
            expected.update(f"{low} {high} {s.start} {s.chunk_rows} ".encode() + s.digests[chunks].tobytes())
    assert Corpus("/c", 1, 2, "<f4", segments).digest(start, stop) == expected.hexdigest()


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", "|u1", "|i1"])
def test_chunks_read_with_and_without_zarr_are_the_same(dtype: str, codec: Any, tmp_path: Path) -> None:
    values = (100 * np.random.default_rng(0).random((50, 3))).astype(dtype)
    spec = ArraySpec(50, 3, dtype, 16, codec)
    objects = LocalObjects(tmp_path)
    create_array(objects, "a", spec)
    for chunk in range(spec.n_chunks):
        write_chunk(objects, "a", chunk, values[slice(*spec.bounds(chunk))])
    array = open_array(objects, "a")
    assert is_plain(array) == (codec == "none")
    if codec == "none":
        create_array(objects, "b", spec)
        open_array(objects, "b", strict=False)[:] = values  # by Zarr alone
        for chunk in range(spec.n_chunks):
            assert objects.get(chunk_key("a", chunk)) == objects.get(chunk_key("b", chunk))
            assert (
                write_chunk(objects, "a", chunk, values[slice(*spec.bounds(chunk))]).nbytes == 16 * values[0].nbytes + 4
            )
        blocks = [read_plain_chunk(objects, "a", spec, chunk) for chunk in range(spec.n_chunks)]
        assert all(block.flags.writeable and block.flags.c_contiguous for block in blocks)
        np.testing.assert_array_equal(np.concatenate(blocks), read_rows(array, 0, 50))
        path = tmp_path / chunk_key("a", 1)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(IntegrityError, match=r"rows 16\.\.32 .* are damaged"):
            read_plain_chunk(objects, "a", spec, 1)
        path.unlink()
        with pytest.raises(IntegrityError, match="is missing"):
            read_plain_chunk(objects, "a", spec, 1)
