"""How well the newest version of an index does on a fixed set of queries: exact neighbours, then the evaluation."""

from __future__ import annotations

from typing import Annotated

from och_dist.errors import UsageError
from och_dist.evaluate.exact_truth import truth
from och_dist.evaluate.stage import evaluate
from och_dist.options import Option, QueryDataset, checked
from och_dist.stage import Context, Report, Stopwatch
from och_dist.store import find_index


@checked
def measure_quality(
    corpus: str,
    index: str,
    queries: str,
    folder: str,
    *,
    k: Annotated[int, Option("True neighbours of a query.", at_least=1)] = 100,
    dataset: QueryDataset = None,
    context: Context | None = None,
) -> Report:
    """Evaluate ``index`` on ``queries``; truth and figures are kept in ``folder``, and made anew for a new version.

    Without queries ('') there is nothing to do, and neither is there with deleted rows, which the truth would count.
    """
    watch, current = Stopwatch("quality"), find_index(index)
    if not queries:
        return watch.report("nothing to do", why="no queries are named")
    if "://" in folder:
        raise UsageError(f"folder={folder!r}: results are written to a local path; name one")
    if current is None or current.live_rows < current.rows:
        return watch.report("nothing to do", why="no version, or one with deleted rows")
    place = f"{folder}/truth.zarr"
    truth(corpus, queries, place, k=k, dataset=dataset, context=context)
    report = evaluate(index, queries, place, output=f"{folder}/evaluation.json", dataset=dataset, context=context)
    return watch.report(report.status, **report.facts)
