"""Sealed manifests: what they say comes back, a changed byte does not pass, one writer gets a number."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import IntegrityError
from och_dist.store.manifest import (
    MAX_MANIFEST_BYTES,
    canonical,
    commit_version,
    pack_numbers,
    read_document,
    read_latest,
    read_version,
    seal,
    sha256,
    unpack_numbers,
    unseal,
    version_key,
    version_numbers,
)
from och_dist.store.objects import LocalObjects

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=15,
)
BODIES = st.dictionaries(st.text().filter(lambda key: key != "sha256"), JSON, max_size=5)


@settings(max_examples=100, deadline=None)
@given(BODIES)
def test_what_is_sealed_comes_back(body: dict[str, Any]) -> None:
    assert unseal(seal(body), "here") == body
    assert canonical(json.loads(canonical(body))) == canonical(body)


def test_the_order_of_keys_does_not_matter() -> None:
    assert seal({"a": 1, "b": [1, 2]}) == seal({"b": [1, 2], "a": 1})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_has_no_word_for(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        seal({"a": value})


BODY = {"rows": 1200, "name": "é\u20ac", "segments": [{"start": 0, "stop": 1.5e-7}, None, True], "k": {}}


def test_every_changed_byte_is_found_or_means_the_same() -> None:
    data = seal(BODY)
    found = 0
    for place in range(len(data)):
        for change in (1, 2, 16, 32, 128):
            damaged = bytearray(data)
            damaged[place] ^= change
            try:
                meaning = unseal(bytes(damaged), "here")
            except IntegrityError:
                found += 1
            else:
                assert canonical(meaning) == canonical(BODY)
    assert found > 4 * len(data)


def test_every_cut_is_found() -> None:
    data = seal(BODY)
    for length in range(len(data)):
        with pytest.raises(IntegrityError, match="here is not a sealed JSON object"):
            unseal(data[:length], "here")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b'"text"',
        b"{}",
        b'{"sha256": 5}',
        b"\xff\xfe",
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b', "sha256": "0"}',
        b'{"a": ' + b"9" * 10_000 + b', "sha256": "0"}',
        b'{"a": NaN, "sha256": "0"}',
        b'{"a": 1e999, "sha256": "0"}',
    ],
    ids=range(14),
)
def test_bombs_and_other_things(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="here"):
        unseal(data, "here")


def test_a_body_with_the_seal_of_another() -> None:
    other = json.loads(seal({"rows": 1}))
    with pytest.raises(IntegrityError, match="does not match its own sha256"):
        unseal(canonical({**other, "rows": 2}), "here")


def test_a_manifest_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / version_key(1)
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    monkeypatch.setattr(LocalObjects, "read", lambda *args: pytest.fail("it was read"))
    with pytest.raises(IntegrityError, match="no manifest is over"):
        read_version(LocalObjects(tmp_path), 1)


def test_unseal_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("och_dist.store.manifest.MAX_MANIFEST_BYTES", 10)
    with pytest.raises(IntegrityError, match="no manifest is over 10"):
        unseal(seal({"a": 1}), "here")


def test_documents(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    assert read_document(objects, "a.json") is None
    objects.put("a.json", b"{}")
    assert read_document(objects, "a.json") == b"{}"


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_digests_come_back(values: list[int]) -> None:
    digests = np.array(values, "<u4")
    assert unpack_numbers(pack_numbers(digests), len(values), "here").tolist() == values
    assert pack_numbers(digests.astype(">u4")) == pack_numbers(digests)
    with pytest.raises(IntegrityError, match=f"holds {len(values)} chunk digests, expected {len(values) + 1}"):
        unpack_numbers(pack_numbers(digests), len(values) + 1, "here")


@pytest.mark.parametrize("text", ["AAAA", "AAAAAA==x", "é", "AAA", 7, None, ["AAAAAA=="]])
def test_digests_that_are_none(text: Any) -> None:
    with pytest.raises(IntegrityError, match="here holds unreadable chunk digests"):
        unpack_numbers(text, 1, "here")


def test_versions(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    assert (version_numbers(objects), read_latest(objects)) == ([], None)
    for number in (1, 2, 10, 123_456_789):
        assert commit_version(objects, {"version": number, "rows": number})
    assert version_numbers(objects) == [1, 2, 10, 123_456_789]
    assert read_version(objects, 2) == {"version": 2, "rows": 2}
    assert read_latest(objects) == {"version": 123_456_789, "rows": 123_456_789}


def test_names_that_are_no_versions(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    commit_version(objects, {"version": 3})
    for name in ("1.json", "0000000x.json", "²²²²²²²².json", "٠٠٠٠٠٠٠١.json", "00000004.json.bak", "old/00000005.json"):
        objects.put(f"versions/{name}", b"")
    assert version_numbers(objects) == [3]


def test_committing_again_and_committing_something_else(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    assert commit_version(objects, {"version": 1, "rows": 5})
    assert commit_version(objects, {"version": 1, "rows": 5})
    assert not commit_version(objects, {"version": 1, "rows": 6})
    assert read_version(objects, 1)["rows"] == 5


def test_race_for_a_version(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    for number in range(1, 11):
        results = [False] * 8
        barrier = threading.Barrier(8)

        def run(writer: int, number: int = number, results: list[bool] = results, barrier: Any = barrier) -> None:
            barrier.wait()
            results[writer] = commit_version(objects, {"version": number, "writer": writer})

        threads = [threading.Thread(target=run, args=(writer,)) for writer in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [writer for writer, won in enumerate(results) if won] == [read_version(objects, number)["writer"]]


def test_a_version_that_is_gone(tmp_path: Path) -> None:
    objects = LocalObjects(tmp_path)
    with pytest.raises(IntegrityError, match=r"version 1 .* is not there .* present: none"):
        read_version(objects, 1)
    commit_version(objects, {"version": 4})
    commit_version(objects, {"version": 5})
    with pytest.raises(IntegrityError, match=r"may have been collected\); present: 4, 5"):
        read_version(objects, 1)


@pytest.mark.parametrize("stated", [1, "2", None, 2.5])
def test_a_manifest_under_another_number(tmp_path: Path, stated: Any) -> None:
    objects = LocalObjects(tmp_path)
    objects.put(version_key(2), seal({"version": stated}))
    with pytest.raises(IntegrityError, match=f"00000002.json is the manifest of version {stated!r}"):
        read_latest(objects)


def test_sha256_is_the_one_of_the_books() -> None:
    assert sha256(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
