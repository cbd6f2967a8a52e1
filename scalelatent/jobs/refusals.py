"""scikit-learn refuses a parameter by a bare ValueError from ``fit``; a job says it as its own error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scalelatent.errors import JobError, ScalelatentError

__all__ = ["as_job_error"]


@contextmanager
def as_job_error(unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Raise a TypeError or ValueError as a `JobError` about ``[model]``.

    Parameters
    ----------
    unless : callable
        True if work had begun: then it is no refusal but a bug, to be shown in full.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, ScalelatentError) or unless():
            raise
        raise JobError(f"[model] {error}") from error
