"""Sealed manifests: what they say comes back, a changed byte does not pass, one writer gets a number."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, IntegrityError
from och_dist.store.corpus import open_corpus
from och_dist.store.index import open_version
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
from tests.store.test_corpus import build as build_corpus
from tests.store.test_index import build as build_index
from tests.support.races import together

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
        bodies = [{"version": number, "writer": writer} for writer in range(8)]
        results = together(*[partial(commit_version, objects, body) for body in bodies])
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


KINDS: dict[str, tuple[Callable[[str], Any], Callable[..., Any]]] = {
    "corpus": (lambda url: build_corpus(url, [(10, 4), (6, 4)]), open_corpus),
    "index": (lambda url: build_index(url, [10, 6]), open_version),
}
LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "rows": lambda body: body.update(rows=17),
    "no rows": lambda body: body.pop("rows"),
    "no segments": lambda body: body.update(segments=[], rows=0),
    "null segments": lambda body: body.update(segments=None),
    "segments of text": lambda body: body.update(segments=["abc"]),
    "a table of segments": lambda body: body.update(segments={"a": 1}),
    "no version": lambda body: body.update(version=None),
    "other version": lambda body: body.update(version=2),
    "order": lambda body: body["segments"].reverse(),
    "twice": lambda body: body["segments"].append(body["segments"][1]),
    "one less": lambda body: body["segments"].pop(),
    "first one missing": lambda body: body["segments"].pop(0),
}
OTHERS = ({"kind": "neither"}, {"kind": None}, {"format": 3})


@pytest.mark.parametrize("kind", KINDS)
def test_manifests_that_lie(kind: str, tmp_path: Path) -> None:
    """Well sealed, and not true: what holds for corpora and indexes alike."""
    build, open_ = KINDS[kind]
    objects = LocalObjects(tmp_path)
    build(objects.url)
    sound = seal({**open_(objects.url).to_json(), "version": 3})
    changes = [(change, IntegrityError, "version") for change in LIES.values()]
    needed = rf"an? {kind} of format 1 or 2 is needed here"
    changes += [(lambda body, other=other: body.update(other), BadInputError, needed) for other in OTHERS]
    for change, error, message in changes:
        body = unseal(sound, "it")
        change(body)
        objects.put(version_key(3), seal(body))
        with pytest.raises(error, match=message):
            open_(objects.url)
        objects.delete(version_key(3))
    assert open_(objects.url).rows == 16


def test_sha256_is_the_one_of_the_books() -> None:
    assert sha256(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
