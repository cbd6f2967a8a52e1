"""Split rows into blocks and leaves (groups of blocks), and sum the statistics of leaves in a fixed tree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from scalelatent.contract.stats import merge_vectors

FAN_IN = 8
"""Children of an inner node of the reduce tree."""


@dataclass(frozen=True)
class RowGrid:
    """Division of a dataset: rows form blocks, blocks form leaves, and a fixed 8-ary tree sums all leaves."""

    n_rows: int
    """Number of rows of the dataset."""
    block_rows: int
    """Rows of one block."""
    leaf_blocks: int
    """Blocks of one leaf."""
    fan_in: ClassVar[int] = FAN_IN

    def __post_init__(self) -> None:
        for name in ("n_rows", "block_rows", "leaf_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"RowGrid: {name} is {getattr(self, name)}, but it must be at least 1")

    @cached_property
    def leaf_rows(self) -> int:
        """Number of rows of a leaf (group of blocks); the last leaf may have fewer."""
        return self.block_rows * self.leaf_blocks

    @cached_property
    def n_leaves(self) -> int:
        return -(-self.n_rows // self.leaf_rows)

    @cached_property
    def depth(self) -> int:
        """Number of levels above the leaves (groups of blocks): the smallest `d` with `8**d >= n_leaves`."""
        depth = 0
        while FAN_IN**depth < self.n_leaves:
            depth += 1
        return depth

    def n_nodes(self, level: int) -> int:
        """Return the number of tree nodes at a level: 0 (leaves, groups of blocks) to `depth` (the root)."""
        if not 0 <= level <= self.depth:
            raise IndexError(f"RowGrid: levels are 0 to {self.depth}, not {level}")
        return -(-self.n_leaves // FAN_IN**level)

    def node_leaves(self, level: int, node: int) -> range:
        """Return the range of leaves whose statistics are summed in a node."""
        if not 0 <= node < self.n_nodes(level):
            raise IndexError(f"RowGrid: level {level} has nodes 0 to {self.n_nodes(level) - 1}, not {node}")
        width = FAN_IN**level
        return range(node * width, min((node + 1) * width, self.n_leaves))

    def node_rows(self, level: int, node: int) -> tuple[int, int]:
        """Return the range `(start, stop)` of rows whose statistics are summed in a node."""
        leaves = self.node_leaves(level, node)
        return leaves.start * self.leaf_rows, min(leaves.stop * self.leaf_rows, self.n_rows)

    def family(self, level: int, node: int) -> range:
        """Return the up to 8 nodes of a level, `node` among them, that are summed into the same parent."""
        first = node // FAN_IN * FAN_IN
        return range(first, min(first + FAN_IN, self.n_nodes(level)))

    def blocks(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the range (start, stop) of each block of the rows `start:stop`, in order."""
        if start % self.leaf_rows or not (stop == self.n_rows or stop % self.block_rows == 0):
            raise ValueError(
                f"RowGrid: rows {start}:{stop} do not match the grid (leaves of {self.leaf_rows} rows, "
                f"blocks of {self.block_rows}, {self.n_rows} rows in total)"
            )
        if not 0 <= start <= stop <= self.n_rows:
            raise IndexError(f"RowGrid: rows {start}:{stop} are outside 0:{self.n_rows}")
        return [(a, min(a + self.block_rows, stop)) for a in range(start, stop, self.block_rows)]


def space_ranges(n: int, count: int, places: int) -> list[tuple[int, int]]:
    """Return at most `places` evenly spaced ranges of rows with about `count` of all `n` rows in total."""
    if n <= count:
        return [(0, n)]
    each = max(1, count // places)
    starts = np.linspace(0, n - each, count // each).astype(int)
    return [(int(a), int(a) + each) for a in starts]


@dataclass(frozen=True)
class PairTree:
    """Binary tree that sums the chains (parts of a minibatch) of a step."""

    n_leaves: int
    fan_in: ClassVar[int] = 2

    @property
    def depth(self) -> int:
        return (self.n_leaves - 1).bit_length()

    def family(self, level: int, node: int) -> range:
        """Return a node and its sibling (the last node may have none), which are summed into one parent."""
        first = node // 2 * 2
        return range(first, min(first + 2, -(-self.n_leaves // 2**level)))


class TreeReducer:
    """Sum over a tree whose nodes are added in any order; siblings are summed once all of them are known."""

    def __init__(self, tree: RowGrid | PairTree, size: int | None = None) -> None:
        self.tree, self.size = tree, size
        self._nodes: dict[tuple[int, int], np.ndarray] = {}

    def add(self, level: int, index: int, vector: np.ndarray) -> None:
        self._nodes[level, index] = vector
        while level < self.tree.depth:
            family = self.tree.family(level, index)
            if not all((level, i) in self._nodes for i in family):
                return
            merged = merge_vectors([self._nodes.pop((level, i)) for i in family], self.size)
            level, index = level + 1, index // self.tree.fan_in
            self._nodes[level, index] = merged

    def nodes(self) -> dict[tuple[int, int], np.ndarray]:
        """Return the partial sums that still wait for a sibling, by (level, index), in the order of rows."""
        return dict(sorted(self._nodes.items(), key=lambda node: node[0][1] * self.tree.fan_in ** node[0][0]))

    def root(self) -> np.ndarray:
        """Return the sum of all vectors; raise a RuntimeError if a vector is missing."""
        if list(self._nodes) != [(self.tree.depth, 0)]:
            raise RuntimeError(
                f"the tree of depth {self.tree.depth} is incomplete: it has only {sorted(self._nodes)}"
            )
        return self._nodes[self.tree.depth, 0]
