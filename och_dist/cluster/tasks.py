"""The one way to the workers: map tasks, or reduce them in a tree whose shape depends on their number alone.

With ``client=None`` both run as plain loops in this process: that is their specification, Dask only runs it faster.
A reduction is declared by what a task makes of its part and by how some of those become one, with the same bytes here
and there, for they are merged in the same order. The chunks of a Dask array are reduced likewise, wherever Dask
collections compute.
Every wait has a limit: a cluster without workers or without a scheduler ends in :class:`ClusterError`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import getitem
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from och_dist.cluster import outcome
from och_dist.cluster.outcome import Failure, Trace, Watch, catch, merged, retry, traced, unique, unwrap, wait_for
from och_dist.errors import ClusterError
from och_dist.stop import Stop, tasks_under_way

if TYPE_CHECKING:
    import dask.array as da
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
    with tasks_under_way(lambda: finished.put(STOP)) as stop:
        if client is None:
            outcomes = _map_here(function, tasks, stop)
        else:
            trace = Trace(name, len(tasks), shown=advance is not None, inherited=inherited)
            outcomes = _map_there(function, tasks, client, trace, finished, stop)
        with contextlib.closing(outcomes):
            for number, value in outcomes:
                results[number] = value
                if advance is not None and not isinstance(value, Failure):
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
            retries=outcome.retries(),
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
            for number, value in zip(futures, _fetch(list(futures.values()), watch), strict=True):
                del waiting[number]
                if isinstance(value, Failure) and isinstance(value.error, ClusterError):
                    raise value.error
                failed = failed or isinstance(value, Failure)
                yield number, value
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
        held = client.sync(client.scheduler.processing, workers=None, callback_timeout=outcome.answer_seconds())
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
            numbers.append(finished.get(timeout=outcome.POLL_SECONDS))
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
    threads: int = 1,
) -> T:
    """``merge`` over ``function(task, shared)``, FAN_IN at a time; in this process by ``threads`` threads.

    ``shared`` is sent once and reaches each worker once; intermediate results live on the workers only.
    """
    leaves = Leaves(function, tasks, name, shared, advance, weight, threads)
    if client is None:
        return merge_here(leaves.here(), len(tasks), merge)
    graph = TaskGraph(leaves, client)
    return graph.total(merge_tree(graph.nodes, merge, graph.name))[0]


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
    leaves = Leaves(function, tasks, name, shared, advance, weight)
    if client is not None:
        graph = TaskGraph(leaves, client)
        merging, keeping = split_pairs(graph.nodes, graph.name)
        return graph.total(merge_tree(merging, merge, graph.name), keeping)
    kept: list[Any] = []

    def first_sides() -> Iterator[Any]:
        for value in leaves.here():
            kept.append(catch(getitem, value, 1))
            yield catch(getitem, value, 0)

    return merge_here(first_sides(), len(tasks), merge), kept


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
    leaves = Leaves(function, tasks, name, shared)
    if client is not None:
        yield from TaskGraph(leaves, client).pieces(merge, cut, finish, pieces)
        return
    whole = merge_here(leaves.here(), len(tasks), merge)
    for number in range(pieces):
        yield finish(cut(whole, number))


@dataclass(frozen=True)
class Leaves:
    """What a reduction begins with: ``function(task, shared)`` of every task."""

    function: Callable[..., Any]
    tasks: Sequence[Task]
    name: str
    shared: Any = None
    advance: Advance | None = None
    weight: Callable[[Task], int] = lambda task: 1
    threads: int = 1

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError("a reduction needs at least one task")

    def here(self) -> Iterator[Any]:
        """The values, one after the other; other threads work ahead."""
        with ThreadPoolExecutor(self.threads, thread_name_prefix="och-tasks") as pool:
            spread: Any = map if self.threads == 1 else pool.map
            values = spread(lambda task: retry(self.function, task, self.shared), self.tasks)
            for task, value in zip(self.tasks, values, strict=True):
                self.tell(task)
                yield value

    def tell(self, task: Task) -> None:
        """Progress: a task is done."""
        if self.advance is not None:
            self.advance(self.weight(task))


def merge_here(values: Iterable[Any], count: int, merge: Merge[Any]) -> Any:
    """The root of the tree over ``count`` values; FAN_IN of a level are merged as soon as they are there."""

    def merge_level(level: Iterator[Any], count: int) -> Iterator[Any]:
        for _ in range(count):
            yield merged(merge, list(islice(level, FAN_IN)))

    level, depth = iter(values), 0
    while depth == 0 or count > 1:
        count, depth = -(-count // FAN_IN), depth + 1
        level = merge_level(level, count)
    return unwrap(next(level))


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


def split_pairs(nodes: Sequence[Delayed], name: str) -> list[list[Delayed]]:
    """Nodes of the first and of the second value of nodes that return two."""
    from dask import delayed

    part = delayed(catch, pure=False)
    return [
        [part(getitem, node, side, dask_key_name=f"{label}_{name}-{place}") for place, node in enumerate(nodes)]
        for side, label in enumerate(("sum", "keep"))
    ]


def run_leaf(topic: str | None, number: int, call: Callable[[Any], T], shared: Any) -> T | Failure:
    """A leaf on a worker, which says on ``topic`` that it is done."""
    value = call(shared)
    if topic is not None:
        from distributed import get_worker

        get_worker().log_event(topic, number)
    return value


class TaskGraph:
    """Leaves as ``nodes`` of one Dask graph; only its roots, and what a scan keeps, stay in memory."""

    def __init__(self, leaves: Leaves, client: Client) -> None:
        from dask import delayed

        self.leaves, self.client, self.watch = leaves, client, Watch(client)
        self.untold, self.lock = set(range(len(leaves.tasks))), threading.Lock()
        self.trace = Trace(leaves.name, len(leaves.tasks), shown=leaves.advance is not None)
        self.name = self.trace.token
        shared = None if leaves.shared is None else delayed(leaves.shared, name=f"shared_{self.name}", traverse=False)
        # The scheduler remembers the events of every topic: where no progress is shown, there is none.
        self.topic = None if leaves.advance is None else f"progress_{self.name}"
        self.nodes = []
        for number, task in enumerate(leaves.tasks):
            call = partial(traced, self.trace.mark(number), leaves.function, task)  # Dask does not look inside of it
            leaf, key = partial(run_leaf, self.topic, number, call), f"{self.name}-{number}"
            self.nodes.append(delayed(leaf, name=key, pure=False, traverse=False)(shared, dask_key_name=key))

    def _tell(self, number: int) -> None:
        """Progress of a leaf, once: when its worker says so, or when the root is there before."""
        with self.lock:
            if number in self.untold:
                self.untold.remove(number)
                self.leaves.tell(self.leaves.tasks[number])

    @contextlib.contextmanager
    def computed(self, roots: Sequence[Delayed]) -> Iterator[list[Future]]:
        """Futures of the roots; those in the list are given up with an error."""
        client, done = self.client, False
        if self.topic is not None:
            client.subscribe_topic(self.topic, lambda event: self._tell(event[1]))
        futures = client.compute(list(roots), traverse=False, retries=outcome.retries())
        try:
            yield futures
            done = True
        finally:
            self.trace.end(done=done)
            with contextlib.suppress(Exception):
                if not done:
                    client.cancel(futures, force=True)
                if self.topic is not None:
                    client.unsubscribe_topic(self.topic)

    def total(self, roots: Sequence[Delayed], kept: Sequence[Delayed] = ()) -> tuple[Any, list[Future]]:
        """The value of the only root, and futures of what is to be kept on the workers."""
        with self.computed([*roots, *kept]) as (root, *others):
            value = unwrap(wait_for(root, self.watch))
            for number in range(len(self.leaves.tasks)):
                self._tell(number)
            return value, others

    def pieces(self, merge: Merge[T], cut: Any, finish: Any, count: int) -> Iterator[T]:
        """The last merges once for each piece, on the workers, from what a level of up to FAN_IN^2 parts has of it."""
        from dask import delayed

        step = delayed(catch, pure=False)
        level, roots = merge_tree(self.nodes, merge, self.name, FAN_IN**2), []
        for number in range(count):
            end = f"{self.name}-{number}"
            parts = [step(cut, node, number, dask_key_name=f"cut_{end}-{i}") for i, node in enumerate(level)]
            (root,) = merge_tree(parts, merge, end)
            roots.append(step(finish, root, dask_key_name=f"finish_{end}"))
        with self.computed(roots) as futures:
            fetch = outcome.begin_fetch(futures[0], self.watch)
            while futures:
                value = unwrap(fetch())
                del futures[0]  # the workers may forget it
                if futures:
                    fetch = outcome.begin_fetch(futures[0], self.watch)  # comes while this one is used
                yield value


@contextlib.contextmanager
def collections_on(client: Client | None) -> Iterator[None]:
    """Let Dask collections compute on the workers of ``client``; without one in this thread, a task at a time."""
    import dask

    if client is None:
        with dask.config.set(scheduler="synchronous"):
            yield
    else:
        with client.as_current(), dask.config.set(scheduler=client), outcome.watched(client):
            yield


def shared_value(value: Any, name: str) -> Delayed:
    """``value`` as one node of a graph that all tasks of a ``map_blocks`` may refer to; ``name`` is its key."""
    import dask

    return dask.delayed(value, name=name, traverse=False)


def reduce_rows(
    function: Callable[[np.ndarray, int, Any], T],
    array: da.Array,
    merge: Callable[[Sequence[T]], T],
    *,
    name: str,
    shared: Any = None,
) -> T:
    """``merge`` over ``function(block, first_row, shared)`` of every chunk of rows of ``array`` (n, d).

    The chunks are of whole rows and of known sizes; empty ones are left out. Reading a chunk and what is done with it
    are one task where Dask can make them one. The shape of the tree depends on the number of chunks alone.
    """
    (root,) = merge_tree(_leaves(function, array, name, shared), merge, unique(name))
    result: T = unwrap(root.compute())
    return result


def scan_rows(
    function: Callable[[np.ndarray, int, Any], tuple[T, Any]],
    array: da.Array,
    merge: Callable[[Sequence[T]], T],
    *,
    name: str,
    shared: Any = None,
) -> tuple[T, list[Delayed]]:
    """:func:`reduce_rows` over the first of the two values that ``function`` returns; the second ones stay where Dask
    keeps persisted results: on the workers, if there are any."""
    import dask

    token = unique(name)
    merging, keeping = split_pairs(_leaves(function, array, name, shared), token)
    root, *kept = dask.persist(*merge_tree(merging, merge, token), *keeping)
    return unwrap(root.compute()), kept


@dataclass(frozen=True)
class BlockTask:
    """What the tasks of one pass over an array share: the work, and where chunks start."""

    function: Callable[[np.ndarray, int, Any], Any]
    first_rows: np.ndarray
    shared: Any


def _leaves(function: Any, array: da.Array, name: str, shared: Any) -> list[Delayed]:
    sizes = array.chunks[0]
    task = BlockTask(function, first_rows(sizes), shared)
    found = array.map_blocks(
        run_block,
        task=shared_value(task, unique(f"{name}_shared")),
        token=unique(name),
        meta=np.empty((0, 0), np.float32),  # the results are no arrays, which only their consumer must know
    )
    leaves = zip(found.to_delayed().ravel(), sizes, strict=True)
    return [leaf for leaf, size in leaves if size]


def run_block(block: np.ndarray, task: BlockTask, block_id: tuple[int, ...]) -> Any:
    return catch(task.function, block, int(task.first_rows[block_id[0]]), task.shared)


def first_rows(sizes: Sequence[int]) -> np.ndarray:
    """(chunks,) int64, the global number of the first row of each chunk."""
    return np.cumsum([0, *sizes[:-1]], dtype=np.int64)


def stack_rows(blocks: Sequence[Any], sizes: Sequence[int], dim: int, dtype: Any) -> da.Array:
    """Blocks of ``sizes`` rows (arrays, futures or Delayed ones of arrays) as one Dask array (n, dim)."""
    import dask
    import dask.array as da

    parts = [
        da.from_delayed(dask.delayed(block), shape=(size, dim), dtype=dtype)
        for block, size in zip(blocks, sizes, strict=True)
    ]
    return da.concatenate(parts)
