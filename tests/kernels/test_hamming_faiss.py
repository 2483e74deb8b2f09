"""The situations that a flat binary index has to get right, side by side with faiss.IndexBinaryFlat.

Distances must be equal. Rows are compared through a plain sort by (distance, row), which no version of FAISS promises.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from och_dist.kernels.hamming import (
    hamming_histogram,
    hamming_radius,
    hamming_top_k,
    lay_out,
    merge_radius,
    merge_top_k,
)

faiss = pytest.importorskip("faiss")


def random_codes(n, bits, seed, *, distinct=None):
    """Packed codes; with ``distinct`` they repeat so many different ones."""
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 256, (n if distinct is None else distinct, bits // 8), dtype=np.uint8)
    return made if distinct is None else made[rng.integers(0, distinct, n)]


def flat(codes):
    index = faiss.IndexBinaryFlat(8 * codes.shape[1])
    index.add(codes)
    return index


def all_distances(queries, codes):
    return np.bitwise_count(queries[:, None, :] ^ codes[None, :, :]).sum(axis=2, dtype=np.int64)


def ordered(distances, k):
    rows = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(distances, rows, axis=1), rows


def assert_equal(got, expected):
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("bits", [8, 16, 24, 32, 40, 64, 72, 104, 128, 160, 200, 256, 320, 512])
@pytest.mark.parametrize("distinct", [None, 30])
def test_nearest_codes_of_usual_and_odd_sizes(bits, distinct):
    codes, queries = random_codes(900, bits, 1, distinct=distinct), random_codes(20, bits, 2)
    distances, rows = hamming_top_k(queries, lay_out(codes, bits), 25)
    assert np.array_equal(distances, flat(codes).search(queries, 25)[0])
    assert_equal((distances, rows), ordered(all_distances(queries, codes), 25))


@pytest.mark.parametrize("bits", [32, 64, 256])
def test_a_stored_code_finds_itself_first(bits):
    codes = random_codes(500, bits, 3)
    codes = codes[np.sort(np.unique(codes, axis=0, return_index=True)[1])]
    distances, rows = hamming_top_k(codes, lay_out(codes, bits), 1)
    assert not distances.any()
    assert np.array_equal(rows[:, 0], np.arange(len(codes)))


def test_more_neighbours_wanted_than_codes_stored():
    """FAISS fills up with row -1; here the result is as wide as there are codes."""
    codes, queries = random_codes(7, 64, 4), random_codes(5, 64, 5)
    distances, rows = hamming_top_k(queries, lay_out(codes, 64), 20)
    theirs, their_rows = flat(codes).search(queries, 20)
    assert distances.shape == rows.shape == (5, 7)
    assert np.array_equal(distances, theirs[:, :7])
    assert (their_rows[:, 7:] == -1).all()
    assert np.array_equal(np.sort(rows, axis=1), np.tile(np.arange(7), (5, 1)))


@pytest.mark.parametrize("radius", [0, 1, 10, 20, 27, 40, 64])
def test_radius_search_like_range_search(radius):
    """FAISS' radius is exclusive and its hits unordered."""
    codes, queries = random_codes(600, 64, 6), random_codes(15, 64, 7)
    indptr, distances, rows = hamming_radius(queries, lay_out(codes, 64), radius)
    limits, their_distances, their_rows = flat(codes).range_search(queries, radius + 1)
    assert np.array_equal(indptr, limits.astype(np.int64))
    for q in range(len(queries)):
        ours, theirs = slice(*indptr[q : q + 2]), slice(int(limits[q]), int(limits[q + 1]))
        order = np.lexsort((their_rows[theirs], their_distances[theirs]))
        assert np.array_equal(distances[ours], their_distances[theirs][order])
        assert np.array_equal(rows[ours], their_rows[theirs][order])


def test_radius_search_is_consistent_with_nearest_codes():
    """The rows within the k-th distance begin with the k nearest, and one step less leaves the k-th out."""
    codes, queries, k = random_codes(600, 64, 8), random_codes(15, 64, 9), 20
    block = lay_out(codes, 64)
    distances, rows = hamming_top_k(queries, block, k)
    for q in range(len(queries)):
        kth = int(distances[q, -1])
        wide = hamming_radius(queries[q : q + 1], block, kth)
        assert_equal((wide[1][:k], wide[2][:k]), (distances[q], rows[q]))
        narrow = hamming_radius(queries[q : q + 1], block, kth - 1)
        count = int(np.count_nonzero(distances[q] < kth))
        assert_equal((narrow[1], narrow[2]), (distances[q, :count], rows[q, :count]))


def test_some_and_all_queries_may_have_an_empty_radius():
    codes = np.zeros((100, 8), np.uint8)
    queries = np.array([[0] * 8, [255] * 8, [1] + [0] * 7], np.uint8)
    indptr, distances, rows = hamming_radius(queries, lay_out(codes, 64), 0)
    assert indptr.tolist() == [0, 100, 100, 100]
    assert not distances.any()
    assert rows.tolist() == list(range(100))
    indptr, distances, rows = hamming_radius(queries[1:], lay_out(codes, 64), 0)
    assert (indptr.tolist(), distances.size, rows.size) == ([0, 0, 0], 0, 0)


@pytest.mark.parametrize("share", [0.5, 0.02])
@pytest.mark.parametrize("n_queries", [3, 300])
def test_selected_rows_like_an_id_selector(share, n_queries):
    codes, queries = random_codes(3000, 64, 10), random_codes(n_queries, 64, 11)
    live = np.random.default_rng(12).random(3000) < share
    chosen = np.flatnonzero(live)
    kept = flat(codes[chosen])  # what a selector must amount to
    distances, rows = hamming_top_k(queries, lay_out(codes, 64), 30, live=live)
    expected = ordered(all_distances(queries, codes[chosen]), 30)
    assert np.array_equal(distances, kept.search(queries, 30)[0])
    assert_equal((distances, rows), (expected[0], chosen[expected[1]]))


def test_a_selector_by_range_by_list_and_its_complement():
    codes, queries = random_codes(1000, 128, 13), random_codes(10, 128, 14)
    block, distances = lay_out(codes, 128), all_distances(queries, codes)
    chosen = np.zeros(1000, bool)
    chosen[200:500] = True
    chosen[[3, 999]] = True
    for live in (chosen, ~chosen):
        hidden = np.where(live, distances, 1000)
        got = hamming_top_k(queries, block, 40, live=live)
        assert_equal(got, ordered(hidden, 40))


def test_an_empty_index():
    block, queries = lay_out(np.empty((0, 8), np.uint8), 64), random_codes(4, 64, 15)
    assert hamming_top_k(queries, block, 3)[1].shape == (4, 0)
    assert hamming_radius(queries, block, 64)[0].tolist() == [0] * 5
    assert (flat(np.empty((0, 8), np.uint8)).search(queries, 3)[1] == -1).all()


def test_no_queries():
    block = lay_out(random_codes(100, 64, 16), 64)
    none = np.empty((0, 8), np.uint8)
    assert hamming_top_k(none, block, 3)[0].shape == (0, 3)
    assert hamming_radius(none, block, 3)[0].tolist() == [0]


def test_equal_distances_come_in_row_order():
    """All codes of a kind are equally far: the first k of the nearest kind must come out."""
    codes = np.zeros((500, 8), np.uint8)
    codes[::3, 0] = 1
    distances, rows = hamming_top_k(np.zeros((1, 8), np.uint8), lay_out(codes, 64), 400)
    zero, one = np.flatnonzero(codes[:, 0] == 0), np.flatnonzero(codes[:, 0])
    assert rows[0].tolist() == [*zero, *one][:400]
    assert distances[0].tolist() == [0] * len(zero) + [1] * (400 - len(zero))


@pytest.mark.parametrize("n_shards", [1, 2, 5])
def test_shards_merge_to_the_whole(n_shards):
    codes, queries = random_codes(1000, 64, 17, distinct=80), random_codes(12, 64, 18)
    cuts = np.linspace(0, 1000, n_shards + 1).astype(int)
    shards = [(int(a), lay_out(codes[a:b], 64)) for a, b in itertools.pairwise(cuts)]
    whole = lay_out(codes, 64)
    nearest = [hamming_top_k(queries, block, 50, first_row=first) for first, block in shards]
    assert_equal(merge_top_k(nearest, 50), hamming_top_k(queries, whole, 50))
    within = [hamming_radius(queries, block, 25, first_row=first) for first, block in shards]
    assert_equal(merge_radius(within), hamming_radius(queries, whole, 25))
    counts = sum(hamming_histogram(queries, block) for _, block in shards)
    assert np.array_equal(counts, hamming_histogram(queries, whole))


@pytest.mark.parametrize("bits", [32, 64, 128])
def test_a_large_batch_equals_one_query_at_a_time(bits):
    codes, queries = random_codes(4000, bits, 19, distinct=1500), random_codes(700, bits, 20)
    block = lay_out(codes, bits)
    batch, within = hamming_top_k(queries, block, 15), hamming_radius(queries, block, bits // 4)
    assert np.array_equal(batch[0], flat(codes).search(queries, 15)[0])
    for q in range(0, 700, 23):
        one = hamming_top_k(queries[q : q + 1], block, 15)
        assert_equal(one, (batch[0][q : q + 1], batch[1][q : q + 1]))
        alone, part = hamming_radius(queries[q : q + 1], block, bits // 4), slice(*within[0][q : q + 2])
        assert_equal(alone[1:], (within[1][part], within[2][part]))


def test_many_codes_with_many_ties():
    """Enough rows for the sample that guides the scan, few distinct codes, also against FAISS' rows of distance."""
    codes, queries = random_codes(100_000, 32, 21, distinct=500), random_codes(40, 32, 22)
    block, index = lay_out(codes, 32), flat(codes)
    for k in (1, 100, 3000):
        distances, rows = hamming_top_k(queries, block, k)
        assert np.array_equal(distances, index.search(queries, k)[0])
        assert_equal((distances, rows), ordered(all_distances(queries, codes), k))


def test_codes_added_later_are_a_second_part():
    codes, queries = random_codes(300, 64, 23), random_codes(6, 64, 24)
    index = flat(codes[:130])
    index.add(codes[130:])
    parts = [hamming_top_k(queries, lay_out(codes[a:b], 64), 9, first_row=a) for a, b in ((0, 130), (130, 300))]
    assert np.array_equal(merge_top_k(parts, 9)[0], index.search(queries, 9)[0])


def test_merging_results_that_are_not_full():
    """Bounded parts have empty places at their end, which must lose against every row."""
    codes, queries = random_codes(640, 64, 25), random_codes(8, 64, 26)
    block = lay_out(codes, 64)
    whole = hamming_top_k(queries, block, 10)
    limits = whole[0][:, -1]
    parts = [hamming_top_k(queries, block.part(a, a + 320), 10, first_row=a, limits=limits) for a in (0, 320)]
    assert (parts[0][1] == -1).any()
    assert_equal(merge_top_k(parts, 10), whole)
