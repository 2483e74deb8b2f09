"""Search one version of an index: any question about any queries, over codes that stay where they are."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

import numpy as np

from och_dist import events, store
from och_dist.errors import BadInputError, ConflictError, UsageError
from och_dist.search import placement, questions
from och_dist.search.filters import EVERYTHING, Selection, find_rows, selection
from och_dist.search.placement import Advance, Answer, Capacity
from och_dist.search.plan import Planner, SearchMethod
from och_dist.search.questions import Nearest, QueryBatch, Question
from och_dist.sources import Queries, open_queries
from och_dist.stage import Context
from och_dist.store import Corpus, Index, Neighbors, RadiusNeighbors

if TYPE_CHECKING:
    from distributed import Client


class ChosenRows(TypedDict, total=False):
    """The rows that a search may and may not return: numbers, a range or a bool mask; or ids of the corpus."""

    only: Any
    without: Any
    only_ids: Any
    without_ids: Any


class Searcher:
    """Search one version of an index. Results are sorted by (distance, row); queries use the index's own model.

    The codes are loaded by the first search and held until :meth:`close`, in this process or on the workers of a
    cluster, as the ``capacity`` says. Where they would take too much memory, or with ``resident=False``, every batch of
    queries reads them anew. Where there are bucket tables ('och tables') they are used if that is predicted to be
    faster; ``method`` 'flat' or 'multi-index' decides instead. Several threads may use one Searcher.
    """

    def __init__(
        self,
        index: Index,
        capacity: Capacity,
        *,
        resident: bool | None = None,
        corpus: str | None = None,
        method: SearchMethod = "auto",
    ) -> None:
        self.index, self.model = index, index.load_model()
        self.context = Context(client=capacity.client)
        self._corpus_url, self._capacity = corpus, capacity
        self._codes = placement.place_codes(index, capacity, resident=resident)
        self._tabled: placement.Held | None = None
        self._opening = threading.Lock()
        held = isinstance(self._codes, placement.Held)
        self._planner = Planner(index, method, capacity, held=held, resident=resident)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the codes; another search would load them again."""
        self._codes.close()
        if self._tabled is not None:
            self._tabled.close()

    @property
    def plan(self) -> str:
        """How the last search was done, and why."""
        return self._planner.reason

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
        opened, dim = store.open_corpus(self._corpus_url), self.model.hasher.n_features_in_
        if opened.rows < self.index.rows or opened.dim != dim:
            raise BadInputError(
                f"{opened.url} has {opened.rows} rows of {opened.dim} dimensions, the index {self.index.rows} of "
                f"{dim}; name the corpus that was encoded"
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
            given.append(rows if ids is None else find_rows(self.corpus, ids, self.context))
        chosen = selection(*given)
        chosen.check(self.rows)
        return chosen

    def search(
        self,
        queries: Any,
        *,
        k: int = 100,
        ranking: questions.Ranking = "hamming",
        rerank: int | None = None,
        rerank_by: questions.RerankBy = "euclidean",
        ids: bool = False,
        **rows: Unpack[ChosenRows],
    ) -> Neighbors:
        """The ``k`` nearest codes of each query vector (q, d): ``distances`` and ``rows`` of shape (q, min(k, rows)).

        The options are those of :class:`Nearest` and :class:`ChosenRows`.
        """
        question = Nearest(k, ranking, rerank, rerank_by, ids)
        parts = list(self.ask(question, open_queries(queries), self.choose(**rows)))
        return store.join_neighbors(parts) if parts else store.no_neighbors(k)

    def search_codes(
        self, codes: np.ndarray, *, k: int, only: Any = None, without: Any = None
    ) -> questions.NearestPart:
        """(distances, rows) of the ``k`` codes nearest to packed query codes (q, bytes) of this index's own model."""
        width = -(-self.index.bits // 8)
        if codes.ndim != 2 or codes.dtype != np.uint8 or codes.shape[1] != width:
            raise BadInputError(f"query codes are {codes.dtype} {codes.shape}; the index takes uint8 (q, {width})")
        question, queries, chosen = Nearest(k), QueryBatch(codes), self.choose(only, without)
        return self._placement(question, queries, chosen).start(question, queries, chosen)()

    def radius(self, queries: Any, *, radius: int, ids: bool = False, **rows: Unpack[ChosenRows]) -> RadiusNeighbors:
        """All codes at a Hamming distance of at most ``radius`` from each query vector (q, d).

        The other options are those of :class:`ChosenRows`.
        """
        question = questions.WithinRadius(radius, ids)
        parts = list(self.ask(question, open_queries(queries), self.choose(**rows)))
        nothing = np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0, np.int64)
        joined = question.join([nothing, *((part.indptr, part.distances, part.rows) for part in parts)])
        return RadiusNeighbors(*joined, np.concatenate([part.ids for part in parts]) if ids and parts else None)

    def histogram(self, queries: Any, **rows: Unpack[ChosenRows]) -> np.ndarray:
        """(q, bits + 1) int64: how many codes lie at each Hamming distance from each query vector (q, d).

        The options are those of :class:`ChosenRows`.
        """
        nothing = np.empty((0, self.index.bits + 1), np.int64)
        counts = self.ask(questions.Histogram(), open_queries(queries), self.choose(**rows))
        return np.concatenate([nothing, *counts])

    def ask(
        self,
        question: Question,
        queries: Queries,
        selection: Selection = EVERYTHING,
        advance: Advance | None = None,
    ) -> Iterator[Any]:
        """What the question gives for batches of queries in order; memory is bounded by a few batches.

        ``advance`` hears of queries that are done, also within a batch that takes long.
        """
        queries.require_dim(self.model.hasher.n_features_in_, "the index")
        pending: deque[tuple[float, np.ndarray, QueryBatch, Answer]] = deque()
        start, size = 0, question.batch_size(self.index)
        while start < queries.rows or pending:
            while start < queries.rows and len(pending) <= question.ahead:
                stop = min(start + size, queries.rows)
                vectors, begun = queries.read(start, stop), time.perf_counter()
                asked = question.prepare(self.model.hasher, vectors)
                codes = self._placement(question, asked, selection)
                answer = codes.start(question, asked, selection, None if question.refined else advance)
                pending.append((begun, vectors, asked, answer))
                start = stop
            begun, vectors, asked, answer = pending.popleft()
            part, count = answer(), len(asked)
            size = question.batch_size(self.index, count, part)
            found = question.finalise(part, asked, vectors, self)
            if question.refined and advance is not None:
                advance(count)
            events.say("search", queries=count, seconds=time.perf_counter() - begun)
            yield found

    def _placement(self, question: Question, queries: QueryBatch, selection: Selection) -> placement.Placement:
        """Whom to ask: the codes, or the codes with their bucket tables where these are faster."""
        if not self._planner.use_tables(question, queries, selection):
            return self._codes
        with self._opening:
            if self._tabled is None:
                parts = [placement.Partition(self.index.ref, part.chunks, part) for part in self._planner.partitions]
                self._tabled = placement.hold(self.index, parts, self._capacity)
            return self._tabled

    def weigh(self, queries: QueryBatch) -> np.ndarray:
        """Asymmetric distances (q, m) of the candidates ``queries.rows``."""
        return self._codes.start(questions.Weigh(), queries, EVERYTHING)()


def open_index(
    path: str,
    *,
    client: Client | None = None,
    version: int | None = None,
    resident: bool | None = None,
    threads: int | None = None,
    corpus: str | None = None,
    method: SearchMethod = "auto",
    expect_model: str | None = None,
) -> Searcher:
    """Open the newest (or a named) version of an index for searching, in-process or on a Dask cluster.

    ``corpus`` tells where the vectors lie now, if not where they were encoded. An index whose model is not
    ``expect_model`` (``sha256:`` and its address) is refused.
    """
    opened = store.open_version(str(path), version)
    store.check_expected(opened.model, expect_model)
    return Searcher(opened, Capacity.of(client, threads), resident=resident, corpus=corpus, method=method)


def corpus_of_index(index: Index) -> Corpus:
    """The corpus version of which an index was made; it must still be there, and the same."""
    url, version = str(index.corpus.get("url")), int(index.corpus.get("version", 0))
    corpus = store.open_corpus(url, version)
    if corpus.fingerprint != index.corpus.get("fingerprint"):
        raise ConflictError(f"{url} is not the corpus any more that {index.url} was made of; encode it again")
    return corpus
