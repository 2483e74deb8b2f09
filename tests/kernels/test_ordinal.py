from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError
from och_dist.kernels.ordinal import FAR, NEAR, NEITHER, near_sets, ordinal_loss_and_gradient


def problem(m=5, n_landmarks=12, p=3, r=6, k=3, seed=0, dtype=np.float64):
    """Anchors that are also the first landmarks, so that each excludes itself."""
    rng = np.random.default_rng(seed)
    landmarks = rng.normal(size=(n_landmarks, p)).astype(dtype)
    anchors = landmarks[:m].copy()
    distances = ((anchors[:, None] - landmarks) ** 2).sum(axis=2)
    relations = near_sets(distances, np.eye(m, n_landmarks, dtype=bool), k)
    return anchors, landmarks, relations, rng.normal(size=(p, r)) * 0.4, rng.normal(size=r) * 0.2


def loss_by_loops(anchors, landmarks, relations, frame, offsets, *, gain, shift, cross_weight):
    """The definition, one relation at a time."""

    def code(u):
        return [math.tanh(gain * (sum(u * frame[:, c]) + offsets[c])) for c in range(len(offsets))]

    def similarity(a, b):
        return sum(x * y for x, y in zip(code(anchors[a]), code(landmarks[b]), strict=True))

    def mean_over(step):
        terms = []
        for i in range(len(anchors)):
            other = (i + step) % len(anchors)
            for j in np.flatnonzero(relations[i] == NEAR):
                for far in np.flatnonzero(relations[other] == FAR):
                    gap = (similarity(other, far) - similarity(i, j)) / 2
                    terms.append(1 / (1 + math.exp(-gap)))
        return sum(terms) / len(terms)

    return (1 - cross_weight) * mean_over(0) + cross_weight * mean_over(shift)


@pytest.mark.parametrize(("shift", "cross_weight"), [(0, 0.0), (2, 0.3), (1, 1.0)])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_loss_equals_the_triple_loop(shift, cross_weight, k):
    args = problem(k=k)
    options = {"gain": 1.7, "shift": shift, "cross_weight": cross_weight}
    loss, _, _ = ordinal_loss_and_gradient(*args, **options)
    assert loss == pytest.approx(loss_by_loops(*args, **options), rel=1e-12)


@pytest.mark.parametrize(("shift", "cross_weight"), [(0, 0.0), (2, 0.3), (3, 1.0)])
@pytest.mark.parametrize("r", [2, 6, 170])
def test_gradient_equals_central_differences(shift, cross_weight, r):
    anchors, landmarks, relations, frame, offsets = problem(r=r, seed=4)
    options = {"gain": 1.3, "shift": shift, "cross_weight": cross_weight}

    def loss(v, b):
        return ordinal_loss_and_gradient(anchors, landmarks, relations, v, b, **options)[0]

    _, d_frame, d_offsets = ordinal_loss_and_gradient(anchors, landmarks, relations, frame, offsets, **options)
    rng = np.random.default_rng(5)
    for _ in range(5):
        dv, db = rng.normal(size=frame.shape), rng.normal(size=offsets.shape)
        for along_v, along_b in ((dv, 0 * db), (0 * dv, db)):
            h = 1e-5
            ahead = loss(frame + h * along_v, offsets + h * along_b)
            behind = loss(frame - h * along_v, offsets - h * along_b)
            expected = (ahead - behind) / (2 * h)
            found = (d_frame * along_v).sum() + (d_offsets * along_b).sum()
            size = np.linalg.norm(d_frame if along_v.any() else d_offsets)
            assert abs(found - expected) < 1e-6 * size


def test_float32_follows_float64():
    args = problem(m=40, n_landmarks=300, p=24, r=64, k=6, seed=6)
    options = {"gain": 2.0, "shift": 7, "cross_weight": 0.3}
    exact = ordinal_loss_and_gradient(*args, **options)
    short = [a.astype(np.float32) for a in args[:2]]
    rounded = ordinal_loss_and_gradient(*short, *args[2:], **options)
    assert rounded[1].dtype == rounded[2].dtype == np.float32
    assert rounded[0] == pytest.approx(exact[0], rel=1e-5)
    for a, b in zip(rounded[1:], exact[1:], strict=True):
        assert np.abs(a - b).max() < 1e-4 * np.abs(b).max()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_long_saturated_codes_stay_finite(dtype):
    args = problem(r=2048, seed=7, dtype=dtype)
    loss, d_frame, d_offsets = ordinal_loss_and_gradient(*args, gain=1e4, shift=1, cross_weight=0.3)
    assert 0 <= loss <= 1
    assert np.isfinite(d_frame).all()
    assert np.isfinite(d_offsets).all()


def test_same_input_same_bytes():
    args = problem(m=20, n_landmarks=90, dtype=np.float32)
    first, second = (ordinal_loss_and_gradient(*args, gain=2.0, shift=3, cross_weight=0.3) for _ in range(2))
    assert first[0] == second[0]
    assert first[1].tobytes() == second[1].tobytes()
    assert first[2].tobytes() == second[2].tobytes()


def test_the_order_of_landmarks_and_the_labels_of_bits_do_not_matter():
    anchors, landmarks, relations, frame, offsets = problem(m=8, n_landmarks=50, k=4, seed=8)
    options = {"gain": 2.0, "shift": 3, "cross_weight": 0.3}
    loss, d_frame, d_offsets = ordinal_loss_and_gradient(anchors, landmarks, relations, frame, offsets, **options)
    rng = np.random.default_rng(9)
    rows, bits = rng.permutation(50), rng.permutation(6)
    signs = rng.choice([-1.0, 1.0], size=6)
    again, e_frame, e_offsets = ordinal_loss_and_gradient(
        anchors, landmarks[rows], relations[:, rows], frame[:, bits] * signs, offsets[bits] * signs, **options
    )
    assert again == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(e_frame * signs, d_frame[:, bits], atol=1e-12)
    np.testing.assert_allclose(e_offsets * signs, d_offsets[bits], atol=1e-12)


def test_without_relations_there_is_nothing_to_learn():
    anchors, landmarks, relations, frame, offsets = problem()
    loss, d_frame, d_offsets = ordinal_loss_and_gradient(
        anchors, landmarks, np.zeros_like(relations), frame, offsets, gain=1.0, shift=1, cross_weight=0.3
    )
    assert loss == 0
    assert not d_frame.any()
    assert not d_offsets.any()


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), m=st.integers(1, 6), n=st.integers(3, 40), levels=st.integers(1, 30))
def test_near_sets_equal_a_sort(seed, m, n, levels):
    rng = np.random.default_rng(seed)
    distances = rng.integers(0, levels, size=(m, n)).astype(np.float32)
    exclude = np.zeros((m, n), dtype=bool)
    exclude[np.arange(m), rng.integers(0, n, size=m)] = rng.random(m) < 0.5
    k = int(rng.integers(1, n))
    relations = near_sets(distances, exclude, k)
    for i in range(m):
        ranked = [j for j in np.argsort(distances[i], kind="stable") if not exclude[i, j]]
        near = set(ranked[:k])
        limit = distances[i, ranked[k - 1]]
        for j in range(n):
            far = not exclude[i, j] and distances[i, j] > limit
            assert relations[i, j] == (NEAR if j in near else FAR if far else NEITHER)


def test_a_near_set_larger_than_its_landmarks_is_refused():
    with pytest.raises(BadInputError, match="near set of 4 among 3 landmarks; use 1 to 3"):
        near_sets(np.ones((2, 4)), np.eye(2, 4, dtype=bool), 4)
    with pytest.raises(BadInputError, match="near set of 0"):
        near_sets(np.ones((2, 4)), np.eye(2, 4, dtype=bool), 0)
