"""Registration of the commands that write a dataset: `data import …` and `data make …`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from scalelatent import data
from scalelatent.errors import JobError
from scalelatent.storage.disk import file_name

from .show import (
    VerbGroup,
    announces_compilation,
    parse_image_size,
    parse_row_range,
    progress_bar,
    with_options,
)


class WriteFlags(Protocol):
    """Options that several commands share, as a NamedTuple."""

    json: bool

    def options(self) -> dict[str, Any]:
        """Return the options as keyword arguments of a function of `scalelatent.data`."""


def parse_base_rows(text: str | None, option: str = "--base-rows") -> tuple[int, int] | None:
    """Parse a range of base rows such as 0:50000; both ends count from the first row."""
    if text is None:
        return None
    rows = parse_row_range(text, option)
    if rows.stop is None or rows.stop < 0 or (rows.start or 0) < 0:
        raise JobError(
            f'{option} {text}: both ends must count from the first row; write for example "0:50000"'
        )
    return rows.start or 0, rows.stop


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "size": parse_image_size,
    "patch": parse_image_size,
    "base_rows": parse_base_rows,
}
"""Function of (text, name of the option) that parses an option, by the name of the option's parameter."""


def dataset_verb(
    app: VerbGroup,
    flags: type[Any],
    activity: str,
    report: Callable[[Any, bool], None],
    name: str,
    target: str,
    /,
    *,
    unit: str = "rows",
    has_kernels: bool = False,
    **fixed: str,
) -> Callable[[Callable[..., dict[str, Any] | None]], None]:
    """Return a decorator that registers the command `name` of `app`, which calls a function that writes rows.

    The signature of the decorated function declares the arguments and options of the command, and its
    docstring is the help text. The command passes them to the function `data.<target>` as keyword arguments
    of the same names, together with `fixed` and the options of `flags`, a NamedTuple like `WriteFlags`. If
    the keyword arguments have other names or values than the options, the decorated function returns them.
    The command shows a progress bar titled `activity`. `report` receives the result and whether to print
    JSON. With `has_kernels` the command reports the compilation of kernels.
    """

    def register(function: Callable[..., dict[str, Any] | None]) -> None:
        @functools.wraps(function)
        def run(*, write_flags: WriteFlags, **arguments: Any) -> None:
            given = function(**arguments) or arguments
            source = next(iter(arguments))  # the output, `url`, is the first argument if nothing is read
            title = f"{activity} {name if source == 'url' else file_name(arguments[source])}"
            with announces_compilation() if has_kernels else contextlib.nullcontext():
                for key, parse in _PARSERS.items():
                    if isinstance(text := given.get(key), str):
                        given[key] = parse(text, f"--{key.replace('_', '-')}")
                call = functools.partial(getattr(data, target), **fixed, **given, **write_flags.options())
                with progress_bar(title, unit) as progress:
                    result = call(progress=progress)
            report(result, write_flags.json)

        signature = inspect.signature(function, eval_str=True)
        extra = inspect.Parameter("write_flags", inspect.Parameter.KEYWORD_ONLY, annotation=flags)
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), extra]
        )
        app.command(name)(with_options("write_flags", flags)(run))

    return register
