"""Jobs, kills, damage, repairs and readers in any order that hypothesis thinks of.

The model is a dict of versions: what each of them must hold, row by row. After every step all versions that are there
hold exactly that, or (while something is damaged) say that they cannot be read.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from och_dist.encode.stage import CLAIMS, COLLECTED, encode, publish
from och_dist.errors import OchError
from och_dist.ingest.stage import ingest
from och_dist.store.corpus import find_corpus
from och_dist.store.index import Index, open_version
from och_dist.store.manifest import version_numbers
from och_dist.store.model import load_model, split_model_path
from och_dist.store.objects import TEMPORARY, open_objects
from och_dist.upkeep.compaction import compact
from och_dist.upkeep.deletion import delete
from och_dist.upkeep.housekeeping import gc, status
from och_dist.upkeep.verification import verify
from tests.faults.ground import Ground, Place
from tests.faults.runner import Fault, Harm, NotDelivered
from tests.support.crashes import Crash, How, fail_at
from tests.support.index_help import live_codes, without
from tests.upkeep.test_verify import damage

POOL, CHUNK = 150, 16
RUNS, SHORT_RUNS, BATCH = 200, 20, 20
HOWS: tuple[How, ...] = ("before", "after", "full", "lost")
DAMAGES = {"flip": "flip middle", "cut": "cut", "empty": "empty", "delete": "delete"}
MOST_DAMAGED = 3

Fate = tuple[int, How] | None


def fates(most: int) -> st.SearchStrategy[Fate]:
    """None, or where and how something fails that takes about ``most`` operations on the store."""
    return st.none() | st.tuples(st.integers(1, most), st.sampled_from(HOWS))


@dataclass(frozen=True)
class State:
    """What a version must hold: the first ``rows`` rows under a model, without those that are ``gone``."""

    model: int
    rows: int
    gone: frozenset[int] = frozenset()


class World:
    """What all runs share: vectors, two models, and the codes that these give."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.folder = ground.fresh()

    @cached_property
    def vectors(self) -> np.ndarray:
        rows = np.random.default_rng(11).normal(size=(POOL, 8)).astype(np.float32)
        rows[CHUNK : 2 * CHUNK] = 0
        return rows

    @cached_property
    def models(self) -> tuple[str, str]:
        return self.ground.trained.model(0), self.ground.trained.model(1)

    @cached_property
    def codes(self) -> list[np.ndarray]:
        parts = (split_model_path(model) for model in self.models)
        return [load_model(open_objects(folder), name).hasher.encode_block(self.vectors) for folder, name in parts]

    def file(self, start: int, stop: int) -> str:
        path = self.folder / f"{start}-{stop}.npy"
        if not path.exists():
            np.save(path, self.vectors[start:stop])
        return str(path)

    def live(self, state: State) -> dict[int, bytes]:
        return without(self.codes[state.model][: state.rows], set(state.gone))


class Reader:
    """Somebody who opened a version and reads it chunk by chunk while others work."""

    def __init__(self, index: Index, state: State) -> None:
        self.index, self.state, self.next = index, state, 0

    def read(self) -> dict[int, bytes]:
        """Row -> code of the next chunk."""
        chunk = self.index.chunks[self.next % len(self.index.chunks)]
        codes, rows, live = self.index.read(chunk), self.index.row_numbers(chunk), self.index.live(chunk)
        rows = np.arange(chunk.start, chunk.stop) if rows is None else rows
        places = range(len(codes)) if live is None else np.flatnonzero(live)
        self.next += 1
        return {int(rows[place]): codes[place].tobytes() for place in places}


class Machine(RuleBasedStateMachine):
    """A corpus and an index on disk, beside what they must hold."""

    world: World
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.place = Place(self.world.ground.fresh())
        self.rows = 0
        self.versions: dict[int, State] = {}
        self.damaged: dict[Path, bytes] = {}
        self.marked = False  # a collection was killed: until it is run again, what it marked is refused to others
        self.readers: list[Reader] = []

    @property
    def newest(self) -> State | None:
        return self.versions[max(self.versions)] if self.versions else None

    def _next(self, state: State) -> dict[int, State]:
        return {**self.versions, max(self.versions, default=0) + 1: state}

    # What people do

    @initialize(rows=st.integers(1, 60), model=st.integers(0, 1))
    def begin(self, rows: int, model: int) -> None:
        self.append(rows, None)
        self.encode(model, None)

    @precondition(lambda self: self.rows < POOL)
    @rule(rows=st.integers(1, 40), fate=fates(8))
    def append(self, rows: int, fate: Fate) -> None:
        stop = min(POOL, self.rows + rows)
        if self.rows >= CHUNK and stop <= 2 * CHUNK:  # nothing but zeros, as another file may have been: taken once
            stop = 2 * CHUNK + 1
        path = self.world.file(self.rows, stop)

        def action() -> None:
            ingest([path], self.place.corpus, chunk_rows=CHUNK, append=bool(self.rows))

        done = self._try(action, fate)
        try:
            corpus = find_corpus(self.place.corpus)
            found = 0 if corpus is None else corpus.rows
        except OchError:
            self._may_fail()
            return
        if found not in (self.rows, stop) or (done and found != stop):
            raise Harm(f"a reader of the corpus sees {found} rows", half_visible=1)
        self.rows = found

    @rule(model=st.integers(0, 1), fate=fates(16))
    def encode(self, model: int, fate: Fate) -> None:
        newest = self.newest
        after = self.versions
        if newest is None or (newest.model, newest.rows) != (model, self.rows):
            after = self._next(State(model, self.rows, frozenset() if newest is None else newest.gone))
        self._act(lambda: self._encode(model), after, fate)

    @rule(model=st.integers(0, 1), fate=fates(12))
    def encode_without_publishing(self, model: int, fate: Fate) -> None:
        """With the other model where there is nothing to do for this one."""
        if self.newest == State(model, self.rows, self.newest.gone if self.newest else frozenset()):
            model = 1 - model
        self._act(lambda: self._encode(model, publish=False), self.versions, fate)

    def _encode(self, model: int, *, publish: bool = True) -> None:
        path = self.world.models[model]
        encode(self.place.corpus, self.place.index, model=path, chunk_rows=CHUNK, publish=publish)

    def _waiting(self) -> list[dict[str, Any]]:
        """Jobs that no version lists."""
        try:
            jobs = status(self.place.index).facts["jobs"]
        except OchError:
            self._may_fail()
            return []
        return sorted((job for job in jobs if "finished" in job["state"]), key=lambda job: job["job"])

    @precondition(lambda self: self.versions)
    @rule(number=st.integers(0, 5), fate=fates(10))
    def publish(self, number: int, fate: Fate) -> None:
        """Jobs of rows that do not fit the newest version are refused, and so are unfinished ones."""
        jobs = [job for job in self._waiting() if job["kind"] == "encode"]
        if not jobs or self.newest is None:
            return
        job = jobs[number % len(jobs)]
        model = next(m for m, path in enumerate(self.world.models) if path.endswith(job["model"]))
        after = self._next(State(model, job["rows"][1], self.newest.gone))
        index, corpus = self.place.index, self.place.corpus
        self._act(lambda: publish(index, job["job"], corpus=corpus), after, fate, optional=True)

    @precondition(lambda self: self.versions)
    @rule(rows=st.frozensets(st.integers(0, POOL - 1), min_size=1, max_size=20), whole=st.booleans(), fate=fates(2))
    def delete(self, rows: frozenset[int], whole: bool, fate: Fate) -> None:
        """Some rows, or all between two."""
        state = self.newest
        assert state is not None
        wanted = {row % state.rows for row in rows}
        wanted = set(range(min(wanted), max(wanted) + 1)) if whole else wanted
        after = self.versions
        if not wanted <= state.gone:
            after = self._next(replace(state, gone=state.gone | wanted))
        self._act(lambda: delete(self.place.index, rows=sorted(wanted)), after, fate)

    @precondition(lambda self: self.versions)
    @rule(chunk_rows=st.sampled_from([8, 16, 50]), fate=fates(16))
    def compact(self, chunk_rows: int, fate: Fate) -> None:
        state = self.newest
        assert state is not None
        self._act(
            lambda: compact(self.place.index, chunk_rows=chunk_rows), self._next(state), fate, optional=True, sure=True
        )

    @precondition(lambda self: self.versions)
    @rule(keep=st.integers(1, 4), fate=fates(12))
    def gc(self, keep: int, fate: Fate) -> None:
        after = {number: self.versions[number] for number in sorted(self.versions)[-keep:]}
        self._collect(lambda: gc(self.place.index, keep=keep), after, fate)

    @precondition(lambda self: self.versions)
    @rule(fate=fates(8))
    def gc_of_jobs(self, fate: Fate) -> None:
        jobs = [job["job"] for job in self._waiting()]
        self._collect(lambda: gc(self.place.index, keep=99, jobs=sorted(set(jobs))), self.versions, fate)

    def _collect(self, action: Callable[[], object], after: dict[int, State], fate: Fate) -> None:
        self.marked = not self._act(action, after, fate)

    # What happens to them

    @precondition(lambda self: self.versions and len(self.damaged) < MOST_DAMAGED)
    @rule(choice=st.integers(0, 10_000), how=st.sampled_from(sorted(DAMAGES)))
    def damage(self, choice: int, how: str) -> None:
        path = self._objects()[choice % len(self._objects())]
        if path in self.damaged or (how == "delete" and path.parent.name == "versions") or not path.stat().st_size:
            return
        required = self._required(path)
        self.damaged[path] = path.read_bytes()
        damage(path, "flip first" if (how, path.suffix) == ("flip", ".json") else DAMAGES[how])
        if required is not None and _passes(lambda: verify(required)):
            raise Harm(f"verify does not see it: {path.relative_to(self.place.folder)} {how}")
        self._look_at_all()

    def _objects(self) -> list[Path]:
        """Everything of which a corpus and an index consist; of their manifests the newest."""
        found = []
        for store in (self.place.corpus, self.place.index):
            found += sorted(Path(store, "versions").iterdir())[-1:]
            for folder in ("segments", "tombstones", "models"):
                found += sorted(path for path in Path(store, folder).rglob("*") if path.is_file())
        skipped = {TEMPORARY, CLAIMS, COLLECTED, "provenance.json"}
        return [path for path in found if not skipped & set(path.parts)]

    def _required(self, path: Path) -> str | None:
        """The store whose newest version cannot do without an object; None if there is none."""
        store = self.place.index if Path(self.place.index) in path.parents else self.place.corpus
        key = path.relative_to(store).as_posix()
        try:
            if store == self.place.index:
                index = open_version(store)
                folders = [part.job.folder for part in index.segments]
                keys = [f"models/{index.model}", *(entry.key for entry in index.tombstones), "versions"]
            else:
                corpus = find_corpus(store)
                folders = [f"segments/{part.id}" for part in (corpus.segments if corpus else ())]
                keys = ["versions"]
        except OchError:
            self._may_fail()
            return None
        inside = any(key.startswith(f"{folder}/") for folder in folders) and "/done/" not in key
        return store if inside or any(key == other or key.startswith(f"{other}/") for other in keys) else None

    @precondition(lambda self: self.versions)
    @rule()
    def verify(self) -> None:
        for store in (self.place.corpus, self.place.index):
            try:
                verify(store)
            except OchError:
                self._may_fail()

    @precondition(lambda self: self.versions)
    @rule(fate=fates(16))
    def repair(self, fate: Fate) -> None:
        state = self.newest
        assert state is not None
        done = self._act(
            lambda: verify(self.place.index, repair=True), self._next(state), fate, optional=True, sure=True
        )
        if done and live_codes(self.place.index) != self.world.live(state):
            raise Harm("a repaired index is not what it was", wrong=state.rows)

    @precondition(lambda self: self.damaged)
    @rule()
    def restore(self) -> None:
        """Bring back from a copy whatever is damaged and still there."""
        for path, data in self.damaged.items():
            record, folder = path.parent.name == "done", self._segment(path)
            gone = folder is not None and not any(part.is_file() for part in folder.rglob("*"))
            if path.exists() or not (record or gone):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        self.damaged = {}
        self._look_at_all()
        self.verify()

    def _segment(self, path: Path) -> Path | None:
        """The segment of the index that an object is of; those of a corpus are never collected."""
        inside = path.is_relative_to(Path(self.place.index, "segments"))
        return self.place.folder.joinpath(*path.relative_to(self.place.folder).parts[:3]) if inside else None

    # Who looks on

    @precondition(lambda self: self.versions and len(self.readers) < 3)
    @rule(age=st.integers(0, 3))
    def open_reader(self, age: int) -> None:
        number = sorted(self.versions)[-1 - age % len(self.versions)]
        try:
            self.readers.append(Reader(open_version(self.place.index, number), self.versions[number]))
        except OchError:
            self._may_fail()

    @precondition(lambda self: self.readers)
    @rule()
    def read_on(self) -> None:
        for reader in self.readers:
            self._read(reader)

    def _read(self, reader: Reader) -> None:
        if not reader.index.chunks:  # all rows are deleted, and none is stored
            return
        try:
            found = reader.read()
        except OchError:
            if reader.index.version in self.versions:
                self._may_fail()
            return
        expected = self.world.live(reader.state)
        if wrong := sum(expected.get(row) != code for row, code in found.items()):
            raise Harm(f"a reader of version {reader.index.version} sees {wrong} wrong rows", wrong=wrong)

    # What must be so

    def _may_fail(self) -> None:
        """To be called while an error of ours is handled, or where a command refused: only damage excuses it."""
        if not self.damaged:
            raise

    def _try(self, action: Callable[[], object], fate: Fate, *, optional: bool = False) -> bool:
        """Whether an action came to its end; only faults excuse that it did not."""
        try:
            if fate is None:
                action()
            else:
                with fail_at(*fate):
                    action()
        except (Crash, OSError):
            if fate is None:
                raise
            return False
        except OchError:
            if fate is None and not optional and not self.marked:
                self._may_fail()
            return False
        return True

    def _act(
        self,
        action: Callable[[], object],
        after: dict[int, State],
        fate: Fate,
        *,
        optional: bool = False,
        sure: bool = False,
    ) -> bool:
        """Do something that leads to the versions ``after``, or leaves those that were: nothing between, but for a
        collection that was stopped. What is ``optional`` may leave them by choice, and be refused unless ``sure``."""
        before = self.versions
        done = self._try(action, fate, optional=optional and not sure)
        numbers = set(version_numbers(open_objects(self.place.index)))
        known = {**before, **after}
        if not before.keys() & after.keys() <= numbers <= known.keys():
            raise Harm(f"versions {sorted(numbers)} of {sorted(known)}", lost=1)
        if done and numbers != after.keys() and not (optional and numbers == before.keys()):
            raise Harm(f"versions {sorted(numbers)}, expected {sorted(after)}", lost=1)
        self.versions = {number: known[number] for number in sorted(numbers)}
        self._look_at_all()
        return done

    def _look_at_all(self) -> None:
        for number, state in self.versions.items():
            try:
                found = live_codes(self.place.index, number)
            except OchError:
                self._may_fail()
                continue
            expected = self.world.live(state)
            if found != expected:
                lost = len(expected.keys() - found.keys())
                wrong = sum(expected.get(row) != code for row, code in found.items())
                raise Harm(f"version {number}: {lost} rows lost, {wrong} wrong", lost=lost, wrong=wrong)

    def teardown(self) -> None:
        type(self).runs += 1
        try:
            self._end()
        finally:
            shutil.rmtree(self.place.folder, ignore_errors=True)

    def _end(self) -> None:
        """One more run, and everything is as if nothing had happened."""
        if self.rows:
            self.restore()
            if self.versions:
                self.gc(99, None)
            self.encode(0 if self.newest is None else self.newest.model, None)
            self.gc(1, None)
            self.verify()


def _passes(action: Callable[[], object]) -> bool:
    try:
        action()
    except OchError:
        return False
    return True


class Runs:
    """Some runs of the machine from one seed."""

    def __init__(self, world: World, count: int, number: int, steps: int) -> None:
        self.world, self.count, self.number, self.steps = world, count, number, steps

    def deliver(self) -> int:
        machine = seed(self.number)(type("Run", (Machine,), {"world": self.world, "runs": 0}))
        chosen = settings(
            max_examples=self.count,
            stateful_step_count=self.steps,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),  # to shrink a run on real stores takes minutes
        )
        run_state_machine_as_test(machine, settings=chosen)
        if machine.runs < self.count:
            raise NotDelivered(f"{machine.runs} runs of {self.count}")
        return self.count

    def check(self) -> None:
        """Every run has looked for itself."""


def faults(ground: Ground) -> Iterator[Fault]:
    world, draw = World(ground), random.Random(None if ground.long else 5)
    total, steps = (RUNS, 25) if ground.long else (SHORT_RUNS, 12)
    for _ in range(total // BATCH):
        number = draw.randrange(1 << 32)
        runs = Runs(world, BATCH, number, steps)
        yield Fault(f"{BATCH} runs of {steps} steps from seed {number}", runs.deliver, runs.check, seconds=240)
