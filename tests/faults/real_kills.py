"""kill -9 of drivers and workers of real commands, at moments that a seed chooses; one more run, and all is there."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from och_dist.store.corpus import find_corpus
from tests.faults.ground import NOTHING, Ground, check_visible
from tests.faults.processes import (
    CHUNK,
    LOCAL,
    MORE,
    ROWS,
    Field,
    Scene,
    Words,
    await_progress,
    check_codes,
    check_corpus,
    ended,
    remember_workers,
    stored,
)
from tests.faults.runner import Fault, Harm, NotDelivered

Work = Literal["ingest", "ingest more", "encode", "encode more"]
HERE: Words = ("--workers", 0)
SECONDS = 240.0


@dataclass(frozen=True)
class Command:
    """A real command on a copy of what it starts from; it stores about ``objects`` objects in ``target``."""

    work: Work
    field: Field
    folder: Path

    @property
    def more(self) -> bool:
        return self.work.endswith("more")

    @property
    def target(self) -> Path:
        return self.folder / ("corpus" if self.work.startswith("ingest") else "index")

    @property
    def objects(self) -> int:
        chunks = (MORE if self.more else ROWS) // CHUNK
        return chunks if self.work.startswith("ingest") else 2 * chunks

    @property
    def words(self) -> Words:
        if self.work.startswith("encode"):
            return self.field.encode(self.target, corpus=int(self.more))
        append = ("--append",) if self.more else ()
        return "ingest", self.field.files[int(self.more)], self.target, "--chunk-rows", CHUNK, *append

    def prepare(self) -> None:
        if self.more:
            source = self.field.corpora[0] if self.work.startswith("ingest") else self.field.index
            shutil.copytree(source, self.target)

    def check_seen(self) -> None:
        """Whoever looks now sees what was there before, or all of it."""
        rows = (ROWS if self.more else 0, ROWS + MORE if self.more else ROWS)
        if self.work.startswith("encode"):
            before = self.field.first() if self.more else NOTHING
            return check_visible(str(self.target), before, self.field.codes if self.more else self.field.first())
        corpus = find_corpus(str(self.target))
        if (0 if corpus is None else corpus.rows) not in rows:
            raise Harm("half a corpus can be seen", half_visible=1)
        return None

    def check_end(self) -> None:
        if self.work.startswith("encode"):
            check_codes(self.target, self.field.codes if self.more else self.field.first())
        else:
            check_corpus(self.target, self.field.vectors if self.more else self.field.vectors[:ROWS])


class DriverKill(Scene):
    """The driver is killed, alone or with its workers, when a part ``moment`` of the objects is stored.

    Workers whose driver was killed alone still write while the second run does.
    """

    def __init__(self, ground: Ground, work: Work, moment: float, *, alone: bool, again: Words) -> None:
        super().__init__(ground)
        self.work, self.moment, self.alone, self.again = work, moment, alone, again

    def fail(self) -> None:
        command = self.command = Command(self.work, self.field, self.folder)
        command.prepare()
        before = stored(command.target)
        where = LOCAL if self.ground.long else ("--workers", 1, "--no-dashboard")
        run = self.running.och(*command.words, *where)
        await_progress(run, self.running, command.target, before + int(self.moment * command.objects))
        remember_workers(run, self.running)
        if run.poll() is not None:
            raise NotDelivered("it was too fast")
        (os.kill if self.alone else os.killpg)(run.pid, signal.SIGKILL)
        if run.wait(20) != -signal.SIGKILL:
            raise NotDelivered(f"it ended with {run.returncode} by itself")

    def look(self) -> None:
        self.command.check_seen()
        ended(self.running.och(*self.command.words, *self.again), self.running, (0,), SECONDS)
        self.command.check_end()


class WorkerKills(Scene):
    """One of two workers is killed at each of some moments; the run goes on, or ends incomplete and is run again."""

    def __init__(self, ground: Ground, work: Work, moments: list[float], pick: random.Random) -> None:
        super().__init__(ground)
        self.work, self.moments, self.pick = work, sorted(moments), pick

    def fail(self) -> int:
        command = self.command = Command(self.work, self.field, self.folder)
        command.prepare()
        before = stored(command.target)
        self.run = self.running.och(*command.words, *LOCAL)
        killed = set[int]()
        for moment in self.moments:
            await_progress(self.run, self.running, command.target, before + int(moment * command.objects))
            victims = [worker for worker in remember_workers(self.run, self.running) if worker.pid not in killed]
            if not victims:
                break
            victim = self.pick.choice(victims)
            if victim.status() == psutil.STATUS_ZOMBIE or self.run.poll() is not None:
                break
            victim.kill()
            killed.add(victim.pid)
        if not killed:
            raise NotDelivered("no worker was there to be killed")
        return len(killed)

    def look(self) -> None:
        ended(self.run, self.running, (0, 5, 7), SECONDS)
        if self.run.returncode:
            self.command.check_seen()
            ended(self.running.och(*self.command.words, *HERE), self.running, (0,), SECONDS)
        self.command.check_end()


def faults(ground: Ground) -> Iterator[Fault]:
    pick = random.Random(5)
    works: tuple[Work, ...] = ("encode", "encode more", "ingest", "ingest more")
    for number in range(8 if ground.long else 1):
        driver = DriverKill(
            ground,
            works[number % 4],
            pick.uniform(0.02, 0.9),
            alone=number % 3 != 1,
            again=LOCAL if number % 3 == 2 else HERE,
        )
        yield Fault(f"driver killed at {driver.moment:.2f} of '{driver.work}'", driver.deliver, driver.check, SECONDS)
    for number in range(5 if ground.long else 1):
        moments = [pick.uniform(0.02, 0.35), pick.uniform(0.4, 0.8)]
        work = works[number % 2]
        if not ground.long:
            moments = moments[:1]
        worker = WorkerKills(ground, work, moments, pick)
        text = ", ".join(f"{moment:.2f}" for moment in worker.moments)
        yield Fault(f"workers killed at {text} of '{worker.work}'", worker.deliver, worker.check, SECONDS)
