"""One run of a job at a time, so that no work is done twice. What is stored is right without it.

The lock is the kernel's, on a file: it ends with the process that holds it, however that ends, so nothing stale can
block, and no clock is asked. It reaches as far as the file does: all processes of this machine, and those of others
where the file system carries locks. For a bucket the file lies among the temporary files of this machine.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from och_dist.errors import IncompleteError
from och_dist.store.manifest import sha256
from och_dist.store.objects import TEMPORARY, LocalObjects, Objects, storage_errors

logger = logging.getLogger("och_dist")

NAME = "run.lock"
ATTEMPTS = 10


def lock_path(objects: Objects) -> Path:
    if isinstance(objects, LocalObjects):
        return objects.root / TEMPORARY / NAME
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
    for _ in range(ATTEMPTS):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.05)
    return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def holder(objects: Objects) -> dict[str, Any] | None:
    """Who holds the lock, None if nobody does (or nobody can tell)."""
    path = lock_path(objects)
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _content(path)
    except OSError:
        return None
    finally:
        os.close(file)
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
