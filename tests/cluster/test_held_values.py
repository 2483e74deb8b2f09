"""Values that stay on the workers, asked in one trip and as tasks, against the plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from och_dist.cluster import ask_values, begin_asking, hold_values
from och_dist.cluster.held_values import SMALL_BYTES
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


def largest(parts: Sequence[int]) -> int:
    return max(parts)


@pytest.mark.parametrize("nbytes", [1, SMALL_BYTES + 1])
def test_asked_as_tasks(client: Any, nbytes: int) -> None:
    """At once after they are asked for: nothing is held yet."""
    held = hold_values(ten_times, range(COUNT), client=client, name="ten_times")
    payloads = [np.arange(3), np.arange(4)] * (COUNT // 2)
    finish = begin_asking(plus, held, payloads, total, client=client, name="plus", nbytes=nbytes)
    assert finish() == sum(plus(10 * n, payload) for n, payload in enumerate(payloads))


def test_asked_in_one_trip(client: Any) -> None:
    held = hold_values(ten_times, range(9), client=client, name="ten_times")
    derived = hold_values(plus, held, [np.arange(n) for n in range(9)], client=client, name="plus")
    values = [plus(10 * n, np.arange(n)) for n in range(9)]
    wait_until(lambda: all(future.done() for future in derived), 30)
    payload = np.ones(2)
    assert ask_values(plus, derived, [payload] * 9, client=client)() == [plus(value, payload) for value in values]
    merged = ask_values(plus, derived, [payload] * 9, client=client, merge=largest)()
    assert merged is not None
    assert 1 <= len(merged) <= 2
    assert max(merged) >= max(values)


def test_an_error_of_ours_arrives_as_it_was(client: Any) -> None:
    held = hold_values(ten_times, range(COUNT), client=client, name="ten_times")
    payloads = [np.zeros(1)] * COUNT
    with pytest.raises(BadInputError, match="0 is bad"):
        begin_asking(refuse, held, payloads, total, client=client, name="refuse", nbytes=1)()
    wait_until(lambda: all(future.done() for future in held), 30)
    with pytest.raises(BadInputError, match="is bad"):
        ask_values(refuse, held, payloads, client=client)()
