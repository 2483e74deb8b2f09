"""A job of many chunks for real processes: what it starts from, its commands, and what must come of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from och_dist.encode.stage import encode
from och_dist.ingest.stage import ingest
from och_dist.store.corpus import open_corpus
from och_dist.train.stage import train
from och_dist.upkeep.verification import verify
from tests.faults.ground import Ground, check_index
from tests.faults.runner import Harm, NotDelivered
from tests.support.cluster_help import Processes, clustered_rows, workers_of
from tests.support.index_help import live_codes

ROWS, MORE, DIM, CHUNK = 6_000, 4_000, 16, 32
LOCAL: tuple[object, ...] = ("--workers", 2, "--no-dashboard")
STEP = 0.003
Words = tuple[object, ...]


@dataclass(frozen=True)
class Field:
    """Files of vectors, a corpus of the first, one of both, a model, and the codes of all rows as they must be."""

    folder: Path
    model: str
    vectors: np.ndarray
    codes: dict[int, bytes]

    @property
    def files(self) -> tuple[Path, Path]:
        return self.folder / "first.npy", self.folder / "second.npy"

    @property
    def corpora(self) -> tuple[Path, Path]:
        return self.folder / "corpus", self.folder / "both"

    @property
    def index(self) -> Path:
        """The first rows, published."""
        return self.folder / "index"

    def first(self) -> dict[int, bytes]:
        return {row: code for row, code in self.codes.items() if row < ROWS}

    def encode(self, index: Path, *, corpus: int = 0) -> Words:
        return "encode", self.corpora[corpus], index, "--model", self.model, "--chunk-rows", CHUNK


_fields: list[Field] = []


def field_of(ground: Ground) -> Field:
    """Made by whoever needs it first, in one process and undisturbed."""
    if not _fields or not _fields[-1].index.exists():
        _fields.append(_make_field(ground.fresh()))
    return _fields[-1]


def _make_field(folder: Path) -> Field:
    vectors = clustered_rows(ROWS + MORE, DIM, 0)
    vectors[CHUNK : 2 * CHUNK] = 0
    made = Field(folder, "", vectors, {})
    np.save(made.files[0], vectors[:ROWS])
    np.save(made.files[1], vectors[ROWS:])
    ingest([str(made.files[0])], str(made.corpora[0]), chunk_rows=CHUNK)
    shutil.copytree(made.corpora[0], made.corpora[1])
    ingest([str(made.files[1])], str(made.corpora[1]), chunk_rows=CHUNK, append=True)
    model = train(str(made.corpora[0]), str(folder / "models"), bits=32, method="lsh").facts["model"]
    encode(str(made.corpora[0]), str(made.index), model=model, chunk_rows=CHUNK)
    whole = folder / "whole"
    encode(str(made.corpora[1]), str(whole), model=model, chunk_rows=CHUNK)
    return Field(folder, model, vectors, live_codes(str(whole)))


def stored(folder: Path) -> int:
    """How many objects there are below a folder."""
    return sum(len(files) for place, _, files in os.walk(folder) if not place.endswith(".tmp"))


def await_progress(run: subprocess.Popen[str], running: Processes, folder: Path, count: int) -> None:
    """Return when a running process has stored so many objects."""
    await_that(lambda: stored(folder) >= count, run, running, f"{count} objects")


def await_that(
    condition: Callable[[], Any], run: subprocess.Popen[str], running: Processes, what: str, seconds: float = 60
) -> None:
    """Return when ``condition()`` holds; what waits for a process that has ended was not delivered."""
    end = time.monotonic() + seconds
    while not condition():
        if run.poll() is not None:
            raise NotDelivered(f"it ended with {run.returncode} before {what}: {running.log(run)[-1500:]}")
        if time.monotonic() > end:
            raise NotDelivered(f"no {what} within {seconds:.0f} s: {running.log(run)[-1500:]}")
        time.sleep(STEP)


def remember_workers(run: subprocess.Popen[str], running: Processes) -> list[psutil.Process]:
    found = workers_of(run.pid)
    for worker in found:
        running.remember(worker)
    return found


def check_codes(index: Path, expected: dict[int, bytes]) -> None:
    """The published codes are the right ones, byte for byte, and verify is clean."""
    if not (index / "versions").exists():
        raise Harm("nothing was published", lost=len(expected))
    check_index(str(index), expected)


def check_corpus(corpus: Path, vectors: np.ndarray) -> None:
    """The published corpus holds exactly these rows, and verify is clean."""
    opened = open_corpus(str(corpus))
    found = opened.read(0, opened.rows)
    same = len(found) == len(vectors) and found.tobytes() == vectors.tobytes()
    if not same:
        lost = max(0, len(vectors) - len(found))
        wrong = int((found[: len(vectors)] != vectors[: len(found)]).any(axis=1).sum())
        raise Harm(f"the corpus has {len(found)} rows, {wrong} wrong", lost=lost, wrong=wrong)
    verify(str(corpus))


def ended(run: subprocess.Popen[str], running: Processes, codes: tuple[int, ...], seconds: float) -> str:
    """What a process said that must end with one of these codes, in time; unless that is 0, with a sentence last."""
    try:
        run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"a hang: nothing within {seconds:.0f} s: {running.log(run)[-1500:]}") from None
    said = running.log(run)
    if run.returncode not in codes:
        raise AssertionError(f"ended with {run.returncode}, not with one of {codes}: {said[-2500:]}")
    if run.returncode and (not said.splitlines()[-1].startswith("och: ") or "Traceback" in said):
        raise AssertionError(f"does not end with a sentence of ours: {said[-2500:]}")
    return said


class Scene:
    """A fault among processes; these are ended after the check, or when the fault could not be delivered."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground

    def deliver(self) -> int | None:
        self.field = field_of(self.ground)
        self.folder = self.ground.fresh()
        self.index = self.folder / "index"
        self.running = Processes(self.ground.fresh())
        try:
            return self.fail()
        except BaseException:
            self.running.stop()
            raise

    def check(self) -> None:
        try:
            self.look()
        finally:
            self.running.stop()

    def fail(self) -> int | None:
        raise NotImplementedError

    def look(self) -> None:
        raise NotImplementedError
