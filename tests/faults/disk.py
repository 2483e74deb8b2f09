"""A disk that is full, or read-only, in the middle of a job: a tmpfs that is mounted again with other options."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.faults.ground import NOTHING, Ground, check_visible
from tests.faults.processes import Scene, await_progress, check_codes, ended
from tests.faults.runner import Fault, NotDelivered, Skipped

INCOMPLETE = 5
SECONDS = 240.0
ROOMY = "size=64m,rw"


def mount(folder: Path, options: str, *more: str) -> bool:
    words = ["mount", "-t", "tmpfs", "-o", options, *more, "och-faults", str(folder)]
    return subprocess.run(words, capture_output=True, check=False, timeout=20).returncode == 0


def remount(folder: Path, options: str, seconds: float = 10) -> None:
    """Other options for a mounted disk; it is busy now and then while somebody writes."""
    end = time.monotonic() + seconds
    while not mount(folder, f"remount,{options}"):
        if time.monotonic() > end:
            raise NotDelivered(f"the disk cannot be mounted again with {options}")
        time.sleep(0.002)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False, timeout=20)


class Disk(Scene):
    """An index on a disk of its own; ``options`` are those it is mounted with."""

    options = ROOMY
    words: tuple[object, ...] = ("--workers", 2, "--no-dashboard")

    def deliver(self) -> int | None:
        self.disk: Path | None = None
        try:
            return super().deliver()
        except BaseException:
            self.take_away()
            raise

    def check(self) -> None:
        try:
            super().check()
        finally:
            self.take_away()

    def take_away(self) -> None:
        if self.disk is not None:
            unmount(self.disk)

    def mount(self) -> None:
        place = self.folder / "disk"
        place.mkdir()
        if not mount(place, self.options):
            raise NotDelivered("no disk could be mounted")
        self.disk = place
        self.index = place / "index"

    def look(self) -> None:
        assert self.disk is not None  # mounted
        said = ended(self.run, self.running, (INCOMPLETE,), SECONDS)
        if "what is done is kept" not in said or "run the command again" not in said:
            raise AssertionError(said[-2500:])
        check_visible(str(self.index), NOTHING)
        before = {path: path.stat().st_mtime_ns for path in self.index.glob("segments/*/codes/c/*/0")}
        if not before:
            raise NotDelivered("nothing was done before")
        remount(self.disk, ROOMY)
        ended(self.running.och(*self.field.encode(self.index), "--workers", 0), self.running, (0,), SECONDS)
        if any(path.stat().st_mtime_ns != when for path, when in before.items()):
            raise AssertionError("finished chunks were written again")
        check_codes(self.index, self.field.first())


class Full(Disk):
    options = "size=700k,rw"

    def fail(self) -> None:
        self.mount()
        assert self.disk is not None
        self.run = self.running.och(*self.field.encode(self.index), *self.words)
        self.run.wait(SECONDS)
        if shutil.disk_usage(self.disk).free > 64 << 10:
            raise NotDelivered("the disk is not full")


class ReadOnly(Disk):
    def fail(self) -> None:
        self.mount()
        assert self.disk is not None
        self.run = self.running.och(*self.field.encode(self.index), *self.words)
        await_progress(self.run, self.running, self.index, 40)
        remount(self.disk, "size=64m,ro")


def faults(ground: Ground) -> Iterator[Fault]:
    if os.geteuid():
        raise Skipped("disks are mounted by root only")
    probe = ground.fresh()
    if not mount(probe, ROOMY):
        raise Skipped("root may not mount a tmpfs here")
    unmount(probe)
    full = Full(ground)
    yield Fault("disk full", full.deliver, full.check, SECONDS)
    read_only = ReadOnly(ground)
    yield Fault("disk read-only", read_only.deliver, read_only.check, SECONDS)
