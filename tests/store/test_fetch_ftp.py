"""Downloads from a real FTP server on this machine that misbehaves on purpose."""

from __future__ import annotations

import ftplib
import hashlib
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from och_dist.errors import BadInputError, IncompleteError, UsageError
from och_dist.store import fetch as fetch_module
from och_dist.store.fetch import Fetched, fetch
from och_dist.store.fetch_ftp import split_ftp_url

CONTENT = np.random.default_rng(0).bytes(300_000)
OTHER = np.random.default_rng(1).bytes(300_000)
PATH = "local/some file.bin"


class Server(socketserver.ThreadingTCPServer):
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
    server: Server
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


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(fetch_module, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(fetch_module, "LONGEST_WAIT_SECONDS", 0.002)
    monkeypatch.setattr(fetch_module, "TIMEOUT_SECONDS", 10.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def goal(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "file.bin"


def assert_whole(found: Fetched, goal: Path, content: bytes = CONTENT) -> None:
    digest = hashlib.sha256(content).hexdigest()
    assert found == Fetched(goal, len(content), digest)
    assert goal.read_bytes() == content
    assert (goal.parent / "file.bin.sha256").read_text() == f"{digest}  file.bin\n"
    assert sorted(p.name for p in goal.parent.iterdir()) == ["file.bin", "file.bin.sha256"]


def test_a_plain_download_and_nothing_the_second_time(server: Server, goal: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    found = fetch(server.url, goal, expected_bytes=300_000, progress=lambda done, total: seen.append((done, total)))
    assert_whole(found, goal)
    assert seen[-1] == (300_000, 300_000)
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0]


def test_a_dropped_data_connection_is_continued_where_it_broke(server: Server, goal: Path) -> None:
    server.drop_after = [100_000, 50_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0, 100_000, 150_000]


def test_resume_in_a_later_call(server: Server, goal: Path) -> None:
    server.drop_after = [100_000, 0]
    with pytest.raises(IncompleteError, match=r"100000 of 300000 bytes after 2 attempts .*run again to resume"):
        fetch(server.url, goal, attempts=2)
    assert (goal.parent / "file.bin.part").stat().st_size == 100_000
    note = json.loads((goal.parent / "file.bin.part.json").read_text())
    assert note == {"url": server.url, "etag": None, "last_modified": server.modified, "total": 300_000}
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0, 100_000, 100_000]


@pytest.mark.parametrize(("modified", "size"), [("20200101000000", 300_000), ("20100401093000", 250_000)])
def test_a_file_that_changes_between_attempts_is_not_mixed(
    server: Server, goal: Path, modified: str, size: int
) -> None:
    def change() -> None:
        server.content, server.modified = OTHER[:size], modified

    server.drop_after, server.on_drop = [100_000], [change]
    assert_whole(fetch(server.url, goal), goal, OTHER[:size])
    assert server.transfers == [0, 0]


def test_a_server_without_rest_starts_over(server: Server, goal: Path) -> None:
    server.unknown = {"REST"}
    server.drop_after = [100_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0, 0]


def test_a_server_that_agrees_to_rest_and_forgets_it(server: Server, goal: Path) -> None:
    server.rest_counts = False
    server.drop_after = [100_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0, 100_000, 0]


def test_without_a_time_the_file_starts_over(server: Server, goal: Path) -> None:
    server.unknown = {"MDTM"}
    server.drop_after = [100_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0, 0]


def test_without_a_size_the_final_answer_tells_a_whole_file_from_a_cut_one(server: Server, goal: Path) -> None:
    server.unknown = {"SIZE"}
    server.drop_after = [100_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0, 100_000]


def test_with_a_size_the_final_answer_is_not_waited_for(
    server: Server, goal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "TIMEOUT_SECONDS", 5.0)
    server.silent_end = True
    assert_whole(fetch(server.url, goal, attempts=1), goal)
    assert server.transfers == [0]


def test_a_part_of_another_address_is_not_continued(server: Server, goal: Path) -> None:
    goal.parent.mkdir()
    (goal.parent / "file.bin.part").write_bytes(b"x" * 1000)
    note = {"url": "ftp://elsewhere/x", "last_modified": server.modified, "total": 300_000}
    (goal.parent / "file.bin.part.json").write_text(json.dumps(note))
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0]


def test_a_part_longer_than_the_file_starts_over(server: Server, goal: Path) -> None:
    goal.parent.mkdir()
    (goal.parent / "file.bin.part").write_bytes(b"x" * 300_001)
    note = {"url": server.url, "last_modified": server.modified, "total": 300_000}
    (goal.parent / "file.bin.part.json").write_text(json.dumps(note))
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0]


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("USER", "421 too many users"),
        ("PASS", "530 Sorry, the maximum number of clients is reached"),
        ("PASV", "425 no port free"),
        ("PASV", "227 Entering Passive Mode (127,0,0,1,999,999)"),
        ("PASV", "227 garbled"),
        ("RETR", "450 file busy"),
        ("SIZE", "451 local error"),
        ("TYPE", ""),  # hangs up
        ("RETR", ""),
    ],
)
def test_passing_trouble_is_tried_again(server: Server, goal: Path, command: str, answer: str) -> None:
    server.replies = {command: [answer]}
    assert_whole(fetch(server.url, goal), goal)
    assert server.commands.count("USER") == 2
    assert server.transfers == [0]


def test_the_passive_mode_of_ipv6(server: Server, goal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every machine has IPv6: the client is made to believe that it connected over it."""
    connect = ftplib.FTP.connect

    def believe(self: ftplib.FTP, *args: object) -> str:
        answer = connect(self, *args)
        self.af = socket.AF_INET6
        return answer

    monkeypatch.setattr(ftplib.FTP, "connect", believe)
    server.replies = {"EPSV": ["229 garbled (|||x|)"]}
    assert_whole(fetch(server.url, goal), goal)
    assert (server.commands.count("EPSV"), server.commands.count("PASV")) == (2, 0)


@pytest.mark.parametrize(("command", "answer"), [("PASS", "530 no guests"), ("RETR", "550 permission denied")])
def test_lasting_refusals_are_not_tried_again(server: Server, goal: Path, command: str, answer: str) -> None:
    server.replies = {command: [answer] * 5}
    with pytest.raises(BadInputError, match=f"FTP {answer}; .*check the address"):
        fetch(server.url, goal)
    assert server.commands.count("USER") == 1
    assert not goal.exists()


def test_an_absent_file_is_bad_input_and_names_the_address(server: Server, goal: Path) -> None:
    url = server.url.replace("some", "limit")  # the name must not be taken for an excuse of the server
    with pytest.raises(BadInputError, match=r"limit%20file.bin: FTP 550 local/limit file.bin: no such"):
        fetch(url, goal)
    assert server.commands.count("USER") == 1


def test_a_refused_transfer_keeps_what_came_before(server: Server, goal: Path) -> None:
    server.drop_after = [100_000]
    with pytest.raises(IncompleteError):
        fetch(server.url, goal, attempts=1)
    server.replies = {"RETR": ["550 gone for maintenance"]}
    with pytest.raises(BadInputError, match="maintenance"):
        fetch(server.url, goal)
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0, 100_000]


def test_sizes_that_are_not_the_expected_ones(server: Server, goal: Path) -> None:
    with pytest.raises(BadInputError, match="300000 bytes; expected 299999"):
        fetch(server.url, goal, expected_bytes=299_999)
    assert server.transfers == []
    server.unknown = {"SIZE"}
    with pytest.raises(BadInputError, match="more than 299999 bytes"):
        fetch(server.url, goal, expected_bytes=299_999)
    for server.unknown in (set(), {"SIZE"}):
        server.content = b""
        with pytest.raises(BadInputError, match="0 bytes; expected a file with content"):
            fetch(server.url, goal)
    assert not goal.exists()


def test_attempts_in_a_row_are_bounded(server: Server, goal: Path) -> None:
    with pytest.raises(IncompleteError, match="0 of unknown bytes after 2 attempts"):
        fetch("ftp://127.0.0.1:1/x", goal, attempts=2)
    server.drop_after = [0] * 100
    with pytest.raises(IncompleteError, match="after 5 attempts"):
        fetch(server.url, goal, attempts=5)
    assert len(server.transfers) == 5


@pytest.mark.parametrize("silent", ["data", "control"])
def test_a_server_that_says_nothing_is_left(
    server: Server, goal: Path, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    release = threading.Event()
    monkeypatch.setattr(fetch_module, "TIMEOUT_SECONDS", 0.2)
    if silent == "data":
        server.drop_after, server.on_drop = [1000], [lambda: release.wait(10)]
    else:
        server.greeting = b""
    with pytest.raises(IncompleteError, match="timed out"):
        fetch(server.url, goal, attempts=1)
    release.set()


def test_a_full_disk_is_not_taken_for_a_dropped_connection(
    server: Server, goal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch_module, "write_text", fail)
    with pytest.raises(IncompleteError, match=r"cannot be written .*No space left"):
        fetch(server.url, goal)
    assert server.commands.count("USER") == 1


def test_an_http_proxy_for_ftp_is_used(server: Server, goal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT)

    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            monkeypatch.setenv("ftp_proxy", f"http://127.0.0.1:{proxy.server_address[1]}")
            monkeypatch.setenv("no_proxy", "")
            assert_whole(fetch(server.url, goal), goal)
            assert asked == [server.url]
            monkeypatch.setenv("no_proxy", "127.0.0.1")
            fetch(server.url, goal.with_name("direct.bin"))
        finally:
            proxy.shutdown()
            thread.join()
    assert (len(asked), server.transfers) == (1, [0])


@pytest.mark.parametrize(
    "url",
    ["ftp://host/", "ftp://host", "ftp:///x", "ftp://host/folder/", "ftp://host/a%0D%0ADELE%20b", "ftp://h:port/x"],
)
def test_addresses_that_name_no_file(tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match="correct it"):
        fetch(url, tmp_path / "x")


def test_a_password_is_refused_and_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected anonymous FTP") as caught:
        fetch("ftp://me:secret@127.0.0.1/x", tmp_path / "x")
    assert "secret" not in str(caught.value)


def test_paths_keep_their_bytes() -> None:
    assert split_ftp_url("ftp://host/a/b%20c") == ("host", 21, "a/b c")
    assert split_ftp_url("ftp://host:2121/%2Fetc/x") == ("host", 2121, "/etc/x")
    for url in ("ftp://host/é", "ftp://host/%C3%A9"):
        assert split_ftp_url(url)[2].encode("latin-1") == "é".encode()
