"""Downloads from a real FTP server on this machine that misbehaves on purpose."""

from __future__ import annotations

import ftplib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from och_dist.errors import BadInputError, IncompleteError, UsageError
from och_dist.sources import download as fetch_module
from och_dist.sources.download import fetch, split_ftp_url
from tests.support.downloads import CONTENT, OTHER, assert_whole, serving
from tests.support.ftp_server import FtpServer


@pytest.fixture
def server(no_waiting: None) -> Iterator[FtpServer]:
    with serving(FtpServer()) as running:
        yield running


def test_a_plain_download_and_nothing_the_second_time(server: FtpServer, goal: Path) -> None:
    seen: list[int] = []
    assert_whole(fetch(server.url, goal, expected_bytes=300_000, progress=seen.append), goal)
    assert seen[-1] == 300_000
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0]


def test_a_dropped_data_connection_is_continued_where_it_broke(server: FtpServer, goal: Path) -> None:
    server.drop_after = [100_000, 50_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0, 100_000, 150_000]


def test_resume_in_a_later_call(server: FtpServer, goal: Path) -> None:
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
    server: FtpServer, goal: Path, modified: str, size: int
) -> None:
    def change() -> None:
        server.content, server.modified = OTHER[:size], modified

    server.drop_after, server.on_drop = [100_000], [change]
    assert_whole(fetch(server.url, goal), goal, OTHER[:size])
    assert server.transfers == [0, 0]


def test_a_server_without_rest_starts_over(server: FtpServer, goal: Path) -> None:
    server.unknown = {"REST"}
    server.drop_after = [100_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0, 0]


def test_a_server_that_agrees_to_rest_and_forgets_it(server: FtpServer, goal: Path) -> None:
    server.rest_counts = False
    server.drop_after = [100_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0, 100_000, 0]


def test_without_a_time_the_file_starts_over(server: FtpServer, goal: Path) -> None:
    server.unknown = {"MDTM"}
    server.drop_after = [100_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0, 0]


def test_without_a_size_the_final_answer_tells_a_whole_file_from_a_cut_one(server: FtpServer, goal: Path) -> None:
    server.unknown = {"SIZE"}
    server.drop_after = [100_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0, 100_000]


def test_with_a_size_the_final_answer_is_not_waited_for(
    server: FtpServer, goal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "TIMEOUT_SECONDS", 5.0)
    server.silent_end = True
    assert_whole(fetch(server.url, goal, attempts=1), goal)
    assert server.transfers == [0]


@pytest.mark.parametrize(("size", "address"), [(1000, "ftp://elsewhere/x"), (300_001, None)])
def test_a_part_that_cannot_be_of_this_file_starts_over(
    server: FtpServer, goal: Path, size: int, address: str | None
) -> None:
    goal.parent.mkdir()
    (goal.parent / "file.bin.part").write_bytes(b"x" * size)
    note = {"url": address or server.url, "last_modified": server.modified, "total": 300_000}
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
def test_passing_trouble_is_tried_again(server: FtpServer, goal: Path, command: str, answer: str) -> None:
    server.replies = {command: [answer]}
    assert_whole(fetch(server.url, goal), goal)
    assert server.commands.count("USER") == 2
    assert server.transfers == [0]


def test_the_passive_mode_of_ipv6(server: FtpServer, goal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_lasting_refusals_are_not_tried_again(server: FtpServer, goal: Path, command: str, answer: str) -> None:
    server.replies = {command: [answer] * 5}
    with pytest.raises(BadInputError, match=f"FTP {answer}; .*check the address"):
        fetch(server.url, goal)
    assert server.commands.count("USER") == 1
    assert not goal.exists()


def test_an_absent_file_is_bad_input_and_names_the_address(server: FtpServer, goal: Path) -> None:
    url = server.url.replace("some", "limit")  # the name must not be taken for an excuse of the server
    with pytest.raises(BadInputError, match=r"limit%20file.bin: FTP 550 local/limit file.bin: no such"):
        fetch(url, goal)
    assert server.commands.count("USER") == 1


def test_a_refused_transfer_keeps_what_came_before(server: FtpServer, goal: Path) -> None:
    server.drop_after = [100_000]
    with pytest.raises(IncompleteError):
        fetch(server.url, goal, attempts=1)
    server.replies = {"RETR": ["550 gone for maintenance"]}
    with pytest.raises(BadInputError, match="maintenance"):
        fetch(server.url, goal)
    assert_whole(fetch(server.url, goal), goal)
    assert server.transfers == [0, 100_000]


def test_sizes_that_are_not_the_expected_ones(server: FtpServer, goal: Path) -> None:
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


def test_attempts_in_a_row_are_bounded(server: FtpServer, goal: Path) -> None:
    with pytest.raises(IncompleteError, match="0 of unknown bytes after 2 attempts"):
        fetch("ftp://127.0.0.1:1/x", goal, attempts=2)
    server.drop_after = [0] * 100
    with pytest.raises(IncompleteError, match="after 5 attempts"):
        fetch(server.url, goal, attempts=5)
    assert len(server.transfers) == 5


@pytest.mark.parametrize("silent", ["data", "control"])
def test_a_server_that_says_nothing_is_left(
    server: FtpServer, goal: Path, monkeypatch: pytest.MonkeyPatch, silent: str
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
    server: FtpServer, goal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fetch_module, "write_text", fail)
    with pytest.raises(IncompleteError, match=r"cannot be written .*No space left"):
        fetch(server.url, goal)
    assert server.commands.count("USER") == 1


def test_an_http_proxy_for_ftp_is_used(server: FtpServer, goal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


BAD_PATHS = ["ftp://host/", "ftp://host", "ftp:///x", "ftp://host/folder/", "ftp://host/a%0D%0ADELE%20b"]


@pytest.mark.parametrize("url", [*BAD_PATHS, "ftp://h:port/x", "ftp://[::1/x"])
def test_addresses_that_name_no_file(tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match="correct it"):
        fetch(url, tmp_path / "x")


def test_a_password_is_refused_and_not_repeated(tmp_path: Path) -> None:
    for url in ("ftp://me:secret@127.0.0.1/x", "ftp://me:secret@127.0.0.1:port/x"):
        with pytest.raises(UsageError, match="expected anonymous FTP") as caught:
            fetch(url, tmp_path / "x")
        assert "secret" not in str(caught.value)


def test_paths_keep_their_bytes() -> None:
    assert split_ftp_url("ftp://host/a/b%20c") == ("host", 21, "a/b c")
    assert split_ftp_url("ftp://host:2121/%2Fetc/x") == ("host", 2121, "/etc/x")
    for url in ("ftp://host/é", "ftp://host/%C3%A9"):
        assert split_ftp_url(url)[2].encode("latin-1") == "é".encode()
