"""Exact Hamming neighbours of queries over an index version, written to a file or returned in the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from typing import Annotated, Any

import numpy as np

from och_dist import store
from och_dist.errors import BadInputError, ConflictError, UsageError
from och_dist.options import IDS, ROWS, ExpectModel, Option, QueryDataset, ResultFile, checked
from och_dist.search.filters import Selection
from och_dist.search.plan import SearchMethod
from och_dist.search.questions import Histogram, Nearest, Question, Ranking, RerankBy, WithinRadius
from och_dist.search.searcher import Searcher, open_index
from och_dist.sources import Queries, open_queries
from och_dist.stage import Context, Report, Status, Stopwatch
from och_dist.store import Neighbors, RadiusNeighbors, StoredNeighbors

RECALLS = (10, 100)


@checked
def search(
    index: str,
    queries: Any,
    *,
    k: Annotated[int | None, Option("Neighbours per query [default: 100].", flags="-k")] = None,
    radius: Annotated[int | None, Option("All codes up to this Hamming distance, instead of the K nearest.")] = None,
    histogram: Annotated[bool, Option("How many codes lie at each distance, instead of which.")] = False,
    output: Annotated[str | None, ResultFile] = None,
    only: Annotated[Any, Option(f"Only these rows: {ROWS}.", metavar="ROWS")] = None,
    without: Annotated[Any, Option("None of these rows.", metavar="ROWS")] = None,
    only_ids: Annotated[Any, Option(f"Only rows with these ids: {IDS}.", metavar="IDS")] = None,
    without_ids: Annotated[Any, Option("No rows with these ids.", metavar="IDS")] = None,
    ranking: Annotated[Ranking, Option("What is near: by bits, or by how sure each bit is.")] = "hamming",
    rerank: Annotated[int | None, Option("Order the first R anew and keep the K nearest.", metavar="R")] = None,
    rerank_by: Annotated[RerankBy, Option("By their vectors in the corpus, or by asymmetric distance.")] = "euclidean",
    method: Annotated[SearchMethod, Option("A flat scan, bucket tables (see 'och tables'), or the faster.")] = "auto",
    ids: Annotated[bool, Option("Add the corpus' own ids of the rows.")] = False,
    truth: Annotated[
        str | None, Option("Exact neighbours (och truth): report recall@10 and @100.", metavar="FILE")
    ] = None,
    corpus: Annotated[
        str | None, Option("Where the vectors lie now [default: where they were encoded].", metavar="PATH")
    ] = None,
    dataset: QueryDataset = None,
    version: Annotated[int | None, Option("Search this version of the index [default: the newest].")] = None,
    expect_model: ExpectModel = None,
    context: Context | None = None,
) -> Report:
    """Find the ``k`` nearest codes of every query, or all within ``radius``, or count those at each distance.

    Without an ``output`` the neighbours are in the report.
    """
    watch, context = Stopwatch("search"), context or Context()
    if output is not None:
        store.check_output(output)
    if k is not None and radius is not None:
        raise UsageError(f"k={k} and radius={radius}; a search takes one of them")
    if histogram and (k, radius, rerank, truth, ids, ranking) != (None, None, None, None, False, "hamming"):
        raise UsageError(
            "a histogram counts all codes by Hamming distance; leave out -k, --radius, --ranking, --rerank, --ids "
            "and --truth"
        )
    if radius is not None and (rerank, ranking, truth) != (None, "hamming", None):
        raise UsageError("a radius is a Hamming distance; leave out --ranking, --rerank and --truth")
    question: Question = Nearest(Nearest.k if k is None else k, ranking, rerank, rerank_by, ids)
    if histogram:
        question = Histogram()
    elif radius is not None:
        question = WithinRadius(radius, ids)
    opening = open_index(
        index, client=context.client, version=version, corpus=corpus, method=method, expect_model=expect_model
    )
    with opening as searcher:
        chosen = searcher.choose(only, without, only_ids=only_ids, without_ids=without_ids)
        opened = open_queries(queries, dataset=dataset)
        opened.require_dim(searcher.model.hasher.n_features_in_, "the index")
        recall = None if truth is None else Recall(truth, searcher, opened)
        status, facts = _answer(question, searcher, opened, chosen, output, recall, context)
        return watch.report(status, **facts)


def _answer(
    question: Question,
    searcher: Searcher,
    queries: Queries,
    chosen: Selection,
    output: str | None,
    recall: Recall | None,
    context: Context,
) -> tuple[Status, dict[str, Any]]:
    """Ask the question about all queries, in batches that are written or listed as they come."""
    index = searcher.index
    asked, kind, more = _described(question, searcher, queries, chosen)
    key = store.canonical([index.to_json(), queries.fingerprint, chosen.fingerprint if chosen else None, *asked])
    about = {"key": store.sha256(key), "index_version": index.version, "model": index.model, **kind}
    facts = {
        "index": index.url,
        "version": index.version,
        "queries": queries.rows,
        "rows": searcher.live_rows,
        "source": queries.source,
        "output": output,
        **more,
    }
    stored = output is not None and output.endswith(".zarr") and store.read_about(output)
    if recall is None and stored and stored.get("key") == about["key"]:
        return "nothing to do", facts
    answers = searcher.ask(question, queries, chosen, context.progress("search", queries.rows))
    if recall is not None:
        answers = recall.watch(answers)
    sizes = {"queries": queries.rows, "batch": question.batch_size(index)}
    lists = []
    if output is None:
        lists = [entry for part in answers for entry in _entries(part)]
        if isinstance(question, WithinRadius):
            facts["found"] = sum(len(entry["rows"]) for entry in lists)
    elif isinstance(question, WithinRadius):
        facts["found"] = store.save_radius(output, answers, about=about)
    elif isinstance(question, Histogram):
        store.save_histograms(output, answers, bits=index.bits, about=about, **sizes)
    else:
        store.save_neighbors(output, answers, width=facts["k"], about=about, **sizes)
    if not isinstance(question, Histogram):
        facts["plan"] = searcher.plan
    if recall is not None:
        facts |= recall.facts()
    if output is None:
        facts["histograms" if isinstance(question, Histogram) else "neighbors"] = lists
    return "done", facts


def _described(
    question: Question, searcher: Searcher, queries: Queries, chosen: Selection
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """What a result depends on beside index, queries and chosen rows, what its file says of it, and the report."""
    if isinstance(question, Histogram):
        return (), {"kind": "histogram"}, {"bits": searcher.index.bits}
    assert isinstance(question, Nearest | WithinRadius)  # those that this stage makes
    ids = {"ids": searcher.corpus.ids, "id_width": searcher.corpus.id_width} if question.ids else {}
    if isinstance(question, WithinRadius):
        return astuple(question), {"kind": "radius", "radius": question.radius, **ids}, {"radius": question.radius}
    by = question.rerank_by if question.rerank else None
    width = min(question.k, _selected_rows(searcher, chosen)) if queries.rows else question.k
    return (
        (question.k, question.ranking, question.rerank, by, question.ids),
        {"kind": question.ranking, "k": question.k, **ids},
        {"k": width, "ranking": question.ranking, "rerank": question.rerank},
    )


def _entries(part: Neighbors | RadiusNeighbors | np.ndarray) -> Iterator[dict[str, list[Any]]]:
    """What one query after the other gave."""
    if isinstance(part, RadiusNeighbors):
        return part.lists()
    columns = {"counts": part} if isinstance(part, np.ndarray) else part.columns()
    lists = zip(*(values.tolist() for values in columns.values()), strict=True)
    return (dict(zip(columns, entry, strict=True)) for entry in lists)


def _selected_rows(searcher: Searcher, chosen: Selection) -> int:
    """How many rows a search can return."""
    if not chosen:
        return searcher.live_rows
    total = 0
    for chunk in searcher.index.chunks:
        live, deleted = chosen.live(chunk.start, chunk.stop), searcher.index.deleted(chunk.start, chunk.stop)
        total += int(np.count_nonzero(live if deleted is None else live & ~deleted))
    return total


class Recall:
    """Share of the true nearest neighbours among as many found, and among those found before re-ranking."""

    def __init__(self, truth: str, searcher: Searcher, queries: Queries) -> None:
        self.truth = store.open_neighbors(truth)
        self.done = 0
        self.sums: dict[str, float] = {}
        check_truth(searcher, queries, self.truth)

    def watch(self, answers: Iterator[Neighbors]) -> Iterator[Neighbors]:
        """The same answers, of which the true neighbours are counted as they pass."""
        for part in answers:
            true = self.truth.read_rows(self.done, self.done + len(part.rows))
            self.done += len(part.rows)
            self._count("recall", part.rows, true)
            if part.unranked is not None:
                self._count("recall_unranked", part.unranked, true)
            yield part

    def _count(self, name: str, rows: np.ndarray, true: np.ndarray) -> None:
        for depth in RECALLS:
            if depth <= min(rows.shape[1], true.shape[1]):
                found = sum(len(np.intersect1d(a[:depth], b[:depth])) for a, b in zip(rows, true, strict=True))
                key = f"{name}_at_{depth}"
                self.sums[key] = self.sums.get(key, 0.0) + found / depth

    def facts(self) -> dict[str, float]:
        return {name: total / max(1, self.done) for name, total in sorted(self.sums.items())}


def check_truth(searcher: Searcher, queries: Queries, truth: StoredNeighbors) -> None:
    """Refuse exact neighbours of other queries, other vectors, or vectors of which some are deleted."""
    about, path, count = truth.about, truth.path, truth.queries
    if about.get("kind") != "euclidean":
        raise BadInputError(f"{path} holds {about.get('kind')} neighbours; give the output of 'och truth'")
    if about.get("queries_fingerprint") != queries.fingerprint or count != queries.rows:
        raise ConflictError(f"{path} was made for other queries than {queries.source}; run 'och truth' for these")
    if about.get("rows") != searcher.rows:
        raise ConflictError(
            f"{path} was made over {about.get('rows')} rows, the index has {searcher.rows}; "
            "bring both to the same corpus version"
        )
    if about.get("corpus_fingerprint") != searcher.index.corpus.get("fingerprint"):
        raise ConflictError(
            f"{path} was made over another corpus than {searcher.index.corpus.get('url')}, of which the index "
            "was made; run 'och truth' on that one"
        )
    if searcher.live_rows != searcher.rows:
        raise ConflictError(
            f"{searcher.rows - searcher.live_rows} rows of {searcher.index.url} are deleted, but {path} counts them "
            "as neighbours; use a version from before the delete with --version"
        )
