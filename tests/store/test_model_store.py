"""Models on disk: an address of content, nothing that executes, every damaged byte found."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist import OCH
from och_dist.errors import BadInputError, ConflictError, IntegrityError, UsageError
from och_dist.methods.base import Hasher
from och_dist.store.manifest import canonical, sha256
from och_dist.store.model import (
    check_expected,
    copy_model,
    load_model,
    model_on_worker,
    save_model,
    split_model_path,
)
from och_dist.store.objects import LocalObjects


def make_hasher(seed: int = 0, **params: Any) -> Hasher:
    """A hasher of 12 bits on 5 features with arrays out of thin air."""
    draw = np.random.default_rng(seed)
    hasher = OCH(n_bits=12, **params)
    arrays = {
        "mean": draw.standard_normal(5, np.float32),
        "projection": draw.standard_normal((5, 12), np.float32),
        "offsets": draw.standard_normal(12, np.float32),
    }
    return OCH.from_state(hasher.get_params(deep=False), arrays)


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path / "models")


PROVENANCE = {"seed": 3, "corpus": {"rows": 10}}


def test_round_trip(objects: LocalObjects) -> None:
    hasher = make_hasher()
    address = save_model(objects, hasher, PROVENANCE)
    model = load_model(objects, address)
    assert (model.address, model.method, model.n_bits) == (address, "och", 12)
    assert model.params["n_bits"] == 12
    assert model.provenance == {**PROVENANCE, "training": hasher.info()}
    for name in OCH.arrays:
        found, expected = getattr(model.hasher, f"{name}_"), getattr(hasher, f"{name}_")
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
        assert found.flags.writeable  # read-only arrays would make numba compile everything twice
    assert model.hasher.get_params() == hasher.get_params()
    assert model_on_worker(objects.url, address) is model_on_worker(objects.url, address)


def test_the_address_is_the_sha256_of_the_document(objects: LocalObjects) -> None:
    address = save_model(objects, make_hasher(), PROVENANCE)
    assert sha256(objects.get(f"{address}/model.json")) == address
    assert sorted(key for key, _, _ in objects.list("")) == [
        f"{address}/{name}" for name in ("mean.npy", "model.json", "offsets.npy", "projection.npy", "provenance.json")
    ]
    assert np.array_equal(np.load(objects.root / address / "mean.npy", allow_pickle=False), make_hasher().mean_)


def test_the_address_depends_on_parameters_and_arrays_alone(objects: LocalObjects) -> None:
    address = save_model(objects, make_hasher(), PROVENANCE)
    assert save_model(objects, make_hasher(), PROVENANCE) == address
    assert save_model(objects, make_hasher(), {"made": "elsewhere"}) == address
    assert load_model(objects, address).provenance["seed"] == 3
    others = {save_model(objects, hasher, PROVENANCE) for hasher in (make_hasher(1), make_hasher(max_iter=7))}
    assert len({address, *others}) == 3


def test_byte_order_and_memory_order_are_no_part_of_the_address(objects: LocalObjects, tmp_path: Path) -> None:
    hasher = make_hasher()
    address = save_model(objects, hasher, {})
    hasher.projection_ = np.asfortranarray(hasher.projection_)
    hasher.mean_ = hasher.mean_.astype(">f4")
    assert save_model(LocalObjects(tmp_path / "other"), hasher, {}) == address


def test_every_damaged_byte_is_found(objects: LocalObjects) -> None:
    address = save_model(objects, make_hasher(), PROVENANCE)
    before = canonical(load_model(objects, address).provenance)
    for key, _, _ in list(objects.list("")):
        path = objects.root / key
        sound = path.read_bytes()
        for place in range(0, len(sound), 3):
            damaged = bytearray(sound)
            damaged[place] ^= 1
            path.write_bytes(damaged)
            if key.endswith("provenance.json") and sound[place : place + 1] in b" \n":
                continue  # between two values: found, or of the same meaning
            with pytest.raises(IntegrityError):
                load_model(objects, address)
        for length in (0, 1, len(sound) // 2, len(sound) - 1):
            path.write_bytes(sound[:length])
            with pytest.raises(IntegrityError):
                load_model(objects, address)
        path.write_bytes(sound)
    assert canonical(load_model(objects, address).provenance) == before


@pytest.mark.parametrize("name", ["model.json", "mean.npy", "projection.npy", "offsets.npy"])
def test_a_missing_part(objects: LocalObjects, name: str) -> None:
    address = save_model(objects, make_hasher(), {})
    objects.delete(f"{address}/{name}")
    with pytest.raises(IntegrityError, match=f"model {address[:16]}"):
        load_model(objects, address)


def test_a_model_without_provenance_still_works(objects: LocalObjects) -> None:
    address = save_model(objects, make_hasher(), PROVENANCE)
    objects.delete(f"{address}/provenance.json")
    assert load_model(objects, address).provenance == {}


def forge(objects: LocalObjects, change: Any, files: dict[str, bytes] | None = None) -> str:
    """A model whose address is right and whose document says what ``change`` makes of it."""
    address = save_model(objects, make_hasher(), {})
    document = json.loads(objects.get(f"{address}/model.json"))
    names = {f"{name}.npy": objects.get(f"{address}/{name}.npy") for name in OCH.arrays} | (files or {})
    for name, data in (files or {}).items():
        document["arrays"].setdefault(name.removesuffix(".npy"), {})["sha256"] = sha256(data)
    text = change(document)
    data = text if isinstance(text, bytes) else json.dumps(document).encode()
    forged = sha256(data)
    for name, content in names.items():
        objects.put(f"{forged}/{name}", content)
    objects.put(f"{forged}/model.json", data)
    return forged


def npy(array: np.ndarray, **options: Any) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, **options)
    return buffer.getvalue()


def npy_of_shape(shape: str, data: bytes = b"") -> bytes:
    """An .npy text whose header claims a shape."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


HUGE = [[10**12], [1 << 28, 5], [2**62, 2**62], [-1, -5], [-5], [10**400]]


@pytest.mark.parametrize("shape", HUGE, ids=range(len(HUGE)))
def test_a_stated_shape_is_checked_before_anything_is_allocated(objects: LocalObjects, shape: list[int]) -> None:
    address = forge(objects, lambda document: document["arrays"]["mean"].update(shape=shape))
    with no_array_is_read(), pytest.raises(IntegrityError, match=r"array 'mean' .* is not described|array mean of"):
        load_model(objects, address)


LAYOUTS: dict[str, tuple[Any, str]] = {
    "fewer bits": (lambda document: document["params"].update(n_bits=11), r"expected r = 11"),
    "another dtype": (lambda document: document["arrays"]["mean"].update(dtype="<f8"), "is float64 .*expected float32"),
    "another rank": (lambda document: document["arrays"]["mean"].update(shape=[5, 1]), r"\(5, 1\); expected float32"),
    "nothing": (lambda document: document["arrays"]["mean"].update(shape=[0]), r"has shape \(0,\)"),
    "one more": (
        lambda document: document["arrays"].update(more={**document["arrays"]["mean"], "shape": [1 << 28]}),
        "has arrays .*more",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_of_another_method_is_refused_before_anything_is_read(objects: LocalObjects, name: str) -> None:
    change, message = LAYOUTS[name]
    address = forge(objects, change)
    with no_array_is_read(), pytest.raises(IntegrityError, match=message):
        load_model(objects, address)


@contextmanager
def no_array_is_read() -> Iterator[None]:
    read = LocalObjects.read

    def careful(self: LocalObjects, key: str, *bounds: Any) -> bytes | None:
        assert not key.endswith(".npy"), f"{key} was read"
        return read(self, key, *bounds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalObjects, "read", careful)
        yield


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(5, 1000000000)", "(-5,)", "(5", "5", "()", "(5.0,)"])
def test_the_shape_in_the_file_is_checked_before_anything_is_allocated(objects: LocalObjects, shape: str) -> None:
    address = forge(objects, lambda document: None, {"mean.npy": npy_of_shape(shape, b"\0" * 20)})
    with pytest.raises(IntegrityError, match=r"array 'mean' .* is not a plain array"):
        load_model(objects, address)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


def test_pickles_are_never_opened(objects: LocalObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    payload = np.array([Payload()] * 5, dtype=object)
    pickled = npy(payload, allow_pickle=True)
    pickle.loads(pickle.dumps(Payload()))
    assert (tmp_path / "ran").exists()
    (tmp_path / "ran").unlink()
    size = len(pickled) // 4
    for change in (
        lambda document: document["arrays"]["mean"].update(dtype="|O"),
        lambda document: document["arrays"]["mean"].update(dtype="<f4", shape=[size - 20]),
    ):
        with pytest.raises(IntegrityError):
            load_model(objects, forge(objects, change, {"mean.npy": pickled}))
    assert not (tmp_path / "ran").exists()


ODD_ARRAYS = {
    "fortran": npy(np.asfortranarray(np.ones((5, 12), "<f4"))),
    "float64": npy(np.ones((5, 6), "<f8")),
    "version 2": npy(np.ones((5, 12), "<f4"), version=(2, 0)),
    "trailing bytes": npy(np.ones((5, 12), "<f4")) + b"\0" * 4,
    "too short": npy(np.ones((5, 12), "<f4"))[:-4] + b"",
    "not numpy": b"x" * 368,
    "not finite": npy(np.full((5, 12), np.nan, "<f4")),
}


@pytest.mark.parametrize("data", ODD_ARRAYS.values(), ids=ODD_ARRAYS)
def test_odd_arrays(objects: LocalObjects, data: bytes) -> None:
    with pytest.raises(IntegrityError):
        load_model(objects, forge(objects, lambda document: None, {"projection.npy": data}))


FALSE_DOCUMENTS: dict[str, Any] = {
    "not JSON": lambda document: b"{",
    "a list": lambda document: b"[]",
    "deep": lambda document: b"[" * 100_000,
    "no arrays": lambda document: document.pop("arrays") and None,
    "no method": lambda document: document.pop("method") and None,
    "arrays of text": lambda document: document.update(arrays={"mean": "text"}),
    "no shape": lambda document: document["arrays"]["mean"].pop("shape") and None,
    "infinite": lambda document: json.dumps(document).replace("[5]", "[1e999]").encode(),
    "object dtype": lambda document: document["arrays"]["mean"].update(dtype="|O"),
    "unknown dtype": lambda document: document["arrays"]["mean"].update(dtype="banana"),
    "climbing": lambda document: document["arrays"].update({"../../mean": document["arrays"]["mean"]}),
    "long name": lambda document: document["arrays"].update({"x" * 300: document["arrays"]["mean"]}),
    "one more array": lambda document: document["arrays"].update(extra=document["arrays"]["mean"]),
    "one array less": lambda document: document["arrays"].pop("mean") and None,
    "no bits": lambda document: document["params"].update(n_bits=0),
    "other bits": lambda document: document["params"].update(n_bits=13),
    "one more parameter": lambda document: document["params"].update(extra=1),
    "one parameter less": lambda document: document["params"].pop("gain") and None,
    "text for a number": lambda document: document["params"].update(max_iter="many"),
}


@pytest.mark.parametrize("change", FALSE_DOCUMENTS.values(), ids=FALSE_DOCUMENTS)
def test_documents_that_lie(objects: LocalObjects, change: Any) -> None:
    with pytest.raises(IntegrityError):
        load_model(objects, forge(objects, change))


def test_another_method(objects: LocalObjects) -> None:
    with pytest.raises(BadInputError, match="is of method 'banana'; this version knows och"):
        load_model(objects, forge(objects, lambda document: document.update(method="banana")))


def test_the_expected_model() -> None:
    address, other = "0123456789abcdef" * 4, "f" * 64
    for expected in (None, address, f"sha256:{address}", f"sha256:{address.upper()}"):
        check_expected(address, expected)
    with pytest.raises(ConflictError, match=f"is sha256:{address}, but sha256:{other} is expected; nothing was done"):
        check_expected(address, f"sha256:{other}")
    for expected in ("", "sha256:", "sha256:abc", f"md5:{address}", address + "0"):
        with pytest.raises(UsageError, match="is no address; write sha256: and the 64"):
            check_expected(address, expected)


def test_another_format(objects: LocalObjects) -> None:
    with pytest.raises(BadInputError, match="has format 2; this version reads format 1"):
        load_model(objects, forge(objects, lambda document: document.update(format=2)))


@pytest.mark.parametrize("address", ["", "..", "../x", "abc", "A" * 64, "0" * 63, "0" * 63 + "/"])
def test_addresses_that_are_none(objects: LocalObjects, address: str) -> None:
    with pytest.raises(IntegrityError, match="64 hexadecimal digits"):
        load_model(objects, address)


def test_an_address_that_is_not_there(objects: LocalObjects) -> None:
    with pytest.raises(IntegrityError, match="is not there; train one"):
        load_model(objects, "0" * 64)


def test_copying(objects: LocalObjects, tmp_path: Path) -> None:
    address = save_model(objects, make_hasher(), PROVENANCE)
    target = LocalObjects(tmp_path / "index" / "models")
    copy_model(objects, address, target)
    copy_model(objects, address, target)
    copy_model(target, address, target)
    assert {key: target.get(key) for key, _, _ in target.list("")} == {
        key: objects.get(key) for key, _, _ in objects.list("")
    }


def test_only_what_belongs_to_a_model_is_copied(objects: LocalObjects, tmp_path: Path) -> None:
    address = save_model(objects, make_hasher(), PROVENANCE)
    objects.put(f"{address}/more.npy", b"x")
    objects.put(f"{address}/sub/installer.sh", b"x")
    target = LocalObjects(tmp_path / "copy")
    copy_model(objects, address, target)
    assert {key for key, _, _ in objects.list("")} - {key for key, _, _ in target.list("")} == {
        f"{address}/more.npy",
        f"{address}/sub/installer.sh",
    }


def test_copying_keeps_the_provenance_that_is_there(objects: LocalObjects, tmp_path: Path) -> None:
    address = save_model(objects, make_hasher(), PROVENANCE)
    target = LocalObjects(tmp_path / "other")
    save_model(target, make_hasher(), {"seed": 4})
    target.delete(f"{address}/model.json")
    copy_model(objects, address, target)
    assert load_model(target, address).provenance["seed"] == 4


def test_a_model_appears_last(objects: LocalObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sees model.json sees the whole model, also while it is saved or copied."""
    order: list[str] = []
    put = LocalObjects.put
    monkeypatch.setattr(LocalObjects, "put", lambda self, key, data: (order.append(key), put(self, key, data))[1])
    address = save_model(objects, make_hasher(), PROVENANCE)
    assert order[-1] == f"{address}/model.json"
    copy_model(objects, address, LocalObjects(tmp_path / "copy"))
    assert order[-1] == f"{address}/model.json"
    assert len(order) == 10


@pytest.mark.parametrize(
    ("path", "folder"),
    [("models/", "models"), ("/a/b/", "/a/b"), ("", "."), ("/", "/"), ("s3://bucket/models/", "s3://bucket/models")],
)
def test_model_paths(path: str, folder: str) -> None:
    address = "0123456789abcdef" * 4
    assert split_model_path(path + address) == (folder, address)
    assert split_model_path(f"{path}{address}/") == (folder, address)


@pytest.mark.parametrize("path", ["", "models", "models/abc", "m/" + "g" * 64, "m/" + "0" * 64 + "/model.json"])
def test_paths_that_are_no_model(path: str) -> None:
    with pytest.raises(BadInputError, match="is not a model; give the folder that 'och train' printed"):
        split_model_path(path)
