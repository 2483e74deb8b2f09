"""Values that stay on the workers: made once, asked often. A lost one is made again by Dask, from the same task.

Two ways to ask: in one trip past the queues of the workers, which is fast and repeats nothing, and as tasks, which
get their answer whatever happens meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from och_dist.cluster.outcome import Watch, begin, catch, merged, retries, unique, unwrap, wait_for
from och_dist.cluster.tasks import merge_tree

if TYPE_CHECKING:
    from distributed import Client, Future

T = TypeVar("T")
Function = Callable[[Any, Any], Any]
Merge = Callable[[Sequence[Any]], Any]

SMALL_BYTES = 4 << 20


def hold_values(function: Callable[..., Any], *arguments: Sequence[Any], client: Client, name: str) -> list[Future]:
    """``function(task)`` of every task, or ``function(value, task)`` of values held before, as ``map`` would call it;
    kept on the workers as long as the futures are.

    Idle workers get one each. No worker is asked for by name: a task that waits for one while there is none at all
    would wait for ever, for those that come later have other names.
    """
    count, token = len(arguments[0]), unique(name)
    keys = [f"{token}-{number}" for number in range(count)]
    return client.map(catch, [function] * count, *arguments, key=keys, pure=False, retries=retries())


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
    wanted = {future.key: payload for future, payload in zip(held, payloads, strict=True)}
    asked = begin(client._run(answer_out_of_band, function, wanted, merge, on_error="return"), Watch(client))

    def finish() -> list[Any] | None:
        try:
            answers = asked()
        except (OSError, TimeoutError, asyncio.CancelledError):
            return None
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

    token = unique(name)
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
