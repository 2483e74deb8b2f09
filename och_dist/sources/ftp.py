"""One file on an anonymous FTP server: what it is now, and its bytes from any offset on."""

from __future__ import annotations

import contextlib
import ftplib
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from och_dist.errors import BadInputError, UsageError

# Some servers say "no free place" with the code of a refused login; only the words tell.
BUSY = re.compile(r"530.*(too many|maximum|limit|busy|later)", re.IGNORECASE | re.DOTALL)


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


class FtpFile:
    """A remote file and its control connection; every socket operation is limited by ``timeout`` seconds.

    ``total`` (bytes) and ``modified`` (UTC as MDTM writes it) are None when the server does not tell them.
    Passing trouble is an OSError, a lasting refusal BadInputError.
    """

    def __init__(self, url: str, *, timeout: float) -> None:
        self.url = url
        host, port, self._path = split_ftp_url(url)
        self._data: socket.socket | None = None
        self._ftp = ftplib.FTP(timeout=timeout, encoding="latin-1")
        try:
            with _our_errors(url):
                self._ftp.connect(host, port)
                self._ftp.login()
                self._ftp.voidcmd("TYPE I")
                size = self._ask("SIZE", r"213 +(\d+)")
                self.total = None if size is None else int(size)
                self.modified = self._ask("MDTM", r"213 +(\d{14}(?:\.\d+)?)")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> FtpFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave without a farewell: a server that is gone would make us wait for its answer."""
        with contextlib.suppress(OSError):
            if self._data is not None:
                self._data.close()
            self._ftp.close()

    def _ask(self, command: str, answer: str) -> str | None:
        """The value in the answer to a command about the file; None when the server does not have it."""
        try:
            found = re.fullmatch(answer, self._ftp.sendcmd(f"{command} {self._path}").strip())
        except ftplib.error_perm:
            return None
        return found[1] if found else None

    def can_restart(self, offset: int) -> bool:
        """True when the server agrees to begin the next transfer at byte ``offset``."""
        with _our_errors(self.url):
            try:
                return self._ftp.sendcmd(f"REST {offset}").startswith("3")
            except ftplib.error_perm:
                return False

    def start(self, offset: int) -> None:
        """Open the data connection, passive; ``read1`` then gives the bytes from ``offset`` on."""
        with _our_errors(self.url):
            self._data = self._ftp.transfercmd(f"RETR {self._path}", rest=offset or None)

    def read1(self, size: int) -> bytes:
        """Up to ``size`` of the next bytes, nothing at the end.

        The final answer is waited for only where nothing else tells whether the file is whole: on a long
        transfer the idle control connection may be dead by then.
        """
        if self._data is None:
            raise OSError("no transfer was started")
        block = self._data.recv(size)
        if not block and self.total is None:
            with _our_errors(self.url):
                self._ftp.voidresp()
        return block


@contextmanager
def _our_errors(url: str) -> Iterator[None]:
    """What ftplib raises as the two kinds that matter: OSError to try again, BadInputError to give up."""
    try:
        yield
    except ftplib.error_perm as error:
        if BUSY.match(str(error)):
            raise ConnectionError(f"FTP {error}") from error
        raise BadInputError(f"{url}: FTP {error}; expected the file; check the address") from error
    except EOFError as error:
        raise ConnectionError("the server closed the control connection") from error
    except (ftplib.Error, ValueError) as error:
        # A ValueError is a garbled answer to EPSV.
        raise ConnectionError(f"FTP {error}") from error
