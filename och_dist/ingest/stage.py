"""Files or the generator -> a new immutable segment of a corpus, published as the next version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from och_dist.cluster import check_memory
from och_dist.errors import BadInputError, ConflictError, UsageError
from och_dist.ingest.chunks import LISTED_ROWS, Target, find_nonfinite, store_chunks
from och_dist.ingest.ids import NewIds, check_unique, id_layout, id_sources
from och_dist.sources import Files, Generated, IdFiles, IdSource, Origin, Source, open_sources
from och_dist.stage import Context, Report, Stopwatch
from och_dist.store import (
    CODECS,
    ArraySpec,
    Codec,
    Corpus,
    Segment,
    canonical,
    commit,
    find_corpus,
    ids_prefix,
    open_objects,
    sha256,
    vectors_prefix,
)

CHUNK_BYTES = 32 << 20
MAX_CHUNKS = 1 << 22  # 128 TiB in chunks of the default size


def ingest(
    sources: Sequence[str],
    corpus: str,
    *,
    append: bool = False,
    dataset: str | None = None,
    chunk_rows: int | None = None,
    codec: Codec = "none",
    nonfinite: Literal["error", "drop"] = "error",
    ids: Sequence[str] | None = None,
    id_column: str | None = None,
    context: Context | None = None,
) -> Report:
    """Bring files into ``corpus``; files it already holds are not taken twice.

    ``ids`` names a file of ids for each file of vectors, ``id_column`` a column of parquet files.
    """
    if nonfinite not in ("error", "drop"):
        raise UsageError(f"nonfinite={nonfinite!r}; use 'error' or 'drop'")
    watch = Stopwatch("ingest")
    found = open_sources([sources] if isinstance(sources, str) else sources, dataset=dataset)
    _check_copies(found)
    named = id_sources(found, [ids] if isinstance(ids, str) else ids, id_column)
    parent = find_corpus(corpus)
    known = known_sources(parent)
    _check_ids(parent, found, named, known)
    new = [place for place, source in enumerate(found) if (source.fingerprint, source.dataset) not in known]
    if not new:
        return _nothing(watch, corpus)
    if known and not append:
        raise ConflictError(f"{corpus} already holds other rows; add these with --append, or write to another place")
    return _write_segment(
        watch,
        corpus,
        Files(tuple(found[place] for place in new)),
        ids=None if named is None else IdFiles(tuple(named[place] for place in new)),
        chunk_rows=chunk_rows,
        codec=codec,
        drop=nonfinite == "drop",
        context=context or Context(),
    )


def generate(
    corpus: str,
    *,
    rows: int = 100_000,
    dim: int = 960,
    seed: int = 0,
    first_row: int = 0,
    append: bool = False,
    chunk_rows: int | None = None,
    codec: Codec = "none",
    context: Context | None = None,
) -> Report:
    """Make a GIST-like corpus: row i is a function of (seed, dim, first_row + i) alone."""
    if rows < 1 or dim < 1 or first_row < 0 or seed < 0:
        raise UsageError(
            f"rows={rows}, dim={dim}, first_row={first_row}, seed={seed}; rows and dim start at 1, seed at 0"
        )
    watch = Stopwatch("generate")
    origin = Generated(rows, dim, seed, first_row)
    known = known_sources(find_corpus(corpus))
    if (origin.describe()[0]["fingerprint"], None) in known:
        return _nothing(watch, corpus)
    if known and not append:
        raise ConflictError(f"{corpus} already holds other rows; add these with --append, or write to another place")
    return _write_segment(
        watch, corpus, origin, chunk_rows=chunk_rows, codec=codec, drop=False, context=context or Context()
    )


def _check_copies(sources: Iterable[Source]) -> None:
    """A file that the corpus holds is not taken twice; neither is one that lies twice in one call."""
    seen: dict[tuple[str, str | None], str] = {}
    for source in sources:
        first = seen.setdefault((source.fingerprint, source.dataset), source.path)
        if first != source.path:
            raise UsageError(f"{source.path} has the content of {first}; name one of them, so that no row comes twice")


def known_sources(corpus: Corpus | None) -> dict[tuple[str, str | None], str | None]:
    """(content, dataset) of every source of a corpus -> content of its ids."""
    segments = corpus.segments if corpus else ()
    return {
        (source["fingerprint"], source["dataset"]): (source.get("ids") or {}).get("fingerprint")
        for segment in segments
        for source in segment.sources
    }


def _check_ids(
    parent: Corpus | None,
    found: Sequence[Source],
    named: Sequence[IdSource] | None,
    known: Mapping[tuple[str, str | None], str | None],
) -> None:
    """All rows of a corpus have ids of one kind, or none has; rows that are there keep theirs."""
    _check_kind(parent, named[0].kind if named else None)
    for source, ids in zip(found, named or (), strict=bool(named)):
        if known.get((source.fingerprint, source.dataset), ids.fingerprint) != ids.fingerprint:
            raise ConflictError(f"{source.path} is in {parent and parent.url} with other ids; these cannot be changed")


def _check_kind(parent: Corpus | None, kind: str | None) -> None:
    if parent is not None and kind != parent.ids:
        raise BadInputError(
            f"the new rows have {f'ids of kind {kind}' if kind else 'no ids'}, those of {parent.url} have "
            f"{f'ids of kind {parent.ids}' if parent.ids else 'none'}; expected the same for all: give such ids, or "
            "write to another place"
        )


def _nothing(watch: Stopwatch, url: str) -> Report:
    corpus = find_corpus(url)
    assert corpus is not None  # narrows the type: sources were found in it
    return watch.report("nothing to do", **corpus_facts(corpus, 0))


def corpus_facts(corpus: Corpus, new_rows: int) -> dict[str, Any]:
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


def vector_bytes(dim: int, dtype: str) -> int:
    return dim * np.dtype(dtype).itemsize


def default_chunk_rows(dim: int, dtype: str) -> int:
    """The power of two whose chunk is nearest below 32 MiB, at least one row."""
    rows = max(1, CHUNK_BYTES // vector_bytes(dim, dtype))
    return 1 << (rows.bit_length() - 1)


def _write_segment(
    watch: Stopwatch,
    url: str,
    origin: Origin,
    *,
    chunk_rows: int | None,
    codec: Codec,
    drop: bool,
    context: Context,
    ids: IdFiles | None = None,
) -> Report:
    objects = open_objects(url)
    parent = find_corpus(url)
    _check_fits(parent, origin, codec, chunk_rows)
    _check_kind(parent, ids.kind if ids else None)
    objects.require_put_if_absent()
    bad = find_nonfinite(origin, context) if drop else np.empty(0, np.int64)
    rows = origin.rows - len(bad)
    if rows < 1:
        raise BadInputError(f"none of the {origin.rows} rows is finite; the corpus would be empty")
    size = min(chunk_rows or default_chunk_rows(origin.dim, origin.dtype), rows)
    spec = ArraySpec(rows, origin.dim, origin.dtype, size, codec)
    if spec.n_chunks > MAX_CHUNKS:
        raise UsageError(
            f"{rows} rows in chunks of {size} are {spec.n_chunks} chunks; use at most {MAX_CHUNKS}: set --chunk-rows"
        )
    layout = None if ids is None else id_layout(ids, origin.rows, context)
    row_bytes = vector_bytes(origin.dim, origin.dtype) + (layout.width if layout else 0)
    check_memory(context.client, 4 * size * row_bytes, f"a chunk of {size} rows")
    start = parent.rows if parent else 0
    work = [origin.identity(), start, rows, size, codec, sha256(bad.tobytes())]
    if ids is not None and layout is not None:
        work += [ids.identity(), layout.to_json()]
    target = Target(objects.url, sha256(canonical(work))[:16], spec, layout)
    stored = store_chunks(target, origin, ids, bad, context.progress(watch.stage, rows), context)
    if target.ids_spec is not None:
        check_unique(NewIds(objects.url, ids_prefix(target.segment), target.ids_spec, start), parent, context)
    segment = Segment(
        id=target.segment,
        start=start,
        stop=start + rows,
        chunk_rows=size,
        digests=stored.digests,
        codec=codec,
        sources=tuple(_described(origin, ids)),
        dropped=len(bad),
        prefix=vectors_prefix(target.segment),
        ids=layout,
        id_digests=stored.id_digests,
    )
    corpus = _publish(url, segment, origin)
    return watch.report(
        **corpus_facts(corpus, rows),
        stored_bytes=stored.nbytes,
        dropped=len(bad),
        dropped_rows=bad[:LISTED_ROWS].tolist(),
    )


def _described(origin: Origin, ids: IdFiles | None) -> list[dict[str, Any]]:
    """The sources as a manifest lists them, each with its ids."""
    if ids is None:
        return origin.describe()
    return [{**about, "ids": source.describe()} for about, source in zip(origin.describe(), ids.sources, strict=True)]


def _check_fits(parent: Corpus | None, origin: Origin, codec: Codec, chunk_rows: int | None) -> None:
    if codec not in CODECS:
        raise UsageError(f"codec {codec!r} is not known; use one of {', '.join(CODECS)}")
    if chunk_rows is not None and chunk_rows < 1:
        raise UsageError(f"chunk_rows={chunk_rows}; use at least 1")
    if parent and (parent.dim, parent.dtype) != (origin.dim, origin.dtype):
        raise BadInputError(
            f"the new rows are {origin.dim}-d {origin.dtype}, the corpus {parent.url} is {parent.dim}-d "
            f"{parent.dtype}; a corpus has one dimension and one dtype"
        )


def _publish(url: str, segment: Segment, origin: Origin) -> Corpus:
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
        return Corpus(objects.url, version + 1, origin.dim, origin.dtype, (*segments, segment))

    objects = open_objects(url)
    return commit(objects, find_corpus, append)[1]
