"""Downloads from a real server on this machine that misbehaves on purpose."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from och_dist.errors import BadInputError, ConflictError, IncompleteError, UsageError
from och_dist.sources import download as fetch_module
from och_dist.sources.download import Fetched, fetch
from tests.support.downloads import CONTENT, OTHER, assert_whole, serving


class Server(ThreadingHTTPServer):
    """Serves ``content``; attributes say how it misbehaves; ``requests`` keeps every Range header seen."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.etag: str | None = '"one"'
        self.modified: str | None = None
        self.ranges = True
        self.chunked = False
        self.sized = True
        self.honest_if_range = True
        self.range_shift = 0
        self.drop_after: list[int] = []  # body bytes of the next answers after which the connection is cut
        self.statuses: list[int] = []  # refusals given before anything else
        self.on_drop: list[object] = []  # called, one a drop
        self.requests: list[str | None] = []
        self.conditions: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/file.bin"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        server.requests.append(wanted)
        server.conditions.append(self.headers.get("If-Range"))
        self.close_connection = True
        if server.statuses:
            self.send_error(server.statuses.pop(0))
            return
        start = self._start(wanted)
        if start and start >= len(server.content):
            self.send_response(416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self._send_head(start)
        self._send_body(server.content[start:])

    def _start(self, wanted: str | None) -> int:
        server, condition = self.server, self.headers.get("If-Range")
        if wanted is None or not server.ranges:
            return 0
        if server.honest_if_range and condition not in (None, server.etag, server.modified):
            return 0
        return int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) + server.range_shift

    def _send_head(self, start: int) -> None:
        server, total = self.server, len(self.server.content)
        self.send_response(206 if start else 200)
        for name, value in (("ETag", server.etag), ("Last-Modified", server.modified)):
            if value is not None:
                self.send_header(name, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        if server.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif server.sized:
            self.send_header("Content-Length", str(total - start))
        self.end_headers()

    def _send_body(self, body: bytes) -> None:
        server = self.server
        limit = server.drop_after.pop(0) if server.drop_after else None
        body = body[:limit]
        if server.chunked:
            for low in range(0, len(body), 50_000):
                piece = body[low : low + 50_000]
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            if limit is None:
                self.wfile.write(b"0\r\n\r\n")
        else:
            self.wfile.write(body)
        if limit is not None and server.on_drop:
            server.on_drop.pop(0)()  # type: ignore[operator]


@pytest.fixture
def server(no_waiting: None) -> Iterator[Server]:
    with serving(Server()) as running:
        yield running


def test_a_plain_download_and_nothing_the_second_time(server: Server, goal: Path) -> None:
    seen: list[int] = []
    assert_whole(fetch(server.url, goal, expected_bytes=300_000, progress=seen.append), goal)
    assert seen == sorted({*seen, 300_000})
    assert_whole(fetch(server.url, goal), goal)
    assert server.requests == [None]


def test_a_dropped_connection_is_continued_where_it_broke(server: Server, goal: Path) -> None:
    server.drop_after = [100_000, 50_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.requests == [None, "bytes=100000-", "bytes=150000-"]
    assert server.conditions == [None, '"one"', '"one"']


def test_last_modified_serves_when_the_etag_is_weak(server: Server, goal: Path) -> None:
    server.etag, server.modified = 'W/"one"', "Wed, 21 Oct 2015 07:28:00 GMT"
    server.drop_after = [100_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.conditions == [None, server.modified]


def test_without_a_validator_the_file_starts_over(server: Server, goal: Path) -> None:
    server.etag = None
    server.drop_after = [100_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.requests == [None, None]


def test_resume_in_a_later_call(server: Server, goal: Path) -> None:
    server.drop_after = [100_000, 0]
    with pytest.raises(IncompleteError, match=r"100000 of 300000 bytes after 2 attempts .*run again to resume"):
        fetch(server.url, goal, attempts=2)
    assert (goal.parent / "file.bin.part").stat().st_size == 100_000
    assert not goal.exists()
    server.requests.clear()
    assert_whole(fetch(server.url, goal), goal)
    assert server.requests == ["bytes=100000-"]


def test_resume_after_kill_9(server: Server, goal: Path) -> None:
    stalled, release = threading.Event(), threading.Event()

    def stall() -> None:
        stalled.set()
        release.wait(60)

    server.drop_after, server.on_drop = [100_000], [stall]
    code = f"from och_dist.sources.download import fetch; fetch({server.url!r}, {str(goal)!r})"
    root = str(Path(fetch_module.__file__).parents[2])
    victim = subprocess.Popen([sys.executable, "-c", code], cwd=root)
    part = goal.parent / "file.bin.part"
    try:
        assert stalled.wait(60)
        deadline = time.monotonic() + 60
        while part.stat().st_size < 100_000 and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        victim.kill()
        victim.wait(60)
        release.set()
    assert part.stat().st_size == 100_000
    assert_whole(fetch(server.url, goal), goal)
    assert server.requests == [None, "bytes=100000-"]


def test_a_killed_process_that_had_all_bytes_needs_no_request(server: Server, goal: Path) -> None:
    goal.parent.mkdir()
    (goal.parent / "file.bin.part").write_bytes(CONTENT)
    note = {"url": server.url, "etag": '"one"', "last_modified": None, "total": 300_000}
    (goal.parent / "file.bin.part.json").write_text(json.dumps(note))
    assert_whole(fetch(server.url, goal), goal)
    assert server.requests == []


@pytest.mark.parametrize("note", ["", "[]", '{"url": "http://elsewhere/x", "etag": "\\"one\\""}', '{"bad": 1}'])
def test_a_part_of_unknown_origin_is_not_continued(server: Server, goal: Path, note: str) -> None:
    goal.parent.mkdir()
    (goal.parent / "file.bin.part").write_bytes(b"x" * 1000)
    if note:
        (goal.parent / "file.bin.part.json").write_text(note)
    assert_whole(fetch(server.url, goal), goal)
    assert server.requests == [None]


def test_a_server_without_ranges_starts_over(server: Server, goal: Path) -> None:
    server.ranges = False
    server.drop_after = [100_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.requests == [None, "bytes=100000-"]


@pytest.mark.parametrize("honest", [True, False])
def test_a_file_that_changes_between_attempts_is_not_mixed(server: Server, goal: Path, honest: bool) -> None:
    def change() -> None:
        server.content, server.etag = OTHER, '"two"'

    server.honest_if_range = honest
    server.drop_after = [100_000]
    server.on_drop = [change]
    assert_whole(fetch(server.url, goal), goal, OTHER)


@pytest.mark.parametrize("size", [200_000, 50_000])
def test_a_file_that_changed_its_size_only(server: Server, goal: Path, size: int) -> None:
    def change() -> None:
        server.content = OTHER[:size]

    server.drop_after = [100_000]
    server.on_drop = [change]
    assert_whole(fetch(server.url, goal), goal, OTHER[:size])


def test_a_range_that_begins_elsewhere_is_not_taken(server: Server, goal: Path) -> None:
    server.range_shift = 7
    server.drop_after = [100_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.requests == [None, "bytes=100000-", None]


def test_chunked_answers_without_a_size(server: Server, goal: Path) -> None:
    server.chunked = True
    server.drop_after = [100_000]
    assert_whole(fetch(server.url, goal), goal)
    assert server.requests == [None, "bytes=100000-"]


def test_an_answer_of_unknown_size_needs_an_expectation(server: Server, goal: Path) -> None:
    server.sized = False
    with pytest.raises(BadInputError, match="pass expected_bytes"):
        fetch(server.url, goal)
    server.drop_after = [100_000]
    assert_whole(fetch(server.url, goal, expected_bytes=300_000), goal)


def test_passing_refusals_are_tried_again(server: Server, goal: Path) -> None:
    server.statuses = [503, 429]
    assert_whole(fetch(server.url, goal), goal)
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [403, 404, 410])
def test_lasting_refusals_are_not(server: Server, goal: Path, status: int) -> None:
    server.statuses = [status] * 5
    with pytest.raises(BadInputError, match=f"HTTP {status} .*check the address"):
        fetch(server.url, goal)
    assert len(server.requests) == 1
    assert list(goal.parent.iterdir()) == []


def test_another_size_than_expected_is_refused_before_the_download(server: Server, goal: Path) -> None:
    with pytest.raises(BadInputError, match="300000 bytes; expected 299999"):
        fetch(server.url, goal, expected_bytes=299_999)
    assert not goal.exists()
    server.chunked = True
    with pytest.raises(BadInputError, match="more than 299999 bytes"):
        fetch(server.url, goal, expected_bytes=299_999)
    assert not goal.exists()


def test_an_empty_remote_file_is_refused(server: Server, goal: Path) -> None:
    server.content = b""
    for server.chunked in (False, True):
        with pytest.raises(BadInputError, match="0 bytes; expected a file with content"):
            fetch(server.url, goal)
    assert not goal.exists()


def test_attempts_in_a_row_are_bounded(server: Server, goal: Path) -> None:
    with pytest.raises(IncompleteError, match="0 of unknown bytes after 2 attempts"):
        fetch("http://127.0.0.1:1/x", goal, attempts=2)
    server.drop_after = [0] * 100
    with pytest.raises(IncompleteError, match="after 5 attempts"):
        fetch(server.url, goal, attempts=5)
    assert len(server.requests) == 5


def test_attempts_that_bring_enough_do_not_count(server: Server, goal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "WORTH_BYTES", 10_000)
    server.drop_after = [10_000] * 25
    assert_whole(fetch(server.url, goal, attempts=2), goal)


def test_starting_over_is_no_progress(server: Server, goal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "WORTH_BYTES", 10_000)
    server.ranges = False
    server.drop_after = [50_000] * 100
    with pytest.raises(IncompleteError):
        fetch(server.url, goal, attempts=3)
    assert len(server.requests) == 3


def test_a_server_that_says_nothing_is_left(server: Server, goal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(fetch_module, "TIMEOUT_SECONDS", 0.1)
    server.drop_after = [1000]
    server.on_drop = [lambda: release.wait(10)]
    with pytest.raises(IncompleteError, match="timed out"):
        fetch(server.url, goal, attempts=1)
    release.set()


def test_two_processes_do_not_write_one_part(server: Server, goal: Path) -> None:
    goal.parent.mkdir()
    with fetch_module._locked_part(goal), pytest.raises(ConflictError, match="another process"):
        fetch(server.url, goal)
    assert_whole(fetch(server.url, goal), goal)


def test_a_finished_file_that_was_damaged_is_reported(server: Server, goal: Path) -> None:
    fetch(server.url, goal)
    goal.write_bytes(OTHER)
    with pytest.raises(BadInputError, match=r"file.bin.sha256 says .*remove both"):
        fetch(server.url, goal)


def test_a_file_of_somebody_else_is_not_overwritten(server: Server, goal: Path) -> None:
    goal.parent.mkdir()
    goal.write_bytes(b"mine")
    with pytest.raises(BadInputError, match=r"exists without file.bin.sha256"):
        fetch(server.url, goal)
    assert goal.read_bytes() == b"mine"
    goal.write_bytes(CONTENT)
    assert_whole(fetch(server.url, goal, expected_bytes=300_000), goal)
    assert server.requests == []


def test_local_files_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "with space:.bin"
    path.write_bytes(CONTENT)
    expected = Fetched(path, 300_000, hashlib.sha256(CONTENT).hexdigest())
    for name in (str(path), path.as_uri()):
        assert fetch(name, tmp_path / "x") == expected
    assert [p.name for p in tmp_path.iterdir()] == ["with space:.bin"]
    with pytest.raises(BadInputError, match="300000 bytes; expected 5"):
        fetch(str(path), tmp_path / "x", expected_bytes=5)
    with pytest.raises(BadInputError, match="no such file"):
        fetch(str(tmp_path / "absent"), tmp_path / "x")


def test_calls_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="scheme 'sftp'"):
        fetch("sftp://127.0.0.1/x", tmp_path / "x")
    with pytest.raises(UsageError, match="expected a valid address"):
        fetch("http://127.0.0.1:port/x", tmp_path / "x")
