"""What is there and what can go: inspect, status and garbage collection. None of it touches vectors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from och_dist import store
from och_dist.encode import CLAIMS, COLLECTED, clear_leftovers
from och_dist.errors import BadInputError, UsageError
from och_dist.options import ExpectModel, Option, checked
from och_dist.stage import Report, Stopwatch
from och_dist.store import Corpus, LocalObjects, Objects
from och_dist.upkeep.compaction import compaction_input
from och_dist.upkeep.verification import open_any

LITTER_SECONDS = 24 * 3600


@checked
def inspect(path: str, *, expect_model: ExpectModel = None) -> Report:
    """Describe a corpus, an index or a model."""
    watch = Stopwatch("inspect")
    objects = store.open_objects(path)
    if objects.size("model.json") is not None:
        folder, address = store.split_model_path(objects.url)
        store.check_expected(address, expect_model)
        model = store.load_model(store.open_objects(folder), address)
        return watch.report(
            kind="model",
            path=path,
            address=address,
            method=model.method,
            params=model.params,
            dim=model.hasher.n_features_in_,
            provenance=model.provenance,
        )
    body = store.read_latest(objects)
    if body is None and objects.folders("segments"):
        raise BadInputError(
            f"{objects.url} has no published version yet; 'och status' lists its jobs, and the command that was "
            "making it goes on where it stopped"
        )
    if body is None or body.get("kind") == "corpus":
        if expect_model is not None:
            raise UsageError(f"{objects.url} is no index and no model; leave out --expect-model")
        return watch.report(**_corpus_facts(store.open_corpus(path)))
    index = store.open_version(path)
    store.check_expected(index.model, expect_model)
    model = index.load_model()
    return watch.report(
        kind="index",
        path=index.url,
        version=index.version,
        rows=index.rows,
        deleted=index.rows - index.live_rows,
        live_rows=index.live_rows,
        bits=index.bits,
        bytes=index.nbytes,
        method=model.method,
        model=index.model,
        notes=model.provenance.get("training", {}).get("notes", []),
        corpus=index.corpus,
        segments=[
            {"job": s.job.id, "start": s.start, "stop": s.stop, "codes": s.job.stored_rows} for s in index.segments
        ],
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
        "ids": corpus.ids,
        "fingerprint": corpus.fingerprint,
        "segments": [segment.describe() for segment in corpus.segments],
    }


def status(index: str) -> Report:
    """Versions of an index and its jobs: published (in the newest version), superseded, finished or unfinished."""
    watch = Stopwatch("status")
    objects = store.open_objects(index)
    current = store.find_index(index)
    numbers = store.version_numbers(objects)
    published = current.folders if current else set()
    earlier = _folders(objects, numbers) - published
    jobs = []
    for job in store.list_jobs(objects):
        chunks = done = job.spec.n_chunks
        state = "published" if job.folder in published else "superseded"
        if job.folder not in published | earlier:
            done = len(job.done(objects))
            state = "finished" if done == chunks else "unfinished"
        kind, rows = "encode" if job.kept is None else "compact", [job.start, job.stop]
        jobs.append(
            {"job": job.id, "kind": kind, "rows": rows, "model": job.model}
            | {"chunks": chunks, "done": done, "state": state}
        )
    if current is None and not jobs:
        raise BadInputError(f"{objects.url} holds no index and no job; start one with 'och encode CORPUS {index}'")
    return watch.report(
        index=objects.url,
        version=current.version if current else None,
        versions=numbers,
        rows=current.rows if current else 0,
        live_rows=current.live_rows if current else 0,
        jobs=jobs,
    )


@checked
def gc(
    path: str,
    *,
    keep: Annotated[int, Option("Newest versions that stay.", at_least=1)] = 3,
    jobs: Annotated[Sequence[str], Option("Also remove this unpublished job (see 'och status').", flags="--job")] = (),
    dry_run: Annotated[bool, Option("Only say what would go.")] = False,
) -> Report:
    """Remove versions but the last ``keep`` of an index, what only they use, and the named unpublished jobs.

    A compaction that was killed goes too when no version is left that it could be resumed for.

    A segment is marked before it goes. Claims of publishers and the versions are looked at after the mark, and a
    publisher looks for the mark after its claim: so a job that is being published stays, or is not published. The
    claim of a publisher that was killed does not protect a job that is named.
    """
    watch = Stopwatch("gc")
    objects = store.open_objects(path)
    numbers, segments = store.version_numbers(objects), [f"segments/{name}" for name in objects.folders("segments")]
    if not numbers and not segments:
        raise BadInputError(f"{objects.url} holds no corpus, no index and no job; there is nothing to collect")
    kept, old = numbers[-keep:], numbers[:-keep]
    used = _folders(objects, kept)
    named = _named(objects, jobs, used)
    marked = {folder for folder in segments if objects.size(f"{folder}/{COLLECTED}") is not None}
    body = store.read_latest(objects)
    is_index = body is None or body.get("kind") == "index"
    unused = _folders(objects, old) | _stranded(objects, old) if is_index else set()
    doomed = (unused | named | marked) - used  # marked: an earlier run was killed while it removed them
    removed = 0
    if not dry_run:
        for folder in marked & used:
            objects.delete(f"{folder}/{COLLECTED}")
        doomed = _mark(objects, doomed, named, old)
        for number in old:
            objects.delete(store.version_key(number))
        removed += sum(_remove(objects, folder) for folder in sorted(doomed))
        if is_index:
            removed += _collect_models(objects) + _collect_leftovers(objects) + _collect_bitmaps(objects)
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


def _stranded(objects: Objects, old: Sequence[int]) -> set[str]:
    """Compactions that were killed, and merge what no version that stays consists of: nothing can go on with them."""
    jobs = [job for job in store.list_jobs(objects) if job.kept is not None and not job.generation]
    if not jobs:
        return set()
    present = store.version_numbers(objects)  # after the jobs that work on them
    stays = [number for number in present if number not in old]
    versions = [store.open_version(objects.url, number) for number in stays]
    published = {folder for version in versions for folder in version.folders}
    inputs = {compaction_input(version) for version in versions}
    return {job.folder for job in jobs if job.input not in inputs} - published


def _folders(objects: Objects, numbers: Sequence[int]) -> set[str]:
    """Segment folders that versions use."""
    return {folder for number in numbers for folder in open_any(objects.url, number).folders}


def _named(objects: Objects, jobs: Sequence[str], used: set[str]) -> set[str]:
    """Folders of the named jobs that no version that stays uses; a job without such a folder is refused."""
    present = objects.folders("segments")
    found: set[str] = set()
    for job in jobs:
        folders = {f"segments/{name}" for name in present if name.partition(".")[0] == job}
        if not folders:
            names = ", ".join(sorted({name.partition(".")[0] for name in present})) or "none"
            raise UsageError(f"{objects.url} has no job {job!r}; jobs there: {names}")
        if not folders - used:
            raise UsageError(
                f"{', '.join(sorted(folders))} is published in a version that is kept, and stays; "
                "leave out its --job, or keep fewer versions"
            )
        found |= folders - used  # a repair that was not published leaves a generation beside the published one
    return found


def _mark(objects: Objects, folders: set[str], named: set[str], old: Sequence[int]) -> set[str]:
    """Mark folders for removal; returns those that nobody is publishing or has published meanwhile."""
    for folder in sorted(folders):
        objects.put(f"{folder}/{COLLECTED}", b"{}")
    busy = {folder for folder in folders - named if any(True for _ in objects.list(f"{folder}/{CLAIMS}"))}
    busy |= folders & _folders(objects, [number for number in store.version_numbers(objects) if number not in old])
    for folder in sorted(busy):
        objects.delete(f"{folder}/{COLLECTED}")
    return folders - busy


def _remove(objects: Objects, folder: str) -> int:
    """Delete a marked folder, its mark last, so that a run after a kill finds what is left."""
    mark = f"{folder}/{COLLECTED}"
    keys = [key for key, _, _ in objects.list(folder) if key != mark]
    objects.delete_all([key for key in keys if "/done/" in key])
    objects.delete_all([key for key in keys if "/done/" not in key])
    objects.delete(mark)
    return len(keys)


def _collect_models(objects: Objects) -> int:
    """Remove models of an index that no version and no job uses; its folder may not be that of 'och train'."""
    models, names = store.model_objects(objects.url), objects.folders(store.MODELS)
    if "trained" in names:
        return 0
    removed = 0
    for name in names:
        if name in _used_models(objects):
            continue
        # model.json goes first and comes last: a model that can be seen is whole.
        keys = sorted((key for key, _, _ in models.list(name)), key=lambda key: not key.endswith("/model.json"))
        content = [(key, models.get(key)) for key in keys]
        for key in keys:
            models.delete(key)
        if name in _used_models(objects):  # a job was announced meanwhile
            for key, data in reversed(content):
                models.put(key, data)
        else:
            removed += len(keys)
    return removed


def _collect_leftovers(objects: Objects) -> int:
    """Records and claims beside the newest codes: their publisher was killed between the commit and its last step."""
    newest = store.find_index(objects.url)
    return sum(clear_leftovers(objects, segment.job) for segment in newest.segments) if newest else 0


def _collect_bitmaps(objects: Objects) -> int:
    """Remove bitmaps of deleted rows that no version lists, nor any will, because theirs was published without them."""
    # Before the versions: what these list and was not there yet is not at stake.
    made_for = store.stored_bitmaps(objects)
    numbers = store.version_numbers(objects)
    newest = numbers[-1] if numbers else 0
    listed = {entry.key for number in numbers for entry in store.open_version(objects.url, number).tombstones}
    doomed = sorted(key for key, version in made_for.items() if version <= newest and key not in listed)
    objects.delete_all(doomed)
    return len(doomed)


def _used_models(objects: Objects) -> set[str]:
    used = {job.model for job in store.list_jobs(objects)}
    return used | {store.open_version(objects.url, number).model for number in store.version_numbers(objects)}


def _sweep(objects: Objects) -> int:
    """Temporary files that a killed writer left a day ago or earlier."""
    if not isinstance(objects, LocalObjects):
        return 0
    removed = 0
    for path in (
        *(objects.root / store.TEMPORARY).glob("*"),
        *(objects.root / store.MODELS / store.TEMPORARY).glob("*"),
    ):
        if time.time() - path.stat().st_mtime > LITTER_SECONDS:
            path.unlink(missing_ok=True)
            removed += 1
    return removed
