"""What every stage shares: its surroundings, and the report it returns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from distributed import Client

logger = logging.getLogger("och_dist")

Status = Literal["done", "nothing to do"]


@dataclass(frozen=True)
class Context:
    """Where a stage runs and whom it tells. ``client=None`` runs everything in this process.

    ``progress(description, total)`` returns a function to be called with the number of units just finished.
    """

    client: Client | None = None
    progress: Callable[[str, int], Callable[[int], None]] = field(default=lambda description, total: lambda count: None)


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

    def report(self, status: Status = "done", **facts: Any) -> Report:
        report = Report(self.stage, status, time.perf_counter() - self.started, facts)
        logger.info("%s: %s in %.2f s", self.stage, status, report.seconds)
        return report
