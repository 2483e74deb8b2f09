"""Is everything fit for a job? A store, a cluster and this machine, checked before anything depends on them.

What is put into a store for a check is removed again, also when the check fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from och_dist.cluster import answer_seconds, check_memory, describe_machine
from och_dist.errors import ClusterError, ConflictError, IncompleteError, OchError, UsageError
from och_dist.options import Option, checked
from och_dist.stage import WORKING_BYTES, Context, Report, Stopwatch, require_room
from och_dist.store import TEMPORARY, Corpus, LocalObjects, Objects, open_corpus, open_objects

if TYPE_CHECKING:
    from distributed import Client

WRITERS = 8
CHUNK_BYTES = 32 << 20
CODE_BYTES = 8
LEAST_FREE = 64 << 20
LEAST_FILES = 10_000
LEAST_MEMORY = 1 << 30
SCHEDULER_PACKAGES = ("python", "dask", "distributed")


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, what to change, and the exit code if a job cannot do with it."""

    what: str
    found: str
    change: str = ""
    exit_code: int = 0

    @property
    def verdict(self) -> str:
        return "bad" if self.exit_code else "mind" if self.change else "ok"

    def to_json(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in ("what", "found", "verdict", "change")}


Connect = Callable[[], AbstractContextManager[Context]]


@checked
def doctor(
    *,
    store: Annotated[
        str | None,
        Option("Where corpora or indexes are to lie: a folder or s3://bucket/prefix.", metavar="URL"),
    ] = None,
    corpus: Annotated[
        str | None,
        Option("The corpus that is to be worked on: its chunks must fit the workers.", metavar="PATH"),
    ] = None,
    connect: Connect | None = None,
) -> Report:
    """Check this machine, the ``store``, and the cluster that ``connect`` leads to; a ``corpus`` says what is to fit.

    The report holds ``checks`` (one per finding) and the ``exit_code`` of the first that is bad, 0 if none is.
    """
    watch = Stopwatch("doctor")
    findings = check_machine(describe_machine())
    opened = None
    if corpus is not None:
        with _failures(findings, "corpus"):
            opened = open_corpus(corpus)
            chunks = _size(opened.chunk_bytes)
            findings.append(Finding("corpus", f"{opened.rows:,} rows of {opened.dim}, chunks of {chunks}"))
    if store is not None:
        with _failures(findings, "store"):
            findings += check_store(open_objects(store), opened)
    if connect is not None:
        with _failures(findings, "cluster"), connect() as context:
            findings += check_cluster(context, opened)
            if store is not None and context.client is not None:
                findings.append(_reachable(open_objects(store), context.client))
    bad = [finding for finding in findings if finding.exit_code]
    return watch.report(
        healthy=not bad,
        exit_code=bad[0].exit_code if bad else 0,
        checks=[finding.to_json() for finding in findings],
    )


@contextlib.contextmanager
def _failures(findings: list[Finding], what: str) -> Iterator[None]:
    """An error becomes a finding."""
    try:
        yield
    except OchError as error:
        found, _, change = str(error).rpartition("; ")
        findings.append(Finding(what, found or change, change if found else "", error.exit_code))
    except OSError as error:
        findings.append(Finding(what, str(error), "mend the storage, and run this again", IncompleteError.exit_code))


def check_machine(facts: dict[str, Any]) -> list[Finding]:
    """This process: what it is made of, and whether its libraries would take more than their share."""
    threads, cores, libraries = facts["blas_threads"], facts["cores"], ", ".join(facts["blas"]) or "none"
    little, many = facts["memory"] < LEAST_MEMORY, threads > cores
    counts = "bits are counted by AVX-512" if facts["fast_counts"] else "no AVX-512 popcount: searching takes longer"
    blas = f"{threads} on {cores} cores ({libraries})" if many else f"{threads} ({libraries})"
    return [
        Finding("software", ", ".join(f"{name} {version}" for name, version in facts["versions"].items())),
        Finding("cores", f"{cores} usable"),
        Finding("memory", _size(facts["memory"]), "use --workers 0 or smaller chunks (--chunk-rows)" * little),
        Finding("BLAS threads", blas, f"set OPENBLAS_NUM_THREADS to at most {cores}" * many),
        Finding("processor", f"{facts['processor']}; {counts}"),
    ]


def check_store(objects: Objects, corpus: Corpus | None = None) -> list[Finding]:
    """Put, put-if-absent by several writers at once, read, list and delete, and the room that is left."""
    folder = f"doctor-{uuid.uuid4().hex}"
    with _leaves_nothing(objects, folder):
        objects.require_put_if_absent()
        findings = [_race(objects, f"{folder}/race"), _round_trip(objects, f"{folder}/object")]
    if isinstance(objects, LocalObjects):
        findings += _free_space(objects, 0 if corpus is None else corpus.rows * CODE_BYTES)
    return findings


def _race(objects: Objects, key: str) -> Finding:
    """Several writers of one key: exactly one may win, and it is its bytes that stay."""
    values = [bytes([number]) * 4096 for number in range(WRITERS)]

    def wins(value: bytes) -> bool:
        with contextlib.suppress(ConflictError):
            return objects.put(key, value, begun=False)
        return False

    with ThreadPoolExecutor(WRITERS) as pool:
        won = [value for value, stored in zip(values, pool.map(wins, values), strict=True) if stored]
    if len(won) == 1 and objects.read(key) == won[0]:
        return Finding("put-if-absent", f"exclusive: one of {WRITERS} writers at once won")
    return Finding(
        "put-if-absent",
        f"{len(won)} of {WRITERS} writers at once won the same object",
        "use a local file system with hard links, or an S3 service with conditional writes",
        UsageError.exit_code,
    )


def _round_trip(objects: Objects, key: str) -> Finding:
    """What is put can be read, is listed, and goes when it is deleted."""
    data = os.urandom(1 << 20)
    objects.put(key, data)
    faults = [] if objects.read(key) == data else ["it is read otherwise than it was put"]
    if key not in {name for name, _, _ in objects.list(key.partition("/")[0])}:
        faults.append("it is not listed")
    objects.delete(key)
    if objects.read(key) is not None:
        faults.append("it is still there after it was deleted")
    if not faults:
        return Finding("store", f"{objects.url}: objects can be put, read, listed and deleted")
    found = f"{objects.url}: an object was put, but {' and '.join(faults)}"
    return Finding("store", found, "use a store that shows what was written at once", UsageError.exit_code)


@contextlib.contextmanager
def _leaves_nothing(objects: Objects, folder: str) -> Iterator[None]:
    """Remove the objects of a check, and the folders that were not there before it."""
    made: list[Path] = []
    if isinstance(objects, LocalObjects):
        places = (objects.root / TEMPORARY, objects.root, *objects.root.parents)
        made = [place for place in places if not place.exists()]
    try:
        yield
    finally:
        with contextlib.suppress(OchError, OSError):
            objects.delete_below(folder)
        for place in made:
            with contextlib.suppress(OSError):  # somebody else has begun to use it
                place.rmdir()


def _free_space(objects: LocalObjects, needed: int) -> list[Finding]:
    place = next(place for place in (objects.root, *objects.root.parents) if place.exists())
    usage, files = shutil.disk_usage(place), os.statvfs(place)
    least, found, change, exit_code = max(LEAST_FREE, needed), f"{_size(usage.free)} of {_size(usage.total)}", "", 0
    if usage.free < least:
        change = f"make room for {_size(least)}" + " (codes of 64 bits)" * bool(needed)
        exit_code = IncompleteError.exit_code
    elif usage.free < usage.total // 20:
        change = "make room: less than a twentieth is left"
    findings = [Finding("free space", found, change, exit_code)]
    if files.f_files and files.f_favail < LEAST_FILES:
        change = "use larger chunks, or a file system with more files"
        findings.append(Finding("free files", f"{files.f_favail:,}", change))
    return findings


def check_cluster(context: Context, corpus: Corpus | None = None) -> list[Finding]:
    """Versions, threads and memory of all workers."""
    client = context.client
    if client is None:
        return [Finding("cluster", "none: everything runs in this process")]
    workers = _on_workers(client, describe_machine)
    scheduler = client.sync(client.scheduler.versions, callback_timeout=answer_seconds())["packages"]
    info = client.scheduler_info(n_workers=-1)["workers"]
    threads = {address: worker["nthreads"] for address, worker in info.items()}
    findings = [
        Finding("cluster", f"{client.scheduler.address}: {len(info)} workers, {sum(threads.values())} threads"),
        check_versions(describe_machine()["versions"], scheduler, workers),
        check_threads(workers, threads),
    ]
    what = f"a pass over chunks of {_size(CHUNK_BYTES)} (the default)" if corpus is None else "a pass over the corpus"
    with _failures(findings, "memory of workers"):
        if corpus is None:
            check_memory(client, 3 * CHUNK_BYTES + WORKING_BYTES, what)
        else:
            require_room(corpus, context, what)
        findings.append(Finding("memory of workers", f"enough for {what}"))
    return findings


def _on_workers(client: Client, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """``function(*args)`` on every worker, by address; within a limit of time."""
    try:
        found: dict[str, Any] = client.sync(client._run, function, *args, callback_timeout=answer_seconds())
    except OchError:
        raise
    except Exception as error:  # whatever went wrong on a worker arrives here
        raise ClusterError(
            f"the workers of {client.scheduler.address} do not answer ({type(error).__name__}: {error}); "
            "restart those that hang, and install the same och-dist for all"
        ) from error
    return found


def check_versions(here: dict[str, str], scheduler: dict[str, str], workers: dict[str, dict[str, Any]]) -> Finding:
    """Scheduler and workers have the packages of this process."""
    others = [
        f"{address} has {name} {facts['versions'].get(name)}, not {version}"
        for address, facts in workers.items()
        for name, version in here.items()
        if facts["versions"].get(name) != version
    ]
    for name in SCHEDULER_PACKAGES:
        found = str(scheduler.get(name, "")).split(".final")[0]
        if found != here[name]:
            others.append(f"the scheduler has {name} {found}, not {here[name]}")
    if not others:
        return Finding("versions", "the same on scheduler, workers and here")
    shown = "; ".join(others[:5]) + "; ..." * (len(others) > 5)
    change = "install the same packages everywhere, then restart scheduler and workers"
    return Finding("versions", shown, change, ClusterError.exit_code)


def check_threads(workers: dict[str, dict[str, Any]], threads: dict[str, int]) -> Finding:
    """One BLAS thread per Dask thread, and no more of these than cores."""
    loose = [address for address, facts in workers.items() if facts["blas_threads"] > 1]
    if loose:
        found = f"BLAS takes {workers[loose[0]]['blas_threads']} threads on {loose[0]} ({len(loose)} workers in all)"
        return Finding("thread limits", found, "start workers with OPENBLAS_NUM_THREADS=1")
    cores = {facts["host"]: facts["cores"] for facts in workers.values()}
    for host, count in cores.items():
        busy = sum(threads.get(address, 1) for address, facts in workers.items() if facts["host"] == host)
        if busy > count:
            change = f"start fewer workers or threads there: {count} at most are faster"
            return Finding("thread limits", f"{busy} threads on {count} cores of {host}", change)
    return Finding("thread limits", "one BLAS thread per Dask thread, no more threads than cores")


def sees(url: str, key: str) -> bool:
    """Whether an object can be read where this runs."""
    try:
        return open_objects(url).read(key) is not None
    except (OchError, OSError):
        return False


def _reachable(objects: Objects, client: Client) -> Finding:
    """Every worker sees what is put here: a local folder is not that of another machine."""
    folder = f"doctor-{uuid.uuid4().hex}"
    with _leaves_nothing(objects, folder):
        objects.put(f"{folder}/seen", b"1")
        seen = _on_workers(client, sees, objects.url, f"{folder}/seen")
    blind = [address for address, found in seen.items() if not found]
    if not blind:
        return Finding("store on workers", "all of them see what is put here")
    found = f"{len(blind)} workers, such as {blind[0]}, do not see what is put into {objects.url}"
    change = "use a shared file system under the same path everywhere, or s3://bucket/prefix"
    return Finding("store on workers", found, change, UsageError.exit_code)


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
