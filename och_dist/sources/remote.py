"""A file on a server, over HTTP or anonymous FTP: what it is now, and its bytes from any offset on.

Trouble that may pass is a :class:`DroppedError`, a lasting refusal a BadInputError.
"""

from __future__ import annotations

import contextlib
import ftplib
import http.client
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from och_dist.errors import BadInputError, UsageError

TIMEOUT_SECONDS = 60.0
BLOCK_BYTES = 1 << 20
PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
# Some servers say "no free place" with the code of a refused login; only the words tell.
BUSY = re.compile(r"530.*(too many|maximum|limit|busy|later)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Remote:
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

    def same_file(self, other: Remote) -> bool:
        """False when anything both know of differs."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("etag", "last_modified", "total"))
        return all(mine is None or theirs is None or mine == theirs for mine, theirs in pairs)


@dataclass(frozen=True)
class Answer:
    """The file as it is now, and its bytes from ``offset`` on; the transfer begins with the first block.

    ``end_is_told`` when a whole transfer can be told from a cut one without knowing the size.
    """

    remote: Remote
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
def ask_http(url: str, known: Remote, offset: int) -> Iterator[Answer]:
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
        remote = Remote(url, headers.get("ETag"), headers.get("Last-Modified"), int(total) if total else None)
        if response.status == 200:
            yield Answer(remote, 0, blocks(), bool(response.chunked))
        elif response.status == 206 and partial and remote.same_file(known):
            yield Answer(remote, offset, blocks(), end_is_told=True)
        else:
            raise OtherFileError(f"HTTP {response.status} does not continue the file at byte {offset}")


@contextmanager
def ask_ftp(url: str, known: Remote, offset: int) -> Iterator[Answer]:
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
            remote = Remote(url, last_modified=modified, total=None if size is None else int(size))
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
