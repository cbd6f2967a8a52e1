"""The errors scalelatent raises on purpose.

Every message names the thing, the place, the limit and the next step, so the command line prints it as
it is, without a traceback. Anything that is not a `ScalelatentError` is a bug.

This module imports nothing of the package, so that every layer may import it.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable

__all__ = [
    "DataError",
    "DivergenceError",
    "JobError",
    "PlanError",
    "RunError",
    "ScalelatentError",
    "ShardError",
    "StoreError",
    "nearest",
    "warn_user",
]


class ScalelatentError(Exception):
    """Base of all errors raised on purpose; catch this to catch them all."""


class DataError(ScalelatentError, ValueError):
    """Rows, labels or a dataset on disk are not what they should be."""


class ShardError(DataError):
    """A shard file is missing, or no longer holds what was written.

    Whether a place can be reached at all is another matter: that is a `StoreError`, or a plain `DataError`.

    Parameters
    ----------
    message : str
    file : str
        Path or address of the shard.
    start, stop : int
        Its rows, counted from the first row at `url`.
    url : str or None
        The dataset; None as long as only its reader knows of it.

    Examples
    --------
    >>> error = ShardError("x/c/3 is damaged", "x/c/3", 0, 100)
    >>> moved = error.moved(500, "rows.zarr")
    >>> str(moved), moved.start, moved.stop, moved.url
    ('x/c/3 is damaged', 500, 600, 'rows.zarr')
    """

    def __init__(
        self, message: str, file: str = "", start: int = 0, stop: int = 0, url: str | None = None
    ) -> None:
        # All of it in `args`, so that it comes whole from another process.
        super().__init__(message, file, start, stop, url)
        self.file, self.start, self.stop, self.url = file, start, stop, url

    def __str__(self) -> str:
        return str(self.args[0])

    def moved(self, rows: int = 0, url: str | None = None) -> ShardError:
        """The same of a dataset in which these rows come later, or whose address is known."""
        return ShardError(str(self), self.file, self.start + rows, self.stop + rows, self.url or url)


class StoreError(DataError, OSError):
    """An object store cannot be reached, refuses, or its address is wrong; also an `OSError`."""


class JobError(ScalelatentError, ValueError):
    """A job file, a setting or a run folder is not what it should be."""


class PlanError(ScalelatentError, ValueError):
    """A job cannot fit into the memory, disk or limits it was given; refused before any work."""


class RunError(ScalelatentError, RuntimeError):
    """Work that had begun could not go on; what was done is kept, and the message says how to go on."""


class DeviceMemoryError(RunError):
    """A card has too little free memory; the message names the card, the request and what to set."""


class DeviceLostError(RunError):
    """A card refuses all further work of this process, as after a crashed kernel or an Xid error."""


class DivergenceError(RunError, FloatingPointError):
    """Learning has diverged: its settings are to blame, not the rows."""


class LongFitWarning(UserWarning):
    """A fit that begins now would take over an hour; the message says what would shorten it."""


# scikit-learn wraps methods of estimators.
_NOT_THE_USER = (f"{__package__}.", "sklearn.")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line outside the package that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_NOT_THE_USER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


# A name that goes warns for so many minor releases first.
DEPRECATED_RELEASES = 2


def warn_deprecated(what: str, instead: str, *, since: str) -> None:
    """Warn of something public that goes two minor releases after it is first warned of."""
    major, minor = since.split(".")
    gone = f"{major}.{int(minor) + DEPRECATED_RELEASES}"
    warn_user(f"{what} is deprecated since {since} and goes in {gone}: {instead}", FutureWarning)


def nearest(word: str, words: Iterable[str]) -> str:
    """A half sentence that names the nearest of ``words``, or all of them where none is near."""
    known = sorted(words)
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "known are: " + ", ".join(known)
