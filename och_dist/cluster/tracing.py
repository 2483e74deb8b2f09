"""Tasks that tell the scheduler when they begin and end, with what they worked through, in few small messages."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from och_dist import events
from och_dist.cluster.outcome import Failure, catch

if TYPE_CHECKING:
    from distributed import Client

T = TypeVar("T")
Mark = tuple[str, int]

INTERVAL = 0.1
"""Seconds between two messages of a worker, at least; an end after a longer silence is sent at once."""

TEXT = 300


class Trace:
    """The tasks of one graph as an operator sees them: ``count`` tasks, in the places that ``inherited`` leaves free.

    Without a listener, or for a graph that shows no progress, marks are None and tasks tell nothing.
    """

    def __init__(
        self, client: Client | None, name: str, count: int, *, shown: bool, inherited: Collection[int] = ()
    ) -> None:
        self.token = f"{name}-{uuid.uuid4().hex[:8]}"
        self.active = shown and client is not None and events.heard(client)
        if self.active:
            kept = _ranges(inherited)
            events.say("tasks", token=self.token, name=name, count=count, inherited=kept)

    def mark(self, number: int) -> Mark | None:
        return (self.token, number) if self.active else None

    def end(self, *, done: bool) -> None:
        """All tasks are done, or no more will be."""
        if self.active:
            events.say("tasks_end", token=self.token, done=done)


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """[[first, last + 1], ...] of ascending runs."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, number + 1])
    return runs


def traced(mark: Mark | None, function: Callable[..., T], *args: Any) -> T | Failure:
    """:func:`catch` on a worker, told to the scheduler."""
    if mark is None:
        return catch(function, *args)
    tell, started = _outbox(), time.perf_counter()
    tell(["begin", *mark])
    with events.counting() as facts:
        try:
            value = catch(function, *args)
        except BaseException as error:
            tell(_ended(mark, "retry", started, {"error": f"{type(error).__name__}: {error}"[:TEXT]}))
            raise
    if isinstance(value, Failure):
        tell(_ended(mark, "failed", started, {"error": str(value.error)[:TEXT]}))
    else:
        tell(_ended(mark, "done", started, facts))
    return value


def _ended(mark: Mark, state: str, started: float, facts: events.Facts) -> list[Any]:
    seconds = time.perf_counter() - started
    events.TOTALS.count(mark[0].rpartition("-")[0], state, seconds, facts)
    return ["end", *mark, state, round(seconds, 4), facts]


def _outbox() -> Callable[[list[Any]], None]:
    from distributed import get_worker

    try:
        worker = get_worker()
    except ValueError:
        return lambda event: None
    return lambda event: OUTBOX.put(worker, event)


class Outbox:
    """Events on their way from this process to its scheduler."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[list[Any]] = []
        self.sent = float("-inf")
        self.due = False

    def put(self, worker: Any, event: list[Any]) -> None:
        with contextlib.suppress(Exception):
            with self.lock:
                self.waiting.append(event)
                wait = self.sent + INTERVAL - time.monotonic()
                if self.due:
                    return
                self.due = wait > 0
            if wait > 0:
                worker.loop.add_callback(worker.loop.call_later, wait, self.send, worker)
            else:
                self.send(worker)

    def send(self, worker: Any) -> None:
        with contextlib.suppress(Exception):
            with self.lock:
                batch, self.waiting, self.due = self.waiting, [], False
                self.sent = time.monotonic()
            if batch:
                worker.log_event(events.TOPIC, {"events": batch})


OUTBOX = Outbox()
