"""Where the work runs: on a scheduler that runs already, on a local cluster of our own, or in this process; and what
there is to work with: workers, their memory, and what a process has."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import platform
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

from och_dist import settings
from och_dist.cluster.tls import (
    NOT_BEGUN,
    REMEDY,
    Certificates,
    dask_certificates,
    find_certificates,
    probe_scheduler,
    refuse_open_network,
)
from och_dist.errors import ClusterError, UsageError
from och_dist.options import Option
from och_dist.stop import set_grace

if TYPE_CHECKING:
    from distributed import Client

LOCAL = ("workers", "threads", "memory_limit")
UNLIMITED = 2 << 30
PACKAGES = ("och-dist", "numpy", "scipy", "numba", "dask", "distributed", "zarr", "scikit-learn")


@dataclass(frozen=True)
class ClusterOptions:
    """``scheduler`` is an address or a scheduler file; without one, ``workers`` processes are started here.

    ``workers=0`` means no Dask cluster at all: everything runs in this process. None stands for the setting of the same
    name in ``dask.yaml``; its ``scheduler`` counts only where nothing is said about local workers either.

    The ``tls_`` files, all three or none (or the variables OCH_TLS_CA, OCH_TLS_CERT, OCH_TLS_KEY), are shown to a
    ``tls://`` scheduler, and a local cluster speaks TLS with them. ``insecure`` allows a scheduler on another machine
    without TLS. ``grace`` is how many seconds the tasks under way have to finish after SIGTERM or Ctrl-C.
    """

    scheduler: Annotated[
        str | None, Option("Use a running cluster: address or scheduler file.", metavar="ADDRESS|FILE")
    ] = None
    workers: Annotated[int | None, Option("Local worker processes [default: one per core]; 0: this process.")] = None
    threads: Annotated[int | None, Option("Threads of each local worker [default: 1].")] = None
    memory_limit: Annotated[
        str | None, Option("Memory of each local worker, such as 2GB [default: share].", metavar="SIZE")
    ] = None
    dashboard: Annotated[
        bool | None,
        Option("Dask dashboard of a local cluster (on loopback).", flags="--dashboard/--no-dashboard"),
    ] = None
    tls_ca: Annotated[
        str | None,
        Option("Authority of a tls:// scheduler and its clients [default: OCH_TLS_CA].", metavar="FILE"),
    ] = None
    tls_cert: Annotated[str | None, Option("Our certificate (PEM) [default: OCH_TLS_CERT].", metavar="FILE")] = None
    tls_key: Annotated[str | None, Option("The key of --tls-cert [default: OCH_TLS_KEY].", metavar="FILE")] = None
    insecure: Annotated[bool, Option("Allow a scheduler elsewhere without TLS.")] = False
    grace: Annotated[
        float | None,
        Option(
            "Time for the tasks under way to finish after SIGTERM or Ctrl-C [default: och.grace, 10 s].",
            metavar="SECONDS",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 0:
            raise UsageError(f"--workers {self.workers}; give a number of processes, or 0 to work in this process")
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads {self.threads}; give each worker 1 thread or more, or use --workers 0")
        if self.grace is not None and not 0 <= self.grace < math.inf:
            raise UsageError(f"--grace {self.grace}; give a number of seconds, 0 or more")


@contextlib.contextmanager
def connect(options: ClusterOptions) -> Iterator[Client | None]:
    """A client that is ready to work, closed at the end; a local cluster is closed with it."""
    settings.refuse_unknown()
    options = _with_settings(options)
    if options.scheduler is not None:
        with observe(options) as client:
            _prepare(client, 1)
            yield client
    elif options.workers == 0:
        import threadpoolctl

        with threadpoolctl.threadpool_limits(1):
            yield None
    else:
        with _local(options) as client:
            yield client


def _with_settings(options: ClusterOptions) -> ClusterOptions:
    """The options, with the settings where they say nothing; also sets the time of grace."""
    set_grace(settings.seconds("grace") if options.grace is None else options.grace)
    local = {name: value for name in LOCAL if (value := getattr(options, name)) is not None}
    if options.scheduler is not None:
        for name, value in local.items():
            option = name.replace("_", "-")
            raise UsageError(f"--{option} {value} and --scheduler exclude each other; the cluster has its own")
        return options
    if not local and (scheduler := settings.setting("scheduler")) is not None:
        return replace(options, scheduler=str(scheduler))
    if options.insecure:
        raise UsageError("--insecure is about a --scheduler; give one, or leave it out")
    if options.workers is None and settings.setting("workers") is not None:
        local["workers"] = settings.whole("workers")
    usual = {
        "workers": os.cpu_count() or 1,
        "threads": settings.whole("threads", 1),
        "memory_limit": settings.setting("memory-limit"),
        "dashboard": settings.flag("dashboard") if options.dashboard is None else options.dashboard,
    }
    return replace(options, **usual | local)


@contextlib.contextmanager
def observe(options: ClusterOptions) -> Iterator[Client]:
    """A client of a running scheduler that only looks at it: workers are neither needed nor changed."""
    from distributed import Client

    settings.apply()
    patience = settings.seconds("connect-timeout")
    address, certificates = _checked_address(options, patience)
    security = certificates.security() if certificates else None
    client, reason = None, ""
    try:
        client = Client(address, timeout=patience, set_as_default=False, security=security)
    except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as error:
        reason = str(error)
    if client is None:
        # A client that failed to start closes itself when it is collected; while another one starts, that would hang.
        gc.collect()
        raise ClusterError(f"no scheduler answers at {options.scheduler} within {patience:g} s ({reason}); {NOT_BEGUN}")
    with contextlib.closing(client):
        yield client


def _checked_address(options: ClusterOptions, patience: float) -> tuple[str, Certificates | None]:
    """The address of the scheduler and the certificates to use there, after every check that needs no Dask client."""
    from distributed.comm.addressing import parse_address, parse_host_port

    scheduler = str(options.scheduler)
    address = _address(scheduler)
    shown = scheduler if scheduler == address else f"{scheduler} ({address})"
    scheme, location = parse_address(address)
    certificates = find_certificates(options)
    if scheme == "tls":
        certificates = certificates or dask_certificates()
        if certificates is None:
            raise ClusterError(f"the scheduler {shown} wants certificates; give {REMEDY}")
    elif options.tls_ca or options.tls_cert or options.tls_key:
        raise UsageError(f"the scheduler {shown} would not use --tls-cert; write tls:// or leave it out")
    else:
        certificates = None
    if scheme not in ("inproc", "unix"):
        try:
            host, port = parse_host_port(location)
        except ValueError as error:
            raise ClusterError(f"the scheduler {shown} cannot be reached ({error}); write tcp://host:8786") from None
        if scheme not in ("tls", "wss") and not options.insecure:
            refuse_open_network(shown, host)
        if scheme in ("tcp", "tls"):
            probe_scheduler(shown, host, port, certificates=certificates, seconds=patience)
    return f"{scheme}://{location}", certificates


def _address(scheduler: str) -> str:
    """The address itself, or the one that a scheduler file names."""
    if "://" in scheduler or not os.path.exists(scheduler):
        if ":" not in scheduler:
            raise ClusterError(
                f"scheduler {scheduler!r} is neither an address such as tcp://host:8786 nor a file; {NOT_BEGUN}"
            )
        return scheduler
    try:
        with open(scheduler, encoding="utf-8") as file:
            return str(json.load(file)["address"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ClusterError(
            f"{scheduler} is not a scheduler file ({error!r}); give the one of 'dask scheduler --scheduler-file'"
        ) from None


@contextlib.contextmanager
def _local(options: ClusterOptions) -> Iterator[Client]:
    from distributed import Client, LocalCluster

    from och_dist.worker import leave_interrupts_to_driver

    settings.apply()
    workers, limit = options.workers or 1, options.memory_limit
    address = str(settings.setting("dashboard-address")) if options.dashboard else None
    certificates = find_certificates(options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Port .* is already in use")
        try:
            cluster = LocalCluster(
                n_workers=workers,
                threads_per_worker=options.threads,
                processes=True,
                memory_limit=limit,
                host="127.0.0.1",
                security=certificates.security() if certificates else None,
                dashboard_address=address,
            )
        except ValueError as error:
            raise UsageError(
                f"a local cluster with --memory-limit {limit} cannot be made ({error}); write the limit like 2GB"
            ) from error
        except (OSError, RuntimeError, TimeoutError, TypeError) as error:
            raise ClusterError(
                f"the local cluster of {workers} workers did not start ({error}); nothing was begun: try fewer "
                "--workers, or --workers 0"
            ) from error
        with cluster, Client(cluster, set_as_default=False, timeout=settings.seconds("connect-timeout")) as client:
            _prepare(client, workers)
            client.run(leave_interrupts_to_driver)
            yield client


def _prepare(client: Client, count: int) -> None:
    """Wait for ``count`` workers, then check and limit every worker, also those that join later."""
    from och_dist.worker import PrepareWorker

    address, patience = client.scheduler.address, settings.seconds("workers-timeout")
    try:
        client.wait_for_workers(count, timeout=patience)
    except TimeoutError:
        raise ClusterError(
            f"the scheduler {address} has fewer than {count} workers after {patience:g} s; "
            "nothing was begun: start workers, and run the command again"
        ) from None
    try:
        client.register_plugin(PrepareWorker())
    except Exception as error:  # whatever went wrong on a worker arrives here
        raise ClusterError(
            f"the workers of {address} cannot be used ({type(error).__name__}: {error}); "
            "install the same och-dist for scheduler, workers and this command"
        ) from error


def warm(client: Client | None) -> None:
    """Let the workers compile all kernels beside the first stages of a long job."""
    if client is not None:
        from och_dist.worker import WarmKernels

        client.register_plugin(WarmKernels())


def dashboard_link(client: Client | None) -> str | None:
    """Address of the Dask dashboard, None without one."""
    if client is None:
        return None
    local = getattr(client.cluster, "scheduler_spec", None)
    if local is not None and local["options"].get("dashboard_address") is None:
        return None  # its scheduler serves /health all the same, so one cannot see it
    with contextlib.suppress(Exception):
        if "dashboard" in client.scheduler_info(n_workers=0)["services"]:
            return str(client.dashboard_link)
    return None


def check_memory(client: Client | None, task_bytes: int, what: str) -> None:
    """Refuse work whose one task cannot fit a worker, before anything starts."""
    for worker in workers_of(client):
        limit, threads = worker.get("memory_limit") or 0, worker.get("nthreads") or 1
        if limit and task_bytes * threads > limit * 0.7:
            raise UsageError(
                f"{what} needs about {task_bytes / 1e6:.0f} MB per thread, but a worker has {limit / 1e6:.0f} MB for "
                f"{threads} threads; use smaller chunks (--chunk-rows), fewer threads or a larger --memory-limit"
            )


def thread_shares(client: Client | None) -> list[int]:
    """Bytes of memory for each thread of all workers; one share without a cluster, or while it has no workers.

    2 GiB are assumed of a worker without a limit.
    """
    shares: list[int] = []
    for worker in workers_of(client):
        threads = worker.get("nthreads") or 1
        shares += [(worker.get("memory_limit") or UNLIMITED) // threads] * threads
    return shares or [UNLIMITED]


def workers_of(client: Client | None) -> list[dict[str, Any]]:
    """What the scheduler knows of each worker; no workers without a cluster."""
    return [] if client is None else list(client.scheduler_info(n_workers=-1)["workers"].values())


def describe_machine() -> dict[str, Any]:
    """Facts about the process that calls this, which may be a worker."""
    import llvmlite.binding
    import threadpoolctl
    from distributed.system import MEMORY_LIMIT

    import och_dist.kernels.moments  # noqa: F401  (brings the BLAS of SciPy, which is to be counted too)

    pools = threadpoolctl.threadpool_info()
    return {
        "host": platform.node(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "cores": usable_cores(),
        "memory": int(MEMORY_LIMIT),
        "blas": sorted({f"{pool['internal_api']} {pool['version']}" for pool in pools}),
        "blas_threads": max((int(pool["num_threads"]) for pool in pools), default=1),
        "processor": llvmlite.binding.get_host_cpu_name(),
        "fast_counts": bool(llvmlite.binding.get_host_cpu_features().get("avx512vpopcntdq")),
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
