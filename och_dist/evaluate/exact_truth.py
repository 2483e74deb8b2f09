"""Exact Euclidean neighbours of queries over a whole corpus, streaming: the ground truth of an evaluation."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

from och_dist.errors import UsageError
from och_dist.evaluate.exact import exact_neighbors, piece_size
from och_dist.options import Option, QueryDataset, ResultFile, checked
from och_dist.sources import open_queries
from och_dist.stage import Context, Report, Stopwatch, require_room
from och_dist.store import canonical, check_output, open_corpus, read_about, save_neighbors, sha256


@checked
def truth(
    corpus: str,
    queries: Any,
    output: Annotated[str, ResultFile],
    *,
    k: Annotated[int | None, Option("Neighbours per query.", flags="-k", at_least=1)] = None,
    fraction: Annotated[
        float | None, Option("Share of the corpus that counts as neighbours, such as 0.02.", above=0, at_most=1)
    ] = None,
    dataset: QueryDataset = None,
    context: Context | None = None,
) -> Report:
    """Write the ``k`` (or the nearest ``fraction`` of the corpus) exact neighbours of every query."""
    watch, context = Stopwatch("truth"), context or Context()
    check_output(output)
    opened, asked = open_corpus(corpus), open_queries(queries, dataset=dataset)
    asked.require_dim(opened.dim, "the corpus")
    k = _resolve_k(opened.rows, k, fraction)
    width = min(k, opened.rows) if asked.rows else k
    about = {
        "kind": "euclidean",
        "key": sha256(canonical([opened.fingerprint, asked.fingerprint, k])),
        "k": k,
        "rows": opened.rows,
        "corpus_fingerprint": opened.fingerprint,
        "queries_fingerprint": asked.fingerprint,
    }
    facts: dict[str, Any] = {
        "corpus": opened.url,
        "queries": asked.rows,
        "k": width,
        "rows": opened.rows,
        "output": output,
    }
    if output.endswith(".zarr") and (read_about(output) or {}).get("key") == about["key"]:
        return watch.report("nothing to do", **facts)
    require_room(opened, context, "a pass over the corpus")
    with contextlib.closing(exact_neighbors(opened, asked.read, asked.rows, k, context)) as found:
        save_neighbors(output, found, queries=asked.rows, width=width, batch=piece_size(width), about=about)
    return watch.report(**facts)


def _resolve_k(rows: int, k: int | None, fraction: float | None) -> int:
    if k is not None and fraction is None:
        return k
    if fraction is not None and k is None:
        return max(1, int(fraction * rows))
    raise UsageError(f"k={k}, fraction={fraction}; give exactly one of -k and --fraction")
