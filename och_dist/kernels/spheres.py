"""Codes by spheres, and the distance of such codes that counts the spheres two rows share.

Definition of a code. Bit k of a row x is 1 exactly when its squared distance to pivot k, as ``euclidean`` defines
it (float64, one fixed order), does not exceed the squared radius of that pivot. A float32 matrix product bounds
every distance from both sides, for any order of summation; only where the radius lies between the bounds is the
distance measured. The bytes therefore depend neither on the blocking nor on the BLAS nor on the processor.

The spherical distance of two codes is |a xor b| / (|a and b| + 0.1): spheres that hold one row of two, over
spheres that hold both. It takes few values, here numbered in ascending order as *levels*, so that a histogram
over levels serves all metrics as one over Hamming distances does.
"""

from __future__ import annotations

import numpy as np

from och_dist.errors import UsageError
from och_dist.kernels.compiled import njit
from och_dist.kernels.euclidean import euclidean_top_k, exact_distances
from och_dist.kernels.fixed_order import NORM_LIMIT, centred_rows, distance_error, squared_distance
from och_dist.kernels.moments import float_blocks, refuse_row
from och_dist.kernels.packing import check_words, pack_bits
from och_dist.kernels.simd import LANES, popcount

OVERFLOW = "overflow in the distances of row {}; expected squared distances within the range of float64"

MOST_LEVEL_BITS = 4096
"""Bounds the table of levels to 64 MB; two levels differ as float64 numbers well beyond it."""


def encode_spheres(
    block: np.ndarray, pivots: np.ndarray, squared_radii: np.ndarray, *, first_row: int = 0
) -> np.ndarray:
    """Codes of ``block`` (n, d) as (n, ceil(r / 8)) uint8, little bit order, pad bits zero.

    ``pivots`` (r, d) float32, ``squared_radii`` (r,) float64. ``first_row`` is the global number of the first row
    and is used in error messages only. Rows with NaN or infinity raise ``NonFiniteError``; finite rows at a
    squared distance beyond float64 raise ``BadInputError``.
    """
    r, d = pivots.shape
    # Near the pivots the cancellation in |x|^2 + |p|^2 - 2 x.p is least; the bounds hold for any centre.
    centre = pivots.mean(axis=0, dtype=np.float64).astype(np.float32)
    near_pivots, pivot_squared = centred_rows(pivots, centre)
    codes = np.empty((block.shape[0], -(-r // 8)), dtype=np.uint8)
    for place, rows in float_blocks(block, d):
        near, squared = centred_rows(rows, centre)
        with np.errstate(over="ignore", invalid="ignore"):
            products = near @ near_pivots.T
        lower, upper = np.empty(products.shape), np.empty(products.shape)
        _fill_bounds(products, squared, pivot_squared, distance_error(d), lower, upper)
        inside = upper <= squared_radii
        open_rows, open_pivots = np.nonzero(~inside & ~(lower > squared_radii))
        distances = exact_distances(rows, pivots, open_rows, open_pivots)
        if not np.isfinite(distances).all():
            refuse_row(block, first_row, place.start + int(open_rows[~np.isfinite(distances)].min()), OVERFLOW)
        inside[open_rows, open_pivots] = distances <= squared_radii[open_pivots]
        codes[place] = pack_bits(inside)
    return codes


def sphere_scores(block: np.ndarray, pivots: np.ndarray, squared_radii: np.ndarray) -> np.ndarray:
    """(n, r) float64: how far each row of ``block`` (n, d) lies inside each sphere, radius minus distance.

    ``pivots`` (r, d) float32, ``squared_radii`` (r,) float64. Distances are those of ``euclidean``, all measured:
    slower than codes by far, and meant for queries.
    """
    scores = np.empty((block.shape[0], pivots.shape[0]))
    for place, rows in float_blocks(block, pivots.shape[1]):
        _fill_squared_distances(rows, pivots, scores[place])
    return np.sqrt(squared_radii) - np.sqrt(scores)


def nth_distances(rows: np.ndarray, pivots: np.ndarray, n: int) -> np.ndarray:
    """Squared distance (r,) float64 of the ``n``-th nearest of ``rows`` (m, d), from 1, to each of ``pivots`` (r, d).

    Exact in the sense of ``euclidean``: as squared radii they let every sphere hold n rows, more only by ties.
    """
    if not 1 <= n <= len(rows):
        raise UsageError(f"n={n}; expected a rank from 1 to the number of rows, {len(rows)}")
    return euclidean_top_k(pivots, rows, n).distances.reshape(len(pivots), n).max(axis=1)


def spherical_levels(n_bits: int) -> np.ndarray:
    """(n_bits + 1, n_bits + 1) int32: the level of |a xor b| (first axis) and |a and b| (second axis).

    Levels count the distinct distances from 0 upwards; pairs that no two codes have are -1.
    """
    if not 1 <= n_bits <= MOST_LEVEL_BITS:
        raise UsageError(f"n_bits={n_bits}; expected 1 to {MOST_LEVEL_BITS}")
    xor, both = np.indices((n_bits + 1, n_bits + 1), dtype=np.int32)
    possible = xor + both <= n_bits
    # Ranked by xor / (10 both + 1), a tenth of the distance. Equal fractions round to one float64, since division
    # rounds correctly; different ones are 1 / (10 n_bits + 1)^2 apart at least, far more than the spacing of floats.
    _, level = np.unique(xor[possible] / (10 * both[possible] + 1), return_inverse=True)
    levels = np.full(possible.shape, -1, dtype=np.int32)
    levels[possible] = level
    return levels


def spherical_histogram(query_words: np.ndarray, code_words: np.ndarray, n_bits: int, levels: np.ndarray) -> np.ndarray:
    """(q, levels.max() + 1) int64: how many of ``code_words`` (n, w) lie at each level from ``query_words`` (q, w).

    ``levels`` is ``spherical_levels(n_bits)``. There are about n_bits^2 / 2 levels: pass few queries at a time.
    """
    _check_levels(query_words, code_words, n_bits, levels)
    counts = np.zeros((query_words.shape[0], int(levels.max()) + 1), dtype=np.int64)
    _count_levels(np.ascontiguousarray(query_words), np.ascontiguousarray(code_words), levels, counts)
    return counts


def spherical_pairs(
    query_words: np.ndarray,
    code_words: np.ndarray,
    pair_query: np.ndarray,
    pair_row: np.ndarray,
    n_bits: int,
    levels: np.ndarray,
) -> np.ndarray:
    """Levels (p,) int32 of ``query_words[pair_query[i]]`` and ``code_words[pair_row[i]]``."""
    _check_levels(query_words, code_words, n_bits, levels)
    if pair_query.shape != pair_row.shape or pair_query.ndim != 1:
        raise UsageError(f"pairs of shapes {pair_query.shape} and {pair_row.shape}; expected two equal (p,)")
    for numbers, words in ((pair_query, query_words), (pair_row, code_words)):
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < len(words)):
            raise UsageError(f"pair numbers {numbers.min()} to {numbers.max()}; expected 0 to {len(words) - 1}")
    found = np.empty(pair_query.shape, dtype=np.int32)
    _pair_levels(query_words[pair_query], code_words[pair_row], levels, found)
    return found


def _check_levels(query_words: np.ndarray, code_words: np.ndarray, n_bits: int, levels: np.ndarray) -> None:
    if levels.shape != (n_bits + 1, n_bits + 1) or levels.dtype != np.int32:
        raise UsageError(
            f"levels are {levels.dtype} {levels.shape}; expected those of {n_bits} bits: use spherical_levels"
        )
    check_words(query_words, n_bits)
    check_words(code_words, n_bits)


@njit(nogil=True)
def _fill_bounds(products, row_squared, pivot_squared, error, lower, upper):  # type: ignore[no-untyped-def]
    a, b, c = error
    for i in range(products.shape[0]):
        row_norm = np.sqrt(row_squared[i])
        for k in range(products.shape[1]):
            pivot_norm = np.sqrt(pivot_squared[k])
            reach = row_norm + pivot_norm
            if not reach <= NORM_LIMIT:  # also NaN
                lower[i, k] = -np.inf
                upper[i, k] = np.inf
                continue
            middle = row_squared[i] + pivot_squared[k] - 2.0 * np.float64(products[i, k])
            margin = a * row_norm * pivot_norm + b * reach * reach + c
            lower[i, k] = middle - margin
            upper[i, k] = middle + margin


@njit(nogil=True)
def _fill_squared_distances(rows, pivots, out):  # type: ignore[no-untyped-def]
    partial = np.empty(LANES, dtype=np.float64)
    for i in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[i, k] = squared_distance(rows, i, pivots, k, partial)


@njit(nogil=True)
def _level(queries, q, codes, i, levels):  # type: ignore[no-untyped-def]
    xor, both = np.uint64(0), np.uint64(0)
    for j in range(queries.shape[1]):
        xor += popcount(queries[q, j] ^ codes[i, j])
        both += popcount(queries[q, j] & codes[i, j])
    return levels[xor, both]


@njit(nogil=True)
def _count_levels(queries, codes, levels, counts):  # type: ignore[no-untyped-def]
    for q in range(queries.shape[0]):
        for i in range(codes.shape[0]):
            counts[q, _level(queries, q, codes, i, levels)] += 1


@njit(nogil=True)
def _pair_levels(queries, codes, levels, found):  # type: ignore[no-untyped-def]
    for p in range(found.shape[0]):
        found[p] = _level(queries, p, codes, p, levels)
