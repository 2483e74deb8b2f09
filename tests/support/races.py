"""Somebody else is faster: what happens between two tasks of a stage, or at the last moment before a commit."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from och_dist.stage import Context
from och_dist.store import manifest
from och_dist.store.objects import LocalObjects


def after_tasks(number: int, action: Callable[[], Any]) -> Context:
    """Where ``action`` is done in this process as soon as ``number`` tasks of a stage have ended."""

    def progress(description: str, total: int) -> Callable[[int], None]:
        ended = itertools.count()  # the first call tells what an earlier run has done
        return lambda count: action() if next(ended) == number else None

    return Context(progress=progress)


def together(*actions: Callable[[], Any]) -> list[Any]:
    """What each action returns or raises when all start at once, each in a thread of its own."""
    barrier, outcomes = threading.Barrier(len(actions)), [None] * len(actions)

    def run(number: int) -> None:
        barrier.wait(30)
        try:
            outcomes[number] = actions[number]()
        except Exception as error:
            outcomes[number] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


@contextmanager
def before_operation(
    name: str, matches: Callable[[str], bool], action: Callable[[], Any]
) -> Iterator[list[Callable[[], Any]]]:
    """Before the first ``put`` or ``delete`` of a local store whose key ``matches``, ``action`` is done.

    Yields it in a list as long as it is not done.
    """
    waiting, plain = [action], getattr(LocalObjects, name)

    def overtaken(objects: LocalObjects, key: str, *args: Any, **options: Any) -> Any:
        if waiting and matches(key):
            waiting.pop()()
        return plain(objects, key, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalObjects, name, overtaken)
        yield waiting


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
