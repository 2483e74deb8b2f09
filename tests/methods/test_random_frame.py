from __future__ import annotations

import numpy as np
import pytest

from och_dist import OCH, PCAFrame
from och_dist.methods.linear import default_components
from tests.support.method_checks import (
    check_codes_are_signs,
    clustered,
    real_map,
)


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


@pytest.mark.parametrize(
    ("x", "note"),
    [
        (np.arange(90, dtype=np.float32)[:, None], "n_components reduced from 20 to 1"),
        (clustered(8), "n_components reduced from 20 to 7"),
    ],
    ids=["one feature", "few rows"],
)
def test_degenerate_rows_are_legal_and_noted(x, note):
    model = PCAFrame(16).fit(x)
    assert any(note in text for text in model.notes_), model.notes_
    assert len(np.unique(model.transform(x), axis=0)) > 1


def test_real_descriptors():
    # 40,000 rows of the same set, against LSH: 1.8 at 32 bits, 1.63 at 64.
    assert 1.4 < real_map("pca-frame") / real_map("lsh") < 1.9
    assert real_map("pca-frame", 128) > 1.1 * real_map("pca-frame")
