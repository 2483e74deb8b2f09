"""Several drivers and readers at once: one result, no version lost, and a reader sees each version whole."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from och_dist.encode.stage import encode
from och_dist.store.index import find_index, open_version
from och_dist.store.manifest import version_numbers
from och_dist.upkeep.verification import verify
from tests.faults.ground import CHUNK, FIRST, NOTHING, Ground, check_index, compare, race
from tests.faults.runner import Fault, Harm, NotDelivered
from tests.support.index_help import live_codes
from tests.support.races import before_commit

DRIVER = """
import sys
from och_dist.encode.stage import encode
print("ready", flush=True)
sys.stdin.readline()
encode(sys.argv[1], sys.argv[2], model=sys.argv[3], chunk_rows=int(sys.argv[4]))
"""


class Drivers:
    """Three processes that encode the same rows into one index, let go at the same moment."""

    def __init__(self, ground: Ground, *, models: tuple[int, int, int]) -> None:
        self.ground, self.models = ground, models

    def deliver(self) -> int:
        self.place = self.ground.copy(self.ground.trained)
        arguments = [[self.place.corpus, self.place.index, self.place.model(m), str(CHUNK)] for m in self.models]
        self.codes = race([[sys.executable, "-c", DRIVER, *words] for words in arguments])
        return len(self.codes)

    def check(self) -> None:
        if any(self.codes):
            raise AssertionError(f"drivers ended with {self.codes}")
        models = sorted(set(self.models))
        if find_index(self.place.index) is None:
            raise Harm("nothing was published", lost=FIRST)
        numbers = version_numbers(open_version(self.place.index).objects)
        if len(models) == 1 and numbers != [1]:
            raise AssertionError(f"versions {numbers} of one job")
        found = [live_codes(self.place.index, number) for number in numbers]
        expected = [self.ground.live(FIRST, model=model) for model in models]
        if any(codes not in expected for codes in found) or any(codes not in found for codes in expected):
            raise Harm("the versions are not those of the models", wrong=FIRST)
        verify(self.place.index)


class Overtaken:
    """A publisher whom another one overtakes at the last moment: both versions are there afterwards."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground

    def deliver(self) -> None:
        place = self.place = self.ground.copy(self.ground.trained)
        with before_commit(
            lambda: encode(place.corpus, place.index, model=place.model(1), chunk_rows=CHUNK)
        ) as waiting:
            encode(place.corpus, place.index, model=place.model(), chunk_rows=CHUNK)
        if waiting:
            raise NotDelivered("nobody published")

    def check(self) -> None:
        if find_index(self.place.index) is None or open_version(self.place.index).version != 2:
            raise Harm("a version was overwritten", lost=FIRST)
        compare(self.place.index, self.ground.live(FIRST, model=1), 1)
        check_index(self.place.index, self.ground.live(FIRST))


class Reader:
    """A reader who looks again and again while twelve versions are published."""

    publishes = 12

    def __init__(self, ground: Ground) -> None:
        self.ground = ground

    def deliver(self) -> None:
        place = self.place = self.ground.copy(self.ground.trained)
        allowed = [NOTHING, self.ground.live(FIRST), self.ground.live(FIRST, model=1)]
        over, self.wrong, self.seen = threading.Event(), list[str](), set[int]()

        def look() -> None:
            while not over.is_set() and not self.wrong:
                try:
                    index = find_index(place.index)
                    if index is not None:
                        self.seen.add(index.version)
                    if (NOTHING if index is None else live_codes(index)) not in allowed:
                        self.wrong.append("half a version")
                except Exception as error:
                    self.wrong.append(repr(error))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            for number in range(self.publishes):
                encode(place.corpus, place.index, model=place.model(number % 2), chunk_rows=CHUNK)
        finally:
            over.set()
            thread.join(20)
        if len(self.seen) < 3:
            raise NotDelivered(f"the reader came too late: {self.seen}")

    def check(self) -> None:
        if self.wrong:
            raise Harm(f"the reader saw {self.wrong}", half_visible=len(self.wrong))
        if open_version(self.place.index).version != self.publishes:
            raise AssertionError("a version is missing")
        check_index(self.place.index, self.ground.live(FIRST, model=(self.publishes - 1) % 2))


def faults(ground: Ground) -> Iterator[Fault]:
    groups: dict[str, Callable[[], Any]] = {
        "three drivers of one job": lambda: Drivers(ground, models=(0, 0, 0)),
        "three drivers of three models": lambda: Drivers(ground, models=(0, 1, 2)),
        "a publisher is overtaken": lambda: Overtaken(ground),
        "a reader during 12 publishes": lambda: Reader(ground),
    }
    for name, make in groups.items():
        one = make()
        yield Fault(name, one.deliver, one.check, seconds=150)
