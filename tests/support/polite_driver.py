"""A driver whose tasks are slow and leave a trace. Arguments: folder, workers, seconds of a task, seconds of grace."""

from __future__ import annotations

import sys
import time
from pathlib import Path

TASKS = 12


def slow_task(task: tuple[str, int, float]) -> int:
    folder, number, seconds = task
    (Path(folder) / f"begun-{number}").touch()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.02)
    (Path(folder) / f"ended-{number}").touch()
    return number


def drive(folder: str, workers: int, seconds: float, grace: float) -> None:
    from och_dist.cluster.connection import ClusterOptions, connect
    from och_dist.cluster.tasks import map_tasks
    from och_dist.stop import Terminated, stop_politely
    from tests.support import polite_driver

    tasks = [(folder, number, seconds) for number in range(TASKS)]
    try:
        with (
            stop_politely(),
            connect(ClusterOptions(workers=workers, dashboard=False, grace=grace)) as client,
        ):
            map_tasks(polite_driver.slow_task, tasks, client=client, name="slow_task")
    except (Terminated, KeyboardInterrupt) as end:
        print(type(end).__name__, *end.args)


if __name__ == "__main__":
    drive(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
