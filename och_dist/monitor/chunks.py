"""The tasks of one graph by state, and as a map of a bounded number of cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

STATES = ("waiting", "running", "done", "inherited", "failed")
WAITING, RUNNING, DONE, INHERITED, FAILED = range(len(STATES))
CELLS = 600


class Chunks:
    """The state of each chunk, one byte each. Tasks fill the places that chunks of earlier runs leave, in order."""

    def __init__(self, name: str, count: int, inherited: Sequence[Sequence[int]] = (), now: float = 0.0) -> None:
        self.name, self.started = name, now
        self.ended: float | None = None
        self.rows, self.nbytes = 0, 0
        self.total = count + sum(stop - start for start, stop in inherited)
        self.states = np.zeros(self.total, np.uint8)
        for start, stop in inherited:
            self.states[start:stop] = INHERITED
        self.places = np.flatnonzero(self.states != INHERITED)
        self.counted = bytearray(self.total)
        self.by_worker: dict[str, set[int]] = {}

    @property
    def counts(self) -> dict[str, int]:
        """Chunks by state."""
        return dict(zip(STATES, np.bincount(self.states, minlength=len(STATES)).tolist(), strict=True))

    def _place(self, number: int) -> int | None:
        """Where the chunk of a task lies; None for a task that does not belong here."""
        return int(self.places[number]) if 0 <= number < len(self.places) else None

    def begin(self, number: int, worker: str) -> None:
        place = self._place(number)
        if place is not None and self.ended is None and self.states[place] != DONE:
            self.states[place] = RUNNING
            self.by_worker.setdefault(worker, set()).add(place)

    def end(self, number: int, worker: str, state: str) -> bool:
        """Whether this is the first end of a chunk that is done."""
        place = self._place(number)
        if place is None:
            return False
        self.by_worker.get(worker, set()).discard(place)
        if state == "done":
            self.states[place] = DONE
            first, self.counted[place] = not self.counted[place], True
            return first
        if self.states[place] in (WAITING, RUNNING):  # it may wait again in the meantime, with the graph given up
            self.states[place] = FAILED if state == "failed" else WAITING
        return False

    def lose(self, worker: str) -> int:
        """Chunks that a lost worker had under way wait again; how many they were."""
        lost = [place for place in self.by_worker.pop(worker, set()) if self.states[place] == RUNNING]
        self.states[lost] = WAITING
        return len(lost)

    def close(self, now: float, *, done: bool) -> None:
        """The driver has all results, or gave up: what it says counts, events may have been lost."""
        self.ended = now
        self.by_worker.clear()
        self.states[self.states == RUNNING] = WAITING
        if done:
            self.states[self.states != INHERITED] = DONE

    def average(self, now: float) -> tuple[float, float]:
        """Rows and bytes per second since the tasks were given out."""
        seconds = max(0.001, (now if self.ended is None else self.ended) - self.started)
        return self.rows / seconds, self.nbytes / seconds

    def document(self) -> dict[str, Any]:
        """Counts by state, and the map: per cell how many of its chunks are in each state."""
        return {
            "task": self.name,
            "total": self.total,
            "over": self.ended is not None,
            "counts": self.counts,
            "states": list(STATES),
            "cells": self._cells(min(CELLS, self.total)),
        }

    def _cells(self, cells: int) -> list[Any]:
        """A digit (the state) for a cell whose chunks are all alike, otherwise the five counts."""
        cell = np.arange(self.total) * cells // max(1, self.total)
        table = np.bincount(cell * len(STATES) + self.states, minlength=cells * len(STATES)).reshape(cells, len(STATES))
        return [row.index(max(row)) if max(row) == sum(row) else row for row in table.tolist()]
