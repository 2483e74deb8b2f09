"""Ranking measures against every order of tied rows, written out."""

from __future__ import annotations

import json
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError, UsageError
from och_dist.kernels.ranking import (
    average_precision,
    bit_balance,
    bit_entropy,
    evaluate_histograms,
    found_at,
    mean_average_precision,
    pooled_area,
    precision_at,
    recall_grid,
)


def orders(items):
    """Every ranking of (distance, relevant) items: sorted by distance, tied items in each possible order."""
    groups = [[flag for value, flag in items if value == d] for d in sorted({value for value, _ in items})]
    for arranged in product(*(list(permutations(group)) for group in groups)):
        yield [flag for group in arranged for flag in group]


def enumerated(items, measure):
    return float(np.mean([measure(order) for order in orders(items)]))


def ap_of(order):
    hits = [rank for rank, flag in enumerate(order, 1) if flag]
    return sum(found / rank for found, rank in enumerate(hits, 1)) / len(hits)


def histograms(queries, width):
    n, g = (np.zeros((len(queries), width), dtype=np.int64) for _ in range(2))
    for q, items in enumerate(queries):
        for distance, flag in items:
            n[q, distance] += 1
            g[q, distance] += flag
    return n, g


queries_of_items = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=6).filter(
        lambda items: any(flag for _, flag in items)
    ),
    min_size=1,
    max_size=3,
)


@settings(deadline=None, max_examples=30)
@given(queries=queries_of_items)
def test_expectations_equal_the_mean_over_all_orders(queries):
    n, g = histograms(queries, 4)
    expected = [enumerated(items, ap_of) for items in queries]
    np.testing.assert_allclose(average_precision(n, g), expected, rtol=1e-12)
    assert mean_average_precision(n, g) == pytest.approx(np.mean(expected))
    for k in (1, 2, 5, 9):
        found = [enumerated(items, lambda order, k=k: sum(order[:k])) for items in queries]
        np.testing.assert_allclose(precision_at(n, g, k), np.array(found) / k, rtol=1e-12)
        np.testing.assert_allclose(found_at(n, g, [k])[:, 0], found, rtol=1e-12)


def test_seven_tied_items():
    items = [(0, i in (1, 4, 5)) for i in range(7)]
    n, g = histograms([items], 1)
    assert average_precision(n, g)[0] == pytest.approx(enumerated(items, ap_of), rel=1e-13)


@pytest.mark.parametrize(("n", "relevant"), [(1, 1), (10, 1), (1000, 20), (1_000_000, 20_000)])
def test_identical_codes_have_the_closed_form(n, relevant):
    harmonic = (1.0 / np.arange(1, n + 1)).sum()
    others = (relevant - 1) / (n - 1) if n > 1 else 0.0
    expected = harmonic / n + others * (1 - harmonic / n)
    rows, hits = np.array([[0, 0, n]]), np.array([[0, 0, relevant]])
    assert average_precision(rows, hits)[0] == pytest.approx(expected, rel=1e-12)
    assert precision_at(rows, hits, 1)[0] == pytest.approx(relevant / n)
    assert average_precision(rows, hits, ties="group")[0] == pytest.approx(relevant / n)


def test_small_groups_far_down_keep_their_digits():
    before, size, hits = 50_000_000, 3, 2
    got = average_precision(np.array([[before, size]]), np.array([[0, hits]]))[0]
    orders_of_three = [(1, 2), (1, 3), (2, 3)]
    expected = np.mean([(1 / (before + a) + 2 / (before + b)) / 2 for a, b in orders_of_three])
    assert got == pytest.approx(expected, rel=1e-9, abs=0)


def test_without_ties_every_variant_is_plain_average_precision():
    order = [1, 0, 0, 1, 1, 0, 1]
    n, g = np.ones((1, 7), int), np.array([order])
    assert average_precision(n, g)[0] == pytest.approx(ap_of(order))
    assert average_precision(n, g, ties="group")[0] == pytest.approx(ap_of(order))


def test_group_ties_count_at_the_end_of_the_group():
    n, g = np.array([[2, 0, 4]]), np.array([[1, 0, 2]])
    expected = (1 * (1 / 2) + 2 * (3 / 6)) / 3
    assert average_precision(n, g, ties="group")[0] == pytest.approx(expected)


def test_pooled_area_by_hand():
    # Pooled: rows 0 2 2 0 6, relevant 0 1 1 0 2; radii 0..3 and, with the last, 4.
    n = np.array([[0, 2, 1, 0, 2, 0], [0, 0, 1, 0, 4, 0]])
    g = np.array([[0, 1, 0, 0, 1, 0], [0, 0, 1, 0, 1, 0]])
    # Radius 0 has nothing within it: its precision is that of radius 1.
    points = [(0.0, 0.5), (0.25, 0.5), (0.5, 0.5)]
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))
    assert pooled_area(n, g) == pytest.approx(area)
    assert pooled_area(n, g, include_last=True) == pytest.approx(area + 0.5 * (0.5 + 0.4) / 2)


def test_pooled_area_starts_at_recall_zero_with_the_first_precision():
    n, g = np.array([[2, 3, 5]]), np.array([[2, 1, 1]])
    curve = [(0, 1), (2 / 4, 1), (3 / 4, 3 / 5), (1, 4 / 10)]
    pieces = [(b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(curve)]
    assert pooled_area(n, g) == pytest.approx(sum(pieces[:2]))
    assert pooled_area(n, g, include_last=True) == pytest.approx(sum(pieces))


def test_pooled_area_of_one_tie_group():
    n, g = np.array([[0, 8]]), np.array([[0, 2]])
    assert pooled_area(n, g) == 0.0
    assert pooled_area(n[:, 1:], g[:, 1:]) == 0.0
    assert pooled_area(n[:, 1:], g[:, 1:], include_last=True) == pytest.approx(0.25)


def test_pooled_area_takes_the_first_of_equal_recalls():
    n, g = np.array([[1, 3, 1, 1]]), np.array([[1, 0, 1, 0]])
    assert pooled_area(n, g) == pytest.approx(0.5 * 1 + 0.5 * (1 + 2 / 5) / 2)


def test_recall_grid():
    assert recall_grid(1) == [1]
    assert recall_grid(10) == [1, 2, 5, 10]
    assert recall_grid(999) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 999]


def test_report_is_plain_and_complete():
    rng = np.random.default_rng(0)
    g = rng.integers(0, 4, (5, 9))
    g[:, 0] += 1
    n = g + rng.integers(0, 9, g.shape)
    report = json.loads(json.dumps(evaluate_histograms(n, g, ks=[1, 10])))
    assert report["queries"] == 5
    assert report["map"] == pytest.approx(average_precision(n, g).mean())
    assert report["map_group"] == pytest.approx(average_precision(n, g, ties="group").mean())
    assert report["pr_area"] == pytest.approx(pooled_area(n, g))
    assert report["pr_area_full"] == pytest.approx(pooled_area(n, g, include_last=True))
    assert report["precision_at_100"] == pytest.approx(precision_at(n, g, 100).mean())
    assert report["ks"] == [1, 10]
    assert report["precision"] == pytest.approx([precision_at(n, g, k).mean() for k in (1, 10)])
    assert report["recall"] == pytest.approx(
        (found_at(n, g, [1, 10]) / g.sum(axis=1, keepdims=True)).mean(axis=0).tolist()
    )
    rows = int(n.sum(axis=1).max())
    full = evaluate_histograms(n, g)
    assert full["ks"][-1] == full["rows"] == rows
    assert full["recall"][-1] == pytest.approx(1.0)


def test_bits():
    assert bit_balance(np.array([0, 5, 10]), 10).tolist() == [0.0, 0.5, 1.0]
    assert bit_entropy(np.array([0, 5, 10]), 10).tolist() == [0.0, 1.0, 0.0]
    with pytest.raises(BadInputError, match="n=3 rows"):
        bit_balance(np.array([4]), 3)


@pytest.mark.parametrize(
    ("n", "g", "message"),
    [
        ([[1, 2], [3, 4]], [[1, 0], [0, 0]], "1 queries, the first is 1, have no relevant rows"),
        ([[1, 2]], [[2, 0]], "0 <= g <= n"),
        ([[1, 2]], [[1, -1]], "0 <= g <= n"),
        ([[1, 2]], [[1, 0, 0]], "expected two equal"),
        (np.zeros((0, 2)), np.zeros((0, 2)), "expected two equal"),
    ],
)
def test_impossible_histograms_are_refused(n, g, message):
    for measure in (average_precision, pooled_area, evaluate_histograms):
        with pytest.raises(BadInputError, match=message):
            measure(np.array(n), np.array(g))


def test_impossible_options_are_refused():
    n, g = np.array([[2]]), np.array([[1]])
    with pytest.raises(UsageError, match="ties='file'"):
        average_precision(n, g, ties="file")
    with pytest.raises(UsageError, match="k=0"):
        precision_at(n, g, 0)


def test_all_rows_hold_all_relevant_ones_exactly():
    for n, g in ((25, 7), (22, 15), (49, 1)):
        assert found_at(np.array([[n]]), np.array([[g]]), [n]).tolist() == [[g]]
