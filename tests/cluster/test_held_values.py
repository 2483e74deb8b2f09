"""Values that stay on the workers, asked in one trip and as tasks, against the plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from och_dist.cluster.held_values import FEW_THREADS, SMALL_BYTES, HeldValues, complete
from och_dist.cluster.outcome import Failure
from och_dist.errors import BadInputError
from tests.support.cluster_help import wait_until

COUNT = 70  # the tree has three levels


def ten_times(task: int) -> int:
    return 10 * task


def plus(value: int, payload: np.ndarray, so_far: int = 0) -> int:
    return value + int(payload.sum()) + so_far


def refuse(value: int, payload: np.ndarray) -> int:
    raise BadInputError(f"{value} is bad")


def total(parts: Sequence[int]) -> int:
    return sum(parts)


SEEN: list[int] = []


def largest(parts: Sequence[int]) -> int:
    """Notes in SEEN, that of its own process, how many there are."""
    SEEN.append(len(parts))
    return max(parts)


@pytest.mark.parametrize("size", [3, SMALL_BYTES // 8])
def test_asked_as_tasks(client: Any, size: int) -> None:
    """At once after they are asked for: nothing is held yet."""
    held = HeldValues(ten_times, range(COUNT), client=client, name="ten_times")
    payloads = [np.arange(size), np.arange(4)] * (COUNT // 2)
    answer = held.ask(plus, payloads, total, name="plus")
    assert answer() == sum(plus(10 * n, payload) for n, payload in enumerate(payloads))


def in_place(held: HeldValues) -> HeldValues:
    wait_until(lambda: all(future.done() for future in held.futures()), 30)
    return held


def test_asked_in_one_trip(client: Any) -> None:
    held = HeldValues(ten_times, range(9), client=client, name="ten_times")
    derived = in_place(HeldValues(plus, held, [np.arange(n) for n in range(9)], client=client, name="plus"))
    values = [plus(10 * n, np.arange(n)) for n in range(9)]
    payload, places = np.ones(2), [4, 0, 8]
    expected = [plus(values[place], payload) for place in places]
    assert derived.ask(plus, [payload] * 3, list, name="plus", places=places)() == expected
    assert derived.ask(plus, [payload] * 9, largest, name="plus")() >= max(values)
    assert 1 <= SEEN[-1] <= 2, "one answer of each worker"
    assert not derived.disturbed


def test_what_is_forgotten_is_made_again(client: Any) -> None:
    held = HeldValues(ten_times, range(5), client=client, name="ten_times")
    derived = HeldValues(plus, held, [np.arange(n) for n in range(5)], client=client, name="plus")
    before = held.futures(), derived.futures()
    assert (held.futures(), derived.futures()) == before
    held.forget()
    assert derived.futures() is not before[1], "made of values that are no more"
    again = derived.futures()
    derived.forget()
    assert held.futures() is not before[0]
    assert derived.futures() is not again
    values = [plus(10 * n, np.arange(n)) for n in range(5)]
    assert derived.ask(plus, [np.zeros(1)] * 5, total, name="plus")() == sum(values)


def test_nothing_stays_on_the_workers_of_what_is_forgotten(client: Any) -> None:
    """Values that are made of others keep these in memory, so all go together."""
    held = HeldValues(ten_times, range(5), client=client, name="base")
    derived = [HeldValues(plus, held, [np.arange(n)] * 5, client=client, name="derived") for n in range(3)]

    def kept() -> int:
        return sum(key.startswith(("base-", "derived-")) for key in client.futures)

    for one in (held, derived[0]):
        for other in derived:
            other.disturbed = len(in_place(other).futures()) > 0
        assert kept() == 20
        one.forget()
        wait_until(lambda: kept() == 0, 30)
        assert not any(other.disturbed for other in derived)
    derived[1].futures()
    assert kept() == 10, "what nobody asks for is not made again"
    del derived[1:]
    wait_until(lambda: kept() == 5, 30)


def test_no_value_is_missed_or_counted_twice() -> None:
    """Answers of workers, each (keys, answer), to a question about the values 'a', 'b' and 'c'."""
    keys = ["b", "a", "c"]
    every = {"one": [(["a"], 1), (["c"], 3)], "two": [(["b"], 2)]}
    assert complete(every, keys) == [2, 1, 3]
    assert complete({"one": [(["a", "b"], 2)], "two": [(["c"], 3)]}, keys) == [2, 3]
    assert complete({**every, "three": [(["a"], 1)]}, keys) == [2, 1, 3], (
        "two workers hold a value, which answers alone"
    )
    assert complete({**every, "three": OSError("gone")}, keys) == [2, 1, 3]
    for lost in (
        {},
        {"one": OSError("gone"), "two": [(["b"], 2)]},
        {"one": [(["a", "c"], 3)], "two": [(["a", "b"], 2)]},
    ):
        assert complete(lost, keys) is None
    with pytest.raises(BadInputError, match="1 is bad"):
        complete({**every, "two": [(["b"], Failure(BadInputError("1 is bad")))]}, keys)


def test_an_error_of_ours_arrives_as_it_was(client: Any) -> None:
    held = HeldValues(ten_times, range(COUNT), client=client, name="ten_times")
    payloads = [np.zeros(1)] * COUNT
    with pytest.raises(BadInputError, match="0 is bad"):
        held.ask(refuse, payloads, total, name="refuse", threads=FEW_THREADS + 1)()
    with pytest.raises(BadInputError, match="is bad"):
        in_place(held).ask(refuse, payloads, total, name="refuse")()
