"""The situations that a flat binary index has to get right, side by side with faiss.IndexBinaryFlat.

Distances must be equal. Rows are compared through a plain sort by (distance, row), which no version of FAISS promises.
"""

from __future__ import annotations

import numpy as np
import pytest

from och_dist.kernels.hamming import (
    hamming_radius,
    hamming_top_k,
    lay_out,
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


def test_merging_results_that_are_not_full():
    """Bounded parts have empty places at their end, which must lose against every row."""
    codes, queries = random_codes(640, 64, 25), random_codes(8, 64, 26)
    block = lay_out(codes, 64)
    whole = hamming_top_k(queries, block, 10)
    limits = whole[0][:, -1]
    parts = []
    for start in (0, 320):
        distances, rows = hamming_top_k(queries, block.part(start, start + 320), 10, limits=limits)
        parts.append((distances, np.where(rows < 0, -1, rows + start)))
    assert (parts[0][1] == -1).any()
    assert_equal(merge_top_k(parts, 10), whole)
