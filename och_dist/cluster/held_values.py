"""Values that stay on the workers: made once, asked often. A lost one is made again by Dask, from the same task.

They are asked in one trip past the queues of the workers, which is fast and repeats nothing; or else as tasks, which
get their answer whatever happens meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from och_dist.cluster.outcome import Watch, begin, catch, merged, retries, unique, unwrap, wait_for
from och_dist.cluster.tasks import merge_tree

if TYPE_CHECKING:
    from distributed import Client, Future

Answer = Callable[[], Any]
Function = Callable[..., Any]
Merge = Callable[[Sequence[Any]], Any]

SMALL_BYTES = 4 << 20
FEW_THREADS = 32
"""Up to so many threads of workers answer this process at once; answers of more are merged on the way, by tasks."""


class HeldValues:
    """``function`` of each of some arguments, as ``map`` would call it; kept on the workers until :meth:`forget`.

    They are made when they are first asked, and anew when they were forgotten since. One of the arguments may be other
    held values, of which these are made.

    Idle workers get one each. No worker is asked for by name: a task that waits for one while there is none at all
    would wait for ever, for those that come later have other names.
    """

    def __init__(self, function: Function, *arguments: Any, client: Client, name: str) -> None:
        self.function, self.arguments, self.client, self.name = function, arguments, client, name
        self.disturbed = False  # a worker was lost since they are held
        self._futures: list[Future] = []
        origin = next((part for part in arguments if isinstance(part, HeldValues)), None)
        # Held values and all that are made of them, of which one keeps the others in memory.
        self._family: WeakSet[HeldValues] = WeakSet() if origin is None else origin._family
        self._lock: threading.RLock = threading.RLock() if origin is None else origin._lock
        with self._lock:
            self._family.add(self)

    def futures(self) -> list[Future]:
        with self._lock:
            if not self._futures:
                arguments = [part.futures() if isinstance(part, HeldValues) else part for part in self.arguments]
                count, token = len(arguments[0]), unique(self.name)
                keys = [f"{token}-{number}" for number in range(count)]
                self._futures = self.client.map(
                    catch, [self.function] * count, *arguments, key=keys, pure=False, retries=retries()
                )
            return self._futures

    def forget(self) -> None:
        """Let go of the values, of those of which they are made, and of all others that are made of these."""
        with self._lock:
            for held in self._family:
                held._futures, held.disturbed = [], False

    def ask(
        self,
        function: Function,
        payloads: Sequence[Any],
        merge: Merge,
        *,
        name: str,
        places: Sequence[int] | None = None,
        threads: int = 1,
    ) -> Answer:
        """Start ``merge`` over ``function(value, payload)`` of all values, or those at ``places``; what is returned
        waits for it. The workers have so many ``threads``.

        Of all values each thread of a worker answers several in turn, as ``function(value, payload, so_far)`` from the
        second on, and sends one merged answer.
        """
        futures = self.futures()
        held = futures if places is None else [futures[place] for place in places]
        ask_by_tasks = partial(self._ask_by_tasks, function, held, payloads, merge, name)
        if threads > FEW_THREADS or not all(future.done() for future in held):
            return ask_by_tasks()
        # After a loss two workers may hold one value for a while: then each value answers for itself.
        merge_there = merge if places is None and not self.disturbed else None
        wanted = {future.key: payload for future, payload in zip(held, payloads, strict=True)}
        ask_all = self.client._run(answer_out_of_band, function, wanted, merge_there, on_error="return")
        asked = begin(ask_all, Watch(self.client))

        def answer() -> Any:
            answers: dict[str, Any] = {}
            with contextlib.suppress(OSError, TimeoutError, asyncio.CancelledError):
                answers = asked()
            parts = complete(answers, list(wanted))
            if parts is not None:
                return merge(parts)
            self.disturbed = True
            return ask_by_tasks()()

        return answer

    def _ask_by_tasks(
        self, function: Function, held: Sequence[Future], payloads: Sequence[Any], merge: Merge, name: str
    ) -> Answer:
        """Payloads travel inside the tasks where they are small, otherwise once to each worker."""
        from dask import delayed

        token = unique(name)
        sent = {id(payload): payload for payload in payloads}
        if sum(payload.nbytes for payload in payloads) > SMALL_BYTES:
            sent = {key: delayed(value, name=f"payload_{token}-{key}", traverse=False) for key, value in sent.items()}
        ask = delayed(catch, pure=False)
        answers = [
            ask(function, future, sent[id(payload)], dask_key_name=f"{token}-{number}")
            for number, (future, payload) in enumerate(zip(held, payloads, strict=True))
        ]
        (root,) = merge_tree(answers, merge, token)
        future, watch = self.client.compute(root, retries=retries()), Watch(self.client)

        def answer() -> Any:
            try:
                return unwrap(wait_for(future, watch))
            except BaseException:
                self.forget()  # what could not be made is not kept
                raise

        return answer


def complete(answers: dict[str, Any], keys: Sequence[str]) -> list[Any] | None:
    """The answers of all workers in the order of ``keys``, those of their first values.

    None when a value is not in place, its worker is lost, or it would be counted twice.
    """
    parts = [part for answer in answers.values() if not isinstance(answer, Exception) for part in answer]
    found = {tuple(own): value for own, value in parts}
    if sorted(key for own in found for key in own) != sorted(keys):
        return None
    return [unwrap(found[own]) for own in sorted(found, key=lambda own: keys.index(own[0]))]


async def answer_out_of_band(
    function: Function, wanted: dict[str, Any], merge: Merge | None, dask_worker: Any = None
) -> list[tuple[list[str], Any]]:
    """(keys, answer) from those values that this worker holds, by the threads it has for tasks."""
    loop, threads = asyncio.get_running_loop(), dask_worker.executors["default"]
    keys = [key for key in wanted if key in dask_worker.data]
    count = len(keys) if merge is None else min(len(keys), dask_worker.state.nthreads)
    chains = [keys[number::count] for number in range(count)]
    held = [[(dask_worker.data[key], wanted[key]) for key in chain] for chain in chains]
    answers = [loop.run_in_executor(threads, _in_turn, function, merge, pairs) for pairs in held]
    return list(zip(chains, await asyncio.gather(*answers), strict=True))


def _in_turn(function: Function, merge: Merge | None, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """The merged answer of some values, each of which hears of those before it."""
    (value, payload), *others = pairs
    best = catch(function, value, payload)
    for value, payload in others:
        part = catch(function, value, payload, best)
        best = part if merge is None else merged(merge, [best, part])
    return best
