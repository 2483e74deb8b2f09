"""What the doctor finds, on sound ground and on ground that was spoilt on purpose."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from och_dist.cluster import describe_machine
from och_dist.errors import ClusterError
from och_dist.ingest.stage import ingest
from och_dist.stage import Context
from och_dist.store.objects import LocalObjects
from och_dist.upkeep import fitness as stage
from och_dist.upkeep.fitness import check_machine, check_threads, check_versions, doctor
from tests.support.command import och


def finding(report: Any, what: str) -> dict[str, str]:
    [found] = [check for check in report.facts["checks"] if check["what"] == what]
    return found


def test_a_sound_machine_and_store(tmp_path: Path) -> None:
    place = tmp_path / "not" / "there" / "yet"
    result = och("doctor", "--store", place)
    assert result.stdout.startswith("doctor: all is fit for a job\n")
    assert list(tmp_path.iterdir()) == []
    shown = json.loads(och("doctor", "--store", tmp_path, "--json").stdout)
    assert (shown["healthy"], shown["exit_code"]) == (True, 0)
    assert {"software", "memory", "put-if-absent", "free space", "cluster"} <= {c["what"] for c in shown["checks"]}
    assert all(set(check) == {"what", "found", "verdict", "change"} for check in shown["checks"])
    assert list(tmp_path.iterdir()) == []


def test_a_store_in_use_is_left_as_it_is(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.ones((4, 3), np.float32))
    ingest([str(tmp_path / "v.npy")], str(tmp_path / "corpus"))
    before = sorted((str(path), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file())
    report = doctor(store=str(tmp_path / "corpus"), corpus=str(tmp_path / "corpus"))
    assert finding(report, "corpus")["found"].startswith("4 rows of 3")
    assert sorted((str(path), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()) == before


def test_a_store_that_overwrites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(self: LocalObjects, key: str, data: bytes) -> bool:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return True

    monkeypatch.setattr(LocalObjects, "_create", overwrite)
    result = och("doctor", "--store", tmp_path, code=2)
    assert "bad   store" in result.stdout
    assert "no working put-if-absent" in result.stdout
    monkeypatch.setattr(LocalObjects, "require_put_if_absent", lambda self: None)  # writers one after another are told
    report = doctor(store=str(tmp_path))
    assert finding(report, "put-if-absent")["found"] == "8 of 8 writers at once won the same object"
    assert report.facts["exit_code"] == 2
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_lists_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalObjects, "list", lambda self, prefix: iter(()))
    report = doctor(store=str(tmp_path))
    assert "it is not listed" in finding(report, "store")["found"]
    assert report.facts["exit_code"] == 2


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_store_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(self: LocalObjects, key: str, data: bytes) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(LocalObjects, "_create", refuse)
    result = och("doctor", "--store", tmp_path / "store", code=2)
    assert "-> check its permissions, or use another place" in result.stdout
    assert "ok    memory" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "bad   store" in och("doctor", "--store", tmp_path / "file", code=2).stdout
    assert (tmp_path / "file").read_text() == "x"


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(("free", "verdict", "code"), [(10 << 20, "bad", 5), (1 << 30, "mind", 0), (90 << 30, "ok", 0)])
def test_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, verdict: str, code: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(100 << 30, 0, free))
    report = doctor(store=str(tmp_path))
    assert finding(report, "free space")["verdict"] == verdict
    assert bool(finding(report, "free space")["change"]) == (verdict != "ok")
    assert report.facts["exit_code"] == code


def test_no_such_corpus(tmp_path: Path) -> None:
    report = doctor(corpus=str(tmp_path / "none"))
    assert finding(report, "corpus")["verdict"] == "bad"
    assert report.facts["exit_code"] == 3


def test_a_machine_that_does_too_much_at_once() -> None:
    facts = describe_machine() | {"cores": 2, "blas_threads": 64, "memory": 100 << 20, "fast_counts": False}
    found = {one.what: one for one in check_machine(facts)}
    assert (found["BLAS threads"].verdict, found["memory"].verdict) == ("mind", "mind")
    assert "OPENBLAS_NUM_THREADS to at most 2" in found["BLAS threads"].change
    assert "searching takes longer" in found["processor"].found


HERE = {"python": "3.11.7", "dask": "1", "distributed": "1", "numpy": "2.4.6"}


@pytest.mark.parametrize(
    ("scheduler", "worker", "text"),
    [
        ({}, {}, ""),
        ({}, {"numpy": "1.26.0"}, "tcp://w has numpy 1.26.0, not 2.4.6"),
        ({"dask": "0"}, {}, "the scheduler has dask 0, not 1"),
        ({"python": "3.12.0.final.0"}, {}, "the scheduler has python 3.12.0, not 3.11.7"),
    ],
)
def test_versions_of_a_cluster(scheduler: dict[str, str], worker: dict[str, str], text: str) -> None:
    found = check_versions(
        HERE, {**HERE, "python": "3.11.7.final.0", **scheduler}, {"tcp://w": {"versions": {**HERE, **worker}}}
    )
    assert (found.verdict, found.exit_code) == (("bad", 7) if text else ("ok", 0))
    assert text in found.found


def test_threads_of_a_cluster() -> None:
    workers = {f"tcp://{n}": {"host": "a", "cores": 2, "blas_threads": 1} for n in range(2)}
    assert check_threads(workers, dict.fromkeys(workers, 1)).verdict == "ok"
    assert check_threads(workers, dict.fromkeys(workers, 2)).found == "4 threads on 2 cores of a"
    workers["tcp://1"]["blas_threads"] = 8
    assert "BLAS takes 8 threads on tcp://1" in check_threads(workers, dict.fromkeys(workers, 1)).found


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    """The other checks are shown all the same."""
    result = och("doctor", "--scheduler", tmp_path / "none.json", "--store", tmp_path, code=7)
    assert "bad   cluster" in result.stdout
    assert "ok    put-if-absent" in result.stdout


def test_a_local_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real workers; a corpus of chunks that they have no memory for; and a store that they do not see."""
    rows = np.zeros((20_000, 1024), np.float32)
    np.save(tmp_path / "v.npy", rows)
    ingest([str(tmp_path / "v.npy")], str(tmp_path / "corpus"), chunk_rows=20_000)
    words = ("--workers", 1, "--memory-limit", "400MB", "--no-dashboard", "--corpus", tmp_path / "corpus", "--json")
    shown = json.loads(och("doctor", "--store", tmp_path / "new", *words, code=2).stdout)
    verdicts = {check["what"]: check["verdict"] for check in shown["checks"]}
    assert [what for what, verdict in verdicts.items() if verdict == "bad"] == ["memory of workers"]
    assert verdicts["store on workers"] == verdicts["versions"] == verdicts["thread limits"] == "ok"
    assert not (tmp_path / "new").exists()


def test_workers_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        """A client whose one worker has another disk."""

    @contextlib.contextmanager
    def connect() -> Iterator[Context]:
        yield Context(client=Elsewhere())  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "check_cluster", lambda context, corpus: [])
    monkeypatch.setattr(stage, "_on_workers", lambda client, function, *args: {"tcp://far": False})
    report = doctor(store=str(tmp_path), connect=connect)
    assert finding(report, "store on workers")["verdict"] == "bad"
    assert "s3://" in finding(report, "store on workers")["change"]

    def silent(client: Any, function: Any, *args: Any) -> None:
        raise ClusterError("the workers do not answer; restart them")

    monkeypatch.setattr(stage, "_on_workers", silent)
    report = doctor(store=str(tmp_path), connect=connect)
    assert (finding(report, "cluster")["change"], report.facts["exit_code"]) == ("restart them", 7)
    assert list(tmp_path.iterdir()) == []
