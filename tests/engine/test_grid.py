"""Every row is in exactly one block, one leaf (a range of blocks) and one node of each level of the tree."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalelatent.data import RowGrid
from scalelatent.engine.grid import FAN_IN

grids = st.builds(
    RowGrid,
    n_rows=st.integers(1, 5000),
    block_rows=st.integers(1, 50),
    leaf_blocks=st.integers(1, 6),
)


@given(grids)
def test_leaves_and_blocks_tile_the_rows(grid: RowGrid) -> None:
    ranges = [grid.node_rows(0, i) for i in range(grid.n_leaves)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == grid.n_rows
    for (_, stop), (start, _) in itertools.pairwise(ranges):
        assert stop == start
    for a, b in ranges:
        assert 0 < b - a <= grid.leaf_rows
        blocks = grid.blocks(a, b)
        assert [row for u, v in blocks for row in range(u, v)] == list(range(a, b))
        assert len(blocks) <= grid.leaf_blocks
    assert [b for a, b in ranges for b in grid.blocks(a, b)] == grid.blocks(0, grid.n_rows)


@given(grids)
def test_each_level_of_the_tree_tiles_the_leaves(grid: RowGrid) -> None:
    assert grid.n_nodes(0) == grid.n_leaves
    assert grid.n_nodes(grid.depth) == 1
    assert FAN_IN ** max(0, grid.depth - 1) < grid.n_leaves or grid.depth == 0
    for level in range(grid.depth + 1):
        nodes = [grid.node_leaves(level, i) for i in range(grid.n_nodes(level))]
        assert [leaf for node in nodes for leaf in node] == list(range(grid.n_leaves))
        assert all(len(node) <= FAN_IN**level for node in nodes)
        assert grid.node_rows(level, 0)[0] == 0
        assert grid.node_rows(level, len(nodes) - 1)[1] == grid.n_rows


def test_rows_and_levels_outside_the_grid_are_refused() -> None:
    grid = RowGrid(100, 8, 2)
    with pytest.raises(ValueError, match="at least 1"):
        RowGrid(0, 8, 2)
    with pytest.raises(ValueError, match="do not match the grid"):
        grid.blocks(8, 32)
    with pytest.raises(ValueError, match="do not match the grid"):
        grid.blocks(0, 33)
    with pytest.raises(IndexError, match="0 to 6"):
        grid.node_rows(0, 7)
    with pytest.raises(IndexError, match="levels are 0 to 1"):
        grid.n_nodes(2)
