"""Keys of objects, and the paths that they stand for in a directory: neither leads out of its store."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from och_dist.errors import BadInputError, IntegrityError

Data = bytes | tuple[bytes, ...]
"""What an object is made of: its bytes, or parts that need not be copied together."""


def check_key(key: str) -> str:
    """Return ``key`` if it stays inside the store: relative, normal, printable."""
    parts = PurePosixPath(key).parts
    if not key or key.startswith("/") or "\\" in key or "\0" in key or ".." in parts or "/".join(parts) != key:
        raise BadInputError(f"key {key!r} leaves its store; use a plain relative key such as 'segments/ab/codes'")
    return key


def local_path(root: Path, key: str, *, itself: bool = True) -> Path:
    """The path of ``key`` below ``root``, unless a symbolic link on the way leads out of it.

    Such a link would let whoever can write to a store make others read, write or delete elsewhere. The last part of
    the path is looked at only if it counts ``itself``: to remove a link is no harm.
    """
    path = here = root / check_key(key)
    if not itself:
        here = path.parent
    while here != root:
        if here.is_symlink() and not Path(os.path.realpath(here)).is_relative_to(os.path.realpath(root)):
            raise IntegrityError(
                f"{here} is a link that leads out of {root}; nothing is read, written or removed through it: "
                "put what it leads to in its place"
            )
        here = here.parent
    return path


def parts_of(data: Data) -> tuple[bytes, ...]:
    """The buffers of an object, one after the other."""
    return data if isinstance(data, tuple) else (data,)
