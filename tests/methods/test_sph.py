"""Spherical hashing: balanced, pairwise independent spheres, and codes that are what the spheres say."""

from __future__ import annotations

import numpy as np
import pytest

from och_dist import SpH
from och_dist.kernels.packing import code_words, unpack_bits
from och_dist.kernels.ranking import mean_average_precision
from och_dist.kernels.spheres import spherical_histogram, spherical_levels, spherical_pairs
from och_dist.methods.sph import _forces, _inside, _overlap_deviation
from tests.support.method_checks import check_same_bytes_anywhere, clustered, real_map, real_rows


def overlaps(bits):
    """Shares of the ideal quarter, of all pairs of spheres."""
    counts = np.array([[np.sum(a & b) for b in bits.T] for a in bits.T])
    return counts[np.triu_indices(len(counts), 1)] / (len(bits) / 4)


@pytest.mark.parametrize("n", [1000, 1001])
def test_every_sphere_holds_half_of_the_rows_and_two_share_a_quarter(n):
    x = clustered(n)
    model = SpH(24).fit(x)
    bits = unpack_bits(model.transform(x), 24)
    np.testing.assert_array_equal(bits.sum(axis=0), n // 2)
    assert model.converged_
    assert 0 < model.n_iter_ < 100
    shares = overlaps(bits)
    # The last state of training, up to the rounding of the pivots to float32.
    assert np.abs(shares - 1).mean() == pytest.approx(model.loss_curve_[-1], abs=0.002)
    assert shares.std() == pytest.approx(model.std_curve_[-1], abs=0.002)
    assert model.loss_curve_[-1] <= 0.10 < model.loss_curve_[0]
    assert model.std_curve_[-1] <= 0.15
    assert len(model.loss_curve_) == len(model.std_curve_) == model.n_iter_ + 1
    # It stops at the first state within both tolerances.
    met = [a <= 0.10 and b <= 0.15 for a, b in zip(model.loss_curve_, model.std_curve_, strict=True)]
    assert met == [False] * model.n_iter_ + [True]
    assert model.notes_ == []


def test_bits_say_which_pivots_are_near():
    x = clustered(600)
    model = SpH(13).fit(x)
    distances = ((x[:, None].astype(np.float64) - model.pivots_) ** 2).sum(axis=2)
    np.testing.assert_allclose(model.squared_radii_, np.sort(distances, axis=0)[299], rtol=1e-12)
    np.testing.assert_array_equal(unpack_bits(model.transform(x), 13), distances <= model.squared_radii_ * (1 + 1e-12))


def test_one_round_is_that_of_a_plain_loop():
    x = clustered(200, d=7).astype(np.float64)
    x -= x.mean(axis=0)
    pivots = x[:5].copy()
    inside = np.empty((5, 200), bool)
    for i in range(5):
        distances = ((x - pivots[i]) ** 2).sum(axis=1)
        inside[i] = distances <= np.sort(distances)[99]
    forces = np.zeros_like(pivots)
    for i in range(5):
        for j in range(5):
            shared = np.sum(inside[i] & inside[j])
            if i != j:
                forces[i] += 0.5 * (shared - 50) / 50 * (pivots[i] - pivots[j]) / 5
    rows = x.astype(np.float32)
    found = _inside(rows, (rows**2).sum(axis=1), pivots)
    np.testing.assert_array_equal(found, inside)
    np.testing.assert_allclose(_forces(_overlap_deviation(found), pivots), forces, atol=1e-12)


def test_no_rounds_leave_the_means_of_a_few_rows():
    x = clustered(400)
    model = SpH(6, n_seed_rows=1, max_iter=0).fit(x)
    nearest = np.abs(x[:, None] - model.pivots_).max(axis=2).min(axis=0)
    assert nearest.max() < 1e-5
    assert model.n_iter_ == 0
    assert "after 0 rounds; max_iter=0" in model.notes_[-1]
    # Means of rows lie nearer to the centre of all.
    spread = [np.linalg.norm(SpH(6, n_seed_rows=k, max_iter=0).fit(x).pivots_ - x.mean(axis=0)) for k in (1, 20)]
    assert spread[1] < 0.5 * spread[0]


def test_more_bits_than_features_and_one_bit():
    x = clustered(500, d=3)
    assert SpH(40).fit(x).transform(x).shape == (500, 5)
    single = SpH(1).fit(x)
    assert single.converged_
    assert unpack_bits(single.transform(x), 1).sum() == 250


CASES = {
    "two rows": (np.eye(2, 6, dtype=np.float32), "n_seed_rows reduced from 5 to 1"),
    "two distinct rows": (np.repeat(np.eye(2, 6, dtype=np.float32), 40, axis=0), "overlaps of the spheres"),
    "one feature": (np.arange(90, dtype=np.float32)[:, None], "overlaps of the spheres"),
    "few rows": (clustered(8, d=30), "n_seed_rows reduced from 5 to 4"),
}


@pytest.mark.parametrize("name", CASES)
def test_degenerate_rows_are_legal_and_noted(name):
    x, note = CASES[name]
    model = SpH(12).fit(x)
    assert any(note in text for text in model.notes_), model.notes_
    bits = unpack_bits(model.transform(x), 12)
    assert (bits.sum(axis=0) >= max(1, len(x) // 2)).all()
    for row in np.unique(x, axis=0):
        assert len(np.unique(bits[(x == row).all(axis=1)], axis=0)) == 1


def test_constant_dimensions_change_nothing():
    x = clustered(300, d=30)
    wide = np.insert(x, 5, 7.5, axis=1)
    np.testing.assert_array_equal(SpH(16).fit(wide).transform(wide), SpH(16).fit(x).transform(x))


def test_same_codes_for_every_blocking_and_another_blas_kernel(tmp_path):
    rng = np.random.default_rng(11)
    x = rng.integers(0, 4, (4000, 40)).astype("f4")
    model = SpH(29, max_iter=3).fit(x)
    # Pivots on the grid of the data, so that many rows lie on the surfaces exactly.
    model.pivots_, model.squared_radii_ = np.round(model.pivots_), np.round(model.squared_radii_)
    check_same_bytes_anywhere(model, x, tmp_path)


def test_real_descriptors_rank_as_expected():
    base, queries, truth = real_rows()
    model = SpH(64).fit(base[:10_000])
    codes = [code_words(model.transform(x)) for x in (queries, base)]
    levels = spherical_levels(64)
    n = spherical_histogram(*codes, 64, levels)
    query, row = np.repeat(np.arange(len(queries)), truth.shape[1]), truth.ravel()
    g = np.zeros_like(n)
    np.add.at(g, (query, spherical_pairs(*codes, query, row, 64, levels)), 1)
    # At 40,000 rows: LSH .159, SpH .233, with its own distance about a third more.
    assert model.converged_
    assert 1.2 < real_map("sph") / real_map("lsh") < 2.0
    assert mean_average_precision(n, g) > 1.15 * real_map("sph")
