"""What is there and what can go: inspect, status and garbage collection. None of it touches vectors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from och_dist.errors import BadInputError, IntegrityError, UsageError
from och_dist.stages.common import Report, Stopwatch
from och_dist.stages.publish import COLLECTED
from och_dist.store.corpus import Corpus, open_corpus
from och_dist.store.index import Index, done_chunks, find_index, list_jobs, model_objects, open_version
from och_dist.store.model import load_model, split_model_path
from och_dist.store.objects import TEMPORARY, LocalObjects, Objects, open_objects
from och_dist.store.versions import read_latest, read_version, version_key, version_numbers

LITTER_SECONDS = 24 * 3600


def inspect(path: str) -> Report:
    """Describe a corpus, an index or a model."""
    watch = Stopwatch("inspect")
    objects = open_objects(path)
    if objects.size("model.json") is not None:
        return watch.report(**_model_facts(path))
    body = read_latest(objects)
    if body is None or body.get("kind") == "corpus":
        return watch.report(**_corpus_facts(open_corpus(path)))
    index = open_version(path)
    model = index.load_model()
    return watch.report(
        kind="index",
        path=index.url,
        version=index.version,
        rows=index.rows,
        bits=index.bits,
        bytes=index.nbytes,
        method=model.method,
        model=index.model,
        notes=model.provenance.get("training", {}).get("notes", []),
        corpus=index.corpus,
        segments=[{"job": s.job.id, "start": s.start, "stop": s.stop} for s in index.segments],
    )


def _corpus_facts(corpus: Corpus) -> dict[str, Any]:
    return {
        "kind": "corpus" if corpus.version else "zarr array",
        "path": corpus.url,
        "version": corpus.version,
        "rows": corpus.rows,
        "dim": corpus.dim,
        "dtype": corpus.dtype,
        "bytes": corpus.nbytes,
        "fingerprint": corpus.fingerprint,
        "segments": [
            {
                "id": s.id,
                "start": s.start,
                "stop": s.stop,
                "chunk_rows": s.chunk_rows,
                "codec": s.codec,
                "dropped": s.dropped,
                "sources": list(s.sources),
            }
            for s in corpus.segments
        ],
    }


def _model_facts(path: str) -> dict[str, Any]:
    folder, address = split_model_path(open_objects(path).url)
    model = load_model(open_objects(folder), address)
    return {
        "kind": "model",
        "path": path,
        "address": address,
        "method": model.method,
        "params": model.params,
        "dim": model.hasher.n_features_in_,
        "provenance": model.provenance,
    }


def status(index: str) -> Report:
    """Versions of an index and its jobs: published, finished or unfinished."""
    watch = Stopwatch("status")
    objects = open_objects(index)
    current = find_index(index)
    published = {segment.job for segment in current.segments} if current else set()
    jobs = []
    for job in list_jobs(objects):
        done = job.spec.n_chunks if job in published else len(done_chunks(objects, job))
        state = "published" if job in published else "finished" if done == job.spec.n_chunks else "unfinished"
        jobs.append(
            {
                "job": job.id,
                "rows": [job.start, job.stop],
                "model": job.model,
                "chunks": job.spec.n_chunks,
                "done": done,
                "state": state,
            }
        )
    if current is None and not jobs:
        raise BadInputError(f"{objects.url} holds no index and no job; start one with 'och encode CORPUS {index}'")
    return watch.report(
        index=objects.url,
        version=current.version if current else None,
        versions=version_numbers(objects),
        rows=current.rows if current else 0,
        jobs=jobs,
    )


def gc(path: str, *, keep: int = 3, jobs: Sequence[str] = (), dry_run: bool = False) -> Report:
    """Remove versions but the last ``keep`` of an index, what only they use, and the named unpublished jobs.

    A segment is marked before it goes, and the versions are read again after the mark: a job that is being
    published at this moment either is seen here and stays, or sees the mark and starts over.
    """
    watch = Stopwatch("gc")
    if keep < 1:
        raise UsageError(f"keep={keep}; at least the newest version stays")
    objects = open_objects(path)
    numbers = version_numbers(objects)
    kept, old = numbers[-keep:], numbers[:-keep]
    body = read_latest(objects)
    is_index = body is None or body.get("kind") == "index"
    doomed = {folder for number in old for folder in _folders(objects, number)} if is_index else set()
    doomed |= _named(objects, jobs)
    doomed -= {folder for number in kept for folder in _folders(objects, number)}
    removed = 0
    if not dry_run:
        for folder in sorted(doomed):
            removed += _collect(objects, folder)
        for number in old:
            objects.delete(version_key(number))
        removed += _collect_models(objects) if is_index and old else 0
        removed += _sweep(objects)
    return watch.report(
        "done" if doomed or old or removed else "nothing to do",
        path=objects.url,
        versions_removed=old,
        versions_kept=kept,
        segments_removed=sorted(doomed),
        objects_removed=removed,
        dry_run=dry_run,
    )


def _folders(objects: Objects, number: int) -> set[str]:
    """Segment folders that a version uses."""
    body = read_version(objects, number)
    try:
        if body["kind"] == "index":
            return {f"segments/{entry['job']}.{entry['generation']}" for entry in body["segments"]}
        return {f"segments/{entry['id']}" for entry in body["segments"]}
    except (KeyError, TypeError) as error:
        raise IntegrityError(f"version {number} of {objects.url} is incomplete ({error}); run 'och verify'") from None


def _named(objects: Objects, jobs: Sequence[str]) -> set[str]:
    present = objects.folders("segments")
    found: set[str] = set()
    for job in jobs:
        folders = {f"segments/{name}" for name in present if name.partition(".")[0] == job}
        if not folders:
            names = ", ".join(sorted({name.partition(".")[0] for name in present})) or "none"
            raise UsageError(f"{objects.url} has no job {job!r}; jobs there: {names}")
        found |= folders
    newest = read_latest(objects)
    used = _folders(objects, newest["version"]) if newest else set()
    if found & used:
        raise UsageError(f"{', '.join(sorted(found & used))} is published in the newest version and stays")
    return found


def _collect(objects: Objects, folder: str) -> int:
    mark = f"{folder}/{COLLECTED}"
    objects.put(mark, b"{}")
    newest = read_latest(objects)
    if newest is not None and folder in _folders(objects, newest["version"]):
        objects.delete(mark)
        return 0
    keys = [key for key, _, _ in objects.list(folder) if key != mark]
    for key in sorted(keys, key=lambda key: "/done/" not in key):
        objects.delete(key)
    objects.delete(mark)
    return len(keys)


def _collect_models(objects: Objects) -> int:
    """Models of an index that no version and no job uses any more."""
    used = {job.model for job in list_jobs(objects)}
    for number in version_numbers(objects):
        used.add(read_version(objects, number)["model"])
    store = model_objects(objects.url)
    return sum(store.delete_below(name) for name in objects.folders("models") if name not in used)


def _sweep(objects: Objects) -> int:
    """Temporary files that a killed writer left a day ago or earlier."""
    if not isinstance(objects, LocalObjects):
        return 0
    removed = 0
    for path in (objects.root / TEMPORARY).glob("*"):
        if time.time() - path.stat().st_mtime > LITTER_SECONDS:
            path.unlink(missing_ok=True)
            removed += 1
    return removed


__all__ = ["Index", "gc", "inspect", "status"]
