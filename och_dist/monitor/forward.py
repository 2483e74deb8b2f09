"""From the driver to its scheduler: what a job says of itself travels beside the work, in few messages."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from och_dist import events
from och_dist.errors import OchError
from och_dist.monitor.progress import Advance, Progress

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger("och_dist")

PAUSE = 0.2  # seconds in which events are gathered before they are sent
QUEUE = 20_000
LAST_SECONDS = 2.0
TEXT = 500


class Forwarder:
    """Sends what is said to the scheduler of ``client``, in order, a few times a second; never waits, never raises."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.lock = threading.Lock()
        self.sending = asyncio.Lock()
        self.waiting: deque[list[Any]] = deque(maxlen=QUEUE)
        self.due = False

    def __call__(self, kind: str, facts: events.Facts) -> None:
        with self.lock:
            last = self.waiting[-1] if self.waiting else None
            if kind == "advance" and last is not None and last[0] == kind and last[1]["id"] == facts["id"]:
                last[1]["count"] += facts["count"]
                return
            self.waiting.append([kind, facts, time.monotonic()])
            if self.due:
                return
            self.due = True
        self.client.loop.add_callback(self.client.loop.call_later, PAUSE, self.send)

    async def send(self) -> None:
        with contextlib.suppress(Exception):
            async with self.sending:
                with self.lock:
                    batch, self.due = list(self.waiting), False
                    self.waiting.clear()
                if batch:
                    now = time.monotonic()
                    aged = [[kind, facts, round(now - when, 3)] for kind, facts, when in batch]
                    message = {"driver": self.client.id, "sent": time.time(), "events": aged}
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
    sink = Forwarder(client)
    with events.told_to(sink):
        events.say("job", name=job)
        try:
            yield True
        except BaseException as error:
            status = "failed" if isinstance(error, Exception) else "interrupted"
            events.say("job_end", status=status, error=_text(error))
            raise
        else:
            events.say("job_end", status="done")
        finally:
            sink.finish()


def _text(error: BaseException) -> str:
    kind = "" if isinstance(error, OchError) else f"{type(error).__name__}: "
    return f"{kind}{error}"[:TEXT].rstrip(": ")


def _install(client: Client) -> bool:
    """Register the plugins of scheduler and workers; again changes nothing."""
    try:
        from och_dist.monitor.dashboard import OchMonitor
        from och_dist.monitor.metrics import WorkerSeries

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


_numbers = itertools.count()


def reported(progress: Progress) -> Progress:
    """The same progress, also told to the listener."""

    def start(description: str, total: int) -> Advance:
        number, shown = next(_numbers), progress(description, total)
        events.say("step", id=number, name=description, total=total)

        def advance(count: int) -> None:
            shown(count)
            events.say("advance", id=number, count=count)

        return advance

    return start
