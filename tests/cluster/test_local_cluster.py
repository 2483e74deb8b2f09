"""The local cluster: loopback only, one thread per library, a dashboard or none, refusals before anything starts."""

from __future__ import annotations

import os
import re
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
import threadpoolctl

import och_dist
from och_dist.cluster import warm
from och_dist.cluster.connection import ClusterOptions, check_memory, connect, dashboard_link
from och_dist.cluster.tasks import map_tasks
from och_dist.errors import ClusterError, UsageError
from tests.support import cluster_tasks as work
from tests.support.cluster_help import LOOPBACK, Processes, family, listening, start_separate


def test_every_socket_is_on_loopback(client: Any) -> None:
    found = listening(os.getpid())
    workers = set(client.run(os.getpid).values())
    assert len(workers) == 2
    assert workers <= {pid for pid, _ in found}, "a worker that listens nowhere: this test sees nothing"
    mine = [address for pid, address in found if pid == os.getpid()]
    assert len(mine) >= 4, "scheduler, dashboard and two nannies are in this process"
    assert {address for _, address in found} <= set(LOOPBACK)


def test_the_dashboard_answers_on_loopback(client: Any) -> None:
    link = dashboard_link(client)
    assert link is not None
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/status", link)
    with urllib.request.urlopen(link, timeout=20) as answer:
        assert answer.status == 200
        assert b"Dask" in answer.read()


def test_workers_use_one_thread_per_library(client: Any) -> None:
    for found in client.run(work.thread_limits).values():
        assert len(found["pools"]) >= 2  # NumPy and SciPy bring a BLAS each
        assert set(found["pools"].values()) == {1}
        assert set(found["environ"].values()) == {"1"}


def test_a_worker_without_a_nanny_is_limited_too(processes: Processes, tmp_path: Path) -> None:
    many = {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    started = start_separate(processes, tmp_path, workers=1, nanny=False, env=many)
    with connect(ClusterOptions(scheduler=started.address)) as client:
        (found,) = map_tasks(work.thread_limits, [0], client=client, name="thread_limits")
    assert len(found["pools"]) >= 2
    assert set(found["pools"].values()) == {1}


def test_without_a_dashboard(client: Any) -> None:
    before = {process.pid for process in family(psutil.Process().pid)}
    with connect(ClusterOptions(workers=1, dashboard=False)) as other:
        assert other is not None
        assert dashboard_link(other) is None
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(other.dashboard_link, timeout=20)
        assert {address for _, address in listening(os.getpid())} <= set(LOOPBACK)
        assert map_tasks(work.same, [1, 2], client=other, name="same") == [1, 2]
    left = [process for process in family(psutil.Process().pid) if process.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive, "the cluster is closed with its client"


def test_no_workers_is_this_process() -> None:
    with connect(ClusterOptions(workers=0)) as nothing:
        assert nothing is None
        assert dashboard_link(nothing) is None
        assert {pool["num_threads"] for pool in threadpoolctl.threadpool_info()} == {1}


def test_work_that_cannot_fit_is_refused(client: Any) -> None:
    limit = min(worker["memory_limit"] for worker in client.scheduler_info(n_workers=-1)["workers"].values())
    check_memory(client, int(limit * 0.69), "a chunk")
    check_memory(None, 1 << 60, "a chunk")
    with pytest.raises(UsageError, match=r"a chunk needs about \d+ MB per thread, but a worker has .*--chunk-rows"):
        check_memory(client, int(limit * 0.71), "a chunk")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"scheduler": "tcp://127.0.0.1:1", "workers": 2}, "--workers 2 and --scheduler exclude each other"),
        ({"scheduler": "tcp://127.0.0.1:1", "workers": 0}, "--workers 0 and --scheduler exclude each other"),
        ({"scheduler": "tcp://127.0.0.1:1", "threads": 2}, "--threads 2 and --scheduler exclude each other"),
        ({"scheduler": "tcp://127.0.0.1:1", "memory_limit": "2GB"}, "--memory-limit 2GB and --scheduler exclude"),
        ({"workers": -1}, "--workers -1; give a number of processes, or 0 to work in this process"),
        ({"workers": 1, "threads": 0}, "--threads 0; give each worker 1 thread or more, or use --workers 0"),
        ({"workers": 0, "threads": 0}, "--threads 0; give each worker 1 thread or more"),
        ({"threads": -3}, "--threads -3; give each worker 1 thread or more"),
        ({"grace": -1.0}, "--grace -1.0; give a number of seconds, 0 or more"),
        ({"workers": 1, "memory_limit": "lots"}, "--memory-limit lots"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence), connect(ClusterOptions(**options)):
        pytest.fail("connected")


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{port}", "127.0.0.1:{port}", "tls://127.0.0.1:{port}",
                                     "ucx3://127.0.0.1:{port}", "nonsense", "no/such/file.json"])  # fmt: skip
def test_no_scheduler_there(address: str) -> None:
    started = time.monotonic()
    with (
        dask.config.set({"och.connect-timeout": 1}),
        pytest.raises(ClusterError, match=r"scheduler") as caught,
        connect(ClusterOptions(scheduler=address.format(port=free_port()))),
    ):
        pytest.fail("connected")
    assert caught.value.exit_code == 7
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("text", ["", "not json", "{}", "[]", '"tcp://127.0.0.1:1"'])
def test_a_file_that_is_no_scheduler_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    file.write_text(text)
    with pytest.raises(ClusterError, match="is not a scheduler file"), connect(ClusterOptions(scheduler=str(file))):
        pytest.fail("connected")


def test_a_scheduler_without_workers(processes: Processes, tmp_path: Path) -> None:
    started = start_separate(processes, tmp_path, workers=0, nanny=False)
    with (
        dask.config.set({"och.workers-timeout": "1s"}),
        pytest.raises(ClusterError, match="fewer than 1 workers after 1 s; nothing was begun: start workers"),
        connect(ClusterOptions(scheduler=started.address)),
    ):
        pytest.fail("connected")


def test_workers_with_another_version_are_refused(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = start_separate(processes, tmp_path, workers=1, nanny=False)
    with monkeypatch.context() as patch:
        patch.setattr(och_dist, "__version__", "0.0.0")
        with (
            pytest.raises(ClusterError, match=r"has och-dist .*, not 0\.0\.0.*install the same och-dist"),
            connect(ClusterOptions(scheduler=started.address)),
        ):
            pytest.fail("connected")
    with connect(ClusterOptions(scheduler=started.address)) as client:
        assert map_tasks(work.same, [1], client=client, name="same") == [1]


def test_workers_without_the_package_are_refused(processes: Processes, tmp_path: Path) -> None:
    stub = tmp_path / "stub" / "och_dist"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise ImportError('no och_dist here')")
    started = start_separate(
        processes, tmp_path, workers=1, nanny=False, env={"PYTHONPATH": str(stub.parent), "PYTHONSAFEPATH": "1"}
    )
    with (
        pytest.raises(ClusterError, match=r"cannot be used .*install the same och-dist"),
        connect(ClusterOptions(scheduler=started.address)),
    ):
        pytest.fail("connected")


def compiled_kernels() -> int:
    """How many kernels of the search are compiled in this process."""
    from och_dist.kernels import hamming_numba

    return sum(
        len(getattr(hamming_numba, name).signatures) > 0 for name in ("scan", "histogram", "count_rows", "merge_two")
    )


def test_a_long_job_has_its_kernels_compiled_beside_the_first_stage():
    with connect(ClusterOptions(workers=1, dashboard=False)) as client:
        assert list(client.run(compiled_kernels).values()) == [0]
        warm(client)
        deadline = time.monotonic() + 60
        while list(client.run(compiled_kernels).values()) != [4]:
            assert time.monotonic() < deadline
            time.sleep(0.2)
