"""What a Dask worker does once before its first task: limit threads, and compile the kernels of the hot paths."""

from __future__ import annotations

import threading
from typing import Any

from distributed import WorkerPlugin


class PrepareWorker(WorkerPlugin):
    """One BLAS thread per Dask thread (a worker without a nanny has no limits), kernels compiled before use."""

    name = "och-prepare-worker"

    def setup(self, worker: Any) -> None:
        import threadpoolctl

        threadpoolctl.threadpool_limits(1)
        # In the background: the first task of a job seldom needs what takes longest to compile.
        threading.Thread(target=warm_kernels, name="och-warm-kernels", daemon=True).start()


def warm_kernels() -> None:
    """Compile the kernels for float32 rows and 64-bit codes; other types compile when they first come up."""
    import numpy as np

    from och_dist.kernels.clusters import block_clusters
    from och_dist.kernels.euclidean import euclidean_top_k, merge_candidates
    from och_dist.kernels.hamming import hamming_histogram, hamming_pairs, hamming_top_k, merge_top_k
    from och_dist.kernels.packing import code_words, count_ones
    from och_dist.kernels.project import encode_linear

    rows = np.eye(4, dtype=np.float32)
    codes = encode_linear(rows, np.zeros(4, np.float32), np.ones((4, 8), np.float32), np.zeros(8, np.float32))
    count_ones(codes, 8)
    words, none = code_words(codes), np.zeros(1, np.int64)
    part = hamming_top_k(words, words, 2, n_bits=8)
    merge_top_k([part, part], 2)
    hamming_histogram(words, words, 8)
    hamming_pairs(words, words, none, none)
    merge_candidates([euclidean_top_k(rows, rows, 2)], 2)
    block_clusters(rows, rows[:2], first_row=0, seed=0)
