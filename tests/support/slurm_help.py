"""A real SLURM of one node on loopback, from Debian's packages: munged, slurmctld and slurmd in a folder."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cluster_help import Processes, wait_until
from tests.support.deployed import free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
SETTINGS = """
ClusterName=test
SlurmctldHost=localhost
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=sched_min_interval=100000
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
NodeName=localhost CPUs=8 RealMemory=8000 State=UNKNOWN
PartitionName=test Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A SLURM that runs; ``env`` is what its commands need."""

    env: dict[str, str]

    def call(self, *words: object, check: bool = True) -> str:
        ended = subprocess.run(
            [str(word) for word in words],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert not check or ended.returncode == 0, f"{words}: {ended.stderr}"
        return ended.stdout.strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED ..."""
        words = self.call("scontrol", "show", "job", job).split()
        return next(word for word in words if word.startswith("JobState=")).removeprefix("JobState=")


def start_slurm(running: Processes, folder: Path) -> Slurm:
    """All daemons, and a node that is ready."""
    search = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    programs = {name: shutil.which(name, path=search) for name in DAEMONS}
    if missing := [name for name, path in programs.items() if path is None]:
        pytest.skip(f"{', '.join(missing)} not installed (see .ci/run)")
    if os.getuid() != 0:
        pytest.skip("slurmd wants to be root")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    file = folder / "slurm.conf"
    file.write_text(SETTINGS.format(folder=folder, controller=free_port(), node=free_port()))
    slurm = Slurm({"SLURM_CONF": str(file)})
    running.start(
        str(programs["munged"]), "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}",
        *(f"--{name}-file={folder}/munge.{name}" for name in ("log", "pid", "seed")),
    )  # fmt: skip
    wait_until((folder / "munge.socket").exists)
    running.start(str(programs["slurmctld"]), "-D", env=slurm.env)
    running.start(str(programs["slurmd"]), "-D", "-N", "localhost", env=slurm.env)
    wait_until(lambda: "idle" in slurm.call("sinfo", "--noheader", "--format=%T", check=False), 30, step=0.2)
    return slurm
