"""Errors and warnings of scalelatent.

Every message names the object, the place, the limit and the next step, so the command line prints it without
a traceback. Every other exception is a bug.

This module imports no other module of the package, so that every layer may import it.
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
    """Base class of all errors of scalelatent."""


class DataError(ScalelatentError, ValueError):
    """Rows, labels or a stored dataset are invalid."""


class ShardError(DataError):
    """A shard file is missing or damaged.

    A store that cannot be reached raises `StoreError` instead.

    Parameters
    ----------
    message : str
        Text of the error.
    file : str
        Path or URL of the shard.
    start, stop : int
        Rows of the shard, counted from the first row of the dataset at `url`.
    url : str or None
        URL of the dataset; None if the reader does not know it.

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
        # Pass every argument on, because pickling between processes restores the error from `args`.
        super().__init__(message, file, start, stop, url)
        self.file, self.start, self.stop, self.url = file, start, stop, url

    def __str__(self) -> str:
        return str(self.args[0])

    def moved(self, rows: int = 0, url: str | None = None) -> ShardError:
        """Return this error with ``rows`` added to its row numbers, and with ``url`` if it has no URL."""
        return ShardError(str(self), self.file, self.start + rows, self.stop + rows, self.url or url)


class StoreError(DataError, OSError):
    """An object store cannot be reached or refuses access, or its URL is wrong; also an `OSError`."""


class JobError(ScalelatentError, ValueError):
    """A job file, a setting or a run folder is invalid."""


class PlanError(ScalelatentError, ValueError):
    """A job needs more memory or disk than it may use; it is refused before any work."""


class RunError(ScalelatentError, RuntimeError):
    """Work that had started failed; completed work is kept, and the message says how to continue."""


class DeviceMemoryError(RunError):
    """A GPU has too little free memory; the message names the GPU, the request and the setting to change."""


class DeviceLostError(RunError):
    """A GPU refuses all further work of this process, for example after a crashed kernel or an Xid error."""


class DivergenceError(RunError, FloatingPointError):
    """The fit has diverged because of its settings, not because of the rows."""


class LongFitWarning(UserWarning):
    """The fit would take more than an hour; the message says how to shorten it."""


# Start of the names of modules whose lines a warning does not show; scikit-learn wraps our methods.
_INTERNAL_PREFIXES = (f"{__package__}.", "sklearn.")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's code that called the package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_INTERNAL_PREFIXES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


# Minor releases between the first warning of a deprecated name and its removal.
DEPRECATED_RELEASES = 2


def warn_deprecated(feature: str, instead: str, *, since: str) -> None:
    """Warn that a public name is deprecated; it is removed two minor releases after ``since``."""
    major, minor = since.split(".")
    removed = f"{major}.{int(minor) + DEPRECATED_RELEASES}"
    warn_user(
        f"{feature} is deprecated since {since} and will be removed in {removed}: {instead}", FutureWarning
    )


def nearest(word: str, words: Iterable[str]) -> str:
    """Return text that suggests the word nearest to ``word``, or lists all words if none is near."""
    known = sorted(words)
    close = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return "valid are: " + ", ".join(known)
