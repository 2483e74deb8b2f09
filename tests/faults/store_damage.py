"""A flipped bit, a cut, an emptied and a lost object, of every kind that a store holds: found, named, never read as
something else, and mended by one command or a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from och_dist.encode.stage import encode, publish
from och_dist.errors import OchError
from och_dist.ingest.stage import ingest
from och_dist.store.corpus import open_corpus
from och_dist.store.index import open_version
from och_dist.upkeep.housekeeping import gc, status
from och_dist.upkeep.verification import verify
from tests.faults.ground import CHUNK, FIRST, GONE, NOTHING, ROWS, Ground, Place, append, check_index, check_visible
from tests.faults.runner import Fault, Harm, NotDelivered
from tests.upkeep.test_verify import damage

HOWS = {"flip": "flip middle", "cut": "cut", "empty": "empty", "delete": "delete"}
Finder = Callable[[Place], Path]


@dataclass(frozen=True)
class Target:
    """One kind of object: where it lies, what must notice, and how to mend it when a copy need not be brought."""

    name: str
    find: Finder
    notice: Callable[[Place], object]
    mend: Mapping[str, Callable[[Place], object]]


def _vectors(place: Place) -> Path:
    return Path(place.corpus, open_corpus(place.corpus).segments[0].prefix)


def _segment(place: Place) -> Path:
    return Path(place.index, open_version(place.index).segments[0].job.folder)


def _newest(path: str) -> Path:
    return sorted(Path(path, "versions").iterdir())[-1]


def _encode(place: Place) -> None:
    encode(place.corpus, place.index, model=place.model(), chunk_rows=CHUNK)


def published(ground: Ground) -> list[Target]:
    """Objects that published versions of a corpus and an index with deleted rows consist of."""
    again = {"delete": lambda place: append(place, ground.files[1])}
    return [
        Target("corpus chunk", lambda p: _vectors(p) / "c" / "2" / "0", lambda p: verify(p.corpus), {}),
        Target("corpus manifest", lambda p: _newest(p.corpus), lambda p: verify(p.corpus), again),
        Target("corpus zarr.json", lambda p: _vectors(p) / "zarr.json", lambda p: verify(p.corpus), {}),
        Target("code chunk", lambda p: _segment(p) / "codes" / "c" / "2" / "0", lambda p: verify(p.index), {}),
        Target("index manifest", lambda p: _newest(p.index), lambda p: verify(p.index), {}),
        Target("zarr.json", lambda p: _segment(p) / "codes" / "zarr.json", lambda p: verify(p.index), {}),
        Target("model", lambda p: next(Path(p.index, "models").rglob("projection.npy")), lambda p: verify(p.index), {}),
        Target("deleted rows", lambda p: _bitmap(p), lambda p: verify(p.index), {}),
    ]


def _bitmap(place: Place) -> Path:
    return Path(place.index, open_version(place.index).tombstones[0].key)


class Damage:
    """One object of a published index is damaged."""

    def __init__(self, ground: Ground, target: Target, how: str) -> None:
        self.ground, self.target, self.how = ground, target, how

    def deliver(self) -> None:
        self.place = self.ground.copy(self.ground.deleted)
        self.path = self.target.find(self.place)
        self.copy = self.path.read_bytes()
        # Some bytes of a layout are names of settings that have their default value: changing them changes nothing.
        damage(self.path, "flip first" if (self.how, self.path.name) == ("flip", "zarr.json") else HOWS[self.how])

    def check(self) -> None:
        self._look()
        if self.how in self.target.mend:
            self.target.mend[self.how](self.place)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(self.copy)
        self.ground.check_corpus(self.place, ROWS)
        check_index(self.place.index, self.ground.live(ROWS, GONE))

    def _look(self) -> None:
        """Verify finds it, and what can be read is right: an older version where the newest manifest is gone."""
        noticed = _refused(self.target.notice, self.place)
        lost_manifest = self.how == "delete" and "manifest" in self.target.name
        if not noticed and not lost_manifest:
            raise Harm(f"verify does not see it: {self.target.name} {self.how}")
        try:
            rows = open_corpus(self.place.corpus).rows
            self.ground.check_corpus(self.place, rows)
        except OchError:
            rows = 0
        if rows not in (0, ROWS) and not lost_manifest:
            raise Harm(f"a reader of the corpus sees {rows} rows", half_visible=1)
        states = [self.ground.live(ROWS, GONE)]
        if lost_manifest:
            states.append(self.ground.live(ROWS))
        try:
            check_visible(self.place.index, *states)
        except OchError:
            return


def _refused(action: Callable[[Place], object], place: Place) -> bool:
    try:
        action(place)
    except OchError:
        return True
    return False


class UnpublishedDamage:
    """An object of a finished job that waits to be published is damaged: publishing refuses, another run mends."""

    def __init__(self, ground: Ground, what: str, how: str) -> None:
        self.ground, self.what, self.how = ground, what, how

    def deliver(self) -> None:
        self.place = self.ground.copy(self.ground.trained)
        encode(self.place.corpus, self.place.index, model=self.place.model(), chunk_rows=CHUNK, publish=False)
        (path,) = Path(self.place.index, "segments").glob(f"*/{self.what}")
        damage(path, HOWS[self.how])

    def check(self) -> None:
        index, corpus = self.place.index, self.place.corpus
        (job,) = status(index).facts["jobs"]
        if _refused(lambda place: publish(index, job["job"], corpus=corpus), self.place):
            check_visible(index, NOTHING)
            if self.how != "delete" or self.what.startswith("codes"):
                gc(index, jobs=[job["job"]])
            _encode(self.place)
        try:
            check_index(index, self.ground.live(FIRST))
        except OchError as error:
            raise Harm(f"a damaged chunk was published: {error}", lost=CHUNK) from None


class DamagedInput:
    """A damaged chunk of the corpus: no code is made of it."""

    def __init__(self, ground: Ground, how: str) -> None:
        self.ground, self.how = ground, how

    def deliver(self) -> None:
        self.place = self.ground.copy(self.ground.trained)
        self.path = _vectors(self.place) / "c" / "1" / "0"
        self.copy = self.path.read_bytes()
        damage(self.path, HOWS[self.how])

    def check(self) -> None:
        if not _refused(_encode, self.place):
            check_index(self.place.index, self.ground.live(FIRST))
            raise Harm("codes of a damaged chunk were published", wrong=CHUNK)
        check_visible(self.place.index, NOTHING)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(self.copy)
        _encode(self.place)
        check_index(self.place.index, self.ground.live(FIRST))


class ZeroRows:
    """A chunk of zeros, which Zarr would rather not store, is lost: it must not be read as zeros."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground

    def deliver(self) -> None:
        self.place = Place(self.ground.fresh())
        ingest([str(self.ground.files[0])], self.place.corpus, chunk_rows=CHUNK)
        path = _vectors(self.place) / "c" / "1" / "0"
        if not path.exists():
            raise Harm("a chunk of zeros is not stored: nobody could tell that it is lost", lost=CHUNK)
        if any(path.read_bytes()[:-4]):
            raise NotDelivered("the chunk is not zero")
        path.unlink()

    def check(self) -> None:
        if not _refused(lambda place: open_corpus(place.corpus).read(0, FIRST), self.place):
            raise Harm("a lost chunk was read as zeros", wrong=CHUNK)


def faults(ground: Ground) -> Iterator[Fault]:
    for how in HOWS:
        for target in published(ground):
            one = Damage(ground, target, how)
            yield Fault(f"{target.name}, {how}", one.deliver, one.check)
        for what in ("done/00000001.json", "codes/c/1/0"):
            waiting = UnpublishedDamage(ground, what, how)
            yield Fault(f"{what} of a job, {how}", waiting.deliver, waiting.check)
        source = DamagedInput(ground, how)
        yield Fault(f"corpus chunk that is encoded, {how}", source.deliver, source.check)
    zeros = ZeroRows(ground)
    yield Fault("chunk of zeros, delete", zeros.deliver, zeros.check)
