"""The sum of a tree does not depend on the order in which results arrive, or on their division into tasks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.contract.stats import merge_vectors
from scalelatent.engine.grid import FAN_IN, PairTree, RowGrid, TreeReducer
from scalelatent.engine.passes import sum_leaves


def make_leaves(n: int, seed: int) -> list[np.ndarray]:
    rng = np.random.Generator(np.random.Philox(seed))
    return list(rng.normal(size=(n, 2)) * 10.0 ** rng.integers(-9, 9, (n, 2)))


def merge_in_order(vectors: list[np.ndarray], fan_in: int = FAN_IN) -> np.ndarray:
    """Return the sum as the tree is defined: eight vectors per node, from left to right, level by level."""
    while len(vectors) > 1:
        families = [vectors[i : i + fan_in] for i in range(0, len(vectors), fan_in)]
        vectors = []
        for family in families:
            total = family[0].copy()
            for vector in family[1:]:
                total = total + vector
            vectors.append(total)
    return vectors[0]


@given(st.integers(1, 600), st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_the_sum_is_the_same_for_any_order_of_arrival(n: int, seed: int, random: object) -> None:
    leaves = make_leaves(n, seed)
    reducer = TreeReducer(RowGrid(n, 1, 1))
    order = list(range(n))
    random.shuffle(order)  # type: ignore[attr-defined]
    for leaf in order:
        reducer.add(0, leaf, leaves[leaf])
    np.testing.assert_array_equal(reducer.root(), merge_in_order(leaves))


@given(st.integers(1, 600), st.integers(0, 10**6), st.integers(0, 4))
def test_the_sum_is_the_same_for_spans_of_any_level(n: int, seed: int, level: int) -> None:
    grid = RowGrid(n, 1, 1)
    level = min(level, grid.depth)
    leaves = make_leaves(n, seed)
    reducer = TreeReducer(grid)

    def add_leaf(leaf: int, vector: np.ndarray) -> None:
        assert not vector.any()
        vector += leaves[leaf]

    for index in reversed(range(grid.n_nodes(level))):
        reducer.add(level, index, sum_leaves(grid, level, index, 2, add_leaf))
    np.testing.assert_array_equal(reducer.root(), merge_in_order(leaves))


@given(st.integers(2, 200), st.integers(0, 10**6), st.data())
def test_the_sum_is_the_same_for_spans_of_mixed_levels(n: int, seed: int, data: st.DataObject) -> None:
    """Some spans (row ranges of tasks) have several leaves (fixed ranges of rows) and others have one.

    Spans differ in size if only some of the rows of a task are computed again.
    """
    grid = RowGrid(n, 1, 1)
    leaves, reducer = make_leaves(n, seed), TreeReducer(grid)
    for index in range(grid.n_nodes(1) if grid.depth else 0):
        if data.draw(st.booleans()):
            reducer.add(1, index, merge_in_order([leaves[leaf] for leaf in grid.node_leaves(1, index)]))
        else:
            for leaf in grid.node_leaves(1, index):
                reducer.add(0, leaf, leaves[leaf])
    np.testing.assert_array_equal(reducer.root(), merge_in_order(leaves))


@given(st.integers(1, 100), st.integers(0, 10**6), st.data())
def test_the_sum_of_chains_is_the_same_for_any_division(n: int, seed: int, data: st.DataObject) -> None:
    """Each worker merges its chains (parts of a minibatch); the total does not depend on this division.

    Records that follow the sums, up to three numbers per chain, are concatenated.
    """
    tree, leaves = PairTree(n), make_leaves(n, seed)
    counts = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    records = [float(leaf) + np.arange(count) / 8 for leaf, count in enumerate(counts)]
    whole = TreeReducer(tree, size=2)
    edges = [0, *sorted(data.draw(st.lists(st.integers(0, n), max_size=4))), n]
    for first, last in reversed(list(pairwise(edges))):
        part = TreeReducer(tree, size=2)
        for leaf in range(first, last):
            part.add(0, leaf, np.concatenate([leaves[leaf], records[leaf]]))
        nodes = part.nodes()
        starts = [index * 2**level for level, index in nodes]
        assert starts == sorted(starts)
        assert len(nodes) <= max(1, 2 * tree.depth)
        for node, vector in nodes.items():
            whole.add(*node, vector)
    np.testing.assert_array_equal(whole.root()[:2], merge_in_order(leaves, 2))
    np.testing.assert_array_equal(whole.root()[2:], np.concatenate(records))


@given(st.integers(1, 20), st.integers(0, 10**6))
def test_merging_does_not_change_the_children(n: int, seed: int) -> None:
    vectors = make_leaves(n, seed)
    before = [v.copy() for v in vectors]
    merge_vectors(vectors)
    for vector, kept in zip(vectors, before, strict=True):
        np.testing.assert_array_equal(vector, kept)


def test_order_matters_so_these_tests_can_fail() -> None:
    leaves = make_leaves(64, 1)
    assert not np.array_equal(merge_in_order(leaves), merge_in_order(leaves[::-1]))
    assert not np.array_equal(merge_in_order(leaves), np.sum(leaves, axis=0))


@pytest.mark.parametrize("missing", [0, 7, 8, 29])
def test_a_missing_node_is_an_error(missing: int) -> None:
    reducer = TreeReducer(RowGrid(30, 1, 1))
    for leaf in range(30):
        if leaf != missing:
            reducer.add(0, leaf, np.ones(1))
    with pytest.raises(RuntimeError, match="is incomplete"):
        reducer.root()
