from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from och_dist import OCH, OCHPaper, PCAFrame
from tests.support.method_checks import precision_at, real_rows, training_data, uneven


def quick(n_bits=24, **options):
    return OCHPaper(n_bits, **{"n_centres": 60, "max_iter": 40, **options})


def test_only_the_centres_are_learned_from():
    data = training_data(uneven(900), n_centres=60)
    model = quick().fit_training(data)
    shuffled = data.rows[np.random.default_rng(1).permutation(len(data.rows))] * np.float32(7)
    assert quick().fit_training(replace(data, rows=shuffled)).projection_.tobytes() == model.projection_.tobytes()
    moved = replace(data, centres=data.centres[::-1] * np.float32(1.5))
    assert not np.array_equal(quick().fit_training(moved).projection_, model.projection_)


def test_it_is_och_whose_rows_are_the_centres():
    """With all centres as anchors there is nothing left to draw, and OCH with the same settings agrees."""
    data = training_data(uneven(900), n_centres=60)
    paper = quick(n_anchors=60, n_near=6, max_iter=10).fit_training(data)
    same = OCH(
        24,
        orthogonal=True,
        landmarks="rows",
        n_landmarks=60,
        n_anchors=60,
        near_fraction=0.1,
        cross_weight=0.0,
        offsets=False,
        gain=(1.0, 1.0),
        n_components=16,
        max_iter=10,
    ).fit_training(replace(data, rows=data.centres, centres=None, labels=None))
    np.testing.assert_allclose(paper.loss_curve_, same.loss_curve_, rtol=1e-4)
    np.testing.assert_allclose(paper.projection_, same.projection_, atol=1e-3)
    start = quick(max_iter=0).fit_training(data).projection_
    assert np.abs(paper.projection_ - start).max() > 0.03


def test_by_the_letter():
    model = OCHPaper(32)
    assert (model.n_centres, model.n_components, model.centres_wanted()) == (300, 16, 300)
    assert model.get_params().keys() == {
        "n_bits",
        "n_centres",
        "n_components",
        "n_near",
        "n_anchors",
        "learning_rate",
        "momentum",
        "max_iter",
        "random_state",
    }
    assert (model.gain, model.cross_weight, model.offsets, model.orthogonal) == ((1.0, 1.0), 0.0, False, True)
    fitted = quick().fit(uneven(900))
    assert fitted.n_components_ == 16
    assert not fitted.offsets_.any()
    assert fitted.manifold_residual_ < 1e-12


def test_the_loss_falls():
    curve = OCHPaper(24, n_centres=60).fit(uneven(900)).loss_curve_
    assert np.mean(curve[-50:]) < 0.97 * np.mean(curve[:10])


CASES = {
    "two rows": (np.eye(2, 6, dtype=np.float32), "no relations among 2 landmarks"),
    "three rows": (np.eye(3, 6, dtype=np.float32), "n_anchors reduced from 80 to 3"),
    "one feature": (np.arange(90, dtype=np.float32)[:, None], "n_components reduced from 16 to 1"),
}


@pytest.mark.parametrize("name", CASES)
def test_degenerate_rows_are_legal_and_noted(name):
    x, note = CASES[name]
    model = quick().fit(x)
    assert any(note in text for text in model.notes_), model.notes_
    assert np.isfinite(model.projection_).all()


def test_real_descriptors():
    base, queries, _ = real_rows()
    data = training_data(base[:6000], n_centres=300)
    models = OCHPaper(32), OCH(32), PCAFrame(32), OCHPaper(128), PCAFrame(128)
    short, och, frame, long, long_frame = (precision_at(m.fit_training(data), base, queries, k=100) for m in models)
    # Training on centres pays at 32 bits, less than OCH's own; at 128 bits it makes codes worse than untrained ones.
    assert 0.97 * frame < short < och
    assert long < 0.9 * long_frame
