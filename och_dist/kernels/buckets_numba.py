"""Compiled loops of multi-index hashing; ``kernels.buckets`` explains the method and holds what to call.

Beside its rows each table holds the codes themselves, in the order of the table and in the layout that
``kernels.simd`` compares: a bucket is then a few groups of 64 codes, side by side in memory. Buckets lie at
random places, so they are asked for a little ahead.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from och_dist.kernels.compiled import njit
from och_dist.kernels.simd import GROUP, close_codes, lowest_bit, popcount, prefetch, some_close

ROW_BITS = 32
"""A neighbour is one integer, distance << ROW_BITS | row of the partition."""

LOOKUPS = 256
"""Buckets that are looked up before the first of them is read."""

PLACES = 2 * GROUP
"""Close codes that are noted before they are looked at one by one; the k-th distance so far may fall in between."""

AHEAD = 4
"""Buckets asked for ahead of the one that is being compared."""

LINE = 64
"""Bytes of a cache line."""

FILLED, LEVEL, WITHIN, BAR = range(4)
"""Places in the state of a query: keys held; distance beyond which nothing is wanted; how many were found within it;
key from which on nothing is wanted."""

LOOKUP, PER_GROUP, MATCH, BUDGET = range(4)
"""Places in the costs of a search: of a look-up, of a group of codes, of a code that is close enough to be looked at
by itself; and what one query may spend in all. The first three are those of its work, too."""


class TableArrays(NamedTuple):
    """m tables of n rows: codes ``groups`` (m, ceil(n / 64), w, 64) and ``rows`` (m, n) uint32 in the order of each
    table, ``offsets`` (m, ...) uint32 of the buckets, first bits ``starts`` and ``widths`` (m,) int64 of the
    substrings, their bits as ``masks`` (m, w), and ``choose`` (m, weights) int64, how many values lie at each distance
    from a substring."""

    groups: np.ndarray
    rows: np.ndarray
    offsets: np.ndarray
    starts: np.ndarray
    widths: np.ndarray
    masks: np.ndarray
    choose: np.ndarray


class Scratch(NamedTuple):
    """Working space of a search, shared by its queries."""

    counts: np.ndarray
    state: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    places: np.ndarray
    at: np.ndarray
    difference: np.ndarray


@njit(nogil=True)
def substring_values(words, start, width, values):  # type: ignore[no-untyped-def]
    """Fill ``values`` (n,) with bits [start, start + width) of each code of ``words`` (n, w); width < 32."""
    size = 8 * words.itemsize
    word, offset = start // size, np.uint64(start % size)
    crosses = start % size + width > size
    rest = np.uint64(size) - offset
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    for i in range(words.shape[0]):
        value = np.uint64(words[i, word]) >> offset
        if crosses:
            value |= np.uint64(words[i, word + 1]) << rest
        values[i] = value & mask


@njit(nogil=True)
def sort_rows(values, offsets, rows):  # type: ignore[no-untyped-def]
    """Fill ``rows`` (n,) uint32 with the row numbers sorted by (value, row), ``offsets`` with the borders of buckets.

    The rows of value v are rows[offsets[v]:offsets[v + 1]]. Where there are more offsets than values, the rest is n.
    """
    offsets[:] = 0
    for i in range(values.shape[0]):
        offsets[values[i] + 1] += 1
    for v in range(1, offsets.shape[0]):
        offsets[v] += offsets[v - 1]
    place = offsets[:-1].copy()
    for i in range(values.shape[0]):
        rows[place[values[i]]] = i
        place[values[i]] += 1


@njit(nogil=True)
def fill_table(groups, rows, table):  # type: ignore[no-untyped-def]
    """Lay the codes of ``groups`` (g, w, 64) out in ``table`` (g, w, 64) in the order ``rows`` (n,), zero-padded."""
    n = rows.shape[0]
    for x in range(n):
        row = np.int64(rows[x])
        for j in range(groups.shape[1]):
            table[x // GROUP, j, x % GROUP] = groups[row // GROUP, j, row % GROUP]
    for x in range(n, GROUP * table.shape[0]):
        for j in range(groups.shape[1]):
            table[x // GROUP, j, x % GROUP] = 0


@njit(nogil=True)
def _next_mask(mask):  # type: ignore[no-untyped-def]
    """The next larger integer with as many set bits, for mask > 0 (Gosper)."""
    lowest = mask & -mask
    carried = mask + lowest
    return ((carried ^ mask) >> (2 + np.int64(popcount(np.uint64(lowest - 1))))) | carried


@njit(nogil=True)
def _drop_far(keys, state):  # type: ignore[no-untyped-def]
    """Keep only the keys that are not beyond the level by now."""
    kept = 0
    for i in range(state[FILLED]):
        if keys[i] >> ROW_BITS <= state[LEVEL]:
            keys[kept] = keys[i]
            kept += 1
    state[FILLED] = kept


@njit(nogil=True)
def _make_room(keys, state, wanted):  # type: ignore[no-untyped-def]
    """Returns ``keys`` with room for PLACES more: far ones go; of equal ones, those of high rows; or it grows."""
    room = max(PLACES, keys.shape[0] // 4)
    _drop_far(keys, state)
    if keys.shape[0] - state[FILLED] >= room:
        return keys
    if keys.shape[0] >= 2 * (wanted + PLACES):
        keys[: state[FILLED]].sort()
        state[FILLED] = wanted
        state[BAR] = keys[wanted - 1]
        return keys
    larger = np.empty(2 * keys.shape[0], dtype=np.int64)
    larger[: keys.shape[0]] = keys
    return larger


@njit(nogil=True)
def _look_up(offsets, value, mask, weight, size, begins, ends):  # type: ignore[no-untyped-def]
    """Fill ``begins`` and ``ends`` for the next ``size`` values about ``value``; returns (groups, next mask)."""
    total = np.int64(0)
    for i in range(size):
        begin = np.int64(offsets[value ^ mask])
        end = np.int64(offsets[(value ^ mask) + 1])
        begins[i] = begin
        ends[i] = end
        total += (end + GROUP - 1) // GROUP - begin // GROUP if begin < end else 0
        if weight:
            mask = _next_mask(mask)
    return total, mask


@njit(nogil=True)
def _compare(queries, q, codes, flat, begins, ends, size, limit, places, at):  # type: ignore[no-untyped-def]
    """Write the places of codes at a distance below ``limit`` in the buckets from at[0] up to ``size``.

    ``flat`` are the ``codes`` (g, w, 64) in one dimension. Stops early when ``places`` has no room for one more
    group; ``at`` (2,) holds the bucket and the group to go on with. Returns how many were written. Nothing but
    numbers changes hands in the loop: it is where the time goes.
    """
    size_of_group = GROUP * queries.shape[1]
    words_of_line = LINE // flat.itemsize
    filled = 0
    g = at[1]
    for i in range(at[0], size):
        begin = begins[i]
        end = ends[i]
        if i + AHEAD < size and begins[i + AHEAD] < ends[i + AHEAD]:
            first = begins[i + AHEAD] // GROUP * size_of_group
            for line in range(0, size_of_group, words_of_line):
                prefetch(flat, np.int64(first + line))
        g = max(g, begin // GROUP)
        while g * GROUP < end and begin < end:
            if filled + GROUP > places.shape[0]:
                at[0] = i
                at[1] = g
                return filled
            close = np.uint64(0)
            if some_close(codes, np.int64(g), queries, np.int64(q), np.int64(limit)):
                close = close_codes(codes, np.int64(g), queries, np.int64(q), np.int64(limit))
            while close:
                place = g * GROUP + lowest_bit(close)
                close &= close - np.uint64(1)
                if begin <= place < end:
                    places[filled] = place
                    filled += 1
            g += 1
        g = np.int64(0)
    at[0] = size
    return filled


@njit(nogil=True)
def _take(queries, q, codes, rows, a, weight, masks, found, live, wanted, keys, scratch):  # type: ignore[no-untyped-def]
    """Add the codes at the first ``found`` places of table a to ``keys``, unless they were met before or are too far.

    A key is never offered twice. ``keys`` has room for all of them.
    """
    counts, state, _, _, places, _, difference = scratch
    for c in range(found):
        g, i = places[c] // GROUP, places[c] % GROUP
        distance = np.int64(0)
        for j in range(queries.shape[1]):
            difference[j] = queries[q, j] ^ codes[g, j, i]
            distance += np.int64(popcount(np.uint64(difference[j])))
        if distance > state[LEVEL]:
            continue
        first_met = True
        for b in range(masks.shape[0]):
            own = np.int64(0)
            for j in range(queries.shape[1]):
                own += np.int64(popcount(np.uint64(difference[j] & masks[b, j])))
            first_met &= own > weight or (own == weight and b >= a)
        if not first_met:
            continue
        row = np.int64(rows[places[c]])
        key = (distance << ROW_BITS) | row
        if key >= state[BAR] or (live.shape[0] and not live[row]):
            continue
        keys[state[FILLED]] = key
        state[FILLED] += 1
        counts[distance] += 1
        state[WITHIN] += 1
        while state[WITHIN] - counts[state[LEVEL]] >= wanted:
            state[WITHIN] -= counts[state[LEVEL]]
            state[LEVEL] -= 1


@njit(nogil=True)
def _visit(queries, values, q, tables, a, weight, spent, live, wanted, costs, keys, scratch, work):  # type: ignore[no-untyped-def]
    """Look at the buckets of table a at substring distance ``weight``; returns ``keys`` and what was spent so far."""
    _, state, begins, ends, places, at, _ = scratch
    # Taken out of the tuple once: each access counts references, which costs more than the work in the loops.
    codes, rows, offsets = tables.groups[a], tables.rows[a], tables.offsets[a]
    masks, flat = tables.masks, codes.reshape(-1)
    value = np.int64(values[q, a])
    mask = (np.int64(1) << weight) - 1
    left = tables.choose[a, weight]
    spent += left * costs[LOOKUP]
    while left > 0 and spent <= costs[BUDGET]:
        size = min(left, LOOKUPS)
        left -= size
        groups, mask = _look_up(offsets, value, mask, weight, size, begins, ends)
        work[LOOKUP] += size
        spent += groups * costs[PER_GROUP]
        if spent > costs[BUDGET]:
            break
        work[PER_GROUP] += groups
        at[:] = 0
        while at[0] < size and spent <= costs[BUDGET]:
            found = _compare(queries, q, codes, flat, begins, ends, size, state[LEVEL] + 1, places, at)
            work[MATCH] += found
            spent += found * costs[MATCH]
            while keys.shape[0] - state[FILLED] < found:
                keys = _make_room(keys, state, wanted)
            if found:
                _take(queries, q, codes, rows, a, weight, masks, found, live, wanted, keys, scratch)
    return keys, spent


@njit(nogil=True)
def search_tables(queries, tables, wanted, limits, live, costs):  # type: ignore[no-untyped-def]
    """The first ``wanted`` keys of each of ``queries`` (q, w) within its limit, unless that costs too much.

    ``limits`` (q,) int64 are distances from -1 to n_bits, ``live`` (n,) bool or empty, ``costs`` (4,) float64.
    Returns keys (sorted for each query), indptr (q + 1,), finished (q,) bool and work (q, 3): look-ups, groups and
    matches. A query that is not finished has no keys.
    """
    n_queries, w = queries.shape
    m = tables.starts.shape[0]
    n_bits = tables.starts[m - 1] + tables.widths[m - 1]
    counts, state = np.empty(n_bits + 1, dtype=np.int64), np.empty(4, dtype=np.int64)
    begins, ends = np.empty(LOOKUPS, dtype=np.int64), np.empty(LOOKUPS, dtype=np.int64)
    places, at = np.empty(PLACES, dtype=np.int64), np.empty(2, dtype=np.int64)
    scratch = Scratch(counts, state, begins, ends, places, at, np.empty(w, dtype=queries.dtype))
    keys = np.empty(min(2 * (wanted + PLACES), 4096), dtype=np.int64)
    out = np.empty(n_queries * min(wanted, 64) + 1, dtype=np.int64)
    indptr = np.zeros(n_queries + 1, dtype=np.int64)
    finished = np.zeros(n_queries, dtype=np.bool_)
    work = np.zeros((n_queries, 3), dtype=np.int64)
    values = np.empty((n_queries, m), dtype=np.uint32)
    for a in range(m):
        substring_values(queries, tables.starts[a], tables.widths[a], values[:, a])
    for q in range(n_queries):
        counts[:] = 0
        state[:] = 0
        state[LEVEL] = limits[q]
        state[BAR] = np.int64(1) << 62
        spent = 0.0
        step = 0
        # After step s m + a every code within that distance was met: the sum of its substring distances is larger
        # where each of the first a + 1 exceeds s and each of the others is at least s.
        while step <= state[LEVEL] and spent <= costs[BUDGET]:
            keys, spent = _visit(
                queries, values, q, tables, step % m, step // m, spent, live, wanted, costs, keys, scratch, work[q]
            )
            step += 1
        finished[q] = spent <= costs[BUDGET]
        indptr[q + 1] = indptr[q]
        if finished[q]:
            _drop_far(keys, state)
            keys[: state[FILLED]].sort()
            indptr[q + 1] += min(state[FILLED], wanted)
            if indptr[q + 1] > out.shape[0]:
                larger = np.empty(2 * indptr[q + 1], dtype=np.int64)
                larger[: indptr[q]] = out[: indptr[q]]
                out = larger
            out[indptr[q] : indptr[q + 1]] = keys[: indptr[q + 1] - indptr[q]]
    return out[: indptr[n_queries]], indptr, finished, work
