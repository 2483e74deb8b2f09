"""A store that fails at a chosen operation, and the bytes that a store holds."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from och_dist.store.objects import TEMPORARY, LocalObjects

How = Literal["before", "after", "full", "lost"]


class Crash(Exception):
    """The process ended here."""


class Operations:
    """How many mutating operations there were, the last creation among them, and what happens at ``at`` (0: none)."""

    def __init__(self, at: int, how: How) -> None:
        self.at = at
        self.how = how
        self.count = 0
        self.created = 0
        self.delivered = False

    def run(self, operation: Any, *args: Any) -> Any:
        self.count += 1
        if operation is CREATE:
            self.created = self.count
        if self.how in ("before", "after"):
            return self._crash(operation, *args)
        if not self.at or self.count < self.at or (self.how == "lost" and self.count > self.at):
            return operation(*args)
        return self._full(operation, *args) if self.how == "full" else self._lose(operation, *args)

    def _crash(self, operation: Any, *args: Any) -> Any:
        if self.at and (self.count > self.at or (self.count == self.at and self.how == "before")):
            self.delivered = True
            raise Crash(f"at operation {self.at}")
        result = operation(*args)
        if self.count == self.at:
            self.delivered = True
            raise Crash(f"after operation {self.at}")
        return result

    def _full(self, operation: Any, *args: Any) -> Any:
        if operation is not CREATE:  # a full disk still deletes
            return operation(*args)
        self.delivered = True
        raise OSError(errno.ENOSPC, "No space left on device")

    def _lose(self, operation: Any, *args: Any) -> Any:
        operation(*args)
        self.delivered = True
        raise OSError(errno.EIO, "the answer got lost")


CREATE, DELETE = LocalObjects._create, LocalObjects.delete


@contextmanager
def fail_at(at: int, how: How) -> Iterator[Operations]:
    """Fail at create or delete number ``at``.

    The process dies ``before`` or ``after`` it took effect, and nothing works afterwards: what clean-up code tries
    after the crash must not work either, for a killed process cleans nothing up. Or from then on the disk is ``full``.
    Or the answer to this one is ``lost`` although it took effect.
    """
    operations = Operations(at, how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalObjects, "_create", lambda self, *args: operations.run(CREATE, self, *args))
        patch.setattr(LocalObjects, "delete", lambda self, *args: operations.run(DELETE, self, *args))
        yield operations


@contextmanager
def crash_at(at: int = 0, *, stored: bool = False) -> Iterator[Operations]:
    """Die at create or delete number ``at``, before or (``stored``) after it took effect."""
    with fail_at(at, "after" if stored else "before") as operations:
        yield operations


def tree(folder: str | Path) -> dict[str, bytes]:
    """Path -> content of every file below a folder, temporary files of the store left out."""
    top = Path(folder)
    files = (path for path in sorted(top.rglob("*")) if path.is_file())
    return {
        path.relative_to(top).as_posix(): path.read_bytes()
        for path in files
        if TEMPORARY not in path.relative_to(top).parts
    }
