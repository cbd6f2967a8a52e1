"""Progress of a fit: a live display on a terminal or in a notebook (ipywidgets), printed lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from scalelatent.engine.callbacks import COMPILING, Callback

from .messages import AFTER_FIT, ERRORS, MEASURED, describe_part


def format_duration(seconds: float) -> str:
    """Return a number of seconds as text: 4.2 s, 1 min 15 s, 2 h 03 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def describe_record(record: Mapping[str, Any], classes: int = 0) -> list[tuple[str, str]]:
    """Return (name, text) of each displayed value of a pass record, in reading order.

    A record of a classifier of ``classes`` classes gets a remark if its errors exceed those of guessing.
    """
    shown = [("pass", f"{record['pass']}")] if record.get("pass") is not None else []
    if record.get("objective") is not None:
        shown.append(("objective", f"{record['objective']:.5f}"))
    for key in ERRORS:
        if record.get(key) is not None:
            shown.append((key.replace("_", " "), f"{100 * record[key]:.2f} %"))
    for key in MEASURED:
        if record.get(key) is not None:
            share = f"{100 * record[key]:.2f} %"
            shown.append((key.replace("_", " "), share if key == "rows_at_rest" else f"{record[key]:,}"))
    for key in ("nu", "round"):
        if record.get(key) is not None:
            shown.append((key, f"{record[key]:g}"))
    if record.get("rows") and record.get("seconds"):
        shown.append(("rows/s", f"{record['rows'] / record['seconds']:,.0f}"))
    if classes and max(record.get(key) or 0 for key in ERRORS[:2]) > 1 - 1 / classes:
        shown.append(("remark", "the first weights are often worse than guessing"))
    return shown


class ProgressDisplay(Callback):
    """Callback that displays the progress of a fit; in a ``with`` block, also of the stages after the fit.

    If the console is not a terminal, it prints a line for the first and last pass and regularly in between.
    """

    shows_progress = True

    def __init__(
        self,
        console: Console | None = None,
        *,
        every_passes: int = 10,
        every_seconds: float = 15.0,
        announced: bool = False,
    ) -> None:
        self.console = console or Console(stderr=True)
        self.every_passes = every_passes
        self.every_seconds = every_seconds
        self._live: Live | None = None
        self._info: dict[str, Any] = {}
        self._classes = 0
        self._now: dict[str, Any] = {}
        self._record: dict[str, Any] = {}
        self._pass_seconds: float | None = None
        self._shown_pass: object = None
        self._compiling: set[tuple[object, object]] = set()
        self._announced_kernels = announced  # whether a line about compiling kernels was printed
        self._shown_at = time.monotonic()
        self._began: float | None = None
        self._stays = False

    def __enter__(self) -> Self:
        self._stays = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def on_fit_start(self, info: dict[str, Any]) -> None:
        self._info, self._classes = dict(info), info.get("classes") or 0
        self._began = info.get("began") or self._began or time.time()
        if self._live is None:
            self._live = self._open()

    def _open(self) -> Live | None:
        """Start and return the live display, or return None if the console cannot update its output."""
        # rich needs ipywidgets to update the output of a notebook cell.
        if not (self.console.is_terminal or (self.console.is_jupyter and find_spec("ipywidgets"))):
            return None
        live = Live(get_renderable=self._render, console=self.console, refresh_per_second=4, transient=False)
        live.start()
        return live

    def on_stage(self, info: dict[str, Any]) -> None:
        """Show a new stage of the fit.

        Without a terminal, print only stages that try values of a parameter, and stages after the fit.
        """
        self._now = {**info, "pass": 0}
        if self._live is None and (info.get("tries") or self._after_fit):
            self._print(self._position_text() + (f" on {info['rows']:,} rows" if info.get("rows") else ""))

    def on_progress(self, info: dict[str, Any]) -> None:
        self._now = dict(info)
        if self._live is None and self._quiet_for(self.every_seconds * 2):
            done, total = info.get("rows_done", 0), info.get("rows_total", 0)
            self._print(f"{self._position_text()}: {done:,} of {total:,} rows")

    def on_pass_end(self, record: dict[str, Any]) -> None:
        self._record = dict(record)
        self._compiling.clear()  # a worker that was lost while it compiled never reports the end
        seconds = record.get("seconds")
        if seconds:
            old = self._pass_seconds
            self._pass_seconds = seconds if old is None else 0.7 * old + 0.3 * seconds
        if self._live is None and self._is_line_due(record):
            self._print_record(record)

    def on_event(self, info: dict[str, Any]) -> None:
        """Show the compilation of kernels; without a terminal, also print a line for each finished layer."""
        kernel = (info.get("kernel"), info.get("worker"))
        if info.get("event") == "compiling_kernels":
            self._compiling.add(kernel)
            if self._live is None and not self._announced_kernels:
                self._print(info["message"])
            self._announced_kernels = True
        elif info.get("event") == "kernel_compiled":
            self._compiling.discard(kernel)
        if info.get("event") == "layer_written" and self._live is None:
            where = ", ".join(filter(None, (info["stage"], describe_part(info))))
            took = f"{info['rows']:,} rows in {format_duration(info['seconds'])}"
            self._print(", ".join(filter(None, (f"{where}: {took}", self._elapsed_text()))))

    def on_fit_end(self, info: dict[str, Any]) -> None:
        """Show the last pass, and close the display unless it is used as a context manager."""
        if self._live is None and self._record and self._shown_pass != self._record.get("pass"):
            self._print_record(self._record)
        if not self._stays:
            self.close()

    def close(self) -> None:
        self._info = {}  # so that no remaining time is shown
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _is_line_due(self, record: Mapping[str, Any]) -> bool:
        number = record.get("pass") or 0
        return number == 1 or number % self.every_passes == 0 or self._quiet_for(self.every_seconds)

    def _quiet_for(self, seconds: float) -> bool:
        return time.monotonic() - self._shown_at >= seconds

    def _print_record(self, record: Mapping[str, Any]) -> None:
        self._shown_pass = record.get("pass")
        self._print("  ".join(f"{name} {text}" for name, text in self._describe(record)))

    def _describe(self, record: Mapping[str, Any]) -> list[tuple[str, str]]:
        return describe_record(record, self._classes)

    def _print(self, text: str) -> None:
        self._shown_at = time.monotonic()
        with suppress(SystemExit):  # rich ends the process when the reader of its output has ended
            self.console.print(text, highlight=False, soft_wrap=True)

    @property
    def _after_fit(self) -> bool:
        return self._now.get("stage") in AFTER_FIT

    def _position_text(self) -> str:
        """Return stage, layer and pass as text, without a pass number for stages that have no passes."""
        before = 0 if self._after_fit else self._record.get("pass", 1)
        stage, number = self._now.get("stage"), self._now.get("pass", before)
        passed = f"pass {number}" if number or not stage else ""
        return ", ".join(part for part in (stage, describe_part(self._now), passed) if part)

    def _elapsed_text(self) -> str:
        return "" if self._began is None else f"{format_duration(time.time() - self._began)} so far"

    def _rows_done_and_total(self) -> tuple[int, int]:
        """Return the rows done and all rows of the current pass."""
        return self._now.get("rows_done") or 0, self._now.get("rows_total") or self._now.get("rows") or 0

    def _progress_texts(self) -> list[str]:
        """Return the texts after the progress bar: rows, rows per second, time."""
        (done, total), rate = self._rows_done_and_total(), self._now.get("rows_per_s")
        return [
            f"{done:,}/{total:,} rows" if total else "",
            f"{rate:,.0f} rows/s" if rate else "",
            ", ".join(filter(None, (self._elapsed_text(), self._time_left()))),
        ]

    def _render(self) -> RenderableType:
        """Return two lines: progress of the current pass, and numbers of the last finished pass."""
        lines: list[RenderableType] = []
        done, total = self._rows_done_and_total()
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(self._position_text(), style="bold"),
            ProgressBar(total=total or None, completed=done, width=30),
            *self._progress_texts(),
        )
        lines.append(bar)
        if self._compiling:
            lines.append(Text(COMPILING, style="yellow"))
        if self._record:
            pairs = Text()
            for name, text in self._describe(self._record):
                pairs.append(f"{name} ", style="dim").append(f"{text}   ")
            lines.append(pairs)
        return Group(*lines)

    def _time_left(self) -> str:
        """Return the remaining time as text; an upper bound for a fit, which convergence may end earlier."""
        if self._after_fit:
            (done, total), rate = self._rows_done_and_total(), self._now.get("rows_per_s")
            return f"{format_duration((total - done) / rate)} left" if rate and total > done else ""
        limit, number = self._info.get("max_iter"), self._record.get("pass")
        if limit is None or number is None or self._pass_seconds is None:
            return ""
        return f"at most {format_duration(max(0, limit - number) * self._pass_seconds)} left"
