"""What watching costs: the share of a core that the scheduler spends on the events of encoding.

    python benchmarks/events.py [--rows-per-second 1000000] [--seconds 20] [--bits 64]

First the plugin alone, on the clock of its own thread: every event of 15,000 chunks of 65,536 rows (a begin and an end
each, with its ones per bit), and the document that a page asks for once a second. Then a real scheduler process with
and without them: a worker sends the events of encoding at that speed, and ten times faster, the way tasks do.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from och_dist import events
from och_dist.monitor.dashboard import OchMonitor

CHUNK_ROWS = 65_536
CHUNKS = 15_000
TOKEN = "encode_chunk-replayed"


def opening(chunks: int, bits: int) -> dict[str, Any]:
    """What the driver says before the first chunk."""
    told = [
        ["job", {"name": "replay"}, 0.0],
        ["stage", {"name": "encode"}, 0.0],
        ["sample", {"bits": bits, "sample": {"rows": 1000, "ones": [500] * bits}}, 0.0],
        ["step", {"id": 0, "name": "encode", "total": chunks * CHUNK_ROWS}, 0.0],
        ["tasks", {"token": TOKEN, "name": "encode_chunk", "count": chunks, "inherited": []}, 0.0],
    ]
    return {"driver": "replay", "events": told}


def chunk_events(number: int, bits: int) -> tuple[list[Any], list[Any]]:
    """The begin and the end of a chunk, as a task sends them."""
    facts = {"rows": CHUNK_ROWS, "read": CHUNK_ROWS * 3840, "written": CHUNK_ROWS * bits // 8, "ones": [30_000] * bits}
    return ["begin", TOKEN, number], ["end", TOKEN, number, "done", 1.0, facts]


def time_plugin(bits: int) -> tuple[float, float]:
    """CPU seconds of the plugin for one chunk, and for one document in the middle of the job."""
    plugin = OchMonitor()
    plugin.log_event(events.TOPIC, opening(CHUNKS, bits))
    messages = [
        {"worker": f"tcp://w{number % 16}", "events": [event]}
        for number in range(CHUNKS)
        for event in chunk_events(number, bits)
    ]
    half = len(messages) // 2
    started = time.thread_time()
    for message in messages[:half]:
        plugin.log_event(events.TOPIC, message)
    heard = time.thread_time() - started
    assert plugin.state.job is not None
    assert plugin.state.job.balance.rows == CHUNKS // 2 * CHUNK_ROWS
    documents = 20
    started = time.thread_time()
    for _ in range(documents):
        plugin.made = 0.0
        plugin.status()
    return heard / (CHUNKS // 2), (time.thread_time() - started) / documents


def replay(chunks_per_second: float, seconds: float, bits: int, first: int) -> int:
    """Runs on a worker: send the events of chunks at a steady pace; how many chunks they were.

    Each in a message of its own, as from many workers: one alone would send ten a second at most.
    """
    from distributed import get_worker

    worker, started, sent = get_worker(), time.perf_counter(), 0
    while (elapsed := time.perf_counter() - started) < seconds:
        while sent < elapsed * chunks_per_second:
            for event in chunk_events((first + sent) % CHUNKS, bits):
                worker.log_event(events.TOPIC, {"events": [event]})
            sent += 1
        time.sleep(0.02)
    return sent


def share(process: psutil.Process, seconds: float, work: Any) -> float:
    """Share of a core that a process uses while ``work`` goes on."""

    def used() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    before, started = used(), time.perf_counter()
    if work is None:
        time.sleep(seconds)
    else:
        work()
    return (used() - before) / (time.perf_counter() - started)


def time_scheduler(chunks_per_second: float, seconds: float, bits: int) -> dict[str, float]:
    """Shares of a core of a scheduler process: resting, then hearing events, ten times as many, and being looked at."""
    from distributed import Client

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scheduler.json"
        shared = ("--host", "127.0.0.1", "--dashboard-address", "127.0.0.1:0", "--scheduler-file", str(file))
        dask = [sys.executable, "-m", "dask"]
        preload = ("--preload", "och_dist.monitor.dashboard")
        scheduler = subprocess.Popen([*dask, "scheduler", "--port", "0", *preload, *shared], stderr=subprocess.DEVNULL)
        worker = None
        try:
            while not file.exists():
                time.sleep(0.1)
            worker = subprocess.Popen(
                [*dask, "worker", "--nthreads", "1", "--no-nanny", *shared], stderr=subprocess.DEVNULL
            )
            with Client(scheduler_file=str(file), set_as_default=False) as client:
                client.wait_for_workers(1, timeout=60)
                client.log_event(events.TOPIC, opening(CHUNKS, bits))
                page = client.dashboard_link.removesuffix("status") + "och/status.json"
                process, found = psutil.Process(scheduler.pid), {}

                def send(factor: float) -> None:
                    client.submit(replay, factor * chunks_per_second, seconds, bits, 0, pure=False).result()

                def watched() -> None:
                    future = client.submit(replay, chunks_per_second, seconds, bits, 0, pure=False)
                    while not future.done():
                        urllib.request.urlopen(page, timeout=20).read()
                        time.sleep(1)

                time.sleep(3)
                found["resting"] = share(process, seconds, None)
                found["events"] = share(process, seconds, lambda: send(1))
                found["events, 10 times"] = share(process, seconds, lambda: send(10))
                found["events and one open page"] = share(process, seconds, watched)
                return found
        finally:
            for child in (worker, scheduler):
                if child is not None:
                    child.terminate()
                    child.wait(20)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows-per-second", type=float, default=1e6)
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument("--bits", type=int, default=64)
    given = options.parse_args()
    pace = given.rows_per_second / CHUNK_ROWS
    chunk, document = time_plugin(given.bits)
    print(f"{given.rows_per_second:,.0f} rows/s = {pace:.1f} chunks/s, {given.bits} bits")
    print(f"plugin: {1e6 * chunk:.0f} us a chunk = {100 * pace * chunk:.3f} % of a core")
    print(f"document: {1000 * document:.2f} ms = {100 * document:.2f} % of a core at one a second")
    for name, value in time_scheduler(pace, given.seconds, given.bits).items():
        print(f"scheduler process, {name}: {100 * value:.2f} % of a core")


if __name__ == "__main__":
    main()
