from __future__ import annotations

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist import ITQ
from och_dist.errors import BadInputError
from och_dist.methods.base import TrainingData
from och_dist.methods.itq import axes_for_bits
from tests.support.method_checks import (
    check_codes_are_signs,
    clustered,
    real_map,
    real_rows,
    training_data,
)


def projections(model, x):
    """Y (n, r) float64 in units of the rms of Y."""
    y = (x - x.mean(axis=0, dtype=np.float64)) @ model.components_.T
    return y / np.sqrt((y**2).mean())


def loss_of(scores):
    return ((np.where(scores > 0, 1, -1) - scores) ** 2).mean()


def plain_rounds(y, rotation, rounds):
    """The alternation in the plainest form: signs, then the orthogonal Procrustes problem."""
    losses = []
    for _ in range(rounds):
        signs = np.where(y @ rotation > 0, 1.0, -1.0)
        left, _, right = np.linalg.svd(y.T @ signs)
        rotation = left @ right
        losses.append(((signs - y @ rotation) ** 2).mean())
    return rotation, losses


@pytest.mark.parametrize("n_bits", [1, 8, 13, 40])
def test_codes_are_the_signs_of_rotated_principal_axes(n_bits):
    x = clustered()
    model = ITQ(n_bits).fit(x)
    check_codes_are_signs(model, x)
    np.testing.assert_allclose(model.rotation_ @ model.rotation_.T, np.eye(n_bits), atol=1e-12)
    np.testing.assert_allclose(model.projection_, model.components_.T @ model.rotation_, atol=1e-6)
    covariance = np.cov(x.T.astype(np.float64), bias=True)
    variances = np.diag(model.components_ @ covariance @ model.components_.T)
    np.testing.assert_allclose(variances, np.linalg.eigvalsh(covariance)[::-1][:n_bits], rtol=1e-6)
    assert not model.offsets_.any()


def test_the_rounds_are_those_of_the_plain_alternation():
    x = clustered(5000, d=24)
    start = ITQ(16, max_iter=0).fit(x)
    y = projections(start, x)
    for rounds in (1, 6):
        model = ITQ(16, max_iter=rounds).fit(x)
        rotation, losses = plain_rounds(y, start.rotation_, rounds)
        np.testing.assert_allclose(model.rotation_, rotation, atol=1e-4)
        np.testing.assert_allclose(model.loss_curve_, losses, rtol=1e-5)


@pytest.mark.parametrize(("n_bits", "seed"), [(8, 0), (16, 1), (32, 2)])
def test_the_loss_never_rises(n_bits, seed):
    x = clustered(seed=seed)
    model = ITQ(n_bits, random_state=seed).fit(x)
    curve = np.array(model.loss_curve_)
    assert len(curve) == model.n_iter_ > 10
    assert np.diff(curve).max() < 1e-6
    assert curve[-1] < 0.98 * loss_of(projections(model, x) @ ITQ(n_bits, max_iter=0).fit(x).rotation_)
    # The curve pairs a rotation with the signs of the round before; their own signs are better still.
    final = loss_of(projections(model, x) @ model.rotation_)
    assert curve[-1] - 1e-3 < final < curve[-1] + 1e-6


def test_the_rotation_settles_where_the_signs_repeat():
    x = clustered(100, d=6)
    model = ITQ(3, max_iter=1000).fit(x)
    assert model.n_iter_ < 1000
    y = projections(model, x)
    again, _ = plain_rounds(y, model.rotation_, 1)
    np.testing.assert_allclose(again, model.rotation_, atol=1e-5)


@pytest.mark.parametrize(("n_bits", "d"), [(8, 40), (16, 32), (32, 64)])
def test_quantisation_loss_against_faiss(n_bits, d):
    # Faiss centres the rows and scales them to unit length; of a symmetric set of unit rows both are idle. Its
    # rotation is U V where the Procrustes problem asks for U V^T, so that its loss does not settle: an upper bound.
    half = clustered(1500, d=d) - 3
    half /= np.linalg.norm(half, axis=1, keepdims=True)
    x = np.concatenate([half, -half]).astype(np.float32)
    theirs = faiss.ITQTransform(d, n_bits, True)
    theirs.train(x)
    ours = ITQ(n_bits).fit(x)
    scores = [theirs.apply(x), (x - ours.mean_) @ ours.projection_]
    energies = [(s.astype(np.float64) ** 2).sum() for s in scores]
    assert energies[0] == pytest.approx(energies[1], rel=1e-4)
    losses = [loss_of(s) for s in scores]
    assert 0.95 * losses[0] < losses[1] < losses[0]


def test_axes_come_from_the_moments_and_the_rotation_from_the_pool():
    x = clustered(4000)
    whole, part = training_data(x), training_data(x, train_rows=300, seed=1)
    models = [ITQ(12).fit_training(data) for data in (whole, part)]
    # Sums are taken about the mean of the pool, so the moments agree up to rounding.
    np.testing.assert_allclose(models[0].components_, models[1].components_, rtol=0, atol=1e-12)
    assert not np.allclose(models[0].rotation_, models[1].rotation_)
    pool = np.einsum("ij,rj->ir", part.rows - whole.mean, models[1].components_)
    scale = np.sqrt(axes_for_bits(whole, 12)[0].mean())
    _, losses = plain_rounds(pool / scale, ITQ(12, max_iter=0).fit_training(part).rotation_, 50)
    assert models[1].loss_curve_[-1] == pytest.approx(losses[-1], rel=0.02)


def test_a_pool_smaller_than_the_code_is_noted():
    data = training_data(clustered(400), train_rows=5)
    model = ITQ(12).fit_training(data)
    assert model.notes_ == ["5 rows in the pool for 12 bits: the rotation stays partly arbitrary"]
    assert model.manifold_residual_ < 1e-12
    empty = TrainingData(data.count, data.mean, data.covariance, data.rows[:0])
    with pytest.raises(BadInputError, match="the training pool holds no rows; pass at least one"):
        ITQ(12).fit_training(empty)


@settings(deadline=None, max_examples=30)
@given(
    n=st.integers(2, 60), n_distinct=st.integers(1, 12), copies=st.integers(1, 3), offset=st.sampled_from([0, 1, 1000])
)
def test_one_bit_for_each_axis_of_variation_and_no_more(n, n_distinct, copies, offset):
    rng = np.random.default_rng(n * 100 + n_distinct)
    distinct = rng.normal(size=(n, n_distinct)).astype(np.float32) + np.float32(offset)
    x = np.tile(distinct, (1, copies))
    rank = min(n - 1, n_distinct)
    model = ITQ(rank, max_iter=3).fit(x)
    assert np.isfinite(model.projection_).all()
    with pytest.raises(BadInputError) as caught:
        ITQ(rank + 1, max_iter=3).fit(x)
    assert f"n_bits={rank + 1}; the training rows (n_samples={n}, n_features={x.shape[1]}) vary along {rank} axes" in (
        str(caught.value)
    )


def test_the_rounding_of_the_moments_is_no_axis():
    # A duplicated column leaves an eigenvalue of up to some ten roundings of the largest.
    for seed in range(300):
        distinct = np.random.default_rng(seed).normal(size=(45, 4)).astype(np.float32)
        with pytest.raises(BadInputError, match="vary along 4 axes"):
            axes_for_bits(training_data(distinct[:, [0, 1, 2, 3, 0]]), 5)


@pytest.mark.parametrize("x", [np.full((50, 6), 0.1, np.float32), np.ones((1, 6), np.float32)], ids=["equal", "one"])
def test_equal_rows_give_no_bit(x):
    with pytest.raises(BadInputError, match=r"n_bits=1; .* vary along 0 axes .*: use fewer bits, or a method without"):
        ITQ(1).fit(x)


def test_constant_dimensions_are_legal():
    x = np.insert(clustered(200, d=20), 3, 7.5, axis=1)
    model = ITQ(20).fit(x)
    assert np.abs(model.projection_[3]).max() < 1e-6
    with pytest.raises(BadInputError, match="vary along 20 axes"):
        ITQ(21).fit(x)


def test_real_descriptors():
    # 40,000 rows of the same set: 1.9 times the precision of LSH at 32 bits, 1.5 at 64.
    assert 1.3 < real_map("itq") / real_map("lsh") < 1.8
    # The rotation is worth more than a random one, and short codes profit most.
    assert real_map("itq", 32) > 1.02 * real_map("itq", 32, max_iter=0)


def test_quantisation_loss_of_real_descriptors_against_faiss():
    x = real_rows()[0][:4000]
    ours = ITQ(32).fit(x)
    y = ((x - ours.mean_) @ ours.components_.T).astype(np.float32)
    theirs = faiss.ITQMatrix(32)
    theirs.train(y)
    losses = [loss_of(s) for s in (y @ ours.rotation_, theirs.apply(y))]
    assert 0.99 * losses[1] < losses[0] < losses[1]
