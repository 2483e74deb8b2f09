"""The two graph shapes: map tasks into a store, and reduce tasks in a tree. Nothing of ours is in here.

With ``client=None`` both run as plain loops in this process: that is their specification, Dask only runs it faster.
Every wait has a limit: a cluster without workers or without a scheduler ends in :class:`ClusterError`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from och_dist.errors import ClusterError, IncompleteError, OchError

if TYPE_CHECKING:
    from distributed import Client, Future

T = TypeVar("T")
Task = Any
Advance = Callable[[int], None]

FAN_IN = 8
WINDOW = 4096
POLL_SECONDS = 2.0
NO_WORKERS_SECONDS = 60.0
SIDES = ((0, "sum"), (1, "keep"))


class Failure:
    """An :class:`OchError` travelling as a value, so that Dask retries accidents but not defined outcomes."""

    def __init__(self, error: OchError) -> None:
        self.error = error


def _guarded(function: Callable[..., T], *args: Any) -> T | Failure:
    try:
        return function(*args)
    except OchError as error:
        return Failure(error)


def map_tasks(
    function: Callable[..., T],
    tasks: Sequence[Task],
    *,
    client: Client | None,
    name: str,
    advance: Advance | None = None,
    weight: Callable[[Task], int] = lambda task: 1,
) -> list[T]:
    """``[function(task) for task in tasks]``; all tasks are tried before the first error, in task order, is raised."""
    results: dict[int, T | Failure] = {}
    outcomes = _map_here(function, tasks) if client is None else _map_there(function, tasks, client, name)
    with contextlib.closing(outcomes):
        for number, outcome in outcomes:
            results[number] = outcome
            if advance is not None and not isinstance(outcome, Failure):
                advance(weight(tasks[number]))
    values = []
    for number in range(len(tasks)):
        value = results[number]
        if isinstance(value, Failure):
            raise value.error
        values.append(value)
    return values


def _map_here(function: Callable[..., T], tasks: Sequence[Task]) -> Generator[tuple[int, T | Failure], None, None]:
    for number, task in enumerate(tasks):
        yield number, _guarded(function, task)


def _map_there(
    function: Callable[..., T], tasks: Sequence[Task], client: Client, name: str
) -> Generator[tuple[int, T | Failure], None, None]:
    """Keep at most WINDOW tasks submitted; hand out results as they come; release them at once."""
    token = uuid.uuid4().hex[:8]
    finished: queue.SimpleQueue[int] = queue.SimpleQueue()
    waiting: dict[int, Future] = {}
    upcoming = iter(range(len(tasks)))

    def submit(numbers: list[int]) -> None:
        futures = client.map(
            _guarded,
            [function] * len(numbers),
            [tasks[number] for number in numbers],
            key=[f"{name}-{token}-{number}" for number in numbers],
            pure=False,
            retries=2,
        )
        for number, future in zip(numbers, futures, strict=True):
            waiting[number] = future
            future.add_done_callback(lambda _, number=number: finished.put(number))

    watch = _Watch(client)
    try:
        submit([number for _, number in zip(range(WINDOW), upcoming, strict=False)])
        while waiting:
            number = _next(finished, watch)
            future = waiting.pop(number)
            yield number, _outcome(future)
            if (following := next(upcoming, None)) is not None:
                submit([following])
    finally:
        if waiting:
            with contextlib.suppress(Exception):
                client.cancel(list(waiting.values()), force=True)


def _next(finished: queue.SimpleQueue[int], watch: _Watch) -> int:
    while True:
        try:
            return finished.get(timeout=POLL_SECONDS)
        except queue.Empty:
            watch.check()


def _outcome(future: Future) -> Any:
    """The result of a finished future, accidents turned into our errors."""
    from distributed import KilledWorker

    try:
        if future.status == "finished":
            return future.result(timeout=60)
        error = future.exception(timeout=60)
    except (OSError, TimeoutError) as lost:
        return Failure(ClusterError(f"the cluster went away ({lost}); what is done is kept: run the command again"))
    except Exception as cancelled:  # distributed raises its own types for cancelled and lost futures
        error = cancelled
    if isinstance(error, KilledWorker):
        return Failure(
            IncompleteError(
                f"task {future.key} took down every worker it ran on ({error}); what is done is kept: "
                "check the workers' memory (--memory-limit) and logs, then run the command again"
            )
        )
    if "Cancelled" in type(error).__name__:
        return Failure(ClusterError(f"the scheduler went away ({error}); what is done is kept: run the command again"))
    if isinstance(error, OchError):
        return Failure(error)
    return Failure(
        IncompleteError(
            f"task {future.key} failed three times ({type(error).__name__}: {error}); what is done is kept: "
            "mend the cause and run the command again"
        )
    )


class _Watch:
    """Raises :class:`ClusterError` when the scheduler is lost or no worker has been there for a while."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.alone_since: float | None = None

    def check(self) -> None:
        if self.client.status not in ("running", "newly-created"):
            raise ClusterError(
                f"the connection to the scheduler is {self.client.status}; what is done is kept: run the command again"
            )
        if self.client.scheduler_info(n_workers=1)["workers"]:
            self.alone_since = None
            return
        now = time.monotonic()
        self.alone_since = self.alone_since or now
        if now - self.alone_since > NO_WORKERS_SECONDS:
            raise ClusterError(
                f"no worker for {NO_WORKERS_SECONDS:.0f} s; what is done is kept: start workers, run the command again"
            )


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
    return _guarded(merge, parts)


def _unwrap(value: Any) -> Any:
    if isinstance(value, Failure):
        raise value.error
    return value


def _part(value: Any, number: int) -> Any:
    return value if isinstance(value, Failure) else value[number]


class _LeavesHere:
    """The tree as plain loops."""

    def __init__(self, function: Any, tasks: Sequence[Task], shared: Any, advance: Any, weight: Any) -> None:
        self.values = []
        for task in tasks:
            self.values.append(_guarded(function, task, shared))
            if advance is not None:
                advance(weight(task))

    @staticmethod
    def _tree(level: list[Any], merge: Callable[[Sequence[T]], T]) -> Any:
        while True:
            level = [_merged(merge, level[i : i + FAN_IN]) for i in range(0, len(level), FAN_IN)]
            if len(level) == 1:
                return _unwrap(level[0])

    def reduce(self, merge: Callable[[Sequence[T]], T]) -> Any:
        return self._tree(self.values, merge)

    def scan(self, merge: Callable[[Sequence[T]], T]) -> tuple[Any, list[Any]]:
        total = self._tree([_part(value, 0) for value in self.values], merge)
        return total, [_part(value, 1) for value in self.values]


def _leaf(function: Callable[..., T], task: Task, shared: Any, topic: str, size: int) -> T | Failure:
    value = _guarded(function, task, shared)
    from distributed import get_worker

    with contextlib.suppress(ValueError):
        get_worker().log_event(topic, size)
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
        self.topic = f"och-progress-{self.token}"
        data = None if shared is None else delayed(shared, name=f"{name}_shared-{self.token}", traverse=False)
        leaf = delayed(_leaf, pure=False, traverse=False)
        self.nodes = [
            leaf(function, task, data, self.topic, weight(task), dask_key_name=f"{name}-{self.token}-{number}")
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
        advance = self.advance
        if advance is not None:
            self.client.subscribe_topic(self.topic, lambda event: advance(int(event[1])))
        try:
            futures = self.client.compute([root, *kept], retries=2)
            return _unwrap(_await(self.client, futures[0])), futures[1:]
        finally:
            if advance is not None:
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


def _await(client: Client, future: Future) -> Any:
    """The outcome of one future, within the limits of :class:`_Watch`."""
    ready = threading.Event()
    future.add_done_callback(lambda _: ready.set())
    watch = _Watch(client)
    try:
        while not ready.wait(POLL_SECONDS):
            watch.check()
    except BaseException:
        with contextlib.suppress(Exception):
            client.cancel(future, force=True)
        raise
    return _outcome(future)
