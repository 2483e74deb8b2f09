"""New files of a folder -> corpus: every file once, however often the folder is looked at."""

from __future__ import annotations

import os
from typing import Literal

from och_dist.errors import BadInputError
from och_dist.ingest.stage import corpus_facts, ingest, known_sources
from och_dist.sources import EXTENSIONS, Source, expand, open_sources
from och_dist.stage import Context, Report, Stopwatch, logger
from och_dist.store import Codec, Corpus, find_corpus

HIDDEN = (".", "_", "~")


def collect(
    inbox: str,
    corpus: str,
    *,
    dataset: str | None = None,
    chunk_rows: int | None = None,
    codec: Codec = "none",
    nonfinite: Literal["error", "drop"] = "error",
    id_column: str | None = None,
    context: Context | None = None,
) -> Report:
    """Bring the files of ``inbox``, a folder or a glob, that ``corpus`` does not hold yet into it.

    A file is known by its content, so it may be renamed, copied or removed afterwards. Of a folder, files with a known
    extension count; hidden ones (a leading '.', '_' or '~') are still being written. No new file is nothing to do.
    """
    watch = Stopwatch("collect")
    parent = find_corpus(corpus)
    new = new_sources(inbox, parent, dataset=dataset)
    if new:
        report = ingest(
            [source.path for source in new],
            corpus,
            append=True,
            dataset=dataset,
            chunk_rows=chunk_rows,
            codec=codec,
            nonfinite=nonfinite,
            id_column=id_column,
            context=context,
        )
        names = [source.path for source in new]
        return watch.report(report.status, **report.facts, new_files=len(names), files=names)
    if parent is None:
        raise BadInputError(
            f"{inbox} holds no file to begin with, and {corpus} does not exist yet; put vector files "
            f"({', '.join(EXTENSIONS)}) there"
        )
    return watch.report("nothing to do", **corpus_facts(parent, 0), new_files=0, files=[])


def new_sources(inbox: str, corpus: Corpus | None, *, dataset: str | None = None) -> list[Source]:
    """The files of ``inbox`` whose content is not in ``corpus``, each content once, in order of their names."""
    paths = _files(inbox)
    if not paths:
        return []
    known, found = set(known_sources(corpus)), []
    for source in open_sources(paths, dataset=dataset):
        content = (source.fingerprint, source.dataset)
        if content not in known:
            known.add(content)
            found.append(source)
    logger.info("%s: %d files, %d of them new", inbox, len(paths), len(found))
    return found


def _files(inbox: str) -> list[str]:
    """Absolute paths, sorted; an inbox that is empty, or a glob without a match, has none."""
    if os.path.isdir(inbox) and not _is_zarr(inbox):
        names = sorted(
            entry.name for entry in os.scandir(inbox) if not entry.name.startswith(HIDDEN) and _is_source(entry)
        )
        return [os.path.abspath(os.path.join(inbox, name)) for name in names]
    try:
        return expand(inbox)
    except BadInputError:  # a glob that matches nothing tonight; a path without wildcards is opened and refused
        return []


def _is_source(entry: os.DirEntry[str]) -> bool:
    if entry.is_dir():
        return _is_zarr(entry.path)
    return os.path.splitext(entry.name)[1].lower() in EXTENSIONS


def _is_zarr(path: str) -> bool:
    return any(os.path.exists(os.path.join(path, name)) for name in ("zarr.json", ".zarray"))
