"""What one process has to work with: interpreter, packages, cores, memory, threads of its libraries, processor."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

PACKAGES = ("och-dist", "numpy", "scipy", "numba", "dask", "distributed", "zarr", "scikit-learn")
FAST_COUNTS = "avx512vpopcntdq"


def describe_machine() -> dict[str, Any]:
    """Facts about the process that calls this, which may be a worker."""
    import llvmlite.binding
    import threadpoolctl
    from distributed.system import MEMORY_LIMIT

    import och_dist.kernels.moments  # noqa: F401  (brings the BLAS of SciPy, which is to be counted too)

    pools = threadpoolctl.threadpool_info()
    features = llvmlite.binding.get_host_cpu_features()
    return {
        "host": platform.node(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "cores": usable_cores(),
        "memory": int(MEMORY_LIMIT),
        "blas": sorted({f"{pool['internal_api']} {pool['version']}" for pool in pools}),
        "blas_threads": max((int(pool["num_threads"]) for pool in pools), default=1),
        "processor": llvmlite.binding.get_host_cpu_name(),
        "fast_counts": bool(features.get(FAST_COUNTS)),
    }


def usable_cores() -> int:
    """Cores that this process may run on; a container may have fewer than the machine."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
