"""Unpacking of chosen members of a tar or tar.gz archive, in one pass, all of them or none."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from och_dist.errors import BadInputError, UsageError
from och_dist.sources.base import file_fingerprint
from och_dist.store import write_text

BLOCK_BYTES = 1 << 20
GZIP_MAGIC = b"\x1f\x8b"
LISTED_NAMES = 20


def beside(path: Path, ending: str) -> Path:
    """The file of the same name with ``ending`` appended."""
    return path.with_name(path.name + ending)


def extract(archive: Path, members: Sequence[str], folder: Path) -> list[Path]:
    """Write members of a .tar or .tar.gz as ``folder/<basename>``; returns the paths in the order given.

    The archive is read to its end, so that the checksum of gzip covers what was written before anything gets
    its final name. A member that an earlier call took from the same archive is left as it is: beside it
    ``<basename>.origin.json`` says where it came from.
    """
    archive, folder = Path(archive), Path(folder)
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
                _publish(path, identity, name)
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


def _marker(path: Path) -> Path:
    return beside(path, ".origin.json")


def _is_from(path: Path, identity: str, name: str) -> bool:
    """True when the file is there, whole, and its marker names this archive and member."""
    try:
        known = json.loads(_marker(path).read_text())
        return known == {"archive": identity, "member": name, "bytes": path.stat().st_size}
    except (OSError, ValueError):
        return False


def _publish(path: Path, identity: str, name: str) -> None:
    """Give a written part its final name, then say where it came from."""
    part = beside(path, ".part")
    size = part.stat().st_size
    # An old marker must not vouch for new bytes if this process ends between the two steps.
    _marker(path).unlink(missing_ok=True)
    os.replace(part, path)
    write_text(_marker(path), json.dumps({"archive": identity, "member": name, "bytes": size}))


class _Tail:
    """A stream that remembers its last read: an archive ends with a block of zeros, a cut one with anything.

    tarfile takes a missing or garbled header for the end of the archive and says nothing.
    """

    def __init__(self, stream: IO[bytes]) -> None:
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


@contextmanager
def _readable(archive: Path) -> Iterator[tuple[_Tail, tarfile.TarFile]]:
    """The uncompressed stream and the tar reader on it; a cut or damaged archive becomes BadInputError."""
    try:
        with open(archive, "rb") as raw:
            magic = raw.read(len(GZIP_MAGIC))
            raw.seek(0)
            stream: Any = gzip.GzipFile(fileobj=raw) if magic == GZIP_MAGIC else raw
            tail: Any = _Tail(stream)
            with tarfile.open(fileobj=tail, mode="r:") as tar:
                yield tail, tar
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInputError(
            f"{archive}: cut short or damaged ({error}); expected a whole tar or tar.gz; fetch it again"
        ) from error


def _unpack(archive: Path, wanted: dict[str, Path]) -> None:
    """Write the wanted members to their ``.part`` names; each must be there and a regular file."""
    written, held = set(), []
    with _readable(archive) as (tail, tar):
        for info in tar:
            name = str(PurePosixPath(info.name))
            held.append(name)
            if name in wanted and name not in written:
                if not info.isreg():
                    raise BadInputError(f"{archive}: {name} is not a regular file; expected one; check the archive")
                _copy(tar, info, beside(wanted[name], ".part"))
                written.add(name)
        tail.check_end()
    absent = [name for name in wanted if name not in written]
    if absent:
        listed = ", ".join(held[:LISTED_NAMES]) + (", ..." if len(held) > LISTED_NAMES else "")
        raise BadInputError(f"{archive}: no member {', '.join(absent)}; it holds: {listed or 'nothing'}; name these")


def _copy(tar: tarfile.TarFile, info: tarfile.TarInfo, path: Path) -> None:
    source = tar.extractfile(info)
    if source is None:
        raise tarfile.ReadError(f"{info.name} has no data")
    with open(path, "wb") as out:
        shutil.copyfileobj(source, out, BLOCK_BYTES)
