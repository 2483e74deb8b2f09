"""Figures over time in little space: series of a whole job whose buckets grow, short windows, thinned curves."""

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
        self.buckets = {kind: [0.0] * BUCKETS for kind in kinds}

    def _bucket(self, when: float) -> int:
        return max(0, int((when - self.start) / self.width))

    def _reach(self, now: float) -> int:
        while self._bucket(now) >= BUCKETS:
            self.width *= 2
            for values in self.buckets.values():
                pairs = zip(values[::2], values[1::2], strict=True)
                values[:] = [*map(sum, pairs), *[0.0] * (BUCKETS // 2)]
        return self._bucket(now)

    def add(self, now: float, seconds: float, amounts: Sequence[float]) -> None:
        """Spread an amount of each kind over the ``seconds`` before ``now`` in which they were worked on."""
        last = self._reach(now)
        first = max(last - MOST_SPREAD, self._bucket(now - seconds))
        share = 1 / (last - first + 1)
        for values, amount in zip(self.buckets.values(), amounts, strict=True):
            for place in range(first, last + 1):
                values[place] += amount * share

    def rates(self, now: float) -> dict[str, list[float]]:
        """Per second, bucket by bucket; the newest one, which is not over, is left out while there are others."""
        complete = max(1, self._reach(now))
        return {
            kind: [round(value / self.width, 3) for value in values[:complete]] for kind, values in self.buckets.items()
        }


class Window:
    """Recent amounts, each with its time and how long it took."""

    def __init__(self) -> None:
        self.entries: deque[tuple[float, float, float, float]] = deque(maxlen=WINDOW_LENGTH)

    def add(self, now: float, seconds: float, amount: float, other: float = 0.0) -> None:
        self.entries.append((now, seconds, amount, other))
        while self.entries[0][0] < now - WINDOW_SECONDS:
            self.entries.popleft()

    def _since(self, when: float) -> list[tuple[float, float, float, float]]:
        return [entry for entry in self.entries if entry[0] >= when]

    def rates(self, now: float) -> tuple[float, float]:
        """Amounts per second of late: over ten seconds, or several times what one takes if that is longer."""
        reach = min(WINDOW_SECONDS, max(10.0, 3 * self.mean_seconds(now)))
        recent = self._since(now - reach)
        if not recent:
            return 0.0, 0.0
        first = min(when - seconds for when, seconds, _, _ in recent)
        span = max(0.2, min(reach, now - first))
        return sum(entry[2] for entry in recent) / span, sum(entry[3] for entry in recent) / span

    def mean_seconds(self, now: float) -> float:
        """How long one takes of late."""
        recent = self._since(now - WINDOW_SECONDS)
        return sum(seconds for _, seconds, _, _ in recent) / len(recent) if recent else 0.0

    def quantiles(self, now: float, shares: Sequence[float]) -> list[float | None]:
        """Quantiles of the seconds that the recent entries took."""
        values = sorted(seconds for _, seconds, _, _ in self._since(now - WINDOW_SECONDS))
        return [values[min(len(values) - 1, int(share * len(values)))] if values else None for share in shares]


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """About CURVE_POINTS points of a curve, evenly spread, and always its last one."""
    kept = list(points[:: -(-len(points) // CURVE_POINTS) or 1])
    return [*kept, *points[-1:]] if kept[-1:] != list(points[-1:]) else kept
