"""Where faults are delivered: a small corpus, three models, the codes they must give, and how to look at an index."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from och_dist.encode.stage import encode
from och_dist.ingest.stage import ingest
from och_dist.store.corpus import open_corpus
from och_dist.store.index import find_index
from och_dist.store.model import load_model, split_model_path
from och_dist.store.objects import open_objects
from och_dist.train.stage import train
from och_dist.upkeep.deletion import delete
from och_dist.upkeep.verification import verify
from tests.faults.runner import Harm, NotDelivered
from tests.support.index_help import live_codes, without

FIRST, ROWS, DIM, BITS, CHUNK, MODELS = 140, 200, 8, 12, 32, 3
DELETED = "3,40-70"
GONE = frozenset({3, *range(40, 71)})
NOTHING: dict[int, bytes] = {}


@dataclass(frozen=True)
class Place:
    """The corpus, the index and the models of one job."""

    folder: Path

    @property
    def corpus(self) -> str:
        return str(self.folder / "corpus")

    @property
    def index(self) -> str:
        return str(self.folder / "index")

    @property
    def models(self) -> str:
        return str(self.folder / "models")

    def model(self, number: int = 0) -> str:
        """The models by address; three of them are made."""
        return sorted(str(path) for path in (self.folder / "models").iterdir() if len(path.name) == 64)[number]

    def forget_models(self) -> None:
        shutil.rmtree(self.models)


class Ground:
    """A scratch folder with the reference job; ``long`` asks for all faults, otherwise for about a tenth of them."""

    def __init__(self, folder: Path, *, long: bool = False) -> None:
        self.folder = folder
        self.long = long
        self._count = 0

    def fresh(self) -> Path:
        """A new empty folder."""
        self._count += 1
        path = self.folder / f"{self._count:05d}"
        path.mkdir(parents=True)
        return path

    @cached_property
    def vectors(self) -> np.ndarray:
        """(ROWS, DIM) float32, a whole chunk of which is zero: Zarr would rather not store such a one."""
        rows = np.random.default_rng(5).normal(size=(ROWS, DIM)).astype(np.float32)
        rows[CHUNK : 2 * CHUNK] = 0
        return rows

    @cached_property
    def files(self) -> tuple[Path, Path]:
        """The first rows, and those that are appended."""
        folder = self.fresh()
        for name, rows in (("first.npy", self.vectors[:FIRST]), ("second.npy", self.vectors[FIRST:])):
            np.save(folder / name, rows)
        return folder / "first.npy", folder / "second.npy"

    @cached_property
    def trained(self) -> Place:
        """The first rows as a corpus, and three models."""
        place = Place(self.fresh())
        ingest([str(self.files[0])], place.corpus, chunk_rows=CHUNK)
        for seed in range(MODELS):
            train(place.corpus, place.models, bits=BITS, method="lsh", seed=seed)
        return place

    @cached_property
    def codes(self) -> list[np.ndarray]:
        """The codes of all rows under each model, without corpus, index or chunks."""
        found = []
        for number in range(MODELS):
            folder, address = split_model_path(self.trained.model(number))
            found.append(load_model(open_objects(folder), address).hasher.encode_block(self.vectors))
        return found

    @cached_property
    def encoded(self) -> Place:
        """The first rows, published."""
        place = self.copy(self.trained)
        encode(place.corpus, place.index, model=place.model(), chunk_rows=CHUNK)
        return place

    @cached_property
    def appended(self) -> Place:
        """All rows, in two versions."""
        place = self.copy(self.encoded)
        append(place, self.files[1])
        return place

    @cached_property
    def deleted(self) -> Place:
        """Some of the rows deleted, in a third version."""
        place = self.copy(self.appended)
        delete(place.index, rows=DELETED)
        return place

    def empty(self) -> Place:
        """A place for a new job."""
        return Place(self.fresh())

    def copy(self, place: Place) -> Place:
        target = self.fresh()
        shutil.copytree(place.folder, target, dirs_exist_ok=True)
        return Place(target)

    def live(self, rows: int, gone: Collection[int] = (), model: int = 0) -> dict[int, bytes]:
        """Row -> code of everything that an index of so many rows must hold."""
        return without(self.codes[model][:rows], set(gone))

    def check_corpus(self, place: Place, rows: int) -> None:
        """The published corpus holds exactly the first ``rows`` rows, and verify is clean."""
        found = open_corpus(place.corpus).read(0, open_corpus(place.corpus).rows)
        wrong = int((found[:rows] != self.vectors[: len(found)][:rows]).any(axis=1).sum())
        if len(found) != rows or wrong:
            raise Harm(
                f"the corpus has {len(found)} rows, {rows} expected; {wrong} are wrong",
                lost=max(0, rows - len(found)),
                wrong=wrong + max(0, len(found) - rows),
            )
        verify(place.corpus)


def race(commands: Sequence[Sequence[str]]) -> list[int]:
    """Exit codes of processes that say 'ready', and then are let go all at once."""
    started = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for words in commands]
    try:
        for process in started:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise NotDelivered("a driver did not start")
        for process in started:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return [process.wait(100) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def append(place: Place, file: Path) -> None:
    ingest([str(file)], place.corpus, chunk_rows=CHUNK, append=True)
    encode(place.corpus, place.index, model=place.model(), chunk_rows=CHUNK)


def compare(index: str, expected: Mapping[int, bytes], version: int | None = None) -> None:
    """The published codes are these, byte for byte, row by row."""
    found = live_codes(index, version)
    lost = len(expected.keys() - found.keys())
    wrong = sum(expected.get(row) != code for row, code in found.items())
    if lost or wrong:
        raise Harm(f"{lost} rows of {index} are lost, {wrong} are wrong", lost=lost, wrong=wrong)


def check_index(index: str, expected: Mapping[int, bytes]) -> None:
    """The newest version holds exactly these codes, and verify is clean."""
    compare(index, expected)
    verify(index)


def check_visible(index: str, *allowed: Mapping[int, bytes]) -> None:
    """A reader who comes now sees one of these states whole; NOTHING is an index without a version."""
    seen = find_index(index)
    found = NOTHING if seen is None else live_codes(index)
    if found not in allowed:
        changed = [state for state in allowed if state.keys() == found.keys()]
        wrong = min((sum(state[row] != code for row, code in found.items()) for state in changed), default=0)
        sizes = " or ".join(str(len(state)) for state in allowed)
        raise Harm(
            f"a reader of {index} sees {len(found)} rows, {wrong} of them wrong; {sizes} rows were published",
            wrong=wrong,
            half_visible=int(not wrong),
        )
