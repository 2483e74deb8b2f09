"""The tensor ordinal graph of the paper, built in full for a few landmarks, against what the solver uses instead.

Eq. 5-7, in short: S is a similarity that falls with the distance (a Gaussian of one width for all pairs), DS = 1 / S
its reciprocal, and the graph has S (x) DS as entries, one for each two pairs: S_ij DS_kl > 1 says that (i, j) are
nearer to each other than (k, l). That is L^4 numbers. The solver orders distances and never builds it.
"""

from __future__ import annotations

import numpy as np
import pytest

from och_dist.kernels.ordinal import FAR, NEAR, NEITHER, near_sets


def landmarks(seed, n=9, ties=False):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 4, size=(n, 3)).astype(float) if ties else rng.normal(size=(n, 3))


def squared_distances(points):
    return ((points[:, None] - points) ** 2).sum(axis=2)


def ordinal_graph(squares, width):
    """(L, L, L, L) bool: whether (i, j) is nearer than (k, l) by the entry of S (x) DS; no pair (i, i)."""
    n = len(squares)
    similarity = np.exp(-squares / (2 * width**2))
    product = np.kron(similarity, 1 / similarity)
    graph = product.reshape(n, n, n, n).transpose(0, 2, 1, 3) > 1  # kron has rows (i, k) and columns (j, l)
    proper = ~np.eye(n, dtype=bool)
    return graph & proper[:, :, None, None] & proper


CASES = [(seed, ties, width) for seed in range(3) for ties in (False, True) for width in (0.7, 1.0, 5.0)]


@pytest.mark.parametrize(("seed", "ties", "width"), CASES)
def test_quartic_relations_are_the_order_of_all_distances(seed, ties, width):
    squares = squared_distances(landmarks(seed, ties=ties))
    graph = ordinal_graph(squares, width)
    n = len(squares)
    for i, j, k, l in np.ndindex(n, n, n, n):  # noqa: E741
        assert graph[i, j, k, l] == (i != j and k != l and squares[i, j] < squares[k, l])
    assert graph.any()
    # A tie is no relation, in neither direction; a pair is no nearer than itself.
    assert not (graph & graph.transpose(2, 3, 0, 1)).any()


@pytest.mark.parametrize(("seed", "ties", "width"), CASES)
@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_triplets_give_the_near_and_far_sets_of_each_anchor(seed, ties, width, k):
    squares = squared_distances(landmarks(seed, ties=ties))
    graph = ordinal_graph(squares, width)
    n = len(squares)
    found = near_sets(squares, np.eye(n, dtype=bool), k)
    for i in range(n):
        nearer = graph[i, :, i, :]  # nearer[j, l]: j is nearer to i than l
        others = [j for j in range(n) if j != i]
        # By the graph alone: near are the first k, of equals those with the smaller number ...
        before = {j: int(nearer[:, j].sum()) for j in others}
        near = set(sorted(others, key=lambda j: (before[j], j))[:k])
        # ... and far is what every near landmark is strictly nearer than.
        far = {l for l in others if all(nearer[j, l] for j in near)}  # noqa: E741
        assert {j for j in range(n) if found[i, j] == NEAR} == near
        assert {j for j in range(n) if found[i, j] == FAR} == far
        assert found[i, i] == NEITHER
        # Each pair of a near and a far landmark is therefore a relation of the graph, and never its reverse.
        for j in near:
            for l in far:  # noqa: E741
                assert nearer[j, l]
                assert not nearer[l, j]


@pytest.mark.parametrize(("seed", "ties", "width"), CASES)
@pytest.mark.parametrize("k", [3, 10])
def test_quartic_relations_give_the_near_and_far_pairs(seed, ties, width, k):
    """The same of pairs: near_sets on the distances of all pairs i < j, taken as landmarks of one anchor."""
    squares = squared_distances(landmarks(seed, ties=ties))
    graph = ordinal_graph(squares, width)
    i, j = np.triu_indices(len(squares), 1)
    nearer = graph[i[:, None], j[:, None], i, j]
    first = np.argsort(nearer.sum(axis=0), kind="stable")[:k]
    far = nearer[first].all(axis=0)
    found = near_sets(squares[i, j][None], np.zeros((1, len(i)), dtype=bool), k)[0]
    np.testing.assert_array_equal(np.flatnonzero(found == NEAR), np.sort(first))
    np.testing.assert_array_equal(found == FAR, far)


def test_relations_do_not_depend_on_the_width():
    squares = squared_distances(landmarks(4))
    graphs = [ordinal_graph(squares, width) for width in (0.5, 1.0, 3.0)]
    assert all(np.array_equal(graph, graphs[0]) for graph in graphs)


def test_a_width_for_each_pair_would_change_the_order():
    """Why one width: with the local widths of the authors' release some relations point the other way."""
    squares = squared_distances(landmarks(5, n=12))
    spread = np.sort(np.sqrt(squares), axis=1)[:, 1:5].mean(axis=1)
    local = squares / (spread[:, None] * spread)
    one, other = ordinal_graph(squares, 1.0), ordinal_graph(local, 1.0)
    assert (one & other.transpose(2, 3, 0, 1)).any()


def test_cross_relations_are_nearly_all_relations_of_the_graph():
    """The solver compares near pairs of one anchor with far pairs of another by rank: it takes the few that the
    distances contradict into the bargain."""
    squares = squared_distances(landmarks(6, n=40))
    near, far = (near_sets(squares, np.eye(40, dtype=bool), 2) == kind for kind in (NEAR, FAR))
    agree = total = 0
    for shift in range(1, 40):
        for i in range(40):
            a, b = squares[i, near[i]], squares[(i + shift) % 40, far[(i + shift) % 40]]
            agree += int((a[:, None] < b).sum())
            total += a.size * b.size
    assert 0.9 < agree / total < 1.0
