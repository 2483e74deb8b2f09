"""pipelines/nightly.toml, four nights in a row as real processes: new files, a kill -9, drift, and runs for nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist.store.index import list_jobs, model_objects, open_version
from och_dist.store.model import load_model
from och_dist.store.objects import open_objects
from tests.support.command import facts

PIPELINE = Path(__file__).resolve().parents[2] / "pipelines" / "nightly.toml"
DIM, FIRST, SECOND, THIRD, FOURTH, CODE_CHUNK = 16, 3_000, 2_500, 9_000, 2_500, 16
SIZES = ("bits=24", "model.params={n_centres=20,max_iter=40}")


def rows(count: int, seed: int) -> np.ndarray:
    """(count, 16) float32 about 40 centres that stay the same."""
    random, centres = np.random.default_rng(seed), np.random.default_rng(7).normal(size=(40, DIM)) * 3
    return (centres[random.integers(40, size=count)] + random.normal(size=(count, DIM))).astype(np.float32)


class Job:
    """The nightly job in a folder of its own; every run is a process."""

    def __init__(self, folder: Path) -> None:
        self.inbox, self.index, self.folder = folder / "inbox", folder / "data" / "index", folder / "data"
        self.inbox.mkdir()

    def start(self, *settings: str) -> subprocess.Popen[str]:
        every = (f"inbox={self.inbox}", f"dir={self.folder}", *SIZES, *settings)
        words = ["run", PIPELINE, *(word for setting in every for word in ("--set", setting)), "--workers", "0"]
        return subprocess.Popen(
            [sys.executable, "-m", "och_dist.cli", *map(str, words), "--json", "--log-format", "json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )

    def run(self, *settings: str, code: int = 0) -> dict[str, Any]:
        """The stages of a run that must end with ``code``; its last words if that is not 0."""
        process = self.start(*settings)
        out, log = process.communicate(timeout=120)
        assert (process.returncode, bool(out)) == (code, code == 0), log
        lines = [json.loads(line) for line in log.splitlines()]  # every line is an object
        return json.loads(out)["stages"] if out else lines[-1]

    def kill_while_encoding(self, at_least: int) -> None:
        """kill -9 when some chunks of a new job are done, and not all; it has many, so that there is time for it."""
        known = {job.id for job in list_jobs(open_objects(str(self.index)))}
        process = self.start(f"encode.chunk_rows={CODE_CHUNK}")
        try:
            while self.done(known) < at_least:
                assert process.poll() is None, process.communicate()
                time.sleep(0.005)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL

    def done(self, known: set[str]) -> int:
        objects = open_objects(str(self.index))
        return sum(len(job.done(objects)) for job in list_jobs(objects) if job.id not in known)

    def codes(self, version: int | None = None) -> np.ndarray:
        return np.concatenate([codes for _, codes in open_version(str(self.index), version).blocks()])

    def files(self) -> dict[Path, int]:
        """When everything that is stored was written, but for the reports of runs and their lock."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return {path: path.stat().st_mtime_ns for path in paths if not {"runs", ".tmp"} & set(path.parts)}

    def history(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = facts("history", self.index)["runs"]
        return found


def encoded(job: Job, version: int, vectors: np.ndarray) -> np.ndarray:
    """What the model of a version makes of vectors, in one piece and without any store."""
    model = open_version(str(job.index), version).model
    return load_model(model_objects(str(job.index)), model).hasher.encode_block(vectors)


def statuses(stages: dict[str, Any]) -> set[str]:
    return {stage["status"] for stage in stages.values()}


@pytest.mark.timeout(300)
def test_four_nights(tmp_path: Path) -> None:
    job = Job(tmp_path)
    nights = [rows(FIRST, 0), rows(SECOND, 1), rows(THIRD, 2), 3 * rows(FOURTH, 3) + 2]

    # The first night trains a model and makes version 1.
    np.save(job.inbox / "a.npy", nights[0])
    stages = job.run()
    assert stages["model"]["trained"]
    assert (stages["publish"]["version"], stages["publish"]["rows"]) == (1, FIRST)
    first_codes = job.codes()

    # The second brings a file; the model stays, only its rows are encoded. Then there is nothing to do.
    np.save(job.inbox / "b.npy", nights[1])
    stages = job.run()
    assert (stages["model"]["trained"], stages["model"]["drift"]) == (False, False)
    assert (stages["encode"]["new_rows"], stages["publish"]["version"]) == (SECOND, 2)
    before = job.files()
    assert statuses(job.run()) == {"nothing to do"}
    assert job.files() == before

    # The third is killed while it encodes: nothing is published, and the next run does the rest, and only that.
    np.save(job.inbox / "c.npy", nights[2])
    known = {other.id for other in list_jobs(open_objects(str(job.index)))}
    job.kill_while_encoding(at_least=20)
    finished = job.done(known)
    assert 20 <= finished < THIRD // CODE_CHUNK
    assert open_version(str(job.index)).version == 2
    stages = job.run()
    assert stages["collect"]["status"] == "nothing to do"
    assert stages["encode"]["new_rows"] == THIRD - finished * CODE_CHUNK
    assert (stages["publish"]["version"], stages["publish"]["rows"]) == (3, FIRST + SECOND + THIRD)
    three = np.concatenate(nights[:3])
    assert job.codes().tobytes() == encoded(job, 3, three).tobytes()
    assert job.codes(2).tobytes() == encoded(job, 2, three[: FIRST + SECOND]).tobytes()
    assert job.codes(1).tobytes() == first_codes.tobytes()

    # The fourth has drifted: exit 6, nothing published; told to retrain, it makes a new version with a new model.
    np.save(job.inbox / "d.npy", nights[3])
    words = job.run(code=6)["message"]
    assert str(job.inbox / "d.npy") in words
    assert "Nothing was encoded or published" in words
    assert open_version(str(job.index)).version == 3
    old, old_codes = open_version(str(job.index), 3), job.codes(3)
    stages = job.run("on_drift=retrain")
    assert (stages["model"]["trained"], stages["model"]["drift"]) == (True, True)
    assert stages["encode"]["new_rows"] == stages["publish"]["rows"] == sum(map(len, nights))
    new = open_version(str(job.index))
    assert (new.version, new.model != old.model) == (4, True)
    assert job.codes().tobytes() == encoded(job, 4, np.concatenate(nights)).tobytes()
    assert job.codes(3).tobytes() == old_codes.tobytes(), "the old one stays readable"
    assert stages["gc"]["versions_kept"] == [2, 3, 4]
    assert statuses(job.run()) == {"nothing to do"}

    runs = job.history()
    assert [run["run"] for run in runs] == list(range(1, 9))
    assert [run["exit_code"] for run in runs] == [0, 0, 0, None, 0, 6, 0, 0]
    assert [run["status"] for run in runs] == [
        "done", "done", "nothing to do", "killed", "done", "failed", "done", "nothing to do"
    ]  # fmt: skip
    assert [run.get("index_version") for run in runs] == [1, 2, 2, None, 3, None, 4, 4]
    assert runs[5]["stage"] == "model"
    assert facts("verify", job.index)["damaged"] == facts("verify", job.folder / "corpus")["damaged"] == 0
