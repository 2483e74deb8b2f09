"""Quality of a ranking by Hamming distance, from two histograms per query.

``n[q, d]`` counts the rows at distance d from query q and ``g[q, d]`` the relevant ones among them, both
(q, D) integers. Rows at one distance are tied; unless said otherwise a measure is its expectation over
all orders of tied rows, so that no result depends on the order of the file. N_d and G_d below are the
rows and the relevant rows at smaller distances than d, K_0 the relevant rows of a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from scipy.special import digamma

from och_dist.errors import BadInputError, UsageError

Ties = Literal["expected", "group"]


def average_precision(n: np.ndarray, g: np.ndarray, *, ties: Ties = "expected") -> np.ndarray:
    """Average precision (q,) float64 of each query.

    ``ties="expected"``: the expectation over a uniformly random order of tied rows, in closed form.
    ``ties="group"``: each relevant row counts with the precision at the end of its tie group.
    """
    n, g = _checked(n, g)
    before, found = _before(n), _before(g)
    size = np.maximum(n, 1.0)
    if ties == "group":
        terms = g * (found + g) / np.maximum(before + n, 1.0)
    elif ties == "expected":
        # The t-th row of a tie group is relevant with probability g/n; its precision is then, in expectation,
        # (G + 1 + (t - 1)(g - 1)/(n - 1)) / (N + t); the sum over t is a difference of harmonic numbers.
        harmonic = _harmonic_difference(before, n)
        others = np.where(n > 1, (g - 1) / np.maximum(n - 1, 1.0), 0.0)
        terms = g / size * ((found + 1) * harmonic + others * (n - (before + 1) * harmonic))
    else:
        raise UsageError(f"ties={ties!r}; expected 'expected' or 'group'")
    return terms.sum(axis=1) / g.sum(axis=1)


def mean_average_precision(n: np.ndarray, g: np.ndarray, *, ties: Ties = "expected") -> float:
    """Mean over the queries of ``average_precision``."""
    return float(average_precision(n, g, ties=ties).mean())


def pooled_area(n: np.ndarray, g: np.ndarray, *, include_last: bool = False) -> float:
    """Area under precision over recall, both pooled over all pairs of query and row, for radii 0, 1, ...

    As in the authors' release the largest distance that occurs is left out, so that recall may end below
    1; ``include_last`` adds it. Undefined precision (nothing within the radius) is taken from the next
    radius, the curve starts at recall 0 with its first precision, of equal recalls the first point
    counts, trapezoids between.
    """
    n, g = _checked(n, g)
    rows, relevant = n.sum(axis=0), g.sum(axis=0)
    last = int(np.flatnonzero(rows)[-1])
    radii = last + 1 if include_last else last
    if radii == 0:
        return 0.0
    found, seen = np.cumsum(relevant)[:radii], np.cumsum(rows)[:radii]
    defined = seen > 0
    if not defined.any():
        return 0.0
    recall = found / relevant.sum()
    precision = found / np.maximum(seen, 1.0)
    precision[~defined] = precision[np.argmax(defined)]  # distances below the first that occurs
    if recall[0] != 0:
        recall, precision = np.append(0.0, recall), np.append(precision[0], precision)
    recall, first = np.unique(recall, return_index=True)
    return float(np.trapezoid(precision[first], recall))


def precision_at(n: np.ndarray, g: np.ndarray, k: int) -> np.ndarray:
    """Expected share (q,) of relevant rows among the first ``k``; missing rows (k > rows) count as misses."""
    n, g = _checked(n, g)
    return found_at(n, g, [k])[:, 0] / k


def found_at(n: np.ndarray, g: np.ndarray, ks: Sequence[int]) -> np.ndarray:
    """Expected number (q, len(ks)) of relevant rows among the first k; a tie group cut by k gives its share."""
    if any(k < 1 for k in ks):
        raise UsageError(f"k={min(ks)}; expected a rank of at least 1")
    before, size = _before(n), np.maximum(n, 1.0)
    found = [(g * np.clip(k - before, 0.0, n) / size).sum(axis=1) for k in ks]
    return np.stack(found, axis=1) if found else np.empty((len(n), 0))


def recall_grid(n_rows: int) -> list[int]:
    """Ranks 1, 2, 5, 10, 20, ... up to and including ``n_rows``."""
    steps = [m * 10**e for e in range(len(str(max(n_rows, 1)))) for m in (1, 2, 5)]
    return [k for k in steps if k < n_rows] + [n_rows]


def bit_balance(ones: np.ndarray, n: int) -> np.ndarray:
    """Share (r,) of rows in which each bit is set, from the counts ``ones`` (r,) over ``n`` rows; ideal
    is 0.5."""
    ones = np.asarray(ones)
    if n < 1 or ones.min(initial=0) < 0 or ones.max(initial=0) > n:
        raise BadInputError(f"counts up to {ones.max(initial=0)} of n={n} rows; expected 0 to n with n >= 1")
    return ones / n


def bit_entropy(ones: np.ndarray, n: int) -> np.ndarray:
    """Entropy (r,) in bits of each code bit by itself: 1 for a balanced bit, 0 for a constant one."""
    share = bit_balance(ones, n)
    both = np.stack([share, 1.0 - share])
    return -(both * np.log2(np.where(both > 0, both, 1.0))).sum(axis=0) + 0.0


def evaluate_histograms(n: np.ndarray, g: np.ndarray, *, ks: Sequence[int] | None = None) -> dict[str, Any]:
    """All measures as plain numbers and lists, means over the queries; ``ks`` defaults to ``recall_grid``."""
    n, g = _checked(n, g)
    rows, relevant = int(n.sum(axis=1).max()), g.sum(axis=1)
    grid = [int(k) for k in ks] if ks is not None else recall_grid(rows)
    found = found_at(n, g, grid)
    return {
        "queries": len(n),
        "rows": rows,
        "relevant_per_query": float(relevant.mean()),
        "map": mean_average_precision(n, g),
        "map_group": mean_average_precision(n, g, ties="group"),
        "pr_area": pooled_area(n, g),
        "pr_area_full": pooled_area(n, g, include_last=True),
        "precision_at_100": float(precision_at(n, g, 100).mean()),
        "ks": grid,
        "precision": [float((found[:, place] / k).mean()) for place, k in enumerate(grid)],
        "recall": (found / relevant[:, None]).mean(axis=0).tolist(),
    }


def _checked(n: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both histograms as float64, after a check of shapes and counts."""
    n, g = np.asarray(n), np.asarray(g)
    if n.ndim != 2 or n.shape != g.shape or n.shape[0] == 0:
        raise BadInputError(f"histograms of shapes {n.shape} and {g.shape}; expected two equal (queries, distances)")
    if (g < 0).any() or (g > n).any():
        raise BadInputError("more relevant rows than rows at some distance; expected 0 <= g <= n: check the truth")
    empty = np.flatnonzero(g.sum(axis=1) == 0)
    if empty.size:
        raise BadInputError(
            f"{empty.size} queries, the first is {empty[0]}, have no relevant rows; "
            "expected at least one each: raise the number of true neighbours or drop these queries"
        )
    return n.astype(np.float64), g.astype(np.float64)


def _before(counts: np.ndarray) -> np.ndarray:
    """Sum over the smaller distances, (q, D)."""
    return np.cumsum(counts, axis=1) - counts


def _harmonic_difference(start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """H(start + count) - H(start) for harmonic numbers H, to full precision.

    The difference of two digammas loses digits when start is much larger than count; from 64 on the
    difference of their asymptotic series does not.
    """
    a = start + 1.0
    b = a + count
    large = np.maximum(a, 64.0)
    far = large + count
    series = np.log1p(count / large) + count / (2.0 * large * far)
    for power, factor in ((2, 1 / 12), (4, -1 / 120), (6, 1 / 252)):
        series += factor * (large**-power - far**-power)
    return np.where(a >= 64.0, series, digamma(b) - digamma(a))
