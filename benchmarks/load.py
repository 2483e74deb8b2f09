"""Search under load: 16 clients at once, for minutes, every answer compared with brute force, workers killed meanwhile.

    python -m benchmarks.load --seconds 120              # the short form
    python -m benchmarks.load --seconds 600              # the long one
    python -m benchmarks.load --seconds 120 --kill 10    # kill -9 of a worker every 10 s
    python -m benchmarks.load --workers 0                # in this process, without a cluster

Generated clusters of 64-bit codes; a mix of nearest neighbours, radius and filtered searches, 1 to 64 queries each.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from och_dist.cluster.connection import ClusterOptions, connect
from och_dist.encode.stage import encode
from och_dist.ingest.stage import ingest
from och_dist.search.filters import RowSet, row_set
from och_dist.search.searcher import Searcher, open_index
from och_dist.stage import Context
from och_dist.train.stage import train

DIM = 32
BITS = 64
KINDS = ("nearest 10", "nearest 100", "radius 8", "nearest 10 of a filter")


def make_index(folder: Path, rows: int) -> str:
    """An index of clustered vectors, whose codes have many equal distances."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(200, DIM)).astype(np.float32)
    vectors = centres[rng.integers(0, 200, rows)] + rng.normal(0, 0.5, (rows, DIM)).astype(np.float32)
    np.save(folder / "vectors.npy", vectors)
    ingest([str(folder / "vectors.npy")], str(folder / "corpus"))
    model = train(str(folder / "corpus"), str(folder / "models"), bits=BITS, method="lsh").facts["model"]
    encode(str(folder / "corpus"), str(folder / "index"), model=model)
    return str(folder / "index")


@dataclass(frozen=True)
class Case:
    """One request and its answer by brute force."""

    kind: str
    queries: np.ndarray
    expected: tuple[np.ndarray, ...]

    def ask(self, searcher: Searcher, mask: RowSet) -> tuple[np.ndarray, ...]:
        if self.kind == "radius 8":
            within = searcher.radius(self.queries, radius=8)
            return within.indptr, within.distances, within.rows
        k = 100 if self.kind == "nearest 100" else 10
        found = searcher.search(self.queries, k=k, only=mask if self.kind.endswith("filter") else None)
        return found.distances, found.rows


def make_cases(searcher: Searcher, mask: np.ndarray, count: int) -> list[Case]:
    """Requests of every kind with answers from a table of all distances."""
    rng = np.random.default_rng(1)
    codes = np.concatenate([block for _, block in searcher.index.blocks()]).view(np.uint64)[:, 0]
    cases = []
    for number in range(count):
        queries = rng.normal(size=(int(rng.integers(1, 65)), DIM)).astype(np.float32)
        kind = KINDS[number % len(KINDS)]
        rows = np.flatnonzero(mask) if kind.endswith("filter") else np.arange(len(codes))
        lists = []
        for word in searcher.encode(queries).view(np.uint64)[:, 0]:
            distances = np.bitwise_count(codes[rows] ^ word).astype(np.int32)
            order = np.argsort(distances, kind="stable")
            kept = order[distances[order] <= 8] if kind == "radius 8" else order[: 100 if kind == "nearest 100" else 10]
            lists.append((distances[kept], rows[kept]))
        if kind == "radius 8":
            indptr = np.cumsum([0, *(len(d) for d, _ in lists)])
            expected: tuple[np.ndarray, ...] = (
                indptr,
                np.concatenate([d for d, _ in lists]),
                np.concatenate([r for _, r in lists]),
            )
        else:
            expected = (np.stack([d for d, _ in lists]), np.stack([r for _, r in lists]))
        cases.append(Case(kind, queries, expected))
    return cases


@dataclass
class Tally:
    """What all clients saw."""

    seconds: list[float] = field(default_factory=list)
    queries: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    kills: int = 0
    memory: list[tuple[float, float]] = field(default_factory=list)


def client_loop(seed: int, searcher: Searcher, cases: list[Case], mask: RowSet, tally: Tally, over: Any) -> None:
    rng = np.random.default_rng(seed)
    while not over.is_set():
        case = cases[int(rng.integers(len(cases)))]
        started = time.perf_counter()
        try:
            found = case.ask(searcher, mask)
        except Exception as error:
            tally.failed.append(f"{type(error).__name__}: {error}")
            continue
        tally.seconds.append(time.perf_counter() - started)
        tally.queries += len(case.queries)
        tally.wrong += not all(np.array_equal(a, b) for a, b in zip(found, case.expected, strict=True))


def every(seconds: float, action: Callable[[], None], over: threading.Event) -> None:
    while not over.wait(seconds):
        action()


def killer(client: Any, tally: Tally) -> Callable[[], None]:
    """kill -9 of one worker process after the other; its nanny starts a new one."""

    def kill() -> None:
        pids = list(client.run(os.getpid).values())
        if pids:
            os.kill(pids[tally.kills % len(pids)], signal.SIGKILL)
            tally.kills += 1

    return kill


def memory_of_all(tally: Tally, started: float) -> Callable[[], None]:
    """Resident memory of this process and its children."""

    def measure() -> None:
        total = 0
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        tally.memory.append((time.perf_counter() - started, total))

    return measure


@contextmanager
def surroundings(workers: int) -> Iterator[Context]:
    with connect(ClusterOptions(workers=workers, dashboard=False)) as client:
        yield Context(client=client)


def run(options: argparse.Namespace, make: Callable[..., list[Case]] = make_cases) -> dict[str, Any]:
    tally, over = Tally(), threading.Event()
    with tempfile.TemporaryDirectory() as folder, surroundings(options.workers) as context:
        index = make_index(Path(folder), options.rows)
        with open_index(index, client=context.client) as searcher:
            third = np.arange(searcher.rows) % 3 == 0
            cases, mask = make(searcher, third, options.cases), row_set(third)
            for kind in KINDS:  # load and compile before the clock runs
                next(case for case in cases if case.kind == kind).ask(searcher, mask)
            started = time.perf_counter()
            shared = (searcher, cases, mask, tally, over)
            loops: list[tuple[Callable[..., None], tuple[Any, ...]]]
            loops = [(client_loop, (number, *shared)) for number in range(options.clients)]
            loops.append((every, (1.0, memory_of_all(tally, started), over)))
            if options.kill:
                loops.append((every, (options.kill, killer(context.client, tally), over)))
            threads = [threading.Thread(target=target, args=args) for target, args in loops]
            for thread in threads:
                thread.start()
            time.sleep(options.seconds)
            over.set()
            for thread in threads:
                thread.join()
            return report(options, tally, time.perf_counter() - started)


def report(options: argparse.Namespace, tally: Tally, seconds: float) -> dict[str, Any]:
    if not tally.seconds:
        raise SystemExit(f"no request was answered in {seconds:.0f} s: {sorted(set(tally.failed))[:3]}")
    waits = np.sort(tally.seconds) * 1000
    times, sizes = np.array(tally.memory).T
    later = times > times[-1] / 4  # after the first quarter, in which everything is loaded and compiled
    slope = np.polyfit(times[later], sizes[later], 1)[0] * 60 / 1e6 if later.sum() > 2 else float("nan")
    return {
        **{name: getattr(options, name) for name in ("rows", "workers", "clients")},
        "seconds": round(seconds, 1),
        "requests": len(waits),
        "requests_per_second": round(len(waits) / seconds, 1),
        "queries_per_second": round(tally.queries / seconds),
        **{f"p{share}_ms": round(float(np.percentile(waits, share)), 1) for share in (50, 95, 99)},
        "memory_mb": round(float(sizes[-1]) / 1e6),
        "memory_slope_mb_per_minute": round(float(slope), 2),
        "workers_killed": tally.kills,
        "failed": len(tally.failed),
        "first_failures": sorted(set(tally.failed))[:3],
        "wrong": tally.wrong,
    }


def main(words: Sequence[str] | None = None, make: Callable[..., list[Case]] = make_cases) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cases", type=int, default=64)
    parser.add_argument("--kill", type=float, default=0, help="Seconds between kills of a worker; 0: none.")
    result = run(parser.parse_args(words), make)
    print(json.dumps(result, indent=1))
    raise SystemExit(1 if result["wrong"] else 0)


if __name__ == "__main__":
    main()
