"""The errors scalelatent raises on purpose.

Every message names the thing, the place, the limit and the next step, so the command line prints it as
it is, without a traceback. Anything that is not a `ScalelatentError` is a bug.

This module imports nothing, so that every layer may import it.
"""

from __future__ import annotations

__all__ = ["DataError", "JobError", "PlanError", "RunError", "ScalelatentError", "StoreError"]


class ScalelatentError(Exception):
    """Base of all errors raised on purpose; catch this to catch them all.

    Examples
    --------
    >>> import scalelatent.errors as errors
    >>> issubclass(errors.DataError, errors.ScalelatentError)
    True
    """


class DataError(ScalelatentError, ValueError):
    """Rows, labels or a dataset on disk are not what they should be."""


class StoreError(DataError, OSError):
    """A place (mostly an object store) cannot be reached, refuses, or is named by an address that cannot be.

    Also an `OSError`, so that whoever writes to a disk and tells of its errors tells of this one too.

    Examples
    --------
    >>> issubclass(StoreError, OSError), str(StoreError("s3://bucket: no"))
    (True, 's3://bucket: no')
    """


class JobError(ScalelatentError, ValueError):
    """A job file, a setting or a run folder is not what it should be."""


class PlanError(ScalelatentError, ValueError):
    """A job cannot fit into the memory, disk or limits it was given; refused before any work."""


class RunError(ScalelatentError, RuntimeError):
    """Work that had begun could not go on; what was done is kept, and the message says how to go on."""
