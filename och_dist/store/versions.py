"""Numbered manifests: the only thing that makes data visible.

A version is ``versions/00000007.json``. Committing it is one put-if-absent; a reader that opened it keeps it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import numpy as np

from och_dist.errors import ConflictError, IntegrityError
from och_dist.store.objects import Objects

MAX_MANIFEST_BYTES = 256 << 20


def canonical(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal(body: dict[str, Any]) -> bytes:
    """JSON bytes of ``body`` with its own sha256 added."""
    return json.dumps({**body, "sha256": sha256(canonical(body))}, sort_keys=True, indent=1, allow_nan=False).encode()


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """The body of a sealed JSON text; :class:`IntegrityError` if a byte of its meaning changed."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise IntegrityError(f"{where} has {len(data)} bytes; no manifest is over {MAX_MANIFEST_BYTES}")
    try:
        body = json.loads(data)
        stated = body.pop("sha256")
        sound = stated == sha256(canonical(body))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise IntegrityError(f"{where} is not a sealed JSON object ({error}); restore it from a copy") from None
    if not sound:
        raise IntegrityError(f"{where} does not match its own sha256; restore it from a copy")
    return dict(body)


def pack_numbers(numbers: np.ndarray, dtype: str) -> str:
    """Numbers of a little-endian ``dtype`` as base64."""
    return base64.b64encode(np.ascontiguousarray(numbers, dtype=dtype).tobytes()).decode()


def unpack_numbers(text: str, dtype: str, count: int, where: str) -> np.ndarray:
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"{where} holds unreadable chunk digests ({error}); restore it from a copy") from None
    if len(numbers) != count:
        raise IntegrityError(f"{where} holds {len(numbers)} chunk digests, expected {count}; restore it from a copy")
    return numbers


def pack_digests(digests: np.ndarray) -> str:
    """uint32 checksums as base64, so that 100,000 chunks fit in half a megabyte of manifest."""
    return pack_numbers(digests, "<u4")


def unpack_digests(text: str, count: int, where: str) -> np.ndarray:
    return unpack_numbers(text, "<u4", count, where)


def version_key(number: int) -> str:
    return f"versions/{number:08d}.json"


def version_numbers(objects: Objects) -> list[int]:
    """Numbers of the versions that exist, ascending."""
    numbers = []
    for key, _, _ in objects.list("versions"):
        stem = key.removeprefix("versions/").removesuffix(".json")
        if stem.isascii() and stem.isdigit() and version_key(int(stem)) == key:
            numbers.append(int(stem))
    return sorted(numbers)


def read_document(objects: Objects, key: str) -> bytes | None:
    """A JSON object, unless it is too large to be one of ours; None if it is absent."""
    size = objects.size(key)
    if size is not None and size > MAX_MANIFEST_BYTES:
        raise IntegrityError(f"{objects.url}/{key} has {size} bytes; no manifest is over {MAX_MANIFEST_BYTES}")
    return None if size is None else objects.read(key)


def read_version(objects: Objects, number: int) -> dict[str, Any]:
    """The manifest of one version; it must state that number itself."""
    data = read_document(objects, version_key(number))
    if data is None:
        present = version_numbers(objects)
        raise IntegrityError(
            f"version {number} of {objects.url} is not there (it may have been collected); "
            f"present: {', '.join(map(str, present)) or 'none'}"
        )
    body = unseal(data, f"{objects.url}/{version_key(number)}")
    if body.get("version") != number:
        raise IntegrityError(
            f"{objects.url}/{version_key(number)} is the manifest of version {body.get('version')!r}; "
            "restore it from a copy"
        )
    return body


def read_latest(objects: Objects) -> dict[str, Any] | None:
    """The newest manifest body, or None when nothing was ever published."""
    numbers = version_numbers(objects)
    return read_version(objects, numbers[-1]) if numbers else None


def commit_version(objects: Objects, body: dict[str, Any]) -> bool:
    """Publish ``body`` as its version number; False when another writer took that number.

    A number that was taken and collected since is not taken again: what is published there would never be seen.
    """
    number, present = body["version"], version_numbers(objects)
    if number not in present and number < max(present, default=0):
        return False
    try:
        objects.put(version_key(number), seal(body))
    except ConflictError:
        return False
    return True
