from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from och_dist import OCH, OCHPaper, PCAFrame
from och_dist.errors import BadInputError, IntegrityError
from och_dist.methods.registry import get_method, model_from_state
from tests.support.linear_checks import training_data


def clustered(n=900, d=40, n_clusters=25, seed=0):
    """Gaussian clusters of unequal spread whose axes decay, around a mean far from the origin."""
    rng = np.random.default_rng(seed)
    axes = 1.0 / np.sqrt(1 + np.arange(d))
    centres = rng.normal(size=(n_clusters, d)) * axes
    spread = rng.uniform(0.3, 0.8, size=(n_clusters, 1))
    label = rng.integers(0, n_clusters, size=n)
    return (3 + centres[label] + spread[label] * rng.normal(size=(n, d)) * axes).astype(np.float32)


def quick(n_bits=24, **options):
    return OCHPaper(n_bits, **{"n_centres": 60, "max_iter": 40, **options})


def bits_of(codes, n_bits):
    return np.unpackbits(codes, axis=1, bitorder="little")[:, :n_bits]


def precision_at(model, base, queries, *, k, truth_share=0.02):
    """Mean share of true neighbours among the k first by Hamming distance, ties by row."""
    mean = base.mean(axis=0, dtype=np.float64)
    b, q = base - mean, queries - mean
    n_true = int(truth_share * len(base))
    truth = np.argsort((b**2).sum(axis=1) - 2 * q @ b.T, axis=1)[:, :n_true]
    a, b = (1.0 - 2 * bits_of(model.transform(x), model.n_bits) for x in (queries, base))
    found = np.argsort(-(a @ b.T), axis=1, kind="stable")[:, :k]
    return np.mean([len(np.intersect1d(f, t)) / k for f, t in zip(found, truth, strict=True)])


@parametrize_with_checks([OCHPaper(n_bits=12, n_centres=4, max_iter=2)])
def test_scikit_learn_contract(estimator, check):
    check(estimator)


def test_only_the_centres_are_learned_from():
    data = training_data(clustered(), n_centres=60)
    model = quick().fit_training(data)
    shuffled = data.rows[np.random.default_rng(1).permutation(len(data.rows))] * np.float32(7)
    assert quick().fit_training(replace(data, rows=shuffled)).projection_.tobytes() == model.projection_.tobytes()
    moved = replace(data, centres=data.centres[::-1] * np.float32(1.5))
    assert not np.array_equal(quick().fit_training(moved).projection_, model.projection_)


def test_it_is_och_whose_rows_are_the_centres():
    """With all centres as anchors there is nothing left to draw, and OCH with the same settings agrees."""
    data = training_data(clustered(), n_centres=60)
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
    assert (model.gain, model.cross_weight, model.offsets, model.landmarks) == ((1.0, 1.0), 0.0, False, "centres")
    fitted = quick().fit(clustered())
    assert fitted.n_components_ == 16
    assert not fitted.offsets_.any()
    assert fitted.manifold_residual_ < 1e-12


def test_the_loss_falls():
    curve = OCHPaper(24, n_centres=60).fit(clustered()).loss_curve_
    assert np.mean(curve[-50:]) < 0.97 * np.mean(curve[:10])


def test_same_seed_same_bytes_and_any_blocks():
    x = clustered()
    first, second, other = (quick(random_state=seed).fit(x) for seed in (3, 3, 4))
    assert first.projection_.tobytes() == second.projection_.tobytes()
    assert not np.array_equal(first.projection_, other.projection_)
    whole = first.transform(x)
    for size in (1, 7, 1000):
        parts = [first.encode_block(x[i : i + size], first_row=i) for i in range(0, len(x), size)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


CASES = {
    "equal": (np.full((50, 6), 0.1, np.float32), "all rows are equal"),
    "one row": (np.arange(6, dtype=np.float32)[None], "all rows are equal"),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_bits": 0}, "n_bits=0"),
        ({"n_near": 0}, "n_near=0; use an integer of at least 1"),
        ({"n_components": None}, "n_components=None; use an integer of at least 1"),
        ({"n_anchors": 0}, "n_anchors=0"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
    ],
)
def test_impossible_settings_are_refused_by_fit_not_by_init(options, message):
    model = OCHPaper(**options)
    with pytest.raises(BadInputError) as caught:
        model.fit(clustered(50))
    assert message in str(caught.value)


def test_centres_are_needed():
    with pytest.raises(BadInputError, match="no centres"):
        quick().fit_training(training_data(clustered(50)))


def test_state_round_trip():
    x = clustered(400)
    model = quick(n_bits=13).fit(x)
    params, arrays, info = model.to_state()
    assert info["loss_curve"] == model.loss_curve_
    again = model_from_state("och-paper", json.loads(json.dumps(params)), arrays)
    assert type(again) is get_method("och-paper")
    np.testing.assert_array_equal(again.encode_block(x), model.transform(x))
    assert again.to_state()[0] == params
    with pytest.raises(IntegrityError):
        OCH.from_state(params, arrays)


def test_real_descriptors():
    folder = Path(os.environ.get("OCH_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
    path = folder / "tiny100k_gist384_f16.npy"
    if not path.exists():
        pytest.skip(f"{path} is not there; set OCH_SHARED_DATA to the folder with real descriptors")
    x = np.load(path, mmap_mode="r")[:12_000].astype(np.float32)
    base, queries = x[200:], x[:200]
    data = training_data(base[:6000], n_centres=300)
    models = OCHPaper(32), OCH(32), PCAFrame(32), OCHPaper(128), PCAFrame(128)
    short, och, frame, long, long_frame = (precision_at(m.fit_training(data), base, queries, k=100) for m in models)
    # Training on centres pays at 32 bits, less than OCH's own; at 128 bits it makes codes worse than untrained ones.
    assert 0.97 * frame < short < och
    assert long < 0.9 * long_frame
