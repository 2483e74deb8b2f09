"""Exact Hamming neighbours of queries over an index version, written to a file or returned in the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np

from och_dist.errors import BadInputError, ConflictError, UsageError
from och_dist.options import IDS, ROWS, ExpectModel, Option, QueryDataset, ResultFile, checked
from och_dist.search.choice import Way
from och_dist.search.filters import Selection
from och_dist.search.questions import Ranking
from och_dist.search.searcher import RerankBy, Searcher, SearchOptions, batch_size, open_index
from och_dist.sources import Queries, open_queries
from och_dist.stage import Context, Report, Stopwatch
from och_dist.store import (
    Neighbors,
    StoredNeighbors,
    canonical,
    check_output,
    open_neighbors,
    read_about,
    save_histograms,
    save_neighbors,
    save_radius,
    sha256,
)

__all__ = ["Searcher", "open_index", "search"]

DEFAULT_K = 100
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
    method: Annotated[Way, Option("A flat scan, bucket tables (see 'och tables'), or the faster.")] = "auto",
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
        check_output(output)
    if k is not None and radius is not None:
        raise UsageError(f"k={k} and radius={radius}; a search takes one of them")
    opening = open_index(
        index, client=context.client, version=version, corpus=corpus, method=method, expect_model=expect_model
    )
    with opening as searcher:
        chosen = searcher.choose(only, without, only_ids=only_ids, without_ids=without_ids)
        opened = open_queries(queries, dataset=dataset)
        opened.require_dim(searcher.model.hasher.n_features_in_, "the index")
        if histogram:
            if (k, radius, rerank, truth, ids, ranking) != (None, None, None, None, False, "hamming"):
                raise UsageError(
                    "a histogram counts all codes by Hamming distance; leave out -k, --radius, --ranking, --rerank, "
                    "--ids and --truth"
                )
            return _count_distances(searcher, opened, chosen, output, watch, context)
        if radius is not None:
            if rerank is not None or ranking != "hamming" or truth is not None:
                raise UsageError("a radius is a Hamming distance; leave out --ranking, --rerank and --truth")
            return _search_radius(searcher, opened, radius, chosen, ids, output, watch, context)
        options = SearchOptions(DEFAULT_K if k is None else k, chosen, ranking, rerank, rerank_by, ids)
        return _search_nearest(searcher, opened, options, output, truth, watch, context)


def _facts(searcher: Searcher, queries: Queries, output: str | None) -> dict[str, Any]:
    return {
        "index": searcher.index.url,
        "version": searcher.index.version,
        "queries": queries.rows,
        "rows": searcher.live_rows,
        "source": queries.source,
        "output": output,
    }


def _about(searcher: Searcher, queries: Queries, kind: str, chosen: Selection, *asked: Any) -> dict[str, Any]:
    """What a stored result says about itself; ``key`` stands for everything it depends on."""
    key = canonical([searcher.index.to_json(), queries.fingerprint, chosen.fingerprint if chosen else None, *asked])
    return {"kind": kind, "key": sha256(key), "index_version": searcher.index.version, "model": searcher.index.model}


def _is_there(output: str | None, about: dict[str, Any]) -> bool:
    return output is not None and output.endswith(".zarr") and (read_about(output) or {}).get("key") == about["key"]


def _search_nearest(
    searcher: Searcher,
    queries: Queries,
    options: SearchOptions,
    output: str | None,
    truth: str | None,
    watch: Stopwatch,
    context: Context,
) -> Report:
    selected = _selected_rows(searcher, options.selection)
    width = min(options.k, selected) if queries.rows else options.k
    asked = (options.k, options.ranking, options.rerank, options.rerank_by if options.rerank else None, options.ids)
    about = {**_about(searcher, queries, options.ranking, options.selection, *asked), "k": options.k}
    if options.ids:
        about |= {"ids": searcher.corpus.ids, "id_width": searcher.corpus.id_width}
    facts = {**_facts(searcher, queries, output), "k": width, "ranking": options.ranking, "rerank": options.rerank}
    recall = None if truth is None else Recall(truth, searcher, queries)
    if recall is None and _is_there(output, about):
        return watch.report("nothing to do", **facts)
    advance = context.progress("search", queries.rows)

    def counted() -> Iterator[Neighbors]:
        for part in searcher.batches(queries, options, advance):
            if recall is not None:
                recall.add(part)
            yield part

    if output is None:
        lists = [entry for part in counted() for entry in _lists(part)]
        return watch.report(**facts, plan=searcher.plan, **_recalled(recall), neighbors=lists)
    size = batch_size(min(options.depth, searcher.live_rows))
    save_neighbors(output, counted(), queries=queries.rows, width=width, batch=size, about=about)
    return watch.report(**facts, plan=searcher.plan, **_recalled(recall))


def _recalled(recall: Recall | None) -> dict[str, Any]:
    return {} if recall is None else recall.facts()


def _lists(part: Neighbors) -> Iterator[dict[str, list[Any]]]:
    columns = {name: values.tolist() for name, values in part.columns().items()}
    for query in range(len(part.rows)):
        yield {name: values[query] for name, values in columns.items()}


def _selected_rows(searcher: Searcher, chosen: Selection) -> int:
    """How many rows a search can return; counted by a search without distances where rows are chosen or deleted."""
    if not chosen:
        return searcher.live_rows
    total = 0
    for chunk in searcher.index.chunks:
        numbers, live = searcher.index.row_numbers(chunk), searcher.index.live(chunk)
        here = chosen.within(chunk.start, chunk.stop).live(chunk.start, chunk.stop, numbers)
        total += int(np.count_nonzero(here if live is None else here & live))
    return total


def _search_radius(
    searcher: Searcher,
    queries: Queries,
    radius: int,
    chosen: Selection,
    ids: bool,
    output: str | None,
    watch: Stopwatch,
    context: Context,
) -> Report:
    about = {**_about(searcher, queries, "radius", chosen, radius, ids), "radius": radius}
    if ids:
        about |= {"ids": searcher.corpus.ids, "id_width": searcher.corpus.id_width}
    facts = {**_facts(searcher, queries, output), "radius": radius}
    if _is_there(output, about):
        return watch.report("nothing to do", **facts)
    advance = context.progress("search", queries.rows)

    batches = searcher.radius_batches(queries, radius, chosen, ids=ids, advance=advance)
    if output is None:
        lists = [entry for part in batches for entry in part.lists()]
        found = sum(len(entry["rows"]) for entry in lists)
        return watch.report(**facts, found=found, plan=searcher.plan, neighbors=lists)
    found = save_radius(output, batches, about=about)
    return watch.report(**facts, found=found, plan=searcher.plan)


def _count_distances(
    searcher: Searcher, queries: Queries, chosen: Selection, output: str | None, watch: Stopwatch, context: Context
) -> Report:
    about = _about(searcher, queries, "histogram", chosen)
    facts = {**_facts(searcher, queries, output), "bits": searcher.index.bits}
    if _is_there(output, about):
        return watch.report("nothing to do", **facts)
    batches = searcher.histogram_batches(queries, chosen, context.progress("search", queries.rows))
    if output is None:
        lists = [{"counts": counts} for part in batches for counts in part.tolist()]
        return watch.report(**facts, histograms=lists)
    bits = searcher.index.bits
    save_histograms(output, batches, queries=queries.rows, bits=bits, batch=batch_size(bits + 1), about=about)
    return watch.report(**facts)


class Recall:
    """Share of the true nearest neighbours among as many found, and among those found before re-ranking."""

    def __init__(self, truth: str, searcher: Searcher, queries: Queries) -> None:
        self.truth = open_neighbors(truth)
        self.done = 0
        self.sums: dict[str, float] = {}
        check_truth(searcher, queries, self.truth)

    def add(self, part: Neighbors) -> None:
        """Count the neighbours of the next queries."""
        true = self.truth.read_rows(self.done, self.done + len(part.rows))
        self.done += len(part.rows)
        orders = {"recall": part.rows, **({} if part.unranked is None else {"recall_unranked": part.unranked})}
        for name, rows in orders.items():
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
