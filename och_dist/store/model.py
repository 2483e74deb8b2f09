"""The model store: JSON and arrays under the address of their content. Nothing in it can execute.

``DIR/<address>/model.json`` names method, parameters and the sha256 of every array; the address is the sha256 of those
bytes. ``provenance.json`` beside it says where the model came from and is not part of the address.
"""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from och_dist.errors import BadInputError, ConflictError, IntegrityError
from och_dist.hashers.base import Hasher
from och_dist.hashers.registry import model_from_state
from och_dist.store.objects import Objects, open_objects
from och_dist.store.versions import canonical, read_document, seal, sha256, unseal

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
    """Copy a model as it is, ``model.json`` last, so that a model that can be seen is whole."""
    if target.size(f"{address}/model.json") is not None:
        return
    for key in sorted((key for key, _, _ in source.list(address)), key=lambda key: key.endswith("/model.json")):
        if key.endswith("/provenance.json"):
            _put_provenance(target, address, source.get(key))
        else:
            target.put(key, source.get(key))


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
    arrays = {name: _load_array(objects, address, name, entry) for name, entry in listed.items()}
    data = read_document(objects, f"{address}/provenance.json")
    provenance = {} if data is None else unseal(data, f"{where}, provenance.json")
    return Model(address, method, params, model_from_state(method, params, arrays), provenance)


def _load_array(objects: Objects, address: str, name: str, entry: dict[str, Any]) -> np.ndarray:
    where = f"array {name!r} of model {address[:16]}"
    try:
        if not name.isidentifier() or len(name) > 64:
            raise ValueError("its name is no short identifier")
        dtype, shape = str(entry["dtype"]), tuple(int(size) for size in entry["shape"])
        expected = np.dtype(dtype).itemsize * int(np.prod(shape, dtype=object)) if dtype in MODEL_DTYPES else -1
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise IntegrityError(f"{where} is not described ({error}); restore the model from a copy") from None
    key = f"{address}/{name}.npy"
    size = objects.size(key)
    if not 0 <= expected <= MAX_ARRAY_BYTES or size is None or not expected <= size <= expected + 4096:
        raise IntegrityError(f"{where} is stated as {dtype} {shape} but stored in {size} bytes; restore the model")
    data = objects.get(key)
    if sha256(data) != entry.get("sha256"):
        raise IntegrityError(
            f"{where} does not match its sha256; restore the model, or remove its folder and train again"
        )
    return _parse_array(data, dtype, shape, where)


def _parse_array(data: bytes, dtype: str, shape: tuple[int, ...], where: str) -> np.ndarray:
    """The array of an .npy text; its header must say what is stated, so that nothing of another size is allocated."""
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
