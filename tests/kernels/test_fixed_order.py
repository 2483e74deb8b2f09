"""The exponential against exact decimals, and against its definition in plain Python floats."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.kernels.fixed_order import LN2_HIGH, LN2_LOW, PER_LN2, exp_minus


def plain_exp_minus(x):
    k = math.floor(x * PER_LN2 + 0.5)
    t = (x - k * LN2_HIGH) - k * LN2_LOW
    value = -1.0 / math.factorial(13)
    for i in range(12, -1, -1):
        value = value * t + (-1.0) ** i / math.factorial(i)
    return value * 2.0**-k


@settings(max_examples=200, deadline=None)
@given(st.floats(0, 708))
def test_the_exponential_is_exact_to_a_unit_in_the_last_place(x):
    with localcontext() as context:
        context.prec = 60
        exact = (-Decimal(x)).exp()
        assert abs(Decimal(float(exp_minus(x))) - exact) <= Decimal(float(np.spacing(float(exact))))


def test_the_exponential_at_its_ends():
    assert exp_minus(0.0) == 1.0
    assert exp_minus(800.0) == exp_minus(1e300) == exp_minus(np.inf) == 0.0
    steps = np.array([exp_minus(x) for x in np.linspace(0, 750, 5000)])
    assert (np.diff(steps) <= 0).all()


def test_the_exponential_is_one_sequence_of_operations():
    values = np.concatenate([np.linspace(0, 4, 4001), np.random.default_rng(0).uniform(0, 708, 4000), [1e-300, 0.0]])
    assert [exp_minus(value) for value in values] == [plain_exp_minus(float(value)) for value in values]
