"""The sample of rows and its statistics: NumPy's numbers, whatever the chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import NonFiniteError
from och_dist.kernels.moments import Moments
from och_dist.stage import Context
from och_dist.store.corpus import open_corpus
from och_dist.train.data import draw_rows, moments_of, training_data
from och_dist.train.rows import CorpusRows
from tests.support.stage_data import clustered, corpus_of

ROWS = 120
CHUNKINGS = {"one row short": 119, "exact": 40, "uneven": 37, "single": 120, "rows": 1}


def taken(url: str, numbers: np.ndarray) -> np.ndarray:
    source = CorpusRows(open_corpus(url), Context())
    with source.dask():
        return np.asarray(source.take(numbers))


def moments_of_all(url: str, *, stored: bool = False) -> Moments:
    source = CorpusRows(open_corpus(url), Context())
    with source.dask():
        rows = source.stored() if stored else source.take(np.arange(source.rows))
        return moments_of(rows, source.corpus.read(0, 50).mean(axis=0, dtype=np.float64))


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("chunk_rows", CHUNKINGS.values(), ids=CHUNKINGS.keys())
@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<f8", "|u1", "|i1"])
def test_moments_are_those_of_numpy(dtype: str, chunk_rows: int, stored: bool, tmp_path: Path) -> None:
    values = (clustered(ROWS, dim=5) * 6).astype(dtype)
    moments = moments_of_all(corpus_of(tmp_path, values, chunk_rows=chunk_rows), stored=stored)
    wide = values.astype(np.float64)
    assert moments.count == ROWS
    np.testing.assert_allclose(moments.mean, wide.mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(moments.covariance, np.cov(wide.T, bias=True), rtol=1e-10, atol=1e-12)


def test_moments_far_from_the_origin_keep_their_digits(tmp_path: Path) -> None:
    values = clustered(ROWS, dim=5).astype(np.float64) + 1e7
    moments = moments_of_all(corpus_of(tmp_path, values, chunk_rows=37))
    np.testing.assert_allclose(moments.covariance, np.cov(values.T, bias=True), rtol=1e-8)


def test_segments_are_one_corpus(tmp_path: Path) -> None:
    values = clustered(ROWS, dim=5)
    for part in (values[:50], values[50:51], values[51:]):
        url = corpus_of(tmp_path, part, chunk_rows=16)
    moments = moments_of_all(url)
    assert moments.count == ROWS
    np.testing.assert_allclose(moments.mean, values.mean(axis=0, dtype=np.float64), rtol=1e-13)
    numbers = np.array([0, 49, 50, 51, 119])
    np.testing.assert_array_equal(taken(url, numbers), values[numbers])


@pytest.mark.parametrize("chunk_rows", CHUNKINGS.values(), ids=CHUNKINGS.keys())
@pytest.mark.parametrize("count", [1, 30, ROWS, 500])
def test_the_sample_holds_the_rows_of_its_numbers(count: int, chunk_rows: int, tmp_path: Path) -> None:
    values = clustered(ROWS, dim=5).astype(np.float16)
    numbers = draw_rows(ROWS, count, seed=4)
    rows = taken(corpus_of(tmp_path, values, chunk_rows=chunk_rows), numbers)
    assert rows.dtype == np.float16
    np.testing.assert_array_equal(rows, values[numbers])


def test_only_the_sample_is_learned_from_unless_all_rows_are_asked_for(tmp_path: Path) -> None:
    values = clustered(ROWS, dim=5)
    source = CorpusRows(open_corpus(corpus_of(tmp_path, values, chunk_rows=37)), Context())
    for kmeans_rows, numbers in ((30, draw_rows(ROWS, 30, 9)), (0, np.arange(ROWS))):
        data = training_data(source, centres=3, seed=9, train_rows=10, kmeans_rows=kmeans_rows)
        exact = values[numbers].astype(np.float64)
        np.testing.assert_allclose(data.mean, exact.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(data.covariance, np.cov(exact.T, bias=True), rtol=1e-9, atol=1e-12)
        assert data.count == ROWS
        assert {row.tobytes() for row in data.rows} <= {row.tobytes() for row in values[numbers]}


@given(rows=st.integers(1, 500), count=st.integers(1, 600), seed=st.integers(0, 2**63))
@settings(deadline=None, max_examples=50)
def test_drawn_rows_are_distinct_and_a_function_of_the_seed(rows: int, count: int, seed: int) -> None:
    drawn = draw_rows(rows, count, seed)
    assert len(drawn) == min(rows, count)
    assert (np.diff(drawn) > 0).all()
    assert drawn[0] >= 0
    assert drawn[-1] < rows
    np.testing.assert_array_equal(drawn, draw_rows(rows, count, seed))


def test_drawn_rows_cover_the_corpus_evenly() -> None:
    hits = np.zeros(50)
    for seed in range(400):
        hits[draw_rows(50, 10, seed)] += 1
    assert hits.sum() == 4000
    assert ((hits - 80) ** 2 / 80).sum() < 86  # chi-squared, 49 degrees of freedom, 0.1 %


@pytest.mark.parametrize("bad", [[0], [119], [39, 40], [3, 17, 18, 77], list(range(5, 40))])
def test_rows_that_are_not_finite_are_listed(bad: list[int], tmp_path: Path) -> None:
    """Ingest refuses them; an existing array that is used as it is may have them, outside of the sample too."""
    values = clustered(ROWS, dim=5)
    values[bad, np.arange(len(bad)) % 5] = np.where(np.arange(len(bad)) % 2, np.nan, np.inf)
    zarr.create_array(store=tmp_path / "array", data=values, chunks=(40, 5))
    with pytest.raises(NonFiniteError, match=f"{len(bad)} rows of .*array hold NaN") as caught:
        taken(str(tmp_path / "array"), np.array([60]))
    assert (caught.value.rows, caught.value.total) == (tuple(bad[:20]), len(bad))
