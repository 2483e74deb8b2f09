"""What a Dask worker does once before its first task: check that it is one of ours, and limit its threads.

Kernels are compiled where they are first used. Compiling all of them ahead, in a thread of the worker, took 4.5 s
of its interpreter from the first tasks: 'och verify' went from 3.5 s to 6.6 s, 'och encode' from 7 s to 11 s.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from distributed import WorkerPlugin

import och_dist

BLAS_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
THREAD_LIMITS = (*BLAS_LIMITS, "NUMBA_NUM_THREADS")


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
