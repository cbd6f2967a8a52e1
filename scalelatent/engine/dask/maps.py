"""Apply row maps (such as predictions) on a cluster: one task computes and writes each output shard.

Each output shard has only one writer. After a failure, only the missing shards are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dask.core import flatten
from distributed.protocol.pickle import dumps, loads

from scalelatent.data.read.sources import is_dask
from scalelatent.engine.executor import OnRows
from scalelatent.engine.rates import choose_map_cache
from scalelatent.errors import DataError

from .graph import Graph
from .pass_tasks import task_map, task_write_rows
from .trial import try_shard
from .window import Batch, Window, Work

if TYPE_CHECKING:
    from distributed import Future

    from scalelatent.data.dataset import Dataset
    from scalelatent.data.write.writer import DatasetWriter
    from scalelatent.engine.mapwrite import OutputTask
    from scalelatent.engine.quarantine import Ranges

    from .executor import DaskExecutor

# Maximum bytes of pickled tasks that are sent to each worker, to check that the worker can import their code.
TRIAL_BYTES = 2**20
# Function that adds the task of a shard to a graph, with the arguments (graph, key, shard, worker).
AddShard = Callable[[Graph, str, int, str], None]


class Shards(Work[int]):
    """Tasks that write the missing shards of an output dataset, one task per shard."""

    def __init__(
        self,
        executor: DaskExecutor,
        name: str,
        writer: DatasetWriter,
        rows: int,
        add: AddShard,
        others: bool = False,
    ) -> None:
        super().__init__(name, 0, executor.next_token(), rows)
        self._client, self._watch = executor.client, executor.watch
        self._writer, self._add, self._others = writer, add, others
        self.missing = writer.missing()
        self.rows_done = rows - sum(map(self.item_rows, self.missing))
        self.window = Window(executor.threads, self.missing, self._send)

    def _send(self, batch: Batch[int], last: bool) -> dict[int, Future]:
        graph = Graph()
        keys = {shard: f"{self.name}-s{shard:04d}-{self.token}" for shard, _ in batch}
        for shard, worker in batch:
            self._add(graph, keys[shard], shard, worker)
            self.items[keys[shard]] = shard
        only = () if self._others else self._watch.only
        futures = graph.send(self._client, keys.values(), only)
        return {shard: futures[key] for shard, key in keys.items()}

    def owns(self, key: str) -> bool:
        """Return True for keys of this output; for any key if a dask array's own tasks compute the rows."""
        return self._others or super().owns(key)

    def about(self, item: int) -> dict[str, Any]:
        return {"part": "output", "span": item, "rows": list(self._writer.shard_bounds(item))}


class MapShards(Shards):
    """Tasks that write the missing shards of an :class:`~scalelatent.engine.mapwrite.OutputTask`."""

    def __init__(self, executor: DaskExecutor, task: OutputTask, name: str) -> None:
        super().__init__(executor, task.name, task.writer, task.rows, self._add_map)
        self._task, self._record, self._executor = task, name, executor
        self.todo = self.missing

    def _add_map(self, graph: Graph, key: str, shard: int, worker: str) -> None:
        about = self._executor.store.ref, self._record, shard, self._executor.fit
        graph.add(key, task_map, *about, worker=worker, reads=self.reads(shard))

    def dataset_of(self, item: int) -> Dataset:
        return self._task.dataset

    def source_rows(self, item: int) -> tuple[int, int]:
        return self._task.source_rows(item)

    def label(self, item: int) -> str:
        return f"s{item:04d}"

    def add_trial(self, graph: Graph, key: str, item: int, note: str, worker: str) -> None:
        about = self._executor.store.ref, self._record, item, self._executor.fit, note
        graph.add(key, try_shard, *about, worker=worker)


def run_map(executor: DaskExecutor, task: OutputTask, on_rows: OnRows) -> None:
    """Write the missing output shards of a row map, one task per shard; restart if bad input is excluded."""
    records: dict[Ranges, str] = {}  # names of the records with the map, by its excluded rows

    def create_work() -> MapShards:
        skipped = executor.quarantine.excluded_rows(task.dataset)
        if skipped not in records:
            name = records[skipped] = f"map-{task.name}-{executor.next_token()}"
            tree = replace(task, skipped=skipped, cache=choose_map_cache(executor.cache, task)).to_tree()
            executor.store.save_result(name, tree)
        return MapShards(executor, task, records[skipped])

    try:
        executor.run(create_work, on_rows)
    finally:
        for name in records.values():
            executor.store.drop_result(name)


def save_lazy(executor: DaskExecutor, dataset: Dataset, url: str, on_rows: OnRows) -> Dataset:
    """Write the rows of a dask array to ``url``; a worker computes and writes each shard."""
    from scalelatent.data import create_dataset

    columns = dataset.lazy(0, 1)
    assert columns is not None
    for column in columns:
        if is_dask(column):
            _check_importable(executor, column)
    classes = dataset.classes
    text = classes is not None and classes.dtype.kind == "U"
    writer = create_dataset(
        url,
        len(dataset),
        dataset.feature_shape,
        dataset.dtype,
        y_dtype=None if classes is None or text else classes.dtype,
        classes=classes,
        weighted=dataset.has_weight,
    )
    name = f"rows-{executor.next_token()}"
    ref, written = executor.store.ref, set[str]()

    def add_shard(graph: Graph, key: str, shard: int, worker: str) -> None:
        a, b = writer.shard_bounds(shard)
        columns = dataset.lazy(a, b)
        assert columns is not None
        x, y = columns
        lazy = hasattr(y, "dask")
        given = {} if lazy or y is None else {"y": y}
        if dataset.has_weight:
            given["weight"] = dataset.read_weight(a, b)
        beside = f"{name}-{shard:06d}.rec" if given else None
        if beside is not None:
            executor.store.write(beside, given, durable=False)
            written.add(beside)
        rows = graph.hold(executor.client.compute(x, optimize_graph=True))
        labels = graph.hold(executor.client.compute(y)) if lazy else None
        # No worker is given, so that Dask chooses the worker that has most of the rows in memory.
        graph.add(key, task_write_rows, ref, url, shard, rows, labels, beside)

    try:
        executor.run(
            lambda: Shards(executor, "write_rows", writer, len(dataset), add_shard, others=True), on_rows
        )
    finally:
        for record in written:
            executor.store.remove(record)
    return writer.finalize()


def _check_importable(executor: DaskExecutor, array: Any) -> None:
    """Raise DataError if a worker cannot load the functions that compute a dask array.

    Without this check, Dask would close the connection of such a worker and send the tasks again, forever.
    """
    graph = array.dask.cull(set(flatten(array.__dask_keys__())))
    tasks = dumps(dict(graph))
    if len(tasks) > TRIAL_BYTES:
        return
    for worker, error in executor.link.ask_workers(
        "the tasks of the rows were tried", _loading_error, tasks
    ).items():
        if error:
            raise DataError(
                f"worker {worker} cannot load the functions that compute the dask array: {error}. Install "
                "their module on every worker, or send it with client.upload_file('MODULE.py')"
            )


def _loading_error(tasks: bytes) -> str:
    """Load pickled tasks in this process; return the text of the error, or "" if they can be loaded."""
    try:
        loads(tasks)
    except Exception as error:  # noqa: BLE001 - unpickling calls code of other packages
        return f"{type(error).__name__}: {error}"
    return ""
