"""Where the work runs: a scheduler somebody started, a local cluster of our own, or this very process."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from och_dist.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from distributed import Client

CONNECT_SECONDS = 20
THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True)
class ClusterOptions:
    """``scheduler`` is an address or a scheduler file; without one, ``workers`` processes are started here.

    ``workers=0`` means no Dask cluster at all: everything runs in this process.
    """

    scheduler: str | None = None
    workers: int | None = None
    threads: int = 1
    memory_limit: str = "auto"
    dashboard: bool = True


@contextlib.contextmanager
def connect(options: ClusterOptions) -> Iterator[Client | None]:
    """A client that is ready to work, closed at the end; a local cluster is closed with it."""
    if options.scheduler is not None:
        if options.workers is not None:
            raise UsageError(f"--workers {options.workers} and --scheduler exclude each other; the cluster has its own")
        with _remote(options.scheduler) as client:
            yield client
    elif options.workers == 0:
        import threadpoolctl

        with threadpoolctl.threadpool_limits(1):
            yield None
    else:
        with _local(options) as client:
            yield client


@contextlib.contextmanager
def _remote(scheduler: str) -> Iterator[Client]:
    from distributed import Client

    from och_dist.warmup import PrepareWorker

    is_file = "://" not in scheduler and os.path.exists(scheduler)
    if not is_file and ":" not in scheduler:
        raise ClusterError(f"scheduler {scheduler!r} is neither an address such as tcp://host:8786 nor a file")
    place: dict[str, Any] = {"scheduler_file": scheduler} if is_file else {"address": scheduler}
    try:
        client = Client(**place, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise ClusterError(f"no scheduler answers at {scheduler} within {CONNECT_SECONDS} s ({error})") from None
    with contextlib.closing(client):
        _await_workers(client, 1)
        client.register_plugin(PrepareWorker())
        yield client


@contextlib.contextmanager
def _local(options: ClusterOptions) -> Iterator[Client]:
    import dask
    from distributed import Client, LocalCluster

    from och_dist.warmup import PrepareWorker

    workers = options.workers or os.cpu_count() or 1
    if workers < 1 or options.threads < 1:
        raise UsageError(f"--workers {workers} --threads {options.threads}: use at least one of each")
    settings: dict[str, Any] = {f"distributed.nanny.pre-spawn-environ.{name}": 1 for name in THREAD_LIMITS}
    settings["distributed.scheduler.no-workers-timeout"] = "60s"
    with dask.config.set(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Port .* is already in use")
        try:
            cluster = LocalCluster(
                n_workers=workers,
                threads_per_worker=options.threads,
                processes=True,
                memory_limit=options.memory_limit,
                host="127.0.0.1",
                dashboard_address="127.0.0.1:8787" if options.dashboard else None,
            )
        except (OSError, RuntimeError, TimeoutError) as error:
            raise ClusterError(f"the local cluster of {workers} workers did not start ({error})") from error
        with cluster, Client(cluster, set_as_default=False, timeout=CONNECT_SECONDS) as client:
            _await_workers(client, workers)
            client.register_plugin(PrepareWorker())
            yield client


def _await_workers(client: Client, count: int) -> None:
    try:
        client.wait_for_workers(count, timeout=60)
    except TimeoutError:
        raise ClusterError(
            f"the scheduler {client.scheduler.address} has fewer than {count} workers after 60 s; start workers"
        ) from None


def dashboard_link(client: Client | None) -> str | None:
    """Address of the Dask dashboard, None without one."""
    if client is None:
        return None
    with contextlib.suppress(Exception):
        services = client.scheduler_info(n_workers=0)["services"]
        if "dashboard" in services:
            return str(client.dashboard_link)
    return None


def check_memory(client: Client | None, task_bytes: int, what: str) -> None:
    """Refuse work whose one task cannot fit a worker, before anything starts."""
    if client is None:
        return
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    for worker in workers:
        limit, threads = worker.get("memory_limit") or 0, worker.get("nthreads") or 1
        if limit and task_bytes * threads > limit * 0.7:
            raise UsageError(
                f"{what} needs about {task_bytes / 1e6:.0f} MB per thread, but a worker has {limit / 1e6:.0f} MB for "
                f"{threads} threads; use smaller chunks (--chunk-rows), fewer threads or a larger --memory-limit"
            )
