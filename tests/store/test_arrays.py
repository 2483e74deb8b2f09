"""Our arrays: plain Zarr v3 for everybody else, write-once and never silently zero for us."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, ConflictError, IntegrityError, OchError, UsageError
from och_dist.store.arrays import (
    CODECS,
    ArraySpec,
    Codec,
    Written,
    chunk_key,
    create_array,
    open_array,
    open_layout,
    read_rows,
    stored_chunks,
    write_chunk,
)
from och_dist.store.objects import LocalObjects
from tests.support.races import together

DTYPES = ["<f2", "<f4", "<f8", "|u1", "|i1", "<i4", "<i8"]


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path)


def some_values(rows: int, width: int, dtype: str) -> np.ndarray:
    return (np.arange(rows * width).reshape(rows, width) % 120 - 7).astype(dtype)


def store(objects: LocalObjects, values: np.ndarray, chunk_rows: int, codec: Codec = "none") -> list[Written]:
    spec = ArraySpec(len(values), values.shape[1], values.dtype.str, chunk_rows, codec)
    create_array(objects, "a", spec)
    return [write_chunk(objects, "a", chunk, values[slice(*spec.bounds(chunk))]) for chunk in range(spec.n_chunks)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_others_can_read_it(objects: LocalObjects, dtype: str, codec: Codec) -> None:
    values = some_values(10, 3, dtype)
    store(objects, values, 4, codec)
    foreign = zarr.open_array(objects.root / "a", mode="r")
    assert foreign.metadata.zarr_format == 3
    assert (foreign.dtype, foreign.chunks) == (np.dtype(dtype), (4, 3))
    assert np.array_equal(foreign[:], values)
    assert np.array_equal(read_rows(open_array(objects, "a"), 0, 10), values)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 30), width=st.integers(1, 5), chunk_rows=st.integers(1, 35), data=st.data())
def test_any_chunking_reads_back(
    tmp_path_factory: pytest.TempPathFactory, rows: int, width: int, chunk_rows: int, data: st.DataObject
) -> None:
    objects = LocalObjects(tmp_path_factory.mktemp("arrays"))
    values = some_values(rows, width, "<f4")
    chunk_rows = min(rows, chunk_rows)
    store(objects, values, chunk_rows)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    assert np.array_equal(read_rows(open_array(objects, "a"), start, stop), values[start:stop])
    assert sorted(stored_chunks(objects, "a")) == list(range(-(-rows // chunk_rows)))


@pytest.mark.parametrize("codec", CODECS)
def test_zeros_are_stored(objects: LocalObjects, codec: Codec) -> None:
    store(objects, np.zeros((9, 4), "<f4"), 3, codec)
    assert set(stored_chunks(objects, "a")) == {0, 1, 2}


@pytest.mark.parametrize("codec", CODECS)
def test_written_is_what_lies_there(objects: LocalObjects, codec: Codec) -> None:
    written = store(objects, some_values(10, 3, "<f4"), 4, codec)
    for chunk, expected in enumerate(written):
        data = objects.get(chunk_key("a", chunk))
        assert expected == Written(len(data), google_crc32c.value(data[:-4]))
    assert stored_chunks(objects, "a") == {chunk: part.nbytes for chunk, part in enumerate(written)}


def test_only_chunks_are_counted_as_chunks(objects: LocalObjects) -> None:
    store(objects, some_values(4, 3, "<f4"), 4)
    for name in ("a/c/²/0", "a/c/x/0", "a/c/٣x/0"):
        objects.put(name, b"1")
    assert set(stored_chunks(objects, "a")) == {0}


@pytest.mark.parametrize("codec", CODECS)
def test_every_flipped_byte_is_found(objects: LocalObjects, codec: Codec) -> None:
    store(objects, some_values(6, 3, "<f4"), 3, codec)
    path = objects.root / chunk_key("a", 1)
    sound = path.read_bytes()
    array = open_array(objects, "a")
    for place in range(len(sound)):
        for bit in (1, 128):
            damaged = bytearray(sound)
            damaged[place] ^= bit
            path.write_bytes(damaged)
            with pytest.raises(IntegrityError, match=r"rows 3\.\.6 .* are damaged"):
                read_rows(array, 3, 6)
    path.write_bytes(sound)
    assert np.array_equal(read_rows(array, 3, 6), some_values(6, 3, "<f4")[3:])


@pytest.mark.parametrize("codec", CODECS)
def test_every_cut_is_found(objects: LocalObjects, codec: Codec) -> None:
    store(objects, some_values(6, 3, "<f4"), 3, codec)
    path = objects.root / chunk_key("a", 0)
    sound = path.read_bytes()
    array = open_array(objects, "a")
    for data in (*(sound[:length] for length in range(len(sound))), sound + b"\0", b"\0" * len(sound)):
        path.write_bytes(data)
        with pytest.raises(IntegrityError):
            read_rows(array, 0, 3)
    assert np.array_equal(read_rows(array, 3, 6), some_values(6, 3, "<f4")[3:])


def test_a_missing_chunk_is_never_zeros(objects: LocalObjects) -> None:
    store(objects, np.zeros((6, 3), "<f4"), 3)
    array = open_array(objects, "a")
    objects.delete(chunk_key("a", 1))
    assert not read_rows(array, 0, 3).any()
    for start, stop in ((3, 6), (0, 6), (5, 6)):
        with pytest.raises(IntegrityError, match=r"a/c/1/0 is missing; a missing chunk is never read as zeros"):
            read_rows(array, start, stop)


def test_a_chunk_of_another_array_is_found(objects: LocalObjects) -> None:
    store(objects, some_values(6, 3, "<f4"), 3)
    short = google_crc32c.value(b"1" * 12).to_bytes(4, "little")
    (objects.root / chunk_key("a", 0)).write_bytes(b"1" * 12 + short)
    with pytest.raises(IntegrityError, match="damaged"):
        read_rows(open_array(objects, "a"), 0, 3)


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (6, 7), (-1, 3), (4, 3)])
def test_rows_that_are_not_there(objects: LocalObjects, start: int, stop: int) -> None:
    store(objects, some_values(6, 3, "<f4"), 3)
    with pytest.raises(IntegrityError, match="it has 6 rows"):
        read_rows(open_array(objects, "a"), start, stop)


def test_chunks_are_written_once(objects: LocalObjects) -> None:
    values = some_values(6, 3, "<f4")
    [first, _] = store(objects, values, 3)
    before = objects.get(chunk_key("a", 0))
    assert write_chunk(objects, "a", 0, values[:3]) == first
    with pytest.raises(ConflictError, match="never overwritten"):
        write_chunk(objects, "a", 0, values[:3] + 1)
    assert objects.get(chunk_key("a", 0)) == before


@pytest.mark.parametrize(
    ("chunk", "block"),
    [
        (0, np.zeros((2, 3), "<f4")),
        (0, np.zeros((4, 3), "<f4")),
        (0, np.zeros((3, 2), "<f4")),
        (0, np.zeros((3, 3), "<f8")),
        (0, np.zeros(9, "<f4")),
        (1, np.zeros((3, 3), "<f4")),
        (2, np.zeros((3, 3), "<f4")),
        (-1, np.zeros((3, 3), "<f4")),
    ],
)
def test_a_block_that_is_no_whole_chunk(objects: LocalObjects, chunk: int, block: np.ndarray) -> None:
    create_array(objects, "a", ArraySpec(5, 3, "<f4", 3))
    with pytest.raises(IntegrityError, match=f"chunk {chunk} of a takes"):
        write_chunk(objects, "a", chunk, block)
    assert stored_chunks(objects, "a") == {}


SPEC = ArraySpec(10, 4, "<f4", 5)


@pytest.mark.parametrize(
    "other",
    [
        ArraySpec(11, 4, "<f4", 5),
        ArraySpec(10, 5, "<f4", 5),
        ArraySpec(10, 4, "<f8", 5),
        ArraySpec(10, 4, "<f4", 4),
    ],
)
def test_another_layout_in_the_same_place(objects: LocalObjects, other: ArraySpec) -> None:
    create_array(objects, "a", SPEC)
    create_array(objects, "a", SPEC)
    before = objects.get("a/zarr.json")
    for action in (create_array, open_layout):
        with pytest.raises(IntegrityError, match=r"is an array of .* expected"):
            action(objects, "a", other)
    assert objects.get("a/zarr.json") == before


def test_an_array_without_checksums_is_not_ours(objects: LocalObjects) -> None:
    foreign = zarr.create_array(objects.root / "a", shape=(10, 4), chunks=(5, 4), dtype="<f4", compressors=None)
    foreign[:] = 1
    assert read_rows(open_array(objects, "a"), 0, 10).all()
    with pytest.raises(IntegrityError, match="crc32c"):
        create_array(objects, "a", SPEC)


def test_race_of_creators(tmp_path: Path) -> None:
    for round_ in range(5):
        objects = LocalObjects(tmp_path / str(round_))
        assert together(*[partial(create_array, objects, "a", SPEC)] * 4) == [None] * 4


def test_a_creator_that_comes_second(objects: LocalObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one's metadata appears between our look and our write."""
    create_array(objects, "a", SPEC)
    sizes = iter([None])
    monkeypatch.setattr(LocalObjects, "size", lambda self, key, size=LocalObjects.size: next(sizes, size(self, key)))
    create_array(objects, "a", SPEC)


def test_damaged_metadata(objects: LocalObjects) -> None:
    """Each changed byte of zarr.json is noticed, or the array reads as before."""
    values = some_values(6, 3, "<f4")
    store(objects, values, 3)
    path = objects.root / "a/zarr.json"
    sound = path.read_bytes()
    noticed = 0
    for place in range(len(sound)):
        damaged = bytearray(sound)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        try:
            found = read_rows(open_layout(objects, "a", ArraySpec(6, 3, "<f4", 3)), 0, 6)
        except OchError as error:
            noticed += isinstance(error, IntegrityError)
        else:
            assert np.array_equal(found, values)
    assert noticed > len(sound) / 2


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000),
        b'{"zarr_format": 3}',
        b'{"zarr_format": 3, "node_type": "group"}',
    ],
    ids=range(8),
)
def test_metadata_that_is_none(objects: LocalObjects, text: bytes) -> None:
    objects.put("a/zarr.json", text)
    with pytest.raises(IntegrityError, match="not a readable Zarr array"):
        open_array(objects, "a")


def test_no_metadata_at_all(objects: LocalObjects) -> None:
    with pytest.raises(IntegrityError, match="not a readable Zarr array"):
        open_array(objects, "nothing/here")


def metadata_of(objects: LocalObjects, **changes: Any) -> None:
    path = objects.root / ".zarray"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"compressor": {"id": "pickle"}},
        {"filters": [{"id": "pickle"}]},
        {"filters": [{"id": "shuffle", "elementsize": 4}, {"id": "pickle"}]},
        {"compressor": {"id": "json2"}},
        {"compressor": {"id": "msgpack2"}},
        {"filters": [{"id": "categorize", "labels": ["a"], "dtype": "<U1"}]},
    ],
)
def test_nothing_that_could_execute_is_opened(tmp_path: Path, changes: dict[str, Any]) -> None:
    array = zarr.create_array(tmp_path / "a", shape=(4, 2), chunks=(4, 2), dtype="<f4", zarr_format=2, compressors=None)
    array[:] = 1
    metadata_of(LocalObjects(tmp_path / "a"), **changes)
    (tmp_path / "a" / "0.0").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    with pytest.raises((BadInputError, IntegrityError)):
        read_rows(open_array(LocalObjects(tmp_path / "a"), ""), 0, 4)
    assert not (tmp_path / "ran").exists()


def test_a_codec_that_is_not_on_the_list(objects: LocalObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    store(objects, some_values(6, 3, "<f4"), 3, "zstd")
    monkeypatch.setattr("och_dist.store.arrays.SAFE_CODECS", {"bytes", "crc32c"})
    with pytest.raises(BadInputError, match="is stored with zstd; only bytes, crc32c are read"):
        open_array(objects, "a")


def test_zarr_cannot_change_a_segment(objects: LocalObjects) -> None:
    values = some_values(6, 3, "<f4")
    store(objects, values, 3)
    array = open_array(objects, "a")
    with pytest.raises(ConflictError):
        array[:] = 9
    with pytest.raises((ConflictError, UsageError)):
        array.resize((4, 3))
    with pytest.raises(UsageError, match="segments are immutable"):
        zarr.core.sync.sync(array.store.delete("c/0/0"))
    assert np.array_equal(zarr.open_array(objects.root / "a", mode="r")[:], values)
