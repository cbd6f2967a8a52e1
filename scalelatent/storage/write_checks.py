"""Checks before writing (format, output onto its input, free space) and cleaning up after failures."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator

from scalelatent.errors import DataError

from .disk import Location, locate

_FORMATS = {"scalelatent-dataset": "a dataset", "scalelatent-model": "a saved model"}


def format_of(location: Location) -> str | None:
    """Return the attribute 'format' of the zarr group at a location, or None."""
    raw = location.read("zarr.json") or b"{}"
    try:
        found = json.loads(raw).get("attributes", {}).get("format")
    except (ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def describe_contents(location: Location, wanted: str) -> str:
    """Return the rest of an error message "PATH …" about a location that has other content than `wanted`."""
    path, names = location.local_path(""), location.keys("")
    if path is not None and os.path.isfile(path):
        found = "a file"
    elif not names:
        if path is None or not os.path.isdir(path):
            return "does not exist"
        found = "an empty folder"
    elif {"job.json", "state.json"} <= {*names}:
        found = "a run folder"
    elif "zarr.json" in names:
        found = _FORMATS.get(format_of(location) or "", "a zarr group or array")
    else:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        found = f"a folder with {', '.join(names[:3])}{more}"
    return f"is {found}, not {wanted}"


def contains(location: Location, other: Location) -> bool:
    """Return True if `other` is `location` or is inside it, so that clearing `location` deletes `other`."""
    outer, inner = _real_path(location), _real_path(other)
    return inner == outer or inner.startswith(f"{outer.rstrip('/')}/")


def check_not_own_input(
    url: str | os.PathLike[str] | Location, source: str | os.PathLike[str] | Location | None
) -> None:
    """Raise `DataError` if an output would replace its own input, also under another name."""
    if source is None:
        return
    location, read = locate(url), locate(source)
    if contains(location, read):
        raise DataError(
            f"{read.url}: a dataset cannot replace itself (the output is {location.url}); choose "
            "another output"
        )


def _real_path(location: Location) -> str:
    path = location.local_path("")
    return location.url if path is None else os.path.realpath(path)


def check_space(location: Location, content: str, nbytes: int, least: int) -> None:
    """Raise `DataError` if the location has no space for `least` bytes; write and remove nothing."""
    free, path = location.free_bytes(), location.local_path("")
    if free is None or least <= free:
        return
    if path is not None:
        free += sum(
            os.lstat(os.path.join(at, name)).st_size for at, _, names in os.walk(path) for name in names
        )
    if least > free:
        packed = "" if least == nbytes else f" (at least {least / 1e9:,.1f} GB after compression)"
        raise DataError(
            f"{location.url}: {content} are {nbytes / 1e9:,.1f} GB{packed}, but only {free / 1e9:,.1f} GB "
            "are free there; choose another place, free some space, or check the number of rows"
        )


@contextlib.contextmanager
def clear_on_failure(location: Location) -> Iterator[None]:
    """Clear a location after any error, including Ctrl-C, so that no partial output remains."""
    try:
        yield
    except BaseException as error:
        clear_after(error, location)
        raise


@contextlib.contextmanager
def scratch(location: Location) -> Iterator[Location]:
    """Yield a location that is cleared at the end, also after an error."""
    with clear_on_failure(location):
        yield location
    with contextlib.suppress(OSError):  # The work has succeeded, so temporary files that remain do no harm.
        location.clear(whole=False)


def clear_after(error: BaseException, location: Location) -> None:
    """Clear a location after an error; if clearing fails too, add a note to the error."""
    try:
        location.clear(whole=False)
    except OSError as second:
        error.add_note(f"The partial output could not be removed ({second}): remove {location.url} yourself")


@contextlib.contextmanager
def explain_os_errors(location: Location, doing: str, next_step: str = "try again") -> Iterator[None]:
    """Turn an `OSError` into a `DataError` that explains the cause and the next steps, last `next_step`."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        free = location.free_bytes()
        room = "" if free is None else f" ({free / 1e6:,.0f} MB free)"
        reason = f"the disk is full or a quota is reached{room}" if full else f"{error.strerror or error}"
        step = "free some space" if full else "correct this problem"
        raise DataError(
            f"dataset {location.url}: {doing} failed: {reason}; {step}, then {next_step}"
        ) from error
