"""A download that survives dropped connections and kills, and the unpacking of what it brought.

While a file is under way ``<destination>.part`` holds its bytes and ``<destination>.part.json`` what the
server said about it; the final name appears at the end, whole, beside ``<destination>.sha256``.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import logging
import os
import re
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from och_dist.errors import BadInputError, ConflictError, IncompleteError, UsageError
from och_dist.sources.archive import beside, extract
from och_dist.sources.ftp import FtpFile, by_proxy
from och_dist.store import write_text

__all__ = ["Fetched", "extract", "fetch"]

TIMEOUT_SECONDS = 60.0
FIRST_WAIT_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 5.0
BLOCK_BYTES = 1 << 20
# An attempt that brought this much more than all before it was not in vain: the count starts again.
WORTH_BYTES = 1 << 20
PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)

logger = logging.getLogger(__name__)
Progress = Callable[[int, "int | None"], None]


@dataclass(frozen=True)
class Fetched:
    """A whole file on this machine."""

    path: Path
    bytes: int
    sha256: str


@dataclass(frozen=True)
class _Remote:
    """What the server said about the file; ``total`` is None while its size is unknown.

    Over FTP ``last_modified`` is the answer to MDTM.
    """

    url: str
    etag: str | None = None
    last_modified: str | None = None
    total: int | None = None

    def validator(self) -> str | None:
        """The value for If-Range; a weak ETag does not promise equal bytes."""
        if self.etag and not self.etag.startswith("W/"):
            return self.etag
        return self.last_modified

    def same_file(self, other: _Remote) -> bool:
        """False when anything both know of differs."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("etag", "last_modified", "total"))
        return all(mine is None or theirs is None or mine == theirs for mine, theirs in pairs)


class _DroppedError(Exception):
    """The connection gave less than the file; another attempt may give the rest."""


def fetch(
    url_or_path: str,
    destination: Path,
    *,
    expected_bytes: int | None = None,
    attempts: int = 20,
    progress: Progress | None = None,
) -> Fetched:
    """Bring a file to ``destination`` over HTTP or FTP, resuming earlier calls; a local file stays in place.

    ``attempts`` bounds the tries in a row that bring less than 1 MiB of new bytes. ``progress`` gets (bytes
    so far, total or None).
    """
    try:
        scheme = urllib.parse.urlsplit(url_or_path).scheme.lower()
    except ValueError as error:
        raise UsageError(f"{url_or_path}: {error}; expected a valid address; correct it") from error
    if scheme == "file" or "://" not in url_or_path:
        return _local(url_or_path, expected_bytes, is_url=scheme == "file")
    if scheme not in ("http", "https", "ftp"):
        raise UsageError(
            f"{url_or_path}: scheme {scheme!r}; expected http, https, ftp, file or a path; download it by "
            "other means and give its path"
        )
    if attempts < 1:
        raise UsageError(f"attempts={attempts}; use at least 1")
    destination = Path(destination)
    # An HTTP proxy for FTP addresses speaks HTTP to us.
    kind = _FtpDownload if scheme == "ftp" and not by_proxy(url_or_path) else _Download
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with _locked_part(destination) as part:
            done = _already_there(destination, expected_bytes)
            if done is None:
                job = kind(url_or_path, destination, part, expected_bytes, progress)
                job.run(attempts)
                done = job.finish()
        return done
    except OSError as error:
        raise IncompleteError(
            f"{destination}: cannot be written ({error}); free space or change the folder, run again"
        ) from error


def _local(url_or_path: str, expected_bytes: int | None, *, is_url: bool) -> Fetched:
    """A file that is already on this machine, hashed where it lies."""
    path = Path(urllib.request.url2pathname(urllib.parse.urlsplit(url_or_path).path) if is_url else url_or_path)
    if not path.is_file():
        raise BadInputError(f"{path}: no such file; expected a file on this machine; check the path")
    try:
        return _hashed(path, expected_bytes)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error


def _hashed(path: Path, expected_bytes: int | None) -> Fetched:
    size = path.stat().st_size
    if expected_bytes is not None and size != expected_bytes:
        raise BadInputError(f"{path}: {size} bytes; expected {expected_bytes}; remove it and fetch it again")
    with open(path, "rb") as stream:
        return Fetched(path, size, hashlib.file_digest(stream, "sha256").hexdigest())


def _already_there(destination: Path, expected_bytes: int | None) -> Fetched | None:
    """The finished file of an earlier call, checked against its recorded sha256; None when there is none."""
    if not destination.exists():
        return None
    record = beside(destination, ".sha256")
    if not record.exists():
        if expected_bytes is None or destination.stat().st_size != expected_bytes:
            raise BadInputError(
                f"{destination}: exists without {record.name}; expected a file of an earlier fetch; move it "
                "away, or give its path instead of the URL"
            )
        found = _hashed(destination, expected_bytes)
        write_text(record, f"{found.sha256}  {destination.name}\n")
        return found
    found, recorded = _hashed(destination, expected_bytes), record.read_text().split()[:1]
    if recorded != [found.sha256]:
        raise BadInputError(
            f"{destination}: sha256 {found.sha256}; {record.name} says {' '.join(recorded) or 'nothing'}; "
            "remove both and fetch again"
        )
    return found


@contextmanager
def _locked_part(destination: Path) -> Iterator[BinaryIO]:
    """``<destination>.part`` open for appending, by this process only: two writers would interleave."""
    name = beside(destination, ".part")
    with open(name, "ab") as part:
        try:
            fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConflictError(f"{name}: another process is fetching it; wait for it, then run again") from error
        try:
            yield part
        finally:
            if part.tell() == 0:
                name.unlink(missing_ok=True)


def _opener() -> urllib.request.OpenerDirector:
    """An opener for http and https only: no redirect may lead to a local file or another protocol."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


class _Download:
    """One file under way: the part, and what is known of the remote file it is a part of."""

    def __init__(
        self,
        url: str,
        destination: Path,
        part: BinaryIO,
        expected_bytes: int | None,
        progress: Progress | None,
    ) -> None:
        self.url, self.destination, self.part = url, destination, part
        self.expected_bytes, self.progress = expected_bytes, progress
        self.note = beside(destination, ".part.json")
        self.remote = self._remembered()

    def _remembered(self) -> _Remote:
        """The note of an earlier call; an empty one when there is none, or it is about another URL."""
        try:
            known = _Remote(**json.loads(self.note.read_text()))
        except (OSError, ValueError, TypeError):
            return _Remote(self.url)
        return known if known.url == self.url else _Remote(self.url)

    def run(self, attempts: int) -> None:
        """Attempt until the part is whole; IncompleteError when ``attempts`` in a row brought nothing new."""
        failed, best = 0, 0
        while not self._whole():
            try:
                self._attempt()
            except _DroppedError as error:
                size = self.part.tell()
                failed = 1 if size >= best + WORTH_BYTES else failed + 1
                best = max(best, size)
                logger.warning("%s stopped at %d bytes: %s (attempt %d)", self.url, size, error, failed)
                if failed >= attempts:
                    raise IncompleteError(
                        f"{self.url}: {size} of {self.remote.total or 'unknown'} bytes after {attempts} "
                        f"attempts ({error}); what came is kept, run again to resume"
                    ) from error
                time.sleep(min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** (failed - 1)))

    def _whole(self) -> bool:
        """True when the part has all bytes of a file that was seen to be the remembered one."""
        return self.part.tell() > 0 and self.part.tell() == self.remote.total

    def _attempt(self) -> None:
        """One request; appends what it brings."""
        offset = self.part.tell()
        validator = self.remote.validator()
        if offset and validator is None:
            offset = self._start_over()
        request = urllib.request.Request(self.url, headers={"User-Agent": "och-dist"})
        if offset and validator is not None:
            request.add_header("Range", f"bytes={offset}-")
            request.add_header("If-Range", validator)
        with self._open(request) as response:
            self._accept(response, offset)
            self._receive(response, offset)

    def _start_over(self) -> int:
        self.part.truncate(0)
        self.part.seek(0)
        return 0

    def _open(self, request: urllib.request.Request) -> Any:
        try:
            return _opener().open(request, timeout=TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 416:
                    # The part is longer than the file: it belongs to another one.
                    self._start_over()
                    raise _DroppedError("range not satisfiable") from error
                if error.code in PASSING_STATUS:
                    raise _DroppedError(f"HTTP {error.code} {error.reason}") from error
                raise BadInputError(
                    f"{self.url}: HTTP {error.code} {error.reason}; expected the file; check the address"
                ) from error
        except http.client.InvalidURL as error:
            raise UsageError(f"{self.url}: {error}; expected a valid address; correct it") from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
                raise BadInputError(f"{self.url}: {error}; expected a valid certificate; check it") from error
            raise _DroppedError(str(error) or type(error).__name__) from error

    def _accept(self, response: Any, offset: int) -> None:
        """Learn from the head of the answer what follows, and make the part fit it."""
        partial = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range") or "")
        if response.status == 206 and partial:
            total = None if partial[2] == "*" else int(partial[2])
            answer = self._described(response, total)
            if int(partial[1]) == offset and answer.same_file(self.remote):
                self._check_size(total)
                self.remote = replace(self.remote, total=total or self.remote.total)
                return
        elif response.status == 200:
            length = response.headers.get("Content-Length")
            answer = self._described(response, int(length) if length is not None else None)
            self._check_size(answer.total)
            if answer.total is None and self.expected_bytes is None and not response.chunked:
                raise BadInputError(f"{self.url}: the server gives no size; pass expected_bytes to check it")
            self._begin(answer)
            return
        # An answer that does not continue the part: forget both, the next attempt asks for all of it.
        self._start_over()
        self.remote = _Remote(self.url)
        raise _DroppedError(f"HTTP {response.status} does not continue the file at byte {offset}")

    def _begin(self, remote: _Remote) -> None:
        """Empty the part and note which file it is going to hold."""
        self._start_over()
        self.remote = remote
        write_text(self.note, json.dumps(asdict(remote)))

    def _described(self, response: Any, total: int | None) -> _Remote:
        return _Remote(self.url, response.headers.get("ETag"), response.headers.get("Last-Modified"), total)

    def _check_size(self, total: int | None) -> None:
        if total is not None and self.expected_bytes is not None and total != self.expected_bytes:
            raise BadInputError(
                f"{self.url}: {total} bytes; expected {self.expected_bytes}; the remote file is another one, "
                "check the address or correct expected_bytes"
            )

    def _receive(self, response: Any, offset: int) -> None:
        total = self.remote.total if self.remote.total is not None else self.expected_bytes
        while block := self._next_block(response):
            self.part.write(block)
            # An open part is what a killed process leaves: it must hold all that was received.
            self.part.flush()
            size = self.part.tell()
            if total is not None and size > total:
                self._start_over()
                if offset:
                    raise _DroppedError(f"what came does not continue the file at byte {offset}")
                raise BadInputError(f"{self.url}: more than {total} bytes; expected that many; check the address")
            if self.progress is not None:
                self.progress(size, total)
        if total is not None and self.part.tell() < total:
            raise _DroppedError(f"connection closed {total - self.part.tell()} bytes early")
        if self.part.tell() == 0:
            raise BadInputError(f"{self.url}: 0 bytes; expected a file with content; check the address")
        self.remote = replace(self.remote, total=self.part.tell())

    @staticmethod
    def _next_block(response: Any) -> bytes:
        try:
            return response.read1(BLOCK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _DroppedError(str(error) or type(error).__name__) from error

    def finish(self) -> Fetched:
        """Give the whole part its final name."""
        os.fsync(self.part.fileno())
        part = Path(self.part.name)
        found = _hashed(part, self.expected_bytes)
        # The record comes first: a destination without one is not ours.
        write_text(beside(self.destination, ".sha256"), f"{found.sha256}  {self.destination.name}\n")
        os.replace(part, self.destination)
        self.note.unlink(missing_ok=True)
        return Fetched(self.destination, found.bytes, found.sha256)


class _FtpDownload(_Download):
    """The same over FTP, where a part is continued when size and time of the file are those noted."""

    def _attempt(self) -> None:
        with _network_errors():
            remote = FtpFile(self.url, timeout=TIMEOUT_SECONDS)
        with remote:
            offset = self._agree(remote)
            with _network_errors():
                remote.start(offset)
            self._receive(remote, offset)

    def _agree(self, remote: FtpFile) -> int:
        """Where to go on: at the end of the part, or at 0 when it is not known to belong to this file."""
        found = _Remote(self.url, last_modified=remote.modified, total=remote.total)
        self._check_size(found.total)
        offset = self.part.tell()
        known = None not in (found.validator(), self.remote.validator()) and found.same_file(self.remote)
        if offset and known and (found.total is None or offset < found.total):
            with _network_errors():
                if remote.can_restart(offset):
                    return offset
        self._begin(found)
        return 0


@contextmanager
def _network_errors() -> Iterator[None]:
    """Trouble on the way to the server: another attempt may have none."""
    try:
        yield
    except OSError as error:
        raise _DroppedError(str(error) or type(error).__name__) from error
