"""Batch learning: pass after pass until the learner, a callback or an interrupt ends it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from scalelatent.errors import RunError

from .callbacks import Callback
from .executor import Executor
from .passes import Stage
from .store import EngineStore


@dataclass(frozen=True)
class LoopResult:
    """The last state and one record a pass."""

    state: Any
    history: list[dict[str, Any]]


class Progress:
    """Tells callbacks about rows, at most ten times a second."""

    def __init__(self, callbacks: Callback, stage: str, iteration: int) -> None:
        self._callbacks, self._stage, self._iteration = callbacks, stage, iteration
        self._begin, self._told = time.perf_counter(), 0.0
        self._first: int | None = None

    def __call__(self, done: int, total: int) -> None:
        """Rows done, of all rows."""
        now = time.perf_counter()
        if self._first is None:
            self._first = done  # rows that an interrupted pass had left: no part of the rate
        if done < total and now - self._told < 0.1:
            return
        self._told = now
        rate = (done - self._first) / max(now - self._begin, 1e-9)
        self._callbacks.on_progress(
            {
                "stage": self._stage,
                "pass": self._iteration,
                "rows_done": done,
                "rows_total": total,
                "rows_per_s": rate,
            }
        )


def fit_batches(
    executor: Executor,
    stage: Stage,
    state: Any,
    *,
    callbacks: Callback,
    store: EngineStore | None = None,
    checkpoint_seconds: float = 30.0,
    checkpoint_passes: int | None = None,
) -> LoopResult:
    """Run a :class:`~scalelatent.models.base.BatchLearner` to its end.

    Parameters
    ----------
    executor : Executor
    stage : Stage
        Its ``work`` is the learner.
    state : object
        The first state; a checkpoint in ``store`` goes before it.
    store : EngineStore or None
        Where checkpoints lie; None keeps none.
    checkpoint_seconds, checkpoint_passes : float, int or None
        A checkpoint at least this often. On an interrupt or an error the last finished pass is always saved.

    Returns
    -------
    LoopResult
    """
    iteration, history = 0, []
    if store is not None and (found := store.latest_state(stage.name)) is not None:
        iteration, state, messages = found
        history = store.load_history(stage.name, iteration)
        if iteration and (not history or history[-1]["pass"] < iteration):
            # Killed after the M-step and before the line was written: the state still knows what it measured.
            history.append(_record(stage, stage.work.summary(state), 0.0, stage.rows, 0))
            store.append_history(stage.name, history[-1])
        for message in messages:
            callbacks.on_event({"event": "checkpoint_unreadable", "message": message})
        # With its record: who logs records may have been killed before it logged this one.
        last = {"record": history[-1]} if history else {}
        callbacks.on_event({"event": "resumed", "stage": stage.name, "pass": iteration, **last})
    done = stage.work.is_done(state)
    handle = executor.put_state(stage, iteration, state)
    saved, saved_at = iteration, time.perf_counter()
    try:
        while not done:
            begin = time.perf_counter()
            result = executor.step(stage, iteration, handle, Progress(callbacks, stage.name, iteration + 1))
            iteration, handle, done = iteration + 1, result.state, result.done
            seconds = time.perf_counter() - begin
            record = _record(stage, result.summary, seconds, result.rows, result.bytes_read)
            history.append(record)
            if store is not None:
                store.append_history(stage.name, record)
            due = time.perf_counter() - saved_at >= checkpoint_seconds or (
                checkpoint_passes and iteration - saved >= checkpoint_passes
            )
            if due or done:
                _checkpoint(executor, stage, iteration, handle, callbacks, store)
                saved, saved_at = iteration, time.perf_counter()
            if callbacks.on_pass_end(record):
                callbacks.on_event({"event": "stopped_by_callback", "stage": stage.name, "pass": iteration})
                break
    except BaseException:
        if saved != iteration:
            _checkpoint(executor, stage, iteration, handle, callbacks, store)
        raise
    if saved != iteration:
        _checkpoint(executor, stage, iteration, handle, callbacks, store)
    return LoopResult(executor.get_state(stage, iteration, handle), history)


def _record(
    stage: Stage, summary: dict[str, Any], seconds: float, rows: int, bytes_read: int
) -> dict[str, Any]:
    more = {"stage": stage.name, "seconds": round(seconds, 6), "rows": rows, "bytes_read": bytes_read}
    return {**summary, **more}


def _checkpoint(
    executor: Executor,
    stage: Stage,
    iteration: int,
    handle: Any,
    callbacks: Callback,
    store: EngineStore | None,
) -> None:
    if store is None:
        return
    begin = time.perf_counter()
    try:
        store.save_state(stage.name, iteration, executor.get_state(stage, iteration, handle), durable=True)
    except RunError as error:
        callbacks.on_event({"event": "checkpoint_failed", "pass": iteration, "message": str(error)})
        raise
    path = store.state_path(stage.name, iteration)
    callbacks.on_checkpoint({"pass": iteration, "path": path, "seconds": time.perf_counter() - begin})
