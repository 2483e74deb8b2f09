from __future__ import annotations

import numpy as np
import pytest

from och_dist.errors import BadInputError
from och_dist.methods.linear import balanced, polar, residual, retract, tangent

SHAPES = [(1, 1), (3, 3), (4, 9), (9, 4), (1, 7), (7, 1), (20, 64), (20, 13)]


@pytest.mark.parametrize("shape", SHAPES)
def test_polar_is_on_the_manifold_and_keeps_its_points(shape):
    matrix = np.random.default_rng(0).normal(size=shape)
    point = polar(matrix)
    assert point.shape == shape
    assert residual(point) < 1e-13
    np.testing.assert_allclose(polar(point), point, atol=1e-13)
    # The polar factor leaves a symmetric positive part: A = P U (or U P).
    part = matrix @ point.T if shape[0] <= shape[1] else point.T @ matrix
    np.testing.assert_allclose(part, part.T, atol=1e-12)
    assert np.linalg.eigvalsh(part).min() > 0


@pytest.mark.parametrize("shape", [(3, 8), (8, 3)])
def test_polar_is_nearer_than_other_points(shape):
    rng = np.random.default_rng(1)
    matrix = rng.normal(size=shape)
    best = np.linalg.norm(matrix - polar(matrix))
    for _ in range(50):
        other = polar(polar(matrix) + 0.3 * rng.normal(size=shape))
        assert np.linalg.norm(matrix - other) > best


@pytest.mark.parametrize("shape", SHAPES)
def test_tangent_keeps_the_constraint_to_first_order(shape):
    rng = np.random.default_rng(2)
    point, gradient = polar(rng.normal(size=shape)), rng.normal(size=shape)
    direction = tangent(gradient, point)
    inner = direction @ point.T if shape[0] <= shape[1] else point.T @ direction
    np.testing.assert_allclose(inner + inner.T, 0, atol=1e-12)
    # A projection: applying it again changes nothing, and the removed part is orthogonal to what is kept.
    np.testing.assert_allclose(tangent(direction, point), direction, atol=1e-12)
    assert abs(np.sum((gradient - direction) * direction)) < 1e-11


@pytest.mark.parametrize("shape", [(4, 9), (9, 4)])
def test_residual_is_first_order_in_a_normal_step_and_second_order_in_a_tangent_one(shape):
    rng = np.random.default_rng(3)
    point, gradient = polar(rng.normal(size=shape)), rng.normal(size=shape)
    assert residual(point + 1e-4 * tangent(gradient, point)) < 1e-5
    assert residual(1.0001 * point) == pytest.approx(2e-4, rel=1e-3)


def test_a_matrix_without_full_rank_is_refused():
    with pytest.raises(BadInputError, match="deficient rank"):
        polar(np.ones((3, 5)))
    with pytest.raises(BadInputError, match="deficient rank"):
        polar(np.zeros((5, 2)))


@pytest.mark.parametrize("shape", [(3, 8), (24, 64), (5, 5), (12, 4), (1, 7)])
@pytest.mark.parametrize("size", [0.0, 0.05, 0.8, 5.0])
def test_a_retraction_is_the_polar_factor(shape, size):
    rng = np.random.default_rng(3)
    point = polar(rng.normal(size=shape))
    step = rng.normal(size=shape)
    moved = point + size * step / np.linalg.norm(step)
    np.testing.assert_allclose(retract(moved), polar(moved), atol=1e-9)
    assert residual(retract(moved)) < 1e-9


@pytest.mark.parametrize("shape", SHAPES)
def test_balancing_keeps_the_directions_and_evens_the_strengths(shape):
    rng = np.random.default_rng(4)
    short = min(shape)
    left, right = (polar(rng.normal(size=(side, short))) for side in shape)
    strengths = np.geomspace(1, 0.05, short)
    matrix = 1e-3 * (left * strengths) @ right.T
    found = left.T @ balanced(matrix) @ right
    np.testing.assert_allclose(found, np.diag(np.diag(found)), atol=1e-5)
    assert np.diag(found).min() > 0.4
    assert np.diag(found).max() < 1.25
    np.testing.assert_allclose(balanced(1e6 * matrix), balanced(matrix), atol=1e-5)
    np.testing.assert_allclose(balanced(matrix.T), balanced(matrix).T, atol=1e-5)


def test_nothing_to_balance():
    assert not balanced(np.zeros((3, 5))).any()
