"""Registration of the commands that write a dataset: `data import …` and `data make …`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from scalelatent.storage.disk import file_name

from .show import VerbGroup, announces_compilation, progress_bar, with_options

Call = Callable[..., Any]
"""Call of a function of `scalelatent.data` that still lacks `progress` and the arguments of the flags."""


class WriteFlags(Protocol):
    """Options that several commands share, as a NamedTuple."""

    json: bool

    def options(self) -> dict[str, Any]:
        """Return the arguments of the call."""


def dataset_verb(
    app: VerbGroup,
    flags: type[Any],
    activity: str,
    report: Callable[[Any, bool], None],
    name: str,
    *,
    unit: str = "rows",
    has_kernels: bool = False,
) -> Callable[[Callable[..., Call]], None]:
    """Return a decorator that registers a command of `app`, which makes and reports the call of a function.

    The function turns the arguments of the command into a `Call`. The command also has the options of
    `flags`, a NamedTuple like `WriteFlags`, and shows a progress bar titled `activity`. `report` receives the
    result and whether to print JSON. With `has_kernels` the command reports the compilation of kernels.
    """

    def register(function: Callable[..., Call]) -> None:
        @functools.wraps(function)
        def run(*, write_flags: WriteFlags, **arguments: Any) -> None:
            title = f"{activity} {file_name(arguments.get('file', name))}"
            with announces_compilation() if has_kernels else contextlib.nullcontext():
                call = function(**arguments)
                with progress_bar(title, unit) as progress:
                    result = call(progress=progress, **write_flags.options())
            report(result, write_flags.json)

        signature = inspect.signature(function, eval_str=True)
        extra = inspect.Parameter("write_flags", inspect.Parameter.KEYWORD_ONLY, annotation=flags)
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), extra]
        )
        app.command(name)(with_options("write_flags", flags)(run))

    return register
