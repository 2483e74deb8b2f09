"""The two graph shapes: map tasks into a store, and reduce tasks in a tree. Nothing of ours is in here.

With ``client=None`` both run as plain loops in this process: that is their specification, Dask only runs it faster.
Every wait has a limit: a cluster without workers or without a scheduler ends in :class:`ClusterError`.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from och_dist.cluster.outcome import POLL_SECONDS, Failure, Watch, answer_seconds, patient, retries, settle, unwrap
from och_dist.cluster.tracing import Trace, traced
from och_dist.cluster.tree import LeavesHere, LeavesThere
from och_dist.errors import ClusterError
from och_dist.stop import Listener, listening

if TYPE_CHECKING:
    from distributed import Client, Future

T = TypeVar("T")
Task = Any
Advance = Callable[[int], None]

WINDOW = 4096
BATCH = 256
LINGER = 0.05
"""Seconds in which more tasks may end before their results are fetched, while more than BATCH are waited for."""

STOP = -1


def map_tasks(
    function: Callable[..., T],
    tasks: Sequence[Task],
    *,
    client: Client | None,
    name: str,
    advance: Advance | None = None,
    weight: Callable[[Task], int] = lambda task: 1,
    inherited: Collection[int] = (),
) -> list[T]:
    """``[function(task) for task in tasks]``; all tasks are tried before the first error, in task order, is raised.

    When the process is asked to stop, no further task is begun, and those under way are given time to finish.
    ``inherited`` are the places among all tasks of those that an earlier run did; it is only shown.
    """
    results: dict[int, T | Failure] = {}
    finished: queue.SimpleQueue[int] = queue.SimpleQueue()
    with listening(lambda: finished.put(STOP)) as listener:
        if client is None:
            outcomes = _map_here(function, tasks, listener)
        else:
            trace = Trace(client, name, len(tasks), shown=advance is not None, inherited=inherited)
            outcomes = _map_there(function, tasks, client, trace, finished, listener)
        with contextlib.closing(outcomes):
            for number, outcome in outcomes:
                results[number] = outcome
                if advance is not None and not isinstance(outcome, Failure):
                    advance(weight(tasks[number]))
        listener.obey()
    return [unwrap(results[number]) for number in range(len(tasks))]


def _map_here(
    function: Callable[..., T], tasks: Sequence[Task], listener: Listener
) -> Generator[tuple[int, T | Failure], None, None]:
    for number, task in enumerate(tasks):
        if listener.asked:
            return
        yield number, patient(function, task)


def _map_there(
    function: Callable[..., T],
    tasks: Sequence[Task],
    client: Client,
    trace: Trace,
    finished: queue.SimpleQueue[int],
    listener: Listener,
) -> Generator[tuple[int, T | Failure], None, None]:
    """Keep at most WINDOW tasks submitted; hand out results as they come; release them at once.

    ``finished`` holds the numbers of tasks that have ended, and STOP when the process was asked to stop.
    """
    waiting: dict[int, Future] = {}
    failed = False
    upcoming: Iterator[int] = iter(range(len(tasks)))

    def submit(numbers: list[int]) -> None:
        futures = client.map(
            traced,
            [trace.mark(number) for number in numbers],
            [function] * len(numbers),
            [tasks[number] for number in numbers],
            key=[f"{trace.token}-{number}" for number in numbers],
            pure=False,
            retries=retries(),
        )
        for number, future in zip(numbers, futures, strict=True):
            waiting[number] = future
            future.add_done_callback(lambda _, number=number: finished.put(number))

    watch = Watch(client)
    try:
        submit(list(islice(upcoming, WINDOW)))
        while waiting:
            ended = _ended(finished, watch, LINGER if len(waiting) > BATCH else 0.0)
            if STOP in ended:
                upcoming = iter(())
                _drop_unbegun(waiting, client)
                listener.announce(len(waiting))
            futures = {number: waiting[number] for number in ended if number in waiting}
            for number, outcome in zip(futures, _settle_all(list(futures.values()), watch), strict=True):
                del waiting[number]
                if isinstance(outcome, Failure) and isinstance(outcome.error, ClusterError):
                    raise outcome.error
                failed = failed or isinstance(outcome, Failure)
                yield number, outcome
            if following := list(islice(upcoming, len(futures))):
                submit(following)
    finally:
        trace.end(done=not waiting and not failed and not listener.asked)
        if waiting:
            with contextlib.suppress(Exception):
                client.cancel(list(waiting.values()), force=True)


def _drop_unbegun(waiting: dict[int, Future], client: Client) -> None:
    """Cancel the tasks that no worker has yet; all of them stay if the scheduler cannot tell."""
    try:
        held = client.sync(client.scheduler.processing, workers=None, callback_timeout=answer_seconds())
    except (OSError, TimeoutError):
        return
    begun = {key for keys in held.values() for key in keys}
    unbegun = {n: future for n, future in waiting.items() if future.key not in begun and future.status == "pending"}
    for number in unbegun:
        del waiting[number]
    client.cancel(list(unbegun.values()), force=True)


def _ended(finished: queue.SimpleQueue[int], watch: Watch, linger: float) -> list[int]:
    """Numbers of the tasks that have ended since the last call, at least one, at most BATCH; waits ``linger`` seconds
    for more after the first."""
    numbers: list[int] = []
    while not numbers:
        try:
            numbers.append(finished.get(timeout=POLL_SECONDS))
        except queue.Empty:
            watch.check()
    watch.alone_since = None
    end = time.monotonic() + linger
    with contextlib.suppress(queue.Empty):
        while len(numbers) < BATCH and numbers[-1] != STOP:
            numbers.append(finished.get(timeout=max(0.0, end - time.monotonic())))
    return numbers


def _settle_all(futures: list[Future], watch: Watch) -> list[Any]:
    """What became of some futures: fetched together, in half the time, unless one of them failed."""
    together = settle(futures, watch) if len(futures) > 1 else None
    return together if isinstance(together, list) else [settle(future, watch) for future in futures]


def reduce_tasks(
    function: Callable[..., T],
    tasks: Sequence[Task],
    merge: Callable[[Sequence[T]], T],
    *,
    client: Client | None,
    name: str,
    shared: Any = None,
    advance: Advance | None = None,
    weight: Callable[[Task], int] = lambda task: 1,
) -> T:
    """``merge`` over ``function(task, shared)``, in a tree whose shape depends on the number of tasks alone.

    ``shared`` is sent once and reaches each worker once; intermediate results live on the workers only.
    """
    leaves = _leaves(function, tasks, client, name, shared, advance, weight)
    return leaves.reduce(merge)


def reduce_in_pieces(
    function: Callable[..., T],
    tasks: Sequence[Task],
    merge: Callable[[Sequence[T]], T],
    *,
    pieces: int,
    cut: Callable[[T, int], T],
    finish: Callable[[T], T],
    client: Client | None,
    name: str,
    shared: Any = None,
) -> Iterator[T]:
    """:func:`reduce_tasks` whose result is too large to be held: ``finish(cut(result, number))`` for each piece.

    ``cut`` and ``merge`` may be applied in either order. Two pieces at most are in this process at a time.
    """
    leaves = _leaves(function, tasks, client, name, shared, None, lambda task: 1)
    return leaves.pieces(merge, cut, finish, pieces)


def scan_tasks(
    function: Callable[..., tuple[T, Any]],
    tasks: Sequence[Task],
    merge: Callable[[Sequence[T]], T],
    *,
    client: Client | None,
    name: str,
    shared: Any = None,
    advance: Advance | None = None,
    weight: Callable[[Task], int] = lambda task: 1,
) -> tuple[T, list[Any]]:
    """:func:`reduce_tasks` over the first of the two values that ``function`` returns; the second stays where it is.

    Returns the merged value and, per task, the second value (a future of it on a cluster).
    """
    leaves = _leaves(function, tasks, client, name, shared, advance, weight)
    return leaves.scan(merge)


def _leaves(
    function: Callable[..., T],
    tasks: Sequence[Task],
    client: Client | None,
    name: str,
    shared: Any,
    advance: Advance | None,
    weight: Callable[[Task], int],
) -> LeavesHere | LeavesThere:
    if not tasks:
        raise ValueError("a reduction needs at least one task")
    if client is None:
        return LeavesHere(function, tasks, shared, advance, weight)
    return LeavesThere(function, tasks, client, name, shared, advance, weight)
