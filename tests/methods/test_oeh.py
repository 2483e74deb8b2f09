from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from och_dist import LSH, OEH, PCAFrame
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


def quick(n_bits=16, **options):
    return OEH(n_bits, **{"n_centres": 30, "max_iter": 40, **options})


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


@parametrize_with_checks([OEH(n_bits=12, n_centres=5, max_iter=3)])
def test_scikit_learn_contract(estimator, check):
    check(estimator)


def test_codes_are_signs_of_projections_about_the_mean():
    x = clustered()
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
    x = clustered()
    model = quick(n_components=6).fit(x)
    axes = np.linalg.eigh(np.cov(x.T.astype(np.float64)))[1][:, ::-1][:, :6]
    np.testing.assert_allclose(axes @ (axes.T @ model.projection_), model.projection_, atol=1e-4)
    assert model.n_components_ == 6
    assert np.linalg.matrix_rank(model.projection_, tol=1e-3) == 6


def test_the_loss_falls_without_the_penalty():
    model = OEH(24, n_centres=60, n_components=12, penalty=0.0, margin=0.0).fit(clustered())
    assert np.mean(model.loss_curve_[-60:]) < 0.9 * np.mean(model.loss_curve_[:60])


def test_the_penalty_makes_a_frame():
    x = clustered()
    start, end = (OEH(32, n_components=8, n_centres=30, max_iter=n, penalty=0.5).fit(x) for n in (0, 60))
    assert end.penalty_ < 1.0 < start.penalty_
    free = OEH(32, n_components=8, n_centres=30, max_iter=60, penalty=0.0).fit(x)
    assert free.penalty_ > 0.5 * start.penalty_


@pytest.mark.parametrize("options", [{"n_bits": 2048, "n_components": 30}, {"penalty": 100.0}, {"learning_rate": 50.0}])
def test_descent_does_not_diverge(options):
    model = quick(**{"max_iter": 30, **options}).fit(clustered(400))
    assert np.isfinite(model.projection_).all()
    assert np.abs(model.projection_).max() < 1e4
    assert np.isfinite(model.loss_curve_).all()


def test_a_centre_far_off_does_not_throw_the_map_away():
    data = training_data(clustered(400), n_centres=30)
    centres = data.centres.copy()
    centres[7] *= 1e6
    model = OEH(16, max_iter=60).fit_training(replace(data, centres=centres))
    assert np.abs(model.projection_).max() < 100


def test_same_seed_same_bytes_other_seed_other_model():
    x = clustered()
    first, second, other = (quick(random_state=seed).fit(x) for seed in (3, 3, 4))
    assert first.projection_.tobytes() == second.projection_.tobytes()
    assert first.loss_curve_ == second.loss_curve_
    assert not np.array_equal(first.projection_, other.projection_)


def test_codes_do_not_depend_on_the_scale_of_the_data():
    x = clustered(500)
    plain, scaled = quick().fit(x), quick().fit(x * np.float32(2.0**40))
    np.testing.assert_array_equal(plain.transform(x), scaled.transform(x * np.float32(2.0**40)))
    assert plain.loss_curve_ == scaled.loss_curve_


def test_progress_sees_every_step():
    seen = []
    data = training_data(clustered(400), n_centres=30)
    model = quick().fit_training(data, progress=lambda step, loss: seen.append((step, loss)))
    assert seen == list(enumerate(model.loss_curve_))


CASES = {
    "equal": (np.full((50, 6), 0.1, np.float32), "all rows are equal"),
    "zeros": (np.zeros((50, 6), np.float32), "all rows are equal"),
    "one row": (np.arange(6, dtype=np.float32)[None], "all rows are equal"),
    "two rows": (np.eye(2, 6, dtype=np.float32), "no relations among 2 centres"),
    "three rows": (np.eye(3, 6, dtype=np.float32), "n_components reduced from 64 to 2"),
    "one feature": (np.arange(90, dtype=np.float32)[:, None], "n_components reduced from 64 to 1"),
    "narrow": (clustered(200, d=30), "n_components reduced from 64 to 30"),
}


@pytest.mark.parametrize("name", CASES)
def test_degenerate_rows_are_legal_and_noted(name):
    x, note = CASES[name]
    model = quick().fit(x)
    assert any(note in text for text in model.notes_), model.notes_
    codes = model.transform(x)
    for row in np.unique(x, axis=0):
        assert len(np.unique(codes[(x == row).all(axis=1)], axis=0)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_bits": 0}, "n_bits=0; use an integer of at least 1"),
        ({"n_centres": 0}, "n_centres=0"),
        ({"n_components": None}, "n_components=None; use an integer of at least 1"),
        ({"n_near": 0}, "n_near=0"),
        ({"max_iter": -1}, "max_iter=-1; use an integer of at least 0"),
        ({"margin": -1.0}, "margin=-1.0; use a number of at least 0"),
        ({"penalty": float("nan")}, "penalty=nan"),
        ({"learning_rate": 0.0}, "learning_rate=0.0; use a number above 0"),
    ],
)
def test_impossible_settings_are_refused_by_fit_not_by_init(options, message):
    model = OEH(**options)
    with pytest.raises(BadInputError) as caught:
        model.fit(clustered(50))
    assert message in str(caught.value)


def test_centres_are_asked_for_only_when_needed():
    assert OEH(n_centres=17).centres_wanted() == 17
    assert OEH(max_iter=0).centres_wanted() == 0
    with pytest.raises(BadInputError, match="no centres"):
        quick().fit_training(training_data(clustered(50)))


def test_state_round_trip():
    x = clustered(400)
    model = quick(n_bits=13, random_state=np.random.RandomState(1)).fit(x)
    params, arrays, info = model.to_state()
    assert info["loss_curve"] == model.loss_curve_
    assert json.loads(json.dumps(info)) == info
    again = model_from_state("oeh", json.loads(json.dumps(params)), arrays)
    assert type(again) is get_method("oeh")
    np.testing.assert_array_equal(again.encode_block(x), model.transform(x))
    assert again.to_state()[0] == params
    with pytest.raises(IntegrityError):
        OEH.from_state(params | {"n_bits": 14}, arrays)


def test_real_descriptors():
    folder = Path(os.environ.get("OCH_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
    path = folder / "tiny100k_gist384_f16.npy"
    if not path.exists():
        pytest.skip(f"{path} is not there; set OCH_SHARED_DATA to the folder with real descriptors")
    x = np.load(path, mmap_mode="r")[:12_000].astype(np.float32)
    base, queries = x[200:], x[:200]
    data = training_data(base[:6000], n_centres=300)
    models = OEH(32), OEH(32, n_components=16), LSH(32), PCAFrame(32)
    wide, narrow, random, frame = (precision_at(m.fit_training(data), base, queries, k=100) for m in models)
    # 64 axes are too many for 32 bits; with 16 it is about the frame.
    assert 1.15 * random < wide < 0.9 * frame
    assert 0.93 * frame < narrow < 1.1 * frame
