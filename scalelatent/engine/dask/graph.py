"""Tasks that go to the scheduler in one message, each with its own worker and priority.

The cost of short passes needs it (table `on_dask` of the benchmarks): `Client.submit` sends a message a task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Union

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

__all__ = ["Graph", "Node", "Reads", "TaskRef"]

try:
    from dask.task_spec import List, Task, TaskRef
except ImportError:  # where it was not yet public
    from dask._task_spec import List, Task, TaskRef

if TYPE_CHECKING:
    from distributed import Client, Future

# The result of a task, of a graph that is made by its key, of an earlier one by its future.
Node = Union[str, "Future"]
# What a task reads: the fit and its part, first row and one past the last of the shards.
Reads = tuple[str, int, int]


class Graph:
    """Tasks by key; what one needs of another is named by :meth:`ref`."""

    # Client.submit sends a message a task, and the scheduler spends more on taking each apart than on the
    # task itself: a pass of ten tasks as one graph costs it a third of the time.

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.workers: dict[str, list[str]] = {}
        self.priorities: dict[str, int] = {}
        self.reads: dict[str, Reads] = {}
        self._held: list[Future] = []

    def hold(self, future: Node) -> TaskRef:
        """The ref of a future (or of a key), kept until the scheduler has the graph."""
        # The scheduler unpacks a graph aside: what is let go of just after it was sent overtakes it. So the
        # graph is to be kept until one of its tasks is done.
        if not isinstance(future, str):
            self._held.append(future)
        return self.ref(future)

    @staticmethod
    def ref(key: Node) -> TaskRef:
        """Stands for the result of a task, of this graph or of a future, among the arguments of another."""
        return TaskRef(key if isinstance(key, str) else key.key)

    def add(
        self,
        key: str,
        function: Callable[..., object],
        *args: object,
        worker: str | None = None,
        priority: int = 0,
        reads: Reads | None = None,
    ) -> None:
        """Add a task; results of others among its arguments are refs, alone or in a list."""
        self.tasks[key] = Task(key, function, *(_parsed(arg) for arg in args))
        if worker is not None:
            self.workers[key] = [worker]
        if priority:
            self.priorities[key] = priority
        if reads is not None:
            self.reads[key] = reads

    def send(self, client: Client, wanted: Iterable[str], only: Sequence[str] = ()) -> dict[str, Future]:
        """Send all tasks."""
        keys = list(wanted)
        # Functions of the key, since a layer has one value for all its tasks, or a function.
        workers = {**{key: list(only) for key in self.tasks}, **self.workers} if only else self.workers
        notes: dict[str, Any] = {"workers": workers.get, "priority": self.priorities.get}
        if not only:
            notes["allow_other_workers"] = True
        if self.reads:
            notes["scalelatent"] = self.reads.get
        layer = MaterializedLayer(self.tasks, annotations=notes)
        name = next(iter(self.tasks))
        graph = HighLevelGraph({name: layer}, {name: set()})
        return dict(zip(keys, client.get(graph, keys, sync=False, fifo_timeout="100ms"), strict=True))


def _parsed(value: object) -> object:
    if isinstance(value, list) and any(isinstance(item, (TaskRef, list)) for item in value):
        return List(*(_parsed(item) for item in value))
    return value
