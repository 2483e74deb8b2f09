"""The model store: JSON and arrays under the address of their content. Nothing in it can execute.

``DIR/<address>/model.json`` names method, parameters and the sha256 of every array; the address is the sha256 of those
bytes. ``provenance.json`` beside it says where the model came from and is not part of the address.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from och_dist.errors import BadInputError, ConflictError, IntegrityError, UsageError
from och_dist.methods import METHODS, get_method
from och_dist.methods.base import Hasher
from och_dist.store.manifest import canonical, read_document, read_sealed, seal, sha256
from och_dist.store.objects import Objects, open_objects

FORMAT = 1
MAX_ARRAY_BYTES = 1 << 30
MODEL_DTYPES = ("<f4", "<f8", "<i4", "<i8", "|u1")


@dataclass(frozen=True)
class Model:
    """A loaded model: the hasher, its address and where it came from."""

    address: str
    method: str
    params: dict[str, Any]
    hasher: Hasher
    provenance: dict[str, Any]

    @property
    def n_bits(self) -> int:
        return int(self.params["n_bits"])


def _array_bytes(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
    np.lib.format.write_array(buffer, little, version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def save_model(objects: Objects, hasher: Hasher, provenance: dict[str, Any]) -> str:
    """Store a fitted hasher below ``objects``; returns its address. Storing it again changes nothing."""
    params, arrays, info = hasher.to_state()
    encoded = {name: _array_bytes(array) for name, array in arrays.items()}
    document = canonical(
        {
            "format": FORMAT,
            "method": hasher.method,
            "params": params,
            "arrays": {
                name: {
                    "sha256": sha256(encoded[name]),
                    "dtype": array.dtype.newbyteorder("<").str,
                    "shape": list(array.shape),
                }
                for name, array in arrays.items()
            },
        }
    )
    address = sha256(document)
    for name, data in encoded.items():
        objects.put(f"{address}/{name}.npy", data)
    _put_provenance(objects, address, seal({**provenance, "training": info}))
    objects.put(f"{address}/model.json", document)
    return address


def copy_model(source: Objects, address: str, target: Objects) -> None:
    """Copy a sound model, ``model.json`` last, so that a model that can be seen is whole.

    Only what belongs to it is copied, whatever else lies in its folder.
    """
    if target.size(f"{address}/model.json") is not None:
        return
    document = source.get(f"{address}/model.json")
    for name in sorted(json.loads(document)["arrays"]):
        target.put(f"{address}/{name}.npy", source.get(f"{address}/{name}.npy"))
    if (provenance := read_document(source, f"{address}/provenance.json")) is not None:
        _put_provenance(target, address, provenance)
    target.put(f"{address}/model.json", document)


def _put_provenance(objects: Objects, address: str, document: bytes) -> None:
    """The same model can come from several requests; the first account of it stays."""
    with contextlib.suppress(ConflictError):
        objects.put(f"{address}/provenance.json", document)


def load_model(objects: Objects, address: str) -> Model:
    """Load and verify a model: address, hashes, shapes and dtypes are checked before anything is used."""
    where = f"model {address[:16]} in {objects.url}"
    if not is_address(address):
        raise IntegrityError(f"{where} has no address of 64 hexadecimal digits; restore what names it from a copy")
    document = read_document(objects, f"{address}/model.json")
    if document is None:
        raise IntegrityError(f"{where} is not there; train one with 'och train', or name its folder")
    if sha256(document) != address:
        raise IntegrityError(
            f"{where} does not match its address; restore it, or remove its folder and train again with the same seed"
        )
    try:
        body = json.loads(document)
        method, params, listed = str(body["method"]), dict(body["params"]), dict(body["arrays"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IntegrityError(f"{where} is not readable ({error}); restore it from a copy") from None
    if body.get("format") != FORMAT:
        raise BadInputError(f"{where} has format {body.get('format')!r}; this version reads format {FORMAT}")
    if method not in METHODS:
        raise BadInputError(f"{where} is of method {method!r}; this version knows {', '.join(METHODS)}")
    stated = {name: _stated(address, name, entry) for name, entry in listed.items()}
    hashing = get_method(method)
    hashing.check_layout(params, stated)  # before anything is read or allocated
    arrays = {name: _load_array(objects, address, name, stated[name], listed[name]["sha256"]) for name in stated}
    provenance = read_sealed(objects, f"{address}/provenance.json") or {}
    return Model(address, method, params, hashing.from_state(params, arrays), provenance)


def _stated(address: str, name: str, entry: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """dtype and shape of an array as the model states them, within what is ever accepted."""
    where = f"array {name!r} of model {address[:16]}"
    try:
        if not name.isidentifier() or len(name) > 64:
            raise ValueError("its name is no short identifier")
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        if dtype not in MODEL_DTYPES or len(str(entry["sha256"])) != 64:
            raise ValueError(f"{dtype}, expected one of {', '.join(MODEL_DTYPES)} and a sha256")
        if len(shape) > 8 or min(shape, default=0) < 0 or _nbytes(dtype, shape) > MAX_ARRAY_BYTES:
            raise ValueError(f"{dtype} {shape}, expected at most {MAX_ARRAY_BYTES >> 20} MiB")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise IntegrityError(f"{where} is not described ({error}); restore the model from a copy") from None
    return dtype, shape


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return np.dtype(dtype).itemsize * math.prod(shape)


def _load_array(
    objects: Objects, address: str, name: str, stated: tuple[str, tuple[int, ...]], digest: str
) -> np.ndarray:
    """An array whose size, hash and header are those that the model states, compared in this order, so that nothing of
    another size is read or allocated."""
    where, (dtype, shape) = f"array {name!r} of model {address[:16]}", stated
    key, expected = f"{address}/{name}.npy", _nbytes(dtype, shape)
    size = objects.size(key)
    if size is None or not expected <= size <= expected + 4096:
        raise IntegrityError(f"{where} is stated as {dtype} {shape} but stored in {size} bytes; restore the model")
    data = objects.get(key)
    if sha256(data) != digest:
        raise IntegrityError(
            f"{where} does not match its sha256; restore the model, or remove its folder and train again"
        )
    stream = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("not version 1.0")
        found = np.lib.format.read_array_header_1_0(stream)
        if (found[0], found[1], found[2].str) != (shape, False, dtype):
            raise ValueError(f"it holds {found[2]} {found[0]}, stated as {dtype} {shape}")
        return np.frombuffer(data, dtype, offset=stream.tell()).reshape(shape).copy()
    except Exception as error:  # NumPy parses the header as Python text, and lets its tokenizer's errors through
        raise IntegrityError(f"{where} is not a plain array ({error}); restore the model") from None


def is_address(text: str) -> bool:
    return len(text) == 64 and not set(text) - set("0123456789abcdef")


def check_expected(address: str, expected: str | None) -> None:
    """Refuse a model other than the one that somebody expects, ``sha256:`` and its address; None expects nothing."""
    if expected is None:
        return
    wanted = str(expected).removeprefix("sha256:").lower()
    if not is_address(wanted):
        raise UsageError(
            f"the expected model {expected!r} is no address; write sha256: and the 64 hexadecimal digits at the end of "
            "what 'och train' printed"
        )
    if address != wanted:
        raise ConflictError(
            f"the model is sha256:{address}, but sha256:{wanted} is expected; nothing was done: name the right model "
            "or index, or expect this one if you trust it"
        )


def split_model_path(path: str) -> tuple[str, str]:
    """('DIR', address) of 'DIR/<address>' as 'och train' prints it."""
    folder, _, address = str(path).rstrip("/").rpartition("/")
    if not is_address(address):
        raise BadInputError(
            f"{path} is not a model; give the folder that 'och train' printed, MODELS/<64 hexadecimal digits>"
        )
    return folder or ("/" if str(path).startswith("/") else "."), address


@lru_cache(maxsize=8)
def model_on_worker(url: str, address: str) -> Hasher:
    """The hasher of a model, loaded once per process."""
    return load_model(open_objects(url), address).hasher
