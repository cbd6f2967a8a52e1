"""Shared parts of the commands: options, tables, JSON, progress bars, formatting."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_type_hints

import typer

from scalelatent.errors import JobError

from .exits import DEBUG_VARIABLE, exits_with_one_line

if TYPE_CHECKING:
    from distributed import Security
    from rich.console import Console

Function = TypeVar("Function", bound=Callable[..., Any])

# Names of whole numbers that are identifiers and are printed without thousands separators.
IDENTIFIER_NAMES = ("seed", "pid", "random_state")
_SHARE_NAMES = ("error", "accuracy", "nmi", "purity", "f1_macro", "converged")
PERCENT_NAMES = tuple(f"{name}{part}" for name in _SHARE_NAMES for part in ("", "_mean", "_spread"))

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="Threads; by default one per core.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value of the job file; repeatable."),
]


TlsCa = Annotated[
    Path | None, typer.Option("--tls-ca-file", help="Certificate of the cluster authority (PEM).")
]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", help="Your certificate (PEM).")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", help="Private key of your certificate (PEM).")]


class TlsFiles(NamedTuple):
    """Certificate files from the command line."""

    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None

    def security(self) -> Security | None:
        """Return TLS settings from these files or from the configuration of Dask; None without TLS."""
        from scalelatent.deploy.security import make_security

        return make_security(*self)

    def settings(self) -> list[str]:
        """Return the files as settings of a job, ``section.key=value``."""
        return [f'cluster.{name}="{file}"' for name, file in self._asdict().items() if file is not None]


def with_options(name: str, values: type[Any]) -> Callable[[Function], Function]:
    """Return a decorator that replaces the parameter ``name`` of a command by the fields of a NamedTuple."""
    options = get_type_hints(values, include_extras=True)
    defaults = inspect.signature(values).parameters

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function, eval_str=True)
        parameters: list[inspect.Parameter] = []
        for parameter in signature.parameters.values():
            if parameter.name != name:
                parameters.append(parameter)
                continue
            parameters += [
                inspect.Parameter(
                    option, parameter.kind, default=defaults[option].default, annotation=options[option]
                )
                for option in options
            ]

        @functools.wraps(function)
        def command(**kwargs: Any) -> Any:
            given = values(*(kwargs.pop(option) for option in options))
            return function(**kwargs, **{name: given})

        hints = {key: hint for key, hint in function.__annotations__.items() if key != name}
        command.__annotations__ = hints | options
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command  # type: ignore[return-value]

    return decorate


with_tls = with_options("tls_files", TlsFiles)


class SchedulerOptions(NamedTuple):
    """Scheduler and certificates from the command line."""

    scheduler: Annotated[
        str | None, typer.Option(metavar="URL", help="Address of a Dask scheduler, e.g. tcp://head:8786.")
    ] = None
    scheduler_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File in which the scheduler writes its address.")
    ] = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None

    @property
    def address(self) -> str | None:
        """Address of the scheduler, or None."""
        if self.scheduler is None and self.scheduler_file is None:
            return None
        from scalelatent.deploy.serving import read_scheduler_address

        return read_scheduler_address(self.scheduler, self.scheduler_file)

    @property
    def tls_files(self) -> TlsFiles:
        """Certificate files for the connection to the scheduler."""
        return TlsFiles(self.tls_ca, self.tls_cert, self.tls_key)

    def security(self) -> Security | None:
        return self.tls_files.security()

    def client(self) -> AbstractContextManager[Any]:
        """Return a context manager that yields a client of the scheduler, or None without a scheduler."""
        from scalelatent.deploy.connection import open_client

        address = self.address
        return nullcontext() if address is None else open_client(address, self.security())

    def settings(self) -> list[str]:
        """Return the options as settings of a job; a scheduler replaces the workers of the job."""
        address = self.address
        named = [] if address is None else [f'cluster.scheduler="{address}"', "cluster.workers=none"]
        return [*self.tls_files.settings(), *named]


with_scheduler = with_options("scheduler_options", SchedulerOptions)


class VerbGroup(typer.Typer):
    """Group of commands whose errors are printed as one line with an exit code (see `exits`)."""

    def __init__(self, **options: Any) -> None:
        super().__init__(no_args_is_help=True, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
        register = super().command(name, **options)

        def decorate(function: Function) -> Function:
            @functools.wraps(function)
            def command(*args: Any, **kwargs: Any) -> Any:
                with exits_with_one_line(bool(kwargs.get("json"))):
                    return function(*args, **kwargs)

            register(command)
            return function

        return decorate


def print_line(message: str) -> None:
    """Print a line to standard error, so that standard output has only results."""
    typer.echo(message, err=True)


@contextmanager
def announces_compilation(announced: bool = False) -> Iterator[list[str]]:
    """Print a line when the first kernel is compiled in the ``with`` block, unless ``announced`` is True.

    Yield a list that is empty as soon as the line is printed. Commands also use this function as a decorator.
    """
    from scalelatent.engine.callbacks import COMPILING
    from scalelatent.kernels.compile_observers import observe_compilation

    unprinted = [] if announced else [COMPILING]

    def announce(kernel: str, seconds: float | None) -> None:
        with suppress(IndexError):
            print_line(unprinted.pop())

    with observe_compilation(announce):
        yield unprinted


def print_json(value: Mapping[str, Any] | list[Any]) -> None:
    typer.echo(json.dumps(value, indent=2, default=_to_json_value))


def _to_json_value(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)


def print_result(
    values: Mapping[str, Any], json: bool, *, title: str | None = None, line: str | None = None
) -> None:
    """Print the result of a command as JSON, as one line, or as names and values."""
    if json:
        print_json(values)
    elif line is not None:
        typer.echo(line)
    else:
        show_values(values, title=title)


def stderr_console() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def show_values(values: Mapping[str, Any], title: str | None = None) -> None:
    """Print names and values in two columns; nested mappings are indented below their name."""
    if title:
        typer.echo(typer.style(title, bold=True))
    rows = list(_flatten_values(values))
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        typer.echo(f"  {name:<{width}}  {text}".rstrip())


def _flatten_values(values: Mapping[str, Any], indent: str = "", unit: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        kind = unit or str(name)
        label = indent + str(name).replace("_", " ")
        if isinstance(value, Mapping):
            yield label, ""
            yield from _flatten_values(value, indent + "  ", kind if kind.endswith("bytes") else "")
        else:
            yield label, format_value(value, kind)


def format_value(value: object, name: str = "") -> str:
    """Return a value as text: numbers with thousands separators, bytes with units, shares in percent."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        return f"{format_value(value[0], name)}  ({value[1]})"
    if isinstance(value, list | tuple) and any(isinstance(item, list | tuple) for item in value):
        return str(value)
    if isinstance(value, list | tuple):
        return ", ".join(format_value(item, name) for item in value)
    if isinstance(value, int | float) and (name.endswith("bytes") or "bytes_" in name or name == "memory"):
        return format_bytes(value)
    if isinstance(value, int):
        return str(value) if name.rstrip("_").endswith(IDENTIFIER_NAMES) else f"{value:,}"
    if isinstance(value, float):
        share = name in ("all", "changed") or name.endswith("%") or name.rstrip("_").endswith(PERCENT_NAMES)
        return f"{100 * value:.2f} %" if share else f"{value:.6g}"
    return str(value)


def format_bytes(number: float) -> str:
    """Return a number of bytes as text with a unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:,.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


def parse_row_range(text: str, option: str) -> slice:
    """Parse a range of rows such as 0:50000; either end may be missing or negative."""
    from scalelatent.jobs.spec import parse_rows

    try:
        return parse_rows(text)
    except ValueError as error:
        raise JobError(f"{option}: {error}") from None


def parse_image_size(text: str | None, option: str) -> tuple[int, int] | None:
    """Parse height and width of an image such as 24x32, or one number for a square."""
    if text is None:
        return None
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise JobError(f"{option} {text}: give height x width in pixels, for example {option} 24x32")
    return int(sides[0]), int(sides[-1])


@contextmanager
def progress_bar(title: str, unit: str = "rows") -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that updates a progress bar, or does nothing without a terminal."""
    console = stderr_console()
    if not console.is_terminal:
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=1)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def strip_debug(arguments: list[str]) -> list[str]:
    """Remove ``--debug`` from any position of the command line, and show tracebacks if it was given."""
    if "--debug" in arguments:
        os.environ[DEBUG_VARIABLE] = "1"
    return [argument for argument in arguments if argument != "--debug"]
