"""Progress of long stages: a bar on a terminal, one log line per 10 % elsewhere, always on stderr."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator

logger = logging.getLogger("och_dist")

Advance = Callable[[int], None]
Progress = Callable[[str, int], Advance]


def log_progress(description: str, total: int) -> Advance:
    """Count units and log each tenth of ``total``; more than ``total`` (a task that ran twice) is not counted."""
    lock, done = threading.Lock(), 0

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            before, done = done, min(total, done + count)
            tenth = 10 * done // total if total else 10
            if tenth > (10 * before // total if total else 10) and total:
                logger.info("%s: %d %% (%s of %s)", description, 10 * tenth, f"{done:,}", f"{total:,}")

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
