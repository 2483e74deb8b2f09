"""The two graph shapes: map tasks into a store, and reduce tasks in a tree. Nothing of ours is in here.

With ``client=None`` both run as plain loops in this process: that is their specification, Dask only runs it faster.
Every wait has a limit: a cluster without workers or without a scheduler ends in :class:`ClusterError`.
"""

from __future__ import annotations

import contextlib
import queue
import uuid
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from och_dist.errors import ClusterError
from och_dist.outcome import POLL_SECONDS, Failure, Watch, answer_seconds, guarded, patient, retries, settle
from och_dist.stop import Listener, listening
from och_dist.tracing import Mark, Trace, traced

if TYPE_CHECKING:
    from distributed import Client, Future

T = TypeVar("T")
Task = Any
Advance = Callable[[int], None]

FAN_IN = 8
WINDOW = 4096
BATCH = 256
STOP = -1
SIDES = ((0, "sum"), (1, "keep"))


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
    values = []
    for number in range(len(tasks)):
        value = results[number]
        if isinstance(value, Failure):
            raise value.error
        values.append(value)
    return values


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
            ended = _ended(finished, watch)
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


def _ended(finished: queue.SimpleQueue[int], watch: Watch) -> list[int]:
    """Numbers of the tasks that have ended since the last call, at least one, at most BATCH."""
    numbers: list[int] = []
    while not numbers:
        try:
            numbers.append(finished.get(timeout=POLL_SECONDS))
        except queue.Empty:
            watch.check()
    watch.alone_since = None
    while len(numbers) < BATCH and not finished.empty():
        numbers.append(finished.get())
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
) -> _LeavesHere | _LeavesThere:
    if not tasks:
        raise ValueError("a reduction needs at least one task")
    if client is None:
        return _LeavesHere(function, tasks, shared, advance, weight)
    return _LeavesThere(function, tasks, client, name, shared, advance, weight)


def _merged(merge: Callable[[Sequence[T]], T], parts: Sequence[T | Failure]) -> T | Failure:
    for part in parts:
        if isinstance(part, Failure):
            return part
    return guarded(merge, parts)


def _unwrap(value: Any) -> Any:
    if isinstance(value, Failure):
        raise value.error
    return value


def _part(value: Any, number: int) -> Any:
    return value if isinstance(value, Failure) else value[number]


class _LeavesHere:
    """The tree as plain loops; only a few values of each level are held at a time."""

    def __init__(self, function: Any, tasks: Sequence[Task], shared: Any, advance: Any, weight: Any) -> None:
        self.function, self.tasks, self.shared = function, tasks, shared
        self.advance, self.weight = advance, weight

    def _values(self) -> Iterator[Any]:
        for task in self.tasks:
            yield patient(self.function, task, self.shared)
            if self.advance is not None:
                self.advance(self.weight(task))

    def reduce(self, merge: Callable[[Sequence[T]], T]) -> Any:
        return _reduced(self._values(), merge)

    def scan(self, merge: Callable[[Sequence[T]], T]) -> tuple[Any, list[Any]]:
        kept: list[Any] = []

        def first_sides() -> Iterator[Any]:
            for value in self._values():
                kept.append(_part(value, 1))
                yield _part(value, 0)

        return _reduced(first_sides(), merge), kept


def _reduced(values: Iterator[T | Failure], merge: Callable[[Sequence[T]], T]) -> T:
    """The root of the tree over ``values``; FAN_IN of a level are merged as soon as they are there."""
    levels: list[list[Any]] = [[]]

    def lift(depth: int) -> None:
        if depth + 1 == len(levels):
            levels.append([])
        levels[depth + 1].append(_merged(merge, levels[depth]))
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
    return _unwrap(levels[depth][0])


def _leaf(
    call: Callable[[Any], T], shared: Any, topic: str | None, progress: tuple[int, int], mark: Mark | None
) -> T | Failure:
    value = traced(mark, call, shared)
    if topic is not None:
        from distributed import get_worker

        with contextlib.suppress(ValueError):
            get_worker().log_event(topic, progress)
    return value


class _LeavesThere:
    """The same tree as one Dask graph; only its root, and what :meth:`scan` keeps, stays in memory."""

    def __init__(
        self,
        function: Any,
        tasks: Sequence[Task],
        client: Client,
        name: str,
        shared: Any,
        advance: Any,
        weight: Any,
    ) -> None:
        from dask import delayed

        self.client, self.name, self.advance = client, name, advance
        self.token = uuid.uuid4().hex[:8]
        self.trace = Trace(client, name, len(tasks), shown=advance is not None)
        # The scheduler remembers the events of every topic: without a listener there is none.
        self.topic = None if advance is None else f"och-progress-{self.token}"
        data = None if shared is None else delayed(shared, name=f"{name}_shared-{self.token}", traverse=False)
        leaf = delayed(_leaf, pure=False, traverse=False)
        self.nodes = [
            leaf(
                partial(function, task),  # Dask does not look for collections inside of it
                data,
                self.topic,
                (number, weight(task)),
                self.trace.mark(number),
                dask_key_name=f"{name}-{self.token}-{number}",
            )
            for number, task in enumerate(tasks)
        ]

    def _tree(self, level: list[Any], merge: Callable[[Sequence[T]], T]) -> Any:
        from dask import delayed

        combine, depth = delayed(_merged, pure=False), 0
        while depth == 0 or len(level) > 1:
            level = [
                combine(
                    merge,
                    level[i : i + FAN_IN],
                    dask_key_name=f"merge_{self.name}-{self.token}-{depth}-{i // FAN_IN}",
                )
                for i in range(0, len(level), FAN_IN)
            ]
            depth += 1
        return level[0]

    def _run(self, root: Any, kept: list[Any]) -> tuple[Any, list[Any]]:
        if self.topic is not None:
            self.client.subscribe_topic(self.topic, _Count(self.advance))
        watch, done = Watch(self.client), False
        try:
            futures = self.client.compute([root, *kept], retries=retries())
            value = _unwrap(_await(futures[0], watch))
            done = True
            return value, futures[1:]
        finally:
            self.trace.end(done=done)
            if self.topic is not None:
                with contextlib.suppress(Exception):
                    self.client.unsubscribe_topic(self.topic)

    def reduce(self, merge: Callable[[Sequence[T]], T]) -> Any:
        return self._run(self._tree(self.nodes, merge), [])[0]

    def scan(self, merge: Callable[[Sequence[T]], T]) -> tuple[Any, list[Any]]:
        from dask import delayed

        part = delayed(_part, pure=False)
        pairs = [
            [part(node, side, dask_key_name=f"{label}_{self.name}-{self.token}-{number}") for side, label in SIDES]
            for number, node in enumerate(self.nodes)
        ]
        return self._run(self._tree([first for first, _ in pairs], merge), [second for _, second in pairs])


class _Count:
    """Passes the progress of each task on once, however often it ran."""

    def __init__(self, advance: Advance) -> None:
        self.advance = advance
        self.counted: set[int] = set()

    def __call__(self, event: tuple[float, tuple[int, int]]) -> None:
        number, size = event[1]
        if number not in self.counted:
            self.counted.add(number)
            self.advance(size)


def _await(future: Future, watch: Watch) -> Any:
    try:
        return settle(future, watch)
    except BaseException:
        with contextlib.suppress(Exception):
            watch.client.cancel(future, force=True)
        raise
