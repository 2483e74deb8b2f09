"""Deliver faults one after the other, look at what became of the data, and count.

A fault counts when it was really delivered; it is survived when its check finds the data as they must be. What is
wrong with them is told by :class:`Harm`. A fault that takes longer than its deadline hangs, and is not survived.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

SECONDS = 60.0


class Harm(AssertionError):
    """The data are not as they must be: rows that are gone, rows with other codes, half a version that can be seen."""

    def __init__(self, text: str, *, lost: int = 0, wrong: int = 0, half_visible: int = 0) -> None:
        super().__init__(text)
        self.lost, self.wrong, self.half_visible = lost, wrong, half_visible


class NotDelivered(Exception):
    """The fault could not be delivered, so it proves nothing."""


class Skipped(Exception):
    """A whole group cannot run here; the text says why."""


class Hang(BaseException):
    """The deadline of a fault has passed. Not an :class:`Exception`, so that nothing on the way takes it for one."""


@dataclass(frozen=True)
class Fault:
    """One fault, or several of a kind where ``deliver`` returns their number."""

    name: str
    deliver: Callable[[], int | None]
    check: Callable[[], Any]
    seconds: float = SECONDS


@dataclass
class Tally:
    """What became of the faults of a group."""

    group: str
    injected: int = 0
    survived: int = 0
    lost: int = 0
    wrong: int = 0
    half_visible: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    skipped: str = ""

    def add(self, other: Tally) -> None:
        for name in ("injected", "survived", "lost", "wrong", "half_visible", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failures += other.failures

    @property
    def sound(self) -> bool:
        return self.injected == self.survived and not (self.lost or self.wrong or self.half_visible or self.failures)

    def line(self) -> str:
        return (
            f"{self.injected} faults injected, {self.survived} survived, {self.lost} rows lost, "
            f"{self.wrong} rows wrong, {self.half_visible} half-visible"
        )


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise :class:`Hang` in the main thread when time is up; an alarm that somebody else set goes on afterwards."""

    def ring(number: int, frame: Any) -> None:
        raise Hang(f"nothing came of it within {seconds:.0f} s")

    started = time.monotonic()
    old_handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - started)), interval)


def run_fault(fault: Fault, group: str) -> Tally:
    tally, started = Tally(group), time.monotonic()
    try:
        with deadline(fault.seconds):
            delivered = fault.deliver()
            tally.injected = 1 if delivered is None else delivered
            fault.check()
        tally.survived = tally.injected
    except NotDelivered as error:
        tally.failures.append(f"{group}: {fault.name}: not delivered: {error}")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a failure of pytest and a hang are not Exceptions
        tally.injected = max(1, tally.injected)
        tally.survived = tally.injected - 1
        if isinstance(error, Harm):
            tally.lost, tally.wrong, tally.half_visible = error.lost, error.wrong, error.half_visible
        where = "" if isinstance(error, Harm) else "\n" + "".join(traceback.format_exception(error))[-3000:]
        tally.failures.append(f"{group}: {fault.name}: {type(error).__name__}: {error}{where}")
    tally.seconds = time.monotonic() - started
    return tally


def run_group(group: str, faults: Iterable[Fault]) -> Tally:
    """Deliver every fault of a group; what it takes to prepare them counts as time, too."""
    tally, started = Tally(group), time.monotonic()
    try:
        for fault in faults:
            tally.add(run_fault(fault, group))
    except Skipped as reason:
        tally.skipped = str(reason)
    tally.seconds = time.monotonic() - started
    return tally


def table(tallies: Iterable[Tally]) -> str:
    """A table with a row for each group."""
    head = ("group", "injected", "survived", "lost", "wrong", "half-visible", "seconds")
    rows = [
        (t.group, t.injected, t.survived, t.lost, t.wrong, t.half_visible, f"{t.seconds:.1f}")
        if not t.skipped
        else (t.group, "skipped: " + t.skipped, "", "", "", "", "")
        for t in tallies
    ]
    lines = [f"{head[0]:<14}" + "".join(f"{name:>14}" for name in head[1:])]
    for first, *rest in rows:
        lines.append(
            f"{first:<14}" + ("".join(f"{value!s:>14}" for value in rest) if rest[1] != "" else f"  {rest[0]}")
        )
    return "\n".join(lines)
