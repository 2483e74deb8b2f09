"""A download over HTTP or anonymous FTP that survives dropped connections and kills.

While a file is under way ``<destination>.part`` holds its bytes and ``<destination>.part.json`` what the
server said about it; the final name appears at the end, whole, beside ``<destination>.sha256``.
Trouble that may pass is a :class:`DroppedError`, a lasting refusal a BadInputError.
"""

from __future__ import annotations

import contextlib
import fcntl
import ftplib
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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO

from och_dist.errors import BadInputError, ConflictError, IncompleteError, UsageError
from och_dist.sources.archive import beside
from och_dist.store import write_text

FIRST_WAIT_SECONDS = 0.25
LONGEST_WAIT_SECONDS = 5.0
# An attempt that brought this much more than all before it was not in vain: the count starts again.
WORTH_BYTES = 1 << 20
TIMEOUT_SECONDS = 60.0
BLOCK_BYTES = 1 << 20
PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
# Some servers say "no free place" with the code of a refused login; only the words tell.
BUSY = re.compile(r"530.*(too many|maximum|limit|busy|later)", re.IGNORECASE | re.DOTALL)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fetched:
    """A whole file on this machine."""

    path: Path
    bytes: int
    sha256: str


def fetch(
    url_or_path: str,
    destination: Path,
    *,
    expected_bytes: int | None = None,
    attempts: int = 20,
    progress: Callable[[int], None] = lambda size: None,
) -> Fetched:
    """Bring a file to ``destination`` over HTTP or FTP, resuming earlier calls; a local file stays in place.

    ``attempts`` bounds the tries in a row that bring less than 1 MiB of new bytes. ``progress`` gets the bytes so far.
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
    destination = Path(destination)
    # An HTTP proxy for FTP addresses speaks HTTP to us.
    ask = ask_ftp if scheme == "ftp" and not by_proxy(url_or_path) else ask_http
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with _locked_part(destination) as part:
            if destination.exists():
                return _fetched_before(destination, expected_bytes)
            note = beside(destination, ".part.json")
            _Download(url_or_path, part, note, expected_bytes, progress).run(ask, attempts)
            return _finish(part, destination, expected_bytes)
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


def _record(destination: Path, found: Fetched) -> None:
    write_text(beside(destination, ".sha256"), f"{found.sha256}  {destination.name}\n")


def _fetched_before(destination: Path, expected_bytes: int | None) -> Fetched:
    """The finished file of an earlier call, checked against its recorded sha256."""
    record = beside(destination, ".sha256")
    if not record.exists():
        if expected_bytes is None or destination.stat().st_size != expected_bytes:
            raise BadInputError(
                f"{destination}: exists without {record.name}; expected a file of an earlier fetch; move it "
                "away, or give its path instead of the URL"
            )
        _record(destination, _hashed(destination, expected_bytes))
    found, recorded = _hashed(destination, expected_bytes), record.read_text().split()[:1]
    if recorded != [found.sha256]:
        raise BadInputError(
            f"{destination}: sha256 {found.sha256}; {record.name} says {' '.join(recorded) or 'nothing'}; "
            "remove both and fetch again"
        )
    return found


def _finish(part: BinaryIO, destination: Path, expected_bytes: int | None) -> Fetched:
    """Give the whole part its final name."""
    os.fsync(part.fileno())
    found = replace(_hashed(Path(part.name), expected_bytes), path=destination)
    _record(destination, found)  # before: a destination without a record is not ours
    os.replace(part.name, destination)
    beside(destination, ".part.json").unlink(missing_ok=True)
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


@dataclass
class _Download:
    """One file under way: the part, and what is known, and noted, of the remote file it is a part of."""

    url: str
    part: BinaryIO
    note: Path
    expected_bytes: int | None
    progress: Callable[[int], None]

    def __post_init__(self) -> None:
        self.remote = RemoteFile(self.url)
        with contextlib.suppress(OSError, ValueError, TypeError):  # no note of an earlier call, or none of ours
            known = RemoteFile(**json.loads(self.note.read_text()))
            self.remote = known if known.url == self.url else self.remote

    def run(self, ask: Callable[[str, RemoteFile, int], AbstractContextManager[Answer]], attempts: int) -> None:
        """Attempt until the part is whole; IncompleteError when ``attempts`` in a row brought nothing new."""
        failed, best = 0, 0
        while self.part.tell() == 0 or self.part.tell() != self.remote.total:
            if self.remote.validator() is None:  # nothing tells which file the part belongs to
                self._start_over()
            try:
                with ask(self.url, self.remote, self.part.tell()) as answer:
                    self._accept(answer)
                    self._receive(answer)
            except DroppedError as error:
                if isinstance(error, OtherFileError):
                    self._start_over()
                    self.remote = RemoteFile(self.url)
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

    def _start_over(self) -> None:
        self.part.truncate(0)
        self.part.seek(0)

    def _accept(self, answer: Answer) -> None:
        """Make the part fit what follows, or refuse that."""
        total = answer.remote.total
        if total is not None and self.expected_bytes not in (None, total):
            raise BadInputError(
                f"{self.url}: {total} bytes; expected {self.expected_bytes}; the remote file is another one, "
                "check the address or correct expected_bytes"
            )
        if answer.offset:
            self.remote = replace(self.remote, total=total or self.remote.total)
            return
        if total is None and self.expected_bytes is None and not answer.end_is_told:
            raise BadInputError(f"{self.url}: the server gives no size; pass expected_bytes to check it")
        self._start_over()
        self.remote = answer.remote
        write_text(self.note, json.dumps(asdict(answer.remote)))

    def _receive(self, answer: Answer) -> None:
        total = self.remote.total if self.remote.total is not None else self.expected_bytes
        for block in answer.blocks:
            self.part.write(block)
            self.part.flush()  # what a killed process leaves must be all that was received
            size = self.part.tell()
            if total is not None and size > total:
                self._start_over()
                if answer.offset:
                    raise DroppedError(f"what came does not continue the file at byte {answer.offset}")
                raise BadInputError(f"{self.url}: more than {total} bytes; expected that many; check the address")
            self.progress(size)
        size = self.part.tell()
        if total is not None and size < total:
            raise DroppedError(f"connection closed {total - size} bytes early")
        if size == 0:
            raise BadInputError(f"{self.url}: 0 bytes; expected a file with content; check the address")
        self.remote = replace(self.remote, total=size)


# The server


@dataclass(frozen=True)
class RemoteFile:
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

    def same_file(self, other: RemoteFile) -> bool:
        """False when anything both know of differs."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("etag", "last_modified", "total"))
        return all(mine is None or theirs is None or mine == theirs for mine, theirs in pairs)


@dataclass(frozen=True)
class Answer:
    """The file as it is now, and its bytes from ``offset`` on; the transfer begins with the first block.

    ``end_is_told`` when a whole transfer can be told from a cut one without knowing the size.
    """

    remote: RemoteFile
    offset: int
    blocks: Iterator[bytes]
    end_is_told: bool


class DroppedError(Exception):
    """The connection gave less than the file; another attempt may give the rest."""


class OtherFileError(DroppedError):
    """What is here does not belong to the file that the server has now; another attempt may give all of that."""


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """What the libraries raise as the two kinds that matter: try again, or give up."""
    try:
        yield
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # what is here is longer than the file
                raise OtherFileError("range not satisfiable") from error
            if error.code in PASSING_STATUS:
                raise DroppedError(f"HTTP {error.code} {error.reason}") from error
            raise BadInputError(
                f"{url}: HTTP {error.code} {error.reason}; expected the file; check the address"
            ) from error
    except http.client.InvalidURL as error:
        raise UsageError(f"{url}: {error}; expected a valid address; correct it") from error
    except ftplib.error_perm as error:
        if BUSY.match(str(error)):
            raise DroppedError(f"FTP {error}") from error
        raise BadInputError(f"{url}: FTP {error}; expected the file; check the address") from error
    except (OSError, EOFError, ValueError, http.client.HTTPException, ftplib.Error) as error:
        # EOFError: the server closed the control connection; ValueError: a garbled answer to EPSV.
        if isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
            raise BadInputError(f"{url}: {error}; expected a valid certificate; check it") from error
        raise DroppedError(str(error) or type(error).__name__) from error


@contextmanager
def ask_http(url: str, known: RemoteFile, offset: int) -> Iterator[Answer]:
    """Ask for the bytes from ``offset`` on of the file that is ``known``; the answer may begin at 0 instead.

    A redirect leads to no local file: urllib follows it to HTTP and FTP only.
    """
    request = urllib.request.Request(url, headers={"User-Agent": "och-dist"})
    validator = known.validator()
    if offset and validator is not None:
        request.add_header("Range", f"bytes={offset}-")
        request.add_header("If-Range", validator)
    with _errors(url):
        response = urllib.request.build_opener().open(request, timeout=TIMEOUT_SECONDS)

    def blocks() -> Iterator[bytes]:
        with _errors(url):
            while block := response.read1(BLOCK_BYTES):
                yield block

    with response:
        headers, total = response.headers, response.headers.get("Content-Length")
        if response.status != 200:
            partial = re.fullmatch(rf"bytes {offset}-\d+/(\d+|\*)", headers.get("Content-Range") or "")
            total = partial[1].strip("*") if partial else None
        remote = RemoteFile(url, headers.get("ETag"), headers.get("Last-Modified"), int(total) if total else None)
        if response.status == 200:
            yield Answer(remote, 0, blocks(), bool(response.chunked))
        elif response.status == 206 and partial and remote.same_file(known):
            yield Answer(remote, offset, blocks(), end_is_told=True)
        else:
            raise OtherFileError(f"HTTP {response.status} does not continue the file at byte {offset}")


@contextmanager
def ask_ftp(url: str, known: RemoteFile, offset: int) -> Iterator[Answer]:
    """The same over FTP, where a file is the ``known`` one when its time is told, and it and the size are equal."""
    host, port, path = split_ftp_url(url)
    # Not "with ftp": that says QUIT, and waits for the answer of a server that may be gone.
    with contextlib.closing(ftplib.FTP(timeout=TIMEOUT_SECONDS, encoding="latin-1")) as ftp:
        with _errors(url):
            ftp.connect(host, port)
            ftp.login()
            ftp.voidcmd("TYPE I")
            size = _ask_ftp_about(ftp, f"SIZE {path}", r"213 +(\d+)")
            modified = _ask_ftp_about(ftp, f"MDTM {path}", r"213 +(\d{14}(?:\.\d+)?)")
            remote = RemoteFile(url, last_modified=modified, total=None if size is None else int(size))
            continues = None not in (modified, known.validator()) and remote.same_file(known)
            fits = continues and (remote.total is None or offset < remote.total)
            if not (offset and fits and _ask_ftp_about(ftp, f"REST {offset}", r"(3).*")):
                offset = 0

        def blocks() -> Iterator[bytes]:
            with _errors(url), ftp.transfercmd(f"RETR {path}", rest=offset or None) as data:
                while block := data.recv(BLOCK_BYTES):
                    yield block
                # The final answer is waited for only where nothing else tells whether the file is whole: on a long
                # transfer the idle control connection may be dead by then.
                if remote.total is None:
                    ftp.voidresp()

        yield Answer(remote, offset, blocks(), end_is_told=True)


def _ask_ftp_about(ftp: ftplib.FTP, command: str, answer: str) -> str | None:
    """The value in the answer to a command about the file; None when the server does not have it."""
    try:
        found = re.fullmatch(answer, ftp.sendcmd(command).strip(), re.DOTALL)
    except ftplib.error_perm:
        return None
    return found[1] if found else None


def split_ftp_url(url: str) -> tuple[str, int, str]:
    """(host, port, path) of an ftp URL; the path is relative to where the server puts a guest."""
    parts = urllib.parse.urlsplit(url)
    if parts.username is not None:
        # Addresses are logged and noted beside the part: a password has no place in them.
        raise UsageError(
            f"ftp://...@{parts.hostname}: a user in the address; expected anonymous FTP; download it by other "
            "means and give its path"
        )
    try:
        host, port = parts.hostname, parts.port or ftplib.FTP_PORT
    except ValueError as error:
        raise UsageError(f"{url}: {error}; expected a valid address; correct it") from error
    # Latin-1 keeps every byte as one character, here and on the control connection, whatever the server uses.
    path = urllib.parse.unquote_to_bytes(parts.path[1:]).decode("latin-1")
    if not host or not path or path.endswith("/") or re.search(r"[\r\n\0]", path):
        raise UsageError(f"{url}: no host or no file name; expected ftp://host/path/file; correct it")
    return host, port, path


def by_proxy(url: str) -> bool:
    """True when the environment (ftp_proxy, no_proxy) sends this FTP address to an HTTP proxy."""
    host = split_ftp_url(url)[0]
    return "ftp" in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)
