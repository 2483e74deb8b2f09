"""Codes of a block: the exact definition, and the same bytes for every blocking, dtype and BLAS kernel."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, NonFiniteError
from och_dist.kernels.project import encode_linear

DTYPES = ["f2", "f4", "f8", "u1", "i1"]
CODES_OF_A_SEED = """
import hashlib, numpy as np
from och_dist.kernels.project import encode_linear
rng = np.random.default_rng(11)
x = rng.integers(-3, 4, (6000, 40)).astype("f4")
w = rng.integers(-2, 3, (40, 29)).astype("f4")
mean, offsets = np.full(40, 0.1, "f4"), np.zeros(29, "f4")
print(hashlib.sha256(encode_linear(x, mean, w, offsets).tobytes()).hexdigest())
"""


def exact_codes(block, mean, projection, offsets):
    """The definition in rational numbers."""
    wide = block.astype("f8") if block.dtype == np.dtype("f8") else block.astype("f4")
    centred = (wide - mean).astype("f4")
    bits = np.zeros((len(block), projection.shape[1]), dtype=bool)
    for i, row in enumerate(centred):
        exact_row = [Fraction(float(c)) for c in row]
        for k in range(projection.shape[1]):
            terms = (c * Fraction(float(w)) for c, w in zip(exact_row, projection[:, k], strict=True))
            bits[i, k] = sum(terms, Fraction(float(offsets[k]))) > 0
    return np.packbits(bits, axis=1, bitorder="little")


def random_model(rng, d, r):
    mean = rng.standard_normal(d).astype("f4")
    projection = rng.standard_normal((d, r)).astype("f4")
    return mean, projection, (0.1 * rng.standard_normal(r)).astype("f4")


def random_rows(rng, n, d, dtype):
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal((n, d)).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, (n, d), endpoint=True).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 31, 32, 33, 70])
def test_codes_follow_the_definition(dtype, d):
    rng = np.random.default_rng(d)
    model = random_model(rng, d, 13)
    block = random_rows(rng, 9, d, dtype)
    codes = encode_linear(block, *model)
    assert codes.dtype == np.uint8
    assert np.array_equal(codes, exact_codes(block, *model))


@pytest.mark.parametrize("dtype", ["f4", "f8", ">f4"])
def test_scores_of_nearly_zero_follow_the_definition(dtype):
    """Rows orthogonal to the columns but for one unit in the last place, far below a float32 sum's error."""
    rng = np.random.default_rng(3)
    w = rng.integers(1, 50, (48, 12)).astype("f4")
    block = np.zeros((40, 48), dtype)
    for i in range(40):
        a, b, k = rng.integers(0, 24), rng.integers(24, 48), i % 12
        block[i, a], block[i, b] = w[b, k], -w[a, k]
        block[i, a] *= (1.0, 1.0 + 2.0**-23, 1.0 - 2.0**-23)[i % 3]
    model = np.zeros(48, "f4"), w, np.zeros(12, "f4")
    codes = encode_linear(block, *model)
    assert np.array_equal(codes, exact_codes(block, *model))
    own_bit = np.unpackbits(codes, axis=1, bitorder="little")[np.arange(40), np.arange(40) % 12]
    assert own_bit.tolist() == [int(i % 3 == 1) for i in range(40)]


def test_cancellation_beyond_float64_is_resolved():
    w = np.array([[2.0**60], [1.0], [-(2.0**60)]], "f4")
    rows = np.array([[1, 2.0**-20, 1], [1, -(2.0**-20), 1], [1, 0, 1]], "f4")
    codes = encode_linear(rows, np.zeros(3, "f4"), w, np.zeros(1, "f4"))
    assert codes.tolist() == [[1], [0], [0]]


def test_a_row_at_the_mean_has_the_signs_of_the_offsets():
    mean, projection, _ = random_model(np.random.default_rng(0), 20, 9)
    offsets = np.array([0, 1e-30, -1e-30, 5, -5, 0, 1, 1e-45, -0.0], "f4")
    codes = encode_linear(mean[None], mean, projection, offsets)
    assert np.array_equal(codes, np.packbits(offsets > 0, bitorder="little")[None])


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bytes_for_every_blocking(dtype):
    rng = np.random.default_rng(5)
    # Small integers give thousands of scores that are exactly zero.
    block = rng.integers(0, 4, (10_000, 24)).astype(dtype)
    mean, w = np.full(24, 1.5, "f4"), rng.integers(-2, 3, (24, 20)).astype("f4")
    model = mean, w, np.zeros(20, "f4")
    whole = encode_linear(block, *model)
    assert np.count_nonzero((block - mean) @ w == 0) > 1000
    for size in (7, 16, 4096):
        parts = [encode_linear(block[i : i + size], *model) for i in range(0, len(block), size)]
        assert np.array_equal(np.concatenate(parts), whole)
    single = [encode_linear(block[i : i + 1], *model) for i in range(300)]
    assert np.array_equal(np.concatenate(single), whole[:300])
    assert np.array_equal(encode_linear(block[::-1], *model)[::-1], whole)


@pytest.mark.parametrize("kernel", ["Haswell", "Prescott"])
def test_same_bytes_for_another_blas_kernel(kernel):
    repository = str(Path(__file__).parents[2])
    environment = {**os.environ, "OPENBLAS_CORETYPE": kernel, "PYTHONPATH": repository}
    command = [sys.executable, "-c", CODES_OF_A_SEED]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    rng = np.random.default_rng(11)
    x, w = rng.integers(-3, 4, (6000, 40)).astype("f4"), rng.integers(-2, 3, (40, 29)).astype("f4")
    codes = encode_linear(x, np.full(40, 0.1, "f4"), w, np.zeros(29, "f4"))
    assert other.stdout.strip() == hashlib.sha256(codes.tobytes()).hexdigest()


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    d=st.integers(1, 40),
    r=st.integers(1, 20),
    scale=st.sampled_from([1e-40, 1e-25, 1e-3, 1.0, 1e10, 1e18]),
)
def test_any_scale_follows_the_definition(seed, d, r, scale):
    rng = np.random.default_rng(seed)
    mean, projection, offsets = random_model(rng, d, r)
    block = (scale * rng.integers(-2, 3, (5, d))).astype("f4")
    model = (scale * mean).astype("f4"), projection, (scale * offsets).astype("f4")
    assert np.array_equal(encode_linear(block, *model), exact_codes(block, *model))


def test_pad_bits_are_zero_and_no_rows_give_no_codes():
    model = np.zeros(3, "f4"), np.ones((3, 11), "f4"), np.zeros(11, "f4")
    assert encode_linear(np.ones((2, 3), "u1"), *model).tolist() == [[255, 7], [255, 7]]
    assert encode_linear(np.empty((0, 3), "f4"), *model).shape == (0, 2)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_rows_that_are_not_finite_are_named(dtype):
    block = np.zeros((5000, 3), dtype)
    bad = [2, 1500, *range(4000, 4020)]
    block[bad, 1] = np.nan
    block[1500, 1] = -np.inf
    with pytest.raises(NonFiniteError, match="22 rows hold NaN or infinity") as caught:
        encode_linear(block, np.zeros(3, "f4"), np.ones((3, 4), "f4"), np.zeros(4, "f4"), first_row=100)
    assert caught.value.rows == tuple(100 + row for row in bad[:10])
    assert caught.value.total == 22


@pytest.mark.parametrize(("dtype", "value"), [("f4", 3e38), ("f8", 1e200), ("f8", 1e37)])
def test_overflow_is_an_error_that_names_the_row(dtype, value):
    block = np.zeros((3000, 2), dtype)
    block[2500, 0] = value
    with pytest.raises(BadInputError, match="overflow in the projection of row 2507") as caught:
        encode_linear(block, np.zeros(2, "f4"), np.full((2, 3), 2, "f4"), np.zeros(3, "f4"), first_row=7)
    assert not isinstance(caught.value, NonFiniteError)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (np.zeros((2, 4), "f4"), r"shape \(2, 4\); expected \(n, 3\)"),
        (np.zeros(3, "f4"), r"expected \(n, 3\)"),
        (np.zeros((2, 3), "i8"), "dtype int64; expected float16"),
    ],
)
def test_foreign_rows_are_refused(block, message):
    with pytest.raises(BadInputError, match=message):
        encode_linear(block, np.zeros(3, "f4"), np.ones((3, 4), "f4"), np.zeros(4, "f4"))
