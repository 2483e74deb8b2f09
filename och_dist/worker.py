"""What a Dask worker does once before its first task: check that it is one of ours, and limit its threads.

Kernels are compiled where they are first used. A job of many stages, which will use them all, compiles them in a
thread beside its first stages (:class:`WarmKernels`); for a single command that would cost more than it brings:
'och verify' went from 3.5 s to 6.6 s, 'och encode' from 7 s to 11 s. Workers that stay ('dask worker --preload
och_dist.worker') compile them before they report for work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from typing import Any

from distributed import WorkerPlugin

import och_dist
from och_dist import settings

BLAS_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class PrepareWorker(WorkerPlugin):
    """One BLAS thread per Dask thread: a worker without a nanny has no limits.

    A worker with another version of this package is refused: it might make other bytes.
    """

    name = "och-prepare-worker"

    def __init__(self) -> None:
        self.version = och_dist.__version__

    def setup(self, worker: Any) -> None:
        if self.version != och_dist.__version__:
            raise RuntimeError(f"worker {worker.address} has och-dist {och_dist.__version__}, not {self.version}")
        limit_threads()


class WarmKernels(WorkerPlugin):
    """Compile the kernels in a thread of the worker."""

    name = "och-warm-kernels"

    def setup(self, worker: Any) -> None:
        threading.Thread(target=warm_kernels, args=(False,), name=self.name, daemon=True).start()


async def dask_setup(worker: Any) -> None:
    """What 'dask worker --preload och_dist.worker' runs before the worker reports for work."""
    limit_threads()
    if settings.flag("warm-up"):
        await asyncio.to_thread(warm_kernels)


def warm_kernels(everything: bool = True) -> None:
    """Compile the hot kernels for float32 rows and 64-bit codes; other types compile when they first come up.

    Codes of up to 32 bits and searches within a radius, half of the time, are for workers that stay.
    """
    import numpy as np

    from och_dist.kernels import hamming, kmeans
    from och_dist.kernels.euclidean import euclidean_top_k, merge_candidates
    from och_dist.kernels.packing import code_words
    from och_dist.kernels.project import encode_linear

    rows = np.eye(4, dtype=np.float32)
    kmeans.block_clusters(rows, rows[:2], first_row=0, seed=0)
    kmeans.block_sums(rows, kmeans.begin_round(rows[:2]))
    codes = encode_linear(rows, np.zeros(4, np.float32), np.ones((4, 8), np.float32), np.zeros(8, np.float32))
    merge_candidates([euclidean_top_k(rows, rows, 2)] * 2, 2).rank()
    words, first = code_words(codes), np.zeros(1, np.int64)
    # Codes of up to 32 bits have a type of their own, many codes a scan of a sample before the scan.
    many = (np.zeros((hamming.SAMPLE_FROM, 8), np.uint8), 64)
    for packed, bits in (many, (codes, 8)) if everything else (many,):
        block = hamming.lay_out(packed, bits)
        part = hamming.hamming_top_k(packed[:1], block, 1)
        hamming.hamming_histogram(packed[:1], block)
        if everything:
            hamming.hamming_radius(packed[:1], block, 1, live=np.ones(block.n, bool))
    hamming.merge_top_k([part, part], 2)
    hamming.count_rows(words[:1], words, first[:, None], 0, 8)


def limit_threads() -> None:
    """One thread for BLAS and OpenMP in this process, whether they are loaded yet or not.

    Numba is left alone: ours is serial, and it raises when its limit changes after somebody used its threads.
    """
    for name in BLAS_LIMITS:
        os.environ[name] = "1"
    import threadpoolctl

    import och_dist.kernels.moments  # noqa: F401  (SciPy brings a BLAS of its own)

    threadpoolctl.threadpool_limits(1)


def leave_interrupts_to_driver() -> None:
    """A Ctrl-C reaches all processes of a terminal; workers of a local cluster are ended by the driver, quietly."""
    with contextlib.suppress(ValueError):  # not the main thread of its process
        signal.signal(signal.SIGINT, signal.SIG_IGN)
