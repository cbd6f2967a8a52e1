"""The fixed tree: leaves in order, so many to a node, whatever arrives first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from scalelatent.data.grid import RowGrid


def merge_vectors(vectors: Sequence[np.ndarray], size: int | None = None) -> np.ndarray:
    """Sum of the children of a node, in their order; the children are not changed.

    What follows the first ``size`` numbers of a vector, records of rows, is put one after another.

    Examples
    --------
    >>> merge_vectors([np.ones(2), np.ones(2)]).tolist()
    [2.0, 2.0]
    >>> merge_vectors([np.ones(2), np.ones(3)], size=1).tolist()
    [2.0, 1.0, 1.0, 1.0]
    """
    if len(vectors) == 1:
        return vectors[0]
    size = len(vectors[0]) if size is None else size
    total = np.empty(size + sum(len(vector) - size for vector in vectors))
    summed = total[:size]
    np.add(vectors[0][:size], vectors[1][:size], out=summed)
    for vector in vectors[2:]:
        summed += vector[:size]
    if len(total) > size:
        np.concatenate([vector[size:] for vector in vectors], out=total[size:])
    return total


class TreeReducer:
    """Collects nodes of one part's tree in any order and merges complete families at once.

    Parameters
    ----------
    grid : RowGrid
    size : int, optional
        Of what is summed, see :func:`merge_vectors`; None: all.

    Examples
    --------
    >>> reducer = TreeReducer(RowGrid(30, 1, 1))
    >>> for leaf in reversed(range(30)):
    ...     reducer.add(0, leaf, np.array([float(leaf)]))
    >>> reducer.root().tolist()
    [435.0]
    """

    def __init__(self, grid: RowGrid, size: int | None = None) -> None:
        self.grid, self.size = grid, size
        self._nodes: dict[tuple[int, int], np.ndarray] = {}

    def add(self, level: int, index: int, vector: np.ndarray) -> None:
        """Give the vector of a node."""
        self._nodes[level, index] = vector
        while level < self.grid.depth:
            family = [(level, i) for i in self.grid.family(level, index)]
            if not all(node in self._nodes for node in family):
                return
            merged = merge_vectors([self._nodes.pop(node) for node in family], self.size)
            level, index = level + 1, index // self.grid.fan_in
            self._nodes[level, index] = merged

    def nodes(self) -> dict[tuple[int, int], np.ndarray]:
        """What it holds: vectors by level and index, in the order of their leaves."""
        return dict(sorted(self._nodes.items(), key=lambda node: node[0][1] * self.grid.fan_in ** node[0][0]))

    def root(self) -> np.ndarray:
        """The whole sum; an error where a node is missing."""
        if list(self._nodes) != [(self.grid.depth, 0)]:
            raise RuntimeError(
                f"the tree is not complete: it holds {sorted(self._nodes)} of depth {self.grid.depth}"
            )
        return self._nodes[self.grid.depth, 0]


@lru_cache(64)
def nodes_over(grid: RowGrid, first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Level and index of the nodes that some leaves merge to, in the order of their leaves.

    Examples
    --------
    >>> nodes_over(RowGrid(8, 1, 1, fan_in=2), 3, 8)
    ((0, 3), (2, 1))
    """
    reducer, nothing = TreeReducer(grid), np.zeros(1)
    for leaf in range(first, last):
        reducer.add(0, leaf, nothing)
    return tuple(reducer.nodes())
