from __future__ import annotations

import numpy as np
import pytest

from och_dist import LSH
from och_dist.methods.base import TrainingData
from tests.support.method_checks import (
    check_codes_are_signs,
    check_same_bytes_anywhere,
    clustered,
    real_map,
)


@pytest.mark.parametrize("n_bits", [1, 8, 13, 100])
def test_codes_are_the_signs_of_projections(n_bits):
    x = clustered(300)
    check_codes_are_signs(LSH(n_bits).fit(x), x)


def test_directions_are_normal_deviates_and_planes_pass_through_the_mean():
    x = clustered(200, d=100)
    model = LSH(400).fit(x)
    np.testing.assert_allclose(model.mean_, x.mean(axis=0, dtype=np.float64), rtol=1e-6)
    assert not model.offsets_.any()
    w = model.projection_.astype(np.float64)
    # 40,000 deviates: mean, variance and fourth moment within five standard errors.
    assert abs(w.mean()) < 0.025
    assert abs((w**2).mean() - 1) < 0.036
    assert abs((w**4).mean() - 3) < 0.25
    assert abs(np.corrcoef(w.T)[np.triu_indices(400, 1)]).mean() < 0.1


def test_the_share_of_differing_bits_estimates_the_angle():
    x = clustered(60, d=20)
    bits = np.unpackbits(LSH(8192, random_state=1).fit(x).transform(x), axis=1).astype(int)
    share = (bits[:, None] != bits).mean(axis=2)
    centred = x - x.mean(axis=0, dtype=np.float64)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    angles = np.arccos(np.clip(unit @ unit.T, -1, 1)) / np.pi
    assert np.abs(share - angles).max() < 5 * 0.5 / np.sqrt(8192)


def test_only_the_mean_is_learned():
    x = clustered(500)
    data = TrainingData(500, np.arange(40.0), np.eye(40), x[:0])
    model = LSH(16).fit_training(data)
    np.testing.assert_array_equal(model.mean_, np.arange(40))
    np.testing.assert_array_equal(model.projection_, LSH(16).fit(x).projection_)


def test_a_shift_of_all_rows_changes_no_code():
    x = np.round(clustered(256) * 64) / 64
    np.testing.assert_array_equal(LSH(32).fit(x).transform(x), LSH(32).fit(x + 512).transform(x + 512))


def test_same_bytes_for_any_block_and_processor(tmp_path):
    x = clustered(1500)
    check_same_bytes_anywhere(LSH(29).fit(x), x, tmp_path)


def test_real_descriptors():
    # 40,000 rows of the same set: .163 at 64 bits, .217 at 128. A random order would give .02.
    assert 0.13 < real_map("lsh") < 0.20
    assert 1.2 < real_map("lsh", 128) / real_map("lsh") < 1.6
