"""A small FTP server for tests that misbehaves on demand."""

from __future__ import annotations

import socket
import socketserver
from collections.abc import Callable

from tests.support.downloads import CONTENT

PATH = "local/some file.bin"


class FtpServer(socketserver.ThreadingTCPServer):
    """Serves ``content`` as PATH; attributes say how it misbehaves; ``transfers`` keeps where each RETR began."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Session)
        self.content = CONTENT
        self.modified = "20100401093000"
        self.greeting = b"220 Bienvenue \xe0 tous\r\n"  # not UTF-8
        self.unknown: set[str] = set()  # commands that are answered with 502
        self.replies: dict[str, list[str]] = {}  # refusals given before anything else, by command
        self.rest_counts = True
        self.drop_after: list[int] = []  # bytes of the next transfers after which the data connection is cut
        self.on_drop: list[Callable[[], object]] = []  # called, one a drop
        self.silent_end = False
        self.transfers: list[int] = []
        self.commands: list[str] = []

    @property
    def url(self) -> str:
        return f"ftp://127.0.0.1:{self.server_address[1]}/local/some%20file.bin"


class Session(socketserver.StreamRequestHandler):
    server: FtpServer
    offset = 0
    passive: socket.socket | None = None

    def handle(self) -> None:
        self.connection.settimeout(30)
        self.wfile.write(self.server.greeting)
        while line := self.rfile.readline().decode("latin-1").strip():
            command, _, argument = line.partition(" ")
            self.server.commands.append(command)
            if waiting := self.server.replies.get(command):
                answer = waiting.pop(0)
                if not answer:
                    return
            elif command in self.server.unknown:
                answer = "502 command not implemented"
            else:
                answer = getattr(self, f"do_{command}")(argument)
            self.wfile.write(answer.encode() + b"\r\n")

    def finish(self) -> None:
        if self.passive is not None:
            self.passive.close()
        super().finish()

    def do_USER(self, name: str) -> str:
        return "331 password?" if name == "anonymous" else "530 who?"

    def do_PASS(self, word: str) -> str:
        return "230 welcome"

    def do_TYPE(self, kind: str) -> str:
        return "200 binary" if kind == "I" else "504 binary only"

    def do_SIZE(self, path: str) -> str:
        return f"213 {len(self.server.content)}" if path == PATH else f"550 {path}: no such file"

    def do_MDTM(self, path: str) -> str:
        return f"213 {self.server.modified}" if path == PATH else f"550 {path}: no such file"

    def do_REST(self, offset: str) -> str:
        self.offset = int(offset)
        return "350 restarting"

    def listen(self) -> int:
        if self.passive is not None:
            self.passive.close()
        self.passive = socket.create_server(("127.0.0.1", 0))
        self.passive.settimeout(30)
        return int(self.passive.getsockname()[1])

    def do_EPSV(self, argument: str) -> str:
        return f"229 Entering Extended Passive Mode (|||{self.listen()}|)"

    def do_PASV(self, argument: str) -> str:
        port = self.listen()
        return f"227 Entering Passive Mode (127,0,0,1,{port >> 8},{port & 255})"

    def do_RETR(self, path: str) -> str:
        server, offset, self.offset = self.server, self.offset, 0
        if path != PATH:
            return f"550 {path}: no such file"
        assert self.passive is not None
        server.transfers.append(offset)
        limit = server.drop_after.pop(0) if server.drop_after else None
        self.wfile.write(b"150 here it comes\r\n")
        with self.passive.accept()[0] as data:
            data.sendall(server.content[offset if server.rest_counts else 0 :][:limit])
            if limit is not None and server.on_drop:
                server.on_drop.pop(0)()
        if server.silent_end:
            self.rfile.readline()
        return "226 done" if limit is None else "426 connection closed, transfer aborted"
