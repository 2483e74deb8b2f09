from __future__ import annotations

import numpy as np
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from och_dist import OCH, PCAFrame
from och_dist.errors import BadInputError
from och_dist.methods.och import default_components
from tests.support.linear_checks import (
    check_codes_are_signs,
    check_determinism,
    check_encoding_refusals,
    check_public,
    check_same_bytes_anywhere,
    check_state,
    clustered,
    real_map,
)


@parametrize_with_checks([PCAFrame(n_bits=12)])
def test_scikit_learn_contract(estimator, check):
    check(estimator)


@pytest.mark.parametrize("n_components", [None, 5, 30])
@pytest.mark.parametrize("n_bits", [1, 13, 64, 130])
def test_it_is_och_before_its_first_step(n_bits, n_components):
    x = clustered(400, d=45)
    frame = PCAFrame(n_bits, n_components=n_components, random_state=7).fit(x)
    och = OCH(n_bits, n_components=n_components, max_iter=0, random_state=7).fit(x)
    np.testing.assert_array_equal(frame.transform(x), och.transform(x))
    for name in ("mean_", "projection_", "offsets_", "components_", "rotation_"):
        assert getattr(frame, name).tobytes() == getattr(och, name).tobytes()
    assert frame.n_components_ == (n_components or default_components(n_bits))
    assert frame.notes_ == och.notes_ == []


@pytest.mark.parametrize(("n_bits", "n_components"), [(64, None), (10, 24), (24, 24)])
def test_the_frame_is_tight_on_the_leading_axes(n_bits, n_components):
    x = clustered()
    model = PCAFrame(n_bits, n_components=n_components).fit(x)
    v = model.rotation_
    gram = v @ v.T if n_bits >= 24 else v.T @ v
    np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-12)
    assert model.manifold_residual_ < 1e-12
    covariance = np.cov(x.T.astype(np.float64), bias=True)
    variances = np.diag(model.components_ @ covariance @ model.components_.T)
    np.testing.assert_allclose(variances, np.linalg.eigvalsh(covariance)[::-1][:24], rtol=1e-6)
    np.testing.assert_allclose(model.projection_, model.components_.T @ v, atol=1e-6)
    assert not model.offsets_.any()
    check_codes_are_signs(model, x)


def test_no_centres_are_needed():
    assert PCAFrame().centres_wanted() == 0


@pytest.mark.parametrize(
    ("x", "note"),
    [
        (np.full((50, 6), 0.1, np.float32), "all rows are equal"),
        (np.ones((1, 6), np.float32), "all rows are equal"),
        (np.arange(90, dtype=np.float32)[:, None], "n_components reduced from 20 to 1"),
        (clustered(8), "n_components reduced from 20 to 7"),
    ],
    ids=["equal", "one row", "one feature", "few rows"],
)
def test_degenerate_rows_are_legal_and_noted(x, note):
    model = PCAFrame(16).fit(x)
    assert any(note in text for text in model.notes_), model.notes_
    codes = model.transform(x)
    assert (len(np.unique(codes, axis=0)) == 1) == ("all rows are equal" in note)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_bits": 0}, "n_bits=0; use an integer of at least 1"),
        ({"n_bits": 2.5}, "n_bits=2.5"),
        ({"n_components": 0}, "n_components=0; use an integer of at least 1"),
        ({"n_components": "all"}, "n_components='all'"),
    ],
)
def test_impossible_settings_are_refused_by_fit_not_by_init(options, message):
    model = PCAFrame(**options)
    with pytest.raises(BadInputError) as caught:
        model.fit(clustered(50))
    assert message in str(caught.value)


def test_determinism():
    check_determinism(lambda seed: PCAFrame(24, random_state=seed), clustered(300))


def test_state_round_trip():
    x = clustered(300)
    model = PCAFrame(13, n_components=6, random_state=np.random.RandomState(1)).fit(x)
    assert model.info()["n_components"] == 6
    check_state(model, x)


def test_same_bytes_for_any_block_and_processor(tmp_path):
    x = clustered(1500)
    check_same_bytes_anywhere(PCAFrame(29).fit(x), x, tmp_path)


def test_unusable_rows_are_refused():
    x = clustered(50)
    check_encoding_refusals(PCAFrame(16).fit(x), x)


def test_public_name():
    x = clustered(300)
    check_public("PCAFrame", PCAFrame(11, n_components=5).fit(x), x)


def test_real_descriptors():
    # 40,000 rows of the same set, against LSH: 1.8 at 32 bits, 1.63 at 64.
    assert 1.4 < real_map("pca-frame") / real_map("lsh") < 1.9
    assert real_map("pca-frame", 128) > 1.1 * real_map("pca-frame")
