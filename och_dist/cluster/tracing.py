"""Tasks that tell the scheduler when they begin and end, with what they worked through, in few small messages."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import numpy as np

from och_dist import events
from och_dist.cluster.outcome import Failure, catch, unique

T = TypeVar("T")
Mark = tuple[str, int]

INTERVAL = 0.1
"""Seconds in which the events of a worker are gathered before they are sent."""

TEXT = 300


class Trace:
    """The tasks of one graph as an operator sees them: ``count`` tasks, in the places that ``inherited`` leaves free.

    Without a listener, or for a graph that shows no progress, marks are None and tasks tell nothing.
    """

    def __init__(self, name: str, count: int, *, shown: bool, inherited: Collection[int] = ()) -> None:
        self.token = unique(name)
        self.active = shown and events.heard()
        if self.active:
            events.say("tasks", token=self.token, name=name, count=count, inherited=_ranges(inherited))

    def mark(self, number: int) -> Mark | None:
        return (self.token, number) if self.active else None

    def end(self, *, done: bool) -> None:
        """All tasks are done, or no more will be."""
        if self.active:
            events.say("tasks_end", token=self.token, done=done)


def _ranges(numbers: Collection[int]) -> list[list[int]]:
    """[[first, last + 1], ...] of ascending runs."""
    ordered = np.sort(np.fromiter(numbers, np.int64, len(numbers)))
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    return [[int(run[0]), int(run[-1]) + 1] for run in runs if len(run)]


def traced(mark: Mark | None, function: Callable[..., T], *args: Any) -> T | Failure:
    """:func:`catch` on a worker, told to the scheduler."""
    if mark is None:
        return catch(function, *args)
    started = time.perf_counter()

    def end(state: str, facts: events.Facts) -> None:
        seconds = time.perf_counter() - started
        events.TOTALS.count(mark[0].rpartition("-")[0], state, seconds, facts)
        OUTBOX.put(["end", *mark, state, round(seconds, 4), facts])

    OUTBOX.put(["begin", *mark])
    with events.counting() as facts:
        try:
            value = catch(function, *args)
        except BaseException as error:
            end("retry", {"error": f"{type(error).__name__}: {error}"[:TEXT]})
            raise
    if isinstance(value, Failure):
        end("failed", {"error": str(value.error)[:TEXT]})
    else:
        end("done", facts)
    return value


class Outbox:
    """Events on their way from this worker to its scheduler, a few messages a second; never waits, never raises."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[list[Any]] = []

    def put(self, event: list[Any]) -> None:
        from distributed import get_worker

        with self.lock:
            self.waiting.append(event)
            first = len(self.waiting) == 1
        if first:
            with contextlib.suppress(Exception):
                worker = get_worker()
                worker.loop.add_callback(worker.loop.call_later, INTERVAL, self.send, worker)

    def send(self, worker: Any) -> None:
        with self.lock:
            batch, self.waiting = self.waiting, []
        with contextlib.suppress(Exception):
            worker.log_event(events.TOPIC, {"events": batch})


OUTBOX = Outbox()
