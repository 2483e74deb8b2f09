"""Cluster statistics against loops over rows, and the same statistics for every chunking."""

from __future__ import annotations

import itertools
from dataclasses import fields

import numpy as np
import pytest

from och_dist.errors import BadInputError, ConflictError, NonFiniteError
from och_dist.kernels.euclidean import exact_distances
from och_dist.kernels.gistlike import gist_rows
from och_dist.kernels.kmeans import assign, block_clusters, row_priority

EXACT_FIELDS = [
    "counts",
    "member_rows",
    "member_priority",
    "members",
    "far_rows",
    "far_distances",
    "far_vectors",
]


def example(n=900, n_labels=12, d=6, dtype="f4", seed=0):
    """Small integers: ties between centres and between far rows; the last centre stays empty."""
    rng = np.random.default_rng(seed)
    block = rng.integers(0, 5, (n, d)).astype(dtype)
    centres = rng.integers(0, 5, (n_labels, d)).astype("f4")
    centres[3] = centres[1]
    centres[-1] = 1000
    return block, centres


def naive_labels(block, centres):
    distances = ((block[:, None].astype("f8") - centres[None].astype("f8")) ** 2).sum(axis=2)
    return distances.argmin(axis=1), distances.min(axis=1)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "u1", "i1"])
def test_labels_are_of_the_nearest_centre_and_the_smaller_of_equals(dtype):
    block, centres = example(n=2500, dtype=dtype)
    labels, distances = assign(block, centres)
    expected = naive_labels(block, centres)
    assert labels.dtype == np.int32
    assert np.array_equal(labels, expected[0])
    assert np.array_equal(distances, expected[1])
    assert 3 not in labels


def test_labels_do_not_depend_on_the_block():
    rng = np.random.default_rng(1)
    block = (1e3 + rng.standard_normal((300, 50))).astype("f4")
    centres = np.repeat(block[:20], 2, axis=0)
    whole = assign(block, centres)
    single = [assign(block[i : i + 1], centres) for i in range(300)]
    assert np.array_equal(whole[0], np.concatenate([one[0] for one in single]))
    assert np.array_equal(whole[1], np.concatenate([one[1] for one in single]))
    assert (whole[1][:20] == 0).all()


def test_statistics_equal_loops_over_rows():
    block, centres = example()
    stats = block_clusters(block, centres, first_row=100, seed=5, n_members=3, n_far=4)
    labels, distances = naive_labels(block, centres)
    rows = 100 + np.arange(len(block))
    priority = row_priority(rows, 5)
    for label in range(len(centres)):
        mine = np.flatnonzero(labels == label)
        assert stats.counts[label] == mine.size
        chosen = sorted(mine, key=lambda i: (priority[i], i))[:3]
        padding = 3 - len(chosen)
        assert stats.member_rows[label].tolist() == [100 + i for i in chosen] + [-1] * padding
        assert stats.member_priority[label][: len(chosen)].tolist() == [priority[i] for i in chosen]
        assert np.array_equal(stats.members[label][: len(chosen)], block[chosen])
        assert not stats.members[label][len(chosen) :].any()
    far = sorted(range(len(block)), key=lambda i: (-distances[i], i))[:4]
    assert stats.far_rows.tolist() == [100 + i for i in far]
    assert stats.far_distances.tolist() == [distances[i] for i in far]
    assert np.array_equal(stats.far_vectors, block[far])
    assert stats.inertia == pytest.approx(distances.sum())
    assert stats.members.dtype == stats.far_vectors.dtype == np.float32


def assert_same(left, right):
    for name in EXACT_FIELDS:
        assert np.array_equal(getattr(left, name), getattr(right, name)), name
    assert left.inertia == pytest.approx(right.inertia, rel=1e-13)


@pytest.mark.parametrize("sizes", [[900], [1, 899], [300, 300, 300], [0, 5, 895], [2, 3, 4, 891]])
def test_chunkings_and_merge_orders_agree(sizes):
    block, centres = example()
    options = {"seed": 9, "n_members": 2, "n_far": 8}
    whole = block_clusters(block, centres, first_row=0, **options)
    cuts = np.cumsum([0, *sizes])
    parts = [block_clusters(block[a:b], centres, first_row=int(a), **options) for a, b in itertools.pairwise(cuts)]
    forward, backward = parts[0], parts[-1]
    for part in parts[1:]:
        forward = forward.merge(part)
    for part in parts[-2::-1]:
        backward = part.merge(backward)
    assert_same(forward, whole)
    assert_same(backward, whole)
    if len(parts) > 1:
        assert_same(parts[1].merge(parts[0]), parts[0].merge(parts[1]))


def test_fewer_rows_than_room():
    block, centres = example(n=3)
    stats = block_clusters(block, centres, first_row=0, seed=0, n_members=2, n_far=8)
    assert sorted(stats.far_rows[:3].tolist()) == [0, 1, 2]
    assert stats.far_rows[3:].tolist() == [-1] * 5
    assert (stats.far_distances[3:] == -1).all()
    assert stats.member_rows[-1].tolist() == [-1, -1]
    assert {field.name for field in fields(stats)} == {*EXACT_FIELDS, "inertia"}
    empty = block_clusters(block[:0], centres, first_row=3, seed=0)
    assert_same(stats.merge(empty), stats)


def test_priorities_are_a_keyed_uniform_hash():
    rows = np.arange(20_000)
    first, second = row_priority(rows, 1), row_priority(rows, 2)
    assert first.dtype == np.uint64
    assert np.unique(first).size == rows.size
    assert np.array_equal(row_priority(rows[500:600], 1), first[500:600])
    assert abs(first.astype("f8").mean() / 2**64 - 0.5) < 0.01
    assert abs(np.corrcoef(first.astype("f8"), second.astype("f8"))[0, 1]) < 0.03
    assert abs(np.corrcoef(first.astype("f8"), rows)[0, 1]) < 0.03
    assert row_priority(np.array([0]), -1).shape == (1,)


def test_bad_input_is_refused():
    block, centres = example(n=20)
    block[7, 0] = np.inf
    with pytest.raises(NonFiniteError) as caught:
        block_clusters(block, centres, first_row=50, seed=0)
    assert caught.value.rows == (57,)
    with pytest.raises(BadInputError, match="at least one: choose seeds"):
        assign(block, centres[:0])
    good = np.nan_to_num(block, posinf=0)
    one = block_clusters(good, centres, first_row=0, seed=0, n_members=1)
    two = block_clusters(good, centres, first_row=20, seed=0, n_members=2)
    with pytest.raises(ConflictError, match="expected equal shapes"):
        one.merge(two)


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "u1"])
@pytest.mark.parametrize(("d", "count"), [(200, 100), (64, 40), (24, 1)])
def test_labels_and_distances_are_those_of_the_definition(dtype, d, count):
    """Centres that few axes tell apart, so that most are ruled out by bounds; the oracle measures every pair."""
    rows = (100 * gist_rows(0, 1300, dim=d, seed=2)).clip(0, 200).astype(dtype)
    rng = np.random.default_rng(0)
    picked = rng.integers(0, len(rows), (count, 30))
    centres = rows[picked].astype("f8").mean(axis=1).astype("f4")
    labels, distances = assign(rows, centres)
    other = assign(np.asfortranarray(rows), np.asfortranarray(centres))
    assert np.array_equal(other[0], labels)
    assert np.array_equal(other[1], distances)
    pairs = np.indices((len(rows), count)).reshape(2, -1)
    every = exact_distances(centres, rows, pairs[1], pairs[0]).reshape(len(rows), count)
    assert np.array_equal(labels, every.argmin(axis=1))
    assert np.array_equal(distances, every.min(axis=1))


@pytest.mark.parametrize("far", [1e15, 1e30, 1e150])
def test_rows_far_beyond_float32_are_measured(far):
    rows = np.array([[far, 0.0], [0.0, -far], [1.0, 1.0], [3.0, 3.0]])
    centres = np.array([[1, 1], [3, 3], [-1, 2]], "f4")
    expected = naive_labels(rows, centres)
    labels, distances = assign(rows, centres)
    assert np.array_equal(distances, expected[1])
    assert np.array_equal(labels[2:], [0, 1])
