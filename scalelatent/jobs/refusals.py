"""Errors of libraries and the system as errors of jobs: a refused parameter, a full disk."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scalelatent.errors import JobError, RunError, ScalelatentError
from scalelatent.storage.disk import Location

__all__ = ["as_job_error", "tell_os_error"]


@contextmanager
def as_job_error(unless: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Raise a TypeError or ValueError as a `JobError` about ``[model]``."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, ScalelatentError) or unless():
            raise
        raise JobError(f"[model] {error}") from error


def tell_os_error(error: OSError, place: Location, go_on: str) -> Exception:
    """Say a full disk in words, and how to go on; other errors of the system stay what they are."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    free = place.free_bytes() or 0
    return RunError(
        f"no space left while writing {error.filename or place.url} ({free / 2**20:,.0f} MiB free); make "
        f"room, then {go_on}"
    )
