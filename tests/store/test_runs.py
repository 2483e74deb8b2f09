"""Run records and the lock of an index: one number a run, written once; a dead run blocks nobody."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from och_dist.errors import BadInputError, IncompleteError, IntegrityError
from och_dist.store.objects import LocalObjects, open_objects
from och_dist.store.runs import begin_run, end_run, holder, lock_path, locked, read_run, run_key, run_numbers

HOLD = """
import sys, time
from och_dist.store.runs import locked
from och_dist.store.objects import open_objects
with locked(open_objects(sys.argv[1]), run=7):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path / "index")


def test_numbers_and_reports(objects: LocalObjects) -> None:
    assert run_numbers(objects) == []
    assert [begin_run(objects, {"name": "a"}) for _ in range(3)] == [1, 2, 3]
    end_run(objects, 2, {"exit_code": 0})
    assert run_numbers(objects) == [1, 2, 3]
    start, end = read_run(objects, 2)
    assert (start["run"], start["name"], end) == (2, "a", {"run": 2, "exit_code": 0})
    assert read_run(objects, 3)[1] is None
    objects.delete(run_key(2, "start"))
    assert read_run(objects, 2)[0] == {"run": 2}


def test_runs_that_begin_at_once_get_a_number_each(objects: LocalObjects) -> None:
    """All of them see the same runs before they take a number."""
    begin_run(objects, {})
    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(lambda _: begin_run(objects, {}), range(8))) == list(range(2, 10))


def test_a_changed_report_is_found(objects: LocalObjects) -> None:
    number = begin_run(objects, {})
    end_run(objects, number, {"exit_code": 5})
    path = objects.root / run_key(number, "end")
    path.write_bytes(path.read_bytes().replace(b'"exit_code": 5', b'"exit_code": 0'))
    with pytest.raises(IntegrityError, match="does not match its own sha256"):
        read_run(objects, number)


def test_a_corpus_has_no_runs(tmp_path: Path) -> None:
    from och_dist.ingest.stage import generate

    generate(str(tmp_path / "corpus"), rows=10, dim=4)
    with pytest.raises(BadInputError, match="is of kind 'corpus'; name an index"):
        begin_run(open_objects(str(tmp_path / "corpus")), {})


def test_lock_of_this_process(objects: LocalObjects) -> None:
    assert holder(objects) is None
    with locked(objects, run=3):
        with (
            pytest.raises(
                IncompleteError, match=r"another run works on .* \(run 3, process \d+ on .*nothing was begun"
            ),
            locked(objects),
        ):
            pytest.fail("two hold the lock")
        found = holder(objects)
        assert found is not None
        assert found["run"] == 3
    assert holder(objects) is None
    with locked(objects):
        pass


def test_lock_of_a_killed_process_is_gone_with_it(objects: LocalObjects) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, objects.url], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(IncompleteError, match=f"run 7, process {process.pid} "), locked(objects):
            pass
    finally:
        process.kill()
        process.communicate()
    assert lock_path(objects).exists()
    assert holder(objects) is None
    with locked(objects, run=8):
        assert (holder(objects) or {})["run"] == 8


def test_a_place_without_locks_is_used_without(
    objects: LocalObjects, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("och_dist.store.runs.fcntl.flock", refuse)
    monkeypatch.setattr("och_dist.store.runs.logger.propagate", True)
    with locked(objects):
        assert holder(objects) is None
    assert "cannot be locked" in caplog.text


def test_a_bucket_is_locked_on_this_machine(s3: str) -> None:
    objects = open_objects(s3)
    with locked(objects), pytest.raises(IncompleteError, match="another run works on s3://"), locked(objects):
        pass
    assert list(objects.list("")) == []
    lock_path(objects).unlink()


def test_runs_in_a_bucket(s3: str) -> None:
    objects = open_objects(s3)
    number = begin_run(objects, {"name": "x"})
    end_run(objects, number, {"exit_code": 0})
    assert (run_numbers(objects), read_run(objects, 1)[0]["name"]) == ([1], "x")
