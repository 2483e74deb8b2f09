"""What happens while a job runs, told to whoever listens; without a listener nothing is done.

Stages :func:`say` what they do, on the driver. Inside a task, stages and stores :func:`add` what was worked through,
and all of that leaves the worker with the end of the task. Nothing here may fail or slow down a job.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

TOPIC = "och"
AMOUNTS = ("rows", "read", "written")
"""What tasks of all kinds add: rows worked through, bytes of vectors read, bytes of chunks written."""

Facts = dict[str, Any]
Listener = Callable[[str, Facts], None]
"""Takes what the driver says: a kind of event, and its facts."""

_listener: Listener | None = None
_task = threading.local()
_lock = threading.Lock()


def heard() -> bool:
    """Whether anybody listens."""
    return _listener is not None


def say(kind: str, **facts: Any) -> None:
    """Tell the listener, if there is one."""
    if _listener is not None:
        with contextlib.suppress(Exception):
            _listener(kind, facts)


@contextlib.contextmanager
def told_to(listener: Listener) -> Iterator[None]:
    """Pass everything that is said in this process to ``listener`` while this lasts."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def add(**amounts: Any) -> None:
    """Count something towards the task that this thread works on: numbers, or lists of numbers, are summed."""
    facts: Facts | None = getattr(_task, "facts", None)
    if facts is None:
        return
    for name, amount in amounts.items():
        known = facts.get(name)
        if known is not None and isinstance(amount, list):
            facts[name] = [a + b for a, b in zip(known, amount, strict=True)]
        else:
            facts[name] = amount if known is None else known + amount


@contextlib.contextmanager
def counting() -> Iterator[Facts]:
    """What this thread adds while this lasts."""
    before, facts = getattr(_task, "facts", None), Facts()
    _task.facts = facts
    try:
        yield facts
    finally:
        _task.facts = before


class Totals:
    """Sums over tasks by name: AMOUNTS, ``seconds``, and how many ended ``done``, ``failed`` or in a ``retry``."""

    def __init__(self) -> None:
        self.by_task: dict[str, dict[str, float]] = {}

    def count(self, name: str, state: str, seconds: float, facts: Facts) -> None:
        with _lock:
            sums = self.by_task.setdefault(name, dict.fromkeys((*AMOUNTS, "seconds"), 0))
            sums[state] = sums.get(state, 0) + 1
            sums["seconds"] += seconds
            for amount in AMOUNTS:
                sums[amount] += facts.get(amount, 0)

    def copy(self) -> dict[str, dict[str, float]]:
        with _lock:
            return {name: dict(sums) for name, sums in self.by_task.items()}


TOTALS = Totals()
"""What the tasks of this process did since it started."""
