"""A store that dies at a chosen operation and stays dead, and the bytes that a store holds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from och_dist.store.objects import TEMPORARY, LocalObjects


class Crash(Exception):
    """The process ended here."""


class Operations:
    """How many mutating operations there were, and at which one the process dies (0: never)."""

    def __init__(self, at: int, *, stored: bool) -> None:
        self.at = at
        self.stored = stored
        self.count = 0

    def run(self, operation: Any, *args: Any) -> Any:
        self.count += 1
        if self.at and (self.count > self.at or (self.count == self.at and not self.stored)):
            raise Crash(f"at operation {self.at}")
        result = operation(*args)
        if self.count == self.at:
            raise Crash(f"after operation {self.at}")
        return result


@contextmanager
def crash_at(at: int = 0, *, stored: bool = False) -> Iterator[Operations]:
    """Die at create or delete number ``at``, before or (``stored``) after it took effect; nothing works afterwards.

    What clean-up code tries after the crash must not work either, for a killed process cleans nothing up.
    """
    operations = Operations(at, stored=stored)
    create, delete = LocalObjects._create, LocalObjects.delete
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalObjects, "_create", lambda self, *args: operations.run(create, self, *args))
        patch.setattr(LocalObjects, "delete", lambda self, *args: operations.run(delete, self, *args))
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
