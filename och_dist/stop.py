"""How a command ends. The first SIGTERM or Ctrl-C lets the tasks under way finish, for a while; the second ends it.

Where no tasks are under way there is nothing to wait for, and the first one ends it at once: everything durable is
written whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from och_dist.errors import IncompleteError, OchError

logger = logging.getLogger("och_dist")

GRACE_SECONDS = 10.0
INTERRUPTED = 128 + signal.SIGINT
NOBODY_READS = 128 + signal.SIGPIPE


class Terminated(BaseException):
    """SIGTERM. Not an :class:`Exception`, so that nobody on the way takes it for a failed task and carries on."""


def reader_is_gone(error: OSError) -> bool:
    """Whether ``error`` is that nobody reads stdout any more (``och ... | head``), rather than a lost connection."""
    if error.errno != errno.EPIPE:
        return False
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))


def exit_code_of(error: BaseException) -> int:
    """How a command ends that raises this."""
    if isinstance(error, OchError):
        return error.exit_code
    if isinstance(error, Terminated):
        return IncompleteError.exit_code
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


def drop_stdout() -> None:
    """Let what is still buffered for stdout, and what comes later, go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Stop:
    """What was asked of this process by signals, and how long its tasks have to finish."""

    def __init__(self) -> None:
        self.grace = GRACE_SECONDS
        self.number: int | None = None
        self.wakers: list[Callable[[], None]] = []

    def handle(self, number: int, frame: Any) -> None:
        """The handler of both signals: it takes no lock, for it may interrupt whoever holds one."""
        if self.number is not None or not self.wakers:
            raise _error(number)
        self.number = number
        signal.signal(signal.SIGALRM, self.expire)
        signal.setitimer(signal.ITIMER_REAL, max(self.grace, 0.001))  # 0 would be no alarm at all
        for wake in self.wakers:
            wake()

    def expire(self, number: int, frame: Any) -> None:
        """The handler of the alarm when the time of grace is over; the tasks may have ended just before."""
        if self.wakers and self.number is not None:
            raise _error(self.number, f"not all tasks under way ended within {self.grace:g} s")

    @property
    def asked(self) -> bool:
        """Whether the tasks under way are the last."""
        return self.number is not None

    def announce(self, under_way: int) -> None:
        words = "stopping: %d tasks under way have %g s to finish; Ctrl-C once more ends at once"
        logger.warning(words, under_way, self.grace)

    def obey(self) -> None:
        """Raise what the signal stands for, if there was one."""
        if self.number is not None:
            raise _error(self.number)


def _error(number: int, *detail: str) -> BaseException:
    return (Terminated if number == signal.SIGTERM else KeyboardInterrupt)(*detail)


_stop: Stop | None = None


@contextlib.contextmanager
def stop_politely() -> Iterator[None]:
    """Handle SIGTERM and SIGINT as above, in the main thread of a command."""
    global _stop
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, _stop = _stop, Stop()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
    try:
        signal.signal(signal.SIGTERM, _stop.handle)
        if handlers[signal.SIGINT] is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, _stop.handle)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _stop = before


def set_grace(seconds: float) -> None:
    """How long tasks under way may go on after the first signal."""
    if _stop is not None:
        _stop.grace = seconds


@contextlib.contextmanager
def tasks_under_way(wake: Callable[[], None]) -> Iterator[Stop]:
    """Tasks that are let finish while this lasts; ``wake`` is called by a signal handler and takes no lock."""
    stop = _stop if threading.current_thread() is threading.main_thread() else None
    if stop is None:
        yield Stop()  # no signal will ask this one
        return
    stop.wakers.append(wake)
    try:
        yield stop
    finally:
        stop.wakers.remove(wake)
        if stop.asked:
            signal.setitimer(signal.ITIMER_REAL, 0)
