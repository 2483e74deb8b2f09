"""What the tests of methods share: rows, a yardstick on real descriptors, and checks of linear models."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import och_dist
from och_dist.kernels.ranking import mean_average_precision
from och_dist.train import data
from och_dist.train.rows import ArrayRows

REAL = Path(os.environ.get("OCH_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
REAL_ROWS = REAL / "tiny100k_gist384_f16.npy"

ENCODE_ELSEWHERE = """
import hashlib, json, sys
import numpy as np
from threadpoolctl import threadpool_info
from och_dist.methods import get_method
state = np.load(sys.argv[1])
params = json.loads(str(state["params"]))
arrays = {name[2:]: state[name] for name in state.files if name.startswith("a_")}
model = get_method(str(state["method"])).from_state(params, arrays)
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


def check_same_bytes_anywhere(model, x, folder):
    """Blocks of any size and another BLAS kernel give the same codes; of a linear method for rows that nearly touch a
    hyperplane."""
    if hasattr(model, "projection_"):
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


def uneven(n=1500, d=40, n_clusters=25, seed=0):
    """:func:`clustered` rows whose clusters differ in spread."""
    rng = np.random.default_rng(seed)
    axes = 1.0 / np.sqrt(1 + np.arange(d))
    centres = rng.normal(size=(n_clusters, d)) * axes
    spread = rng.uniform(0.3, 0.8, size=(n_clusters, 1))
    label = rng.integers(0, n_clusters, size=n)
    return (3 + centres[label] + spread[label] * rng.normal(size=(n, d)) * axes).astype(np.float32)


def precision_at(model, base, queries, *, k, truth_share=0.02):
    """Mean share of true neighbours among the k first by Hamming distance, ties by row."""
    mean = base.mean(axis=0, dtype=np.float64)
    b, q = base - mean, queries - mean
    n_true = int(truth_share * len(base))
    truth = np.argsort((b**2).sum(axis=1) - 2 * q @ b.T, axis=1)[:, :n_true]
    a, b = (1.0 - 2 * bits_of(model.transform(x), model.n_bits) for x in (queries, base))
    found = np.argsort(-(a @ b.T), axis=1, kind="stable")[:, :k]
    return np.mean([len(np.intersect1d(f, t)) / k for f, t in zip(found, truth, strict=True)])
