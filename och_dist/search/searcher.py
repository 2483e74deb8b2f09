"""Search one version of an index: nearest codes, all codes within a radius, histograms of distances."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np

from och_dist import events
from och_dist.errors import BadInputError, UsageError
from och_dist.search.choice import ChosenCodes, Way
from och_dist.search.filters import EVERYTHING, Selection, selection
from och_dist.search.ids import corpus_of_index, find_rows
from och_dist.search.placement import Advance, Answer, Room, quietly
from och_dist.search.questions import (
    Histogram,
    QueryBatch,
    Question,
    Ranking,
    TopK,
    TopKPart,
    Weigh,
    WithinRadius,
    check_ranking,
    join_radius,
)
from och_dist.search.reranking import euclidean_order, first_of
from och_dist.sources import Queries, open_queries
from och_dist.stage import Context
from och_dist.store import (
    Corpus,
    Index,
    Model,
    Neighbors,
    RadiusNeighbors,
    check_expected,
    join_neighbors,
    no_neighbors,
    open_corpus,
    open_version,
)

if TYPE_CHECKING:
    from distributed import Client

BATCH_BYTES = 16 << 20
MAX_BATCH = 4096
RADIUS_MATCHES = 1 << 21
AHEAD = 1
"""Batches that are under way on the workers while the one before them is finished here."""

RerankBy = Literal["euclidean", "asymmetric"]


@dataclass(frozen=True)
class SearchOptions:
    """What is asked of a search for nearest codes.

    ``ranking`` orders the codes: by Hamming distance, by the distances of the query's real-valued scores to them
    (asymmetric), or by the spherical distance of the method SpH. With ``rerank`` the first so many of that order are
    ordered anew by their vectors in the corpus (euclidean) or by asymmetric distance. ``ids`` adds the corpus' own ids.
    """

    k: int = 100
    selection: Selection = EVERYTHING
    ranking: Ranking = "hamming"
    rerank: int | None = None
    rerank_by: RerankBy = "euclidean"
    ids: bool = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UsageError(f"k={self.k}; use at least 1")
        check_ranking(self.ranking)
        if self.rerank is not None and self.rerank < self.k:
            raise UsageError(f"{self.rerank} candidates cannot be re-ranked to {self.k} neighbours; use at least k")
        if self.rerank_by not in get_args(RerankBy):
            raise UsageError(f"rerank_by={self.rerank_by!r}; use one of {', '.join(get_args(RerankBy))}")
        if self.rerank_by == "asymmetric" and self.ranking != "hamming":
            raise UsageError(f"the {self.ranking} order cannot be re-ranked by asymmetric distance; rank by hamming")

    @property
    def depth(self) -> int:
        """Neighbours that are taken from the codes."""
        return self.k if self.rerank is None else self.rerank

    @property
    def weighted(self) -> bool:
        return self.ranking == "asymmetric" or (self.rerank is not None and self.rerank_by == "asymmetric")


class Told:
    """Passes on that queries of a batch are done: some as they are, the rest when all are, and none twice."""

    def __init__(self, advance: Advance, queries: int) -> None:
        self.advance, self.left, self.lock = advance, queries, threading.Lock()

    def __call__(self, count: int) -> None:
        with self.lock:
            count = min(count, self.left)
            self.left -= count
        if count:
            self.advance(count)

    @property
    def within(self) -> Advance:
        """Whom to tell within the batch: nobody where nobody listens, which spares the workers the messages."""
        return quietly if self.advance is quietly else self

    def finish(self) -> None:
        self(self.left)


@dataclass(frozen=True)
class UnderWay:
    """A batch of queries whose answer is being found, ``asked`` for at that time."""

    asked: float
    vectors: np.ndarray
    batch: QueryBatch
    scales: np.ndarray | None
    answer: Answer
    told: Told


class Searcher:
    """Search one version of an index. Results are sorted by (distance, row); queries use the index's own model.

    The codes are loaded by the first search and held until :meth:`close`: in this process, searched by ``threads``
    threads (default: all cores), or on the workers of a cluster. Where they would take too much memory, or with
    ``resident=False``, every batch of queries reads them anew. Where there are bucket tables ('och tables') they are
    used if that is predicted to be faster; ``method`` 'flat' or 'multi-index' decides instead. Several threads may use
    one Searcher.
    """

    def __init__(
        self,
        index: Index,
        *,
        client: Client | None = None,
        resident: bool | None = None,
        threads: int | None = None,
        corpus: str | None = None,
        method: Way = "auto",
    ) -> None:
        self.index = index
        self.model: Model = index.load_model()
        self._context = Context(client=client)
        self._corpus_url = corpus
        self._codes = ChosenCodes(index, Room.of(client, threads), resident=resident, method=method)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the codes; another search would load them again."""
        self._codes.close()

    @property
    def plan(self) -> str:
        """How the last search was done, and why."""
        return self._codes.reason

    @property
    def rows(self) -> int:
        """Rows of the index, deleted ones included."""
        return self.index.rows

    @property
    def live_rows(self) -> int:
        """Rows that a search can return."""
        return self.index.live_rows

    @cached_property
    def corpus(self) -> Corpus:
        """The vectors that the codes were made of."""
        if self._corpus_url is None:
            return corpus_of_index(self.index)
        opened = open_corpus(self._corpus_url)
        if opened.rows < self.index.rows or opened.dim != self.model.hasher.n_features_in_:
            raise BadInputError(
                f"{opened.url} has {opened.rows} rows of {opened.dim} dimensions, the index {self.index.rows} of "
                f"{self.model.hasher.n_features_in_}; name the corpus that was encoded"
            )
        return opened

    def encode(self, vectors: np.ndarray) -> np.ndarray:
        """Packed codes (q, bytes) of query vectors (q, d)."""
        return self.model.hasher.encode_block(vectors)

    def choose(
        self, only: Any = None, without: Any = None, *, only_ids: Any = None, without_ids: Any = None
    ) -> Selection:
        """The rows that a search may return, from row numbers or from ids of the corpus."""
        given = []
        for rows, ids, name in ((only, only_ids, "only"), (without, without_ids, "without")):
            if rows is not None and ids is not None:
                raise UsageError(f"rows are chosen by number or by id, not by both; leave out {name} or {name}_ids")
            given.append(rows if ids is None else find_rows(self.corpus, ids, self._context))
        chosen = selection(*given)
        chosen.check(self.rows)
        return chosen

    def search(
        self,
        queries: Any,
        *,
        only: Any = None,
        without: Any = None,
        only_ids: Any = None,
        without_ids: Any = None,
        **options: Any,
    ) -> Neighbors:
        """The ``k`` nearest codes of each query vector (q, d): ``distances`` and ``rows`` of shape (q, min(k, rows)).

        ``only`` and ``without`` name the rows that may and may not be returned: numbers, a range, or a bool mask;
        ``only_ids`` and ``without_ids`` do so by ids of the corpus. The other options are those of
        :class:`SearchOptions`.
        """
        chosen = self.choose(only, without, only_ids=only_ids, without_ids=without_ids)
        asked = SearchOptions(selection=chosen, **options)
        parts = list(self.batches(open_queries(queries), asked))
        return join_neighbors(parts) if parts else no_neighbors(asked.k)

    def search_codes(self, codes: np.ndarray, *, k: int, only: Any = None, without: Any = None) -> TopKPart:
        """(distances, rows) of the ``k`` codes nearest to packed query codes (q, bytes) of this index's own model."""
        asked = SearchOptions(k, selection(only, without))
        return self._start(TopK(k), QueryBatch(self._checked(codes)), asked.selection)()

    def radius(
        self,
        queries: Any,
        *,
        radius: int,
        only: Any = None,
        without: Any = None,
        only_ids: Any = None,
        without_ids: Any = None,
        ids: bool = False,
    ) -> RadiusNeighbors:
        """All codes at a Hamming distance of at most ``radius`` from each query vector (q, d)."""
        chosen = self.choose(only, without, only_ids=only_ids, without_ids=without_ids)
        parts = list(self.radius_batches(open_queries(queries), radius, chosen, ids=ids))
        if not parts:
            return RadiusNeighbors(np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0, np.int64))
        joined = join_radius([(part.indptr, part.distances, part.rows) for part in parts])
        return RadiusNeighbors(*joined, np.concatenate([part.ids for part in parts]) if ids else None)

    def histogram(
        self,
        queries: Any,
        *,
        only: Any = None,
        without: Any = None,
        only_ids: Any = None,
        without_ids: Any = None,
    ) -> np.ndarray:
        """(q, bits + 1) int64: how many codes lie at each Hamming distance from each query vector (q, d)."""
        chosen = self.choose(only, without, only_ids=only_ids, without_ids=without_ids)
        nothing = np.empty((0, self.index.bits + 1), np.int64)
        return np.concatenate([nothing, *self.histogram_batches(open_queries(queries), chosen)])

    def histogram_batches(
        self, queries: Queries, chosen: Selection, advance: Advance = quietly
    ) -> Iterator[np.ndarray]:
        """Histograms of batches of queries in order."""
        queries.require_dim(self.model.hasher.n_features_in_, "the index")
        size = batch_size(self.index.bits + 1)
        for start in range(0, queries.rows, size):
            batch = QueryBatch(self.encode(queries.read(start, min(start + size, queries.rows))))
            told = Told(advance, len(batch))
            yield self._start(Histogram(), batch, chosen, told.within)()
            told.finish()

    def batches(self, queries: Queries, options: SearchOptions, advance: Advance = quietly) -> Iterator[Neighbors]:
        """Results for batches of queries in order; memory is bounded by a few batches.

        ``advance`` hears of queries that are done, also within a batch that takes long.
        """
        queries.require_dim(self.model.hasher.n_features_in_, "the index")
        size = batch_size(min(options.depth, self.live_rows))
        under_way: deque[UnderWay] = deque()
        for start in range(0, queries.rows, size):
            under_way.append(self._begun(queries.read(start, min(start + size, queries.rows)), options, advance))
            if len(under_way) > AHEAD:
                yield self._finished(under_way.popleft(), options)
        while under_way:
            yield self._finished(under_way.popleft(), options)

    def _begun(self, vectors: np.ndarray, options: SearchOptions, advance: Advance) -> UnderWay:
        asked = time.perf_counter()
        batch, scales = self._batch(vectors, options)
        told, question = Told(advance, len(batch)), TopK(options.depth, options.ranking)
        within = told.within if options.rerank is None else quietly  # candidates are only half of the work
        answer = self._start(question, batch, options.selection, within)
        return UnderWay(asked, vectors, batch, scales, answer, told)

    def radius_batches(
        self, queries: Queries, radius: int, chosen: Selection, *, ids: bool = False, advance: Advance = quietly
    ) -> Iterator[RadiusNeighbors]:
        """Radius results for batches of queries in order, sized so that a batch has about RADIUS_MATCHES matches."""
        if radius < 0:
            raise UsageError(f"radius={radius}; use a Hamming distance of at least 0")
        queries.require_dim(self.model.hasher.n_features_in_, "the index")
        start, size = 0, 16
        while start < queries.rows:
            stop, asked = min(start + size, queries.rows), time.perf_counter()
            batch = QueryBatch(self.encode(queries.read(start, stop)))
            told = Told(advance, len(batch))
            indptr, distances, rows = self._start(WithinRadius(radius), batch, chosen, told.within)()
            found = RadiusNeighbors(indptr, distances, rows, self.corpus.read_ids(rows) if ids else None)
            events.say("search", queries=stop - start, seconds=time.perf_counter() - asked)
            yield found
            told.finish()
            per_query = max(1, int(np.diff(indptr).max()))
            start, size = stop, int(min(MAX_BATCH, 4 * size, max(1, RADIUS_MATCHES // per_query)))

    def _batch(self, vectors: np.ndarray, options: SearchOptions) -> tuple[QueryBatch, np.ndarray | None]:
        if not options.weighted:
            return QueryBatch(self.encode(vectors)), None
        codes, weights, scales = self.model.hasher.query_weights(vectors)
        return QueryBatch(codes, weights), scales

    def _start(self, question: Question, batch: QueryBatch, chosen: Selection, advance: Advance = quietly) -> Answer:
        chosen.check(self.rows)
        if not self.live_rows or not self.index.chunks:
            return lambda: question.nothing(batch, self.index.bits)
        return self._codes.start(question, batch, chosen, advance)

    def _finished(self, under_way: UnderWay, options: SearchOptions) -> Neighbors:
        vectors, batch, scales = under_way.vectors, under_way.batch, under_way.scales
        distances, rows = under_way.answer()
        candidates = None
        if options.rerank is not None:
            candidates = rows[:, : options.k]
            if options.rerank_by == "euclidean":
                distances, rows = euclidean_order(self.corpus, vectors, rows, options.k, self._context)
            else:
                candidate_batch = QueryBatch(batch.codes, batch.weights, rows)
                distances, rows = first_of(self._start(Weigh(), candidate_batch, EVERYTHING)(), rows, options.k)
        if scales is not None and (options.ranking == "asymmetric" or options.rerank_by == "asymmetric"):
            distances = distances * scales[:, None]
        ids = self.corpus.read_ids(rows.reshape(-1)).reshape(rows.shape) if options.ids else None
        under_way.told.finish()
        events.say("search", queries=len(vectors), seconds=time.perf_counter() - under_way.asked)
        return Neighbors(distances, rows, ids, candidates)

    def _checked(self, codes: np.ndarray) -> np.ndarray:
        width = -(-self.index.bits // 8)
        if codes.ndim != 2 or codes.dtype != np.uint8 or codes.shape[1] != width:
            raise BadInputError(f"query codes are {codes.dtype} {codes.shape}; the index takes uint8 (q, {width})")
        return codes


def batch_size(k: int) -> int:
    """Queries per batch, so that a partial result of k neighbours each stays below BATCH_BYTES."""
    return int(max(1, min(MAX_BATCH, BATCH_BYTES // (12 * max(k, 1)))))


def open_index(
    path: str,
    *,
    client: Client | None = None,
    version: int | None = None,
    resident: bool | None = None,
    threads: int | None = None,
    corpus: str | None = None,
    method: Way = "auto",
    expect_model: str | None = None,
) -> Searcher:
    """Open the newest (or a named) version of an index for searching, in-process or on a Dask cluster.

    ``corpus`` tells where the vectors lie now, if not where they were encoded. An index whose model is not
    ``expect_model`` (``sha256:`` and its address) is refused.
    """
    opened = open_version(str(path), version)
    check_expected(opened.model, expect_model)
    return Searcher(opened, client=client, resident=resident, threads=threads, corpus=corpus, method=method)
