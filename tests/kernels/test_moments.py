"""Moments against two-pass sums in long double."""

from __future__ import annotations

import numpy as np
import pytest

from och_dist.errors import BadInputError, ConflictError
from och_dist.kernels.moments import COPIED_BYTES, block_moments, nonfinite_rows


def two_pass(block):
    wide = block.astype(np.longdouble)
    mean = wide.mean(axis=0)
    centred = wide - mean
    return mean.astype("f8"), (centred.T @ centred / len(block)).astype("f8")


def rows_far_from_zero(n=3000, d=7, dtype="f8"):
    rng = np.random.default_rng(1)
    return (1e4 + rng.standard_normal((n, d)) @ rng.standard_normal((d, d))).astype(dtype)


@pytest.mark.parametrize("dtype", ["f4", "f8", ">f8"])
def test_mean_and_covariance_of_rows_far_from_zero(dtype):
    block = rows_far_from_zero(dtype=dtype)
    result = block_moments(block, block[:10].mean(axis=0))
    mean, covariance = two_pass(block)
    assert result.count == len(block)
    np.testing.assert_allclose(result.mean, mean, rtol=1e-14)
    np.testing.assert_allclose(result.covariance, covariance, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(result.covariance, np.cov(block.T.astype("f8"), ddof=0), rtol=1e-9, atol=1e-11)
    assert np.array_equal(result.covariance, result.covariance.T)


@pytest.mark.parametrize("dtype", ["f2", "u1", "i1"])
def test_other_dtypes(dtype):
    block = np.random.default_rng(2).integers(0, 100, (500, 5)).astype(dtype)
    result = block_moments(block, np.full(5, 50.0))
    mean, covariance = two_pass(block)
    np.testing.assert_allclose(result.mean, mean, rtol=1e-14)
    np.testing.assert_allclose(result.covariance, covariance, rtol=1e-12, atol=1e-10)


def test_rows_are_copied_a_few_at_a_time():
    block = np.tile(rows_far_from_zero(3000, 7), (150, 1))
    assert block.nbytes > COPIED_BYTES
    parts, whole = block_moments(block, block[0]), block - block[0]
    np.testing.assert_allclose(parts.outer, np.triu(whole.T @ whole), rtol=1e-11, atol=1e-6)
    np.testing.assert_allclose(parts.total, whole.sum(axis=0), rtol=1e-11, atol=1e-6)


def test_merge_is_associative_and_commutative():
    block = rows_far_from_zero(900)
    a, b, c = (block_moments(part, block[0]) for part in np.split(block, 3))
    left, right, swapped = a.merge(b).merge(c), a.merge(b.merge(c)), b.merge(a)
    assert left.count == right.count == 900
    np.testing.assert_allclose(left.outer, right.outer, rtol=1e-14)
    np.testing.assert_allclose(left.total, right.total, rtol=1e-11, atol=1e-10)
    assert np.array_equal(swapped.outer, a.merge(b).outer)
    assert np.array_equal(swapped.total, a.merge(b).total)
    assert a.count == 300  # merging changes no operand


@pytest.mark.parametrize("value", [0.0, 5.3, 1e-3, 7e7 + 0.1])
@pytest.mark.parametrize("pilot", [0.0, 1.0])
def test_a_constant_dimension_has_no_variance(value, pilot):
    block = np.random.default_rng(0).standard_normal((50_000, 3))
    block[:, 1] = value
    covariance = block_moments(block, np.full(3, pilot)).covariance
    assert not covariance[1].any()
    assert not covariance[:, 1].any()
    np.testing.assert_allclose(np.diag(covariance)[[0, 2]], 1.0, atol=0.03)


def test_small_but_real_variance_is_kept():
    block = np.zeros((1000, 2))
    block[:, 1] = 1.0 + 1e-5 * np.random.default_rng(0).standard_normal(1000)
    variance = block_moments(block, np.zeros(2)).covariance[1, 1]
    assert variance == pytest.approx(block[:, 1].var(), rel=1e-4)


def test_the_input_is_not_changed():
    block, pilot = np.ones((5, 2)), np.full(2, 0.5)
    block_moments(block, pilot)
    assert (block == 1).all()
    assert (pilot == 0.5).all()


def test_errors_say_what_was_expected():
    with pytest.raises(ConflictError, match="different pilots"):
        block_moments(np.ones((1, 2)), np.zeros(2)).merge(block_moments(np.ones((1, 2)), np.ones(2)))
    with pytest.raises(BadInputError, match="cover no rows"):
        _ = block_moments(np.empty((0, 2)), np.zeros(2)).mean
    with pytest.raises(BadInputError, match=r"expected \(n, 2\)"):
        block_moments(np.zeros((3, 4)), np.zeros(2))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4"])
def test_rows_that_are_not_finite(dtype):
    block = np.full((3000, 500), 3.0, dtype)
    block[[0, 2047, 2999], [499, 3, 0]] = np.nan, np.inf, -np.inf
    found = nonfinite_rows(block)
    assert found.tolist() == [0, 2047, 2999]
    assert found.dtype == np.int64
    assert nonfinite_rows(block[1:2047]).size == 0


def test_integers_and_nothing_are_finite():
    assert nonfinite_rows(np.full((3, 2), 255, "u1")).size == 0
    assert nonfinite_rows(np.empty((0, 2), "f4")).size == 0
