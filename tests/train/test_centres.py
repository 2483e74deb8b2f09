"""Centres of a corpus: every trap of Dask-ML's k-means is a test here that its bare use would fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster
from sklearn.cluster import KMeans

from och_dist.cluster import collections_on
from och_dist.methods.base import TrainingData
from och_dist.stage import Context
from och_dist.store.corpus import open_corpus
from och_dist.train.data import (
    Centres,
    count_members,
    draw_rows,
    fill_empty_clusters,
    lloyd,
    lloyd_kmeans,
    seed_centres,
    training_data,
)
from och_dist.train.rows import BLOCK_ROWS, CorpusRows
from tests.support.stage_data import clustered, corpus_of


def brute(values: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, float]:
    """(label of each row, sum of squared distances) by the full table of differences."""
    differences = values.astype(np.float64)[:, None] - centres.astype(np.float64)[None]
    squared = (differences**2).sum(axis=2)
    return squared.argmin(axis=1), float(squared.min(axis=1).sum())


def learn(url: str, count: int, *, context: Context | None = None, **options: Any) -> tuple[TrainingData, Centres]:
    """Training data of a corpus, and the centres with their statistics."""
    source = CorpusRows(open_corpus(url), context or Context())
    found = training_data(source, centres=count, seed=0, **options)
    assert found.centres is not None
    sample = draw_rows(source.rows, options.get("kmeans_rows") or source.rows, 0)
    rows = source.corpus.read(0, source.rows)[sample]
    return found, Centres(found.centres, count_members(rows, found.centres, 0), found.notes)


def counter(values: np.ndarray) -> Any:
    return lambda centres: count_members(values, centres, 0)


def lloyd_here(values: np.ndarray, seeds: np.ndarray, **options: Any) -> np.ndarray:
    options = {"max_iter": 10, "variance": float(values.var(axis=0).mean()), **options}
    with collections_on(None):
        return lloyd(da.from_array(values.astype(np.float32), chunks=(100, -1)), seeds, **options)


def test_seeds_are_distinct_rows() -> None:
    values = np.repeat(clustered(40), 25, axis=0)
    seeds = seed_centres(values, 40, seed=0)
    assert seeds.dtype == np.float32
    assert len(np.unique(seeds, axis=0)) == len(seeds) > 20
    assert {row.tobytes() for row in seeds} <= {row.tobytes() for row in values}


def test_seeds_of_few_distinct_rows() -> None:
    assert len(seed_centres(np.repeat(clustered(3), 50, axis=0), 20, seed=0)) == 3
    assert len(seed_centres(clustered(5), 20, seed=0)) == 5


def test_seeds_come_from_everywhere_in_a_sorted_corpus(tmp_path: Path) -> None:
    blobs = np.arange(40)[:, None] * 100.0 + np.zeros(8)
    values = np.repeat(blobs, 100, axis=0) + np.random.default_rng(0).normal(size=(4000, 8))
    data, _ = learn(corpus_of(tmp_path, values.astype(np.float32)), 40, train_rows=2000, kmeans_rounds=0)
    assert data.centres is not None
    found = np.unique(np.round(data.centres.mean(axis=1) / 100))
    assert len(found) == 40


def test_an_empty_cluster_is_not_left_at_the_origin() -> None:
    values = clustered(600) + 100
    seeds = np.concatenate([values[:9], np.full((1, 16), -1e4, np.float32)])
    moved = lloyd_here(values, seeds)
    settled = fill_empty_clusters(counter(values), moved, 10)
    assert len(settled.vectors) == 10
    assert (settled.stats.counts > 0).all()
    assert np.linalg.norm(settled.vectors, axis=1).min() > 300
    assert settled.notes == ()


def test_duplicate_centres_move_to_rows_that_fit_worst() -> None:
    values = clustered(300)
    values[7] += 50
    values[200] -= 50
    start = np.repeat(values[:1], 5, axis=0)
    settled = fill_empty_clusters(counter(values), start, 5)
    assert len(np.unique(settled.vectors, axis=0)) == 5
    assert {values[7].tobytes(), values[200].tobytes()} <= {row.tobytes() for row in settled.vectors}
    assert (settled.stats.counts > 0).all()


def test_missing_centres_are_found() -> None:
    """Seeds come from a few rows; when those repeat, the others still have the distinct rows that were asked for."""
    values = np.repeat(clustered(1), 300, axis=0)
    values[290:] = clustered(10, seed=1)
    settled = fill_empty_clusters(counter(values), values[:1], 11)
    assert len(settled.vectors) == 11
    assert settled.stats.inertia == 0
    assert settled.notes == ()


@pytest.mark.parametrize("kmeans_rows", [None, 0])
@pytest.mark.parametrize("dtype", ["|u1", "|i1", "<f2", "<f4", "<f8"])
def test_centres_of_every_dtype_are_floats(dtype: str, kmeans_rows: int | None, tmp_path: Path) -> None:
    values = clustered(500).round().clip(0, 100).astype(dtype)
    data, centres = learn(corpus_of(tmp_path, values), 10, kmeans_rows=kmeans_rows)
    assert centres.vectors.dtype == np.float32
    assert (centres.vectors % 1 != 0).any()
    labels, inertia = brute(values, centres.vectors)
    means = np.stack([values[labels == label].mean(axis=0, dtype=np.float64) for label in range(10)])
    assert inertia <= 1.02 * brute(values, means)[1]
    assert data.rows.dtype == np.float32


@pytest.mark.parametrize(
    "options", [{}, {"kmeans_rows": 300, "train_rows": 200}, {"kmeans_rows": 0, "train_rows": 200}]
)
@pytest.mark.parametrize("chunk_rows", [999, 250, 300, 1000])
def test_counts_and_inertia_are_those_of_the_sample(
    options: dict[str, int], chunk_rows: int, vectors: np.ndarray, tmp_path: Path
) -> None:
    _, centres = learn(corpus_of(tmp_path, vectors, chunk_rows=chunk_rows), 20, **options)
    sample = vectors[draw_rows(len(vectors), options.get("kmeans_rows") or len(vectors), 0)]
    labels, inertia = brute(sample, centres.vectors)
    np.testing.assert_array_equal(centres.stats.counts, np.bincount(labels, minlength=20))
    assert centres.stats.inertia == pytest.approx(inertia, rel=1e-12)
    for label in range(20):
        assert set(centres.stats.member_rows[label]) - {-1} <= set(np.flatnonzero(labels == label))


def test_centres_do_not_depend_on_the_workers(corpus: str) -> None:
    _, here = learn(corpus, 20)
    for workers in (1, 3):
        with (
            LocalCluster(
                n_workers=workers,
                threads_per_worker=1,
                processes=False,
                dashboard_address="127.0.0.1:0",
                protocol="inproc://",
            ) as cluster,
            Client(cluster) as client,
        ):
            _, there = learn(corpus, 20, context=Context(client=client))
        np.testing.assert_array_equal(there.vectors, here.vectors)
        np.testing.assert_array_equal(there.stats.counts, here.stats.counts)
        np.testing.assert_array_equal(there.stats.members, here.stats.members)


def test_fewer_rows_than_centres(tmp_path: Path) -> None:
    values = clustered(7)
    data, centres = learn(corpus_of(tmp_path, values), 20)
    assert len(centres.vectors) == 7
    assert centres.stats.inertia == 0
    assert data.notes == ("n_centres reduced from 20 to 7: there are 7 rows",)


def test_fewer_distinct_rows_than_centres(tmp_path: Path) -> None:
    values = np.repeat(clustered(5), 40, axis=0)
    data, centres = learn(corpus_of(tmp_path, values), 20)
    assert sorted(row.tobytes() for row in centres.vectors) == sorted(row.tobytes() for row in values[::40])
    assert centres.stats.counts.tolist() == [40] * 5
    assert data.notes == ("n_centres reduced from 20 to 5: the rows form no more distinct clusters",)


def test_one_distinct_row(tmp_path: Path) -> None:
    data, centres = learn(corpus_of(tmp_path, np.zeros((30, 4), np.float32)), 20)
    np.testing.assert_array_equal(centres.vectors, np.zeros((1, 4)))
    assert "from 20 to 1:" in data.notes[0]


@pytest.mark.parametrize("power", [-12, 12])
def test_the_scale_of_the_data_does_not_matter(power: int, vectors: np.ndarray, tmp_path: Path) -> None:
    """An absolute tolerance would stop at once where the data are small, and never where they are large."""
    scale = np.float32(2.0**power)
    _, expected = learn(corpus_of(tmp_path / "plain", vectors), 20)
    _, found = learn(corpus_of(tmp_path / "scaled", vectors * scale), 20)
    np.testing.assert_array_equal(found.vectors, expected.vectors * scale)
    np.testing.assert_array_equal(found.stats.counts, expected.stats.counts)


def test_rounds_stop_where_nothing_moves_at_any_scale(vectors: np.ndarray) -> None:
    seeds = seed_centres(vectors, 20, seed=0)
    for scale in (1e-3, 1.0, 1e3):
        long = lloyd_here(vectors * scale, seeds * np.float32(scale), max_iter=300)
        short = lloyd_here(vectors * scale, seeds * np.float32(scale), max_iter=50)
        np.testing.assert_array_equal(long, short)
        np.testing.assert_array_equal(brute(vectors * scale, long)[0], brute(vectors, long / scale)[0])


@pytest.mark.parametrize("seed", range(3))
def test_inertia_is_that_of_scikit_learn(seed: int, vectors: np.ndarray) -> None:
    seeds = seed_centres(vectors[:400], 40, seed)
    moved = lloyd_here(vectors, seeds)
    settled = fill_empty_clusters(counter(vectors), moved, 40)
    theirs = KMeans(40, init=seeds, n_init=1, max_iter=10, algorithm="lloyd").fit(vectors.astype(np.float64))
    assert settled.stats.inertia <= 1.05 * theirs.inertia_
    assert settled.stats.inertia < 0.9 * brute(vectors, seeds)[1]


def test_an_array_has_the_centres_of_a_dask_array() -> None:
    values = np.random.default_rng(0).normal(size=(9 * BLOCK_ROWS + 5, 4)).astype(np.float32)
    seeds = seed_centres(values[:500], 20, seed=0)
    with collections_on(None):
        lazy = lloyd(da.from_array(values, chunks=(BLOCK_ROWS, -1)), seeds, max_iter=3, variance=0.0)
    assert lloyd(values, seeds, max_iter=3, variance=0.0).tobytes() == lazy.tobytes()


def test_no_rounds_and_one_centre_are_legal(corpus: str, vectors: np.ndarray) -> None:
    _, seeds = learn(corpus, 20, kmeans_rounds=0)
    assert {row.tobytes() for row in seeds.vectors} <= {row.tobytes() for row in vectors}
    _, one = learn(corpus, 1)
    assert one.stats.counts.tolist() == [1000]


def test_the_estimator_is_that_of_dask_ml(vectors: np.ndarray) -> None:
    from dask_ml.cluster import KMeans as Theirs

    seeds = seed_centres(vectors, 20, seed=0)
    with collections_on(None):
        rows = da.from_array(vectors, chunks=(300, -1))
        model = lloyd_kmeans()(20, init=seeds, max_iter=5, tol=0.0).fit(rows)
        bare = Theirs(20, init=seeds, max_iter=5, tol=0.0).fit(rows)
        assert isinstance(model, Theirs)
        np.testing.assert_allclose(model.cluster_centers_, bare.cluster_centers_, rtol=1e-5)
        labels = model.labels_.compute()
        np.testing.assert_array_equal(labels, model.predict(rows).compute())
    assert model.n_iter_ == 5
    np.testing.assert_array_equal(labels, brute(vectors, model.cluster_centers_)[0])
    before = lloyd_here(vectors, seeds, max_iter=4, variance=0.0)
    assert model.inertia_ == pytest.approx(brute(vectors, before)[1], rel=1e-5)


@pytest.mark.parametrize("dtype", ["|u1", "<f2"])
def test_rounds_on_stored_rows_need_no_copy_in_float32(dtype: str, tmp_path: Path) -> None:
    values = clustered(500).round().clip(0, 100).astype(dtype)
    source = CorpusRows(open_corpus(corpus_of(tmp_path, values)), Context())
    seeds = seed_centres(values.astype(np.float32), 10, seed=0)
    with collections_on(None):
        rows = source.stored()
        assert rows.dtype == np.dtype(dtype)
        found = lloyd(rows, seeds, max_iter=5, variance=0.0)
    np.testing.assert_allclose(found, lloyd_here(values.astype(np.float32), seeds, max_iter=5, variance=0.0), rtol=1e-6)
