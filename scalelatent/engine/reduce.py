"""The fixed tree: leaves in order, so many to a node, whatever arrives first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from scalelatent.contract.stats import merge_vectors


class Tree(Protocol):
    """Which nodes are merged: level 0 has the leaves, level ``depth`` the root."""

    fan_in: ClassVar[int]

    @property
    def depth(self) -> int:
        """Levels above the leaves."""
        ...

    def family(self, level: int, node: int) -> range:
        """Nodes of a level that share a parent with ``node``."""
        ...


@dataclass(frozen=True)
class PairTree:
    """Leaves merged by twos: some of them on one thread or worker come to few nodes.

    Examples
    --------
    >>> PairTree(6).depth, PairTree(6).family(1, 2)
    (3, range(2, 3))
    """

    n_leaves: int
    fan_in: ClassVar[int] = 2

    @property
    def depth(self) -> int:
        """Levels above the leaves."""
        return (self.n_leaves - 1).bit_length()

    def family(self, level: int, node: int) -> range:
        """A node and its sibling; the last one of a level may have none."""
        first = node // 2 * 2
        return range(first, min(first + 2, -(-self.n_leaves // 2**level)))


class TreeReducer:
    """Collects nodes of one part's tree in any order and merges complete families at once.

    Parameters
    ----------
    tree : RowGrid or PairTree
    size : int, optional
        Of what is summed, see :func:`~scalelatent.contract.stats.merge_vectors`; None: all.

    Examples
    --------
    >>> from scalelatent.engine.grid import RowGrid
    >>> reducer = TreeReducer(RowGrid(30, 1, 1))
    >>> for leaf in reversed(range(30)):
    ...     reducer.add(0, leaf, np.array([float(leaf)]))
    >>> reducer.root().tolist()
    [435.0]
    """

    def __init__(self, tree: Tree, size: int | None = None) -> None:
        self.tree, self.size = tree, size
        self._nodes: dict[tuple[int, int], np.ndarray] = {}

    def add(self, level: int, index: int, vector: np.ndarray) -> None:
        """Give the vector of a node."""
        self._nodes[level, index] = vector
        while level < self.tree.depth:
            family = self.tree.family(level, index)
            if not all((level, i) in self._nodes for i in family):
                return
            merged = merge_vectors([self._nodes.pop((level, i)) for i in family], self.size)
            level, index = level + 1, index // self.tree.fan_in
            self._nodes[level, index] = merged

    def nodes(self) -> dict[tuple[int, int], np.ndarray]:
        """What it holds: vectors by level and index, in the order of their leaves."""
        return dict(sorted(self._nodes.items(), key=lambda node: node[0][1] * self.tree.fan_in ** node[0][0]))

    def root(self) -> np.ndarray:
        """The whole sum; an error where a node is missing."""
        if list(self._nodes) != [(self.tree.depth, 0)]:
            raise RuntimeError(
                f"the tree is not complete: it holds {sorted(self._nodes)} of depth {self.tree.depth}"
            )
        return self._nodes[self.tree.depth, 0]
