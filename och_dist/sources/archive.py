"""Unpacking of chosen members of a tar or tar.gz archive, in one pass, all of them or none."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from och_dist.errors import BadInputError, UsageError
from och_dist.sources.files import file_fingerprint
from och_dist.store import write_text

BLOCK_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"
LISTED_NAMES = 20
NOTE = ".origin.json"


def beside(path: Path, ending: str) -> Path:
    """The file of the same name with ``ending`` appended."""
    return path.with_name(path.name + ending)


def extract(archive: Path, members: Sequence[str], folder: Path) -> list[Path]:
    """Write members of a .tar or .tar.gz as ``folder/<basename>``; returns the paths in the order given.

    The archive is read to its end, so that the checksum of gzip covers what was written before anything gets
    its final name. A member that an earlier call took from the same archive is left as it is: beside it
    ``<basename>.origin.json`` says where it came from.
    """
    targets = _targets(members, folder)
    if not archive.is_file():
        raise BadInputError(f"{archive}: no such file; expected a tar or tar.gz archive; fetch it first")
    identity = file_fingerprint(archive)
    missing = {name: path for name, path in targets.items() if not _is_from(path, identity, name)}
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _unpack(archive, missing)
            for name, path in missing.items():
                beside(path, NOTE).unlink(missing_ok=True)  # an old one must not vouch for new bytes after a kill
                os.replace(beside(path, ".part"), path)
                write_text(beside(path, NOTE), _origin(identity, name, path))
        finally:
            for path in missing.values():
                beside(path, ".part").unlink(missing_ok=True)
    return list(targets.values())


def _targets(members: Sequence[str], folder: Path) -> dict[str, Path]:
    """Where each member goes; names that could leave the folder or meet in one file are refused."""
    targets: dict[str, Path] = {}
    for member in members:
        name = PurePosixPath(member)
        if name.is_absolute() or ".." in name.parts or not name.name:
            raise UsageError(f"member {member!r}; expected a relative path inside the archive without '..'")
        if folder / name.name in targets.values():
            raise UsageError(f"member {member!r}: {name.name} is written twice; extract into two folders")
        targets[str(name)] = folder / name.name
    return targets


def _is_from(path: Path, identity: str, name: str) -> bool:
    """True when the file is there, whole, and the note beside it names this archive and member."""
    try:
        return beside(path, NOTE).read_text() == _origin(identity, name, path)
    except (OSError, ValueError):
        return False


def _origin(identity: str, name: str, path: Path) -> str:
    """The note beside an unpacked file: where it came from."""
    return json.dumps({"archive": identity, "member": name, "bytes": path.stat().st_size})


class _WatchedStream:
    """A stream that remembers its last read: an archive ends with a block of zeros, a cut one with anything.

    tarfile takes a missing or garbled header for the end of the archive and says nothing.
    """

    def __init__(self, stream: Any) -> None:
        self.seek, self.tell, self._read = stream.seek, stream.tell, stream.read
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        self.last = self._read(size)
        return self.last

    def check_end(self) -> None:
        if len(self.last) != tarfile.BLOCKSIZE or any(self.last):
            raise tarfile.ReadError("no end of archive")
        while self._read(BLOCK_BYTES):
            pass


def _unpack(archive: Path, wanted: dict[str, Path]) -> None:
    """Write the wanted members to their ``.part`` names; each must be there and a regular file."""
    try:
        with open(archive, "rb") as raw:
            is_gzip = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            raw.seek(0)
            tail: Any = _WatchedStream(gzip.GzipFile(fileobj=raw) if is_gzip else raw)
            with tarfile.open(fileobj=tail, mode="r:") as tar:
                held = _copy(tar, wanted, archive)
            tail.check_end()
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInputError(
            f"{archive}: cut short or damaged ({error}); expected a whole tar or tar.gz; fetch it again"
        ) from error
    absent = [name for name in wanted if name not in held]
    if absent:
        listed = ", ".join(held[:LISTED_NAMES]) + (", ..." if len(held) > LISTED_NAMES else "")
        raise BadInputError(f"{archive}: no member {', '.join(absent)}; it holds: {listed or 'nothing'}; name these")


def _copy(tar: tarfile.TarFile, wanted: dict[str, Path], archive: Path) -> list[str]:
    """Write the wanted members, the first of each name; returns the names of all."""
    held: list[str] = []
    for info in tar:
        name = str(PurePosixPath(info.name))
        if name in wanted and name not in held:
            if not info.isreg():
                raise BadInputError(f"{archive}: {name} is not a regular file; expected one; check the archive")
            with open(beside(wanted[name], ".part"), "wb") as out:
                shutil.copyfileobj(cast(IO[bytes], tar.extractfile(info)), out, BLOCK_BYTES)
        held.append(name)
    return held
