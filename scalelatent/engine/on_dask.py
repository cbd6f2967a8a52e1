"""The executor on a Dask cluster: the same spans, the same tree, the same bits.

A pass is some tens of tasks. ``…_params`` holds the parameters: they travel from worker to worker, and its
recipe reads them from the run folder, so no task depends on an earlier pass and the scheduler forgets each
pass when it is done. ``…_estep`` reads, computes and reduces a span; ``…_merge`` joins eight nodes;
``…_mstep`` merges the last ones, writes the next state and returns scalars.

The driver gives out spans itself: each worker has a list of its own (the same every pass, so its cache fits),
at most ``WINDOW`` of them are submitted at a time, and a worker that runs out takes from the longest list.
Slow, fast, new and lost workers need nothing more.
"""

from __future__ import annotations

import queue
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from scalelatent.errors import RunError, ScalelatentError
from scalelatent.models.base import Stats

from .dask_tasks import (
    sees,
    task_map,
    task_merge,
    task_mstep,
    task_node,
    task_params,
    task_span,
    task_write_rows,
)
from .executor import OnRows, StepResult
from .future_tree import FutureTree
from .inprocess import plan_spans
from .online_dask import DaskSteps
from .order import RowOrder
from .passes import Span, Stage, split_vector
from .store import EngineStore

WINDOW = 2
STALL_SECONDS = 300.0
REFRESH_SECONDS = 1.0
_POLL_SECONDS = 0.5


class DaskExecutor:
    """Spans as tasks of a distributed cluster.

    Parameters
    ----------
    client : distributed.Client
    store : EngineStore
        In a folder that the driver and every worker see.
    device : str
    checkpoint_seconds : float
        0 keeps every finished span.

    Raises
    ------
    RunError
        No workers, or a worker does not see the folder.
    """

    def __init__(self, client: Any, store: EngineStore, checkpoint_seconds: float = 30.0) -> None:
        self.client = client
        self.store = store
        self.checkpoint_seconds = checkpoint_seconds
        self.spread, self._parts = "auto", 0
        self.token = uuid.uuid4().hex[:6]
        self.threads, self._looked = self._threads(), time.monotonic()
        if not self.threads:
            raise RunError(
                f"the cluster {client.scheduler.address} has no workers: start some (`dask worker "
                f"{client.scheduler.address}`), then fit again"
            )
        self._check_shared_folder()

    @property
    def workers(self) -> int:
        """Spans that run at once."""
        return max(1, sum(self.threads.values()))

    def _threads(self) -> dict[str, int]:
        return dict(sorted(self.client.nthreads().items()))

    def refresh(self) -> None:
        """Look at the workers anew, but not each pass: short ones would wait for the answer."""
        if time.monotonic() - self._looked > REFRESH_SECONDS:
            self.threads = self._threads() or self.threads
            self._looked = time.monotonic()

    def _check_shared_folder(self) -> None:
        mark = self.store.folder / f".seen-{self.token}"
        mark.write_text("")
        try:
            seen = self.client.run(sees, str(mark))
        finally:
            mark.unlink(missing_ok=True)
        blind = [address for address, there in seen.items() if not there]
        if blind:
            raise RunError(
                f"worker(s) {', '.join(blind)} do not see the run folder {self.store.folder}: put it on "
                "storage that all workers share (run_dir=…, or [job] out)"
            )

    def put_state(self, stage: Stage, iteration: int, state: Any) -> int:
        """Write constants and state where the workers find them."""
        self.store.save_stage(stage)
        self.store.save_state(stage.name, iteration, state, durable=True)
        return iteration

    def get_state(self, stage: Stage, iteration: int, handle: int) -> Any:
        """The state, from the run folder."""
        return self.store.load_state(stage.name, handle)

    def step(self, stage: Stage, iteration: int, handle: int, on_rows: OnRows) -> StepResult:
        """One pass and its M-step, both on the cluster."""
        folder = self.store.ref
        params = self.client.submit(
            task_params, folder, stage.name, iteration, key=self.key(stage, "params", iteration), pure=False
        )
        tops = self._reduce(stage, iteration, params, on_rows)
        future = self.client.submit(
            task_mstep,
            folder,
            stage.name,
            iteration,
            list(tops),
            list(tops.values()),
            params,
            key=self.key(stage, "mstep", iteration),
            priority=10,
            pure=False,
        )
        out = self.result(future)
        self.store.drop_nodes()
        return StepResult(out["summary"], out["done"], out["rows"], out["bytes_read"], iteration + 1)

    def online_steps(self, stage: Stage, order: RowOrder, n_epochs: int) -> DaskSteps:
        """Steps on the workers, in segments."""
        return DaskSteps(self, stage, order, n_epochs, self.spread)

    def next_token(self) -> str:
        """Ends the names of the tasks of one part of the fit, so that no name comes twice."""
        self._parts += 1
        return f"{self.token}{self._parts}"

    def collect(self, stage: Stage, on_rows: OnRows) -> dict[str, Stats]:
        """One pass of reductions; their sums come to the driver, once a fit."""
        self.store.save_stage(stage)
        tops = self._reduce(stage, 0, None, on_rows)
        out = {}
        for part, futures in tops.items():
            future = self.client.submit(
                task_merge, futures, key=self.key(stage, "merge", 0, f"{part}-root"), pure=False
            )
            out[part] = split_vector(stage, part, self.result(future))[0]
        self.store.drop_nodes()
        return out

    # -- spans and their tree
    # ----------------------------------------------------------------------------------

    def _reduce(self, stage: Stage, iteration: int, params: Any, on_rows: OnRows) -> dict[str, list[Any]]:
        """Futures of the top nodes of each part, in order; at most eight a part."""
        self.refresh()
        spans, kept = plan_spans(stage, iteration, self.store, self.workers)
        trees = {part: FutureTree(self, stage, iteration, part) for part in stage.grids}
        folder, done = self.store.ref, 0
        for span, vector in kept:
            key = self.key(stage, "kept", iteration, f"{span.part}-{span.index:04d}")
            trees[span.part].add(
                span.level,
                span.index,
                self.client.submit(task_node, folder, stage.name, iteration, span, key=key, pure=False),
            )
            done += int(vector[-2])
        on_rows(done, stage.rows)

        def submit(span: Span, worker: str) -> Any:
            suffix = f"s{span.index:04d}" if span.part == "train" else f"{span.part[0]}{span.index:04d}"
            key = self.key(stage, None, iteration, suffix)
            return self.client.submit(
                task_span,
                folder,
                stage.name,
                iteration,
                span,
                params,
                self.checkpoint_seconds,
                workers=[worker],
                allow_other_workers=True,
                key=key,
                pure=False,
            )

        def finish(span: Span, future: Any) -> None:
            nonlocal done
            trees[span.part].add(span.level, span.index, future)
            a, b = stage.grids[span.part].node_rows(span.level, span.index)
            done += b - a
            on_rows(done, stage.rows)

        self._run_windowed(spans, submit, finish)
        return {part: tree.tops() for part, tree in trees.items()}

    def run_map(self, task: Any, on_rows: OnRows) -> None:
        """Shards of a map as tasks."""
        self.refresh()
        name = f"map-{task.name}-{self.token}"
        self.store.save_result(
            name, {"row_map": task.row_map, "task": task.to_json(), "classes": task.classes}
        )
        missing = task.missing()
        done = task.rows_done(missing)
        on_rows(done, task.rows)

        def submit(shard: int, worker: str) -> Any:
            return self.client.submit(
                task_map,
                self.store.ref,
                name,
                shard,
                workers=[worker],
                allow_other_workers=True,
                key=f"{task.name}-s{shard:04d}-{self.token}-{uuid.uuid4().hex[:4]}",
                pure=False,
            )

        def finish(shard: int, future: Any) -> None:
            nonlocal done
            a, b = task.writer.shard_bounds(shard)
            done += b - a
            on_rows(done, task.rows)

        self._run_windowed(missing, submit, finish)

    def save_lazy(self, dataset: Any, url: str, on_rows: OnRows) -> Any:
        """Write the rows of a dask array by its own tasks: each shard is computed and written on a worker.

        Returns
        -------
        Dataset
        """
        from scalelatent.data import create_dataset

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
        done = 0

        def submit(shard: int, worker: str) -> Any:
            a, b = writer.shard_bounds(shard)
            x, y = dataset.lazy(a, b)
            rows = self.client.compute(x)
            labels = self.client.compute(y) if hasattr(y, "dask") else y
            weight = dataset.read_weight(a, b) if dataset.has_weight else None
            key = f"write_rows-s{shard:04d}-{self.token}-{uuid.uuid4().hex[:4]}"
            return self.client.submit(task_write_rows, url, shard, rows, labels, weight, key=key, pure=False)

        def finish(shard: int, future: Any) -> None:
            nonlocal done
            a, b = writer.shard_bounds(shard)
            done += b - a
            on_rows(done, len(dataset))

        self._run_windowed(range(writer.n_shards), submit, finish)
        return writer.finalize()

    def _run_windowed(
        self, items: Sequence[Any], submit: Callable[[Any, str], Any], finish: Callable[[Any, Any], None]
    ) -> None:
        """Keep a few items on every worker until all are done. Errors of tasks are raised here."""
        names = list(self.threads)
        lists = {
            name: deque(items[i * len(items) // len(names) : (i + 1) * len(items) // len(names)])
            for i, name in enumerate(names)
        }
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        pending: dict[Any, tuple[Any, str]] = {}

        def give(worker: str) -> bool:
            source = lists[worker] or max(lists.values(), key=len)
            if not source:
                return False
            # Its own list from the front; from another's list the end, which its owner would reach last.
            item = source.popleft() if source is lists[worker] else source.pop()
            future = submit(item, worker)
            pending[future] = (item, worker)
            future.add_done_callback(ended.put)
            return True

        for _ in range(WINDOW):
            for name in names:
                for _ in range(self.threads[name]):
                    give(name)
        try:
            while pending:
                future = self._next_ended(ended, pending)
                item, worker = pending.pop(future)
                if future.status != "finished":
                    self._raise(future)
                finish(item, future)
                give(worker)
        finally:
            if pending:
                self.client.cancel(list(pending))

    def _next_ended(
        self,
        ended: queue.SimpleQueue[Any],
        pending: dict[Any, Any],
        check: Callable[[], None] | None = None,
    ) -> Any:
        begin = time.monotonic()
        while True:
            try:
                return ended.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if check is not None:
                    check()
                if time.monotonic() - begin < STALL_SECONDS:
                    continue
            threads, begin = self._threads(), time.monotonic()
            if not threads:
                self._no_workers(f"{len(pending)} spans")

    def _no_workers(self, what: str) -> NoReturn:
        raise RunError(
            f"no workers are left on {self.client.scheduler.address} and none came in {STALL_SECONDS:.0f} s; "
            f"waiting for {what}. Start workers, then resume the run: finished passes are kept"
        )

    def wait_for_workers(self) -> dict[str, int]:
        """Threads of each worker that is there now; waits a while for one.

        Raises
        ------
        RunError
            None came.
        """
        begin = time.monotonic()
        while not (threads := self._threads()):
            if time.monotonic() - begin > STALL_SECONDS:
                self._no_workers("the next step")
            time.sleep(_POLL_SECONDS)
        self.threads, self._looked = threads, time.monotonic()
        return threads

    def result(self, future: Any, check: Callable[[], None] | None = None) -> Any:
        """The result of a task, waited for as long as there are workers.

        Parameters
        ----------
        check : callable, optional
            Called now and then; may raise to give up.

        Raises
        ------
        RunError
            The task was lost, or no workers are left.
        """
        ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        future.add_done_callback(ended.put)
        self._next_ended(ended, {future: None}, check)
        if future.status != "finished":
            self._raise(future)
        return future.result()

    def _raise(self, future: Any) -> None:
        from concurrent.futures import CancelledError

        from distributed import KilledWorker

        try:
            error = future.exception(timeout=30)
        except (CancelledError, TimeoutError) as cancelled:  # a cancelled future has no exception of its own
            raise RunError(
                f"task {future.key} was cancelled ({cancelled}): the scheduler was lost or restarted; "
                "resume the run"
            ) from cancelled
        if isinstance(error, KilledWorker):
            raise RunError(
                f"task {future.key} was running when {error.last_worker.address} died, and so on "
                f"{error.allowed_failures + 1} workers: most often memory. Give workers more memory, or set "
                "[engine] block_rows lower, then resume the run"
            ) from None
        if isinstance(error, (ScalelatentError, FloatingPointError)):
            # A fresh one: the future's own keeps the frames of this pass alive, and with them its futures.
            raise type(error)(*error.args) from None
        raise RunError(
            f"task {future.key} failed: {type(error).__name__}: {error}; finished passes are kept, resume "
            "the run"
        ) from None

    def key(self, stage: Stage, role: str | None, iteration: int, suffix: str = "") -> str:
        """Name of a task of a pass."""
        # Beside the spans, ``capsule_estep``, stand ``capsule_params``, ``capsule_mstep``, … Other stages
        # keep their whole name: a key that was used before would bring back the old result.
        model = stage.name.split("_")[0] if stage.name.endswith("_estep") else stage.name
        name = f"{model}_{role}" if role else stage.name
        return f"{name}-it{iteration + 1:04d}{'-' + suffix if suffix else ''}-{self.token}"
