"""Supervise the tasks of a pass or map; after a failure, retry, exclude bad rows, or raise an error.

Dask retries a failed task whatever the cause of the failure; this module looks at the cause first
(`test_failures.py`, `test_bad_shards.py`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from scalelatent.engine.executor import OnRows
from scalelatent.engine.threads import call_with_timeout
from scalelatent.errors import RunError, ScalelatentError, ShardError

from .timed_calls import ASK_SECONDS
from .watch import Retry, WorkerDied
from .window import Item, TaskEnded, Work

if TYPE_CHECKING:
    from distributed import Client, Future

    from .executor import DaskExecutor

# Seconds between two checks of the futures: LOOK_SHARE per pending future, but at least POLL_SECONDS, and
# WAIT_SECONDS if no future is pending. Checks use 1.5 % of a core with tasks of 1 s (submit.py), and 0.6 ms
# per task with 1,000 workers (simulated_cluster.py).
POLL_SECONDS, LOOK_SHARE, WAIT_SECONDS = 0.02, 5e-5, 0.25


class RowsExcluded(Retry):
    """Signal that a pass or map must start again, because some of its rows have just been excluded."""


def guard_spans(client: Client) -> None:
    """Register the plugin with which the scheduler fails a task after two workers died while they ran it.

    If the scheduler refuses plugins, nothing changes.
    """
    from .scheduler_policies import NAME, SpanGuard

    with suppress(Exception):
        call_with_timeout(ASK_SECONDS, lambda: client.register_plugin(SpanGuard(), name=NAME))


def supervise(executor: DaskExecutor, current: Work[Item], on_rows: OnRows) -> None:
    """Supervise a pass or map to its end; call ``on_rows(number of finished rows, number of all rows)``."""
    reported_rows = -1
    current.window.open()
    executor.watch.start(current)
    while True:
        try:
            moved, done = current.poll(), current.done
        except TaskEnded as ended:
            resolve_failure(executor, current, ended)
        if current.rows_done > reported_rows:
            reported_rows = current.rows_done
            on_rows(reported_rows, current.rows)
        if done:
            break
        executor.watch.check(current, moved)
        pending = len(current.window.pending)
        executor.wait(max(POLL_SECONDS, LOOK_SHARE * pending) if pending else WAIT_SECONDS)
    if reported_rows < current.rows:
        on_rows(current.rows, current.rows)


def resolve_failure(executor: DaskExecutor, current: Work[Item], ended: TaskEnded) -> NoReturn:
    """Raise `Retry` for a failed or cancelled task if a retry can help, otherwise the error of the task."""
    from distributed import KilledWorker

    future = ended.future
    if future.status == "cancelled" and executor.link.connected:
        raise Retry(f"the scheduler has cancelled {future.key}")
    error = _exception_of(executor, future)
    if isinstance(error, KilledWorker):
        key = str(error.task)
        if executor.watch.count_named_death(current, key, error.last_worker.address):
            raise WorkerDied(f"workers died while they ran {key}")
    where = {"stage": current.name, "pass": current.number}
    if (
        isinstance(error, ShardError)
        # In a short pass the driver has only the future of the M-step, which fails with the error of the
        # first task of the pass that fails.
        and (ended.item is None or current.dataset_of(ended.item) is not None)
        and executor.quarantine.exclude_unreadable(error, executor.callbacks, **where)
    ):
        raise RowsExcluded(str(error))
    raise _explained_error(executor, future, error, current) from None


def _exception_of(executor: DaskExecutor, future: Future) -> BaseException:
    from concurrent.futures import CancelledError

    if future.status in ("cancelled", "lost", "pending"):
        return executor.link.lost(f"task {future.key} was running", f"the task was {future.status}")
    try:
        error: BaseException = future.exception(timeout=ASK_SECONDS)
    except (CancelledError, TimeoutError, OSError, AttributeError) as cancelled:
        return executor.link.lost(f"the error of task {future.key} was fetched", cancelled)
    return error


def _explained_error(
    executor: DaskExecutor, future: Future, error: BaseException, current: Work[Item] | None
) -> Exception:
    from distributed import KilledWorker

    if isinstance(error, KilledWorker):
        words = executor.watch.describe_killed_task(current, str(error.task), error.last_worker.address)
        return RunError(
            f"{words}. Most often the cause is memory: give workers more memory (`dask worker "
            "--memory-limit`, [cluster] memory_limit) or fewer threads each; if the same rows fail again, "
            "check their shard files (`scalelatent data check DATA`). Then resume the run, which keeps the "
            "finished work"
        )
    if isinstance(error, (ScalelatentError, FloatingPointError)):
        # Return a new error: the original refers to stack frames, which keep the futures of this pass alive.
        return type(error)(*error.args)
    return RunError(
        f"task {future.key} failed: {type(error).__name__}: {error}; finished passes are kept, resume the run"
    )
