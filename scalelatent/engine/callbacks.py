"""Hooks into a fit: progress, logs, early stops of your own."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from scalelatent.errors import warn_user
from scalelatent.kernels.observers import observed


class Callback:
    """Base of all callbacks: override what you need. Hooks run in the process that called ``fit``, between
    spans.

    Examples
    --------
    >>> class Stop(Callback):
    ...     "Stop as soon as the training error is under 1 %."
    ...     def on_pass_end(self, record):
    ...         return record["train_error"] < 0.01
    """

    keeps_run_folder = False
    """Whether it writes the run folder: then no fit writes another record there."""

    tells_cluster = False
    """Whether it tells a scheduler's page of the run: then no other callback does."""

    shows_progress = False
    """Whether it is a display: then no fit opens another one."""

    def on_run_start(self, info: dict[str, Any]) -> None:
        """Before a job's fit, of callbacks that the job names. ``info``: run (the run folder), id, name,
        kind, values (every value of the job by its ``"section.key"``), resumed.
        """

    def on_fit_start(self, info: dict[str, Any]) -> None:
        """Before the first pass. ``info``: rows, features, members, max_iter, seed, resumed_pass (or None),
        stage.
        """

    def on_stage(self, info: dict[str, Any]) -> None:
        """A part of the fit begins. ``info``: stage (for example ``"moments"``, ``"projection"``, ``"em"``),
        rows; of a network's layer also layer (its number), layers (how many) and k (centroids).
        """

    def on_progress(self, info: dict[str, Any]) -> None:
        """Some rows are done. ``info``: stage, pass, rows_done, rows_total, rows_per_s; of a layer as
        :meth:`on_stage`.
        """

    def on_wait(self) -> None:
        """Called at least twice a second while the executor waits or computes; what it raises ends the fit,
        and what is complete is kept.
        """

    def on_pass_end(self, record: dict[str, Any]) -> bool | None:
        """After each pass. ``record``: pass, stage, objective, train_error, validation_error, seconds, rows,
        bytes_read, …

        Return True to stop: the fit ends normally with the best model so far.
        """
        return None

    def on_report(self, record: dict[str, Any]) -> bool | None:
        """In mid-epoch of an online fit, every ``report_steps`` steps and after validations: a record like
        that of :meth:`on_pass_end`. Return True to stop.
        """
        return None

    def on_checkpoint(self, info: dict[str, Any]) -> None:
        """A checkpoint is safe on disk. ``info``: pass, path, seconds; online also step."""

    def on_event(self, info: dict[str, Any]) -> None:
        """Something worth a line in the log. ``info``: event, and what belongs to it (of ``"resumed"``
        history: the records of the passes that were done).

        ``compiling_kernels`` and ``kernel_compiled`` may come from a thread that computes, since no other
        thread knows of it before it is over.
        """

    def on_fit_end(self, info: dict[str, Any]) -> None:
        """After the last pass. ``info``: passes, pass_seconds (their sum)."""

    def on_run_end(self, info: dict[str, Any]) -> None:
        """After a job's run, of callbacks that the job names. ``info``: run, state (``"done"``,
        ``"failed"``, ``"cancelled"``, or ``"running"`` where the cluster was lost), error, scores, model,
        report (places, or None).
        """


class Callbacks(Callback):
    """Several callbacks as one."""

    def __init__(self, callbacks: Iterable[Callback] | Callback = ()) -> None:
        self.callbacks: Sequence[Callback] = (
            [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
        )
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                raise TypeError(
                    f"callbacks: {callback!r} is not a scalelatent Callback; derive its class from "
                    "scalelatent.Callback"
                )
            self.keeps_run_folder |= callback.keeps_run_folder
            self.tells_cluster |= callback.tells_cluster
            self.shows_progress |= callback.shows_progress

    def _tell(self, hook: str, *given: dict[str, Any]) -> list[object]:
        """What all answer."""
        return [getattr(callback, hook)(*given) for callback in self.callbacks]

    def on_run_start(self, info: dict[str, Any]) -> None:
        self._tell("on_run_start", info)

    def on_fit_start(self, info: dict[str, Any]) -> None:
        self._tell("on_fit_start", info)

    def on_stage(self, info: dict[str, Any]) -> None:
        self._tell("on_stage", info)

    def on_progress(self, info: dict[str, Any]) -> None:
        self._tell("on_progress", info)

    def on_wait(self) -> None:
        self._tell("on_wait")

    def on_pass_end(self, record: dict[str, Any]) -> bool:
        """Pass on; all are asked, any may stop."""
        return any(self._tell("on_pass_end", record))

    def on_report(self, record: dict[str, Any]) -> bool:
        return any(self._tell("on_report", record))

    def on_checkpoint(self, info: dict[str, Any]) -> None:
        self._tell("on_checkpoint", info)

    def on_event(self, info: dict[str, Any]) -> None:
        self._tell("on_event", info)

    def on_fit_end(self, info: dict[str, Any]) -> None:
        self._tell("on_fit_end", info)

    def on_run_end(self, info: dict[str, Any]) -> None:
        self._tell("on_run_end", info)


class Unfailing(Callbacks):
    """Several callbacks that cannot end a fit: what one raises is warned of once."""

    def __init__(self, callbacks: Iterable[Callback] | Callback = ()) -> None:
        super().__init__(callbacks)
        self._warned: set[int] = set()

    def _tell(self, hook: str, *given: dict[str, Any]) -> list[object]:
        answers = []
        for number, callback in enumerate(self.callbacks):
            try:
                answers.append(getattr(callback, hook)(*given))
            except Exception as error:  # noqa: BLE001  whatever another package raises, the fit goes on
                if number not in self._warned:
                    self._warned.add(number)
                    warn_user(
                        f"callback {type(callback).__name__}: {type(error).__name__}: {error}; the fit goes "
                        "on, and further errors of this callback are not told"
                    )
        return answers


COMPILING = "compiling kernels (once for this machine)"


def kernel_event(kernel: str, seconds: float | None, **where: object) -> dict[str, Any]:
    """The event that tells of a kernel that is compiled, before (no seconds) or after."""
    if seconds is None:
        return {"event": "compiling_kernels", "kernel": kernel, **where, "message": COMPILING}
    return {"event": "kernel_compiled", "kernel": kernel, **where, "seconds": round(seconds, 1)}


@contextmanager
def telling_of_kernels(callbacks: Callback) -> Iterator[None]:
    """Tell callbacks of kernels that this process compiles, by the thread that does so."""
    with observed(lambda kernel, seconds: callbacks.on_event(kernel_event(kernel, seconds))):
        yield


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    # Without it where another thread imports IPython just now, as clients of MLflow do: then this is none.
    ask = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return ask is not None and getattr(ask(), "kernel", None) is not None
