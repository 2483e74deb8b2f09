"""Functions that the tests of this folder run on workers, which must be able to import them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from och_dist import errors


def describe(number: int, shared: Any = None) -> str:
    return f"<{number}{'' if shared is None else len(shared)}>"


def bracket(parts: Sequence[str]) -> str:
    """Neither commutative nor associative: the result shows the shape of the tree."""
    return "(" + "".join(parts) + ")"


def pair(number: int, shared: Any = None) -> tuple[str, str]:
    return f"<{number}>", f"kept {number}"


def same(task: Any, shared: Any = None) -> Any:
    return task


def collect(parts: Sequence[Any]) -> list[Any]:
    return [item for part in parts for item in (part if isinstance(part, list) else [part])]


def square(number: int, shared: Any = None) -> dict[int, int]:
    return {number: number * number}


def merge_dicts(parts: Sequence[dict[int, int]]) -> dict[int, int]:
    return {key: value for part in parts for key, value in part.items()}


def every_third(found: dict[int, int], first: int) -> dict[int, int]:
    return {key: value for key, value in found.items() if key % 3 == first}


def sorted_items(found: dict[int, int]) -> list[tuple[int, int]]:
    return sorted(found.items())


@dataclass(frozen=True)
class Attempt:
    """A task that leaves a mark in ``folder`` whenever it runs."""

    folder: str
    number: int
    error: BaseException | None = None

    def mark(self) -> None:
        for attempt in range(1000):
            try:
                Path(self.folder, f"{self.number}.{attempt}").touch(exist_ok=False)
                return
            except FileExistsError:
                continue


def attempt(task: Attempt, shared: Any = None) -> int:
    task.mark()
    if task.error is not None:
        raise task.error
    return task.number


def attempt_twice(task: Attempt, shared: Any = None) -> int:
    """Fails the first time."""
    task.mark()
    if not Path(task.folder, f"{task.number}.1").exists():
        raise OSError(5, "accident")
    return task.number


def die(number: int, shared: Any = None) -> int:
    if number == 3:
        os._exit(9)
    return number


def sleep(seconds: float, shared: Any = None) -> float:
    time.sleep(seconds)
    return seconds


def raise_not_finite(task: int, shared: Any = None) -> int:
    if task >= 5:
        raise errors.NonFiniteError(f"{task} is bad", (task, task + 1), 2)
    return task


def fail_to_merge(parts: Sequence[Any]) -> Any:
    raise errors.ConflictError("these do not fit together")


def fail_to_cut(found: Any, first: int) -> Any:
    raise errors.ConflictError("this cannot be cut")


def slow_pid(seconds: float, shared: Any = None) -> int:
    time.sleep(seconds)
    return os.getpid()


def thread_limits(task: Any = None, shared: Any = None) -> dict[str, Any]:
    import scipy.linalg  # noqa: F401
    import sklearn.cluster  # noqa: F401
    import threadpoolctl

    pools = {pool["filepath"]: pool["num_threads"] for pool in threadpoolctl.threadpool_info()}
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
    return {"pools": pools, "environ": {name: os.environ.get(name) for name in names}}
