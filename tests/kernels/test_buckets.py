"""Multi-index hashing against the dumbest search: all distances, sorted by (distance, row)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, IntegrityError, UsageError
from och_dist.kernels.buckets import (
    MAX_SUBSTRING_BITS,
    BucketTables,
    Costs,
    cut_bits,
    join_tables,
    make_tables,
    read_substring,
    sort_table,
    substring_count,
    table_bytes,
)
from och_dist.kernels.buckets_numba import LOOKUPS
from och_dist.kernels.hamming import hamming_radius, hamming_top_k, lay_out
from och_dist.kernels.packing import code_words, pack_bits, unpack_bits

CLEVER = {"deadline": None, "max_examples": 60}


def brute_force(
    queries: np.ndarray, codes: np.ndarray, k: int, n_bits: int, live: np.ndarray, limits: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """(distances, rows) of the first k live codes within the limit, padded with (n_bits + 1, -1)."""
    width = min(k, int(live.sum()))
    distances = np.full((len(queries), width), n_bits + 1, np.int32)
    rows = np.full((len(queries), width), -1, np.int64)
    code_bits = unpack_bits(codes, n_bits)
    for q, query in enumerate(unpack_bits(queries, n_bits)):
        own = (code_bits != query).sum(axis=1)
        keep = live if limits is None else live & (own <= limits[q])
        order = sorted((int(own[row]), int(row)) for row in np.flatnonzero(keep))[:width]
        for place, (distance, row) in enumerate(order):
            distances[q, place], rows[q, place] = distance, row
    return distances, rows


def skewed_codes(rng: np.random.Generator, rows: int, n_bits: int) -> np.ndarray:
    """Codes about a few centres, so that there are near neighbours, duplicates and full and empty buckets."""
    centres = rng.random((3, n_bits)) < 0.5
    flips = rng.random((rows, n_bits)) < rng.choice([0.0, 0.02, 0.2, 0.5], rows)[:, None]
    return pack_bits(centres[rng.integers(0, 3, rows)] ^ flips)


@st.composite
def searches(draw: st.DrawFn) -> dict[str, Any]:
    n_bits = draw(st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 128, 130, 256, 511, 512])))
    n = draw(st.one_of(st.integers(0, 5), st.sampled_from([63, 64, 65, 127, 128, 129, 300])))
    least = -(-n_bits // 10)  # tables of up to 1,025 offsets
    count = draw(st.integers(least, min(n_bits, least + 12)))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    codes, queries = skewed_codes(rng, n, n_bits), skewed_codes(rng, draw(st.integers(0, 4)), n_bits)
    if n and draw(st.booleans()):
        queries[:1] = codes[-1:]
    limits = rng.integers(-1, n_bits + 2, len(queries)).astype(np.int32) if draw(st.booleans()) else None
    live = rng.random(n) < draw(st.sampled_from([0.0, 0.1, 0.9])) if draw(st.booleans()) else None
    k = draw(st.sampled_from([0, 1, 2, 10, 299, 1000]))
    return {
        "n_bits": n_bits,
        "codes": codes,
        "queries": queries,
        "count": count,
        "limits": limits,
        "live": live,
        "k": k,
    }


def tables_of(search: dict[str, Any]) -> BucketTables:
    return make_tables(lay_out(search["codes"], search["n_bits"]), search["count"])


@settings(**CLEVER)
@given(searches(), st.sampled_from([None, 0.5, 0.0, 100.0]))
def test_the_nearest_rows_are_those_of_brute_force(search: dict[str, Any], allowance: float | None) -> None:
    """However much of the work is left to a flat scan."""
    alive = np.ones(len(search["codes"]), bool) if search["live"] is None else search["live"]
    expected = brute_force(search["queries"], search["codes"], search["k"], search["n_bits"], alive, search["limits"])
    given_ = {"live": search["live"], "limits": search["limits"], "allowance": allowance}
    distances, rows = tables_of(search).top_k(search["queries"], search["k"], **given_)
    np.testing.assert_array_equal(distances, expected[0])
    np.testing.assert_array_equal(rows, expected[1])
    assert (distances.dtype, rows.dtype) == (np.int32, np.int64)


@settings(**CLEVER)
@given(searches(), st.sampled_from([None, 0.5, 0.0]), st.integers(0, 600))
def test_the_rows_within_a_radius_are_those_of_brute_force(
    search: dict[str, Any], allowance: float | None, radius: int
) -> None:
    radius %= search["n_bits"] + 3
    alive = np.ones(len(search["codes"]), bool) if search["live"] is None else search["live"]
    limits = np.full(len(search["queries"]), radius)
    distances, rows = brute_force(search["queries"], search["codes"], 10**6, search["n_bits"], alive, limits)
    found = tables_of(search).radius(search["queries"], radius, live=search["live"], allowance=allowance)
    np.testing.assert_array_equal(found[0], np.concatenate([[0], np.cumsum((rows >= 0).sum(axis=1))]))
    np.testing.assert_array_equal(found[1], distances[rows >= 0])
    np.testing.assert_array_equal(found[2], rows[rows >= 0])
    assert [part.dtype for part in found] == [np.int64, np.int32, np.int64]


@settings(**CLEVER)
@given(searches())
def test_results_equal_those_of_the_flat_scan(search: dict[str, Any]) -> None:
    block = lay_out(search["codes"], search["n_bits"])
    tables = make_tables(block, search["count"])
    options = {"live": search["live"], "limits": search["limits"]}
    flat = hamming_top_k(search["queries"], block, search["k"], **options)
    found = tables.top_k(search["queries"], search["k"], allowance=None, **options)
    for one, other in zip(flat, found, strict=True):
        np.testing.assert_array_equal(one, other)
    radius = search["n_bits"] // 3
    flat_within = hamming_radius(search["queries"], block, radius, live=search["live"])
    found_within = tables.radius(search["queries"], radius, live=search["live"], allowance=None)
    for one, other in zip(flat_within, found_within, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("n_bits", "count"), [(32, 2), (40, 2), (64, 4), (128, 9)])
@pytest.mark.parametrize("k", [1, 10, 500])
def test_many_rows_and_look_ups(n_bits: int, count: int, k: int) -> None:
    """More look-ups than are made at a time, buckets of several groups, more matches than there is room for."""
    rng = np.random.default_rng(n_bits + k)
    codes, queries = (skewed_codes(rng, rows, n_bits) for rows in (20_000, 8))
    block = lay_out(codes, n_bits)
    tables = make_tables(block, count)
    expected = hamming_top_k(queries, block, k)
    found = tables.top_k(queries, k, allowance=None)
    work = tables.search(queries, k, np.full(8, n_bits), allowance=None)[3]
    assert n_bits == 32 or work[:, 0].max() > LOOKUPS
    assert work[:, 1].max() > 64
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("distance", [0, 3])
def test_all_codes_equal(distance: int) -> None:
    """One bucket holds everything; the first rows win."""
    codes = np.zeros((5000, 8), np.uint8)
    queries = pack_bits(np.arange(64)[None] < distance)
    tables = make_tables(lay_out(codes, 64), 4)
    for k in (1, 100, 5000, 9000):
        distances, rows = tables.top_k(queries, k, allowance=None)
        assert (distances == distance).all()
        assert rows[0].tolist() == list(range(min(k, 5000)))
    assert tables.radius(queries, distance, allowance=None)[2].tolist() == list(range(5000))
    assert tables.radius(queries, distance - 1 if distance else 0, allowance=None)[0][-1] == (0 if distance else 5000)


def test_near_neighbours_are_found_with_little_work() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (50_000, 8), np.uint8)
    tables = make_tables(lay_out(codes, 64), 6)
    queries = codes[[5, 700]].copy()
    queries[:, 0] ^= 3
    keys, indptr, finished, work = tables.search(queries, 1, np.full(2, 64), allowance=None)
    assert finished.all()
    assert keys.tolist() == [(2 << 32) + 5, (2 << 32) + 700]
    assert indptr.tolist() == [0, 1, 2]
    assert (work[:, 0] <= 3).all()  # the first look-up meets the neighbour or not; no radius above 2 is needed


def test_a_limit_prunes() -> None:
    rng = np.random.default_rng(0)
    tables = make_tables(lay_out(rng.integers(0, 256, (20_000, 8), np.uint8), 64), 5)
    queries = rng.integers(0, 256, (3, 8), np.uint8)
    far, near = (tables.search(queries, 10, np.full(3, limit), allowance=None)[3][:, 0] for limit in (64, 4))
    assert (near == 5).all()
    assert (far > 50).all()


def test_a_query_that_costs_too_much_is_given_up() -> None:
    rng = np.random.default_rng(0)
    tables = make_tables(lay_out(rng.integers(0, 256, (20_000, 8), np.uint8), 64), 4)
    queries = rng.integers(0, 256, (5, 8), np.uint8)
    keys, indptr, finished, work = tables.search(queries, 100, np.full(5, 64), allowance=0.5)
    assert not finished.any()
    assert keys.size == 0
    assert indptr.tolist() == [0] * 6
    costs = Costs()
    spent = work @ [costs.lookup, costs.of_group(64), costs.match]
    assert (spent <= 0.5 * costs.of_scan(64, 20_000) + 256 * costs.match).all()


@given(st.integers(1, 512), st.integers(0, 10**9))
def test_substrings_cover_all_bits(n_bits: int, n: int) -> None:
    count = substring_count(n_bits, n)
    starts, widths = cut_bits(n_bits, count)
    assert starts[0] == 0
    assert (starts[1:] == starts[:-1] + widths[:-1]).all()
    assert starts[-1] + widths[-1] == n_bits
    assert widths.max() - widths.min() <= 1
    assert 1 <= widths.min() <= widths.max() <= MAX_SUBSTRING_BITS


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 200), st.integers(0, 400), st.integers(0, 100))
def test_tables_are_sorted_by_value_and_row(n_bits: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits = rng.random((n, n_bits)) < 0.3
    start = int(rng.integers(0, n_bits))
    width = int(rng.integers(1, min(12, n_bits - start) + 1))
    values = read_substring(code_words(pack_bits(bits)), start, width)
    assert values.tolist() == [sum(1 << j for j in range(width) if row[start + j]) for row in bits]
    rows, offsets = sort_table(values, width)
    assert rows.tolist() == [row for _, row in sorted((int(value), row) for row, value in enumerate(values))]
    assert offsets.tolist() == [int((values < value).sum()) for value in range((1 << width) + 1)]


def test_the_memory_of_tables_is_known_before() -> None:
    for n_bits, n, count in ((64, 1000, 6), (20, 129, 2), (130, 64, 11)):
        tables = make_tables(lay_out(np.zeros((n, -(-n_bits // 8)), np.uint8), n_bits), count)
        assert 0 <= tables.nbytes - table_bytes(n_bits, n, count) < 8192  # the descriptions of the substrings


@pytest.mark.parametrize("count", [0, 2, 65])
def test_impossible_substrings_are_refused(count: int) -> None:
    with pytest.raises(UsageError, match="use 3 to 64, so that each has 1 to 24 bits"):
        cut_bits(64, count)


def test_tables_that_would_lead_astray_are_refused() -> None:
    block = lay_out(np.arange(100, dtype=np.uint8)[:, None], 8)
    rows, offsets = sort_table(np.arange(100, dtype=np.uint32), 8)
    join_tables(block, [rows], [offsets])
    for bad_rows, bad_offsets in (
        (rows + 1, offsets),
        (rows[:-1], offsets),
        (rows, offsets[::-1].copy()),
        (rows, offsets[:-1]),
        (rows, np.where(np.arange(257) == 50, 90, offsets).astype(np.uint32)),
    ):
        with pytest.raises(IntegrityError, match="build the tables again"):
            join_tables(block, [bad_rows], [bad_offsets])


def test_impossible_calls_are_refused() -> None:
    tables = make_tables(lay_out(np.zeros((10, 2), np.uint8), 12), 2)
    queries = np.zeros((3, 2), np.uint8)
    with pytest.raises(UsageError, match="k=-1"):
        tables.top_k(queries, -1)
    with pytest.raises(UsageError, match="radius=-1"):
        tables.radius(queries, -1)
    with pytest.raises(UsageError, match="expected one for each of 3 queries"):
        tables.top_k(queries, 1, limits=np.zeros(2, np.int32))
    with pytest.raises(UsageError, match=r"live is bool \(9,\); expected bool \(10,\)"):
        tables.top_k(queries, 1, live=np.ones(9, bool))
    for k in (0, 1):
        with pytest.raises(BadInputError, match=r"expected uint8 \(rows, 2\) for 12 bits"):
            tables.top_k(queries[:, :1], k)
        with pytest.raises(BadInputError, match="beyond bit 12"):
            tables.top_k(queries | 0xF0, k)
