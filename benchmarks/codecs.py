"""Which codec and chunk size a corpus should have: size on disk, CPU to read, CPU to read and encode; and what Zarr's
own settings change.

    python benchmarks/codecs.py [--rows 65536] [--dim 960]

One process, one thread, page cache warm. The bare limit is reading the raw bytes of an uncompressed file.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from threadpoolctl import threadpool_limits

from och_dist.kernels.gistlike import gist_rows
from och_dist.kernels.project import encode_linear
from och_dist.store.arrays import CODECS, ArraySpec, create_array, open_array, read_rows, stored_chunks, write_chunk
from och_dist.store.objects import LocalObjects


def cpu_seconds(action: Callable[[], None], repeats: int = 5) -> float:
    """Median CPU time, so that a busy machine disturbs less."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--dim", type=int, default=960)
    options = parser.parse_args()
    rows = gist_rows(0, options.rows, dim=options.dim, seed=0)
    mean, offsets = rows[:1000].mean(axis=0), np.zeros(64, np.float32)
    projection = np.random.default_rng(0).standard_normal((options.dim, 64)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder, threadpool_limits(1):
        raw = Path(folder, "raw")
        rows.tofile(raw)
        limit = cpu_seconds(lambda: np.fromfile(raw, np.float32))
        print(f"{options.rows:,} x {options.dim} float32, {rows.nbytes / 1e6:.0f} MB, generated (seed 0)")
        print(f"bare read of the raw file: {1e3 * limit:.0f} ms CPU\n")
        print("| codec | chunk rows | MB per chunk | size | read, ms | x bare read | read + encode, ms |")
        print("|---|---|---|---|---|---|---|")
        for codec in CODECS:
            for chunk_rows in (2048, 8192, 16384):
                spec = ArraySpec(options.rows, options.dim, "<f4", chunk_rows, codec)
                objects, name = LocalObjects(folder), f"{codec}-{chunk_rows}"
                create_array(objects, name, spec)
                for chunk in range(spec.n_chunks):
                    write_chunk(objects, name, chunk, rows[slice(*spec.bounds(chunk))])
                array = open_array(objects, name)

                def read(array=array, spec=spec, encode=False) -> None:  # type: ignore[no-untyped-def]
                    for chunk in range(spec.n_chunks):
                        block = read_rows(array, *spec.bounds(chunk))
                        if encode:
                            encode_linear(block, mean, projection, offsets)

                read(encode=True)
                share = sum(stored_chunks(objects, name).values()) / rows.nbytes
                plain, both = cpu_seconds(read), cpu_seconds(lambda read=read: read(encode=True))  # type: ignore[misc]
                size = chunk_rows * options.dim * 4 / 1e6
                print(
                    f"| {codec} | {chunk_rows:,} | {size:.0f} | {share:.2f} | {1e3 * plain:.0f} "
                    f"| {plain / limit:.1f} | {1e3 * both:.0f} |"
                )
        print("\n8,192-row chunks through Zarr: wall ms for each of its settings\n")
        print("| codec | read | concurrency 1, 1 thread | concurrency 10, 1 thread | concurrency 10, any threads |")
        print("|---|---|---|---|---|")
        for codec in CODECS:
            array = open_array(LocalObjects(folder), f"{codec}-8192")
            for words, step in (("a chunk at a time, as we do", 8192), ("all at once", options.rows)):
                times = [_wall_ms(array, step, settings) for settings in ((1, 1), (10, 1), (10, None))]
                print(f"| {codec} | {words} | " + " | ".join(f"{value:.0f}" for value in times) + " |")


def _wall_ms(array: Any, step: int, settings: tuple[int, int | None], repeats: int = 5) -> float:
    """Median time to read an array under settings of Zarr: requests at a time, and threads that decode."""
    times = []
    with zarr.config.set({"async.concurrency": settings[0], "threading.max_workers": settings[1]}):
        for _ in range(repeats):
            start = time.perf_counter()
            for low in range(0, array.shape[0], step):
                read_rows(array, low, min(low + step, array.shape[0]))
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main()
