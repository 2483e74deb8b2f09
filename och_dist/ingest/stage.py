"""Files or the generator -> a new immutable segment of a corpus, published as the next version; and downloads.

Planning, one task per chunk of the segment, publishing: each may be done again after a kill. What an earlier run of the
same call stored is found by the name of the segment, which is a hash of all that decides its content.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from och_dist import store
from och_dist.cluster import check_memory
from och_dist.errors import LISTED_ROWS, BadInputError, ConflictError, UsageError
from och_dist.ingest.chunks import NewSegment, find_nonfinite, store_chunks
from och_dist.ingest.unique_ids import check_unique, id_layout
from och_dist.options import Option, checked
from och_dist.sources import (
    EXTENSIONS,
    GeneratedRows,
    JoinedFiles,
    RowSource,
    VectorFile,
    expand,
    extract,
    fetch,
    holds_vectors,
    open_files,
    open_sources,
)
from och_dist.stage import Context, Report, Stopwatch, logger
from och_dist.store import ArraySpec, Codec, Corpus, Segment

CHUNK_BYTES = 32 << 20
MAX_CHUNKS = 1 << 22  # 128 TiB in chunks of the default size
HIDDEN = (".", "_", "~")

VectorDataset = Annotated[str | None, Option("HDF5 dataset, parquet column or MATLAB variable to read.")]
ChunkRows = Annotated[int | None, Option("Rows per stored chunk [default: about 32 MiB].", at_least=1)]
ChunkCodec = Annotated[Codec, Option("Compression of the chunks; crc32c is always added.")]
NonFinite = Annotated[Literal["error", "drop"], Option("What to do with rows that hold NaN or infinity.")]
IdColumn = Annotated[str | None, Option("Column of parquet vectors that holds the ids of the rows.", metavar="NAME")]


@checked
def fetch_archive(
    source: str,
    folder: str,
    *,
    members: Annotated[Sequence[str], Option("The members to unpack.")],
    expected_bytes: Annotated[int | None, Option("Size of the archive, for the progress shown.", at_least=0)] = None,
    context: Context | None = None,
) -> Report:
    """Download ``source`` (or take a local archive) and unpack ``members`` into ``folder``."""
    watch, context = Stopwatch("fetch"), context or Context()
    advance = context.progress("fetch", expected_bytes or 0)
    seen = 0

    def progress(done: int) -> None:
        nonlocal seen
        advance(max(0, done - seen))
        seen = max(seen, done)

    target = Path(folder, Path(source.rstrip("/")).name)
    wanted = [Path(folder, Path(member).name) for member in members]
    before = {path: path.stat().st_mtime_ns for path in wanted if path.exists()}
    got = fetch(source, target, expected_bytes=expected_bytes, progress=progress)
    paths = extract(got.path, list(members), Path(folder))
    same = before == {path: path.stat().st_mtime_ns for path in paths}
    return watch.report(
        "nothing to do" if same else "done",
        archive=str(got.path),
        bytes=got.bytes,
        sha256=got.sha256,
        files=[str(path) for path in paths],
    )


@checked
def ingest(
    sources: Sequence[str],
    corpus: str,
    *,
    append: Annotated[bool, Option("Add to an existing corpus; files it already holds are not taken twice.")] = False,
    dataset: VectorDataset = None,
    chunk_rows: ChunkRows = None,
    codec: ChunkCodec = "none",
    nonfinite: NonFinite = "error",
    ids: Annotated[
        Sequence[str] | None,
        Option(
            "Ids of the rows (.npy, or .txt with one id a line): one file for each file of vectors, in the same order.",
            metavar="FILE",
        ),
    ] = None,
    id_column: IdColumn = None,
    context: Context | None = None,
) -> Report:
    """Bring files into ``corpus``; files it already holds are not taken twice."""
    watch = Stopwatch("ingest")
    files, parent = open_files(sources, dataset=dataset, ids=ids, id_column=id_column), store.find_corpus(corpus)
    _check_copies(files)
    _check_ids(parent, files)
    known = known_sources(parent)
    new = JoinedFiles(tuple(file for file in files.files if file.content not in known))
    if parent is not None and not new.files:
        return watch.report("nothing to do", **_facts(parent, 0))
    _check_append(corpus, parent, append=append)
    return _store(
        watch, corpus, parent, new, chunk_rows=chunk_rows, codec=codec, drop=nonfinite == "drop", context=context
    )


@checked
def generate(
    corpus: str,
    *,
    rows: Annotated[int, Option("Rows to make.", at_least=1)] = 100_000,
    dim: Annotated[int, Option("Values of a row.", at_least=1)] = 960,
    seed: Annotated[int, Option("The same seed makes the same rows.", at_least=0)] = 0,
    first_row: Annotated[int, Option("Number of the first row in the endless set.", at_least=0)] = 0,
    append: Annotated[bool, Option("Add to an existing corpus.")] = False,
    chunk_rows: ChunkRows = None,
    codec: ChunkCodec = "none",
    context: Context | None = None,
) -> Report:
    """Make a GIST-like corpus: row i is a function of (seed, dim, first_row + i) alone."""
    watch = Stopwatch("generate")
    source = GeneratedRows(rows, dim, seed, first_row)
    parent = store.find_corpus(corpus)
    if parent is not None and (source.describe()[0]["fingerprint"], None) in known_sources(parent):
        return watch.report("nothing to do", **_facts(parent, 0))
    _check_append(corpus, parent, append=append)
    return _store(watch, corpus, parent, source, chunk_rows=chunk_rows, codec=codec, drop=False, context=context)


@checked
def collect(
    inbox: str,
    corpus: str,
    *,
    dataset: VectorDataset = None,
    chunk_rows: ChunkRows = None,
    codec: ChunkCodec = "none",
    nonfinite: NonFinite = "error",
    id_column: IdColumn = None,
    context: Context | None = None,
) -> Report:
    """Bring the files of ``inbox``, a folder or a glob, that ``corpus`` does not hold yet into it.

    A file is known by its content, so it may be renamed, copied or removed afterwards. Of a folder, files with a known
    extension count; hidden ones (a leading '.', '_' or '~') are still being written. No new file is nothing to do.
    """
    watch = Stopwatch("collect")
    parent = store.find_corpus(corpus)
    new = [file.path for file in new_sources(inbox, parent, dataset=dataset)]
    if new:
        report = ingest(
            new,
            corpus,
            append=True,
            dataset=dataset,
            chunk_rows=chunk_rows,
            codec=codec,
            nonfinite=nonfinite,
            id_column=id_column,
            context=context,
        )
        return watch.report(report.status, **report.facts, new_files=len(new), files=new)
    if parent is None:
        raise BadInputError(
            f"{inbox} holds no file to begin with, and {corpus} does not exist yet; put vector files "
            f"({', '.join(EXTENSIONS)}) there"
        )
    return watch.report("nothing to do", **_facts(parent, 0), new_files=0, files=[])


def _store(
    watch: Stopwatch,
    url: str,
    parent: Corpus | None,
    source: RowSource,
    *,
    chunk_rows: int | None,
    codec: Codec,
    drop: bool,
    context: Context | None,
) -> Report:
    """Plan a segment after the rows of ``parent``, write its chunks, publish it."""
    context = context or Context()
    _check_fits(parent, source)
    store.open_objects(url).require_put_if_absent()
    bad = find_nonfinite(source, context) if drop else np.empty(0, np.int64)
    new = _plan_segment(url, parent, source, bad, chunk_rows, codec, context)
    digests, stored_bytes = store_chunks(new, source, bad, watch.stage, context)
    if new.ids is not None:
        check_unique(new, parent, context)
    segment = Segment(
        id=new.id,
        start=new.start,
        stop=new.start + new.spec.rows,
        chunk_rows=new.spec.chunk_rows,
        digests=digests[0],
        codec=codec,
        sources=tuple(source.describe()),
        dropped=len(bad),
        prefix=store.vectors_prefix(new.id),
        ids=new.ids,
        id_digests=digests[1] if new.ids else None,
    )
    corpus = _publish(url, segment, source)
    return watch.report(
        **_facts(corpus, new.spec.rows),
        stored_bytes=stored_bytes,
        dropped=len(bad),
        dropped_rows=bad[:LISTED_ROWS].tolist(),
    )


def _plan_segment(
    url: str,
    parent: Corpus | None,
    source: RowSource,
    bad: np.ndarray,
    chunk_rows: int | None,
    codec: Codec,
    context: Context,
) -> NewSegment:
    """Where the rows go, all but the ``bad`` ones, and in what layout."""
    rows = source.rows - len(bad)
    if rows < 1:
        raise BadInputError(f"none of the {source.rows} rows is finite; the corpus would be empty")
    size = min(chunk_rows or default_chunk_rows(source.dim, source.dtype), rows)
    spec = ArraySpec(rows, source.dim, source.dtype, size, codec)
    if spec.n_chunks > MAX_CHUNKS:
        raise UsageError(
            f"{rows} rows in chunks of {size} are {spec.n_chunks} chunks; use at most {MAX_CHUNKS}: set --chunk-rows"
        )
    start, layout = parent.rows if parent else 0, None
    work = [source.identity(), start, rows, size, codec, store.sha256(bad.tobytes())]
    if isinstance(source, JoinedFiles) and source.ids:
        layout = id_layout(source, context)
        work += [source.id_identity(), layout.to_json()]
    row_bytes = spec.row_bytes + (layout.width if layout else 0)
    check_memory(context.client, 4 * size * row_bytes, f"a chunk of {size} rows")
    return NewSegment(store.open_objects(url).url, store.sha256(store.canonical(work))[:16], start, spec, layout)


def _publish(url: str, segment: Segment, source: RowSource) -> Corpus:
    """Commit the next version, unless another ingest put rows where these were planned."""

    def append(current: Corpus | None) -> Corpus:
        rows, version, segments = (current.rows, current.version, current.segments) if current else (0, 0, ())
        if current and segment.id in {other.id for other in segments}:
            return current
        if rows != segment.start:
            raise ConflictError(
                f"another ingest published rows from {segment.start} on in {url} meanwhile; "
                "nothing was mixed: run the command again to append after them"
            )
        return Corpus(objects.url, version + 1, source.dim, source.dtype, (*segments, segment))

    objects = store.open_objects(url)
    return store.commit(objects, store.find_corpus, append)[1]


def known_sources(corpus: Corpus | None) -> dict[tuple[str, str | None], str | None]:
    """(content, dataset) of every source of a corpus -> content of its ids."""
    return {
        (source["fingerprint"], source["dataset"]): (source.get("ids") or {}).get("fingerprint")
        for segment in (corpus.segments if corpus else ())
        for source in segment.sources
    }


def new_sources(inbox: str, corpus: Corpus | None, *, dataset: str | None = None) -> list[VectorFile]:
    """The files of ``inbox`` whose content is not in ``corpus``, each content once, in order of their names."""
    paths = _files_of(inbox)
    known, found = set(known_sources(corpus)), []
    for file in open_sources(paths, dataset=dataset) if paths else ():
        if file.content not in known:
            known.add(file.content)
            found.append(file)
    if paths:
        logger.info("%s: %d files, %d of them new", inbox, len(paths), len(found))
    return found


def _files_of(inbox: str) -> list[str]:
    """Absolute paths, sorted; an inbox that is empty, or a glob without a match, has none."""
    if os.path.isdir(inbox) and not holds_vectors(inbox):
        visible = [entry.path for entry in os.scandir(inbox) if not entry.name.startswith(HIDDEN)]
        return sorted(os.path.abspath(path) for path in visible if holds_vectors(path))
    try:
        return expand(inbox)
    except BadInputError:  # a glob that matches nothing tonight; a path without wildcards is opened and refused
        return []


def default_chunk_rows(dim: int, dtype: str) -> int:
    """The power of two whose chunk is nearest below 32 MiB, at least one row."""
    rows = max(1, CHUNK_BYTES // (dim * np.dtype(dtype).itemsize))
    return 1 << (rows.bit_length() - 1)


def _facts(corpus: Corpus, new_rows: int) -> dict[str, Any]:
    return {
        "corpus": corpus.url,
        "version": corpus.version,
        "rows": corpus.rows,
        "new_rows": new_rows,
        "dim": corpus.dim,
        "dtype": np.dtype(corpus.dtype).name,
        "bytes": corpus.nbytes,
        **({"ids": corpus.ids} if corpus.ids else {}),
    }


def _check_copies(files: JoinedFiles) -> None:
    """A file that the corpus holds is not taken twice; neither is one that lies twice in one call."""
    seen: dict[tuple[str, str | None], str] = {}
    for file in files.files:
        first = seen.setdefault(file.content, file.path)
        if first != file.path:
            raise UsageError(f"{file.path} has the content of {first}; name one of them, so that no row comes twice")


def _check_append(url: str, parent: Corpus | None, *, append: bool) -> None:
    if parent is not None and not append:
        raise ConflictError(f"{url} already holds other rows; add these with --append, or write to another place")


def _check_ids(parent: Corpus | None, files: JoinedFiles) -> None:
    """All rows of a corpus have ids of one kind, or none has; rows that are there keep theirs."""
    _check_kind(parent, files.ids)
    known = known_sources(parent)
    for file in files.files:
        if file.ids is not None and known.get(file.content, file.ids.fingerprint) != file.ids.fingerprint:
            raise ConflictError(f"{file.path} is in {parent and parent.url} with other ids; these cannot be changed")


def _check_kind(parent: Corpus | None, kind: str | None) -> None:
    if parent is not None and kind != parent.ids:
        raise BadInputError(
            f"the new rows have {f'ids of kind {kind}' if kind else 'no ids'}, those of {parent.url} have "
            f"{f'ids of kind {parent.ids}' if parent.ids else 'none'}; expected the same for all: give such ids, or "
            "write to another place"
        )


def _check_fits(parent: Corpus | None, source: RowSource) -> None:
    if parent and (parent.dim, parent.dtype) != (source.dim, source.dtype):
        raise BadInputError(
            f"the new rows are {source.dim}-d {source.dtype}, the corpus {parent.url} is {parent.dim}-d "
            f"{parent.dtype}; a corpus has one dimension and one dtype"
        )
    _check_kind(parent, source.ids)
