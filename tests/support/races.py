"""Somebody else is faster: what happens at the last moment before a version is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from och_dist.store import manifest


@contextmanager
def before_commit(*actions: Callable[[], Any]) -> Iterator[list[Callable[[], Any]]]:
    """Before each commit that begins here the next of ``actions`` is done, whose own commits are as usual.

    Yields what was not done yet.
    """
    waiting, commit, busy = list(actions), manifest.commit_version, False

    def overtaken(objects: Any, body: dict[str, Any]) -> bool:
        nonlocal busy
        if waiting and not busy:
            busy = True
            waiting.pop(0)()
            busy = False
        return commit(objects, body)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "commit_version", overtaken)
        yield waiting
