"""Exact Hamming neighbours over all codes of an index version, in this process or across a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from och_dist.errors import BadInputError, UsageError
from och_dist.graph import reduce_tasks
from och_dist.kernels.hamming import hamming_top_k, merge_top_k
from och_dist.kernels.packing import code_words
from och_dist.stages.common import Context, Report, Stopwatch
from och_dist.stages.queries import Queries, open_queries
from och_dist.store.index import CodeChunk, Index, IndexRef, open_version
from och_dist.store.model import Model
from och_dist.store.neighbors import Neighbors, check_output, read_about, save_neighbors
from och_dist.store.versions import canonical, sha256

if TYPE_CHECKING:
    from distributed import Client

MAX_TASKS = 512
BATCH_BYTES = 16 << 20
MAX_BATCH = 4096
CACHE_BYTES = 2 << 30

Part = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class SearchChunks:
    """Search some chunks of an index version for the ``k`` nearest codes."""

    index: IndexRef
    chunks: tuple[CodeChunk, ...]
    k: int


@dataclass(frozen=True)
class MergeParts:
    """Keep the first ``k`` of several partial results."""

    k: int

    def __call__(self, parts: Sequence[Part]) -> Part:
        return merge_top_k(parts, self.k)


def search_chunks(task: SearchChunks, queries: np.ndarray) -> Part:
    """(distances, rows) of the best ``k`` codes in some chunks; ``queries`` are packed codes (q, bytes)."""
    index = task.index.open()
    words = code_words(queries)
    best: Part | None = None
    for chunk in task.chunks:
        part = hamming_top_k(words, code_words(index.read(chunk)), task.k, n_bits=index.bits, first_row=chunk.start)
        best = part if best is None else merge_top_k([best, part], task.k)
    assert best is not None  # a task has at least one chunk
    return best


def chunk_groups(index: Index, maximum: int = MAX_TASKS) -> list[tuple[CodeChunk, ...]]:
    """Chunks in at most ``maximum`` groups; a function of the index alone."""
    size = max(1, -(-len(index.chunks) // maximum))
    return [index.chunks[i : i + size] for i in range(0, len(index.chunks), size)]


class Searcher:
    """Search one version of an index. Results are sorted by (distance, row); queries use the index's own model.

    Without a client the codes are read once and kept in this process, as words of 64 bits, if those stay below
    ``CACHE_BYTES``.
    """

    def __init__(self, index: Index, *, client: Client | None = None) -> None:
        self.index = index
        self.model: Model = index.load_model()
        self._context = Context(client=client)
        word_bytes = 8 * -(-index.bits // 64) * index.rows
        self._words: dict[CodeChunk, np.ndarray] | None = {} if word_bytes <= CACHE_BYTES else None

    @property
    def rows(self) -> int:
        """Rows of the index."""
        return self.index.rows

    def encode(self, vectors: np.ndarray) -> np.ndarray:
        """Packed codes (q, bytes) of query vectors (q, d)."""
        return self.model.hasher.encode_block(vectors)

    def search(self, queries: Any, *, k: int = 100) -> Neighbors:
        """The ``k`` nearest codes of each query vector (q, d): ``distances`` and ``rows`` of shape (q, min(k, n))."""
        opened = open_queries(queries)
        parts = list(self.batches(opened, k=k))
        if not parts:
            return Neighbors(np.empty((0, k), np.int32), np.empty((0, k), np.int64))
        return Neighbors(np.concatenate([p.distances for p in parts]), np.concatenate([p.rows for p in parts]))

    def batches(self, queries: Queries, *, k: int) -> Iterator[Neighbors]:
        """Results for batches of queries in order; memory is bounded by one batch."""
        if k < 1:
            raise UsageError(f"k={k}; use at least 1")
        queries.require_dim(self.model.hasher.n_features_in_, "the index")
        size = batch_size(min(k, self.rows))
        for start in range(0, queries.rows, size):
            codes = self.encode(queries.read(start, min(start + size, queries.rows)))
            yield Neighbors(*self.search_codes(codes, k=k))

    def search_codes(self, codes: np.ndarray, *, k: int) -> Part:
        """(distances, rows) for packed query codes (q, bytes) of this index's own model."""
        if codes.ndim != 2 or codes.dtype != np.uint8 or codes.shape[1] != -(-self.index.bits // 8):
            raise BadInputError(
                f"query codes are {codes.dtype} {codes.shape}; the index takes uint8 (q, {-(-self.index.bits // 8)})"
            )
        if self._context.client is None:
            return self._search_here(code_words(codes), k)
        tasks = [SearchChunks(self.index.ref, group, k) for group in chunk_groups(self.index)]
        return reduce_tasks(
            search_chunks,
            tasks,
            MergeParts(k),
            client=self._context.client,
            name="search_chunks",
            shared=codes,
        )

    def _search_here(self, words: np.ndarray, k: int) -> Part:
        best: Part | None = None
        for chunk in self.index.chunks:
            part = hamming_top_k(words, self._chunk_words(chunk), k, n_bits=self.index.bits, first_row=chunk.start)
            best = part if best is None else merge_top_k([best, part], k)
        assert best is not None  # an index has at least one chunk
        return best

    def _chunk_words(self, chunk: CodeChunk) -> np.ndarray:
        if self._words is None:
            return code_words(self.index.read(chunk))
        if chunk not in self._words:
            self._words[chunk] = code_words(self.index.read(chunk))
        return self._words[chunk]


def batch_size(k: int) -> int:
    """Queries per batch, so that a partial result of k neighbours each stays below BATCH_BYTES."""
    return int(max(1, min(MAX_BATCH, BATCH_BYTES // (12 * max(k, 1)))))


def open_index(path: str, *, client: Client | None = None, version: int | None = None) -> Searcher:
    """Open the newest (or a named) version of an index for searching, in-process or on a Dask cluster."""
    return Searcher(open_version(str(path), version), client=client)


def search(
    index: str,
    queries: Any,
    *,
    k: int = 100,
    output: str | None = None,
    dataset: str | None = None,
    version: int | None = None,
    context: Context | None = None,
) -> Report:
    """Find the ``k`` nearest codes of every query; ``output`` names a file, otherwise they are in the report."""
    watch, context = Stopwatch("search"), context or Context()
    if k < 1:
        raise UsageError(f"k={k}; use at least 1")
    if output is not None:
        check_output(output)
    searcher = open_index(index, client=context.client, version=version)
    opened = open_queries(queries, dataset=dataset)
    opened.require_dim(searcher.model.hasher.n_features_in_, "the index")
    width = min(k, searcher.rows) if opened.rows else k
    about = {
        "kind": "hamming",
        "key": sha256(canonical([searcher.index.to_json(), opened.fingerprint, k])),
        "index_version": searcher.index.version,
        "model": searcher.index.model,
        "k": k,
    }
    facts: dict[str, Any] = {
        "index": searcher.index.url,
        "version": searcher.index.version,
        "queries": opened.rows,
        "k": width,
        "rows": searcher.rows,
        "source": opened.source,
        "output": output,
    }
    if output is not None and output.endswith(".zarr") and (read_about(output) or {}).get("key") == about["key"]:
        return watch.report("nothing to do", **facts)
    advance = context.progress("search", opened.rows)

    def counted() -> Iterator[Neighbors]:
        for part in searcher.batches(opened, k=k):
            yield part
            advance(len(part.rows))

    if output is None:
        parts = list(counted())
        lists = [
            {"distances": d, "rows": r}
            for part in parts
            for d, r in zip(part.distances.tolist(), part.rows.tolist(), strict=True)
        ]
        return watch.report(**facts, neighbors=lists)
    save_neighbors(output, counted(), queries=opened.rows, width=width, batch=batch_size(width), about=about)
    return watch.report(**facts)
