"""Find every damaged, cut or lost byte of a corpus, an index or a model store, and mend what can be mended."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from och_dist.cluster import map_tasks
from och_dist.encode import checked_segment, clear_leftovers, named_jobs, not_held
from och_dist.errors import BadInputError, IntegrityError, UsageError
from och_dist.options import Jobs, Option, checked
from och_dist.stage import Context, Report, Stopwatch
from och_dist.store import (
    MODELS,
    Corpus,
    CorpusRef,
    Index,
    IndexSegment,
    Objects,
    find_index,
    is_address,
    load_model,
    open_corpus,
    open_objects,
    unseal,
    version_numbers,
)
from och_dist.upkeep.integrity import Damage, Scan, find_damage, lost_jobs, noted
from och_dist.upkeep.repair import repair_index

LISTED = 20


@checked
def verify(
    path: str,
    *,
    repair: Annotated[bool, Option("Mend the newest version of an index, and publish it as the next one.")] = False,
    corpus: Annotated[
        str | None, Option("Where the vectors for a repair lie [default: where the index says].", metavar="PATH")
    ] = None,
    context: Context | None = None,
) -> Report:
    """Check all versions at ``path``, or all models; any damage raises :class:`IntegrityError` with the list.

    With ``repair`` the newest version of an index is mended first, from its ``corpus`` (the one that it names, unless
    another place is given) and from itself, and published as a new version; then everything is checked once more.
    """
    watch, context = Stopwatch("verify"), context or Context()
    if corpus is not None and not repair:
        raise UsageError("a corpus is needed for a repair only; add --repair, or leave out --corpus")
    objects = open_objects(path)
    if not version_numbers(objects):
        return _verify_unversioned(watch, objects, context)
    scan, found = find_damage(path, context), 0
    mended: list[str] = []
    failed: list[str] = []
    index = scan.newest
    if repair and isinstance(index, Index):
        for segment in index.segments:
            if segment.job.generation:  # of a repair that was killed after it had published
                clear_leftovers(objects, segment.job)
        if scan.standing:
            found = len(scan.standing)
            mended, failed = repair_index(index, scan, corpus=corpus, context=context)
            scan = find_damage(path, context)
    if scan.standing:
        raise IntegrityError(_account(scan, mended, failed))
    facts = {"repaired": found, "mended": mended} if repair else {}
    return watch.report(
        "nothing to do" if repair and not found else "done",
        path=scan.url,
        versions=list(scan.numbers),
        chunks=scan.chunks,
        models=len(scan.models),
        damaged=0,
        **facts,
        superseded=[f"{damage.text}, in older versions only" for damage in scan.superseded],
    )


@checked
def check_jobs(index: str, *, jobs: Jobs, context: Context | None = None) -> Report:
    """Check every chunk of finished ``jobs`` against its record, and every byte of all versions; nothing is published.

    Without jobs there is nothing to do: 'och verify' checks an index that does not change.
    """
    watch, context = Stopwatch("check"), context or Context()
    objects = open_objects(index)
    found = not_held(find_index(index), named_jobs(objects, jobs))
    chunks = sum(len(checked_segment(objects, IndexSegment(job), context).digests) for job in found)
    if found and version_numbers(objects):
        try:
            chunks += verify(index, context=context).facts["chunks"]
        except IntegrityError as error:
            raise IntegrityError(f"{error} Nothing new was published.") from error
    return watch.report("done" if found else "nothing to do", index=objects.url, chunks=chunks, damaged=0)


def _account(scan: Scan, mended: Sequence[str], failed: Sequence[str]) -> str:
    """All faults, what was mended, and what to do about the rest."""
    text = _listing(scan.standing, scan.url)
    if mended:
        text = f"repaired: {'; '.join(mended[:LISTED])}. There remain {text}"
    if failed:
        return f"{text} Not repaired: {'; '.join(failed[:LISTED])}."
    return f"{text} {' '.join(_remedies(scan, tried=bool(mended)))}"


def _listing(damage: Sequence[Damage], url: str) -> str:
    listed = "; ".join(fault.text for fault in damage[:LISTED]) + ("; ..." if len(damage) > LISTED else "")
    return f"{len(damage)} faults in {url}: {listed}."


def _remedies(scan: Scan, *, tried: bool) -> list[str]:
    """A sentence for every kind of fault."""
    newest, faults, url = scan.newest, scan.standing, scan.url
    if isinstance(newest, Corpus):
        return [_corpus_remedy(newest, faults)]
    remedies = []
    in_segments = [fault for fault in faults if fault.place.startswith("segments/")]
    in_models = [fault.place for fault in faults if fault.place.startswith(f"{MODELS}/")]
    if isinstance(newest, Index):
        older = [fault for fault in in_segments if fault.folder not in newest.folders]
        if not tried and len(older) < len(in_segments):
            remedies.append(f"'och verify {url} --repair' makes codes again from the corpus.")
        if older and newest.version > 1:
            remedies.append(f"What only older versions list goes with 'och gc {url} --keep 1'.")
    if in_models:
        names = ", ".join(sorted({place.removeprefix(f"{MODELS}/") for place in in_models}))
        remedies.append(f"A model is the same in every copy: bring {names} from where 'och train' put it.")
    if len(in_segments) + len(in_models) < len(faults) or not remedies:
        remedies.append("Restore these objects from a copy, or make them again.")
    return remedies


def _corpus_remedy(corpus: Corpus, faults: Sequence[Damage]) -> str:
    """Which rows are lost, and where they came from: a corpus can be made from its sources alone."""
    ranges, sources = [], []
    for segment in corpus.segments:
        mine = [fault for fault in faults if fault.folder == segment.folder]
        if not mine:
            continue
        sources += [str(source["path"]) for source in segment.sources if "path" in source]
        for fault in mine:
            low = segment.start + (fault.chunk or 0) * segment.chunk_rows
            high = segment.stop if fault.chunk is None else min(low + segment.chunk_rows, segment.stop)
            ranges.append(f"{low}..{high}")
    if not ranges:
        return "Restore these objects from a copy, or ingest the corpus anew."
    rows, files = ", ".join(dict.fromkeys(ranges)), " ".join(dict.fromkeys(sources)) or "SOURCES"
    return (
        f"Nothing here can make rows {rows} again: restore these objects from a copy, or take all rows anew from their "
        f"source with 'och ingest {files} NEW_CORPUS'."
    )


def _verify_unversioned(watch: Stopwatch, objects: Objects, context: Context) -> Report:
    """A store of models, an adopted Zarr array, or something of which nothing is published (any more)."""
    remedy = "Restore these objects from a copy, or make them again."
    if models := [name for name in objects.folders("") if is_address(name)]:
        damage: list[Damage] = []
        for name in models:
            with noted(damage, name):
                load_model(objects, name)
        for key, _, _ in objects.list("trained"):
            with noted(damage, key):
                unseal(objects.get(key), f"{objects.url}/{key}")
        if damage:
            raise IntegrityError(f"{_listing(damage, objects.url)} {remedy}")
        return watch.report(path=objects.url, versions=[], chunks=0, models=len(models), damaged=0)
    if objects.folders("segments"):
        if lost := lost_jobs(objects):
            raise IntegrityError(f"{_listing(lost, objects.url)} {remedy}")
        raise BadInputError(
            f"{objects.url} holds segments but no version: nothing was published yet, or its manifests are lost; "
            "run the command that makes it again"
        )
    corpus = open_corpus(objects.url)
    parts = corpus.partitions()
    rows = map_tasks(partial(read_partition, corpus.ref), parts, client=context.client, name="read_partition")
    return watch.report(path=corpus.url, versions=[], chunks=len(parts), rows=sum(rows), damaged=0)


def read_partition(corpus: CorpusRef, rows: tuple[int, int]) -> int:
    """Decode rows [start, stop) of an adopted Zarr array; its own codecs find what they can."""
    return sum(len(block) for _, block in corpus.open().blocks(*rows))
