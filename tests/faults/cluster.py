"""Clusters that somebody else runs, and what goes wrong with them: a sentence, an exit code, and one more run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from och_dist.encode.stage import encode
from och_dist.train.stage import train
from och_dist.upkeep.housekeeping import gc
from tests.faults.ground import NOTHING, Ground, check_visible
from tests.faults.processes import Scene, Words, await_progress, await_that, check_codes, ended
from tests.faults.runner import Fault, NotDelivered
from tests.faults.sabotage import POISON
from tests.support.cluster_help import TOP, wait_until
from tests.support.index_help import live_codes

ALONE: Words = ("--workers", 0)
INCOMPLETE, UNAVAILABLE = 5, 7
SECONDS = 240.0
LONG_WAIT = 150.0


class Remote(Scene):
    """A scheduler and workers as processes of their own, of which something fails in the middle of an encode."""

    workers = 1
    nanny = False
    deed = ""
    memory = "2GB"
    settings: dict[str, str] = {}  # noqa: RUF012

    def start_cluster(self) -> None:
        self.file, self.shed = self.folder / "scheduler.json", self.folder / "shed"
        self.shed.mkdir()
        (self.shed / "armed").touch()
        settings = {f"DASK_DISTRIBUTED__{name}": value for name, value in self.settings.items()}
        self.scheduler = self.running.dask("scheduler", "--port", "0", *self.local(), env=settings)
        wait_until(lambda: self.file.exists() and self.file.read_text().endswith("}"))
        self.crew = [self.start_worker(number) for number in range(self.workers)]

    def local(self) -> tuple[str | Path, ...]:
        return "--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0", "--scheduler-file", self.file

    def start_worker(self, number: int):  # type: ignore[no-untyped-def]
        words: list[str | Path] = ["--nthreads", "1", "--memory-limit", self.memory, "--death-timeout", "60"]
        words += ["--nanny" if self.nanny else "--no-nanny", "--local-directory", self.folder / f"w{number}"]
        env = {f"DASK_DISTRIBUTED__{name}": value for name, value in self.settings.items()}
        if self.deed:
            words += ["--preload", "tests.faults.sabotage"]
            env |= {"OCH_SABOTAGE": self.deed, "OCH_SABOTAGE_FOLDER": str(self.shed)}
            env |= {"PYTHONPATH": str(TOP)}
        return self.running.dask("worker", *words, *self.local(), env=env)

    @property
    def words(self) -> Words:
        return self.field.encode(self.index)

    def start_encode(self, objects: int | None = 40):  # type: ignore[no-untyped-def]
        """An encode on the cluster that has stored so many objects."""
        self.start_cluster()
        self.run = self.running.och(*self.words, "--scheduler", self.file)
        if objects is not None:
            await_progress(self.run, self.running, self.index, objects)
        return self.run

    def ends(self, code: int, text: str, seconds: float = LONG_WAIT) -> None:
        """The command ends with this code, a sentence like ``text``, and nothing half visible."""
        said = ended(self.run, self.running, (code,), seconds)
        if not re.search(text, said.splitlines()[-1]):
            raise AssertionError(f"said {said[-2500:]!r}, expected {text!r}")
        check_visible(str(self.index), NOTHING)

    def again(self, *where: object) -> None:
        """One more run, which keeps what was there, and finishes."""
        before = {path: path.stat().st_mtime_ns for path in self.index.glob("segments/*/codes/c/*/0")}
        if not before:
            raise NotDelivered("nothing was done before")
        ended(self.running.och(*self.words, *where), self.running, (0,), LONG_WAIT)
        if any(path.stat().st_mtime_ns != when for path, when in before.items()):
            raise AssertionError("finished chunks were written again")
        check_codes(self.index, self.field.first())


class SchedulerKilled(Remote):
    def fail(self) -> None:
        self.start_encode()
        self.scheduler.kill()

    def look(self) -> None:
        self.ends(UNAVAILABLE, "the scheduler .*what is done is kept: run the command again")
        self.again(*ALONE)


class SchedulerSilent(Remote):
    """The scheduler is stopped: its connections stay open, and it says nothing more. Later it goes on."""

    def fail(self) -> None:
        self.start_encode()
        self.scheduler.send_signal(signal.SIGSTOP)

    def look(self) -> None:
        self.ends(UNAVAILABLE, "what is done is kept: run the command again")
        self.scheduler.send_signal(signal.SIGCONT)
        self.again("--scheduler", self.file)


class AllWorkersGone(Remote):
    workers = 2

    def fail(self) -> None:
        self.start_encode()
        for worker in self.crew:
            worker.kill()

    def look(self) -> None:
        self.ends(UNAVAILABLE, "no worker, or only paused ones, .*what is done is kept: start workers")
        self.start_worker(9)
        self.again("--scheduler", self.file)


class DriverKilled(Remote):
    """The cluster outlives the driver, and works for the next one, which comes at once."""

    workers = 2

    def fail(self) -> None:
        self.start_encode()
        self.run.kill()
        self.run.wait(20)

    def look(self) -> None:
        check_visible(str(self.index), NOTHING)
        self.again("--scheduler", self.file)
        if self.scheduler.poll() is not None or any(worker.poll() is not None for worker in self.crew):
            raise AssertionError("the cluster ended with its driver")


class Zombie(Remote):
    """A worker is stopped just before it stores a chunk, is declared dead, and stores it after all was published."""

    workers = 2
    deed = "stop"
    settings = {"SCHEDULER__WORKER_TTL": "5s"}  # noqa: RUF012

    def fail(self) -> None:
        self.start_encode(None)
        stopped = self.shed / "stopped"
        await_that(lambda: stopped.exists() and " " in stopped.read_text(), self.run, self.running, "stopped worker")
        self.pid, self.chunk = map(int, stopped.read_text().split())
        self.ended = ended(self.run, self.running, (0,), LONG_WAIT)
        self.done = self.shed / f"stored-{self.pid}-{self.chunk}"
        if self.done.exists():
            raise NotDelivered("the worker was not stopped")
        self.meanwhile()
        os.kill(self.pid, signal.SIGCONT)
        wait_until(self.done.exists, 30)

    def meanwhile(self) -> None:
        """What happens to the index before the worker wakes up."""

    def look(self) -> None:
        check_codes(self.index, self.field.first())
        again = self.running.och(*self.words, "--workers", 0)
        if "nothing to do" not in ended(again, self.running, (0,), 60):
            raise AssertionError("the second run found work")
        gc(str(self.index))
        if list(self.index.glob("segments/*/done/*")):
            raise AssertionError("the late record stays for ever")
        check_codes(self.index, self.field.first())


class ZombieOfTheCollected(Zombie):
    """The same, but what the worker writes to was replaced and collected before it wakes up."""

    def meanwhile(self) -> None:
        corpus = str(self.field.corpora[0])
        model = train(corpus, str(self.folder / "models"), bits=32, method="lsh", seed=1).facts["model"]
        encode(corpus, str(self.index), model=model)
        gc(str(self.index), keep=1)
        self.codes = live_codes(str(self.index))

    def look(self) -> None:
        if len(self.codes) != len(self.field.first()) or self.codes == self.field.first():
            raise NotDelivered("the index was not replaced")
        if len(list(self.index.glob("segments/*"))) != 1:
            raise AssertionError("the late chunk has made a segment of its own")
        check_codes(self.index, self.codes)


class Poison(Remote):
    """A chunk ends every worker that takes it: the others are done, this one is named, and the job ends."""

    workers = 2
    nanny = True
    deed = "crash"

    def fail(self) -> None:
        self.start_encode(None)
        await_progress(self.run, self.running, self.index, 20)

    def look(self) -> None:
        self.ends(INCOMPLETE, rf"every worker that task encode_chunk-\w+-{POISON} .*died .*what is done is kept")
        if list(self.shed.glob(f"stored-*-{POISON}")):
            raise NotDelivered("the chunk is harmless")
        chunks = len(list(self.index.glob("segments/*/codes/c/*/0")))
        if chunks < POISON:
            raise AssertionError(f"only {chunks} chunks were done beside the poisoned one")
        (self.shed / "armed").unlink()
        self.again("--scheduler", self.file)


class Glutton(Poison):
    """A chunk takes all memory: its worker is ended by the nanny, not the machine by the worker."""

    deed = "take_memory"
    memory = "600MB"


class Together:
    """Two that mostly wait, at the same time."""

    def __init__(self, *scenes: Remote) -> None:
        self.scenes = scenes

    def deliver(self) -> int:
        for number, scene in enumerate(self.scenes):
            try:
                scene.deliver()
            except BaseException:
                for earlier in self.scenes[:number]:
                    earlier.running.stop()
                raise
        return len(self.scenes)

    def check(self) -> None:
        try:
            for scene in self.scenes:
                scene.check()
        finally:
            for scene in self.scenes:
                scene.running.stop()


def faults(ground: Ground) -> Iterator[Fault]:
    short: dict[str, type[Remote]] = {"stopped worker wakes up late": Zombie}
    long: dict[str, type[Remote]] = {
        "scheduler killed": SchedulerKilled,
        "stopped worker wakes up after a gc": ZombieOfTheCollected,
        "driver of a remote cluster killed": DriverKilled,
        "poison chunk": Poison,
        "worker over its memory limit": Glutton,
    }
    for name, kind in (short | long if ground.long else short).items():
        scene = kind(ground)
        yield Fault(name, scene.deliver, scene.check, SECONDS)
    if ground.long:
        waiting = Together(AllWorkersGone(ground), SchedulerSilent(ground))
        yield Fault("all workers gone, and a scheduler that says nothing", waiting.deliver, waiting.check, SECONDS)
