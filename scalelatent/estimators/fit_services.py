"""Optional services of a fit called from Python: run folder, progress display, interrupt messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

from scalelatent._registry import find_registered
from scalelatent.engine.callbacks import Callback, Callbacks, in_notebook

if TYPE_CHECKING:
    from pathlib import Path

    from distributed import Client
    from sklearn.base import BaseEstimator

    from scalelatent.data import Dataset

# True during a fit. A fit that another fit calls (the refit of a search) gets no display and no recorder.
_IS_IN_FIT: ContextVar[bool] = ContextVar("scalelatent_within_a_fit", default=False)


@dataclass(frozen=True)
class FitCall:
    """Arguments of one call of ``fit`` or of a similar method."""

    model: BaseEstimator
    rows: dict[str, Dataset]
    run_dir: str | Path | None = None
    resume: bool = False
    callbacks: Callback | Sequence[Callback] = ()
    engine: Mapping[str, Any] = field(default_factory=dict)
    verbose: bool | None = None
    client: Client | None = None


class PassRecorder(Callback):
    """Callback that keeps the records of the passes and the current layer, for an interrupted fit."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.layer = ""

    def on_stage(self, info: dict[str, Any]) -> None:
        """Store the current layer as text, such as "in layer 2 of 3"; "" for a model without layers."""
        self.layer = f"in layer {info['layer']} of {info['layers']}" if info.get("layer") else ""

    def on_pass_end(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    on_report = on_pass_end

    def on_event(self, info: dict[str, Any]) -> None:
        """Add the records of passes that were done before a resume."""
        if info.get("event") == "resumed":
            self.records += info.get("history") or ()


@contextmanager
def restored_on_failure(model: BaseEstimator) -> Iterator[None]:
    """Run a fit; if it raises, restore every attribute that the last successful fit has set on the model.

    An interrupted first fit leaves the records of its passes in ``history_``.
    """
    before = _get_fitted_attributes(model)
    try:
        yield
    except BaseException as error:
        records = vars(model).get("history_")
        for name in _get_fitted_attributes(model):
            del vars(model)[name]
        vars(model).update(before)
        if isinstance(error, KeyboardInterrupt) and records and not _is_fitted(model):
            vars(model)["history_"] = records
        raise


def _get_fitted_attributes(model: BaseEstimator) -> dict[str, Any]:
    """Return all attributes of a model except its parameters, by name."""
    return {name: value for name, value in vars(model).items() if name[0] == "_" or name[-1] == "_"}


def _is_fitted(model: BaseEstimator) -> bool:
    try:
        check_is_fitted(model)
    except NotFittedError:
        return False
    return True


@contextmanager
def fit_callbacks(call: FitCall) -> Iterator[Callbacks]:
    """Yield the callbacks of a fit: the given callbacks, a progress display, the run folder recorder."""
    given = Callbacks(call.callbacks)
    if _IS_IN_FIT.get():
        yield given
        return
    passes, was_fitted = PassRecorder(), _is_fitted(call.model)
    before: list[Callback] = [passes]  # first, to record a pass before another callback raises an error
    with ExitStack() as stack:
        # By default only notebooks show a display.
        shows_display = in_notebook() if call.verbose is None else call.verbose
        if shows_display and not given.shows_progress:
            from scalelatent.monitor.progress import ProgressDisplay  # rich loads slowly

            before.append(stack.enter_context(ProgressDisplay()))
        if call.run_dir is not None and not given.keeps_run_folder:
            before.append(stack.enter_context(find_registered("fit recorder")(call)))
        inside = _IS_IN_FIT.set(True)
        try:
            yield Callbacks([*before, *given.callbacks])
        except KeyboardInterrupt as stop:
            if passes.records and hasattr(call.model, "_kind"):
                # Do not set `n_iter_`, because fitted parameters are missing or are from an earlier fit.
                call.model.history_ = passes.records
            if not given.keeps_run_folder:  # a recorder of the run folder adds the advice itself
                _add_resume_advice(stop, passes, call.run_dir, was_fitted)
            raise
        finally:
            _IS_IN_FIT.reset(inside)


def _add_resume_advice(
    stop: KeyboardInterrupt, passes: PassRecorder, run_dir: str | Path | None, was_fitted: bool
) -> None:
    """Add a text to the exception that names the results that are kept and explains how to resume."""
    records = passes.records
    done = passes.layer or "before its first pass ended"
    if records:
        done = f"after pass {records[-1]['pass']}"
    if run_dir is not None:
        rest = f"continue with the same fit(..., run_dir={str(run_dir)!r}, resume=True)"
    else:
        rest = "nothing was kept"
        if was_fitted:
            rest = "the model of the previous fit is kept"
        elif records:
            rest = "history_ has the records of the completed passes, but no model was kept"
        rest += ": fit(..., run_dir=FOLDER) keeps checkpoints to resume from"
    text = f"the fit was stopped {done}; {rest}"
    if stop.args:
        stop.add_note(text)
    else:
        stop.args = (text,)
