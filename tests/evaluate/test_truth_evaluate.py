"""Truth and evaluation, against the whole table of distances and an official ground truth."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from och_dist.encode.stage import encode
from och_dist.errors import BadInputError, ConflictError, UsageError
from och_dist.evaluate import exact as stage
from och_dist.evaluate import stage as evaluate_stage
from och_dist.evaluate.exact import truth
from och_dist.evaluate.stage import evaluate
from och_dist.kernels.ranking import evaluate_histograms
from och_dist.search.stage import open_index, search
from och_dist.stage import Context
from och_dist.store.corpus import open_corpus
from och_dist.store.results import open_neighbors
from tests.support.stage_data import all_codes, clustered, corpus_of

SHARED = Path(os.environ.get("OCH_SHARED_DATA") or Path(__file__).parents[3] / "shared" / "data")


@pytest.fixture(scope="module")
def queries() -> np.ndarray:
    return clustered(17, seed=9)


def brute(values: np.ndarray, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k smallest (distance, row) of every query, from the whole table."""
    squared = ((queries.astype(np.float64)[:, None] - values.astype(np.float64)[None]) ** 2).sum(axis=2)
    order = np.argsort(squared, axis=1, kind="stable")[:, :k]
    return np.sqrt(np.take_along_axis(squared, order, axis=1)), order


def check(output: str, values: np.ndarray, queries: np.ndarray, k: int) -> None:
    stored = open_neighbors(output)
    found = stored.read(0, stored.queries)
    distances, rows = brute(values, queries, k)
    np.testing.assert_array_equal(found.rows, rows)
    np.testing.assert_allclose(found.distances, distances, rtol=1e-12)


@pytest.mark.parametrize("k", [1, 10, 299, 300, 1000])
@pytest.mark.parametrize("chunk_rows", [299, 100, 77, 300, 13])
def test_truth_is_that_of_brute_force(
    chunk_rows: int, k: int, vectors: np.ndarray, queries: np.ndarray, tmp_path: Path
) -> None:
    corpus, output = corpus_of(tmp_path, vectors[:300], chunk_rows=chunk_rows), str(tmp_path / "truth.zarr")
    report = truth(corpus, queries, output, k=k)
    assert (report.facts["k"], report.facts["queries"], report.facts["rows"]) == (min(k, 300), 17, 300)
    check(output, vectors[:300], queries, k)


@pytest.mark.parametrize("dtype", ["<f2", "<f8", "|u1", "|i1"])
def test_truth_of_other_dtypes_and_ties(dtype: str, tmp_path: Path) -> None:
    values = clustered(200, dim=4).round().astype(dtype)  # many equal distances
    for part in np.split(values, [50, 51]):
        corpus = corpus_of(tmp_path, part, chunk_rows=30)
    output = str(tmp_path / "truth.zarr")
    truth(corpus, values[::9], output, k=50)
    check(output, values, values[::9], 50)


def test_a_wrong_guess_costs_time_only(queries: np.ndarray, tmp_path: Path) -> None:
    """Limits are guessed from the rows of four chunks. Here these hold rows that are near some of the queries, and too
    few of them, so that the limits of these queries are too low; the answer stays exact."""
    values, asked = clustered(300), queries.copy()
    for chunk in (0, 9, 19, 29):
        values[10 * chunk : 10 * chunk + 4] = 100 + 0.1 * values[10 * chunk : 10 * chunk + 4]
    asked[::3] = 100 + 0.1 * asked[::3]
    corpus, output = corpus_of(tmp_path, values, chunk_rows=10), str(tmp_path / "truth.zarr")
    limits = stage._guess(open_corpus(corpus), asked, 20, stage.NO_ROWS, Context())
    short = limits < brute(values, asked, 20)[0][:, -1] ** 2
    assert short[::3].all()
    assert not short.all()
    truth(corpus, asked, output, k=20)
    check(output, values, asked, 20)


def test_the_guess_is_used(vectors: np.ndarray, queries: np.ndarray, corpus: str) -> None:
    opened = open_corpus(corpus)
    limits = stage._guess(opened, queries, 10, stage.NO_ROWS, Context())
    assert np.isfinite(limits).all()
    assert (limits >= brute(vectors, queries, 10)[0][:, -1] ** 2).mean() > 0.9
    assert np.isinf(stage._guess(opened, queries, len(vectors), stage.NO_ROWS, Context())).all()


def test_batches_of_queries(
    vectors: np.ndarray, queries: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "MAX_QUERIES", 5)
    output = str(tmp_path / "truth.zarr")
    seen: list[Any] = []
    context = Context(progress=lambda name, total: seen.append((name, total)) or seen.append)
    truth(corpus_of(tmp_path, vectors[:300]), queries, output, k=20, context=context)
    assert seen == [("truth", 17), 5, 5, 5, 2]
    check(output, vectors[:300], queries, 20)


def test_a_fraction_of_the_corpus(corpus: str, vectors: np.ndarray, queries: np.ndarray, tmp_path: Path) -> None:
    output = str(tmp_path / "truth.zarr")
    assert truth(corpus, queries, output, fraction=0.02).facts["k"] == 20
    check(output, vectors, queries, 20)
    assert truth(corpus, queries, output, k=20).status == "nothing to do"
    assert truth(corpus, queries, output, k=21).status == "done"


@pytest.mark.parametrize("wrong", [{}, {"k": 3, "fraction": 0.1}, {"k": 0}, {"fraction": 0.0}, {"fraction": 1.5}])
def test_impossible_numbers_are_refused(
    wrong: dict[str, Any], corpus: str, queries: np.ndarray, tmp_path: Path
) -> None:
    with pytest.raises(UsageError):
        truth(corpus, queries, str(tmp_path / "truth.zarr"), **wrong)


def test_siftsmall_has_its_official_neighbours(tmp_path: Path) -> None:
    if not (SHARED / "siftsmall_base.npy").exists():
        pytest.skip(f"{SHARED} has no siftsmall_base.npy; set OCH_SHARED_DATA")
    base, queries = np.load(SHARED / "siftsmall_base.npy"), np.load(SHARED / "siftsmall_query.npy")
    official = np.load(SHARED / "siftsmall_groundtruth.npy")
    output = str(tmp_path / "truth.zarr")
    truth(corpus_of(tmp_path, base, chunk_rows=3000), queries, output, k=100)
    found = open_neighbors(output).read_rows(0, len(queries))
    different = np.argwhere(found != official)
    for query, place in different:  # the official lists order equal distances in their own way
        pair = base[[found[query, place], official[query, place]]].astype(np.int64)
        first, second = ((pair - queries[query].astype(np.int64)) ** 2).sum(axis=1)
        assert first == second, f"query {query}, place {place}"
    assert len(different) < 0.01 * official.size


@pytest.fixture(scope="module")
def judged(
    vectors: np.ndarray, corpus: str, model: str, queries: np.ndarray, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    """(index, truth) over the whole corpus; nobody writes to them."""
    folder = tmp_path_factory.mktemp("judged")
    encode(corpus, str(folder / "index"), model=model, chunk_rows=130)
    truth(corpus, queries, str(folder / "truth.zarr"), k=25)
    return str(folder / "index"), str(folder / "truth.zarr")


def distance_table(index: str, queries: np.ndarray) -> np.ndarray:
    codes = open_index(index).encode(queries)
    return np.bitwise_count(codes[:, None] ^ all_codes(index)[None]).sum(axis=2, dtype=np.int64)


@pytest.mark.parametrize(("threads", "most_bytes"), [(1, 1 << 20), (3, 1 << 20), (100, 1 << 20), (2, 8 * 130)])
def test_every_distance_is_counted_once(threads: int, most_bytes: int, judged: tuple[str, str]) -> None:
    memory = evaluate_stage.HELD_TIMES * most_bytes
    tasks = evaluate_stage.plan_counts(open_index(judged[0]).index, open_neighbors(judged[1]), threads, memory)
    counted = np.zeros((17, 1000), int)
    for task in tasks:
        counted[task.start : task.stop, task.chunks[0].start : task.chunks[-1].stop] += 1
    assert (counted == 1).all()
    assert len(tasks) >= min(17, 4 * threads)


@pytest.mark.parametrize("query_bytes", [1, 25 * 8 * 4, 32 << 20])
def test_evaluation_is_that_of_the_whole_table(
    query_bytes: int,
    judged: tuple[str, str],
    vectors: np.ndarray,
    queries: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluate_stage, "QUERY_BYTES", query_bytes)
    index, neighbours = judged
    facts = evaluate(index, queries, neighbours).facts
    table, true = distance_table(index, queries), brute(vectors, queries, 25)[1]
    rows, relevant = np.zeros((17, 21), np.int64), np.zeros((17, 21), np.int64)
    for query in range(17):
        for row in range(1000):
            rows[query, table[query, row]] += 1
            relevant[query, table[query, row]] += row in true[query]
    expected = evaluate_histograms(rows, relevant)
    assert {name: facts[name] for name in expected} == expected
    assert (facts["truth_k"], facts["bits"], facts["queries"], facts["rows"]) == (25, 20, 17, 1000)


def test_measures_by_the_book(judged: tuple[str, str], vectors: np.ndarray, queries: np.ndarray) -> None:
    """Average precision and recall from ranked lists, by loops."""
    index, neighbours = judged
    facts = evaluate(index, queries, neighbours).facts
    table, true = distance_table(index, queries), brute(vectors, queries, 25)[1]
    precisions, recalls = [], []
    for query in range(17):
        within = [int((table[query] <= table[query, row]).sum()) for row in true[query]]
        found = [int((table[query, true[query]] <= table[query, row]).sum()) for row in true[query]]
        precisions.append(np.mean([f / w for f, w in zip(found, within, strict=True)]))
        chance = []
        for row in true[query]:
            nearer = int((table[query] < table[query, row]).sum())
            ties = int((table[query] == table[query, row]).sum())
            chance.append(min(max(50 - nearer, 0), ties) / ties)
        recalls.append(np.mean(chance))
    assert facts["map_group"] == pytest.approx(np.mean(precisions), rel=1e-12)
    assert facts["recall"][facts["ks"].index(50)] == pytest.approx(np.mean(recalls), rel=1e-12)


def test_evaluation_is_kept_and_found_again(judged: tuple[str, str], queries: np.ndarray, tmp_path: Path) -> None:
    output = str(tmp_path / "deep" / "report.json")
    first = evaluate(*judged[:1], queries, judged[1], output=output)
    second = evaluate(*judged[:1], queries, judged[1], output=output)
    assert (first.status, second.status) == ("done", "nothing to do")
    assert first.facts == second.facts
    assert json.loads(Path(output).read_text())["map"] == first.facts["map"]
    assert [path.name for path in Path(output).parent.iterdir()] == ["report.json"]
    Path(output).write_text("{}")
    assert evaluate(*judged[:1], queries, judged[1], output=output).status == "done"


def test_a_truth_that_does_not_fit_is_refused(
    judged: tuple[str, str], vectors: np.ndarray, corpus: str, model: str, queries: np.ndarray, tmp_path: Path
) -> None:
    index, neighbours = judged
    with pytest.raises(ConflictError, match="other queries"):
        evaluate(index, queries[:16], neighbours)
    with pytest.raises(ConflictError, match="other queries"):
        evaluate(index, queries + np.float32(1), neighbours)
    with pytest.raises(BadInputError, match="5-d, the index is 16-d"):
        evaluate(index, queries[:, :5], neighbours)
    with pytest.raises(BadInputError, match="no queries"):
        evaluate(index, queries[:0], neighbours)
    with pytest.raises(BadInputError, match="holds no neighbours"):
        evaluate(index, queries, str(tmp_path / "nowhere.zarr"))
    search(index, queries, k=25, output=str(tmp_path / "found.zarr"))
    with pytest.raises(BadInputError, match="hamming neighbours"):
        evaluate(index, queries, str(tmp_path / "found.zarr"))
    truth(corpus_of(tmp_path / "short", vectors[:900]), queries, str(tmp_path / "short.zarr"), k=25)
    with pytest.raises(ConflictError, match="over 900 rows, the index has 1000"):
        evaluate(index, queries, str(tmp_path / "short.zarr"))
    truth(corpus_of(tmp_path / "other", vectors[::-1]), queries, str(tmp_path / "other.zarr"), k=25)
    with pytest.raises(ConflictError, match="over another corpus"):
        evaluate(index, queries, str(tmp_path / "other.zarr"))
