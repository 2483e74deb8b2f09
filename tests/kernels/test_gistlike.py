"""The generator: one row, one value, however it is asked for; statistics near those of real GIST."""

from __future__ import annotations

import hashlib
import os
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from och_dist.errors import UsageError
from och_dist.kernels import gistlike
from och_dist.kernels.gistlike import BLOCK_ROWS, MAX_FACTORS, N_CLUSTERS, gist_rows, gist_world

DIMS = (1, 2, 7, 128, 960)
HUGE = 10**9 + 17


@pytest.fixture(scope="module")
def sample():
    return gist_rows(0, 3000, dim=384, seed=5)


def plain_block(block, dim, seed):
    """The definition in 64-bit whole numbers: latents of a block times the loadings, scaled and squared."""
    world = gist_world(seed, dim)
    generator = gistlike._generator(seed, dim, gistlike._ROWS, block)
    latents, contrast = gistlike._draw_block(world, generator)
    whole = latents.astype(np.int64) @ world.loadings.astype(np.int64)
    root = whole.astype(np.float32) * (contrast * np.float32(world.unit))[:, None]
    return root * root


def distances(rows):
    exact = rows.astype(np.float64)
    norms = np.sum(exact**2, axis=1)
    squared = norms[:, None] + norms - 2 * exact @ exact.T
    np.fill_diagonal(squared, 0)
    return np.sqrt(np.maximum(squared, 0))


def contrast_and_dimension(rows):
    """Medians over rows: 2 % neighbour over mean distance; local intrinsic dimension with 20 neighbours."""
    ordered = np.sort(distances(rows), axis=1)[:, 1:]
    contrast = ordered[:, int(0.02 * len(rows)) - 1] / ordered.mean(axis=1)
    dimension = 1 / np.mean(np.log(ordered[:, 19:20] / ordered[:, :19]), axis=1)
    return float(np.median(contrast)), float(np.median(dimension))


def shares_of_variance(rows):
    values = np.linalg.eigvalsh(np.cov(rows.astype(np.float64), rowvar=False))[::-1]
    return np.cumsum(values) / values.sum()


@pytest.mark.parametrize("dim", DIMS)
def test_rows_are_finite_non_negative_float32(dim):
    rows = gist_rows(1000, 1100, dim=dim, seed=1)
    assert rows.shape == (1100, dim)
    assert rows.dtype == np.float32
    assert rows.flags.c_contiguous
    assert np.isfinite(rows).all()
    assert rows.min() >= 0
    assert rows.max() < 3
    assert rows.std(axis=0).min() > 0
    # In one dimension two rows may share a point of the latent grid.
    assert len(np.unique(rows, axis=0)) >= len(rows) * (0.98 if dim == 1 else 1)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("block", [0, 3, HUGE // BLOCK_ROWS])
def test_product_is_exact(dim, block):
    rows = gist_rows(block * BLOCK_ROWS, BLOCK_ROWS, dim=dim, seed=2)
    assert rows.tobytes() == plain_block(block, dim, 2).tobytes()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("seed", range(3))
def test_no_sum_can_leave_the_whole_numbers_of_float32(dim, seed):
    loadings = np.abs(gist_world(seed, dim).loadings.astype(np.int64))
    assert (loadings == np.abs(gist_world(seed, dim).loadings)).all()
    worst = 511 * loadings[:-1].sum(axis=0) + 64 * loadings[-1]
    assert worst.max() <= 2**24
    assert worst.max() > 2**22  # or the grid is coarser than it need be


def test_latents_stay_within_their_limit():
    world = gist_world(0, 128)
    wide = gistlike.GistWorld(
        world.loadings, world.centres * 9, world.tightness, world.spread, world.shares, world.unit
    )
    latents, contrast = gistlike._draw_block(wide, np.random.default_rng(0))
    assert np.abs(latents).max() == 511
    assert (latents == np.rint(latents)).all()
    assert contrast.min() >= 0.2


@pytest.mark.parametrize("dim", DIMS)
def test_single_rows_around_block_borders(dim):
    whole = gist_rows(0, 2 * BLOCK_ROWS + 2, dim=dim, seed=4)
    for row in (0, 1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 2 * BLOCK_ROWS - 1, 2 * BLOCK_ROWS + 1):
        assert gist_rows(row, 1, dim=dim, seed=4).tobytes() == whole[row : row + 1].tobytes()


@settings(max_examples=30, deadline=None)
@given(
    first=st.integers(0, 3 * BLOCK_ROWS) | st.integers(HUGE - BLOCK_ROWS, HUGE),
    cuts=st.lists(st.integers(0, 2 * BLOCK_ROWS + 5), max_size=4),
    dim=st.sampled_from([1, 7, 33]),
)
def test_same_bytes_for_any_split(first, cuts, dim):
    count = 2 * BLOCK_ROWS + 5
    whole = gist_rows(first, count, dim=dim, seed=7)
    borders = [0, *sorted(cuts), count]
    parts = [gist_rows(first + low, high - low, dim=dim, seed=7) for low, high in pairwise(borders)]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_same_bytes_for_any_number_of_blas_threads():
    with threadpool_limits(limits=1):
        one = gist_rows(900, 1500, dim=960, seed=3)
    with threadpool_limits(limits=2):
        two = gist_rows(900, 1500, dim=960, seed=3)
    assert one.tobytes() == two.tobytes()


def test_same_bytes_after_the_world_is_forgotten():
    before = gist_rows(5, 10, dim=33, seed=6)
    gist_world.cache_clear()
    assert gist_rows(5, 10, dim=33, seed=6).tobytes() == before.tobytes()


@pytest.mark.parametrize(("dim", "digest"), [(7, "82966505f1264e80"), (960, "9548b8718dec7708")])
def test_the_data_set_is_frozen(dim, digest):
    """Fails when the model, a constant or NumPy's random streams change: earlier figures are then void."""
    rows = gist_rows(1020, 8, dim=dim, seed=0)
    assert hashlib.sha256(rows.tobytes()).hexdigest()[:16] == digest


def test_huge_row_numbers_work_at_once():
    rows = gist_rows(HUGE, 3, dim=960, seed=0)
    assert np.isfinite(rows).all()
    assert gist_rows(2**63, 2, dim=7, seed=0).shape == (2, 7)
    # Blocks 2**32 apart have different high words, and must differ.
    assert not np.array_equal(gist_rows(2**32 * BLOCK_ROWS, 2, dim=7), gist_rows(0, 2, dim=7))


def test_seeds_and_blocks_differ():
    starts = [gist_rows(0, 4, dim=64, seed=seed) for seed in (0, 1, 2**32, 2**64 - 1)]
    starts += [gist_rows(BLOCK_ROWS, 4, dim=64, seed=0), gist_rows(0, 4, dim=65, seed=0)[:, :64]]
    for i, left in enumerate(starts):
        for right in starts[:i]:
            assert np.mean(left == right) < 0.01
    assert np.corrcoef(starts[0].ravel(), starts[4].ravel())[0, 1] < 0.9


def test_numpy_integers_are_accepted():
    rows = gist_rows(np.int64(3), np.uint8(2), dim=np.int32(7), seed=np.uint8(1))
    assert rows.tobytes() == gist_rows(3, 2, dim=7, seed=1).tobytes()


def test_zero_rows():
    assert gist_rows(10, 0, dim=7).shape == (0, 7)
    assert gist_rows(0, 0).shape == (0, 960)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"first_row": -1}, "first_row=-1; expected 0 to"),
        ({"n_rows": -2}, "n_rows=-2; expected 0 to"),
        ({"dim": 0}, "dim=0; expected 1 to"),
        ({"seed": -1}, "seed=-1; expected 0 to"),
        ({"seed": 2**64}, "seed=18446744073709551616; expected 0 to"),
        ({"n_rows": 1.5}, "n_rows=1.5; expected a whole number"),
        ({"seed": None}, "seed=None; expected a whole number"),
    ],
)
def test_wrong_arguments(arguments, message):
    call = {"first_row": 0, "n_rows": 1, "dim": 7, "seed": 0} | arguments
    with pytest.raises(UsageError, match=message):
        gist_rows(call.pop("first_row"), call.pop("n_rows"), **call)


@pytest.mark.parametrize("dim", DIMS)
def test_world_shapes_and_cache(dim):
    world = gist_world(0, dim)
    factors = min(dim, MAX_FACTORS)
    assert world is gist_world(0, dim)
    assert world.loadings.shape == (factors + 1, dim)
    assert world.centres.shape == (N_CLUSTERS, factors)
    assert world.tightness.shape == world.shares.shape == (N_CLUSTERS,)
    assert world.shares[-1] == 1
    assert (np.diff(world.shares) >= 0).all()
    mean = world.loadings[-1] * (world.unit * 64)  # of square roots at contrast 1
    assert ((mean > 0.1) & (mean < 0.5)).all()
    assert not world.loadings.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        world.centres[0, 0] = 1


def test_memory_is_the_result_and_one_block():
    gist_world(0, 960)
    tracemalloc.start()
    rows = gist_rows(0, 10 * BLOCK_ROWS, dim=960)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < rows.nbytes + 5 * BLOCK_ROWS * (MAX_FACTORS + 1) * 4


def test_marginals(sample):
    std = sample.std(axis=0)
    mean = sample.mean(axis=0)
    skew = np.mean((sample - mean) ** 3, axis=0) / std**3
    assert 0.052 < sample.mean() < 0.062
    assert 0.55 < np.median(std / mean) < 0.65
    assert 0.9 < np.median(skew) < 1.4
    assert skew.min() > 0.5


@pytest.mark.parametrize("dim", [384, 960])
@pytest.mark.parametrize("seed", [0, 5])
def test_spectrum_is_near_the_real_one(dim, seed):
    """Real: .18, .35, .58, .65, .81, .91 of the variance in 1, 4, 16, 24, 64, 128 components."""
    shares = shares_of_variance(gist_rows(0, 3000, dim=dim, seed=seed))
    for k, real in ((1, 0.18), (4, 0.35), (16, 0.58), (24, 0.65), (64, 0.81), (128, 0.91)):
        assert abs(shares[k - 1] - real) < 0.03, k


@pytest.mark.parametrize("dim", [384, 960])
def test_neighbours_are_as_near_as_real_ones(dim):
    """Real, at 3,000 rows: contrast .78, local dimension 34."""
    contrast, dimension = contrast_and_dimension(gist_rows(7000, 3000, dim=dim, seed=1))
    assert 0.75 < contrast < 0.81
    assert 30 < dimension < 40


def test_rows_of_one_cluster_are_nearer_than_others():
    count = BLOCK_ROWS
    world = gist_world(0, 384)
    generator = gistlike._generator(0, 384, gistlike._ROWS, 0)
    cluster = np.searchsorted(world.shares, generator.random(count), side="right")
    between = distances(gist_rows(0, count, dim=384, seed=0))
    same = (cluster[:, None] == cluster) & ~np.eye(count, dtype=bool)
    assert between[same].mean() < 0.95 * between[~same].mean()
    assert len(np.unique(cluster)) > 150


def test_against_the_real_set():
    folder = Path(os.environ.get("OCH_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
    path = folder / "tiny100k_gist384_f16.npy"
    if not path.exists():
        pytest.skip(f"no real descriptors at {path}; set OCH_SHARED_DATA to their folder")
    real = np.load(path, mmap_mode="r")[::33][:3000].astype(np.float32)
    made = gist_rows(0, len(real), dim=real.shape[1], seed=0)
    np.testing.assert_allclose(contrast_and_dimension(made), contrast_and_dimension(real), rtol=0.08)
    ranks = [0, 3, 15, 23, 31, 63, 127]
    np.testing.assert_allclose(shares_of_variance(made)[ranks], shares_of_variance(real)[ranks], atol=0.03)
