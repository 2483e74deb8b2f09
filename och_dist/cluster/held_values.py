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

from och_dist.cluster.outcome import POLL_SECONDS, Watch, catch, merged, retries, unwrap, wait_for
from och_dist.cluster.tasks import merge_tree

if TYPE_CHECKING:
    from distributed import Client, Future

T = TypeVar("T")
Function = Callable[[Any, Any], Any]
Merge = Callable[[Sequence[Any]], Any]

SMALL_BYTES = 4 << 20


def hold_values(function: Callable[[Any], Any], tasks: Sequence[Any], *, client: Client, name: str) -> list[Future]:
    """``function(task)`` of every task, kept on the workers as long as the futures are.

    Idle workers get one each. No worker is asked for by name: a task that waits for one while there is none at all
    would wait for ever, for those that come later have other names.
    """
    return _map(client, name, [function] * len(tasks), tasks)


def derive_values(
    function: Function, held: Sequence[Future], tasks: Sequence[Any], *, client: Client, name: str
) -> list[Future]:
    """``function(value, task)`` of every held value and its task, kept like those."""
    return _map(client, name, [function] * len(tasks), held, tasks)


def _map(client: Client, name: str, *lists: Sequence[Any]) -> list[Future]:
    token = uuid.uuid4().hex[:8]
    keys = [f"{name}-{token}-{number}" for number in range(len(lists[0]))]
    return client.map(catch, *lists, key=keys, pure=False, retries=retries())


def ask_values(
    function: Callable[..., Any],
    held: Sequence[Future],
    payloads: Sequence[Any],
    *,
    client: Client,
    merge: Merge | None = None,
) -> Callable[[], list[Any] | None]:
    """Start ``function(value, payload)`` of held values in one trip to the workers that hold them, past their queues.

    What is returned waits for the answers; None when a value is not in place, or its worker is lost. With ``merge``
    each thread of a worker answers its values in turn, as ``function(value, payload, so_far)`` from the second on, and
    sends one merged answer, so that there are as many answers as threads.
    """
    watch = Watch(client)
    wanted = {future.key: payload for future, payload in zip(held, payloads, strict=True)}
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
    (value, payload), *others = pairs
    best = catch(function, value, payload)
    for value, payload in others:
        part = catch(function, value, payload, best)
        best = part if merge is None else merged(merge, [best, part])
    return best


def begin_asking(
    function: Function,
    held: Sequence[Future],
    payloads: Sequence[Any],
    merge: Merge,
    *,
    client: Client,
    name: str,
    nbytes: int,
) -> Callable[[], Any]:
    """Start ``merge`` over ``function(value, payload)`` of every held value as tasks; what is returned waits for it.

    Payloads of together about ``nbytes`` travel inside the tasks where that is little, otherwise once to each worker.
    """
    from dask import delayed

    token = f"{name}-{uuid.uuid4().hex[:8]}"
    sent = {id(payload): payload for payload in payloads}
    if nbytes > SMALL_BYTES:
        sent = {key: delayed(value, name=f"payload_{token}-{key}", traverse=False) for key, value in sent.items()}
    ask = delayed(catch, pure=False)
    answers = [
        ask(function, future, sent[id(payload)], dask_key_name=f"{token}-{number}")
        for number, (future, payload) in enumerate(zip(held, payloads, strict=True))
    ]
    (root,) = merge_tree(answers, merge, token)
    future, watch = client.compute(root, retries=retries()), Watch(client)
    return lambda: unwrap(wait_for(future, watch))
