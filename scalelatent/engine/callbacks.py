"""Callbacks of a fit: progress, logs and early stopping."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from scalelatent.errors import warn_user
from scalelatent.kernels.compile_observers import observe_compilation


class Callback:
    """Base class of all callbacks; override the methods that you need.

    The methods run in the process that called ``fit``.

    Examples
    --------
    >>> class Stop(Callback):
    ...     "Stop as soon as the training error is under 1 %."
    ...     def on_pass_end(self, record):
    ...         return record["train_error"] < 0.01
    """

    keeps_run_folder = False
    """True if this callback writes the run folder; a fit then adds no other such callback."""

    tells_cluster = False
    """True if this callback sends the run to the dashboard; a fit then adds no other such callback."""

    shows_progress = False
    """True if this callback displays progress; a fit then opens no other display."""

    def on_run_start(self, info: dict[str, Any]) -> None:
        """Handle the start of a job's fit; only callbacks that the job file names receive this call.

        ``info``: run (the run folder), id, name, kind, values (every value of the job by its
        ``"section.key"``), resumed.
        """

    def on_fit_start(self, info: dict[str, Any]) -> None:
        """Handle the start of the fit, before the first pass.

        ``info``: rows, features, members, max_iter, seed, resumed_pass (or None), stage.
        """

    def on_stage(self, info: dict[str, Any]) -> None:
        """Handle the start of a stage of the fit.

        ``info``: stage (for example ``"moments"``, ``"projection"``, ``"em"``), rows; for a layer of a
        network also layer (its number), layers (their number) and k (number of centroids).
        """

    def on_progress(self, info: dict[str, Any]) -> None:
        """Handle the progress of a pass.

        ``info``: stage, pass, rows_done, rows_total, rows_per_s; for a layer also the keys of
        :meth:`on_stage`.
        """

    def on_wait(self) -> None:
        """Run a check at least twice per second while the executor waits or computes.

        An error that this method raises ends the fit; finished passes are kept.
        """

    def on_pass_end(self, record: dict[str, Any]) -> bool | None:
        """Handle the end of a pass; return True to stop the fit, which then ends with the best model so far.

        ``record``: pass, stage, objective, train_error, validation_error, seconds, rows, bytes_read, …
        """
        return None

    def on_report(self, record: dict[str, Any]) -> bool | None:
        """Handle a report within an epoch of an online fit; return True to stop the fit.

        Reports come every ``report_steps`` steps and after each validation. ``record`` has the keys of
        :meth:`on_pass_end`.
        """
        return None

    def on_checkpoint(self, info: dict[str, Any]) -> None:
        """Handle a stored checkpoint. ``info``: pass, path, seconds; in an online fit also step."""

    def on_event(self, info: dict[str, Any]) -> None:
        """Handle an event of the log.

        ``info``: event (its name) and further keys; ``"resumed"`` has history, the records of the finished
        passes. ``compiling_kernels`` and ``kernel_compiled`` may be reported from a computing thread.
        """

    def on_fit_end(self, info: dict[str, Any]) -> None:
        """Handle the end of the fit. ``info``: passes, pass_seconds (seconds of all passes)."""

    def on_run_end(self, info: dict[str, Any]) -> None:
        """Handle the end of a job's run; only callbacks that the job file names receive this call.

        ``info``: run, state (``"done"``, ``"failed"``, ``"cancelled"``, or ``"running"`` if the cluster was
        lost), error, scores, model, report (path or URL, or None).
        """


def _call_each(hook: str) -> Any:
    """Return a method that calls ``hook`` of all callbacks, and returns True if one of them returns True."""

    def call(self: Callbacks, *infos: dict[str, Any]) -> bool:
        return any(self._call_all(hook, *infos))

    return call


class Callbacks(Callback):
    """Callback that passes each call on to several callbacks."""

    def __init__(self, callbacks: Iterable[Callback] | Callback = ()) -> None:
        self.callbacks: Sequence[Callback] = (
            list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
        )
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"callbacks: {callback!r} is not a scalelatent Callback; give an object whose class is "
                    "derived from scalelatent.Callback, or verbose=True to see the progress"
                )
            self.keeps_run_folder |= callback.keeps_run_folder
            self.tells_cluster |= callback.tells_cluster
            self.shows_progress |= callback.shows_progress

    def _call_all(self, hook: str, *infos: dict[str, Any]) -> list[object]:
        """Call one method of all callbacks; return their results."""
        return [getattr(callback, hook)(*infos) for callback in self.callbacks]

    on_run_start = _call_each("on_run_start")
    on_fit_start = _call_each("on_fit_start")
    on_stage = _call_each("on_stage")
    on_progress = _call_each("on_progress")
    on_wait = _call_each("on_wait")
    on_pass_end = _call_each("on_pass_end")
    on_report = _call_each("on_report")
    on_checkpoint = _call_each("on_checkpoint")
    on_event = _call_each("on_event")
    on_fit_end = _call_each("on_fit_end")
    on_run_end = _call_each("on_run_end")


class Unfailing(Callbacks):
    """Several callbacks whose errors do not end a fit; the first error of each callback becomes a warning."""

    def __init__(self, callbacks: Iterable[Callback] | Callback = ()) -> None:
        super().__init__(callbacks)
        self._warned: set[int] = set()

    def _call_all(self, hook: str, *infos: dict[str, Any]) -> list[object]:
        results = []
        for index, callback in enumerate(self.callbacks):
            try:
                results.append(getattr(callback, hook)(*infos))
            except Exception as error:  # noqa: BLE001  another package's callback may raise anything
                if index not in self._warned:
                    self._warned.add(index)
                    warn_user(
                        f"callback {type(callback).__name__}: {type(error).__name__}: {error}; the fit "
                        "continues, and further errors of this callback are not reported"
                    )
        return results


COMPILING = "compiling kernels (once for this machine)"


def kernel_event(kernel: str, seconds: float | None, **where: object) -> dict[str, Any]:
    """Return the event of a kernel's compilation: its start (``seconds`` is None) or its end."""
    if seconds is None:
        return {"event": "compiling_kernels", "kernel": kernel, **where, "message": COMPILING}
    return {"event": "kernel_compiled", "kernel": kernel, **where, "seconds": round(seconds, 1)}


@contextmanager
def report_compilations(callbacks: Callback) -> Iterator[None]:
    """Notify callbacks of kernels compiled during the ``with`` statement, from the compiling thread."""
    with observe_compilation(lambda kernel, seconds: callbacks.on_event(kernel_event(kernel, seconds))):
        yield


def in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    # `get_ipython` is missing while another thread, such as an MLflow client, is importing IPython.
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and getattr(get_ipython(), "kernel", None) is not None
