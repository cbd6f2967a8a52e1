"""Run batch learning: one pass after another until the learner or a callback stops, or an error occurs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from scalelatent.errors import RunError

from .callbacks import Callback
from .checkpoints import EngineStore
from .executor import Executor, Handle
from .passes import Stage


@dataclass(frozen=True)
class LoopResult:
    """Result of a fit: the last state, and one record per pass or epoch."""

    state: Any
    history: list[dict[str, Any]]


class Progress:
    """Reporter of the finished rows of a pass to the callbacks, at most ten times a second."""

    def __init__(self, callbacks: Callback, stage: str, iteration: int, **about: object) -> None:
        self._callbacks, self._stage, self._iteration = callbacks, stage, iteration
        self._about = about
        self._begin, self._reported = time.perf_counter(), 0.0
        self._first: int | None = None  # rows of an interrupted pass, which `rows_per_s` excludes

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if self._first is None:
            self._first = done
        if done < total and now - self._reported < 0.1:
            return
        self._reported = now
        rate = (done - self._first) / max(now - self._begin, 1e-9)
        self._callbacks.on_progress(
            {
                "stage": self._stage,
                "pass": self._iteration,
                "rows_done": done,
                "rows_total": total,
                "rows_per_s": rate,
                **self._about,
            }
        )


def fit_batches(
    executor: Executor[Handle],
    stage: Stage,
    state: object,
    *,
    callbacks: Callback,
    store: EngineStore | None = None,
    checkpoint_seconds: float = 30.0,
    checkpoint_passes: int | None = None,
    first: int = 0,
) -> LoopResult:
    """Run a :class:`~scalelatent.contract.learners.BatchLearner` from its last checkpoint until it is done.

    ``first`` is the number of passes of earlier stages of the fit, after which passes are numbered.
    """
    iteration, history = first, []
    if store is not None and (found := store.latest_state(stage.name)) is not None:
        iteration, state, messages = found
        report_unreadable(callbacks, messages)
        history = load_full_history(store, stage, first, iteration)
        # The event includes the last record, because the fit may have been killed before it was logged.
        last_record = {"record": history[-1], "history": list(history)} if history else {}
        callbacks.on_event({"event": "resumed", "stage": stage.name, "pass": iteration, **last_record})
    done = stage.batch.is_done(state)
    handle = executor.put_state(stage, iteration, state)
    saved, saved_at = iteration, time.perf_counter()

    def checkpoint() -> None:
        nonlocal saved, saved_at
        if store is not None and saved != iteration:
            read, is_written = partial(executor.get_state, stage, iteration, handle), executor.keeps_states
            write_checkpoint(
                store, stage.name, iteration, read, callbacks, {"pass": iteration}, is_written=is_written
            )
        saved, saved_at = iteration, time.perf_counter()

    try:
        while not done:
            begin = time.perf_counter()
            result = executor.step(stage, iteration, handle, Progress(callbacks, stage.name, iteration + 1))
            iteration, handle, done = iteration + 1, result.state, result.done
            seconds = time.perf_counter() - begin
            record = make_record(stage, result.summary, seconds, result.rows, result.bytes_read)
            history.append(record)
            if store is not None:
                store.append_history(stage.name, record)
            due = time.perf_counter() - saved_at >= checkpoint_seconds or (
                checkpoint_passes and iteration - saved >= checkpoint_passes
            )
            if due or done:
                checkpoint()
            if callbacks.on_pass_end(record):
                callbacks.on_event({"event": "stopped_by_callback", "stage": stage.name, "pass": iteration})
                break
    except BaseException:
        checkpoint()
        raise
    finally:
        executor.end()
    checkpoint()
    return LoopResult(executor.get_state(stage, iteration, handle), history)


def load_full_history(store: EngineStore, stage: Stage, first: int, iteration: int) -> list[dict[str, Any]]:
    """Return the records of a stage's passes up to ``iteration``; earlier stages had ``first`` passes."""
    # A cluster may have finished two passes that a killed driver did not record. Their stored states give
    # the missing records.
    history = store.load_history(stage.name, iteration)
    missing = set(range(first + 1, iteration + 1)).difference(record["pass"] for record in history)
    for number in sorted(missing.intersection(store.iterations(stage.name))):
        try:
            summary = stage.batch.summary(store.load_state(stage.name, number))
        except RunError:  # the state is damaged, but the resume does not need it
            continue
        record = make_record(stage, summary, 0.0, stage.rows, 0)
        store.append_history(stage.name, record)
        history.append(record)
    return sorted(history, key=lambda record: int(record["pass"]))


def make_record(
    stage: Stage, summary: dict[str, Any], seconds: float, rows: int, bytes_read: int
) -> dict[str, Any]:
    """Return one record of the history: scalars of the learner, and seconds, rows and bytes of the pass."""
    cost = {"stage": stage.name, "seconds": round(seconds, 6), "rows": rows, "bytes_read": bytes_read}
    return {**summary, **cost}


def report_unreadable(callbacks: Callback, messages: list[str]) -> None:
    """Notify the callbacks of checkpoints that a resume could not read."""
    for message in messages:
        callbacks.on_event({"event": "checkpoint_unreadable", "message": message})


def write_checkpoint(
    store: EngineStore,
    name: str,
    iteration: int,
    state: Callable[[], object],
    callbacks: Callback,
    where: dict[str, int],
    *,
    is_written: bool,
) -> None:
    """Store a state durably and notify the callbacks; the event contains the entries of ``where``.

    ``is_written`` is True if the executor has already written the state; its file is then only flushed.
    """
    begin = time.perf_counter()
    try:
        if not (is_written and store.make_durable(name, iteration)):
            store.save_state(name, iteration, state(), durable=True)
    except RunError as error:
        callbacks.on_event({"event": "checkpoint_failed", **where, "message": str(error)})
        raise
    path = store.state_path(name, iteration)
    callbacks.on_checkpoint({**where, "path": path, "seconds": time.perf_counter() - begin})
