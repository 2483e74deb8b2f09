"""A reduction as a tree, in this process and as a Dask graph: the same shape, and so the same bytes, for both."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from och_dist.cluster.outcome import Failure, Watch, begin_gather, guarded, merged, patient, retries, settle, unwrap
from och_dist.cluster.tracing import Mark, Trace, traced

if TYPE_CHECKING:
    from distributed import Client, Future

T = TypeVar("T")
Task = Any

FAN_IN = 8
SIDES = ((0, "sum"), (1, "keep"))


def _part(value: Any, number: int) -> Any:
    return value if isinstance(value, Failure) else value[number]


def _cut(cut: Callable[[T, int], T], value: T | Failure, number: int) -> T | Failure:
    return value if isinstance(value, Failure) else guarded(cut, value, number)


def _finished(finish: Callable[[T], T], value: T | Failure) -> T | Failure:
    return value if isinstance(value, Failure) else guarded(finish, value)


class LeavesHere:
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

    def pieces(self, merge: Any, cut: Any, finish: Any, count: int) -> Iterator[Any]:
        whole = self.reduce(merge)
        for number in range(count):
            yield finish(cut(whole, number))

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


def _leaf(
    call: Callable[[Any], T], shared: Any, topic: str | None, progress: tuple[int, int], mark: Mark | None
) -> T | Failure:
    value = traced(mark, call, shared)
    if topic is not None:
        from distributed import get_worker

        with contextlib.suppress(ValueError):
            get_worker().log_event(topic, progress)
    return value


class LeavesThere:
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

    def _tree(self, level: list[Any], merge: Callable[[Sequence[T]], T], width: int = 1, tag: str = "") -> list[Any]:
        """The nodes of the first level of at most ``width`` above the leaves."""
        from dask import delayed

        combine, depth = delayed(merged, pure=False), 0
        while depth == 0 or len(level) > width:
            level = [
                combine(
                    merge,
                    level[i : i + FAN_IN],
                    dask_key_name=f"merge_{self.name}-{self.token}{tag}-{depth}-{i // FAN_IN}",
                )
                for i in range(0, len(level), FAN_IN)
            ]
            depth += 1
        return level

    def _run(self, root: Any, kept: list[Any]) -> tuple[Any, list[Any]]:
        if self.topic is not None:
            self.client.subscribe_topic(self.topic, Count(self.advance))
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

    def reduce(self, merge: Callable[[Sequence[T]], T]) -> Any:
        return self._run(self._tree(self.nodes, merge)[0], [])[0]

    def pieces(self, merge: Any, cut: Any, finish: Any, count: int) -> Iterator[Any]:
        """The last merges once for each piece, on the workers, from what a level of up to FAN_IN^2 parts has of it."""
        from dask import delayed

        part, last = delayed(_cut, pure=False), delayed(_finished, pure=False)
        level, end = self._tree(self.nodes, merge, FAN_IN**2), f"{self.name}-{self.token}"
        roots = []
        for number in range(count):
            parts = [part(cut, node, number, dask_key_name=f"cut_{end}-{number}-{i}") for i, node in enumerate(level)]
            (root,) = self._tree(parts, merge, tag=f"-{number}")
            roots.append(last(finish, root, dask_key_name=f"finish_{end}-{number}"))
        watch, done = Watch(self.client), False
        futures = self.client.compute(roots, retries=retries())
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

    def scan(self, merge: Callable[[Sequence[T]], T]) -> tuple[Any, list[Any]]:
        from dask import delayed

        part = delayed(_part, pure=False)
        pairs = [
            [part(node, side, dask_key_name=f"{label}_{self.name}-{self.token}-{number}") for side, label in SIDES]
            for number, node in enumerate(self.nodes)
        ]
        return self._run(self._tree([first for first, _ in pairs], merge)[0], [second for _, second in pairs])


class Count:
    """Passes the progress of each task on once, however often it ran."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.advance = advance
        self.counted: set[int] = set()

    def __call__(self, event: tuple[float, tuple[int, int]]) -> None:
        number, size = event[1]
        if number not in self.counted:
            self.counted.add(number)
            self.advance(size)


def _await(future: Future, watch: Watch, gathering: Any = None) -> Any:
    try:
        return settle(future, watch, gathering)
    except BaseException:
        with contextlib.suppress(Exception):
            watch.client.cancel(future, force=True)
        raise
