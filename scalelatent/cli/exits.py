"""How a command ends: exit codes, and every error in one line.

=====  ====================================================================================
code   meaning
=====  ====================================================================================
0      done
1      a job that was watched has failed (`attach`), or a check did (`doctor`)
2      refused or broken off, in one line that says why: arguments, job file, data, disk, run
70     an unforeseen error; its traceback lies in the file that the line names
130    stopped by Ctrl-C, or a watched job was cancelled
141    the reader of the output has gone (``scalelatent logs RUN | head``)
=====  ====================================================================================

With ``--json`` the last line of standard error is an object: ``error`` (the line), ``kind`` (the error's
class), ``exit_code``, ``hint`` (what to do beside what the line says, or null) and ``traceback`` (its file,
or null). Standard output stays empty, so that no one takes an error for a result.
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
FAILED, REFUSED, UNFORESEEN, INTERRUPTED, PIPE_GONE = 1, 2, 70, 130, 141
LONGEST = 1000
"""Characters of an error's text that are shown; some libraries put whole arrays into theirs."""
_RUN = "_scalelatent_run"
_STEPS = {
    errno.ENOSPC: "free some space, then try again",
    errno.EDQUOT: "free some space, or ask for a larger quota, then try again",
    errno.ENAMETOOLONG: "shorten the name",
    errno.EACCES: "let this user use it, or choose another place",
    errno.EPERM: "let this user use it, or choose another place",
    errno.EROFS: "that file system is read-only: choose another place",
}


@contextmanager
def in_run(folder: str) -> Iterator[None]:
    """Say of what goes wrong inside in which run folder it did, for its traceback to be kept there."""
    try:
        yield
    except Exception as error:
        setattr(error, _RUN, folder)
        raise


@contextmanager
def ended_in_one_line(as_json: bool, run: object = None) -> Iterator[None]:
    """Turn whatever goes wrong inside into one line and an exit code; `run` is what may be a run folder."""
    try:
        yield
    except KeyboardInterrupt as error:
        _end(one_line(error) or "stopped", error, INTERRUPTED, as_json)
    except ScalelatentError as error:
        _raise_if_debugged(error)
        _end(one_line(error), error, REFUSED, as_json, hint=_notes(error))
    except Exception as error:
        if is_usage(error) or isinstance(error, typer.Exit | typer.Abort):
            raise
        if isinstance(error, BrokenPipeError) and _pipe_gone():
            raise typer.Exit(PIPE_GONE) from None
        _raise_if_debugged(error)
        _tell_unforeseen(error, as_json, run)


def is_usage(error: Exception) -> bool:
    """Whether an error is typer's word on a command line that it does not understand."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def tell_usage(error: Any, as_json: bool) -> int:
    """Print what is wrong with a command line; returns the exit code."""
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":  # the help itself, where it was not printed on the way
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


def one_line(error: BaseException) -> str:
    """What an error says, without line breaks, and cut where it goes on and on."""
    text = " ".join(" ".join([str(error), *getattr(error, "__notes__", [])]).split())
    return _cut(text, LONGEST)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]} …"


def _notes(error: BaseException) -> str | None:
    return " ".join(getattr(error, "__notes__", [])) or None


def _end(message: str, error: BaseException, code: int, as_json: bool, **more: str | None) -> None:
    _print(message, type(error).__name__, code, as_json, **more)
    raise typer.Exit(code) from None


def _print(
    message: str, kind: str, code: int, as_json: bool, hint: str | None = None, traceback: str | None = None
) -> None:
    with suppress(BrokenPipeError):
        if as_json:
            told = {"error": message, "kind": kind, "exit_code": code, "hint": hint, "traceback": traceback}
            typer.echo(json.dumps(told), err=True)
        elif code == INTERRUPTED:
            typer.echo(message, err=True)
        else:
            typer.echo(typer.style("error: ", fg="red", bold=True) + message, err=True)


def _raise_if_debugged(error: Exception) -> None:
    if os.environ.get(DEBUG_VARIABLE):
        raise error


def _tell_unforeseen(error: Exception, as_json: bool, run: object) -> None:
    file = _keep_traceback(error, run)
    where = f"the traceback is in {file}" if file else "--debug shows the traceback"
    if isinstance(error, OSError) and error.filename is not None:  # the disk's word, not a fault of ours
        code, hint = REFUSED, _STEPS.get(error.errno or 0, "check that place, or choose another one")
        text = f"{_cut(str(error.filename), 300)}: {error.strerror}"
    elif isinstance(error, MemoryError):
        code, hint = REFUSED, "give this process more memory, or ask for less (scalelatent plan JOB)"
        text = f"out of memory: {one_line(error)}".rstrip(": ")
    else:
        code, hint = UNFORESEEN, "report it with that file"
        text = f"{type(error).__name__}: {one_line(error)} (in {_place(error)}, which did not foresee it)"
    _end(f"{text}; {hint}; {where}", error, code, as_json, hint=hint, traceback=file)


def _place(error: BaseException) -> str:
    """The last line of ours that an error came through."""
    ours = Path(__file__).parent.parent
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if ours in Path(frame.filename).parents] or frames
    frame = inside[-1]
    file = Path(frame.filename)
    name = file.relative_to(ours.parent) if ours in file.parents else file
    return f"{name}:{frame.lineno}"


def _keep_traceback(error: BaseException, run: object) -> str | None:
    """Write the traceback into the run folder, the user's cache or the temporary folder; returns its path."""
    from scalelatent import __version__

    text = "".join(traceback.format_exception(error))
    head = f"scalelatent {__version__}, Python {sys.version.split()[0]}: {' '.join(sys.argv)}\n\n"
    name = f"traceback-{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{os.getpid()}.txt"
    for folder in _folders(getattr(error, _RUN, None) or run):
        with suppress(OSError, ValueError):
            folder.mkdir(parents=True, exist_ok=True)
            # A name that is there already, in the temporary folder of all users, is not ours.
            with open(folder / name, "x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(head + text)
            return str(folder / name)
    return None


def _folders(run: object) -> Iterator[Path]:
    with suppress(OSError, ValueError):
        if isinstance(run, str | os.PathLike) and Path(run, "job.json").is_file():
            yield Path(run).absolute()
    with suppress(RuntimeError):  # a user without a home
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "scalelatent"
    yield Path(tempfile.gettempdir())


def _pipe_gone() -> bool:
    """Whether the reader of standard output or error has gone; what is still written is dropped."""
    gone = False
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or no file
            ends = select.poll()
            ends.register(stream.fileno(), 0)
            if any(event & select.POLLERR for _, event in ends.poll(0)):
                gone = True
                nowhere = os.open(os.devnull, os.O_WRONLY)  # or the interpreter complains at its own end
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
    return gone
