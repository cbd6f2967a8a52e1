"""Progress in a notebook: one cell output that is renewed, without widgets or JavaScript."""

from __future__ import annotations

import time
from html import escape
from typing import Any

from rich.console import Console

from scalelatent.engine.companions import in_notebook

from .progress import Display, Progress, describe

__all__ = ["NotebookProgress", "fit_display"]

REFRESH_SECONDS = 0.25


def fit_display() -> Progress:
    """The display of a fit that Python code calls: for a notebook, or for standard error."""
    return NotebookProgress() if in_notebook() else Progress(Console(stderr=True))


class NotebookProgress(Progress):
    """Show how a fit goes on in the output of a notebook's cell.

    It is renewed when something is told, four times a second at most; rows done in between are not drawn.
    """

    def __init__(self) -> None:
        # What is said in lines elsewhere is in the display here.
        super().__init__(Console(quiet=True))

    def on_stage(self, info: dict[str, Any]) -> None:
        """Show what begins."""
        super().on_stage(info)
        self._renew()

    def on_progress(self, info: dict[str, Any]) -> None:
        """Take in how far the pass is."""
        super().on_progress(info)
        self._renew()

    def on_wait(self) -> None:
        """Let the time go on."""
        self._renew()

    def on_pass_end(self, record: dict[str, Any]) -> None:
        """Take in the numbers of a pass."""
        super().on_pass_end(record)
        self._renew()

    def _open(self) -> Display:
        return _Cell(self)

    def _renew(self) -> None:
        if isinstance(self._live, _Cell):
            self._live.renew()

    def bundle(self) -> dict[str, str]:
        """The display as text and as HTML."""
        done, total = self._rows()
        words = [word for word in self._words() if word]
        pairs = describe(self._record)
        bar = f'<progress value="{done}" max="{total}" style="width:14em"></progress>' if total else ""
        html = f"<div><b>{escape(self._where())}</b> {bar} {escape(' · '.join(words))}"
        if pairs:
            html += "<br><small>" + escape("   ".join(f"{name} {text}" for name, text in pairs)) + "</small>"
        lines = ["  ".join([self._where(), *words]), "   ".join(f"{name} {text}" for name, text in pairs)]
        return {"text/plain": "\n".join(filter(None, lines)), "text/html": html + "</div>"}


class _Cell:
    """The output of a cell that shows a display's text, renewed in its place."""

    def __init__(self, shown: NotebookProgress) -> None:
        from IPython.display import display

        self._shown, self._at = shown, time.monotonic()
        self._handle = display(shown.bundle(), raw=True, display_id=True)

    def renew(self, *, now: bool = False) -> None:
        """Show how it stands, unless it was shown just before."""
        if now or time.monotonic() - self._at >= REFRESH_SECONDS:
            self._at = time.monotonic()
            self._handle.update(self._shown.bundle(), raw=True)

    def stop(self) -> None:
        """Show it for the last time."""
        self.renew(now=True)
