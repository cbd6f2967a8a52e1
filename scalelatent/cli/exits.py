"""Exit codes of commands, and errors as one line.

=====  ====================================================================================
code   meaning
=====  ====================================================================================
0      success
1      a watched job has failed (`attach`), or a check has failed (`doctor`)
2      the command refused its arguments, job file or data, or was stopped by an error of disk or run
70     an unexpected error; the line names the file with its traceback
130    stopped by Ctrl-C, or a watched job was cancelled
141    the reader of the output has ended (``scalelatent logs RUN | head``)
=====  ====================================================================================

With ``--json`` the last line of standard error is an object: ``error`` (the line), ``kind`` (class of the
error), ``exit_code``, ``hint`` (the next step, or null) and ``traceback`` (its file, or null). Standard
output stays empty, so that an error is not mistaken for a result.
"""

from __future__ import annotations

import errno
import json
import os
import select
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from scalelatent.errors import ScalelatentError

DEBUG_VARIABLE = "SCALELATENT_DEBUG"
FAILED, REFUSED, UNEXPECTED, INTERRUPTED, PIPE_GONE = 1, 2, 70, 130, 141
MAX_CHARACTERS = 1000
"""Upper bound on the printed characters of an error, because some libraries print whole arrays."""
_NEXT_STEPS = {
    errno.ENOSPC: "free some space, then try again",
    errno.EDQUOT: "free some space, or ask for a larger quota, then try again",
    errno.ENAMETOOLONG: "shorten the name",
    errno.EACCES: "give this user access, or choose another location",
    errno.EPERM: "give this user access, or choose another location",
    errno.EROFS: "the file system is read-only; choose another location",
}


@contextmanager
def exits_with_one_line(as_json: bool) -> Iterator[None]:
    """Print errors in the ``with`` block as one line, and exit with a code."""
    try:
        yield
    except KeyboardInterrupt as error:
        _print_and_exit(format_error(error) or "stopped", error, INTERRUPTED, as_json)
    except ScalelatentError as error:
        _raise_if_debugged(error)
        hint = " ".join(getattr(error, "__notes__", [])) or None
        _print_and_exit(format_error(error), error, REFUSED, as_json, hint=hint)
    except Exception as error:
        if is_usage(error) or isinstance(error, typer.Exit | typer.Abort):
            raise
        if isinstance(error, BrokenPipeError) and _is_pipe_closed():
            raise typer.Exit(PIPE_GONE) from None
        _raise_if_debugged(error)
        _end_unexpected(error, as_json)


def is_usage(error: Exception) -> bool:
    """Return whether an error of typer reports an invalid command line."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def print_usage_error(error: Any, as_json: bool) -> int:
    """Print why a command line is invalid; return the exit code."""
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":  # the message is the help text, if not yet printed
        if message:
            typer.echo(message, err=True)
        return int(error.exit_code)
    context = getattr(error, "ctx", None)
    command = "scalelatent" if context is None else context.command_path
    message = " ".join(message.split()).rstrip(".")
    message = message[:1].lower() + message[1:]
    hint = f"see: {command} --help"
    _print(f"{command}: {message}; {hint}", "UsageError", int(error.exit_code), as_json, hint=hint)
    return int(error.exit_code)


def format_error(error: BaseException) -> str:
    """Return the message of an error without line breaks, shortened to ``MAX_CHARACTERS``."""
    text = " ".join(" ".join([str(error), *getattr(error, "__notes__", [])]).split())
    return _shorten(text, MAX_CHARACTERS)


def _shorten(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]} …"


def _print_and_exit(message: str, error: BaseException, code: int, as_json: bool, **more: str | None) -> None:
    _print(message, type(error).__name__, code, as_json, **more)
    raise typer.Exit(code) from None


def _print(
    message: str, kind: str, code: int, as_json: bool, hint: str | None = None, traceback: str | None = None
) -> None:
    with suppress(BrokenPipeError):
        if as_json:
            out = {"error": message, "kind": kind, "exit_code": code, "hint": hint, "traceback": traceback}
            typer.echo(json.dumps(out), err=True)
        elif code == INTERRUPTED:
            typer.echo(message, err=True)
        else:
            typer.echo(typer.style("error: ", fg="red", bold=True) + message, err=True)


def _raise_if_debugged(error: Exception) -> None:
    if os.environ.get(DEBUG_VARIABLE):
        raise error


def _end_unexpected(error: Exception, as_json: bool) -> None:
    file = _write_traceback(error)
    where = f"the traceback is in {file}" if file else "--debug shows the traceback"
    if isinstance(error, OSError) and error.filename is not None:  # a problem of the disk, not of the code
        code, hint = REFUSED, _NEXT_STEPS.get(error.errno or 0, "check this location, or choose another one")
        text = f"{_shorten(str(error.filename), 300)}: {error.strerror}"
    elif isinstance(error, MemoryError):
        code, hint = REFUSED, "give this process more memory, or reduce the job (scalelatent plan JOB)"
        text = f"out of memory: {format_error(error)}".rstrip(": ")
    else:
        code, hint = UNEXPECTED, "report this error with the traceback"
        text = f"unexpected error in {_find_own_line(error)}: {type(error).__name__}: {format_error(error)}"
    _print_and_exit(f"{text}; {hint}; {where}", error, code, as_json, hint=hint, traceback=file)


def _find_own_line(error: BaseException) -> str:
    """Return the last line of scalelatent in the traceback of an error."""
    ours = Path(__file__).parent.parent
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if ours in Path(frame.filename).parents] or frames
    frame = inside[-1]
    file = Path(frame.filename)
    name = file.relative_to(ours.parent) if ours in file.parents else file
    return f"{name}:{frame.lineno}"


def _write_traceback(error: BaseException) -> str | None:
    """Write the traceback to the user cache or to the temporary folder; return its path."""
    from scalelatent import __version__

    text = "".join(traceback.format_exception(error))
    head = f"scalelatent {__version__}, Python {sys.version.split()[0]}: {' '.join(sys.argv)}\n\n"
    name = f"traceback-{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{os.getpid()}.txt"
    for folder in _traceback_folders():
        with suppress(OSError, ValueError):
            folder.mkdir(parents=True, exist_ok=True)
            # Mode "x" fails for an existing file, which another user may have put into the temporary folder.
            with open(folder / name, "x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(head + text)
            return str(folder / name)
    return None


def _traceback_folders() -> Iterator[Path]:
    with suppress(RuntimeError):  # a user without a home folder
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "scalelatent"
    yield Path(tempfile.gettempdir())


def _is_pipe_closed() -> bool:
    """Return whether the reader of standard output or error has ended; discard later output."""
    gone = False
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the stream is closed, or is not a file
            ends = select.poll()
            ends.register(stream.fileno(), 0)
            if any(event & select.POLLERR for _, event in ends.poll(0)):
                gone = True
                nowhere = os.open(os.devnull, os.O_WRONLY)  # avoids an error when the interpreter exits
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
    return gone
