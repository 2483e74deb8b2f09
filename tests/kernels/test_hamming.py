"""Hamming kernels against full distance matrices and against faiss."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, UsageError
from och_dist.kernels import hamming
from och_dist.kernels.hamming import hamming_histogram, hamming_pairs, hamming_top_k, merge_top_k
from och_dist.kernels.packing import code_words, pack_bits


def random_bits(n, r, seed, flips=0.5):
    """Rows that share a pattern when ``flips`` is small: many ties, many duplicates."""
    rng = np.random.default_rng(seed)
    return (rng.random(r) < 0.5) ^ (rng.random((n, r)) < flips)


def words(bits):
    return code_words(pack_bits(bits))


def all_distances(queries, rows):
    return (queries[:, None, :] != rows[None, :, :]).sum(axis=2)


def naive_top_k(distances, k, keep=None):
    """(distance, row) order through a plain sort of every query."""
    rows = np.arange(distances.shape[1]) if keep is None else np.flatnonzero(keep)
    picked = [sorted(zip(line[rows], rows, strict=True))[:k] for line in distances]
    width = min(k, rows.size)
    pairs = np.array(picked, dtype=np.int64).reshape(len(distances), width, 2)
    return pairs[:, :, 0], pairs[:, :, 1]


def check_top_k(queries, rows, k, **options):
    keep = ~options["skip"] if "skip" in options else None
    expected = naive_top_k(all_distances(queries, rows), k, keep)
    distances, found = hamming_top_k(words(queries), words(rows), k, n_bits=rows.shape[1], **options)
    assert distances.dtype == np.int32
    assert found.dtype == np.int64
    assert np.array_equal(distances, expected[0])
    assert np.array_equal(found, expected[1] + options.get("first_row", 0))


@settings(deadline=None, max_examples=40)
@given(
    r=st.integers(1, 200),
    n=st.sampled_from([1, 2, 63, 64, 65, 127, 128, 129, 200, 700]),
    q=st.integers(1, 4),
    k=st.integers(1, 800),
    flips=st.sampled_from([0.0, 0.02, 0.5]),
    seed=st.integers(0, 1000),
)
def test_top_k_histogram_and_pairs(r, n, q, k, flips, seed):
    queries, rows = random_bits(q, r, seed, flips), random_bits(n, r, seed, flips)
    check_top_k(queries, rows, k)
    distances = all_distances(queries, rows)
    histogram = hamming_histogram(words(queries), words(rows), r)
    assert histogram.dtype == np.int64
    assert np.array_equal(histogram, [np.bincount(line, minlength=r + 1) for line in distances])
    pair_query, pair_row = np.indices(distances.shape).reshape(2, -1)
    pairs = hamming_pairs(words(queries), words(rows), pair_query, pair_row)
    assert np.array_equal(pairs, distances.ravel())


@pytest.mark.parametrize("r", [64, 100, 192, 256, 300])
def test_more_than_one_block_and_tile(r):
    per_block = hamming.BLOCK_WORDS // -(-r // 64)
    rows = random_bits(per_block + 70, r, 1, flips=0.1)
    queries = random_bits(hamming.QUERY_TILE + 1, r, 1, flips=0.1)
    distances = np.stack([np.count_nonzero(query != rows, axis=1) for query in queries])
    for k in (1, 100):
        order = np.argsort(distances, axis=1, kind="stable")[:, :k]
        got = hamming_top_k(words(queries), words(rows), k, n_bits=r)
        assert np.array_equal(got[1], order)
        assert np.array_equal(got[0], np.take_along_axis(distances, order, axis=1))
    histogram = hamming_histogram(words(queries), words(rows), r)
    assert np.array_equal(histogram, [np.bincount(line, minlength=r + 1) for line in distances])


def test_descending_distances_overflow_the_candidate_buffer():
    """Every row beats all before it: the buffer is compacted again and again."""
    r, n = 128, 3000
    rows = np.zeros((n, r), bool)
    for i in range(n):
        rows[i, : r - i * r // n] = True
    queries = np.zeros((1, r), bool)
    for k in (1, 5, 40):
        check_top_k(queries, rows, k)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95, 1.0])
def test_skipped_rows_are_not_considered(share):
    queries, rows = random_bits(3, 70, 4, 0.1), random_bits(500, 70, 4, 0.1)
    skip = np.random.default_rng(0).random(500) < share
    check_top_k(queries, rows, 60, skip=skip, first_row=1000)


def test_same_as_faiss():
    faiss = pytest.importorskip("faiss")
    rows, queries = pack_bits(random_bits(5000, 64, 2)), pack_bits(random_bits(20, 64, 3))
    index = faiss.IndexBinaryFlat(64)
    index.add(rows)
    expected, _ = index.search(queries, 50)
    distances, _ = hamming_top_k(code_words(queries), code_words(rows), 50, n_bits=64)
    assert np.array_equal(distances, expected)


@pytest.mark.parametrize("sizes", [[300], [1, 299], [100, 100, 100], [0, 64, 236]])
@pytest.mark.parametrize("k", [1, 10, 250, 1000])
def test_merged_parts_equal_the_whole(sizes, k):
    queries, rows = random_bits(5, 40, 7, 0.1), random_bits(300, 40, 7, 0.1)
    cuts = np.cumsum([0, *sizes])
    parts = [
        hamming_top_k(words(queries), words(rows[a:b]), k, n_bits=40, first_row=int(a))
        for a, b in itertools.pairwise(cuts)
    ]
    expected = naive_top_k(all_distances(queries, rows), k)
    for order in (parts, parts[::-1]):
        distances, found = merge_top_k(order, k)
        assert np.array_equal(distances, expected[0])
        assert np.array_equal(found, expected[1])
        assert distances.dtype == np.int32


def test_nothing_to_find():
    some = words(random_bits(3, 20, 0))
    none = np.empty((0, 1), np.uint64)
    assert hamming_top_k(some, none, 5, n_bits=20)[0].shape == (3, 0)
    assert hamming_top_k(none, some, 2, n_bits=20)[1].shape == (0, 2)
    assert hamming_top_k(some, some, 0, n_bits=20)[1].shape == (3, 0)
    assert not hamming_histogram(some, none, 20).any()
    assert merge_top_k([hamming_top_k(none, some, 2, n_bits=20)] * 2, 3)[0].shape == (0, 3)


def test_foreign_codes_are_refused():
    one, two = np.zeros((2, 1), np.uint64), np.zeros((2, 2), np.uint64)
    with pytest.raises(BadInputError, match="expected 1 for 64 bits"):
        hamming_top_k(one, two, 1, n_bits=64)
    with pytest.raises(BadInputError, match="expected uint64"):
        hamming_histogram(one, one.astype(np.int64), 64)
    with pytest.raises(BadInputError, match="some distances exceed 10"):
        hamming_histogram(one, one + np.uint64(2**11 - 1), 10)
    with pytest.raises(UsageError, match="k=-1"):
        hamming_top_k(one, one, -1, n_bits=64)
    with pytest.raises(UsageError, match="skip has shape"):
        hamming_top_k(one, one, 1, n_bits=64, skip=np.zeros(3, bool))
    with pytest.raises(UsageError, match="expected 0 to 1"):
        hamming_pairs(one, one, np.array([0]), np.array([2]))
    with pytest.raises(UsageError, match="at least one"):
        merge_top_k([], 3)
