"""Hamming kernels against full distance matrices and plain sorts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, UsageError
from och_dist.kernels import hamming, hamming_numba
from och_dist.kernels.hamming import (
    count_rows,
    hamming_histogram,
    hamming_radius,
    hamming_top_k,
    lay_out,
    merge_radius,
    merge_top_k,
)
from och_dist.kernels.packing import code_words, pack_bits

SIZES = [1, 2, 63, 64, 65, 127, 128, 129, 200, 700]
"""Numbers of codes around the borders of groups of 64."""


def random_bits(n, r, seed, flips=0.5):
    """Rows that share a pattern when ``flips`` is small: many ties, many duplicates; all equal when it is 0."""
    rng = np.random.default_rng(seed)
    return (rng.random(r) < 0.5) ^ (rng.random((n, r)) < flips)


def block_of(bits):
    return lay_out(pack_bits(bits), bits.shape[1])


def all_distances(queries, rows):
    return np.stack([np.count_nonzero(query != rows, axis=1) for query in queries])


def naive_order(distances, live=None):
    """Rows of each query by (distance, row), through a plain sort of every query."""
    rows = np.arange(distances.shape[1]) if live is None else np.flatnonzero(live)
    return [sorted(zip(line[rows].tolist(), rows.tolist(), strict=True)) for line in distances]


def check_top_k(got, order, k):
    distances, rows = got
    assert (distances.dtype, rows.dtype) == (np.int32, np.int64)
    assert distances.tolist() == [[d for d, _ in line[:k]] for line in order]
    assert rows.tolist() == [[row for _, row in line[:k]] for line in order]


def check_radius(got, order, radius):
    indptr, distances, rows = got
    assert (indptr.dtype, distances.dtype, rows.dtype) == (np.int64, np.int32, np.int64)
    within = [[(d, row) for d, row in line if d <= radius] for line in order]
    assert indptr.tolist() == [0, *itertools.accumulate(len(line) for line in within)]
    assert list(zip(distances.tolist(), rows.tolist(), strict=True)) == [pair for line in within for pair in line]


def from_row(first, *found):
    """A result whose rows are numbered from ``first`` on; -1 stays."""
    *others, rows = found
    return *others, np.where(rows < 0, -1, rows + first)


@settings(deadline=None, max_examples=60)
@given(
    r=st.integers(1, 512) | st.sampled_from([8, 31, 32, 33, 63, 64, 65, 128, 256, 512]),
    n=st.sampled_from(SIZES),
    q=st.integers(1, 4),
    k=st.sampled_from([1, 2, 10, 64, 100, 800]),
    flips=st.sampled_from([0.0, 0.02, 0.5]),
    share=st.sampled_from([None, 0.0, 0.01, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 1000),
)
def test_everything_against_all_distances(r, n, q, k, flips, share, seed):
    rng = np.random.default_rng(seed)
    queries, rows = random_bits(q, r, seed, flips), random_bits(n, r, seed, flips)
    live = None if share is None else rng.random(n) < share
    distances, block, packed = all_distances(queries, rows), block_of(rows), pack_bits(queries)
    order = naive_order(distances, live)
    check_top_k(hamming_top_k(packed, block, k, live=live), order, k)
    for radius in (0, int(np.median(distances)), r + 5):
        check_radius(hamming_radius(packed, block, radius, live=live), order, radius)
    counted = distances if live is None else distances[:, live]
    histogram = hamming_histogram(packed, block, live=live)
    assert histogram.dtype == np.int64
    assert np.array_equal(histogram, [np.bincount(line, minlength=r + 1) for line in counted])
    some = np.random.default_rng(seed).integers(900, 1100 + n, (q, 7))
    near = [[distances[i, row - 1000] for row in line if 0 <= row - 1000 < n] for i, line in enumerate(some)]
    counts = count_rows(code_words(packed), code_words(pack_bits(rows)), some, 1000, r)
    assert np.array_equal(counts, [np.bincount(line, minlength=r + 1) for line in near])


@settings(deadline=None, max_examples=30)
@given(
    r=st.sampled_from([20, 64, 130]),
    n=st.sampled_from(SIZES),
    k=st.sampled_from([1, 10, 100, 800]),
    seed=st.integers(0, 1000),
)
def test_rows_beyond_a_limit_leave_their_place_empty(r, n, k, seed):
    rng = np.random.default_rng(seed)
    queries, rows = random_bits(5, r, seed, 0.1), random_bits(n, r, seed, 0.1)
    limits = rng.integers(-1, r + 2, 5).astype(np.int32)
    distances, found = hamming_top_k(pack_bits(queries), block_of(rows), k, limits=limits)
    width = min(k, n)
    for limit, line, got, at in zip(limits, naive_order(all_distances(queries, rows)), distances, found, strict=True):
        kept = [(d, row) for d, row in line[:k] if d <= limit]
        kept += [(r + 1, -1)] * (width - len(kept))
        assert list(zip(got.tolist(), at.tolist(), strict=True)) == kept


def test_a_limit_equal_to_the_kth_distance_changes_nothing():
    queries, rows = pack_bits(random_bits(9, 50, 1, 0.2)), block_of(random_bits(900, 50, 1, 0.2))
    free = hamming_top_k(queries, rows, 40)
    bound = hamming_top_k(queries, rows, 40, limits=free[0][:, -1])
    assert all(np.array_equal(*pair) for pair in zip(free, bound, strict=True))


@pytest.mark.parametrize("r", [32, 64, 100, 192, 300])
def test_more_than_one_block_and_tile(r):
    bytes_per_code = 4 if r <= 32 else 8 * -(-r // 64)
    rows = random_bits(2 * hamming_numba.BLOCK_BYTES // bytes_per_code + 70, r, 1, flips=0.1)
    queries = random_bits(hamming_numba.QUERY_TILE + 1, r, 1, flips=0.1)
    distances, block, packed = all_distances(queries, rows), block_of(rows), pack_bits(queries)
    order = np.argsort(distances, axis=1, kind="stable")
    for k in (1, 100):
        got = hamming_top_k(packed, block, k)
        assert np.array_equal(got[1], order[:, :k])
        assert np.array_equal(got[0], np.take_along_axis(distances, order[:, :k], axis=1))
    radius = int(np.quantile(distances, 0.02))
    indptr, within, found = hamming_radius(packed, block, radius)
    for q in range(len(queries)):
        here, count = slice(*indptr[q : q + 2]), np.count_nonzero(distances[q] <= radius)
        assert np.array_equal(found[here], order[q, :count])
        assert np.array_equal(within[here], distances[q, order[q, :count]])
    histogram = hamming_histogram(packed, block)
    assert np.array_equal(histogram, [np.bincount(line, minlength=r + 1) for line in distances])


def test_descending_distances_overflow_the_candidate_buffer():
    """Every row beats all before it: the buffer is compacted again and again."""
    r, n = 128, 3000
    rows = np.zeros((n, r), bool)
    for i in range(n):
        rows[i, : r - i * r // n] = True
    queries = np.zeros((1, r), bool)
    order = naive_order(all_distances(queries, rows))
    for k in (1, 5, 40):
        check_top_k(hamming_top_k(pack_bits(queries), block_of(rows), k), order, k)


@pytest.fixture(scope="module")
def sampled():
    """Enough rows for a sample. A cluster lies where the sample does not look, another one only where it looks."""
    n = hamming.SAMPLE_FROM + 77
    rows = random_bits(n, 64, 5, 0.3)
    hidden, shown = random_bits(2, 64, 6)
    looked_at = np.zeros(n, bool)
    looked_at[:: hamming.SAMPLE_STRIDE] = True
    rows[np.flatnonzero(looked_at)[:300]] = shown
    rows[np.flatnonzero(~looked_at)[:300]] = hidden
    queries = np.concatenate([random_bits(6, 64, 5, 0.3), [hidden, shown, ~shown]])
    return queries, rows, all_distances(queries, rows)


@pytest.mark.parametrize("k", [1, 10, 250, 300, 1000, 4000])
@pytest.mark.parametrize("share", [None, 0.9, 0.02])
def test_a_sample_that_misleads_changes_nothing(sampled, k, share):
    queries, rows, distances = sampled
    live = None if share is None else np.random.default_rng(0).random(len(rows)) < share
    numbers = np.arange(len(rows)) if live is None else np.flatnonzero(live)
    kept = distances[:, numbers]
    order = np.argsort(kept, axis=1, kind="stable")[:, :k]
    block = block_of(rows)
    assert block.sample is not None
    got = hamming_top_k(pack_bits(queries), block, k, live=live)
    assert np.array_equal(got[0], np.take_along_axis(kept, order, axis=1))
    assert np.array_equal(got[1], numbers[order])


def test_the_sample_promised_too_much_for_some_query(sampled):
    """Without this the test above would not reach the second scan."""
    queries, rows, distances = sampled
    block, k = block_of(rows), 1000
    words, seen = hamming.scan_words(pack_bits(queries), 64), []

    def scan(some, groups, live, bounds, *out):
        seen.append((groups is block.sample.groups, some, bounds.copy()))
        return hamming_numba.scan(words[some], groups, live, 65, bounds, *out)

    hamming.scan_nearest(scan, block, k, None, np.full(len(queries), 65), np.int32(65))
    (of_sample, *_), (of_all, _, guessed), (again, late, bounds) = seen
    assert (of_sample, of_all, again) == (True, False, False)
    reached = np.count_nonzero(distances < guessed[:, None], axis=1)
    assert np.array_equal(late, np.flatnonzero(reached < k))
    assert (bounds == 65).all()
    assert (reached < k).any()
    assert (reached >= k).sum() >= 6


def test_a_part_of_a_block_is_the_block_of_these_rows():
    queries, rows = random_bits(4, 70, 2, 0.1), random_bits(1000, 70, 2, 0.1)
    block, packed = block_of(rows), pack_bits(queries)
    for start, stop in ((0, 64), (64, 1000), (128, 640), (0, 1000), (64, 64)):
        part = block.part(start, stop)
        order = naive_order(all_distances(queries, rows[start:stop]))
        assert (part.n, part.n_bits) == (stop - start, 70)
        assert np.shares_memory(part.groups, block.groups) or start == stop
        check_top_k(hamming_top_k(packed, part, 30), order, 30)
    for start, stop in ((1, 64), (0, 65), (128, 64), (64, 1024)):
        with pytest.raises(UsageError, match="expected multiples of 64"):
            block.part(start, stop)


def test_taken_codes_are_the_block_of_these_rows():
    queries, rows = random_bits(4, 70, 3, 0.1), random_bits(300, 70, 3, 0.1)
    chosen = np.array([299, 0, 64, 64, 63, 128])
    taken = block_of(rows).take(chosen)
    order = naive_order(all_distances(queries, rows[chosen]))
    check_top_k(hamming_top_k(pack_bits(queries), taken, 6), order, 6)
    for wrong in (-1, 300):
        with pytest.raises(UsageError, match="expected 0 to 299"):
            block_of(rows).take(np.array([5, wrong]))


def test_size_of_a_block():
    assert block_of(random_bits(65, 32, 0)).nbytes == 2 * 64 * 4
    assert block_of(random_bits(65, 33, 0)).nbytes == 2 * 64 * 8
    assert block_of(random_bits(64, 129, 0)).nbytes == 64 * 24
    assert block_of(random_bits(64, 64, 0)).groups.ctypes.data % 64 == 0


@pytest.mark.parametrize("sizes", [[300], [1, 299], [100, 100, 100], [0, 64, 236]])
@pytest.mark.parametrize("k", [1, 10, 250, 1000])
def test_merged_parts_equal_the_whole(sizes, k):
    queries, rows = random_bits(5, 40, 7, 0.1), random_bits(300, 40, 7, 0.1)
    packed, order = pack_bits(queries), naive_order(all_distances(queries, rows))
    pieces = [(block_of(rows[a:b]), int(a)) for a, b in itertools.pairwise(np.cumsum([0, *sizes]))]
    nearest = [from_row(first, *hamming_top_k(packed, block, k)) for block, first in pieces]
    within = [from_row(first, *hamming_radius(packed, block, 9)) for block, first in pieces]
    for step in (1, -1):
        check_top_k(merge_top_k(nearest[::step], k), order, k)
        check_radius(merge_radius(within[::step]), order, 9)


def test_limits_carried_from_part_to_part_give_the_whole():
    queries, rows = random_bits(5, 40, 8, 0.2), random_bits(640, 40, 8, 0.2)
    packed, block = pack_bits(queries), block_of(rows)
    best = hamming_top_k(packed, block.part(0, 128), 20)
    for start in range(128, 640, 128):
        more = hamming_top_k(packed, block.part(start, start + 128), 20, limits=best[0][:, -1])
        best = merge_top_k([best, from_row(start, *more)], 20)
    check_top_k(best, naive_order(all_distances(queries, rows)), 20)


def test_nothing_to_find():
    some, none = pack_bits(random_bits(3, 20, 0)), np.empty((0, 3), np.uint8)
    block, empty = lay_out(some, 20), lay_out(none, 20)
    assert hamming_top_k(some, empty, 5)[0].shape == (3, 0)
    assert hamming_top_k(none, block, 2)[1].shape == (0, 2)
    assert hamming_top_k(some, block, 0)[1].shape == (3, 0)
    assert hamming_top_k(some, block, 2, live=np.zeros(3, bool))[1].shape == (3, 0)
    assert hamming_radius(some, empty, 20)[0].tolist() == [0, 0, 0, 0]
    assert hamming_radius(none, block, 20)[0].tolist() == [0]
    assert hamming_radius(some, block, 20, live=np.zeros(3, bool))[0].tolist() == [0, 0, 0, 0]
    assert not hamming_histogram(some, empty).any()
    assert hamming_histogram(none, block).shape == (0, 21)
    assert merge_top_k([hamming_top_k(none, block, 2)] * 2, 3)[0].shape == (0, 3)
    assert merge_radius([hamming_radius(none, block, 2)] * 2)[0].tolist() == [0]


def test_foreign_codes_are_refused():
    codes = np.zeros((2, 2), np.uint8)
    block = lay_out(codes, 10)
    with pytest.raises(BadInputError, match=r"queries are uint8 of shape \(2, 1\); expected uint8 \(rows, 2\)"):
        hamming_top_k(codes[:, :1], block, 1)
    with pytest.raises(BadInputError, match="codes are int8"):
        lay_out(codes.astype(np.int8), 10)
    with pytest.raises(BadInputError, match="some codes have bits set beyond bit 10"):
        lay_out(codes + 4, 10)
    with pytest.raises(BadInputError, match="some queries have bits set beyond bit 10"):
        hamming_histogram(codes + 4, block)
    with pytest.raises(UsageError, match="k=-1"):
        hamming_top_k(codes, block, -1)
    with pytest.raises(UsageError, match="radius=-1"):
        hamming_radius(codes, block, -1)
    with pytest.raises(UsageError, match=r"live is bool \(3,\); expected bool \(2,\)"):
        hamming_top_k(codes, block, 1, live=np.zeros(3, bool))
    with pytest.raises(UsageError, match="live is int64"):
        hamming_radius(codes, block, 1, live=np.zeros(2, np.int64))
    with pytest.raises(UsageError, match="limits have shape"):
        hamming_top_k(codes, block, 1, limits=np.zeros(3, np.int32))
    one, two = np.zeros((2, 1), np.uint64), np.zeros((2, 2), np.uint64)
    with pytest.raises(UsageError, match=r"expected int64 \(1, k\)"):
        count_rows(one[:1], one, np.zeros((2, 3), np.int64), 0, 64)
    for wrong in (two, one.astype(np.int64)):
        with pytest.raises(BadInputError, match=r"expected uint64 \(rows, 1\) for 64 bits"):
            count_rows(one, wrong, np.zeros((2, 3), np.int64), 0, 64)
    for merge in (lambda: merge_top_k([], 3), lambda: merge_radius([])):
        with pytest.raises(UsageError, match="at least one"):
            merge()
    parts = [hamming_top_k(codes[:n], block, 1) for n in (1, 2)]
    with pytest.raises(UsageError, match="different numbers of queries"):
        merge_top_k(parts, 1)
