"""What the tests of the linear baselines share: rows, a yardstick on real descriptors, and common checks."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest

import och_dist
from och_dist.errors import BadInputError, IntegrityError, NonFiniteError
from och_dist.estimators import DaskAware
from och_dist.kernels.ranking import mean_average_precision
from och_dist.methods.registry import get_method, model_from_state
from och_dist.train import data
from och_dist.train.rows import ArrayRows

REAL = Path(os.environ.get("OCH_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
REAL_ROWS = REAL / "tiny100k_gist384_f16.npy"

ENCODE_ELSEWHERE = """
import hashlib, json, sys
import numpy as np
from threadpoolctl import threadpool_info
from och_dist.methods.registry import model_from_state
state = np.load(sys.argv[1])
params = json.loads(str(state["params"]))
arrays = {name[2:]: state[name] for name in state.files if name.startswith("a_")}
model = model_from_state(str(state["method"]), params, arrays)
print(hashlib.sha256(model.encode_block(state["x"]).tobytes()).hexdigest())
print(*(pool.get("architecture") for pool in threadpool_info()))
"""


def clustered(n=1500, d=40, n_clusters=25, seed=0):
    """Gaussian clusters whose axes decay, around a mean far from the origin."""
    rng = np.random.default_rng(seed)
    axes = 1.0 / np.sqrt(1 + np.arange(d))
    centres = rng.normal(size=(n_clusters, d)) * axes
    label = rng.integers(0, n_clusters, size=n)
    return (3 + centres[label] + 0.5 * rng.normal(size=(n, d)) * axes).astype(np.float32)


def bits_of(codes, n_bits):
    return np.unpackbits(codes, axis=1, bitorder="little")[:, :n_bits]


def estimator(method):
    """The public class of a method."""
    public = (getattr(och_dist, name) for name in och_dist.__all__ if name[0].isupper())
    return next(cls for cls in public if cls.method == method)


def training_data(x, n_centres=0, **options):
    """What the rows of an array give to learn from."""
    return data.training_data(ArrayRows(x), centres=n_centres, **{"seed": 0, **options})


@functools.cache
def real_rows():
    """(base, queries, truth) of 12,000 real descriptors; the truth of a query is the nearest 2 %."""
    if not REAL_ROWS.exists():
        pytest.skip(f"{REAL_ROWS} is not there; set OCH_SHARED_DATA to the folder with real descriptors")
    x = np.load(REAL_ROWS, mmap_mode="r")[:12_000].astype(np.float32)
    queries, base = x[:200], x[200:]
    b, q = base - base.mean(axis=0), queries - base.mean(axis=0)
    nearest = np.argsort((b**2).sum(axis=1) - 2 * q @ b.T, axis=1)
    return base, queries, nearest[:, : len(base) // 50]


@functools.cache
def real_map(method, n_bits=64, **options):
    """Mean average precision of a method trained on 10,000 of the real rows."""
    base, queries, truth = real_rows()
    model = estimator(method)(n_bits, **options).fit(base[:10_000])
    a, b = (bits_of(model.transform(x), n_bits).astype(np.float32) for x in (queries, base))
    distances = np.rint(a.sum(axis=1)[:, None] + b.sum(axis=1) - 2 * a @ b.T).astype(int)
    n = np.stack([np.bincount(row, minlength=n_bits + 1) for row in distances])
    g = np.stack([np.bincount(row[near], minlength=n_bits + 1) for row, near in zip(distances, truth, strict=True)])
    return mean_average_precision(n, g)


def check_codes_are_signs(model, x):
    n_bits = model.n_bits
    codes = model.transform(x)
    assert codes.shape == (len(x), -(-n_bits // 8))
    assert codes.dtype == np.uint8
    scores = (x.astype(np.float64) - model.mean_) @ model.projection_.astype(np.float64) + model.offsets_
    np.testing.assert_array_equal(bits_of(codes, n_bits), scores > 0)
    if n_bits % 8:
        assert not (codes[:, -1] >> n_bits % 8).any()


def check_determinism(make, x):
    """``make(seed)`` gives an unfitted model."""
    first, second, other = (make(seed).fit(x) for seed in (3, 3, 4))
    for name in ("mean_", "projection_", "offsets_"):
        assert getattr(first, name).tobytes() == getattr(second, name).tobytes()
    assert not np.array_equal(first.projection_, other.projection_)
    drawn = [make(np.random.RandomState(5)).fit(x) for _ in range(2)]
    assert drawn[0].projection_.tobytes() == drawn[1].projection_.tobytes()


def check_state(model, x):
    """A fitted model survives JSON and arrays; damaged state is refused."""
    params, arrays, info = model.to_state()
    assert set(arrays) == {"mean", "projection", "offsets"}
    assert json.loads(json.dumps(info)) == info
    params = json.loads(json.dumps(params))
    again = model_from_state(model.method, params, arrays)
    assert type(again) is get_method(model.method)
    np.testing.assert_array_equal(again.encode_block(x), model.transform(x))
    params_again, arrays_again, _ = again.to_state()
    assert params_again == params
    assert all(arrays_again[name].tobytes() == arrays[name].tobytes() for name in arrays)
    for damaged_params, damaged in (
        ({**params, "depth": 3}, arrays),
        ({**params, "n_bits": 0}, arrays),
        ({**params, "n_bits": params["n_bits"] + 1}, arrays),
        (params, {**arrays, "mean": arrays["mean"][1:]}),
        (params, {**arrays, "offsets": np.full_like(arrays["offsets"], np.nan)}),
        (params, {"mean": arrays["mean"], "projection": arrays["projection"]}),
    ):
        with pytest.raises(IntegrityError):
            type(again).from_state(damaged_params, damaged)


def check_same_bytes_anywhere(model, x, folder):
    """Blocks of any size and another BLAS kernel give the same codes, for rows that nearly touch a hyperplane."""
    w, mean = model.projection_.astype(np.float64), model.mean_
    touched = w[:, np.arange(len(x)) % model.n_bits].T
    scores = np.einsum("ij,ij->i", x - mean, touched)
    x = (x - (scores / (touched**2).sum(axis=1))[:, None] * touched).astype(np.float32)
    whole = model.encode_block(x)
    for rows in (1, 7, 1000):
        parts = [model.encode_block(x[i : i + rows], first_row=i) for i in range(0, len(x), rows)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    params, arrays, _ = model.to_state()
    path = folder / "state.npz"
    named = {f"a_{name}": array for name, array in arrays.items()}
    np.savez(path, x=x, method=model.method, params=json.dumps(params), **named)
    result = subprocess.run(
        [sys.executable, "-c", ENCODE_ELSEWHERE, str(path)],
        env={**os.environ, "OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    digest, architectures = result.stdout.splitlines()
    assert digest == hashlib.sha256(whole.tobytes()).hexdigest()
    if platform.machine() == "x86_64":
        assert "Haswell" in architectures


def check_encoding_refusals(model, x):
    assert model.encode_block(x[:5].astype(np.float16)).shape == (5, -(-model.n_bits // 8))
    for dtype in (np.uint8, np.int8, np.float64):
        whole_numbers = np.clip(x[:5] * 9, 0, 100).astype(dtype)
        expected = model.encode_block(whole_numbers.astype(np.float32))
        np.testing.assert_array_equal(model.encode_block(whole_numbers), expected)
    damaged = x[:5].copy()
    damaged[2, 1] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        model.encode_block(damaged, first_row=100)
    assert caught.value.rows == (102,)
    damaged[2, 1] = 3e38
    with pytest.raises(BadInputError, match="overflow in the projection of row 102"):
        model.encode_block(damaged, first_row=100)
    with pytest.raises(BadInputError, match=f"{x.shape[1] - 1} features"):
        model.transform(x[:, 1:])
    with pytest.raises(BadInputError, match="float32"):
        type(model)(model.n_bits).fit(x.astype(np.float64) * 1e300)


def check_public(name, model, x):
    """The public class is that of the method, and takes Dask arrays."""
    cls = getattr(och_dist, name)
    assert name in och_dist.__all__
    assert issubclass(cls, DaskAware)
    assert issubclass(cls, get_method(model.method))
    with dask.config.set(scheduler="synchronous"):
        lazy = da.from_array(x, chunks=(len(x) // 3, -1))
        fitted = cls(**model.get_params()).fit(lazy)
        np.testing.assert_array_equal(fitted.transform(lazy).compute(), fitted.transform(x))
    np.testing.assert_allclose(fitted.mean_, model.mean_, rtol=1e-6)
    assert fitted.projection_.shape == model.projection_.shape
