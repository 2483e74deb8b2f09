"""The job of cluster/slurm on a real SLURM: stopped before its time is up, it goes back into the queue and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.cluster_help import CODE_CHUNK, Processes, Reference, tree, wait_until
from tests.support.deployed import TOP, make_certs
from tests.support.slurm_help import Slurm, start_slurm

pytest.importorskip("dask_jobqueue")
pytest.importorskip("cryptography")
SLURM = TOP / "cluster" / "slurm"


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certs(tmp_path_factory.mktemp("slurm-tls") / "certs")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    running = Processes(folder)
    try:
        started = start_slurm(running, folder)
        try:
            yield started
        finally:  # the steps of a job would outlive the daemons
            started.call("scancel", "--user=root", check=False)
            wait_until(lambda: not started.call("squeue", "--noheader", "--states=RUNNING,COMPLETING", check=False), 30)
    finally:
        running.stop()


def surroundings(certs: Path, folder: Path) -> dict[str, str]:
    return {
        "OCH_BIN": str(Path(sys.executable).parent),
        "OCH_TLS_DIR": str(certs),
        "OCH_JOB": str(SLURM),
        "OCH_SCRATCH": str(folder),
        "DASK_OCH__WARM_UP": "false",
    }


def test_a_job_whose_time_is_up_goes_on(slurm: Slurm, certs: Path, reference: Reference, tmp_path: Path) -> None:
    index, log = tmp_path / "index", tmp_path / "och.log"
    submitted = Slurm({**slurm.env, **surroundings(certs, tmp_path), "OCH_RUN_DIR": str(tmp_path)})
    smaller = ("--ntasks=3", "--mem-per-cpu=1000", "--time=10", f"--output={log}", "--parsable")
    words = ("encode", reference.corpus, index, "--model", reference.model, "--chunk-rows", CODE_CHUNK)
    job = submitted.call("sbatch", *smaller, SLURM / "och.sbatch", *words)

    wait_until(lambda: next(index.glob("segments/*/done/*.json"), None) or _ended(slurm, job, log), 90)
    slurm.call("scancel", "--signal=TERM", f"{job}.0")  # what '--signal=TERM@120' does two minutes before the end
    wait_until(lambda: slurm.state(job) == "PENDING" or _ended(slurm, job, log), step=0.2)
    assert "och ended with 5; the job goes back into the queue (restart 1)" in log.read_text()
    assert not (index / "versions").exists()
    before = len(list(index.glob("segments/*/done/*.json")))

    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")  # SLURM lets a requeued job wait for a while
    wait_until(lambda: slurm.state(job) in ("COMPLETED", "FAILED", "TIMEOUT"), 90, step=0.2)
    assert slurm.state(job) == "COMPLETED", log.read_text()
    assert log.read_text().rstrip().endswith("och ended with 0")
    assert 0 < before < len(list((reference.index / "segments").glob("*/codes/c/*/*")))
    assert tree(index / "segments") == tree(reference.index / "segments")
    assert not list(tmp_path.glob("och-*")), "the scheduler file and the outcome go with the job"


def _ended(slurm: Slurm, job: str, log: Path) -> bool:
    """Fails when the job is over already."""
    assert slurm.state(job) not in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"), log.read_text()
    return False


def test_workers_that_are_jobs(slurm: Slurm, certs: Path, reference: Reference, tmp_path: Path) -> None:
    """jobqueue.yaml as it is, but for the size of a job."""
    settings = yaml.safe_load((SLURM / "jobqueue.yaml").read_text())
    settings["jobqueue"]["slurm"] |= {
        "cores": 1, "processes": 1, "memory": "1GB", "local-directory": str(tmp_path), "log-directory": str(tmp_path),
        "scheduler-options": {"dashboard_address": "127.0.0.1:0"},
    }  # fmt: skip
    (tmp_path / "jobqueue.yaml").write_text(yaml.safe_dump(settings))
    ended = subprocess.run(
        [sys.executable, SLURM / "elastic", "--jobs", "1", "verify", str(reference.index), "--json"],
        env={**os.environ, **slurm.env, **surroundings(certs, tmp_path), "DASK_CONFIG": f"{tmp_path}/jobqueue.yaml"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr + "".join(path.read_text() for path in tmp_path.glob("*.err"))
    assert '"damaged": 0' in ended.stdout
    (told,) = tmp_path.glob("och-worker-*.err")
    assert "Registered to:" in told.read_text()


def test_the_script_of_a_worker_job(certs: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, SLURM / "elastic", "--show"],
        env={**os.environ, **surroundings(certs, tmp_path), "DASK_CONFIG": str(SLURM / "jobqueue.yaml")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    subprocess.run(["bash", "-n"], input=ended.stdout, text=True, check=True, timeout=10)
    for part in ("#SBATCH -t 01:00:00", "#SBATCH --requeue", "#SBATCH --cpus-per-task=8", "--nworkers 8 --nanny",
                 "--lifetime 53m --lifetime-stagger 2m --preload och_dist.worker", "--dashboard-address 127.0.0.1:0",
                 f"--tls-cert {certs}/worker.pem"):  # fmt: skip
        assert part in ended.stdout


@pytest.mark.parametrize(("nodes", "sentence"), [("2", "the job spans several nodes"), (None, "is a task of a SLURM")])
def test_the_runner_refuses(nodes: str | None, sentence: str, processes: Processes) -> None:
    task = {"SLURM_PROCID": "1", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "7", "SLURM_NNODES": str(nodes)} if nodes else {}
    started = processes.start(sys.executable, SLURM / "och-runner", "doctor", env=task)
    processes.finish(started, code=2)
    assert sentence in processes.log(started)
