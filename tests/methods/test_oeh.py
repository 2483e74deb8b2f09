from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from och_dist import LSH, OEH, PCAFrame
from tests.support.method_checks import bits_of, precision_at, real_rows, training_data, uneven


def quick(n_bits=16, **options):
    return OEH(n_bits, **{"n_centres": 30, "max_iter": 40, **options})


def test_codes_are_signs_of_projections_about_the_mean():
    x = uneven(900)
    model = quick(n_bits=13).fit(x)
    codes = model.transform(x)
    scores = (x.astype(np.float64) - model.mean_) @ model.projection_.astype(np.float64)
    np.testing.assert_array_equal(bits_of(codes, 13), scores > 0)
    assert not model.offsets_.any()
    assert model.n_iter_ == len(model.loss_curve_) == 40
    for size in (1, 7, 1000):
        parts = [model.encode_block(x[i : i + size], first_row=i) for i in range(0, len(x), size)]
        np.testing.assert_array_equal(np.concatenate(parts), codes)


def test_projections_lie_in_the_leading_axes():
    x = uneven(900)
    model = quick(n_components=6).fit(x)
    axes = np.linalg.eigh(np.cov(x.T.astype(np.float64)))[1][:, ::-1][:, :6]
    np.testing.assert_allclose(axes @ (axes.T @ model.projection_), model.projection_, atol=1e-4)
    assert model.n_components_ == 6
    assert np.linalg.matrix_rank(model.projection_, tol=1e-3) == 6


def test_the_loss_falls_without_the_penalty():
    model = OEH(24, n_centres=60, n_components=12, penalty=0.0, margin=0.0).fit(uneven(900))
    assert np.mean(model.loss_curve_[-60:]) < 0.9 * np.mean(model.loss_curve_[:60])


def test_the_penalty_makes_a_frame():
    x = uneven(900)
    start, end = (OEH(32, n_components=8, n_centres=30, max_iter=n, penalty=0.5).fit(x) for n in (0, 60))
    assert end.penalty_ < 1.0 < start.penalty_
    free = OEH(32, n_components=8, n_centres=30, max_iter=60, penalty=0.0).fit(x)
    assert free.penalty_ > 0.5 * start.penalty_


@pytest.mark.parametrize("options", [{"n_bits": 2048, "n_components": 30}, {"penalty": 100.0}, {"learning_rate": 50.0}])
def test_descent_does_not_diverge(options):
    model = quick(**{"max_iter": 30, **options}).fit(uneven(400))
    assert np.isfinite(model.projection_).all()
    assert np.abs(model.projection_).max() < 1e4
    assert np.isfinite(model.loss_curve_).all()


def test_a_centre_far_off_does_not_throw_the_map_away():
    data = training_data(uneven(400), n_centres=30)
    centres = data.centres.copy()
    centres[7] *= 1e6
    model = OEH(16, max_iter=60).fit_training(replace(data, centres=centres))
    assert np.abs(model.projection_).max() < 100


CASES = {
    "two rows": (np.eye(2, 6, dtype=np.float32), "no relations among 2 centres"),
    "three rows": (np.eye(3, 6, dtype=np.float32), "n_components reduced from 64 to 2"),
    "one feature": (np.arange(90, dtype=np.float32)[:, None], "n_components reduced from 64 to 1"),
    "narrow": (uneven(200, d=30), "n_components reduced from 64 to 30"),
}


@pytest.mark.parametrize("name", CASES)
def test_degenerate_rows_are_legal_and_noted(name):
    x, note = CASES[name]
    model = quick().fit(x)
    assert any(note in text for text in model.notes_), model.notes_
    codes = model.transform(x)
    for row in np.unique(x, axis=0):
        assert len(np.unique(codes[(x == row).all(axis=1)], axis=0)) == 1


def test_real_descriptors():
    base, queries, _ = real_rows()
    data = training_data(base[:6000], n_centres=300)
    models = OEH(32), OEH(32, n_components=16), LSH(32), PCAFrame(32)
    wide, narrow, random, frame = (precision_at(m.fit_training(data), base, queries, k=100) for m in models)
    # 64 axes are too many for 32 bits; with 16 it is about the frame.
    assert 1.15 * random < wide < 0.9 * frame
    assert 0.93 * frame < narrow < 1.1 * frame
