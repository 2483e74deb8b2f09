"""kill -9 at any moment: of a worker, of the driver, of everything. What is done is kept, the bytes are the same."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from och_dist.encode import stage as encode
from och_dist.ingest import stage as ingest
from och_dist.store.corpus import open_corpus
from och_dist.upkeep.verification import verify
from tests.support.cluster_help import CODE_CHUNK, DIM, ROWS, Processes, Reference, tree, wait_until, workers_of

CHUNKS = -(-ROWS // CODE_CHUNK)
LOCAL = ("--workers", 2, "--no-dashboard")


def start_encode(processes: Processes, reference: Reference, index: Path) -> subprocess.Popen[str]:
    """An encode on two local workers that has finished its first chunks."""
    run = processes.och("encode", *encode_arguments(reference, index), *LOCAL, "--json")
    wait_until(lambda: done_chunks(index) or run.poll() is not None)
    assert run.poll() is None, processes.log(run)
    for worker in workers_of(run.pid):
        processes.remember(worker)
    return run


def encode_arguments(reference: Reference, index: Path) -> tuple[Any, ...]:
    return reference.corpus, index, "--model", reference.model, "--chunk-rows", CODE_CHUNK


def encode_here(reference: Reference, index: Path) -> dict[str, Any]:
    report = encode.encode(str(reference.corpus), str(index), model=reference.model, chunk_rows=CODE_CHUNK)
    return report.to_json()


def done_chunks(index: Path) -> dict[str, int]:
    """When each finished chunk of codes was written, by chunk."""
    found = {}
    for record in index.glob("segments/*/done/*.json"):
        chunk = str(int(record.stem))
        with contextlib.suppress(FileNotFoundError):  # published meanwhile
            found[chunk] = (record.parent.parent / "codes" / "c" / chunk / "0").stat().st_mtime_ns
    return found


def check_result(index: Path, reference: Reference) -> None:
    assert tree(index) == tree(reference.index)
    assert verify(str(index)).facts["damaged"] == 0


def test_a_killed_worker_is_replaced_and_the_run_goes_on(
    processes: Processes, reference: Reference, tmp_path: Path
) -> None:
    index = tmp_path / "index"
    run = start_encode(processes, reference, index)
    victim, other = workers_of(run.pid)
    victim.kill()
    assert len(done_chunks(index)) < CHUNKS
    processes.finish(run)
    check_result(index, reference)
    assert not psutil.pid_exists(other.pid)


@pytest.mark.parametrize("target", ["all processes", "driver alone"])
def test_a_killed_driver_is_resumed(processes: Processes, reference: Reference, tmp_path: Path, target: str) -> None:
    index = tmp_path / "index"
    run = start_encode(processes, reference, index)
    orphans = workers_of(run.pid)
    assert len(orphans) == 2
    if target == "all processes":
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    else:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        _, alive = psutil.wait_procs(orphans, timeout=20)
        assert not alive, "workers must not outlive their driver"
    done = done_chunks(index)
    assert 0 < len(done) < CHUNKS
    assert not list(index.glob("versions/*")), "half a result must not be visible"
    if target == "driver alone":
        report = processes.report("encode", *encode_arguments(reference, index), *LOCAL)
    else:
        report = encode_here(reference, index)
    again = {path.parent.name: path.stat().st_mtime_ns for path in index.glob("segments/*/codes/c/*/0")}
    assert {chunk: again[chunk] for chunk in done} == done, "finished chunks were written again"
    left_rows = ROWS - sum(min(CODE_CHUNK, ROWS - int(chunk) * CODE_CHUNK) for chunk in done)
    assert report["new_rows"] == left_rows
    check_result(index, reference)
    once_more = encode_here(reference, index)
    assert (once_more["status"], once_more["new_rows"]) == ("nothing to do", 0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 5), (signal.SIGINT, 130)])
def test_a_polite_end(processes: Processes, reference: Reference, tmp_path: Path, number: int, code: int) -> None:
    index = tmp_path / "index"
    run = start_encode(processes, reference, index)
    workers = workers_of(run.pid)
    if number == signal.SIGINT:
        os.killpg(run.pid, number)  # as a terminal does
    else:
        os.kill(run.pid, number)
    processes.finish(run, code=code, seconds=30)
    assert "run the same command again" in processes.log(run)
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not alive
    assert 0 < len(done_chunks(index)) < CHUNKS
    assert encode_here(reference, index)["status"] == "done"
    check_result(index, reference)


def corpus_chunks(corpus: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in corpus.glob("segments/*/vectors/c/*/0")}


def kill_ingest(processes: Processes, *arguments: Any, corpus: Path) -> dict[str, int]:
    """Run an ingest on two workers, kill everything when the first new chunk is there, return the chunks."""
    before = len(corpus_chunks(corpus))
    run = processes.och("ingest", *arguments, *LOCAL)
    wait_until(lambda: len(corpus_chunks(corpus)) > before or run.poll() is not None)
    assert run.poll() is None, processes.log(run)
    for worker in workers_of(run.pid):
        processes.remember(worker)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    there = corpus_chunks(corpus)
    assert before < len(there) < before + CHUNKS
    return there


def test_a_killed_ingest(processes: Processes, reference: Reference, tmp_path: Path) -> None:
    corpus, expected = tmp_path / "corpus", tmp_path / "expected"
    first, second = reference.vectors, reference.more
    small = ("--chunk-rows", CODE_CHUNK)
    ingest.ingest([str(first)], str(expected), chunk_rows=CODE_CHUNK)

    there = kill_ingest(processes, first, corpus, *small, corpus=corpus)
    assert not list(corpus.glob("versions/*")), "half a corpus must not be visible"
    processes.report("ingest", first, corpus, *small, "--workers", 0)
    assert tree(corpus) == tree(expected)
    now = corpus_chunks(corpus)
    assert {path: now[path] for path in there} == there, "finished chunks were written again"

    kill_ingest(processes, second, corpus, *small, "--append", corpus=corpus)
    old = open_corpus(str(corpus))
    assert (old.version, old.rows) == (1, ROWS)
    assert old.read(0, ROWS).tobytes() == np.load(first).tobytes()
    assert verify(str(corpus)).facts["damaged"] == 0

    report = processes.report("ingest", second, corpus, *small, "--append", *LOCAL)
    assert (report["version"], report["rows"], report["new_rows"]) == (2, 2 * ROWS, ROWS)
    ingest.ingest([str(second)], str(expected), chunk_rows=CODE_CHUNK, append=True)
    assert tree(corpus) == tree(expected)
    whole = open_corpus(str(corpus)).read(0, 2 * ROWS)
    assert whole.shape == (2 * ROWS, DIM)
    assert whole.tobytes() == np.concatenate([np.load(first), np.load(second)]).tobytes()
    assert old.read(0, ROWS).tobytes() == np.load(first).tobytes(), "a reader stays on its version"
    assert verify(str(corpus)).facts["damaged"] == 0
