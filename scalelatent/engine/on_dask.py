"""The executor on a Dask cluster: the same spans, the same tree, the same bits.

A pass is some tens of tasks. ``…_estep`` reads, computes and reduces a span; ``…_merge`` joins eight nodes;
``…_mstep`` merges the last ones and makes the next parameters, which travel from worker to worker and lie in
the run folder, too; ``…_info`` gives the driver its scalars. ``…_params`` begins a pass from the run folder.
Slow, fast, new and lost workers need nothing more than the window of :mod:`.dask_pass`.
"""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from scalelatent.errors import RunError, ScalelatentError
from scalelatent.models.base import Stats

from .dask_pass import DaskPass, Window, params_of
from .dask_tasks import sees, task_map, task_merge, task_write_rows
from .executor import OnRows, StepResult
from .inprocess import plan_spans
from .online_dask import DaskSteps
from .order import RowOrder
from .passes import Span, Stage, spans_of, split_vector
from .store import EngineStore

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

    keeps_states = True

    def __init__(self, client: Any, store: EngineStore, checkpoint_seconds: float = 30.0) -> None:
        self.client = client
        self.store = store
        self.checkpoint_seconds = checkpoint_seconds
        self.spread, self._parts = "auto", 0
        self.token = uuid.uuid4().hex[:6]
        self._begun: DaskPass | None = None
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
        place, mark = self.store.place, f".seen-{self.token}"
        place.write(mark, b"seen")
        try:
            wrong = self.client.run(sees, place.url, mark)
        finally:
            place.delete(mark)
        blind = {address: words for address, words in wrong.items() if words}
        if blind:
            raise RunError(
                f"worker(s) {', '.join(blind)} do not see the run folder {place.url} "
                f"({'; '.join(sorted(set(blind.values())))}): put it on storage that all workers share "
                "(run_dir=…, or [job] out), and let them have the credentials for it"
            )

    def put_state(self, stage: Stage, iteration: int, state: Any) -> int:
        """Write constants and state where the workers find them."""
        self.end()
        self.store.save_stage(stage)
        self.store.save_state(stage.name, iteration, state, durable=True)
        return iteration

    def get_state(self, stage: Stage, iteration: int, handle: int) -> Any:
        """The state, from the run folder."""
        return self.store.load_state(stage.name, handle)

    def spans(self, stage: Stage) -> list[Span]:
        """Spans of a pass on the workers there are."""
        return spans_of(stage, self.workers)

    def step(self, stage: Stage, iteration: int, handle: int, on_rows: OnRows) -> StepResult:
        """One pass and its M-step, both on the cluster; the pass may have begun behind the one before."""
        current = self._begun
        if current is None or current.stage is not stage or current.iteration != iteration:
            self.end()
            self.refresh()
            spans, kept = plan_spans(stage, iteration, self.store, self.workers)
            current = DaskPass(self, stage, iteration, params_of(self, stage, iteration), spans, kept)
        try:
            self._run_pass(current, on_rows)
            out = self.result(current.info)
        except BaseException:
            current.cancel()
            raise
        self._begun = current.following
        current.release()
        if out["done"]:
            self.end()
        self.store.drop_nodes(upto=iteration)
        return StepResult(out["summary"], out["done"], out["rows"], out["bytes_read"], iteration + 1)

    def end(self) -> None:
        """Call off the pass that has begun behind the last one: it is not wanted."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.cancel()

    def online_steps(self, stage: Stage, order: RowOrder, n_epochs: int) -> DaskSteps:
        """Steps on the workers, in segments."""
        return DaskSteps(self, stage, order, n_epochs, self.spread)

    def next_token(self) -> str:
        """Ends the names of the tasks of one part of the fit, so that no name comes twice."""
        self._parts += 1
        return f"{self.token}{self._parts}"

    def collect(self, stage: Stage, on_rows: OnRows) -> dict[str, Stats]:
        """One pass of reductions; their sums come to the driver, once a fit."""
        self.end()
        self.refresh()
        self.store.save_stage(stage)
        spans, kept = plan_spans(stage, 0, self.store, self.workers)
        current = DaskPass(self, stage, 0, None, spans, kept)
        self._run_pass(current, on_rows)
        out = {}
        for part, futures in current.tops().items():
            future = self.client.submit(
                task_merge, futures, key=self.key(stage, "merge", 0, f"{part}-root"), pure=False
            )
            out[part] = split_vector(stage, part, self.result(future))[0]
        current.release()
        self.store.drop_nodes()
        return out

    def _run_pass(self, current: DaskPass, on_rows: OnRows) -> None:
        stage, done = current.stage, current.rows_kept
        on_rows(done, stage.rows)

        def finish(span: Span, future: Any) -> None:
            nonlocal done
            a, b = stage.grids[span.part].node_rows(span.level, span.index)
            done += b - a
            on_rows(done, stage.rows)

        current.run(finish, self._next_ended, self._raise)

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
        Window(self.threads, items, submit).run(finish, self._next_ended, self._raise)

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
                f"{error.allowed_failures + 1} workers: most often memory. Give workers more memory or fewer "
                "threads ([cluster] memory_limit, threads), then resume the run; or start anew in another "
                "folder with a lower [engine] block_rows"
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
