"""What tests of downloads share: what is served, a server that runs, and a whole file."""

from __future__ import annotations

import hashlib
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from och_dist.sources.download import Fetched

CONTENT = np.random.default_rng(0).bytes(300_000)
OTHER = np.random.default_rng(1).bytes(300_000)

S = TypeVar("S", bound=socketserver.BaseServer)


@contextmanager
def serving(server: S) -> Iterator[S]:
    """The server while it runs in a thread."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def assert_whole(found: Fetched, goal: Path, content: bytes = CONTENT) -> None:
    digest = hashlib.sha256(content).hexdigest()
    assert found == Fetched(goal, len(content), digest)
    assert goal.read_bytes() == content
    assert (goal.parent / "file.bin.sha256").read_text() == f"{digest}  file.bin\n"
    assert sorted(p.name for p in goal.parent.iterdir()) == ["file.bin", "file.bin.sha256"]
