"""Send many tasks to the scheduler in one message, each with its own worker and priority.

`Client.submit` sends one message per task, which is too slow for short passes (benchmark table `on_dask`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

__all__ = ["Graph", "Reads", "TaskRef"]

try:
    from dask.task_spec import List, Task, TaskRef
except ImportError:  # Earlier versions of Dask have a private module with these names.
    from dask._task_spec import List, Task, TaskRef

if TYPE_CHECKING:
    from distributed import Client, Future

# Rows of the whole shards that a task reads: (name of the dataset in the fit, first row, row after the last).
Reads = tuple[str, int, int]


class Graph:
    """Tasks by Dask key, which are sent to the scheduler in one message.

    The scheduler needs three times as long for ten messages with one task each as for one with ten tasks.
    """

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self.workers: dict[str, list[str]] = {}
        self.priorities: dict[str, int] = {}
        self.reads: dict[str, Reads] = {}
        self._held: list[Future] = []

    def hold(self, future: Future) -> TaskRef:
        """Return a reference to a future's result, and keep the future alive as long as this graph exists."""
        # The scheduler unpacks a graph asynchronously. If a future were released right after the graph was
        # sent, the scheduler could forget the result before it sees the tasks that need the result. Callers
        # therefore keep the graph until one of its tasks is done.
        self._held.append(future)
        return TaskRef(future.key)

    @staticmethod
    def ref(key: str) -> TaskRef:
        """Return a reference to the result of the task ``key``, for the arguments of another task."""
        return TaskRef(key)

    def add(
        self,
        key: str,
        function: Callable[..., object],
        *args: object,
        worker: str | None = None,
        priority: int = 0,
        reads: Reads | None = None,
    ) -> None:
        """Add a task; its arguments may be references to results of other tasks, or lists of references."""
        self.tasks[key] = Task(key, function, *(_parsed(arg) for arg in args))
        if worker is not None:
            self.workers[key] = [worker]
        if priority:
            self.priorities[key] = priority
        if reads is not None:
            self.reads[key] = reads

    def send(self, client: Client, wanted: Iterable[str], only: Sequence[str] = ()) -> dict[str, Future]:
        """Send all tasks, and return the futures of the tasks with the keys ``wanted``.

        ``only`` contains the addresses of the workers that may run the tasks; if it is empty, all workers
        may.
        """
        keys = list(wanted)
        # Each annotation is a function of the task's key, because Dask accepts only one value or function for
        # all tasks of a graph layer.
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
