"""Figures over time in little space: whole-job series whose buckets grow, short windows, thinned curves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

BUCKETS = 240
MOST_SPREAD = 120
WINDOW_SECONDS = 120.0
WINDOW_LENGTH = 4096
CURVE_POINTS = 240


class RateSeries:
    """Amounts per second since ``start``, of several kinds, in at most BUCKETS buckets: full, they double in width."""

    def __init__(self, kinds: Sequence[str], start: float) -> None:
        self.start, self.width = start, 1.0
        self.buckets: dict[str, list[float]] = {kind: [] for kind in kinds}

    def _reach(self, place: int) -> int:
        while place >= BUCKETS:
            self.width *= 2
            place //= 2
            for kind, values in self.buckets.items():
                self.buckets[kind] = [sum(values[i : i + 2]) for i in range(0, len(values), 2)]
        for values in self.buckets.values():
            values.extend([0.0] * (place + 1 - len(values)))
        return place

    def add(self, now: float, seconds: float, amounts: dict[str, float]) -> None:
        """Spread amounts over the ``seconds`` before ``now`` in which they were worked on."""
        self._reach(int((now - self.start) / self.width))
        last = max(0, int((now - self.start) / self.width))
        first = max(0, last - MOST_SPREAD, int((now - seconds - self.start) / self.width))
        share = 1 / (last - first + 1)
        for kind, amount in amounts.items():
            values = self.buckets[kind]
            for place in range(first, last + 1):
                values[place] += amount * share

    def rates(self, now: float) -> dict[str, list[float]]:
        """Per second, bucket by bucket; the newest one, which is not over, is left out while there are others."""
        if now > self.start:
            self._reach(int((now - self.start) / self.width))
        complete = max(1, int((now - self.start) / self.width))
        return {kind: [round(value / self.width, 3) for value in values[:complete]] for kind, values in
                self.buckets.items()}  # fmt: skip


class Window:
    """Recent amounts, each with its time and how long it took."""

    def __init__(self) -> None:
        self.entries: deque[tuple[float, float, float, float]] = deque(maxlen=WINDOW_LENGTH)

    def add(self, now: float, seconds: float, amount: float, other: float = 0.0) -> None:
        self.entries.append((now, seconds, amount, other))
        while self.entries[0][0] < now - WINDOW_SECONDS:
            self.entries.popleft()

    def rates(self, now: float) -> tuple[float, float]:
        """Amounts per second of late: over ten seconds, or several times what one takes if that is longer."""
        recent = [entry for entry in self.entries if entry[0] >= now - WINDOW_SECONDS]
        if not recent:
            return 0.0, 0.0
        reach = min(WINDOW_SECONDS, max(10.0, 3 * self.mean_seconds(now)))
        recent = [entry for entry in recent if entry[0] >= now - reach]
        if not recent:
            return 0.0, 0.0
        first = min(when - seconds for when, seconds, _, _ in recent)
        span = max(0.2, min(reach, now - max(first, now - reach)))
        return sum(entry[2] for entry in recent) / span, sum(entry[3] for entry in recent) / span

    def mean_seconds(self, now: float) -> float:
        """How long one takes of late."""
        recent = [seconds for when, seconds, _, _ in self.entries if when >= now - WINDOW_SECONDS]
        return sum(recent) / len(recent) if recent else 0.0

    def quantiles(self, now: float, shares: Sequence[float]) -> list[float | None]:
        """Quantiles of the seconds that the recent entries took."""
        values = sorted(seconds for when, seconds, _, _ in self.entries if when >= now - WINDOW_SECONDS)
        return [values[min(len(values) - 1, int(share * len(values)))] if values else None for share in shares]


class Curve:
    """Points (x, y) in the order they come, thinned evenly once there are too many; the last one is always kept."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self.last: tuple[float, float] | None = None
        self.stride, self.count = 1, 0

    def add(self, x: float, y: float) -> None:
        self.last = (x, y)
        if self.count % self.stride == 0:
            self.points.append(self.last)
            if len(self.points) >= CURVE_POINTS:
                self.points, self.stride = self.points[::2], 2 * self.stride
        self.count += 1

    def all(self) -> list[tuple[float, float]]:
        if self.last is None or self.points[-1] == self.last:
            return list(self.points)
        return [*self.points, self.last]
