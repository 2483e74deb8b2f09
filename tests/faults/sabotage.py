"""Preloaded into a Dask worker: what it does wrong itself when it is about to store a chunk of codes.

OCH_SABOTAGE names the deed, OCH_SABOTAGE_FOLDER a folder with a file ``armed`` as long as it is to be done.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from och_dist.store.index import Job

POISON = 60
GLUTTONY = 3 << 30
STEP = 16 << 20

_store = Job.write


def crash(folder: Path, chunk: int) -> None:
    """A chunk that ends every process that works on it."""
    if chunk == POISON:
        os.kill(os.getpid(), signal.SIGSEGV)


def take_memory(folder: Path, chunk: int) -> None:
    """A chunk that takes far more memory than a worker has."""
    if chunk == POISON:
        held = []
        while len(held) * STEP < GLUTTONY:
            held.append(b"\1" * STEP)
            time.sleep(0.02)


def stop(folder: Path, chunk: int) -> None:
    """The first worker that comes here is stopped with a finished chunk in its hands."""
    try:
        (folder / "stopped").touch(exist_ok=False)
    except FileExistsError:
        return
    (folder / "stopped").write_text(f"{os.getpid()} {chunk}")
    os.kill(os.getpid(), signal.SIGSTOP)


DEEDS = {"crash": crash, "take_memory": take_memory, "stop": stop}


def dask_setup(worker: Any) -> None:
    folder, deed = Path(os.environ["OCH_SABOTAGE_FOLDER"]), DEEDS[os.environ["OCH_SABOTAGE"]]

    def write(job: Any, objects: Any, chunk: int, *args: Any, **options: Any) -> Any:
        armed = (folder / "armed").exists()
        if armed:
            deed(folder, chunk)
        try:
            return _store(job, objects, chunk, *args, **options)
        finally:
            if armed:
                (folder / f"stored-{os.getpid()}-{chunk}").touch()

    Job.write = write  # type: ignore[method-assign]
