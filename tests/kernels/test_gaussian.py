"""Gaussian features and the signs of their combinations, against the definition in plain Python floats."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, NonFiniteError
from och_dist.kernels.gaussian import GaussianFeatures, encode_gaussian
from och_dist.kernels.packing import unpack_bits
from tests.kernels.test_fixed_order import plain_exp_minus


def plain_dot(left, right):
    """32 partial sums over whole groups of 32, added one by one to the sum of the rest."""
    whole = len(left) - len(left) % 32
    partial, total = [0.0] * 32, 0.0
    for k in range(len(left)):
        term = float(left[k]) * float(right[k])
        if k < whole:
            partial[k % 32] += term
        else:
            total += term
    for value in partial:
        total += value
    return total


def plain_features(row, mean, bases, bandwidth, bias):
    wide = row.astype("f8") if row.dtype == np.dtype("f8") else row.astype("f4")
    centred = (wide - mean).astype("f4")
    norm = math.sqrt(plain_dot(centred, centred))
    found = []
    for base, shift in zip(bases, bias, strict=True):
        separation = plain_dot(base, base)
        if norm > 0:
            separation = (1.0 + separation) - 2.0 * (plain_dot(centred, base) / norm)
        found.append(plain_exp_minus(min(max(separation, 0.0) * (0.5 / bandwidth), 700.0)) - float(shift))
    return found


def plain_bits(block, mean, bases, bandwidth, bias, weights):
    features = [plain_features(row, mean, bases, bandwidth, bias) for row in block]
    return np.array([[plain_dot(line, column) > 0 for column in weights.T] for line in features])


def random_model(rng, d, m, r):
    bases = rng.normal(size=(m, d))
    bases /= np.linalg.norm(bases, axis=1, keepdims=True)
    mean = rng.normal(size=d).astype("f4")
    return mean, bases.astype("f4"), float(rng.uniform(0.3, 2)), rng.uniform(0, 1, m), rng.normal(size=(m, r))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "u1", "i1"])
@pytest.mark.parametrize("d", [1, 33, 64])
def test_codes_follow_the_definition(dtype, d):
    rng = np.random.default_rng(d)
    model = random_model(rng, d, 35, 13)
    block = rng.integers(0, 9, (12, d)).astype(dtype)
    codes = encode_gaussian(block, *model)
    assert codes.dtype == np.uint8
    assert not (codes[:, 1] >> 5).any()
    np.testing.assert_array_equal(unpack_bits(codes, 13), plain_bits(block, *model))
    features = GaussianFeatures(*model[:4])
    found = features.of_centred(*features.centred(block))
    y = block.astype("f8") - model[0]
    y /= np.linalg.norm(y, axis=1, keepdims=True)
    distances = ((y[:, None] - model[1]) ** 2).sum(axis=2)
    np.testing.assert_allclose(found, np.exp(-distances / (2 * model[2])) - model[3], atol=1e-6)
    plain = [plain_features(row, *model[:4]) for row in block]
    assert np.abs(found - plain).max() <= features.error()


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32), d=st.integers(1, 70), m=st.integers(2, 40))
def test_scores_of_nothing_but_rounding_follow_the_definition(seed, d, m):
    """Column k is orthogonal to the features of row k, so that the order of the sums decides the sign."""
    rng = np.random.default_rng(seed)
    model = random_model(rng, d, m, 8)
    block = rng.normal(size=(8, d)).astype("f4")
    weights = model[4]
    for k in range(8):
        line = np.array(plain_features(block[k], *model[:4]))
        for _ in range(2):  # what the first round leaves may be small, and rounding errors large beside it
            weights[:, k] -= line * (line @ weights[:, k]) / (line @ line)
    features = GaussianFeatures(*model[:4])
    scores = np.diag(features.of_centred(*features.centred(block)) @ weights)
    assert (np.abs(scores) <= features.error() * np.abs(weights).sum(axis=0)).all()
    codes = encode_gaussian(block, *model)
    np.testing.assert_array_equal(unpack_bits(codes, 8), plain_bits(block, *model))


def test_rows_at_the_mean_have_a_code_of_their_own():
    rng = np.random.default_rng(3)
    model = random_model(rng, 20, 9, 16)
    block = np.stack([model[0], model[0]])
    np.testing.assert_array_equal(unpack_bits(encode_gaussian(block, *model), 16), plain_bits(block, *model))
    scale = 2.0**-140  # their differences from the mean are denormal, their directions are not
    tiny = (rng.normal(size=(5, 20)) * scale).astype("f4")
    model = (np.zeros(20, "f4"), *model[1:])
    np.testing.assert_array_equal(unpack_bits(encode_gaussian(tiny, *model), 16), plain_bits(tiny, *model))


def test_same_bytes_for_every_blocking():
    rng = np.random.default_rng(5)
    mean, bases, bandwidth, bias, weights = random_model(rng, 24, 30, 20)
    # Opposite weights of equal bases: thousands of scores are exactly zero.
    bases[15:], bias[15:], weights[15:, :10] = bases[:15], bias[:15], -weights[:15, :10]
    model = mean, bases, bandwidth, bias, weights
    block = rng.integers(0, 4, (3000, 24)).astype("u1")
    whole = encode_gaussian(block, *model)
    for size in (1, 7, 1000):
        parts = [encode_gaussian(block[i : i + size], *model) for i in range(0, 1000, size)]
        np.testing.assert_array_equal(np.concatenate(parts)[:1000], whole[:1000])
    np.testing.assert_array_equal(unpack_bits(whole[:20], 20), plain_bits(block[:20], *model))
    assert encode_gaussian(block[:0], *model).shape == (0, 3)


def test_rows_that_cannot_be_encoded_are_refused_by_their_number():
    model = random_model(np.random.default_rng(0), 3, 4, 2)
    rows = np.ones((1000, 3))
    rows[700, 1] = 1e60
    with pytest.raises(BadInputError, match="overflow in row 5700"):
        encode_gaussian(rows, *model, first_row=5000)
    rows[[600, 900], 2] = np.inf, np.nan
    with pytest.raises(NonFiniteError) as caught:
        encode_gaussian(rows, *model, first_row=5000)
    assert caught.value.rows == (5600, 5900)
    with pytest.raises(BadInputError, match=r"expected \(n, 3\)"):
        encode_gaussian(rows[:, :2], *model)
