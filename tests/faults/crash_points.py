"""Every mutating operation on the store, in every stage that writes: the process dies before or after it, the disk is
full from there on, or the answer gets lost. One more run, and everything is as if nothing had happened."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from och_dist.encode.stage import encode, publish
from och_dist.errors import OchError
from och_dist.ingest.stage import ingest
from och_dist.store.corpus import find_corpus
from och_dist.store.index import open_version
from och_dist.store.model import split_model_path
from och_dist.train.stage import train
from och_dist.upkeep.compaction import compact
from och_dist.upkeep.deletion import delete
from och_dist.upkeep.housekeeping import gc, status
from och_dist.upkeep.verification import verify
from tests.faults.ground import (
    BITS,
    CHUNK,
    DELETED,
    FIRST,
    GONE,
    MODELS,
    NOTHING,
    ROWS,
    Ground,
    Place,
    append,
    check_index,
    check_visible,
    compare,
)
from tests.faults.runner import Fault, Harm, NotDelivered
from tests.support.crashes import Crash, How, fail_at

HOWS: tuple[How, ...] = ("before", "after", "full", "lost")
SHORT = 40


@dataclass(frozen=True)
class Flow:
    """A stage, the state that it starts from, and what a reader sees before and after it."""

    name: str
    start: Callable[[], Place]
    run: Callable[[Place], object]
    rows: tuple[int, int]
    before: Mapping[int, bytes] | None = None
    after: Mapping[int, bytes] | None = None
    old_version: int | None = None


def flows(ground: Ground) -> list[Flow]:
    first, second = ground.files
    some, every = ground.live(FIRST), ground.live(ROWS)
    left = ground.live(ROWS, GONE)

    def unpublished() -> Place:
        place = ground.copy(ground.trained)
        encode(place.corpus, place.index, model=place.model(), chunk_rows=CHUNK, publish=False)
        return place

    def retired() -> Place:
        """Four versions of two models; the codes of the first go when only the newest version is kept."""
        place = ground.copy(ground.deleted)
        encode(place.corpus, place.index, model=place.model(1), chunk_rows=CHUNK)
        return place

    return [
        Flow(
            "ingest",
            ground.empty,
            lambda place: ingest([str(first)], place.corpus, chunk_rows=CHUNK),
            (0, FIRST),
        ),
        Flow(
            "train",
            lambda: _without_models(ground.copy(ground.trained)),
            lambda place: train(place.corpus, place.models, bits=BITS, method="lsh"),
            (FIRST, FIRST),
        ),
        Flow(
            "encode",
            lambda: ground.copy(ground.trained),
            lambda place: encode(place.corpus, place.index, model=place.model(), chunk_rows=CHUNK),
            (FIRST, FIRST),
            NOTHING,
            some,
        ),
        Flow("append", lambda: ground.copy(ground.encoded), lambda p: append(p, second), (FIRST, ROWS), some, every, 1),
        Flow(
            "delete",
            lambda: ground.copy(ground.appended),
            lambda place: delete(place.index, rows=DELETED),
            (ROWS, ROWS),
            every,
            left,
            2,
        ),
        Flow(
            "compact",
            lambda: ground.copy(ground.deleted),
            lambda place: compact(place.index, chunk_rows=2 * CHUNK),
            (ROWS, ROWS),
            left,
            left,
            2,
        ),
        Flow("publish", unpublished, _publish, (FIRST, FIRST), NOTHING, some),
        Flow(
            "gc",
            retired,
            lambda place: gc(place.index, keep=1),
            (ROWS, ROWS),
            ground.live(ROWS, GONE, model=1),
            ground.live(ROWS, GONE, model=1),
        ),
    ]


def _without_models(place: Place) -> Place:
    place.forget_models()
    return place


def _publish(place: Place) -> None:
    (job,) = status(place.index).facts["jobs"]
    publish(place.index, job["job"], corpus=place.corpus)


class CrashPoint:
    """Operation ``at`` of a flow goes wrong."""

    def __init__(self, ground: Ground, flow: Flow, at: int, how: How) -> None:
        self.ground, self.flow, self.at, self.how = ground, flow, at, how

    def deliver(self) -> None:
        self.place = self.flow.start()
        with fail_at(self.at, self.how) as operations, contextlib.suppress(Crash, OchError, OSError):
            self.flow.run(self.place)
        if not operations.delivered:
            raise NotDelivered(f"there are only {operations.count} operations")

    def check(self) -> None:
        flow, place = self.flow, self.place
        corpus = find_corpus(place.corpus)
        rows = 0 if corpus is None else corpus.rows
        if rows not in flow.rows:
            raise Harm(f"a reader of the corpus sees {rows} rows", half_visible=1)
        if rows:
            self.ground.check_corpus(place, rows)
        if flow.before is not None and flow.after is not None:
            check_visible(place.index, flow.before, flow.after)
        flow.run(place)
        self.ground.check_corpus(place, flow.rows[1])
        if flow.after is not None:
            check_index(place.index, flow.after)
        if flow.old_version is not None:
            compare(place.index, self.ground.live(open_version(place.index, flow.old_version).rows), flow.old_version)
        if flow.name == "train":
            trained = split_model_path(place.model())[1]
            if not any(self.ground.trained.model(number).endswith(trained) for number in range(MODELS)):
                raise Harm("another model came of it", wrong=ROWS)
            verify(place.models)


def faults(ground: Ground) -> Iterator[Fault]:
    points = []
    for flow in flows(ground):
        place = flow.start()
        with fail_at(0, "before") as operations:
            flow.run(place)
        for how in HOWS:
            # A full disk still deletes: behind the last creation it changes nothing.
            last = operations.count if how != "full" else operations.created
            points += [(flow, at, how) for at in range(1, last + 1)]
    step = 1 if ground.long else max(1, len(points) // SHORT)
    for flow, at, how in points[:: step + (step % 2 == 0)]:
        point = CrashPoint(ground, flow, at, how)
        yield Fault(f"{flow.name}, operation {at}, {how}", point.deliver, point.check)
