"""What a driver tells of its job while it works: progress on stderr, and events to its scheduler, for the page /och."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from och_dist import events
from och_dist.errors import OchError

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger("och_dist")

PAUSE = 0.2  # seconds in which events are gathered before they are sent
QUEUE = 20_000
LAST_SECONDS = 2.0
TEXT = 500

Advance = Callable[[int], None]
Progress = Callable[[str, int], Advance]


def log_progress(description: str, total: int) -> Advance:
    """Count units and log each tenth of ``total``; more than ``total`` (a task that ran twice) is not counted."""
    lock, done = threading.Lock(), 0

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            before, done = done, min(total, done + count)
            if total and 10 * done // total > 10 * before // total:
                logger.info("%s: %d %% (%s of %s)", description, 10 * done // total * 10, f"{done:,}", f"{total:,}")

    return advance


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Bars on the terminal behind stderr, one for each stage, with rate and time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:

        def start(description: str, total: int) -> Advance:
            task = bars.add_task(description, total=total or 1)
            return lambda count: bars.advance(task, count)

        yield start


_numbers = itertools.count()


def reported(progress: Progress) -> Progress:
    """The same progress, also told to the scheduler."""

    def start(description: str, total: int) -> Advance:
        number, shown = next(_numbers), progress(description, total)
        events.say("step", id=number, name=description, total=total)

        def advance(count: int) -> None:
            shown(count)
            events.say("advance", id=number, count=count)

        return advance

    return start


class Forwarder:
    """Sends what is said to the scheduler of ``client``, in order, a few times a second; never waits, never raises."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.lock, self.sending = threading.Lock(), asyncio.Lock()
        self.waiting: deque[list[Any]] = deque(maxlen=QUEUE)

    def __call__(self, kind: str, facts: events.Facts) -> None:
        with self.lock:
            last = self.waiting[-1] if self.waiting else None
            if kind == "advance" and last is not None and last[0] == kind and last[1]["id"] == facts["id"]:
                last[1]["count"] += facts["count"]
                return
            self.waiting.append([kind, facts, time.monotonic()])
        if last is None:
            self.client.loop.add_callback(self.client.loop.call_later, PAUSE, self.send)

    async def send(self) -> None:
        with contextlib.suppress(Exception):
            async with self.sending:
                with self.lock:
                    batch = list(self.waiting)
                    self.waiting.clear()
                now = time.monotonic()
                aged = [[kind, facts, round(now - when, 3)] for kind, facts, when in batch]
                message = {"driver": self.client.id, "events": aged}
                await self.client.scheduler.log_event(topic=events.TOPIC, msg=message)

    def finish(self) -> None:
        """Send the rest, as long as the scheduler listens."""
        if self.client.status != "running":
            return
        with contextlib.suppress(Exception):
            sending = asyncio.run_coroutine_threadsafe(self.send(), self.client.loop.asyncio_loop)
            concurrent.futures.wait([sending], LAST_SECONDS)
            sending.cancel()


@contextlib.contextmanager
def monitored(client: Client | None, job: str) -> Iterator[bool]:
    """Show what is done while this lasts as ``job`` on the page /och of the scheduler; whether that is possible.

    Without a client there is nothing to show it on. A scheduler that cannot have the page costs one warning.
    """
    if client is None or not _install(client):
        yield False
        return
    forwarder = Forwarder(client)
    with events.told_to(forwarder):
        events.say("job", name=job)
        try:
            yield True
        except BaseException as error:
            status = "failed" if isinstance(error, Exception) else "interrupted"
            kind = "" if isinstance(error, OchError) else f"{type(error).__name__}: "
            events.say("job_end", status=status, error=f"{kind}{error}"[:TEXT].rstrip(": "))
            raise
        else:
            events.say("job_end", status="done")
        finally:
            forwarder.finish()


def _install(client: Client) -> bool:
    """Register the plugins of scheduler and workers; again changes nothing."""
    try:
        from och_dist.monitor.dashboard import OchMonitor, WorkerSeries

        client.register_plugin(OchMonitor())
        client.register_plugin(WorkerSeries())
    except Exception as error:  # whatever a scheduler of another make or version answers
        logger.warning(
            "the page /och cannot be shown by %s (%s: %s); the job goes on without",
            client.scheduler.address,
            type(error).__name__,
            str(error).partition("\n")[0][:TEXT],
        )
        return False
    return True
