"""Runs of jobs on an index: one at a time, each with its report beside what it made.

``runs/00000007/start.json`` takes the number when a run begins, ``runs/00000007/end.json`` is its report. A run without
the second was killed, or is under way: then it holds the lock.

The lock only saves doing work twice: what is stored is right without it. It is the kernel's, on a file: it ends with
the process that holds it, however that ends, so nothing stale can block, and no clock is asked. It reaches as far as
the file does: all processes of this machine, and those of others where the file system carries locks. For a bucket the
file lies among the temporary files of this machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import platform
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from och_dist.errors import BadInputError, ConflictError, IncompleteError
from och_dist.store.manifest import read_latest, read_sealed, seal, sha256
from och_dist.store.objects import TEMPORARY, LocalObjects, Objects, storage_errors

logger = logging.getLogger("och_dist")

RACES = 100
LOCK_ATTEMPTS = 10


def run_key(number: int, part: str) -> str:
    """Where the ``"start"`` or the ``"end"`` of a run lies."""
    return f"runs/{number:08d}/{part}.json"


def run_numbers(objects: Objects) -> list[int]:
    """All runs, in order."""
    return sorted(int(name) for name in objects.folders("runs") if name.isascii() and name.isdigit())


def begin_run(objects: Objects, about: dict[str, Any]) -> int:
    """Take the next number; runs that begin at once get one each."""
    body = read_latest(objects)
    if body is not None and body.get("kind") != "index":
        raise BadInputError(f"{objects.url} is of kind {body.get('kind')!r}; name an index, or a place for a new one")
    first = max(run_numbers(objects), default=0) + 1
    for number in range(first, first + RACES):
        with contextlib.suppress(ConflictError):
            objects.put(run_key(number, "start"), seal({"run": number, "key": uuid.uuid4().hex, **about}))
            return number
    raise ConflictError(f"{objects.url}: {RACES} other runs began at the same time; run the command again")


def end_run(objects: Objects, number: int, report: dict[str, Any]) -> None:
    """Keep the report of a run."""
    objects.put(run_key(number, "end"), seal({"run": number, **report}))


def read_run(objects: Objects, number: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(how a run began, how it ended or None)."""
    start = read_sealed(objects, run_key(number, "start"))
    return start or {"run": number}, read_sealed(objects, run_key(number, "end"))


def lock_path(objects: Objects) -> Path:
    if isinstance(objects, LocalObjects):
        return objects.root / TEMPORARY / "run.lock"
    return Path(tempfile.gettempdir()) / f"och-{os.getuid()}-{sha256(objects.url.encode())[:16]}.lock"


@contextlib.contextmanager
def locked(objects: Objects, **about: Any) -> Iterator[None]:
    """Hold the lock; :class:`IncompleteError` at once if another run does. A place without locks is used without."""
    path = lock_path(objects)
    with storage_errors(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            _take(file)
        except BlockingIOError:
            raise IncompleteError(
                f"another run works on {objects.url} ({_describe(path)}), and nothing was begun here; run the command "
                "again when it has ended"
            ) from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s); going on without: two runs may do the same work", path, error)
        os.truncate(file, 0)
        os.pwrite(file, json.dumps({"pid": os.getpid(), "host": platform.node(), **about}).encode(), 0)
        yield
    finally:
        os.close(file)  # and with it the lock goes; the file stays, so that all look at the same one


def _take(file: int) -> None:
    """Lock a file; a few attempts, because whoever asks for the :func:`holder` has it for a moment."""
    for _ in range(LOCK_ATTEMPTS):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.05)
    return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def holder(objects: Objects) -> dict[str, Any] | None:
    """Who holds the lock, None if nobody does (or nobody can tell)."""
    path = lock_path(objects)
    with contextlib.suppress(OSError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _content(path)
    return None


def _content(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}


def _describe(path: Path) -> str:
    about = _content(path)
    if "pid" not in about:
        return "it has just begun"
    run = f"run {about['run']}, " if "run" in about else ""
    return f"{run}process {about['pid']} on {about.get('host')}"
