from __future__ import annotations

import math

import numpy as np
import pytest

from och_dist.kernels.ordinal import near_sets
from och_dist.methods.oeh import embedding_loss_and_gradient, penalty_and_gradient


def problem(seed, n=14, p=5, r=8, k=3):
    rng = np.random.default_rng(seed)
    reduced = rng.normal(size=(n, p))
    squares = ((reduced[:, None] - reduced) ** 2).sum(axis=2)
    return reduced, near_sets(squares, np.eye(n, dtype=bool), k), 0.5 * rng.normal(size=(p, r))


def dumb_loss(reduced, anchor, relations, weights, margin):
    """Loss and number of violated relations, one pair at a time."""
    codes = [
        [math.tanh(sum(a * w for a, w in zip(row, column, strict=True))) for column in weights.T] for row in reduced
    ]
    likeness = [sum(x * y for x, y in zip(code, codes[anchor], strict=True)) for code in codes]
    total, violated = 0.0, 0
    for j, near in enumerate(relations):
        for l, far in enumerate(relations):  # noqa: E741
            if near == 1 and far == -1 and (excess := margin + likeness[l] - likeness[j]) > 0:
                total += 1 / (1 + math.exp(-excess))
                violated += 1
    return total, violated


def central_differences(f, weights, step=1e-6):
    gradient = np.empty_like(weights)
    for place in np.ndindex(weights.shape):
        shift = np.zeros_like(weights)
        shift[place] = step
        gradient[place] = (f(weights + shift) - f(weights - shift)) / (2 * step)
    return gradient


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_loss_is_that_of_a_double_loop(seed, margin):
    reduced, relations, weights = problem(seed)
    total, violated, _ = embedding_loss_and_gradient(reduced, seed, relations[seed], weights, margin=margin)
    expected = dumb_loss(reduced, seed, relations[seed], weights, margin)
    assert violated == expected[1] > 0
    assert total == pytest.approx(expected[0], rel=1e-12)
    assert violated < 3 * 10  # some relations hold, so that leaving them out is tested


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_gradient_is_that_of_finite_differences(seed, margin):
    reduced, relations, weights = problem(seed)

    def loss(w):
        total, violated, _ = embedding_loss_and_gradient(reduced, seed, relations[seed], w, margin=margin)
        assert violated == expected_violated  # the loss has a step where a relation becomes satisfied
        return total

    _, expected_violated, gradient = embedding_loss_and_gradient(reduced, seed, relations[seed], weights, margin=margin)
    np.testing.assert_allclose(gradient, central_differences(loss, weights), atol=2e-8)
    assert np.abs(gradient).max() > 0.1


def test_no_violated_relation_no_gradient():
    # A near landmark with the same code as the anchor, a far one with the opposite code.
    reduced = np.array([[9.0], [9.0], [-9.0]])
    relations = near_sets(np.abs(reduced - reduced.T), np.eye(3, dtype=bool), 1)
    total, violated, gradient = embedding_loss_and_gradient(reduced, 0, relations[0], np.ones((1, 8)), margin=1.0)
    assert (total, violated) == (0.0, 0)
    assert not gradient.any()


def test_long_codes_do_not_overflow():
    reduced, relations, _ = problem(0)
    weights = np.random.default_rng(1).normal(size=(5, 4096)) * 50
    with np.errstate(all="raise", under="ignore"):
        total, _, gradient = embedding_loss_and_gradient(reduced, 0, relations[0], weights, margin=1.0)
    assert np.isfinite(total)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
def test_penalty_gradient_is_that_of_finite_differences(shape):
    weights = np.random.default_rng(2).normal(size=shape)
    value, gradient = penalty_and_gradient(weights)
    assert value == pytest.approx(np.linalg.norm(weights @ weights.T - np.eye(shape[0])) ** 2 / 4)
    np.testing.assert_allclose(gradient, central_differences(lambda w: penalty_and_gradient(w)[0], weights), atol=1e-6)
    frame = np.linalg.qr(weights.T)[0].T
    if shape[0] < shape[1]:
        np.testing.assert_allclose(penalty_and_gradient(frame)[1], 0, atol=1e-13)
