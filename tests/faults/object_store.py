"""An S3 service whose answers get lost, which is slow, which denies, and at which several writers race: what is done
there ends as it does on a disk."""

from __future__ import annotations

import io
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from och_dist.encode.stage import encode, publish
from och_dist.errors import ConflictError, OchError
from och_dist.ingest.stage import ingest
from och_dist.store.index import open_version
from och_dist.store.manifest import version_numbers
from och_dist.store.objects import open_objects
from och_dist.upkeep.compaction import compact
from och_dist.upkeep.deletion import delete
from och_dist.upkeep.housekeeping import status
from och_dist.upkeep.verification import verify
from tests.faults.concurrency import DRIVER
from tests.faults.crash_points import CrashPoint, Flow, flows
from tests.faults.ground import CHUNK, FIRST, GONE, ROWS, Ground, Place, check_index, compare, race
from tests.faults.runner import Fault, Harm, NotDelivered, Skipped
from tests.support.index_help import live_codes
from tests.support.s3_service import BUCKET, App, OneAtATime, cut, failed, s3_service

Lapse = Literal["lost", "cut", "busy", "raced", "denied"]
LAPSES: tuple[Lapse, ...] = ("lost", "cut", "busy", "raced", "denied")
SHORT, EVERY = 9, 3


@dataclass(frozen=True)
class BucketPlace(Place):
    """The corpus, the index and the models of one job, in a bucket."""

    url: str = ""

    @property
    def corpus(self) -> str:
        return f"{self.url}/corpus"

    @property
    def index(self) -> str:
        return f"{self.url}/index"

    @property
    def models(self) -> str:
        return f"{self.url}/models"

    def model(self, number: int = 0) -> str:
        names = sorted(name for name in open_objects(self.models).folders("") if len(name) == 64)
        return f"{self.models}/{names[number]}"

    def forget_models(self) -> None:
        open_objects(self.models).delete_below("")


class BucketGround(Ground):
    """The reference job of another ground, copied into a bucket."""

    def __init__(self, local: Ground) -> None:
        super().__init__(local.folder, long=local.long)
        self.local = local

    def __getattribute__(self, name: str) -> Any:
        if name in ("vectors", "files", "trained", "codes", "encoded", "appended", "deleted", "fresh"):
            return getattr(self.local, name)
        return super().__getattribute__(name)

    def empty(self) -> BucketPlace:
        return BucketPlace(self.local.folder, f"s3://{BUCKET}/{uuid.uuid4().hex}")

    def copy(self, place: Place) -> BucketPlace:
        target = self.empty()
        objects, source = open_objects(target.url), open_objects(place.folder)
        for key, _, _ in source.list(""):
            objects.put(key, source.get(key))
        return target


class Lapses:
    """Something goes wrong with writing request number ``at``; ``kinds`` names what was written, in order."""

    def __init__(self, at: int = 0, how: Lapse = "lost") -> None:
        self.at, self.how = at, how
        self.kinds: list[str] = []
        self.delivered = False

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any], app: App) -> Iterable[bytes] | None:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if method not in ("PUT", "DELETE", "POST"):
            return None
        self.kinds.append(f"{method} {re.sub(r'[0-9a-f]{16,}|[0-9]+', '*', path)}")
        number = len(self.kinds)
        if not self.at or number < self.at or (number > self.at and self.how != "denied"):
            return None
        self.delivered = True
        if self.how == "busy":
            return failed(start, "503 Slow Down")
        if self.how == "denied":
            return failed(start, "403 Forbidden")
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        list(app(environ, lambda *args: None))
        environ["wsgi.input"] = io.BytesIO(body)
        if self.how == "raced":  # another writer did the same a moment before
            return None
        return cut(environ, start) if self.how == "cut" else failed(start)


class Service:
    """The service, and the bucket in it."""

    def __init__(self, ground: Ground, wrapper: OneAtATime) -> None:
        self.ground, self.wrapper = BucketGround(ground), wrapper

    @contextmanager
    def lapse(self, lapses: Lapses) -> Iterator[Lapses]:
        self.wrapper.trouble = lapses
        try:
            yield lapses
        finally:
            self.wrapper.trouble = None

    @cached_property
    def flows(self) -> list[Flow]:
        return flows(self.ground)

    def writes(self, flow: Flow) -> list[int]:
        """Numbers of the first request of each kind that a flow writes with."""
        place = flow.start()
        with self.lapse(Lapses()) as seen:
            flow.run(place)
        return sorted({kind: number for number, kind in reversed(list(enumerate(seen.kinds, 1)))}.values())


class LapsePoint(CrashPoint):
    """A lapse of the service while a flow runs; the check is that of a crash."""

    def __init__(self, service: Service, flow: Flow, at: int, how: Lapse) -> None:
        super().__init__(service.ground, flow, at, "lost")
        self.service, self.lapses = service, Lapses(at, how)

    def deliver(self) -> None:
        self.place = self.flow.start()
        with self.service.lapse(self.lapses):
            try:
                self.flow.run(self.place)
            except OchError:
                if self.lapses.how != "denied":  # everything else heals by itself
                    raise
        if not self.lapses.delivered:
            raise NotDelivered(f"there are only {len(self.lapses.kinds)} writes")


class Race:
    """Some threads do something at the same moment; errors of ours are results, others are not."""

    def __init__(self, service: Service, actions: list[Callable[[Place], Any]], start: Callable[[], Place]) -> None:
        self.service, self.actions, self.start = service, actions, start

    def deliver(self) -> None:
        place = self.place = self.start()
        self.results: list[Any] = [None] * len(self.actions)
        barrier = threading.Barrier(len(self.actions))

        def run(number: int) -> None:
            barrier.wait(20)
            try:
                self.results[number] = self.actions[number](place)
            except Exception as error:
                self.results[number] = error

        threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(self.actions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        if any(thread.is_alive() for thread in threads):
            raise AssertionError("a writer hangs")

    def refused(self, allowed: type[OchError] | None = None) -> list[int]:
        """Numbers of those that were refused, which only ``allowed`` may do."""
        found = [number for number, result in enumerate(self.results) if isinstance(result, Exception)]
        for number in found:
            if allowed is None or not isinstance(self.results[number], allowed):
                raise self.results[number]
        return found

    def check(self) -> None:
        raise NotImplementedError


class OneKey(Race):
    """Sixteen writers of four different contents for one key."""

    def __init__(self, service: Service) -> None:
        def put(number: int) -> Callable[[Place], Any]:
            return lambda place: open_objects(place.index).put("key", b"%d" % (number % 4))

        super().__init__(service, [put(number) for number in range(16)], service.ground.empty)

    def check(self) -> None:
        lost = self.refused(ConflictError)
        found = int(open_objects(self.place.index).get("key"))
        if self.results.count(True) != 1 or self.results.index(True) % 4 != found:
            raise Harm(f"{self.results.count(True)} writers have won", wrong=1)
        if sorted(lost) != [number for number in range(16) if number % 4 != found]:
            raise Harm("a writer of something else was not told", wrong=1)


class Drivers(Race):
    """Drivers that encode the same rows, each with its model."""

    def __init__(self, service: Service, models: tuple[int, ...]) -> None:
        def run(model: int) -> Callable[[Place], Any]:
            return lambda place: encode(place.corpus, place.index, model=place.model(model), chunk_rows=CHUNK)

        super().__init__(service, [run(model) for model in models], lambda: _trained(service))
        self.models = sorted(set(models))

    def check(self) -> None:
        self.refused()
        _check_versions(self.service.ground, self.place.index, self.models)


def _trained(service: Service) -> Place:
    return service.ground.copy(service.ground.trained)


def _check_versions(ground: Ground, index: str, models: list[int]) -> None:
    """One version for each model, each whole."""
    numbers = version_numbers(open_objects(index))
    found = [live_codes(index, number) for number in numbers]
    expected = [ground.live(FIRST, model=model) for model in models]
    if len(models) == 1 and numbers != [1]:
        raise AssertionError(f"versions {numbers} of one job")
    if any(codes not in expected for codes in found) or any(codes not in found for codes in expected):
        raise Harm("the versions are not those of the models", wrong=FIRST)
    verify(index)


class Ingests(Race):
    """The same file, three times at once."""

    def __init__(self, service: Service) -> None:
        file = str(service.ground.files[0])
        actions = [lambda place: ingest([file], place.corpus, chunk_rows=CHUNK)] * 3
        super().__init__(service, actions, service.ground.empty)

    def check(self) -> None:
        self.refused()
        self.service.ground.check_corpus(self.place, FIRST)


class Publishers(Race):
    """Three who publish the same finished job."""

    def __init__(self, service: Service) -> None:
        def finished() -> Place:
            place = _trained(service)
            encode(place.corpus, place.index, model=place.model(), chunk_rows=CHUNK, publish=False)
            return place

        def run(place: Place) -> Any:
            (job,) = status(place.index).facts["jobs"]
            return publish(place.index, job["job"], corpus=place.corpus)

        super().__init__(service, [run] * 3, finished)

    def check(self) -> None:
        self.refused()
        _check_versions(self.service.ground, self.place.index, [0])


class Deletes(Race):
    """Three who delete different rows, beside somebody who compacts: all rows go, and only these."""

    def __init__(self, service: Service, *, compacting: bool) -> None:
        def run(rows: str) -> Callable[[Place], Any]:
            return lambda place: delete(place.index, rows=rows)

        actions = [run(rows) for rows in ("3", "40-60", "55-70")]
        if compacting:
            actions.append(lambda place: compact(place.index, chunk_rows=2 * CHUNK))
        super().__init__(service, actions, lambda: service.ground.copy(service.ground.appended))

    def check(self) -> None:
        for number in self.refused(ConflictError):
            self.actions[number](self.place)
        ground = self.service.ground
        check_index(self.place.index, ground.live(ROWS, GONE))
        compare(self.place.index, ground.live(ROWS), 2)


class Processes:
    """Three drivers that are processes of their own."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def deliver(self) -> None:
        place = self.place = _trained(self.service)
        words = [sys.executable, "-c", DRIVER, place.corpus, place.index, place.model(), str(CHUNK)]
        self.codes = race([words] * 3)

    def check(self) -> None:
        if any(self.codes):
            raise AssertionError(f"drivers ended with {self.codes}")
        _check_versions(self.service.ground, self.place.index, [0])
        if open_version(self.place.index).rows != FIRST:
            raise Harm("rows are missing", lost=FIRST)


def faults(ground: Ground) -> Iterator[Fault]:
    for module in ("obstore", "moto.server", "boto3"):
        try:
            __import__(module)
        except ImportError:
            raise Skipped(f"{module} is not installed") from None
    with s3_service() as (_, wrapper):
        service = Service(ground, wrapper)
        races: dict[str, Callable[[], Any]] = {
            "16 writers of one key": lambda: OneKey(service),
            "three drivers of one job": lambda: Drivers(service, (0, 0, 0)),
            "three drivers of three models": lambda: Drivers(service, (0, 1, 2)),
            "three ingests of one file": lambda: Ingests(service),
            "three publishers of one job": lambda: Publishers(service),
            "three deletes": lambda: Deletes(service, compacting=False),
            "three deletes and a compaction": lambda: Deletes(service, compacting=True),
        }
        if ground.long:
            races["three drivers that are processes"] = lambda: Processes(service)
        for name, make in list(races.items())[:: 1 if ground.long else 3]:
            one = make()
            yield Fault(name, one.deliver, one.check, seconds=150)
        points = [(flow, at, how) for flow in service.flows for at in service.writes(flow) for how in LAPSES]
        step = EVERY if ground.long else len(points) // SHORT
        for flow, at, how in points[:: step + (step % len(LAPSES) == 0)]:  # so that all lapses take their turn
            point = LapsePoint(service, flow, at, how)
            yield Fault(f"{flow.name}, write {at}, {how}", point.deliver, point.check)
