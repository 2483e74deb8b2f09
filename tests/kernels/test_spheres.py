"""Codes by spheres follow their definition, and levels of the spherical distance are exact ranks."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, NonFiniteError, UsageError
from och_dist.kernels.euclidean import exact_distances
from och_dist.kernels.packing import code_words, pack_bits, unpack_bits
from och_dist.kernels.ranking import average_precision
from och_dist.kernels.spheres import (
    encode_spheres,
    nth_distances,
    sphere_scores,
    spherical_histogram,
    spherical_levels,
    spherical_pairs,
)

DTYPES = ["f2", "f4", "f8", "u1", "i1"]


def all_distances(rows, pivots):
    """(n, r) distances as ``euclidean`` defines them, every one measured."""
    i, k = np.indices((len(rows), len(pivots))).reshape(2, -1)
    return exact_distances(rows, pivots, i, k).reshape(len(rows), len(pivots))


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_follow_the_definition_where_float64_is_exact(dtype):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 5, (300, 6)).astype(dtype)
    pivots = rng.integers(0, 5, (13, 6)).astype("f4")
    radii = rng.integers(4, 20, 13).astype("f8")
    squared = ((rows.astype(int)[:, None] - pivots.astype(int)) ** 2).sum(axis=2)
    assert np.count_nonzero(squared == radii) > 50  # rows on the surface are inside
    codes = encode_spheres(rows, pivots, radii)
    assert codes.dtype == np.uint8
    assert codes.shape == (300, 2)
    np.testing.assert_array_equal(unpack_bits(codes, 13), squared <= radii)
    assert not (codes[:, 1] >> 5).any()


@pytest.mark.parametrize("shift", [0.0, 1e4, -3e7])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_the_last_bit_of_a_radius_decides(dtype, shift):
    """A sphere through a row holds it, the next smaller one does not, far below what float32 resolves."""
    rng = np.random.default_rng(1)
    rows = (shift + rng.normal(size=(40, 70))).astype(dtype)
    pivots = (shift + rng.normal(size=(40, 70))).astype("f4")
    through = np.diag(all_distances(rows, pivots)).copy()
    own = np.arange(40), np.arange(40)
    assert unpack_bits(encode_spheres(rows, pivots, through), 40)[own].all()
    smaller = unpack_bits(encode_spheres(rows, pivots, np.nextafter(through, -1)), 40)
    assert not smaller[own].any()
    np.testing.assert_array_equal(smaller, all_distances(rows, pivots) < through)


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    d=st.integers(1, 50),
    r=st.integers(1, 20),
    scale=st.sampled_from([1e-42, 1e-25, 1e-3, 1.0, 1e10, 1e18, 1e30]),
)
def test_any_scale_follows_the_definition(seed, d, r, scale):
    rng = np.random.default_rng(seed)
    rows = (scale * rng.integers(-3, 4, (30, d))).astype("f4")
    pivots = (scale * rng.integers(-3, 4, (r, d))).astype("f4")
    distances = all_distances(rows, pivots)
    radii = distances[rng.integers(0, 30, r), np.arange(r)]
    np.testing.assert_array_equal(unpack_bits(encode_spheres(rows, pivots, radii), r), distances <= radii)


@pytest.mark.parametrize("d", [5, 32, 70])
def test_scores_do_not_depend_on_the_order_of_memory(d):
    rng = np.random.default_rng(3)
    rows, pivots = rng.standard_normal((40, d)).astype("f4"), rng.standard_normal((6, d)).astype("f4")
    scores = sphere_scores(rows, pivots, np.full(6, 9.0))
    assert np.array_equal(3.0 - np.sqrt(all_distances(rows, pivots)), scores)
    assert np.array_equal(sphere_scores(np.asfortranarray(rows), pivots, np.full(6, 9.0)), scores)


def test_same_bytes_for_every_blocking():
    rng = np.random.default_rng(5)
    rows = rng.integers(0, 4, (3000, 24)).astype("u1")
    pivots, radii = rng.integers(0, 4, (20, 24)).astype("f4"), np.full(20, 60.0)
    whole = encode_spheres(rows, pivots, radii)
    for size in (1, 7, 1000):
        parts = [encode_spheres(rows[i : i + size], pivots, radii) for i in range(0, 2000, size)]
        np.testing.assert_array_equal(np.concatenate(parts)[:2000], whole[:2000])
    np.testing.assert_array_equal(encode_spheres(rows[::-1], pivots, radii)[::-1], whole)
    assert encode_spheres(rows[:0], pivots, radii).shape == (0, 3)


def test_rows_that_cannot_be_encoded_are_refused_by_their_number():
    rows, pivots, radii = np.zeros((2000, 3)), np.zeros((2, 3), "f4"), np.ones(2)
    rows[1500, 1] = 1e100  # far, but within float64
    assert unpack_bits(encode_spheres(rows, pivots, radii), 2).sum() == 2 * 1999
    rows[1600, 1] = 1e200
    with pytest.raises(BadInputError, match="overflow in the distances of row 2600"):
        encode_spheres(rows, pivots, radii, first_row=1000)
    rows[[1, 1700], 2] = np.nan, np.inf
    with pytest.raises(NonFiniteError) as caught:
        encode_spheres(rows, pivots, radii, first_row=1000)
    assert caught.value.rows == (1001, 2700)
    with pytest.raises(BadInputError, match=r"expected \(n, 3\)"):
        encode_spheres(rows[:, :2], pivots, radii)


@pytest.mark.parametrize("n", [1, 2, 77, 500])
def test_nth_distances_are_exact_order_statistics(n):
    rng = np.random.default_rng(2)
    rows = np.repeat((50 + rng.normal(size=(250, 33))).astype("f4"), 2, axis=0)
    pivots = (50 + rng.normal(size=(9, 33))).astype("f4")
    expected = np.sort(all_distances(rows, pivots), axis=0)[n - 1]
    np.testing.assert_array_equal(nth_distances(rows, pivots, n), expected)
    with pytest.raises(UsageError, match="n=0"):
        nth_distances(rows, pivots, 0)


def fraction(xor, both):
    return Fraction(xor) / (both + Fraction(1, 10))


@pytest.mark.parametrize("n_bits", [1, 2, 7, 33])
def test_levels_are_the_ranks_of_the_exact_distances(n_bits):
    levels = spherical_levels(n_bits)
    pairs = [(x, a) for x in range(n_bits + 1) for a in range(n_bits + 1) if x + a <= n_bits]
    ranks = {value: rank for rank, value in enumerate(sorted({fraction(*pair) for pair in pairs}))}
    assert levels.max() == len(ranks) - 1
    assert all(levels[pair] == ranks[fraction(*pair)] for pair in pairs)
    assert (levels >= 0).sum() == len(pairs)
    assert (levels[0] == 0).all()


def test_close_levels_of_long_codes_are_told_apart():
    n_bits = 1024
    levels = spherical_levels(n_bits)
    x, a = (part.astype(np.int64) for part in np.nonzero(levels >= 0))
    order = np.argsort(levels[x, a], kind="stable")
    x, a, level = x[order], a[order], levels[x, a][order]
    cross = x[:-1] * (10 * a[1:] + 1), x[1:] * (10 * a[:-1] + 1)
    np.testing.assert_array_equal(cross[0] < cross[1], level[:-1] < level[1:])
    assert (cross[0] <= cross[1]).all()


@pytest.mark.parametrize("n_bits", [5, 64, 70, 130])
def test_histograms_and_pairs_match_the_bits(n_bits):
    rng = np.random.default_rng(n_bits)
    queries, base = rng.random((4, n_bits)) < 0.4, rng.random((60, n_bits)) < 0.5
    queries[0], base[0] = False, False
    words = [code_words(pack_bits(bits)) for bits in (queries, base)]
    levels = spherical_levels(n_bits)
    xor = (queries[:, None] ^ base).sum(axis=2)
    expected = levels[xor, (queries[:, None] & base).sum(axis=2)]
    query, row = np.indices(expected.shape).reshape(2, -1)
    np.testing.assert_array_equal(spherical_pairs(*words, query, row, n_bits, levels), expected.ravel())
    counts = spherical_histogram(*words, n_bits, levels)
    assert counts.shape == (4, levels.max() + 1)
    np.testing.assert_array_equal(counts, [np.bincount(line, minlength=levels.max() + 1) for line in expected])
    both = spherical_histogram(words[0], words[1][:20], n_bits, levels)
    np.testing.assert_array_equal(both + spherical_histogram(words[0], words[1][20:], n_bits, levels), counts)


def test_metrics_of_levels_are_those_of_the_ranking():
    """Average precision from levels equals that of the sorted list, when no two rows tie."""
    rng = np.random.default_rng(3)
    queries, base = rng.random((3, 60)) < 0.5, rng.random((400, 60)) < 0.5
    levels = spherical_levels(60)
    words = [code_words(pack_bits(bits)) for bits in (queries, base)]
    for q in range(3):
        pairs = zip((queries[q] ^ base).sum(axis=1), (queries[q] & base).sum(axis=1), strict=True)
        distances = np.array([fraction(int(x), int(a)) for x, a in pairs])
        _, first = np.unique(distances, return_index=True)  # one row of each distance, ascending
        relevant = rng.random(len(first)) < 0.3
        precisions = np.cumsum(relevant) / np.arange(1, len(first) + 1)
        n = spherical_histogram(words[0][q : q + 1], words[1][first], 60, levels)
        g = spherical_histogram(words[0][q : q + 1], words[1][first[relevant]], 60, levels)
        np.testing.assert_allclose(average_precision(n, g), precisions[relevant].mean(), rtol=1e-12)


def test_foreign_words_are_refused():
    words, levels = np.zeros((2, 1), np.uint64), spherical_levels(10)
    none = np.zeros(1, np.int64)
    with pytest.raises(BadInputError, match="beyond bit 10"):
        spherical_histogram(words, words + np.uint64(1 << 10), 10, levels)
    with pytest.raises(BadInputError, match="expected uint64"):
        spherical_histogram(words.astype(np.int64), words, 10, levels)
    with pytest.raises(UsageError, match="spherical_levels"):
        spherical_histogram(words, words, 11, levels)
    with pytest.raises(UsageError, match="pair numbers 2 to 2"):
        spherical_pairs(words, words, none + 2, none, 10, levels)
    with pytest.raises(UsageError, match="expected two equal"):
        spherical_pairs(words, words, none, none[:0], 10, levels)
    with pytest.raises(UsageError, match="n_bits=0"):
        spherical_levels(0)
