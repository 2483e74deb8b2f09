"""What every stage shares: its surroundings, and the report it returns."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from och_dist import events
from och_dist.cluster import check_memory

if TYPE_CHECKING:
    from distributed import Client

    from och_dist.store import Corpus

logger = logging.getLogger("och_dist")

WORKING_BYTES = 64 << 20

Status = Literal["done", "nothing to do"]


@dataclass(frozen=True)
class Context:
    """Where a stage runs and whom it tells. ``client=None`` runs everything in this process.

    ``progress(description, total)`` returns a function to be called with the number of units just finished.
    """

    client: Client | None = None
    progress: Callable[[str, int], Callable[[int], None]] = field(default=lambda description, total: lambda count: None)


class LateContext(Context):
    """A context that is opened when a stage first asks for it: a night with nothing to do starts no cluster."""

    _opened: Callable[[], Context]

    def __init__(self, opened: Callable[[], Context]) -> None:
        object.__setattr__(self, "_opened", functools.cache(opened))

    @property
    def client(self) -> Client | None:
        return self._opened().client

    @property
    def progress(self) -> Callable[[str, int], Callable[[int], None]]:
        return self._opened().progress


def require_room(corpus: Corpus, context: Context, what: str, *, extra_bytes: int = 0) -> None:
    """Refuse a pass over a corpus, one chunk at a time, that no worker has the memory for.

    A chunk is held as stored and decoded, with working space of its size, beside what the task itself keeps.
    """
    check_memory(context.client, 3 * corpus.chunk_bytes + extra_bytes + WORKING_BYTES, what)


@dataclass(frozen=True)
class Report:
    """The result of a stage as data: printed by the command line, kept by pipelines."""

    stage: str
    status: Status
    seconds: float
    facts: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"stage": self.stage, "status": self.status, "seconds": round(self.seconds, 3), **self.facts}


class Stopwatch:
    """Makes the report of a stage that started when this object was made."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.started = time.perf_counter()
        events.say("stage", name=stage)

    def report(self, status: Status = "done", **facts: Any) -> Report:
        report = Report(self.stage, status, time.perf_counter() - self.started, facts)
        events.say("stage_end", name=self.stage, status=status, seconds=round(report.seconds, 3))
        logger.info("%s: %s in %.2f s", self.stage, status, report.seconds)
        return report
