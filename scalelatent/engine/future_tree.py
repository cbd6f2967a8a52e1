"""The fixed tree of a pass on a cluster: futures of nodes become merge tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scalelatent.data.grid import FAN_IN

from .dask_tasks import task_merge
from .passes import Stage

if TYPE_CHECKING:
    from .on_dask import DaskExecutor


class FutureTree:
    """Futures of one part's nodes; a complete family below the top becomes a merge task."""

    def __init__(self, executor: DaskExecutor, stage: Stage, iteration: int, part: str) -> None:
        self._executor, self._stage, self._iteration, self._part = executor, stage, iteration, part
        self._grid = stage.grids[part]
        self._nodes: dict[tuple[int, int], Any] = {}

    def add(self, level: int, index: int, future: Any) -> None:
        """Take the future of a node."""
        self._nodes[level, index] = future
        while level < self._grid.depth - 1:
            family, parent = [(level, i) for i in self._grid.family(level, index)], index // FAN_IN
            if not all(node in self._nodes for node in family):
                return
            futures = [self._nodes.pop(node) for node in family]
            key = self._executor.key(
                self._stage, "merge", self._iteration, f"{self._part[0]}{level + 1}-{parent:04d}"
            )
            merged = (
                futures[0]
                if len(futures) == 1
                else self._executor.client.submit(task_merge, futures, key=key, priority=5, pure=False)
            )
            level, index = level + 1, parent
            self._nodes[level, index] = merged

    def tops(self) -> list[Any]:
        """The last family, in order: the M-step merges it."""
        return [self._nodes[node] for node in sorted(self._nodes)]
