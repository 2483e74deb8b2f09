from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, NonFiniteError
from och_dist.kernels.anchors import anchor_scores, anchor_shares, encode_anchors, nearest_anchors
from och_dist.kernels.packing import unpack_bits


def sample(n=300, m=20, d=7, q=11, seed=0):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(n, d)).astype(np.float32)
    return rows, rng.normal(size=(m, d)).astype(np.float32), rng.normal(size=(m, q)), rng.normal(0, 0.2, size=(2, q))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 12), st.integers(0, 10**6))
def test_nearest_anchors_are_those_of_a_full_sort(d, m, s, seed):
    rng = np.random.default_rng(seed)
    rows, anchors = (rng.integers(-2, 3, size=(k, d)).astype(np.float32) for k in (13, m))  # small integers: many ties
    numbers, distances = nearest_anchors(rows, anchors, s)
    squares = ((rows[:, None] - anchors) ** 2).sum(axis=2)
    order = np.argsort(squares, axis=1, kind="stable")[:, :s]
    np.testing.assert_array_equal(numbers, order)
    np.testing.assert_array_equal(distances, np.take_along_axis(squares, order, axis=1))


def test_shares_are_gaussian_weights_that_sum_to_one():
    distances = np.sort(np.random.default_rng(1).uniform(0, 9, size=(50, 5)), axis=1)
    weights = np.exp(-distances / 2.5)
    np.testing.assert_allclose(anchor_shares(distances, 2.5), weights / weights.sum(axis=1, keepdims=True), rtol=1e-13)


def test_a_row_far_from_all_anchors_has_shares():
    shares = anchor_shares(np.array([[1e12, 1e12 + 1, 1e12 + 1e9]]), 1.0)
    np.testing.assert_allclose(shares, [[1 / (1 + np.exp(-1)), 1 / (1 + np.e), 0]], rtol=1e-12)


def test_scores_are_the_product_of_the_mixtures_with_the_weights():
    rows, anchors, weights, _ = sample()
    numbers, distances = nearest_anchors(rows, anchors, 4)
    shares = anchor_shares(distances, 2.0)
    dense = np.zeros((len(rows), len(anchors)))
    np.put_along_axis(dense, numbers, shares, axis=1)
    np.testing.assert_allclose(anchor_scores(numbers, shares, weights), dense @ weights, atol=1e-14)


@pytest.mark.parametrize("layers", [1, 2])
def test_codes_bit_by_bit(layers):
    rows, anchors, weights, thresholds = sample()
    codes = encode_anchors(rows, anchors, 2.0, weights, thresholds if layers == 2 else None, n_neighbours=4)
    numbers, distances = nearest_anchors(rows, anchors, 4)
    y = anchor_scores(numbers, anchor_shares(distances, 2.0), weights)
    expected = y > 0
    if layers == 2:
        second = [[v - b > 0 if v > 0 else c - v > 0 for v, b, c in zip(row, *thresholds, strict=True)] for row in y]
        expected = np.concatenate([expected, second], axis=1)
    assert codes.shape == (300, 2 if layers == 1 else 3)
    np.testing.assert_array_equal(unpack_bits(codes, codes.shape[1] * 8)[:, : 11 * layers], expected)
    assert not unpack_bits(codes, codes.shape[1] * 8)[:, 11 * layers :].any()


def test_codes_do_not_depend_on_blocks_or_on_the_dtype_of_the_same_values():
    rows, anchors, weights, thresholds = sample(2500, d=33)
    whole = encode_anchors(rows, anchors, 2.0, weights, thresholds, n_neighbours=5)
    for size in (1, 7, 1000):
        few = rows[: 300 * size]
        parts = [
            encode_anchors(few[i : i + size], anchors, 2.0, weights, thresholds, n_neighbours=5)
            for i in range(0, len(few), size)
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole[: len(few)])
    small = np.random.default_rng(2).integers(0, 100, size=(200, 33))
    found = {
        dtype: encode_anchors(small.astype(dtype), anchors * 40, 3e3, weights, n_neighbours=5)
        for dtype in ("f2", "f4", "f8", "u1", "i1", ">f4")
    }
    assert all(np.array_equal(codes, found["f8"]) for codes in found.values())


def test_unusable_rows_are_named():
    rows, anchors, weights, _ = sample(1500)
    rows[[3, 1200], 0] = np.nan, np.inf
    for call in (nearest_anchors, lambda x, a, s, **o: encode_anchors(x, a, 1.0, weights, n_neighbours=s, **o)):
        with pytest.raises(NonFiniteError) as caught:
            call(rows, anchors, 3, first_row=100)
        assert caught.value.rows == (103, 1300)
        far = np.zeros((1500, 7))
        far[1400] = 1e200
        with pytest.raises(BadInputError, match=r"row 1500 .*scale the vectors down"):
            call(far, anchors, 3, first_row=100)
        with pytest.raises(BadInputError, match="vectors of dimension 7"):
            call(rows[:, :5], anchors, 3)
    far[1400] = 1e38  # the end of float32 is no limit: distances are float64
    assert encode_anchors(far.astype(np.float32), anchors, 1.0, weights, n_neighbours=3).shape == (1500, 2)


def test_no_rows_have_no_codes():
    _, anchors, weights, _ = sample()
    assert encode_anchors(np.empty((0, 7), np.float32), anchors, 1.0, weights, n_neighbours=3).shape == (0, 2)
