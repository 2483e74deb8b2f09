"""Values that stay on the workers: made once, asked often. A lost one is made again by Dask, from the same task.

Two ways to ask: in one trip past the queues of the workers, which is fast and repeats nothing, and as tasks, which
get their answer whatever happens meanwhile.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from och_dist.cluster.outcome import POLL_SECONDS, Failure, Watch, guarded, merged, retries, settle, unwrap

if TYPE_CHECKING:
    from distributed import Client, Future

T = TypeVar("T")
Function = Callable[[Any, Any], Any]
Merge = Callable[[Sequence[Any]], Any]

FAN_IN = 8
SMALL_BYTES = 4 << 20


def hold_values(function: Callable[[Any], Any], tasks: Sequence[Any], *, client: Client, name: str) -> list[Future]:
    """``function(task)`` of every task, kept on the workers as long as the futures are.

    Idle workers get one each. No worker is asked for by name: a task that waits for one while there is none at all
    would wait for ever, for those that come later have other names.
    """
    return _mapped(guarded, [[function] * len(tasks), tasks], client, name)


def derive_values(
    function: Function, pinned: Sequence[Future], tasks: Sequence[Any], *, client: Client, name: str
) -> list[Future]:
    """``function(value, task)`` of every pinned value and its task, kept like those."""
    return _mapped(_on_value, [[function] * len(tasks), pinned, tasks], client, name)


def _mapped(function: Callable[..., Any], lists: list[Any], client: Client, name: str) -> list[Future]:
    token = uuid.uuid4().hex[:8]
    keys = [f"{name}-{token}-{number}" for number in range(len(lists[0]))]
    return client.map(function, *lists, key=keys, pure=False, retries=retries())


def _on_value(function: Function, value: Any, task: Any) -> Any:
    return value if isinstance(value, Failure) else guarded(function, value, task)


def ask_values(
    function: Callable[..., Any],
    pinned: Sequence[Future],
    payloads: Sequence[Any],
    *,
    client: Client,
    merge: Merge | None = None,
) -> Callable[[], list[Any] | None]:
    """Start ``function(value, payload)`` of pinned values in one trip to the workers that hold them, past their queues.

    What is returned waits for the answers; None when a value is not in place, or its worker is lost. With ``merge``
    each thread of a worker answers its values in turn, as ``function(value, payload, so_far)`` from the second on, and
    sends one merged answer, so that there are as many answers as threads.
    """
    watch = Watch(client)
    wanted = {future.key: payload for future, payload in zip(pinned, payloads, strict=True)}
    asking = asyncio.run_coroutine_threadsafe(
        client._run(answer_out_of_band, function, wanted, merge, on_error="return"), client.loop.asyncio_loop
    )

    def finish() -> list[Any] | None:
        try:
            while not concurrent.futures.wait([asking], POLL_SECONDS).done:
                watch.check()
            answers = asking.result()
        except (OSError, TimeoutError, asyncio.CancelledError):
            return None
        finally:
            asking.cancel()
        found = [part for answer in answers.values() if not isinstance(answer, Exception) for part in answer]
        keys = [key for part, _ in found for key in part]
        if merge is not None:  # a value that two workers hold would be counted twice
            return [unwrap(value) for _, value in found] if sorted(keys) == sorted(wanted) else None
        by_key = dict(zip(keys, (value for _, value in found), strict=True))
        return [unwrap(by_key[key]) for key in wanted] if len(by_key) == len(wanted) else None

    return finish


async def answer_out_of_band(
    function: Callable[..., Any], wanted: dict[str, Any], merge: Merge | None, dask_worker: Any = None
) -> list[tuple[list[str], Any]]:
    """(keys, answer) from those values that this worker holds, by the threads it has for tasks."""
    loop, threads = asyncio.get_running_loop(), dask_worker.executors["default"]
    keys = [key for key in wanted if key in dask_worker.data]
    count = len(keys) if merge is None else min(len(keys), dask_worker.state.nthreads)
    chains = [keys[number::count] for number in range(count)]
    held = [[(dask_worker.data[key], wanted[key]) for key in chain] for chain in chains]
    answers = [loop.run_in_executor(threads, _in_turn, function, merge, pairs) for pairs in held]
    return list(zip(chains, await asyncio.gather(*answers), strict=True))


def _in_turn(function: Callable[..., Any], merge: Merge | None, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """The merged answer of some values, each of which hears of those before it."""
    best: Any = None
    for number, (value, payload) in enumerate(pairs):
        part = _on_value(function, value, payload) if number == 0 else _next(function, value, payload, best)
        if isinstance(part, Failure):
            return part
        best = part if number == 0 or merge is None else guarded(merge, [best, part])
    return best


def _next(function: Callable[..., Any], value: Any, payload: Any, so_far: Any) -> Any:
    for before in (value, so_far):
        if isinstance(before, Failure):
            return before
    return guarded(function, value, payload, so_far)


def begin_asking(
    function: Function,
    pinned: Sequence[Future],
    payloads: Sequence[Any],
    merge: Merge,
    *,
    client: Client,
    name: str,
    nbytes: int,
) -> Callable[[], Any]:
    """Start ``merge`` over ``function(value, payload)`` of every pinned value as tasks; what is returned waits for it.

    Merged in a tree, of which the last step is done here. Payloads of together about ``nbytes`` travel inside the
    tasks where that is little, otherwise once to each worker.
    """
    if nbytes > SMALL_BYTES:
        once = {id(payload): payload for payload in payloads}
        there = dict(zip(once, client.scatter(list(once.values()), hash=False), strict=True))
        payloads = [there[id(payload)] for payload in payloads]
    level = _mapped(_on_value, [[function] * len(pinned), pinned, payloads], client, name)
    while len(level) > FAN_IN:
        groups = [level[i : i + FAN_IN] for i in range(0, len(level), FAN_IN)]
        level = _mapped(merged, [[merge] * len(groups), groups], client, f"merge_{name}")
    watch = Watch(client)

    def finish() -> Any:
        parts = settle(level, watch)
        return unwrap(parts if isinstance(parts, Failure) else merged(merge, parts))

    return finish
