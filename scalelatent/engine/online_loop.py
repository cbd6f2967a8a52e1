"""Run online learning: one step per minibatch in the order of a :class:`~.order.RowOrder`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, cast

from scalelatent.contract.learners import Reduction, State, ValidatedLearner
from scalelatent.contract.stats import Stats
from scalelatent.errors import RunError

from .batch_loop import LoopResult, Progress, make_record, report_unreadable, write_checkpoint
from .callbacks import Callback
from .checkpoints import EngineStore
from .executor import Executor, OnlineSteps, Place
from .order import RowOrder, held_rows
from .passes import Stage


@dataclass(frozen=True)
class ValidationPass(Generic[State]):
    """Validation of an online learner as one pass of a batch learner, which executors can run."""

    learner: ValidatedLearner[State, Any]

    def reductions(self) -> Mapping[str, Reduction[State, Any]]:
        return {"validation": self.learner.validation()}

    def update(self, state: State, stats: Mapping[str, Stats]) -> State:
        return self.learner.validated(state, stats["validation"])

    def summary(self, state: State) -> dict[str, Any]:
        return self.learner.summary(state)

    def is_done(self, state: State) -> bool:
        return self.learner.is_done(state)


def fit_online(
    executor: Executor,
    stage: Stage,
    state: object,
    *,
    order: RowOrder,
    n_epochs: int,
    callbacks: Callback,
    store: EngineStore | None = None,
    checkpoint_seconds: float = 30.0,
    checkpoint_steps: int | None = None,
    report_steps: int | None = None,
    validate_steps: int | None = None,
) -> LoopResult:
    """Run an :class:`~scalelatent.contract.learners.OnlineLearner` for ``n_epochs``, or until it is done.

    1. Restore the last checkpoint of the run folder, if there is one.
    2. Run steps up to the next report, validation or end of an epoch.
    3. Validate if due, end the epoch if it is complete, and append a record to the history.
    4. Write a checkpoint if one is due, and pass the record to the callbacks.
    5. Repeat from 2. Write a checkpoint at the end, and also if an error or an interrupt occurs.
    """
    n_rows = len(stage.datasets["train"])
    if order.n_rows + len(held_rows(order.held, n_rows)) != n_rows:
        raise ValueError(f"the order has {order.n_rows} rows, but the stage has {n_rows} training rows")
    intervals = checkpoint_seconds, checkpoint_steps, report_steps, validate_steps
    fit = _OnlineFit(executor, stage, order, callbacks, store, *intervals)
    state = fit.restore(state)
    with executor.online_steps(stage, order, n_epochs) as run:
        run.callbacks = callbacks
        fit.begin(run, state)
        try:
            while not fit.done and fit.place.epoch < n_epochs:
                fit.advance(fit.next_stop())
                if fit.end_part():
                    break
        except BaseException:
            fit.checkpoint()
            raise
        fit.checkpoint()
        return LoopResult(run.get(*fit.at), fit.history)


class _OnlineFit:
    """State of `fit_online` between two steps: position, history, and the last checkpoint."""

    def __init__(
        self,
        executor: Executor,
        stage: Stage,
        order: RowOrder,
        callbacks: Callback,
        store: EngineStore | None,
        checkpoint_seconds: float,
        checkpoint_steps: int | None,
        report_steps: int | None,
        validate_steps: int | None,
    ) -> None:
        self.executor, self.stage, self.order = executor, stage, order
        self.callbacks, self.store = callbacks, store
        self._checkpoint_seconds, self._checkpoint_steps = checkpoint_seconds, checkpoint_steps
        self._validate_steps = validate_steps
        # A report or a validation is due after every multiple of these numbers of steps.
        self._stop_intervals = [steps for steps in (report_steps, validate_steps) if steps]
        # Position and state change in one assignment, so that they match even after an interrupt.
        self.at: tuple[Place, Any] = (Place(), None)
        self.done, self.history = False, list[dict[str, Any]]()
        self._restored = False
        self._pending = False  # True after a resume at a position whose report was not written
        self._saved, self._saved_at = Place(), time.perf_counter()
        self._since, self._rows, self._bytes = self._saved_at, 0, 0
        self._validation: Stage | None = None
        if "validation" in stage.datasets:
            self._validation = replace(
                stage,
                name=f"{stage.name}_validation",
                work=ValidationPass(cast(ValidatedLearner, stage.work)),
                datasets={"validation": stage.datasets["validation"]},
                grids={"validation": stage.grids["validation"]},
            )

    # -- resume ----------------------------------------------------------------------------------------------

    def restore(self, state: object) -> Any:
        """Return the state of the last checkpoint, or the given state if there is none."""
        store, name, order = self.store, self.stage.name, self.order
        if store is None or (found := store.latest_state(name)) is None:
            return state
        total, stored, messages = found
        report_unreadable(self.callbacks, messages)
        if stored["order"] != order:
            raise RunError(
                f"{store.state_path(name, total)} was made with another order of rows ({stored['order']}, "
                f"now {order}): resume with the same settings, or choose another run_dir"
            )
        place: Place = stored["place"]
        self.at, self._saved, self._restored = (place, None), place, True
        self.history = store.load_history(name, total, key="steps")
        is_recorded = bool(self.history) and self.history[-1]["steps"] == total
        if place.step == 0 and place.epoch > 0 and not is_recorded:
            # The fit was interrupted after the end of an epoch and before its record was written.
            self._append(self.stage.online.summary(stored["state"]), place.epoch)
        elif place.step > 0:
            due = self._is_validation_due(place)
            self._pending = due or place.step == order.n_steps or (self._is_stop(place) and not is_recorded)
            if self._pending and is_recorded:
                self.history = store.load_history(name, total - 1, key="steps")
        where = {"pass": place.epoch, "step": place.step, "history": list(self.history)}
        self.callbacks.on_event({"event": "resumed", "stage": name, **where})
        return stored["state"]

    def begin(self, run: OnlineSteps, state: object) -> None:
        """Give the first state of the fit to ``run``, which runs the minibatch steps."""
        self.run, place = run, self.place
        self.at = (place, run.put(place, state, is_written=self._restored))
        # Call `is_done` only at positions where an uninterrupted fit calls `is_done` too.
        if not self._pending and (place.step == 0 or place.validated):
            self.done = self.stage.online.is_done(state)
        self._since = self._saved_at = time.perf_counter()

    @property
    def place(self) -> Place:
        """Position of the fit: epoch, finished steps of the epoch, and whether it was validated there."""
        return self.at[0]

    # -- steps -----------------------------------------------------------------------------------------------

    def _is_stop(self, place: Place) -> bool:
        """Return True if a report, a validation or the end of an epoch is due at this position."""
        return place.step == self.order.n_steps or any(place.step % n == 0 for n in self._stop_intervals)

    def _is_validation_due(self, place: Place) -> bool:
        if self._validation is None or place.validated:
            return False
        interval = self._validate_steps
        return place.step == self.order.n_steps or bool(interval and place.step % interval == 0)

    def next_stop(self) -> int:
        """Return the step of the epoch at which the next report, validation or end of the epoch is due."""
        step = self.place.step
        if self._pending:
            return step
        return min([self.order.n_steps] + [(step // n + 1) * n for n in self._stop_intervals])

    def advance(self, stop: int) -> None:
        """Run the minibatch steps of the current epoch up to the step ``stop``."""
        if self.place.step >= stop:
            return
        order, epoch = self.order, self.place.epoch
        progress = Progress(self.callbacks, self.stage.name, epoch + 1)
        before = min(self.place.step * order.batch_rows, order.n_rows)
        for done in self.run.steps(self.place, stop, self.at[1]):
            self.at = (Place(epoch, done.step), done.state)
            rows = min(done.step * order.batch_rows, order.n_rows)
            self._rows, self._bytes, before = self._rows + rows - before, self._bytes + done.bytes_read, rows
            progress(rows, order.n_rows)
            if self._is_checkpoint_due():
                self.checkpoint()

    def end_part(self) -> bool:
        """Validate, end the epoch or report, whichever is due; return True if a callback stops the fit."""
        epoch, ended = self.place.epoch, self.place.step == self.order.n_steps
        if self._is_validation_due(self.place):
            self._validate()
        if ended:
            following = Place(epoch + 1)
            self.at = (following, self.run.end_epoch(following, self.at[1]))
        self._pending = False
        summary, done = self.run.summary(*self.at)
        self.done = done and (ended or self.place.validated)
        record = self._append(summary, epoch + 1)
        if self.done or self._is_checkpoint_due():
            self.checkpoint()
        stop = self.callbacks.on_pass_end(record) if ended else self.callbacks.on_report(record)
        if stop:
            self.callbacks.on_event(
                {"event": "stopped_by_callback", "stage": self.stage.name, "pass": epoch + 1}
            )
        return bool(stop)

    def _validate(self) -> None:
        stage, total = self._validation, self.place.total(self.order)
        assert stage is not None
        handle = self.executor.put_state(stage, total, self.run.get(*self.at))
        progress = Progress(self.callbacks, stage.name, self.place.epoch + 1)
        result = self.executor.step(stage, total, handle, progress)
        state = self.executor.get_state(stage, total + 1, result.state)
        place = replace(self.place, validated=True)
        self.at = (place, self.run.put(place, state))
        self._bytes += result.bytes_read

    def _append(self, summary: dict[str, Any], epoch: int) -> dict[str, Any]:
        now = time.perf_counter()
        record = make_record(self.stage, summary, now - self._since, self._rows, self._bytes)
        record |= {"pass": epoch, "steps": self.place.total(self.order)}
        record["rows_seen"] = self.place.rows_seen(self.order)
        self.history.append(record)
        if self.store is not None:
            self.store.append_history(self.stage.name, record)
        self._since, self._rows, self._bytes = now, 0, 0
        return record

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _is_checkpoint_due(self) -> bool:
        if self.store is None:
            return False
        steps = self._checkpoint_steps
        if steps and self.place.total(self.order) - self._saved.total(self.order) >= steps:
            return True
        return time.perf_counter() - self._saved_at >= self._checkpoint_seconds

    def checkpoint(self) -> None:
        """Store the current state, unless the last checkpoint has it."""
        place, handle = self.at
        if self.store is None or self._saved == place:
            return

        def tree() -> dict[str, Any]:
            return {"state": self.run.get(place, handle), "place": place, "order": self.order}

        total, is_written = place.total(self.order), self.executor.keeps_states
        where = {"pass": place.epoch, "step": place.step}
        write_checkpoint(
            self.store, self.stage.name, total, tree, self.callbacks, where, is_written=is_written
        )
        self._saved, self._saved_at = place, time.perf_counter()
