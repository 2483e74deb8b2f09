"""Sealed JSON, and numbered manifests: the only thing that makes data visible.

A version of a corpus or an index is ``versions/00000007.json``. Committing it is one put-if-absent; a reader that
opened it keeps it. Whoever wants to change what is there gives :func:`commit` a function from the newest version to
the next one.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np

from och_dist.errors import BadInputError, ConflictError, IncompleteError, IntegrityError
from och_dist.store.arrays import ArraySpec
from och_dist.store.objects import Objects, open_objects

MAX_MANIFEST_BYTES = 256 << 20
FORMATS = (1, 2)
RACES = 50


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


def pack_numbers(numbers: np.ndarray, dtype: str = "<u4") -> str:
    """Numbers as base64; crc32c are ``<u4``, so that 100,000 chunks fit in half a megabyte of manifest."""
    return base64.b64encode(np.ascontiguousarray(numbers, dtype=dtype).tobytes()).decode()


def unpack_numbers(text: str, count: int, where: str, dtype: str = "<u4") -> np.ndarray:
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"{where} holds unreadable chunk digests ({error}); restore it from a copy") from None
    if len(numbers) != count:
        raise IntegrityError(f"{where} holds {len(numbers)} chunk digests, expected {count}; restore it from a copy")
    return numbers


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


def read_sealed(objects: Objects, key: str) -> dict[str, Any] | None:
    """The body of a sealed object; None if it is absent."""
    data = read_document(objects, key)
    return None if data is None else unseal(data, f"{objects.url}/{key}")


def read_version(objects: Objects, number: int) -> dict[str, Any]:
    """The manifest of one version; it must state that number itself."""
    body = read_sealed(objects, version_key(number))
    if body is None:
        present = version_numbers(objects)
        raise IntegrityError(
            f"version {number} of {objects.url} is not there (it may have been collected); "
            f"present: {', '.join(map(str, present)) or 'none'}"
        )
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


StoredArray = tuple[str, ArraySpec, np.ndarray]
"""Folder, layout, and the checksum of every chunk of an array."""


class Version:
    """One version of a corpus or an index: rows in segments that adjoin, listed by a manifest.

    It stays readable and unchanged while later ones are published.
    """

    kind: ClassVar[str]
    url: str
    version: int
    segments: tuple[Any, ...]
    fingerprint: Any  # sha256 of what decides the content

    @property
    def objects(self) -> Objects:
        return open_objects(self.url)

    @property
    def rows(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    @property
    def folders(self) -> set[str]:
        """Where the segments lie."""
        return {segment.folder for segment in self.segments}

    @cached_property
    def ref(self) -> VersionRef[Self]:
        """What a task carries to a worker in place of all this."""
        return VersionRef(type(self), self.url, self.version, self.fingerprint if self.version else "")

    def arrays(self) -> Iterator[StoredArray]:
        """The arrays that hold its rows."""
        raise NotImplementedError

    @classmethod
    def find(cls, url: str) -> Self | None:
        """The newest published version at ``url``, None when there is none yet."""
        objects = open_objects(url)
        body = read_latest(objects)
        return None if body is None else cls.from_json(objects.url, body)

    @classmethod
    def open(cls, url: str, version: int | None = None) -> Self:
        """A published version, the newest unless one is named."""
        raise NotImplementedError

    @classmethod
    def layout(cls, url: str, version: int) -> bytes | None:
        """What tells an array that is used as it is from another at its place; nothing else needs it."""
        return None

    def to_json(self) -> dict[str, Any]:
        """The manifest."""
        return {
            "kind": self.kind,
            "version": self.version,
            "parent": self.version - 1,
            "rows": self.rows,
            "segments": [segment.to_json() for segment in self.segments],
        }

    @classmethod
    def from_json(cls, url: str, body: dict[str, Any]) -> Self:
        """What a manifest lists; not that of something else, nor of a format that came after this package."""
        where = f"version {body.get('version')} of {url}"
        if body.get("kind") != cls.kind or body.get("format") not in FORMATS:
            raise BadInputError(
                f"{where} is of kind {body.get('kind')!r}, format {body.get('format')!r}; "
                f"{'an' if cls.kind == 'index' else 'a'} {cls.kind} of format {' or '.join(map(str, FORMATS))} is "
                "needed here"
            )
        try:
            found, rows = cls._parse(url, body, where), int(body["rows"])
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{where} is incomplete ({error}); restore it from a copy") from None
        ranges = [(segment.start, segment.stop) for segment in found.segments]
        ends = [0, *(stop for _, stop in ranges)]
        if not ranges or [start for start, _ in ranges] != ends[:-1] or ends[-1] != rows:
            raise IntegrityError(f"{where} does not add up: {rows} rows in segments {ranges}")
        return found

    @classmethod
    def _parse(cls, url: str, body: dict[str, Any], where: str) -> Self:
        """What only this kind lists, checked."""
        raise NotImplementedError


Current = TypeVar("Current", bound=Version | None)
Next = TypeVar("Next", bound=Version)
V = TypeVar("V", bound=Version)


def commit(objects: Objects, find: Callable[[str], Current], change: Callable[[Current], Next]) -> tuple[Current, Next]:
    """Publish what ``change`` makes of the newest version, which ``find`` opens: (version before, version after).

    Whoever loses the race begins again with the version that won. ``change`` returns what it was given when nothing
    is left to be done, and raises when its work does not fit to what is there any more. What it reads may be gone
    when somebody else published the same work: that counts only while no other version has come.
    """
    for _ in range(RACES):
        current = find(objects.url)
        try:
            following = change(current)
        except (IncompleteError, IntegrityError):
            if max(version_numbers(objects), default=0) == (0 if current is None else current.version):
                raise
            continue
        if following is current or commit_version(objects, following.to_json()):
            return current, following
    raise ConflictError(
        f"{objects.url} was published {RACES} times while this command tried to, and nothing of it was published; "
        "run the command again"
    )


@dataclass(frozen=True)
class VersionRef(Generic[V]):
    """A version, small enough to travel with every task: what it is of, its place, its number, and what its content is
    known by."""

    kind: type[V]
    url: str
    version: int
    fingerprint: str

    def open(self) -> V:
        found: V = open_remembered(self, self.kind.layout(self.url, self.version))
        return found


@lru_cache(maxsize=32)
def open_remembered(ref: VersionRef[V], layout: bytes | None) -> V:
    """The version that is meant, kept for later tasks: it is known by its content, and an array that is used as it is
    by its ``layout``.

    A worker outlives jobs, and a store may be removed and made anew at the same place meanwhile.
    """
    found = ref.kind.open(ref.url, ref.version)
    if found.ref != ref:
        raise IntegrityError(
            f"version {ref.version} of {ref.url} is not the one that this job was planned with: it was replaced "
            "meanwhile, or lies at another place on this machine; run the command again"
        )
    return found
