"""Batch learning: pass after pass until the learner, a callback or an interrupt ends it."""

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
    """The last state and one record a pass."""

    state: Any
    history: list[dict[str, Any]]


class Progress:
    """Tells callbacks about rows, and what else is known of the stage, at most ten times a second."""

    def __init__(self, callbacks: Callback, stage: str, iteration: int, **about: object) -> None:
        self._callbacks, self._stage, self._iteration = callbacks, stage, iteration
        self._about = about
        self._begin, self._told = time.perf_counter(), 0.0
        self._first: int | None = None

    def __call__(self, done: int, total: int) -> None:
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
    """Run a :class:`~scalelatent.contract.learners.BatchLearner` to its end."""
    iteration, history = first, []
    if store is not None and (found := store.latest_state(stage.name)) is not None:
        iteration, state, messages = found
        tell_unreadable(callbacks, messages)
        history = full_history(store, stage, first, iteration)
        # With its record: the logger may have been killed before it wrote this one.
        last = {"record": history[-1], "history": list(history)} if history else {}
        callbacks.on_event({"event": "resumed", "stage": stage.name, "pass": iteration, **last})
    done = stage.batch.is_done(state)
    handle = executor.put_state(stage, iteration, state)
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
                _checkpoint(executor, stage, iteration, handle, callbacks, store)
                saved, saved_at = iteration, time.perf_counter()
            if callbacks.on_pass_end(record):
                callbacks.on_event({"event": "stopped_by_callback", "stage": stage.name, "pass": iteration})
                break
    except BaseException:
        if saved != iteration:
            _checkpoint(executor, stage, iteration, handle, callbacks, store)
        raise
    finally:
        executor.end()
    if saved != iteration:
        _checkpoint(executor, stage, iteration, handle, callbacks, store)
    return LoopResult(executor.get_state(stage, iteration, handle), history)


def full_history(store: EngineStore, stage: Stage, first: int, iteration: int) -> list[dict[str, Any]]:
    """Records of the passes of a stage up to a state; ``first`` passes were before it."""
    # A cluster may be two passes ahead of a driver that is killed before it notes them; their states still
    # know what was measured.
    history = store.load_history(stage.name, iteration)
    missing = set(range(first + 1, iteration + 1)).difference(record["pass"] for record in history)
    for number in sorted(missing.intersection(store.iterations(stage.name))):
        try:
            summary = stage.batch.summary(store.load_state(stage.name, number))
        except RunError:  # torn: the fit goes on from a later one
            continue
        record = make_record(stage, summary, 0.0, stage.rows, 0)
        store.append_history(stage.name, record)
        history.append(record)
    return sorted(history, key=lambda record: int(record["pass"]))


def make_record(
    stage: Stage, summary: dict[str, Any], seconds: float, rows: int, bytes_read: int
) -> dict[str, Any]:
    """One line of the history: the learner's scalars, and what they cost."""
    more = {"stage": stage.name, "seconds": round(seconds, 6), "rows": rows, "bytes_read": bytes_read}
    return {**summary, **more}


def tell_unreadable(callbacks: Callback, messages: list[str]) -> None:
    """Tell about checkpoints that a resume had to pass over."""
    for message in messages:
        callbacks.on_event({"event": "checkpoint_unreadable", "message": message})


def _checkpoint(
    executor: Executor[Handle],
    stage: Stage,
    iteration: int,
    handle: Handle,
    callbacks: Callback,
    store: EngineStore | None,
) -> None:
    if store is not None:
        kept, where = executor.keeps_states, {"pass": iteration}
        state = partial(executor.get_state, stage, iteration, handle)
        write_checkpoint(store, stage.name, iteration, state, callbacks, where, kept=kept)


def write_checkpoint(
    store: EngineStore,
    name: str,
    iteration: int,
    state: Callable[[], object],
    callbacks: Callback,
    where: dict[str, int],
    *,
    kept: bool,
) -> None:
    """Make a state safe on disk and tell of it; ``where`` is what callbacks read."""
    begin = time.perf_counter()
    try:
        if not (kept and store.make_durable(name, iteration)):
            store.save_state(name, iteration, state(), durable=True)
    except RunError as error:
        callbacks.on_event({"event": "checkpoint_failed", **where, "message": str(error)})
        raise
    path = store.state_path(name, iteration)
    callbacks.on_checkpoint({**where, "path": path, "seconds": time.perf_counter() - begin})
