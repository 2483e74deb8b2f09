"""Scalable graph hashing against the graph written out in full, and codes that are the signs of training."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import eigh

from och_dist import SGH
from och_dist.errors import BadInputError, IntegrityError
from och_dist.kernels.packing import unpack_bits
from och_dist.methods.sgh import graph_factor
from tests.support.method_checks import check_same_bytes_anywhere, clustered, real_map


def quick(n_bits=16, **options):
    return SGH(n_bits, **{"n_bases": 60, **options})


def unit(x):
    y = x.astype(np.float64) - x.mean(axis=0, dtype=np.float64)
    return y / np.linalg.norm(y, axis=1, keepdims=True)


def plain_features(x, model):
    """Kernel features without their means, by the formula."""
    distances = ((unit(x)[:, None] - model.bases_) ** 2).sum(axis=2)
    kernel = np.exp(-distances / (2 * distances.mean()))
    return kernel - kernel.mean(axis=0), distances.mean(), kernel.mean(axis=0)


def test_the_factors_give_the_graph_up_to_the_linearised_exponential():
    y = unit(clustered(200))
    y[0] = 0  # a row at the mean
    half = graph_factor(y)
    linear = half @ half.T - 1
    graph = 2 * np.exp(-((y[:, None] - y) ** 2).sum(axis=2) / 2) - 1
    damping = np.exp(-(y**2).sum(axis=1) / 2)
    error = (linear - graph) / (2 * np.outer(damping, damping))
    product = y @ y.T
    np.testing.assert_allclose(error, np.cosh(1) + np.sinh(1) * product - np.exp(product), atol=1e-9)
    assert error.min() > -1e-9
    assert 0.5 < error.max() < 0.5584
    np.testing.assert_allclose(np.diag(error)[1:], 0, atol=1e-9)


def plain_training(x, model, n_bits, seed, n_sweeps=1):
    """Weights learned with the whole graph and generalised eigenproblems, as the method is written down."""
    features, _, _ = plain_features(x, model)
    n, m = features.shape
    half = graph_factor(unit(x))
    left, right = np.c_[half, np.ones(n)], np.c_[half, -np.ones(n)]
    rest = n_bits * (features.T @ left) @ (features.T @ right).T
    constraint = features.T @ features + 1e-6 * np.eye(m)
    rng = np.random.default_rng(seed)
    rng.choice(n, m, replace=False)
    weights, images = np.zeros((m, n_bits)), np.zeros((m, n_bits))
    order = [*range(n_bits), *(int(k) for _ in range(n_sweeps) for k in rng.permutation(n_bits))]
    for k in order:
        rest = rest + np.outer(images[:, k], images[:, k])
        weights[:, k] = eigh((rest + rest.T) / 2, constraint)[1][:, -1]
        images[:, k] = features.T @ np.where(features @ weights[:, k] > 0, 1, -1)
        rest = rest - np.outer(images[:, k], images[:, k])
    return weights, constraint


@pytest.mark.parametrize("n_sweeps", [0, 1])
def test_weights_are_those_of_the_method_written_out(n_sweeps):
    x = clustered(400)
    model = quick(8, n_bases=25, n_sweeps=n_sweeps, random_state=7).fit(x)
    weights, constraint = plain_training(x, model, 8, 7, n_sweeps)
    weights *= np.sign(np.sum(weights * model.weights_, axis=0))
    np.testing.assert_allclose(model.weights_, weights, rtol=1e-3, atol=1e-4 * np.abs(weights).max())
    lengths = np.diag(model.weights_.T @ constraint @ model.weights_)
    np.testing.assert_allclose(lengths, 1, rtol=1e-4)
    assert model.n_iter_ == 8 * (1 + n_sweeps)


def test_codes_of_training_rows_are_the_signs_of_training():
    x = clustered(900)
    model = quick(20).fit(x)
    features, bandwidth, bias = plain_features(x, model)
    assert model.bandwidth_[0] == pytest.approx(bandwidth, rel=1e-6)
    np.testing.assert_allclose(model.bias_, bias, rtol=1e-6)
    scores = features @ model.weights_
    bits = unpack_bits(model.transform(x), 20)
    clear = np.abs(scores) > 1e-5 * np.abs(scores).max()
    assert clear.mean() > 0.999
    np.testing.assert_array_equal(bits[clear], (scores > 0)[clear])
    np.testing.assert_allclose(scores.sum(axis=0), 0, atol=1e-4)


def test_the_graph_is_used_up_bit_by_bit_and_the_sweep_helps():
    x = clustered(900)
    model = quick(24).fit(x)
    losses = np.array(model.loss_curve_)
    assert losses[0] < 1
    assert (np.diff(losses[:12]) < 0).all()
    assert losses[-1] < losses[23] < 0.5
    assert len(model.eigenvalue_curve_) == 48
    once = quick(24, n_sweeps=0).fit(x)
    assert once.loss_curve_ == model.loss_curve_[:24]
    assert once.eigenvalue_curve_[0] > 4 * once.eigenvalue_curve_[-1]


def test_duplicate_bases_and_few_rows_are_legal():
    rows = clustered(20)
    x = np.repeat(rows, 30, axis=0)
    model = quick(12).fit(x)  # 60 bases, at most 20 of them distinct
    assert np.isfinite(model.weights_).all()
    codes = model.transform(x).reshape(20, 30, -1)
    assert (codes == codes[:, :1]).all()
    few = quick(12).fit(rows)
    assert few.bases_.shape == (20, 40)
    assert few.notes_ == ["n_bases reduced from 60 to 20: no more rows"]
    at_mean = np.concatenate([rows, rows.mean(axis=0, keepdims=True)])
    assert np.isfinite(quick(4).fit(at_mean).weights_).all()


def test_constant_dimensions_change_nothing():
    x = clustered(300, d=30)
    wide = np.insert(x, 5, 7.5, axis=1)
    np.testing.assert_array_equal(quick().fit(wide).transform(wide), quick().fit(x).transform(x))


@pytest.mark.parametrize(
    ("x", "rank"),
    [
        (np.full((50, 6), 0.1, np.float32), 0),
        (np.zeros((50, 6), np.float32), 0),
        (np.arange(6, dtype=np.float32)[None], 0),
        (np.repeat(np.eye(2, 6, dtype=np.float32), 40, axis=0), 1),
        (np.arange(90, dtype=np.float32)[:, None], 1),
        (np.eye(3, 6, dtype=np.float32), 2),
    ],
)
def test_more_bits_than_the_rows_can_give_are_refused(x, rank):
    with pytest.raises(BadInputError, match=rf"n_bits={rank + 1} but .* have rank {rank}; use no more bits"):
        quick(rank + 1).fit(x)
    if rank:
        codes = quick(rank).fit(x).transform(x)
        assert len(np.unique(codes)) > 1


def test_same_codes_for_every_blocking_and_another_blas_kernel(tmp_path):
    rng = np.random.default_rng(11)
    x = rng.integers(0, 4, (3000, 40)).astype("f4")
    model = quick(29).fit(x)
    # Opposite weights of equal bases, so that many scores are zero but for rounding.
    for name in ("bases_", "bias_"):
        getattr(model, name)[30:] = getattr(model, name)[:30]
    model.weights_[30:, :15] = -model.weights_[:30, :15]
    check_same_bytes_anywhere(model, x, tmp_path)


def test_real_descriptors_rank_as_expected():
    # At 40,000 rows: LSH .159, SGH .246.
    assert 1.25 < real_map("sgh") / real_map("lsh") < 2.0


def test_rows_too_far_apart_and_odd_bandwidths_are_refused():
    x = clustered(50)
    model = quick(8).fit(x)
    params, arrays, _ = model.to_state()
    for odd in (-arrays["bandwidth"], np.ones(2)):
        with pytest.raises(IntegrityError):
            SGH.from_state(params, {**arrays, "bandwidth": odd})
    x[:2, 4], x[3, 4] = 3.4e38, -3.4e38
    with pytest.raises(BadInputError, match="float32"):
        quick(8).fit(x)
