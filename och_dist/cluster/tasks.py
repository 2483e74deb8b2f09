"""The one way to the workers: map tasks, or reduce them in a tree whose shape depends on their number alone.

With ``client=None`` both run as plain loops in this process: that is their specification, Dask only runs it faster.
A reduction is declared by what a task makes of its part and by how some of those become one, with the same bytes here
and there, for they are merged in the same order.
Every wait has a limit: a cluster without workers or without a scheduler ends in :class:`ClusterError`.
"""

from __future__ import annotations

import contextlib
import queue
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import getitem
from typing import TYPE_CHECKING, Any, TypeVar

from och_dist.cluster.outcome import (
    POLL_SECONDS,
    Failure,
    Watch,
    answer_seconds,
    begin_gather,
    catch,
    merged,
    retries,
    retry,
    unwrap,
    wait_for,
)
from och_dist.cluster.tracing import Mark, Trace, traced
from och_dist.errors import ClusterError
from och_dist.stop import Stop, listening

if TYPE_CHECKING:
    from dask.delayed import Delayed
    from distributed import Client, Future

T = TypeVar("T")
Task = Any
Advance = Callable[[int], None]
Merge = Callable[[Sequence[T]], T]

WINDOW = 4096
BATCH = 256
LINGER = 0.05
"""Seconds in which more tasks may end before their results are fetched, while more than BATCH are waited for."""

STOP = -1
FAN_IN = 8


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
    with listening(lambda: finished.put(STOP)) as stop:
        if client is None:
            outcomes = _map_here(function, tasks, stop)
        else:
            trace = Trace(client, name, len(tasks), shown=advance is not None, inherited=inherited)
            outcomes = _map_there(function, tasks, client, trace, finished, stop)
        with contextlib.closing(outcomes):
            for number, outcome in outcomes:
                results[number] = outcome
                if advance is not None and not isinstance(outcome, Failure):
                    advance(weight(tasks[number]))
        stop.obey()
    return [unwrap(results[number]) for number in range(len(tasks))]


def _map_here(
    function: Callable[..., T], tasks: Sequence[Task], stop: Stop
) -> Generator[tuple[int, T | Failure], None, None]:
    for number, task in enumerate(tasks):
        if stop.asked:
            return
        yield number, retry(function, task)


def _map_there(
    function: Callable[..., T],
    tasks: Sequence[Task],
    client: Client,
    trace: Trace,
    finished: queue.SimpleQueue[int],
    stop: Stop,
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
                stop.announce(len(waiting))
            futures = {number: waiting[number] for number in ended if number in waiting}
            for number, outcome in zip(futures, _fetch(list(futures.values()), watch), strict=True):
                del waiting[number]
                if isinstance(outcome, Failure) and isinstance(outcome.error, ClusterError):
                    raise outcome.error
                failed = failed or isinstance(outcome, Failure)
                yield number, outcome
            if following := list(islice(upcoming, len(futures))):
                submit(following)
    finally:
        trace.end(done=not waiting and not failed and not stop.asked)
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


def _fetch(futures: list[Future], watch: Watch) -> list[Any]:
    """What became of some futures: fetched together, in half the time, unless one of them failed."""
    together = wait_for(futures, watch) if len(futures) > 1 else None
    return together if isinstance(together, list) else [wait_for(future, watch) for future in futures]


def reduce_tasks(
    function: Callable[..., T],
    tasks: Sequence[Task],
    merge: Merge[T],
    *,
    client: Client | None,
    name: str,
    shared: Any = None,
    advance: Advance | None = None,
    weight: Callable[[Task], int] = lambda task: 1,
) -> T:
    """``merge`` over ``function(task, shared)``, FAN_IN at a time.

    ``shared`` is sent once and reaches each worker once; intermediate results live on the workers only.
    """
    _require(tasks)
    if client is None:
        return merge_here(_values_here(function, tasks, shared, advance, weight), merge)
    graph = TaskGraph(function, tasks, client, name, shared, advance, weight)
    return graph.run(graph.merge(graph.leaves, merge)[0])[0]


def scan_tasks(
    function: Callable[..., tuple[T, Any]],
    tasks: Sequence[Task],
    merge: Merge[T],
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
    _require(tasks)
    if client is not None:
        graph = TaskGraph(function, tasks, client, name, shared, advance, weight)
        return graph.run(graph.merge(graph.side(0, "sum"), merge)[0], graph.side(1, "keep"))
    kept: list[Any] = []

    def first_sides() -> Iterator[Any]:
        for value in _values_here(function, tasks, shared, advance, weight):
            kept.append(catch(getitem, value, 1))
            yield catch(getitem, value, 0)

    return merge_here(first_sides(), merge), kept


def reduce_in_pieces(
    function: Callable[..., T],
    tasks: Sequence[Task],
    merge: Merge[T],
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
    if client is not None:
        yield from TaskGraph(function, tasks, client, name, shared).pieces(merge, cut, finish, pieces)
        return
    whole = reduce_tasks(function, tasks, merge, client=None, name=name, shared=shared)
    for number in range(pieces):
        yield finish(cut(whole, number))


def _require(tasks: Sequence[Task]) -> None:
    if not tasks:
        raise ValueError("a reduction needs at least one task")


def _values_here(
    function: Callable[..., T],
    tasks: Sequence[Task],
    shared: Any,
    advance: Advance | None,
    weight: Callable[[Task], int],
) -> Iterator[T | Failure]:
    for task in tasks:
        yield retry(function, task, shared)
        if advance is not None:
            advance(weight(task))


def merge_here(values: Iterable[T | Failure], merge: Merge[T]) -> T:
    """The root of the tree over ``values``; FAN_IN of a level are merged as soon as they are there."""
    levels: list[list[Any]] = [[]]

    def lift(depth: int) -> None:
        if depth + 1 == len(levels):
            levels.append([])
        levels[depth + 1].append(merged(merge, levels[depth]))
        levels[depth] = []

    for value in values:
        levels[0].append(value)
        depth = 0
        while len(levels[depth]) == FAN_IN:
            lift(depth)
            depth += 1
    depth = 0
    while depth == 0 or depth + 1 < len(levels) or len(levels[depth]) > 1:
        if levels[depth]:
            lift(depth)
        depth += 1
    return unwrap(levels[depth][0])


def merge_tree(level: Sequence[Any], merge: Merge[Any], name: str, width: int = 1) -> list[Delayed]:
    """The nodes of the first level of at most ``width`` above ``level`` (Delayed values or futures) of a Dask graph."""
    from dask import delayed

    combine, depth, nodes = delayed(merged, pure=False), 0, list(level)
    while depth == 0 or len(nodes) > width:
        nodes = [
            combine(merge, nodes[i : i + FAN_IN], dask_key_name=f"merge_{name}-{depth}-{i // FAN_IN}")
            for i in range(0, len(nodes), FAN_IN)
        ]
        depth += 1
    return nodes


def run_leaf(
    call: Callable[[Any], T], shared: Any, topic: str | None, progress: tuple[int, int], mark: Mark | None
) -> T | Failure:
    """The task of one leaf of a :class:`TaskGraph`."""
    value = traced(mark, call, shared)
    if topic is not None:
        from distributed import get_worker

        with contextlib.suppress(ValueError):
            get_worker().log_event(topic, progress)
    return value


class TaskGraph:
    """A reduction as one Dask graph; only its root, and what a scan keeps, stays in memory.

    ``advance`` is called with the weight of each task that is done.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        tasks: Sequence[Task],
        client: Client,
        name: str,
        shared: Any,
        advance: Advance | None = None,
        weight: Callable[[Task], int] = lambda task: 1,
    ) -> None:
        from dask import delayed

        _require(tasks)
        self.client, self.advance = client, advance
        token = uuid.uuid4().hex[:8]
        self.name = f"{name}-{token}"
        self.trace = Trace(client, name, len(tasks), shown=advance is not None)
        # The scheduler remembers the events of every topic: where no progress is shown, there is none.
        self.topic = None if advance is None else f"och-progress-{token}"
        data = None if shared is None else delayed(shared, name=f"{name}_shared-{token}", traverse=False)
        leaf = delayed(run_leaf, pure=False, traverse=False)
        self.leaves = [
            leaf(
                partial(function, task),  # Dask does not look for collections inside of it
                data,
                self.topic,
                (number, weight(task)),
                self.trace.mark(number),
                dask_key_name=f"{self.name}-{number}",
            )
            for number, task in enumerate(tasks)
        ]

    def merge(self, level: Sequence[Delayed], merge: Merge[Any], width: int = 1, tag: str = "") -> list[Delayed]:
        return merge_tree(level, merge, f"{self.name}{tag}", width)

    def side(self, number: int, label: str) -> list[Delayed]:
        """One of the values that each leaf returns."""
        from dask import delayed

        part = delayed(catch, pure=False)
        return [
            part(getitem, leaf, number, dask_key_name=f"{label}_{self.name}-{place}")
            for place, leaf in enumerate(self.leaves)
        ]

    def run(self, root: Delayed, kept: Sequence[Delayed] = ()) -> tuple[Any, list[Future]]:
        """The value of the root, and futures of what is to be kept on the workers."""
        if self.topic is not None:
            self.client.subscribe_topic(self.topic, ProgressCounter(self.advance))
        watch, done = Watch(self.client), False
        try:
            futures = self.client.compute([root, *kept], retries=retries())
            value = unwrap(_await(futures[0], watch))
            done = True
            return value, futures[1:]
        finally:
            self.trace.end(done=done)
            if self.topic is not None:
                with contextlib.suppress(Exception):
                    self.client.unsubscribe_topic(self.topic)

    def pieces(self, merge: Merge[T], cut: Any, finish: Any, count: int) -> Iterator[T]:
        """The last merges once for each piece, on the workers, from what a level of up to FAN_IN^2 parts has of it."""
        from dask import delayed

        step = delayed(catch, pure=False)
        level, roots = self.merge(self.leaves, merge, FAN_IN**2), []
        for number in range(count):
            end = f"{self.name}-{number}"
            parts = [step(cut, node, number, dask_key_name=f"cut_{end}-{i}") for i, node in enumerate(level)]
            (root,) = self.merge(parts, merge, tag=f"-{number}")
            roots.append(step(finish, root, dask_key_name=f"finish_{end}"))
        watch, done = Watch(self.client), False
        futures: list[Any] = self.client.compute(roots, retries=retries())
        ahead = begin_gather(futures[0], watch)
        try:
            for number in range(count):
                value = unwrap(_await(futures[number], watch, ahead))
                futures[number] = None  # the workers may forget it
                if number + 1 < count:
                    ahead = begin_gather(futures[number + 1], watch)  # comes while this one is used
                yield value
            done = True
        finally:
            self.trace.end(done=done)
            ahead.cancel()
            with contextlib.suppress(Exception):
                self.client.cancel([future for future in futures if future is not None], force=True)


class ProgressCounter:
    """Passes the progress of each task on once, however often it ran."""

    def __init__(self, advance: Advance | None) -> None:
        self.advance = advance
        self.counted: set[int] = set()

    def __call__(self, event: tuple[float, tuple[int, int]]) -> None:
        number, size = event[1]
        if self.advance is not None and number not in self.counted:
            self.counted.add(number)
            self.advance(size)


def _await(future: Future, watch: Watch, gathering: Any = None) -> Any:
    try:
        return wait_for(future, watch, gathering)
    except BaseException:
        with contextlib.suppress(Exception):
            watch.client.cancel(future, force=True)
        raise
