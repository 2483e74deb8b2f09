"""Euclidean neighbours against full float64 distance tables."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, NonFiniteError, UsageError
from och_dist.kernels import euclidean
from och_dist.kernels.euclidean import Candidates, euclidean_top_k, exact_distances, merge_candidates

REPOSITORY = Path(__file__).parents[2]
NEIGHBOURS_OF_A_SEED = """
import hashlib, numpy as np
from och_dist.kernels.euclidean import euclidean_top_k
rng = np.random.default_rng(4)
rows = (100 + rng.integers(0, 3, (3000, 40)) * 0.1).astype("f4")
found = euclidean_top_k(rows[:50], rows, 20).rank()
print(hashlib.sha256(found.distances.tobytes() + found.rows.tobytes()).hexdigest())
"""


def defined_distance(query, row):
    """The documented order of summation, one addition at a time."""
    partial = [0.0] * 32
    for j in range(len(query)):
        difference = float(row[j]) - float(query[j])
        partial[j % 32] += difference * difference
    while len(partial) > 1:
        half = len(partial) // 2
        partial = [partial[i] + partial[i + half] for i in range(half)]
    return partial[0]


def table(queries, rows):
    return np.array([[defined_distance(query, row) for row in rows] for query in queries])


def naive(distances, k, limit=None):
    """Per query the list of the first k (distance, row) up to the limit."""
    limits = [np.inf] * len(distances) if limit is None else limit
    return [
        sorted((float(value), i) for i, value in enumerate(line) if value <= bar)[:k]
        for line, bar in zip(distances, limits, strict=True)
    ]


def as_lists(found):
    found = found.rank()
    pairs = list(zip(found.distances.tolist(), found.rows.tolist(), strict=True))
    return [pairs[a:b] for a, b in zip(found.offsets, found.offsets[1:], strict=False)]


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 1000),
    n=st.integers(1, 60),
    d=st.sampled_from([1, 3, 31, 32, 33, 65]),
    k=st.integers(1, 70),
    dtype=st.sampled_from(["f2", "f4", "f8", "u1", "i1"]),
    integers=st.booleans(),
)
def test_neighbours_and_ties_equal_the_table(seed, n, d, k, dtype, integers):
    rng = np.random.default_rng(seed)
    draw = rng.integers(0, 3, (n + 3, d)) if integers else rng.standard_normal((n + 3, d)) * 9
    points = np.abs(draw).astype(dtype)
    queries, rows = points[:3], points[3:]
    distances = table(queries, rows)
    assert as_lists(euclidean_top_k(queries, rows, k)) == naive(distances, k)
    limit = np.median(distances, axis=1)
    assert as_lists(euclidean_top_k(queries, rows, k, limit=limit)) == naive(distances, k, limit)


def test_defined_distance_is_close_to_the_exact_sum():
    rng = np.random.default_rng(0)
    queries, rows = rng.standard_normal((4, 100)), rng.standard_normal((5, 100)).astype("f4")
    pair_query, pair_row = np.indices((4, 5)).reshape(2, -1)
    got = exact_distances(queries, rows, pair_query, pair_row)
    assert got.tolist() == table(queries, rows).ravel().tolist()
    exact = [
        math.fsum((float(x) - q) ** 2 for x, q in zip(rows[j], queries[i], strict=True))
        for i, j in zip(pair_query, pair_row, strict=True)
    ]
    np.testing.assert_allclose(got, exact, rtol=1e-14)


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e7])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_rows_far_from_zero(offset, dtype):
    """Cancellation in the float32 product must not cost a neighbour; the offset leaves float32 few digits."""
    rng = np.random.default_rng(1)
    points = (offset + rng.standard_normal((300, 20))).astype(dtype)
    distances = table(points[:5], points)
    assert as_lists(euclidean_top_k(points[:5], points, 30)) == naive(distances, 30)


def test_clusters_far_apart():
    """The centre of the queries is far from all of them: only the error bound keeps the result right."""
    rng = np.random.default_rng(2)
    points = (rng.choice([-1e4, 1e4], (200, 1)) + rng.standard_normal((200, 16))).astype("f4")
    assert as_lists(euclidean_top_k(points, points, 7)) == naive(table(points, points), 7)


@pytest.mark.parametrize(("dtype", "huge"), [("f4", 3e38), ("f8", 1e150), ("f8", 1e200), ("f4", 1e19)])
def test_huge_values_are_measured_exactly(dtype, huge):
    rng = np.random.default_rng(3)
    points = rng.standard_normal((40, 5)).astype(dtype)
    points[[3, 20, 21]] *= huge / 10
    points[30] = huge
    with np.errstate(over="ignore"):
        distances = table(points[:5].tolist(), points.tolist())
    assert as_lists(euclidean_top_k(points[:5], points, 40)) == naive(distances, 40)


def test_products_that_overflow_hide_no_row():
    """Half of the products are minus infinity in float32, a bound that says nothing about such rows."""
    points = (1e25 * np.random.default_rng(8).standard_normal((200, 3))).astype("f4")
    assert as_lists(euclidean_top_k(points[:9], points, 100)) == naive(table(points[:9], points), 100)


def test_float64_rows_closer_than_float32_can_tell():
    rng = np.random.default_rng(9)
    direction = rng.standard_normal((2000, 24))
    direction /= np.linalg.norm(direction, axis=1)[:, None]
    rows = direction * (1.0 + 1e-10 * rng.permutation(2000))[:, None]
    query = np.zeros((1, 24))
    assert as_lists(euclidean_top_k(query, rows, 100)) == naive(table(query, rows), 100)


def test_tiny_values():
    points = (np.random.default_rng(0).integers(0, 5, (50, 4)) * 1e-40).astype("f4")
    assert as_lists(euclidean_top_k(points[:6], points, 9)) == naive(table(points[:6], points), 9)


@pytest.mark.parametrize("sizes", [[3000], [1, 2999], [1000, 1000, 1000], [0, 2047, 953], [2049, 951]])
def test_merged_parts_equal_the_whole(sizes):
    rng = np.random.default_rng(6)
    rows = rng.integers(0, 3, (3000, 8)).astype("f4")
    queries = rows[:10] + np.float32(0.25)
    whole = euclidean_top_k(queries, rows, 25)
    cuts = np.cumsum([0, *sizes])
    parts = [euclidean_top_k(queries, rows[a:b], 25, first_row=int(a)) for a, b in itertools.pairwise(cuts)]
    assert as_lists(merge_candidates(parts, 25)) == as_lists(whole)
    assert as_lists(merge_candidates(parts[::-1], 25)) == as_lists(whole)
    bar = whole.dense(25)[0][:, -1]
    limited = [
        euclidean_top_k(queries, rows[a:b], 25, first_row=int(a), limit=bar) for a, b in itertools.pairwise(cuts)
    ]
    assert as_lists(merge_candidates(limited, 25)) == as_lists(whole)


def test_tiles_and_batches_change_nothing():
    rng = np.random.default_rng(7)
    rows = (50 + rng.standard_normal((2500, 12))).astype("f4")
    few = as_lists(euclidean_top_k(rows[:40], rows, 11))
    single = [euclidean_top_k(rows[i : i + 1], rows, 11) for i in range(40)]
    assert [as_lists(one)[0] for one in single] == few
    many = euclidean.QUERIES_PER_TILE + 88
    assert as_lists(euclidean_top_k(rows[:many], rows, 11))[:40] == few


@pytest.mark.parametrize("order", ["F", "strided", ">f4"])
def test_queries_and_rows_of_any_layout(order):
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((200, 80)).astype("f4")
    layouts = {"F": np.asfortranarray(rows), "strided": np.repeat(rows, 2, axis=1)[:, ::2], ">f4": rows.astype(">f4")}
    other, pairs = layouts[order], (np.arange(9), np.arange(9, 18))
    assert as_lists(euclidean_top_k(other[:9], other, 20)) == as_lists(euclidean_top_k(rows[:9], rows, 20))
    assert np.array_equal(exact_distances(other[:9], other, *pairs), exact_distances(rows[:9], rows, *pairs))


def test_same_neighbours_for_another_blas_kernel():
    environment = {**os.environ, "OPENBLAS_CORETYPE": "Haswell", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", NEIGHBOURS_OF_A_SEED]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    rng = np.random.default_rng(4)
    rows = (100 + rng.integers(0, 3, (3000, 40)) * 0.1).astype("f4")
    found = euclidean_top_k(rows[:50], rows, 20).rank()
    digest = hashlib.sha256(found.distances.tobytes() + found.rows.tobytes()).hexdigest()
    assert other.stdout.strip() == digest


def test_published_truth_of_sift():
    folder = Path(os.environ.get("OCH_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (folder / "siftsmall_base.npy").exists():
        pytest.skip(f"no siftsmall_base.npy in {folder}")
    names = "base", "query", "groundtruth"
    base, queries, truth = (np.load(folder / f"siftsmall_{name}.npy") for name in names)
    distances, rows = euclidean_top_k(queries, base, 100).dense(100)
    pair_query = np.repeat(np.arange(len(queries)), 100)
    published = exact_distances(queries, base, pair_query, truth[:, :100].ravel().astype(np.int64))
    # Equal distances come in any order in the published file, so distances are compared, then untied rows.
    assert np.array_equal(distances.ravel(), published)
    assert (rows == truth[:, :100]).mean() > 0.99


def test_dense_needs_one_width():
    found = Candidates(np.array([0, 2, 5]), np.arange(5.0), np.arange(5))
    distances, rows = found.dense(2)
    assert distances.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert rows.tolist() == [[0, 1], [2, 3]]
    with pytest.raises(UsageError, match="between 2 and 3 candidates"):
        found.dense(3)


def test_nothing_to_find():
    points, none = np.ones((3, 4), "f4"), np.empty((0, 4), "f4")
    assert euclidean_top_k(points, none, 5).offsets.tolist() == [0, 0, 0, 0]
    assert euclidean_top_k(none, points, 5).dense(5)[0].shape == (0, 5)
    assert euclidean_top_k(points, points, 0).distances.size == 0
    assert euclidean_top_k(points, none, 5).dense(5)[0].shape == (3, 0)
    assert euclidean_top_k(points, points, 9, limit=np.full(3, -1.0)).distances.size == 0
    assert exact_distances(points, points, np.empty(0, int), np.empty(0, int)).size == 0


def test_bad_input_is_refused():
    points = np.zeros((3000, 4), "f4")
    broken = points.copy()
    broken[2500, 1] = np.nan
    with pytest.raises(NonFiniteError, match="1 rows hold NaN or infinity") as caught:
        euclidean_top_k(points[:2], broken, 3, first_row=10_000)
    assert caught.value.rows == (12_500,)
    with pytest.raises(NonFiniteError, match="1 queries hold NaN"):
        euclidean_top_k(broken, points, 3)
    with pytest.raises(BadInputError, match=r"expected \(n, 4\)"):
        euclidean_top_k(points, np.zeros((3, 5), "f4"), 3)
    with pytest.raises(UsageError, match="expected one number for each of 3 queries"):
        euclidean_top_k(points[:3], points, 3, limit=np.array([1.0, 2.0]))
    with pytest.raises(UsageError, match="at least one"):
        merge_candidates([], 3)
