"""What is asked of the codes: nearest codes, codes within a radius, histograms of distances.

A question is a declaration. ``chunk`` answers it for the codes of one partition, where these are; ``combine`` makes one
answer of those of several partitions; ``finalise`` makes of that what the user gets. ``Searcher.ask`` runs any question
over any index, in this process and on a cluster: a new one is a class here, and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from och_dist.cluster import reduce_tasks
from och_dist.errors import UsageError
from och_dist.kernels import asymmetric, hamming
from och_dist.kernels.euclidean import exact_distances
from och_dist.methods.base import Hasher
from och_dist.stage import Context
from och_dist.store import Corpus, CorpusRef, Index, Neighbors, RadiusNeighbors

if TYPE_CHECKING:
    from och_dist.search.placement import HeldCodes
    from och_dist.search.searcher import Searcher

Ranking = Literal["hamming", "asymmetric", "spherical"]
RerankBy = Literal["euclidean", "asymmetric"]
RANKINGS, RERANKINGS = get_args(Ranking), get_args(RerankBy)

NearestPart = tuple[np.ndarray, np.ndarray]
RadiusPart = tuple[np.ndarray, np.ndarray, np.ndarray]

BATCH_BYTES = 16 << 20
MAX_BATCH = 4096
FIRST_RADIUS_BATCH = 16
RADIUS_MATCHES = 1 << 21
"""Matches that a batch of queries within a radius should have."""

MAX_PAIRS = 1 << 18
"""Pairs of query and candidate that are measured at a time: they travel to the workers inside the tasks."""


@dataclass(frozen=True, eq=False)
class QueryBatch:
    """What partitions hear of queries: packed ``codes`` (q, bytes); ``weights`` (q, bits) and their ``scales`` (q,) for
    asymmetric distances, ``rows`` (q, m) to weigh."""

    codes: np.ndarray
    weights: np.ndarray | None = None
    scales: np.ndarray | None = None
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in vars(self).values() if array is not None)

    def cut(self, size: int) -> list[QueryBatch]:
        """The same queries, at most ``size`` at a time."""
        if len(self) <= size:
            return [self]
        parts = [slice(start, start + size) for start in range(0, len(self), size)]
        arrays = self.weights, self.scales, self.rows
        return [QueryBatch(self.codes[part], *(None if a is None else a[part] for a in arrays)) for part in parts]


class Question(ABC):
    """What is asked of every partition; small, for it travels to each."""

    ahead = 1
    """Batches that are under way on the workers while the one before them is finished here."""

    @property
    def refined(self) -> bool:
        """Whether :meth:`finalise` takes long: then a batch counts as done only after it."""
        return False

    @property
    def sought(self) -> dict[str, int] | None:
        """What bucket tables are to find: {"k": ...} or {"radius": ...}; None where they do not help."""
        return None

    def width(self, index: Index) -> int:
        """Numbers in the answer to one query."""
        return 1

    def batch_size(self, index: Index, asked: int = 0, part: Any = None) -> int:
        """Queries of the next batch, whose answer stays below BATCH_BYTES; the last had ``asked``, with the answer
        ``part``."""
        return int(max(1, min(MAX_BATCH, BATCH_BYTES // (12 * max(self.width(index), 1)))))

    def prepare(self, hasher: Hasher, vectors: np.ndarray) -> QueryBatch:
        """What partitions hear of query vectors (q, d)."""
        return QueryBatch(hasher.encode_block(vectors))

    @abstractmethod
    def chunk(self, codes: HeldCodes, queries: QueryBatch, so_far: Any = None) -> Any:
        """The answer of one partition; ``so_far``, the answer of others, may spare it work."""

    @abstractmethod
    def combine(self, parts: Sequence[Any]) -> Any:
        """One answer of several partitions, for the same queries."""

    def join(self, parts: Sequence[Any]) -> Any:
        """One answer of several, for queries that follow each other."""
        if isinstance(parts[0], tuple):
            return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return np.concatenate(parts)

    def finalise(self, part: Any, queries: QueryBatch, vectors: np.ndarray, searcher: Searcher) -> Any:
        """What the user gets, from the answer of all partitions to queries, of which ``vectors`` (q, d) stay here."""
        return part


@dataclass(frozen=True)
class Nearest(Question):
    """The ``k`` nearest codes; a partition answers with (distances, rows), each (q, min(depth, live rows)).

    ``ranking`` orders the codes: by Hamming distance, by the distances of the query's real-valued scores to them
    (asymmetric), or by the spherical distance of the method SpH. With ``rerank`` the first so many of that order are
    ordered anew by their vectors in the corpus (euclidean) or by asymmetric distance. ``ids`` adds the corpus' own ids.
    """

    k: int = 100
    ranking: Ranking = "hamming"
    rerank: int | None = None
    rerank_by: RerankBy = "euclidean"
    ids: bool = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UsageError(f"k={self.k}; use at least 1")
        for name, value, known in (("ranking", self.ranking, RANKINGS), ("rerank_by", self.rerank_by, RERANKINGS)):
            if value not in known:
                raise UsageError(f"{name}={value!r}; use one of {', '.join(known)}")
        if self.rerank is not None and self.rerank < self.k:
            raise UsageError(f"{self.rerank} candidates cannot be re-ranked to {self.k} neighbours; use at least k")
        if self.rerank_by == "asymmetric" and self.ranking != "hamming":
            raise UsageError(f"the {self.ranking} order cannot be re-ranked by asymmetric distance; rank by hamming")

    @property
    def depth(self) -> int:
        """Neighbours that are taken from the codes."""
        return self.k if self.rerank is None else self.rerank

    @property
    def order(self) -> str:
        """The distance by which neighbours are sorted in the end."""
        return self.ranking if self.rerank is None else self.rerank_by

    @property
    def refined(self) -> bool:
        return self.rerank is not None

    @property
    def sought(self) -> dict[str, int] | None:
        return {"k": self.depth} if self.ranking == "hamming" else None

    def width(self, index: Index) -> int:
        return min(self.depth, index.live_rows)

    def prepare(self, hasher: Hasher, vectors: np.ndarray) -> QueryBatch:
        if "asymmetric" in (self.ranking, self.order):
            return QueryBatch(*hasher.query_weights(vectors))
        return super().prepare(hasher, vectors)

    def chunk(self, codes: HeldCodes, queries: QueryBatch, so_far: NearestPart | None = None) -> NearestPart:
        k, block, live = self.depth, codes.block, codes.live
        if self.ranking == "asymmetric":
            assert queries.weights is not None  # added by prepare for this ranking
            distances, rows = asymmetric.weighted_top_k(queries.codes, queries.weights, block, k, live=live)
        elif self.ranking == "spherical":
            distances, rows = asymmetric.spherical_top_k(queries.codes, block, k, live=live)
        else:
            limits = None
            if so_far is not None and so_far[0].shape[1] == k:
                limits = np.ascontiguousarray(so_far[0][:, -1])
            if codes.tables is not None:
                distances, rows = codes.tables.top_k(queries.codes, k, live=live, limits=limits)
            else:
                distances, rows = hamming.hamming_top_k(queries.codes, block, k, live=live, limits=limits)
        return distances, codes.numbered(rows)

    def combine(self, parts: Sequence[NearestPart]) -> NearestPart:
        return hamming.merge_top_k(parts, self.depth)

    def finalise(self, part: NearestPart, queries: QueryBatch, vectors: np.ndarray, searcher: Searcher) -> Neighbors:
        (distances, rows), unranked = part, None
        if self.rerank is not None:
            unranked = rows[:, : self.k]
            if self.order == "euclidean":
                distances = euclidean_distances(searcher.corpus, vectors, rows, searcher.context)
            else:
                distances = searcher.weigh(replace(queries, rows=rows))
            first = np.lexsort((rows, distances), axis=1)[:, : self.k]
            distances, rows = np.take_along_axis(distances, first, 1), np.take_along_axis(rows, first, 1)
        if self.order == "asymmetric":
            assert queries.scales is not None  # come with the weights
            distances = distances * queries.scales[:, None]
        ids = searcher.corpus.read_ids(rows.reshape(-1)).reshape(rows.shape) if self.ids else None
        return Neighbors(distances, rows, ids, unranked)


@dataclass(frozen=True)
class WithinRadius(Question):
    """All codes at a Hamming distance of at most ``radius``; a partition answers with (indptr, distances, rows)."""

    radius: int
    ids: bool = False

    ahead = 0  # how many queries are asked next depends on the last answer

    def __post_init__(self) -> None:
        if self.radius < 0:
            raise UsageError(f"radius={self.radius}; use a Hamming distance of at least 0")

    @property
    def sought(self) -> dict[str, int]:
        return {"radius": self.radius}

    def batch_size(self, index: Index, asked: int = 0, part: RadiusPart | None = None) -> int:
        if part is None:
            return FIRST_RADIUS_BATCH
        per_query = max(1, int(np.diff(part[0]).max()))
        return min(MAX_BATCH, 4 * asked, max(1, RADIUS_MATCHES // per_query))

    def chunk(self, codes: HeldCodes, queries: QueryBatch, so_far: Any = None) -> RadiusPart:
        if codes.tables is not None:
            indptr, distances, rows = codes.tables.radius(queries.codes, self.radius, live=codes.live)
        else:
            indptr, distances, rows = hamming.hamming_radius(queries.codes, codes.block, self.radius, live=codes.live)
        return indptr, distances, codes.numbered(rows)

    def combine(self, parts: Sequence[RadiusPart]) -> RadiusPart:
        return hamming.merge_radius(parts)

    def join(self, parts: Sequence[RadiusPart]) -> RadiusPart:
        counts = np.concatenate([np.diff(indptr) for indptr, _, _ in parts])
        return hamming.indptr_of(counts), *super().join([part[1:] for part in parts])

    def finalise(self, part: RadiusPart, queries: Any, vectors: np.ndarray, searcher: Searcher) -> RadiusNeighbors:
        return RadiusNeighbors(*part, searcher.corpus.read_ids(part[2]) if self.ids else None)


@dataclass(frozen=True)
class Histogram(Question):
    """(q, bits + 1): how many codes lie at each Hamming distance."""

    def width(self, index: Index) -> int:
        return index.bits + 1

    def chunk(self, codes: HeldCodes, queries: QueryBatch, so_far: Any = None) -> np.ndarray:
        return hamming.hamming_histogram(queries.codes, codes.block, live=codes.live)

    def combine(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.sum(parts, axis=0)


@dataclass(frozen=True)
class Weigh(Question):
    """Asymmetric distances (q, m) of ``queries.rows`` (q, m); -1 for rows that another partition holds."""

    def chunk(self, codes: HeldCodes, queries: QueryBatch, so_far: Any = None) -> np.ndarray:
        assert queries.rows is not None  # both are given for this question
        assert queries.weights is not None
        places = queries.rows - codes.start
        inside = (places >= 0) & (queries.rows < codes.stop)
        if codes.row_numbers is not None:
            places = np.searchsorted(codes.row_numbers, queries.rows)
            inside &= codes.row_numbers[np.minimum(places, codes.block.n - 1)] == queries.rows
        packed = codes.packed()[np.where(inside, places, 0)]
        return np.where(inside, asymmetric.weighted_pairs(queries.codes, queries.weights, packed), -1)

    def combine(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.max(parts, axis=0)


def euclidean_distances(
    corpus: Corpus, vectors: np.ndarray, rows: np.ndarray, context: Context, most_pairs: int = MAX_PAIRS
) -> np.ndarray:
    """Exact distances (q, m) of query ``vectors`` (q, d) to their candidate ``rows`` (q, m) of the corpus.

    Only the chunks that hold a candidate are read, each once for about ``most_pairs`` pairs.
    """
    squared = np.empty(rows.shape)
    step = max(1, most_pairs // max(1, rows.shape[1]))
    firsts = [start for start, _ in corpus.partitions()][1:]
    for start in range(0, len(rows) if rows.size else 0, step):
        part = rows[start : start + step]
        order = np.argsort(part, axis=None, kind="stable")
        ascending, queries = part.reshape(-1)[order], order // part.shape[1]
        cuts = np.searchsorted(ascending, firsts)
        pairs = zip(np.split(ascending, cuts), np.split(queries, cuts), strict=True)
        measured = reduce_tasks(
            partial(measure_pairs, corpus.ref),
            [pair for pair in pairs if len(pair[0])],
            np.concatenate,
            client=context.client,
            name="measure_pairs",
            shared=vectors[start : start + step],
        )
        squared[start : start + step].reshape(-1)[order] = measured
    return np.sqrt(squared)


def measure_pairs(corpus: CorpusRef, pairs: tuple[np.ndarray, np.ndarray], vectors: np.ndarray) -> np.ndarray:
    """Squared distances (p,) of global rows (p,), ascending, to the queries (p,) they are paired with."""
    rows, queries = pairs
    squared = np.empty(len(rows))
    wanted, which = np.unique(rows, return_inverse=True)
    for places, block in corpus.open().vectors_at(wanted):
        here = slice(*np.searchsorted(which, (places[0], places[-1] + 1)))
        squared[here] = exact_distances(vectors, block, queries[here], which[here] - places[0])
    return squared
