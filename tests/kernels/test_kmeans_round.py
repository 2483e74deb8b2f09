"""A round of k-means against the full table of distances, over dtypes, cuts, shapes and both ways to find a centre."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from sklearn.cluster import KMeans

from och_dist.errors import BadInputError, ConflictError
from och_dist.kernels import kmeans
from och_dist.kernels.gistlike import gist_rows
from och_dist.kernels.kmeans import ClusterSums, begin_round, block_labels, block_sums, next_centres


def table(block: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """(n, L) squared distances in float64."""
    return ((block.astype(np.float64)[:, None] - centres.astype(np.float64)[None]) ** 2).sum(axis=2)


def check(block: np.ndarray, centres: np.ndarray) -> ClusterSums:
    """Labels of least distance up to the rounding of float32, and the sums that belong to these labels."""
    shared = begin_round(centres)
    labels, found = block_labels(block, shared), block_sums(block, shared)
    distances = table(block, centres)
    chosen = distances[np.arange(len(block)), labels]
    reach = ((block.astype(np.float64) - shared.origin) ** 2).sum(axis=1) + (shared.squared.max() / shared.scale**2)
    assert (chosen <= distances.min(axis=1) + 1e-5 * reach).all()
    assert np.array_equal(found.counts, np.bincount(labels, minlength=len(centres)))
    for label in range(len(centres)):
        expected = block[labels == label].sum(axis=0, dtype=np.float64)
        np.testing.assert_allclose(found.sums[label], expected, rtol=1e-12, atol=1e-12 * float(np.abs(block).max()))
    assert found.inertia == pytest.approx(chosen.sum(), rel=1e-5, abs=1e-5 * reach.sum())
    return found


def averages(rows: np.ndarray, count: int, seed: int = 0) -> np.ndarray:
    """Centres that few axes tell apart: means of near rows."""
    rng = np.random.default_rng(seed)
    start = rows[rng.choice(len(rows), count, replace=False)].astype(np.float64)
    labels = table(rows, start).argmin(axis=1)
    return np.stack([rows[labels == label].mean(axis=0, dtype=np.float64) for label in range(count)]).astype("f4")


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "u1", "i1", ">f4"])
def test_every_dtype(dtype: str) -> None:
    rows = (100 * gist_rows(0, 1500, dim=64)).clip(0, 100).astype(dtype)
    check(rows, averages(rows, 20))


@pytest.mark.parametrize(("d", "count"), [(64, 40), (200, 100), (48, 96), (3, 50), (1, 7), (33, 1)])
def test_shapes_with_and_without_axes(d: int, count: int) -> None:
    rows = gist_rows(0, 1100, dim=d, seed=1)
    check(rows, averages(rows, count))


def test_axes_are_used_where_they_pay_and_only_there() -> None:
    rows = gist_rows(0, 3000, dim=200)
    near = begin_round(averages(rows, 100))
    assert 0 < near.axes.shape[1] < 64
    assert near.axes.shape[1] % 16 == 0
    noise = np.random.default_rng(0).normal(size=(100, 200)).astype("f4")
    assert begin_round(noise).axes.shape[1] == 0
    check(rows, noise)


def test_few_scores_are_computed() -> None:
    """The bound is one: below every score, and near enough to rule most centres out."""
    rows = gist_rows(0, 2000, dim=384)
    shared = begin_round(averages(rows, 150))
    scores = shared.squared - 2.0 * ((rows - shared.origin) * np.float32(shared.scale)) @ shared.centres.T
    seen = [(part.bounds.copy(), part.slack.copy()) for part in kmeans._bounded(rows, shared)]
    bounds, slack = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    assert (bounds <= scores + slack[:, None]).all()
    assert (bounds <= scores.min(axis=1)[:, None]).sum(axis=1).mean() < 20


def test_ties_go_to_the_smaller_label() -> None:
    rows = np.repeat(np.eye(6, dtype="f4"), 30, axis=0)
    centres = np.concatenate([np.eye(6), np.eye(6)]).astype("f4")
    labels = block_labels(rows, begin_round(centres))
    assert np.array_equal(labels, np.repeat(np.arange(6), 30))


def test_rows_far_from_the_origin() -> None:
    rows = (1e3 + np.random.default_rng(0).normal(size=(1000, 32))).astype("f4")
    check(rows, averages(rows, 20))


@pytest.mark.parametrize("power", [-100, -30, 30, 100])
def test_the_scale_changes_nothing(power: int) -> None:
    rows = gist_rows(0, 1000, dim=64)
    centres, factor = averages(rows, 30), np.float32(2.0**power)
    labels = block_labels(rows, begin_round(centres))
    assert np.array_equal(block_labels(rows * factor, begin_round(centres * factor)), labels)


@pytest.mark.parametrize("sizes", [[2500], [1, 2499], [1024, 1024, 452], [0, 5, 2495], [800, 800, 900]])
def test_cuts_and_merge_orders_agree(sizes: list[int]) -> None:
    rows = gist_rows(0, 2500, dim=48)
    shared = begin_round(averages(rows, 25))
    cuts = np.cumsum([0, *sizes])
    parts = [block_sums(rows[a:b], shared) for a, b in itertools.pairwise(cuts)]
    whole, forward, backward = block_sums(rows, shared), parts[0], parts[-1]
    for part in parts[1:]:
        forward = forward.merge(part)
    for part in parts[-2::-1]:
        backward = part.merge(backward)
    for found in (forward, backward):
        assert np.array_equal(found.counts, whole.counts)
        np.testing.assert_allclose(found.sums, whole.sums, rtol=1e-12)
        assert found.inertia == pytest.approx(whole.inertia, rel=1e-12)


def test_the_same_call_gives_the_same_bytes() -> None:
    rows = gist_rows(0, 3000, dim=96)
    shared = begin_round(averages(rows, 60))
    first, second = block_sums(rows, shared), block_sums(rows.copy(), shared)
    assert first.sums.tobytes() == second.sums.tobytes()
    assert first.inertia == second.inertia


def test_an_empty_cluster_stays_and_equal_rows_are_their_own_mean() -> None:
    rows = np.repeat(np.random.default_rng(0).normal(size=(4, 10)).astype("f4"), 37, axis=0)
    centres = np.concatenate([rows[::37], np.full((1, 10), 50, "f4")])
    found = block_sums(rows, begin_round(centres))
    assert found.counts.tolist() == [37, 37, 37, 37, 0]
    assert np.array_equal(next_centres(found, centres), centres)


def test_rounds_are_those_of_scikit_learn() -> None:
    rows = gist_rows(0, 4000, dim=64)
    centres = seeds = rows[:50].copy()
    for _ in range(6):
        centres = next_centres(block_sums(rows, begin_round(centres)), centres)
    theirs = KMeans(50, init=seeds, n_init=1, max_iter=6, tol=0, algorithm="lloyd").fit(rows.astype(np.float64))
    inertia = table(rows, centres).min(axis=1).sum()
    assert inertia == pytest.approx(table(rows, theirs.cluster_centers_).min(axis=1).sum(), rel=1e-4)


def test_what_cannot_be_a_round_is_refused() -> None:
    with pytest.raises(BadInputError, match="at least one: choose seeds"):
        begin_round(np.empty((0, 4), "f4"))
    with pytest.raises(BadInputError, match="NaN or infinity"):
        begin_round(np.array([[0.0, np.nan]]))
    with pytest.raises(BadInputError, match=r"expected \(n, 2\)"):
        block_sums(np.zeros((3, 4), "f4"), begin_round(np.eye(2)))
    one, other = (block_sums(np.eye(2, dtype="f4"), begin_round(np.eye(2)[:n])) for n in (1, 2))
    with pytest.raises(ConflictError, match="expected equal shapes"):
        one.merge(other)
