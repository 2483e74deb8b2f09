"""Ids: as they are stored, as they are read from files, and as a corpus hands them out."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, IntegrityError, UsageError
from och_dist.ingest.stage import ingest
from och_dist.sources import formats
from och_dist.sources.files import open_ids, read_ids
from och_dist.store import corpus as corpus_store
from och_dist.store.corpus import IdLayout, id_hashes, id_keys, ids_text, open_corpus
from och_dist.store.manifest import seal, version_key

TEXT = st.text(st.characters(exclude_characters="\0\n\r", exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(deadline=None, max_examples=50)
@given(ids=st.lists(TEXT, min_size=1, max_size=20), wider=st.integers(0, 20))
def test_strings_survive(ids: list[str], wider: int) -> None:
    """Packed, padded to any width and read again; the hash does not see the padding."""
    keys = np.array([text.encode() for text in ids])
    layout = IdLayout("string", keys.dtype.itemsize + wider)
    packed = layout.pack(keys)
    assert (packed.dtype, packed.shape) == (np.uint8, (len(ids), layout.width))
    assert ids_text(packed).tolist() == ids
    assert id_keys(packed).tolist() == keys.tolist()
    tight = IdLayout("string", keys.dtype.itemsize).pack(keys)
    assert id_hashes(packed).tolist() == id_hashes(tight).tolist()
    assert len(set(id_hashes(packed).tolist())) == len(set(ids))


@settings(deadline=None, max_examples=30)
@given(ids=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_numbers_survive(ids: list[int]) -> None:
    packed = IdLayout("int64", 8).pack(np.array(ids))
    assert (packed.dtype, packed.shape) == (np.dtype("<i8"), (len(ids), 1))
    assert ids_text(packed).tolist() == id_keys(packed).tolist() == ids
    assert len(set(id_hashes(packed).tolist())) == len(set(ids))


def test_damaged_text_is_no_id() -> None:
    with pytest.raises(IntegrityError, match="no UTF-8"):
        ids_text(np.full((1, 2), 0xFF, np.uint8))


@pytest.mark.parametrize("dtype", ["<i8", ">i8", "<i2", "|u1", "<u8", ">u4"])
def test_integers_of_any_kind(dtype: str, tmp_path: Path) -> None:
    values = np.array([7, 0, 100, 3], dtype)
    np.save(tmp_path / "ids.npy", values)
    source = open_ids(str(tmp_path / "ids.npy"))
    assert (source.rows, source.kind) == (4, "int64")
    found = read_ids(source, 1, 4)
    assert (found.dtype, found.tolist()) == (np.dtype("<i8"), [0, 100, 3])


@settings(deadline=None, max_examples=25)
@given(
    ids=st.lists(TEXT, min_size=1, max_size=40),
    end=st.sampled_from(["\n", "\r\n"]),
    ended=st.booleans(),
    marked=st.integers(1, 9),
    block=st.integers(1, 30),
    data=st.data(),
)
def test_lines_of_text(ids: list[str], end: str, ended: bool, marked: int, block: int, data: st.DataObject) -> None:
    """Any range of lines, from any mark, whatever the blocks in which the file was looked through."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "MARK_LINES", marked)
        patch.setattr(formats, "SCAN_BYTES", block)
        path = Path(folder, "ids.txt")
        path.write_bytes((end.join(ids) + end * ended).encode())
        source = open_ids(str(path))
        assert (source.rows, source.kind) == (len(ids), "string")
        start = data.draw(st.integers(0, len(ids) - 1))
        stop = data.draw(st.integers(start + 1, len(ids)))
        assert [key.decode() for key in read_ids(source, start, stop).tolist()] == ids[start:stop]


def test_unicode_arrays_and_parquet_columns(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    names = ["ä", "bcd", "日本", "e" * 30] * 5
    np.save(tmp_path / "ids.npy", np.array(names))
    table = {"name": names, "number": pyarrow.array(range(20), pyarrow.uint32())}
    parquet.write_table(pyarrow.table(table), tmp_path / "t.parquet", row_group_size=6)
    for source in (open_ids(str(tmp_path / "ids.npy")), open_ids(str(tmp_path / "t.parquet"), column="name")):
        assert (source.rows, source.kind) == (20, "string")
        for start, stop in ((0, 20), (5, 7), (11, 19)):
            assert [key.decode() for key in read_ids(source, start, stop).tolist()] == names[start:stop]
    numbers = open_ids(str(tmp_path / "t.parquet"), column="number")
    assert read_ids(numbers, 4, 14).tolist() == list(range(4, 14))


def read_all(path: str) -> np.ndarray:
    source = open_ids(path)
    return read_ids(source, 0, source.rows)


BAD_IDS: dict[str, tuple[Any, str]] = {
    "floats": (np.zeros(3), "float64 of shape"),
    "two dimensions": (np.zeros((3, 2), int), r"shape \(3, 2\)"),
    "beyond 64 bits": (np.array([1, 2**63], np.uint64), "the id of row 1 is 9223372036854775808; expected at most"),
    "an empty string": (np.array(["a", ""]), "the id of row 1 has 0 bytes"),
    "a long string": (np.array(["a", "b" * 257]), "the id of row 1 has 257 bytes; expected 1 to 256"),
    "NUL": (np.array(["a", "b\0c"]), "the id of row 1 holds NUL"),
    "a lone surrogate": (np.array(["a", "\ud800"]), "the id of row 1 is no valid Unicode"),
    "an empty line": (b"a\n\nb\n", "the id of row 1 has 0 bytes"),
    "a long line": (b"a\n" + b"x" * 5000 + b"\nb\n", "the id of row 1 has more than 256 bytes"),
    "a line one too long": (b"a\n" + b"x" * 257 + b"\n", "the id of row 1 has 257 bytes"),
    "NUL in a line": (b"a\nb\0\n", "the id of row 1 holds NUL"),
    "bytes that are no text": (b"a\n\xff\n", "the id of row 1 is no valid Unicode"),
}


@pytest.mark.parametrize(("content", "message"), BAD_IDS.values(), ids=BAD_IDS.keys())
def test_what_is_no_id(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / ("ids.txt" if isinstance(content, bytes) else "ids.npy")
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(BadInputError, match=message):
        read_all(str(path))


def test_256_bytes_are_not_too_long(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_bytes(b"x" * 256 + b"\r\n" + b"y" * 256 + b"\n" + b"z" * 256)
    source = open_ids(str(tmp_path / "ids.txt"))
    assert [len(key) for key in read_ids(source, 0, 3).tolist()] == [256] * 3


def test_what_is_no_file_of_ids(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot be read"):
        open_ids(str(tmp_path / "none.npy"))
    (tmp_path / "ids.csv").write_text("a\n")
    with pytest.raises(UsageError, match=r"ids are read from \.npy and \.txt"):
        open_ids(str(tmp_path / "ids.csv"))
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(BadInputError, match="not a readable npy file"):
        open_ids(str(tmp_path / "cut.npy"))
    np.save(tmp_path / "short.npy", np.arange(9))
    whole = (tmp_path / "short.npy").read_bytes()
    (tmp_path / "short.npy").write_bytes(whole[:-3])
    with pytest.raises(BadInputError, match="its size is not what its header promises"):
        open_ids(str(tmp_path / "short.npy"))


def test_a_file_that_changed(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(3))
    (tmp_path / "ids.txt").write_bytes(b"a\nb\nc\n")
    sources = [open_ids(str(tmp_path / name)) for name in ("ids.npy", "ids.txt")]
    np.save(tmp_path / "ids.npy", np.arange(2))
    (tmp_path / "ids.txt").write_bytes(b"a\n")
    for source in sources:
        with pytest.raises(BadInputError, match="changed since it was opened"):
            read_ids(source, 0, 3)


def make(folder: Path, sizes: list[tuple[int, int]], kind: str) -> tuple[str, np.ndarray, np.ndarray]:
    """A corpus with a segment for every (rows, chunk rows); its address, vectors and ids."""
    rng, rows = np.random.default_rng(0), sum(size for size, _ in sizes)
    vectors = rng.normal(size=(rows, 3)).astype(np.float32)
    ids = rng.permutation(10 * rows)[:rows] - 5
    names = ids if kind == "int64" else np.array([f"id{n}" + "ü" * (n % 7) for n in ids.tolist()])
    done = 0
    for number, (size, chunk_rows) in enumerate(sizes):
        np.save(folder / f"v{number}.npy", vectors[done : done + size])
        np.save(folder / f"i{number}.npy", names[done : done + size])
        files = str(folder / f"i{number}.npy")
        ingest([str(folder / f"v{number}.npy")], str(folder / "c"), chunk_rows=chunk_rows, append=True, ids=[files])
        done += size
    return str(folder / "c"), vectors, names


SEGMENTS = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=3)


@settings(deadline=None, max_examples=15)
@given(sizes=SEGMENTS, kind=st.sampled_from(["int64", "string"]), data=st.data())
def test_rows_in_any_order(sizes: list[tuple[int, int]], kind: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        url, vectors, ids = make(Path(folder), sizes, kind)
        corpus = open_corpus(url)
        assert corpus.ids == kind
        rows = np.array(data.draw(st.lists(st.integers(0, len(vectors) - 1), max_size=30)), np.int64)
        np.testing.assert_array_equal(corpus.read_at(rows), vectors[rows])
        found = corpus.read_ids(rows)
        assert found.tolist() == ids[rows].tolist()
        assert found.dtype.kind == ("i" if kind == "int64" else "U")


def test_each_chunk_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, _, _ = make(tmp_path, [(20, 5), (13, 4)], "int64")
    corpus, read, plain = open_corpus(url), [], corpus_store.read_plain_chunk
    monkeypatch.setattr(
        corpus_store, "read_plain_chunk", lambda o, p, s, chunk: read.append(chunk) or plain(o, p, s, chunk)
    )
    corpus.read_at(np.array([32, 0, 7, 6, 32, 1, 20, 5]))
    assert read == [0, 1, 0, 3]
    for wrong in (33, -1):
        with pytest.raises(BadInputError, match=rf"row {wrong} is asked for, but .* has rows 0 to 32"):
            corpus.read_at(np.array([3, wrong]))


def test_a_corpus_without_ids(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.zeros((4, 3), np.float32))
    ingest([str(tmp_path / "v.npy")], str(tmp_path / "c"))
    corpus = open_corpus(str(tmp_path / "c"))
    assert (corpus.ids, corpus.to_json()["format"]) == (None, 1)
    with pytest.raises(BadInputError, match="has no ids; use row numbers"):
        corpus.read_ids(np.array([1]))


def test_ids_are_part_of_what_a_corpus_is(tmp_path: Path) -> None:
    """A worker that remembers a corpus must not take one with other ids for it."""
    np.save(tmp_path / "v.npy", np.zeros((4, 3), np.float32))
    fingerprints = set()
    for name, ids in (("none", None), ("a", [1, 2, 3, 4]), ("b", [1, 2, 3, 5])):
        files = None
        if ids:
            np.save(tmp_path / f"{name}.npy", ids)
            files = [str(tmp_path / f"{name}.npy")]
        ingest([str(tmp_path / "v.npy")], str(tmp_path / name), ids=files)
        fingerprints.add(open_corpus(str(tmp_path / name)).fingerprint)
        assert open_corpus(str(tmp_path / name)).digest(0, 4) == open_corpus(str(tmp_path / "none")).digest(0, 4)
    assert len(fingerprints) == 3


LIES = {
    "another kind": lambda body: body["segments"][0]["ids"].update(kind="float"),
    "an impossible width": lambda body: body["segments"][0]["ids"].update(width=257),
    "one segment without": lambda body: body["segments"][1].pop("ids"),
    "too few digests": lambda body: body["segments"][0]["ids"].update(digests=""),
}


@pytest.mark.parametrize("change", LIES.values(), ids=LIES.keys())
def test_manifests_that_lie(change: Any, tmp_path: Path) -> None:
    url, _, _ = make(tmp_path, [(9, 5), (4, 4)], "string")
    path = Path(url, version_key(2))
    body = json.loads(path.read_bytes())
    assert (body.pop("sha256"), body["format"])[1] == 2
    change(body)
    path.write_bytes(seal(body))
    with pytest.raises(IntegrityError):
        open_corpus(url)
