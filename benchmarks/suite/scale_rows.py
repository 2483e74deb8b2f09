"""Benchmarks of the whole: a job from file to index, growth, workers, start-up, and the scheduler alone."""

from __future__ import annotations

import math
import os
import pickle
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import psutil

from benchmarks.suite import bare
from benchmarks.suite.ground import Ground, sum_moments
from benchmarks.suite.measure import Figure, Goal, Outcome, peak_memory, take_turns
from och_dist.cluster.connection import ClusterOptions, connect
from och_dist.cluster.tasks import WINDOW, map_tasks, reduce_tasks
from och_dist.encode.stage import encode, encode_chunk
from och_dist.ingest.stage import ingest
from och_dist.stage import Context
from och_dist.store.index import CodeChunk, Job
from och_dist.train.stage import train
from och_dist.upkeep.verification import verify


def job_row(ground: Ground) -> Outcome:
    """ingest, train, encode (with its publish) and verify, one after the other."""
    sizes = ground.sizes
    source, chunk = str(ground.fvecs(sizes.job_rows)), ground.chunk_rows
    outcome = Outcome("job", f"{sizes.job_rows:,} x {sizes.dim}: ingest, train, encode and publish, verify")
    corpus, index, models = (str(ground.scratch(name)) for name in ("ingested", "index", "models"))
    params = {"n_centres": sizes.centres} if sizes.dim < 960 else {}
    context = ground.context
    steps: dict[str, Any] = {
        "ingest": lambda: ingest([source], corpus, chunk_rows=chunk, context=context),
        "train": lambda: train(
            corpus, models, bits=sizes.bits, train_rows=sizes.solve_rows, params=params, context=context
        ),
    }
    made = {}
    for name, step in steps.items():
        start = time.perf_counter()
        made[name] = step()
        outcome.figures[name] = Figure((time.perf_counter() - start,))
    steps = {
        "encode and publish": lambda: encode(
            corpus, index, model=made["train"].facts["model"], chunk_rows=sizes.code_chunk_rows, context=context
        ),
        "verify index": lambda: verify(index, context=context),
        "verify corpus": lambda: verify(corpus, context=context),
    }
    for name, step in steps.items():
        start = time.perf_counter()
        step()
        outcome.figures[name] = Figure((time.perf_counter() - start,))
    outcome.figures["sum"] = Figure((sum(figure.median for figure in outcome.figures.values()),))
    return outcome


def growth_row(ground: Ground) -> Outcome:
    """A pass for moments, and encode, at growing numbers of rows: time per row, peak memory of workers and driver.

    Each size has two new workers; kernels are compiled, and files are in the page cache, before anything is measured.
    """
    sizes = ground.sizes
    outcome = Outcome("growth", f"passes over {', '.join(f'{rows:,}' for rows in sizes.growth)} x {sizes.dim}")
    model = ground.model(sizes.growth[0])
    memory: dict[int, float] = {}
    driver: dict[int, float] = {}
    times: dict[str, dict[int, Figure]] = {"moments": {}, "encode": {}}
    for rows in sizes.growth:
        corpus = ground.corpus(rows)
        with _new_workers(ground) as client:
            context = Context(client)
            actions: dict[str, Any] = {
                "moments": lambda corpus=corpus, context=context: sum_moments(corpus, context),
                "encode": lambda corpus=corpus, context=context: encode(
                    corpus.url, str(ground.scratch("index")), model=model, context=context
                ),
            }
            pids = list(client.run(os.getpid).values())
            with peak_memory([*pids, os.getpid()]) as peaks:
                for action in actions.values():
                    action()
                for name, figure in take_turns(actions, sizes.repeats).items():
                    times[name][rows] = Figure(tuple(1e6 * value / rows for value in figure.values), "us/row")
        memory[rows], driver[rows] = max(peaks[pid] for pid in pids) / 1e6, peaks[os.getpid()] / 1e6
    for name, found in times.items():
        medians = {rows: figure.median for rows, figure in found.items()}
        outcome.figures |= {f"{name}, {rows:,} rows": figure for rows, figure in found.items()}
        outcome.facts[f"{name}_us_per_row"] = medians
        outcome.goals.append(_constant(f"{name}, time per row", medians))
        # time = fixed + slope * rows, through the smallest and the largest
        small, large = min(medians), max(medians)
        slope = (large * medians[large] - small * medians[small]) / (large - small)
        fixed = small * (medians[small] - slope) / 1e6
        outcome.notes.append(f"{name}: {slope:.3g} us for each further row, and {fixed:.2f} s whatever their number")
    outcome.facts |= {"worker_mb": memory, "driver_mb": driver}
    outcome.figures["peak worker memory"] = Figure(tuple(memory.values()), "MB")
    outcome.figures["peak driver memory"] = Figure(tuple(driver.values()), "MB")
    outcome.goals += [_constant("peak worker memory", memory), _constant("peak driver memory", driver)]
    return outcome


def _new_workers(ground: Ground) -> AbstractContextManager[Any]:
    """Two workers that hold nothing yet; where nothing is judged, those that are there."""
    if not ground.sizes.judged:
        return nullcontext(ground.client)
    return connect(ClusterOptions(workers=2, dashboard=False))


def _constant(words: str, found: dict[int, float]) -> Goal:
    middle = (max(found.values()) + min(found.values())) / 2
    return Goal(f"{words}, largest deviation from the middle", max(found.values()) / middle - 1, 0.1)


def workers_row(ground: Ground) -> Outcome:
    """encode with one worker and with two, where tasks are few and where they are more."""
    sizes = ground.sizes
    model, rows_of = ground.model(sizes.encode_rows), (sizes.encode_rows, sizes.growth[-1])
    outcome = Outcome(
        "workers", f"encode of {' and '.join(f'{rows:,}' for rows in rows_of)} x {sizes.dim}, 1 and 2 workers"
    )

    def run(client: Any, rows: int) -> None:
        index = str(ground.scratch("index"))
        encode(ground.corpus(rows).url, index, model=model, chunk_rows=sizes.code_chunk_rows, context=Context(client))

    with connect(ClusterOptions(workers=1, dashboard=False)) as alone:
        for rows in rows_of:
            actions = {
                f"1 worker, {rows:,} rows": lambda rows=rows: run(alone, rows),
                f"2 workers, {rows:,} rows": lambda rows=rows: run(ground.client, rows),
            }
            for action in actions.values():
                action()
            outcome.figures |= take_turns(actions, sizes.repeats)
            outcome.ratio(f"speed-up, {rows:,} rows", *actions, 1.8, at_least=True)
            tasks = rows / sizes.code_chunk_rows
            even = tasks / (math.ceil(int(tasks) / 2) + (tasks % 1 if int(tasks) % 2 == 0 else 0))
            outcome.notes.append(
                f"{rows:,} rows are {tasks:.2f} chunks of codes, so two workers can be {even:.2f} times as fast at best"
            )
    return outcome


def overhead_row(ground: Ground) -> Outcome:
    """Both graph shapes over partitions without work; time of the driver per partition, and bytes of one task."""
    sizes, client = ground.sizes, ground.client
    outcome = Outcome("overhead", f"{sizes.partitions:,} empty partitions")
    tasks = list(range(sizes.partitions))
    process = psutil.Process()

    def cpu() -> float:
        return sum(process.cpu_times()[:2])

    shapes = {
        "map": lambda: map_tasks(bare.nothing, tasks, client=client, name="nothing"),
        "reduce": lambda: reduce_tasks(_nothing_of, tasks, sum, client=client, name="nothing", shared=b""),
    }
    map_tasks(bare.nothing, tasks[:100], client=client, name="nothing")
    for name, action in shapes.items():
        before = cpu()
        wall = take_turns({name: action}, sizes.repeats)[name]
        busy = (cpu() - before) / sizes.repeats
        scale = 1e3 / sizes.partitions
        outcome.figures[f"{name}, wall"] = Figure(tuple(scale * value for value in wall.values), "ms/partition")
        outcome.figures[f"{name}, CPU of driver and scheduler"] = Figure((scale * busy,), "ms/partition")
        outcome.goals.append(Goal(f"{name}: CPU ms per partition, driver and scheduler", scale * busy, 1.0))
    outcome.figures["an encode task"] = Figure((float(_task_bytes(ground, sizes.bits)),), "bytes")
    larger = _task_bytes(ground, 4 * sizes.bits)
    outcome.goals.append(
        Goal(
            f"bytes of a task, {4 * sizes.bits} bits / {sizes.bits} bits",
            larger / _task_bytes(ground, sizes.bits),
            1.01,
        )
    )
    return outcome


def _nothing_of(task: Any, shared: Any) -> int:
    return 1


def _task(ground: Ground, bits: int, chunk: int) -> tuple[Any, CodeChunk]:
    """A task as encode makes them."""
    corpus = ground.corpus(ground.sizes.growth[0])
    job = Job("0" * 64, bits, 0, corpus.rows, ground.sizes.code_chunk_rows, corpus.digest(0, corpus.rows))
    return partial(encode_chunk, corpus.ref, corpus.url, job), CodeChunk(0, chunk, *job.spec.bounds(chunk))


def _task_bytes(ground: Ground, bits: int) -> int:
    return len(pickle.dumps(_task(ground, bits, 0)))


def scheduler_row(ground: Ground) -> Outcome:
    """Tasks of encode's shape with the work removed, through the same window as encode's."""
    sizes = ground.sizes
    outcome = Outcome("scheduler", f"{sizes.scheduler_tasks:,} tasks of encode's shape without the work, 2 workers")
    store, first = _task(ground, sizes.bits, 0)
    tasks = [(store, replace(first, number=number)) for number in range(sizes.scheduler_tasks)]
    process = psutil.Process()
    before, busy = process.memory_info().rss, sum(process.cpu_times()[:2])
    with peak_memory([os.getpid()]) as peaks:
        start = time.perf_counter()
        map_tasks(bare.nothing, tasks, client=ground.client, name="encode_chunk")
        seconds = time.perf_counter() - start
    busy = sum(process.cpu_times()[:2]) - busy
    outcome.figures |= {
        "wall": Figure((seconds,)),
        "rate": Figure((sizes.scheduler_tasks / seconds,), "tasks/s"),
        "CPU of driver and scheduler": Figure((1e3 * busy / sizes.scheduler_tasks,), "ms/task"),
        "growth of driver and scheduler": Figure(((peaks[os.getpid()] - before) / 1e6,), "MB"),
    }
    outcome.notes.append(f"at most {WINDOW:,} tasks are with the scheduler at a time, whatever their number")
    return outcome


def startup_row(ground: Ground) -> Outcome:
    """The command's help, and the first task on a new local cluster."""
    outcome = Outcome("startup", "och --help; first task on a new LocalCluster")

    def first_task() -> None:
        with connect(ClusterOptions(workers=2, dashboard=False)) as client:
            map_tasks(bare.nothing, [0], client=client, name="nothing")
            done.append(time.perf_counter())

    def command() -> None:
        subprocess.run([sys.executable, "-m", "och_dist.cli", "--help"], check=True, capture_output=True)

    done: list[float] = []
    bare_python = [sys.executable, "-c", "pass"]
    repeats = max(3, ground.sizes.repeats) if ground.sizes.repeats > 1 else 1
    outcome.figures = take_turns(
        {
            "och --help": command,
            "bare Python": lambda: subprocess.run(bare_python, check=True),
        },
        repeats,
    )
    firsts = []
    for _ in range(repeats):
        start = time.perf_counter()
        first_task()
        firsts.append(done[-1] - start)
    outcome.figures["first task"] = Figure(tuple(firsts))
    outcome.goals += [
        Goal("och --help, s", outcome.figures["och --help"].median, 0.7),
        Goal("first task, s", float(np.median(firsts)), 5.0),
    ]
    return outcome
