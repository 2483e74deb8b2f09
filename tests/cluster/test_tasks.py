"""The graph shapes on real workers against the plain loops, and what becomes of failures."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
import numpy as np
import psutil
import pytest

from och_dist import errors
from och_dist.cluster import outcome
from och_dist.cluster import tasks as graph
from och_dist.cluster.connection import ClusterOptions, connect
from och_dist.cluster.tasks import map_tasks, reduce_in_pieces, reduce_tasks, scan_tasks
from tests.support import cluster_tasks as work
from tests.support.cluster_help import Separate, wait_until
from tests.support.cluster_tasks import Attempt

COUNTS = (1, 7, 8, 9, 64, 65)
ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.OchError)]


def tree_of(leaves: list[str], fan_in: int = 8) -> str:
    """The expected tree, the slow way."""
    merged = [work.bracket(leaves[i : i + fan_in]) for i in range(0, len(leaves), fan_in)]
    return merged[0] if len(merged) == 1 else tree_of(merged, fan_in)


def run(shape: str, function: Any, tasks: list[Any], **options: Any) -> Any:
    if shape == "map":
        return map_tasks(function, tasks, name=function.__name__, **options)
    return {"reduce": reduce_tasks, "scan": scan_tasks}[shape](
        function, tasks, work.collect, name=function.__name__, **options
    )


@pytest.mark.parametrize("count", COUNTS)
def test_map_is_the_plain_loop(client: Any, count: int) -> None:
    expected = [work.describe(number) for number in range(count)]
    assert map_tasks(work.describe, range(count), client=None, name="describe") == expected
    assert map_tasks(work.describe, range(count), client=client, name="describe") == expected


def test_no_tasks(client: Any) -> None:
    for where in (None, client):
        assert map_tasks(work.describe, [], client=where, name="describe") == []
        with pytest.raises(ValueError, match="at least one task"):
            reduce_tasks(work.describe, [], work.bracket, client=where, name="describe")


def test_more_tasks_than_are_submitted_at_once(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "WINDOW", 5)
    assert map_tasks(work.same, list(range(23)), client=client, name="same") == list(range(23))


@pytest.mark.parametrize("count", COUNTS)
def test_the_shape_of_the_tree_depends_on_the_number_of_tasks_only(client: Any, count: int) -> None:
    expected = tree_of([work.describe(number) for number in range(count)])
    for where in (None, client):
        assert reduce_tasks(work.describe, range(count), work.bracket, client=where, name="describe") == expected


@pytest.mark.parametrize("count", [1, 9, 65])
def test_scan_merges_one_side_and_keeps_the_other(client: Any, count: int) -> None:
    expected = tree_of([f"<{number}>" for number in range(count)]), [f"kept {number}" for number in range(count)]
    assert scan_tasks(work.pair, range(count), work.bracket, client=None, name="pair") == expected
    total, kept = scan_tasks(work.pair, range(count), work.bracket, client=client, name="pair")
    assert (total, client.gather(kept)) == expected


def in_pieces(function: Any, count: int, client: Any, **options: Any) -> Any:
    parts = {"merge": work.merge_dicts, "cut": work.every_third, "finish": work.sorted_items, "pieces": 3} | options
    return reduce_in_pieces(function, range(count), client=client, name="numbers", **parts)


@pytest.mark.parametrize("count", [1, 9, 65, 130])
def test_a_large_result_comes_in_pieces(client: Any, count: int) -> None:
    expected = [[(n, n * n) for n in range(count) if n % 3 == piece] for piece in range(3)]
    for where in (None, client):
        assert list(in_pieces(work.square, count, where)) == expected


@pytest.mark.parametrize("place", ["leaf", "merge", "cut", "finish"])
def test_an_error_reaches_whoever_waits_for_a_piece(client: Any, place: str) -> None:
    function = work.raise_not_finite if place == "leaf" else work.square
    options = {} if place == "leaf" else {place: work.fail_to_merge if place != "cut" else work.fail_to_cut}
    for where in (None, client):
        with pytest.raises(errors.OchError):
            list(in_pieces(function, 9, where, **options))


def test_pieces_that_nobody_takes_are_forgotten(client: Any) -> None:
    pieces = in_pieces(work.square, 9, client)
    assert next(pieces) == [(0, 0), (3, 9), (6, 36)]
    pieces.close()
    wait_until(lambda: not [key for key in client.futures if "numbers" in str(key)], 10)


class Weighed:
    """A value of a leaf or a merge that counts how many of its kind are alive."""

    alive = most = 0

    def __init__(self) -> None:
        type(self).alive += 1
        type(self).most = max(self.most, self.alive)

    def __del__(self) -> None:
        type(self).alive -= 1


@pytest.mark.parametrize("shape", [reduce_tasks, scan_tasks])
def test_in_this_process_only_a_few_values_of_each_level_are_held(shape: Any) -> None:
    """Moments of 960 dimensions take 7 MB: those of all partitions of a large corpus would fill the machine."""
    Weighed.most = 0
    leaf = {reduce_tasks: lambda task, shared: Weighed(), scan_tasks: lambda task, shared: (Weighed(), task)}[shape]
    shape(leaf, range(520), lambda parts: Weighed(), client=None, name="weigh")
    assert Weighed.most <= 4 * graph.FAN_IN


AWKWARD: list[Any] = [(len, [1, 2]), ("same-0", 1), {"a": (len, [1])}, [(len, "ab")], "same-0", None, b"x", 1.5]


def test_tasks_are_data_whatever_they_look_like(client: Any) -> None:
    assert map_tasks(work.same, AWKWARD, client=client, name="same") == AWKWARD
    boxed = [[task] for task in AWKWARD]
    assert reduce_tasks(work.same, boxed, work.collect, client=client, name="same") == AWKWARD


def graph_bytes(count: int, shared: np.ndarray, client: Any) -> int:
    made = graph.TaskGraph(graph.Leaves(work.describe, range(count), "describe", shared), client)
    (root,) = graph.merge_tree(made.nodes, work.bracket, "describe")
    return len(pickle.dumps(dict(dask.optimize(root)[0].__dask_graph__())))


def test_shared_data_travels_once(client: Any) -> None:
    small, large = np.zeros(1, np.uint8), np.zeros(1_000_000, np.uint8)
    few, many = (graph_bytes(count, large, client) - graph_bytes(count, small, client) for count in (8, 64))
    assert few == pytest.approx(1_000_000, abs=1000)
    assert many == pytest.approx(1_000_000, abs=1000)
    found = reduce_tasks(work.describe, range(9), work.bracket, client=client, name="describe", shared=large)
    assert found == reduce_tasks(work.describe, range(9), work.bracket, client=None, name="describe", shared=large)
    assert "<81000000>" in found


def test_progress_adds_up(client: Any) -> None:
    for where in (None, client):
        for shape in ("map", "reduce"):
            got: list[int] = []
            run(shape, work.same, list(range(40)), client=where, advance=got.append, weight=lambda task: task)
            assert sorted(got) == list(range(40))


# Failures


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_survives_pickling(cls: type[errors.OchError]) -> None:
    error = errors.NonFiniteError("two rows", (3, 9), 2) if cls is errors.NonFiniteError else cls("a sentence")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.args, vars(again)) == (cls, str(error), error.args, vars(error))


@pytest.mark.parametrize("where", ["here", "there"])
@pytest.mark.parametrize("shape", ["map", "reduce", "scan"])
def test_an_error_of_ours_arrives_as_it_was(client: Any, where: str, shape: str) -> None:
    tasks = list(range(5 if shape == "scan" else 3, 20))
    with pytest.raises(errors.NonFiniteError, match="5 is bad") as caught:
        run(shape, work.raise_not_finite, tasks, client=client if where == "there" else None)
    assert (caught.value.rows, caught.value.total) == ((5, 6), 2)


def test_an_error_in_a_merge_arrives_as_it_was(client: Any) -> None:
    for where in (None, client):
        with pytest.raises(errors.ConflictError, match="do not fit"):
            reduce_tasks(work.same, range(9), work.fail_to_merge, client=where, name="same")


def marks(folder: Path) -> dict[int, int]:
    """How often each task ran."""
    found: dict[int, int] = {}
    for path in folder.iterdir():
        number = int(path.name.partition(".")[0])
        found[number] = found.get(number, 0) + 1
    return found


@pytest.mark.parametrize("shape", ["map", "reduce"])
@pytest.mark.parametrize("where", ["here", "there"])
def test_all_tasks_are_tried_once_before_an_error_of_ours_is_raised(
    client: Any, tmp_path: Path, where: str, shape: str
) -> None:
    tasks = [
        Attempt(str(tmp_path), number, errors.BadInputError(f"bad {number}") if number in (2, 4) else None)
        for number in range(20)
    ]
    with pytest.raises(errors.BadInputError, match="bad 2"):
        run(shape, work.attempt, tasks, client=client if where == "there" else None)
    assert marks(tmp_path) == dict.fromkeys(range(20), 1)


def test_an_accident_is_tried_again(client: Any, tmp_path: Path) -> None:
    for where, folder in ((None, tmp_path / "here"), (client, tmp_path / "there")):
        folder.mkdir()
        tasks = [Attempt(str(folder), number) for number in range(5)]
        assert map_tasks(work.attempt_twice, tasks, client=where, name="attempt_twice") == list(range(5))
        assert marks(folder) == dict.fromkeys(range(5), 2)
        tasks = [Attempt(str(folder), number) for number in range(10, 15)]
        reduced = reduce_tasks(work.attempt_twice, tasks, work.collect, client=where, name="attempt_twice")
        assert reduced == list(range(10, 15))


@pytest.mark.parametrize("shape", ["map", "reduce"])
def test_an_accident_that_stays_is_incomplete_work(client: Any, tmp_path: Path, shape: str) -> None:
    for where, folder in ((None, tmp_path / "here"), (client, tmp_path / "there")):
        folder.mkdir()
        tasks = [Attempt(str(folder), number, OSError(5, "disk") if number == 3 else None) for number in range(6)]
        with pytest.raises(errors.IncompleteError, match=r"failed 3 times \(OSError: .*disk.*run the command again"):
            run(shape, work.attempt, tasks, client=where)
        assert marks(folder)[3] == 3
        if shape == "map":
            assert set(marks(folder)) == set(range(6))


def test_a_mistake_in_the_code_is_not_hidden_in_this_process() -> None:
    with pytest.raises(ZeroDivisionError):
        map_tasks(lambda task: 1 // task, [0], client=None, name="divide")


class Block:
    """Stands for the data that a task works on."""

    alive = most = 0

    def __init__(self) -> None:
        type(self).alive += 1
        type(self).most = max(self.most, self.alive)

    def __del__(self) -> None:
        type(self).alive -= 1


def raise_with_a_block(task: int) -> int:
    block = Block()
    try:
        raise OSError(5, f"about {block}")
    except OSError as error:
        raise errors.BadInputError(f"bad {task}") from error


def test_kept_errors_do_not_keep_the_data_of_their_tasks() -> None:
    Block.most = 0
    with pytest.raises(errors.BadInputError, match="bad 0") as caught:
        map_tasks(raise_with_a_block, range(5), client=None, name="raise")
    assert (Block.most, Block.alive) == (1, 0)
    assert "raise_with_a_block" in {entry.name for entry in caught.traceback}


# Losses


def test_a_task_that_takes_down_its_worker_ends_in_a_sentence(client: Any) -> None:
    # Tasks that were waiting on the same workers every time may be named as well: Dask cannot tell them apart.
    with pytest.raises(errors.IncompleteError, match=r"every worker that task die-\w+-\d was given to died") as caught:
        map_tasks(work.die, range(6), client=client, name="die")
    assert caught.value.exit_code == 5
    client.wait_for_workers(2, timeout=120)


def test_a_result_that_died_with_its_worker_is_made_again(client: Any) -> None:
    client.wait_for_workers(2, timeout=120)
    future = client.submit(work.slow_pid, 1.0, key="slow_pid-lost", pure=False)
    first = future.result(timeout=30)
    psutil.Process(first).kill()
    wait_until(lambda: future.status != "finished", 30)
    again = outcome.wait_for(future, outcome.Watch(client))  # of the same key, on another process
    assert isinstance(again, int)
    assert again != first
    client.wait_for_workers(2, timeout=120)


def test_all_workers_gone(fragile: Separate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome, "POLL_SECONDS", 0.2)
    with (
        dask.config.set({"och.no-workers-timeout": "1s"}),
        connect(ClusterOptions(scheduler=fragile.address)) as client,
    ):
        assert map_tasks(work.same, [1], client=client, name="same") == [1]
        fragile.workers[0].kill()
        with pytest.raises(errors.ClusterError, match="no worker"):
            map_tasks(work.sleep, [0.1] * 3, client=client, name="sleep")
        with pytest.raises(errors.ClusterError, match="no worker"):
            reduce_tasks(work.sleep, [0.1] * 3, work.collect, client=client, name="sleep")
        with pytest.raises(errors.ClusterError, match="no worker"), outcome.watched(client):
            client.submit(work.same, 1, pure=False).result()


@pytest.mark.parametrize("way", ["kill", "stop"])
def test_a_lost_scheduler(fragile: Separate, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(outcome, "POLL_SECONDS", 0.2)
    number = signal.SIGKILL if way == "kill" else signal.SIGSTOP
    with dask.config.set({"och.answer-timeout": "1s"}), connect(ClusterOptions(scheduler=fragile.address)) as client:
        timer = threading.Timer(0.5, os.kill, (fragile.scheduler.pid, number))
        timer.start()
        started = time.monotonic()
        with pytest.raises(errors.ClusterError, match="scheduler"):
            map_tasks(work.sleep, [30.0] * 3, client=client, name="sleep")
        if way == "kill":
            with pytest.raises(errors.ClusterError, match="scheduler"):
                reduce_tasks(work.sleep, [30.0] * 3, work.collect, client=client, name="sleep")
            with pytest.raises(errors.ClusterError, match="scheduler"), outcome.watched(client):
                client.submit(work.same, 1, pure=False).result()
        assert time.monotonic() - started < 25
        os.kill(fragile.scheduler.pid, signal.SIGCONT)


class Calm:
    """A client whose workers are as told."""

    status = "running"
    scheduler = SimpleNamespace(identity=None)

    def __init__(self) -> None:
        self.workers: list[dict[str, Any]] = []

    def sync(self, function: Any, **options: Any) -> dict[str, Any]:
        return {"workers": dict(enumerate(self.workers))}


def test_the_limit_without_workers_starts_anew_whenever_something_works(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(outcome.time, "monotonic", lambda: now)
    client = Calm()
    watch = outcome.Watch(client)
    watch.check()
    now += 59
    watch.check()
    client.workers = [{"status": "running", "metrics": {}}]
    watch.check()
    client.workers = [{"status": "paused", "metrics": {"task_counts": {"executing": 1}}}]
    now += 100
    watch.check()
    client.workers = [{"status": "paused", "metrics": {"task_counts": {"ready": 1}}}]
    now += 100
    watch.check()
    now += 61
    with pytest.raises(errors.ClusterError, match="only paused ones, for 60 s"):
        watch.check()
