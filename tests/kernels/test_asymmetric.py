"""Neighbours by weighted and by spherical distance are those of brute force, in the order (distance, row)."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, UsageError
from och_dist.kernels.asymmetric import spherical_top_k, weighted_pairs, weighted_top_k, whole_weights
from och_dist.kernels.hamming import hamming_top_k, lay_out, merge_top_k
from och_dist.kernels.packing import code_words, pack_bits, unpack_bits
from och_dist.kernels.spheres import spherical_levels, spherical_pairs

BORDERS = [0, 1, 2, 63, 64, 65, 127, 128, 129, 200, 1000]
KINDS = ["random", "duplicates", "equal", "near"]


def codes_of(rng, n, n_bits, kind="random"):
    """(n, bytes); ``near``: few bits set, so that distances are small and codes share few spheres."""
    bits = rng.random((n, n_bits)) < (0.05 if kind == "near" else 0.5)
    if kind == "equal" and n:
        bits[:] = bits[0]
    if kind == "duplicates" and n:
        bits = bits[rng.integers(0, min(n, 5), n)]
    return pack_bits(bits)


def weighted(queries, weights, codes, n_bits):
    """(q, n) Python-sized sums, bit by bit."""
    differ = unpack_bits(queries, n_bits)[:, None] != unpack_bits(codes, n_bits)
    return (differ * weights[:, None].astype(np.int64)).sum(axis=2)


def spherical(queries, codes, n_bits):
    """(q, n) exact fractions |a xor b| / (|a and b| + 1/10) as ranks, and as float64."""
    a, b = unpack_bits(queries, n_bits)[:, None], unpack_bits(codes, n_bits)
    either, both = (a != b).sum(axis=2), (a & b).sum(axis=2)
    exact = [
        [Fraction(int(x)) / (int(y) + Fraction(1, 10)) for x, y in zip(*row, strict=True)]
        for row in zip(either, both, strict=True)
    ]
    order = {value: rank for rank, value in enumerate(sorted({value for row in exact for value in row}))}
    ranks = np.array([[order[value] for value in row] for row in exact], dtype=np.int64).reshape(either.shape)
    return ranks, np.array([[float(value) for value in row] for row in exact]).reshape(either.shape)


def first_by(order_by, live, k):
    """Places (q, m) of the first k live rows by (distance, row)."""
    places = np.flatnonzero(live)
    order = [sorted(places, key=lambda i: (row[i], i))[:k] for row in order_by]
    return np.array(order, dtype=np.int64).reshape(len(order_by), min(k, len(places)))


@st.composite
def cases(draw):
    n_bits = draw(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 128, 130, 256, 511, 512])))
    n, kind = draw(st.sampled_from(BORDERS)), draw(st.sampled_from(KINDS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    queries, codes = codes_of(rng, draw(st.integers(0, 4)), n_bits, kind), codes_of(rng, n, n_bits, kind)
    if n and len(queries) and draw(st.booleans()):
        queries[0] = codes[rng.integers(n)]
    k = draw(st.sampled_from([0, 1, 2, 10, 100, n, n + 7]))
    live = draw(st.sampled_from([None, 0.0, 0.02, 0.5, 0.98]))
    live = None if live is None else rng.random(n) < live
    largest = draw(st.sampled_from([0, 1, 3, 2**19, 2**32 // n_bits - 1]))
    weights = rng.integers(0, largest, (len(queries), n_bits), endpoint=True)
    weights[rng.random(weights.shape) < draw(st.sampled_from([0.0, 0.5, 0.95]))] = 0
    return n_bits, queries, weights, codes, k, live


@settings(deadline=None, max_examples=80)
@given(case=cases())
def test_weighted_neighbours_are_those_of_brute_force(case):
    n_bits, queries, weights, codes, k, live = case
    found, rows = weighted_top_k(queries, weights, lay_out(codes, n_bits), k, live=live)
    expected = weighted(queries, weights, codes, n_bits)
    places = first_by(expected, np.ones(len(codes), bool) if live is None else live, k)
    assert (found.dtype, rows.dtype) == (np.int64, np.int64)
    np.testing.assert_array_equal(rows, places)
    np.testing.assert_array_equal(found, np.take_along_axis(expected, places, axis=1))


@settings(deadline=None, max_examples=50)
@given(case=cases())
def test_spherical_neighbours_are_those_of_exact_fractions(case):
    n_bits, queries, _, codes, k, live = case
    found, rows = spherical_top_k(queries, lay_out(codes, n_bits), k, live=live)
    ranks, values = spherical(queries, codes, n_bits)
    places = first_by(ranks, np.ones(len(codes), bool) if live is None else live, k)
    assert (found.dtype, rows.dtype) == (np.float64, np.int64)
    np.testing.assert_array_equal(rows, places)
    np.testing.assert_array_equal(found, np.take_along_axis(values, places, axis=1))


@pytest.mark.parametrize("n_bits", [20, 100])
@pytest.mark.parametrize("share", [None, 0.01, 0.9])
def test_limits_from_a_sample_lose_nothing(n_bits, share):
    """Enough rows for a sample to be taken; rows sorted so that every sample misjudges some query."""
    rng = np.random.default_rng(n_bits)
    n, q = 70_000, 40
    scores = rng.normal(size=(n, 8)) @ rng.normal(size=(8, n_bits))
    codes = pack_bits(scores > 0)
    queries, weights = codes[:: n // q][:q].copy(), whole_weights(scores[:: n // q][:q])[0]
    # Copies of a query in the rows that a sample of every 32nd looks at promise nearer rows than there are.
    codes[320:3200:32] = queries[0]
    codes[321:3200:32] = ~queries[1] & pack_bits(np.ones((1, n_bits), bool))
    live = None if share is None else rng.random(n) < share
    everything = np.ones(n, bool) if live is None else live
    expected = np.concatenate([weighted(queries[i : i + 1], weights[i : i + 1], codes, n_bits) for i in range(q)])
    block = lay_out(codes, n_bits)
    assert block.sample is not None
    for k in (1, 50, 600):
        distances, rows = weighted_top_k(queries, weights, block, k, live=live)
        order = np.where(everything, expected, np.iinfo(np.int64).max)
        places = np.argsort(order, axis=1, kind="stable")[:, : min(k, everything.sum())]
        np.testing.assert_array_equal(rows, places)
        np.testing.assert_array_equal(distances, np.take_along_axis(expected, places, axis=1))
    levels = spherical_levels(n_bits)
    every = np.indices((3, n)).reshape(2, -1)
    ranks = spherical_pairs(code_words(queries[:3]), code_words(codes), *every, n_bits, levels).reshape(3, n)
    places = np.argsort(np.where(everything, ranks, 2**30), axis=1, kind="stable")[:, : min(200, everything.sum())]
    np.testing.assert_array_equal(spherical_top_k(queries[:3], block, 200, live=live)[1], places)


def test_equal_weights_rank_as_hamming_distance_does():
    rng = np.random.default_rng(1)
    queries, codes = codes_of(rng, 300, 96), codes_of(rng, 3000, 96)
    block = lay_out(codes, 96)
    distances, rows = weighted_top_k(queries, np.full((300, 96), 5), block, 40)
    plain, same_rows = hamming_top_k(queries, block, 40)
    np.testing.assert_array_equal(distances, 5 * plain)
    np.testing.assert_array_equal(rows, same_rows)


def test_more_queries_than_a_tile_and_any_batch_give_one_result():
    rng = np.random.default_rng(2)
    queries, codes = codes_of(rng, 300, 24), codes_of(rng, 500, 24)
    weights, block = rng.integers(0, 50, (300, 24)), lay_out(codes, 24)
    whole = weighted_top_k(queries, weights, block, 20)
    for size in (1, 7):
        parts = [weighted_top_k(queries[i : i + size], weights[i : i + size], block, 20) for i in range(0, 300, size)]
        for one, many in zip(whole, zip(*parts, strict=True), strict=True):
            np.testing.assert_array_equal(one, np.concatenate(many))


@pytest.mark.parametrize("cuts", [[], [64], [1, 129, 600], [100, 100]])
def test_parts_merge_to_the_whole(cuts):
    rng = np.random.default_rng(3)
    queries, codes = codes_of(rng, 6, 40, "near"), codes_of(rng, 700, 40, "near")
    weights = rng.integers(0, 3, (6, 40))
    ends = [0, *cuts, 700]
    pieces = list(pairwise(ends))
    for nearest in (partial(weighted_top_k, queries, weights), partial(spherical_top_k, queries)):
        parts = []
        for first, last in pieces:
            distances, rows = nearest(lay_out(codes[first:last], 40), 150)
            parts.append((distances, rows + first))
        for merged, whole in zip(merge_top_k(parts, 150), nearest(lay_out(codes, 40), 150), strict=True):
            assert merged.dtype == whole.dtype
            np.testing.assert_array_equal(merged, whole)


@settings(deadline=None, max_examples=30)
@given(
    n_bits=st.sampled_from([1, 7, 8, 9, 64, 129, 512]),
    q=st.integers(0, 4),
    m=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_pairs_are_sums_over_differing_bits(n_bits, q, m, seed):
    rng = np.random.default_rng(seed)
    queries, weights = codes_of(rng, q, n_bits), rng.integers(0, 2**19, (q, n_bits), dtype=np.int32)
    codes = codes_of(rng, q * m, n_bits).reshape(q, m, -(-n_bits // 8))
    distances = weighted_pairs(queries, weights, codes)
    assert distances.shape == (q, m)
    assert distances.dtype == np.int64
    for i in range(q):
        expected = weighted(queries[i : i + 1], weights[i : i + 1], codes[i], n_bits)[0]
        np.testing.assert_array_equal(distances[i], expected)


def test_pairs_of_more_queries_than_a_tile():
    rng = np.random.default_rng(4)
    queries, weights = codes_of(rng, 300, 12), rng.integers(0, 9, (300, 12))
    codes = codes_of(rng, 900, 12).reshape(300, 3, 2)
    expected = [weighted(queries[[i]], weights[[i]], codes[i], 12)[0] for i in range(300)]
    np.testing.assert_array_equal(weighted_pairs(queries, weights, codes), expected)


def test_the_largest_sums_are_exact():
    weights = np.full((1, 4096), 2**20 - 1, dtype=np.int32)
    queries, codes = np.zeros((1, 512), np.uint8), np.full((3, 512), 255, np.uint8)
    codes[1, 511] = 127
    distances, rows = weighted_top_k(queries, weights, lay_out(codes, 4096), 3)
    assert distances.tolist() == [[4095 * (2**20 - 1), 4096 * (2**20 - 1), 4096 * (2**20 - 1)]]
    assert rows.tolist() == [[1, 0, 2]]
    assert weighted_pairs(queries, weights, codes[None]).max() == 4096 * (2**20 - 1)


@settings(deadline=None, max_examples=60)
@given(
    scores=st.lists(st.floats(-1e300, 1e300, allow_subnormal=True), min_size=1, max_size=9),
)
def test_whole_weights_are_scores_in_units_of_a_power_of_two(scores):
    weights, scales = whole_weights(np.array([scores]))
    assert (weights.dtype, weights.shape, scales.shape) == (np.int32, (1, len(scores)), (1,))
    scale = Fraction(float(scales[0]))
    assert np.frexp(scales[0])[0] == 0.5
    for weight, score in zip(weights[0], scores, strict=True):
        assert abs(int(weight) * scale - abs(Fraction(score))) <= scale / 2
    if max(map(abs, scores)) > 1e-290:
        assert 2**18 <= weights.max() <= 2**19


def test_weights_of_zero_scores_and_of_many_bits():
    weights, scales = whole_weights(np.zeros((2, 3)))
    assert not weights.any()
    assert scales.tolist() == [1, 1]
    for n_bits in (4096, 4097, 100_000):
        weights, _ = whole_weights(np.ones((1, n_bits)))
        assert 2**29 < weights.sum(dtype=np.int64) <= 2**31


def test_unusable_arguments_are_refused():
    codes, weights = np.zeros((4, 2), np.uint8), np.ones((4, 12), int)
    block = lay_out(codes, 12)
    with pytest.raises(UsageError, match="k=-1; expected a number"):
        weighted_top_k(codes, weights, block, -1)
    with pytest.raises(BadInputError, match=r"weights are int64 \(4, 11\); expected integers \(4, 12\)"):
        weighted_top_k(codes, weights[:, :11], block, 1)
    with pytest.raises(BadInputError, match="weights are float64"):
        weighted_top_k(codes, weights / 2, block, 1)
    for bad in (-1, 2**32, 2**29):
        with pytest.raises(BadInputError, match="below 0 or add up"):
            weighted_top_k(codes, weights * bad, block, 1)
    with pytest.raises(BadInputError, match=r"queries are uint8 of shape \(4, 1\); expected uint8 \(rows, 2\)"):
        weighted_top_k(codes[:, :1], weights, block, 1)
    with pytest.raises(BadInputError, match="beyond bit 12"):
        spherical_top_k(codes + 255, block, 1)
    with pytest.raises(UsageError, match=r"live is int64 \(4,\); expected bool \(4,\)"):
        weighted_top_k(codes, weights, block, 1, live=np.ones(4, int))
    with pytest.raises(UsageError, match="at most 4096 bits"):
        spherical_top_k(np.zeros((1, 513), np.uint8), lay_out(np.zeros((1, 513), np.uint8), 4104), 1)
    with pytest.raises(BadInputError, match=r"candidates are uint8 \(4, 2\)"):
        weighted_pairs(codes, weights, codes)
