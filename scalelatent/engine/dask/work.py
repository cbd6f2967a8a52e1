"""What a driver looks after on a cluster: items in a window, known by the keys of their tasks."""

from __future__ import annotations

import time
from typing import Any

from .graph import Graph, Reads
from .window import Window


class Work:
    """Base of a pass and of a map.

    Parameters
    ----------
    name : str
        Of the stage or the map.
    number : int
        Of the pass, from 1; 0 where there is but one.
    token : str
        Ends the names of all its tasks.
    rows : int
        Rows of all items.

    Attributes
    ----------
    window : Window
    items : dict
        Key of a task -> item, for whoever hears of a lost worker by the keys of its tasks.
    todo : list
        Items that are to be computed and can be tried alone (see :mod:`.trial`).
    rows_done : int
    following : Work or None
        What has begun behind it.
    """

    window: Window

    def __init__(self, name: str, number: int, token: str, rows: int) -> None:
        self.name, self.number, self.token, self.rows = name, number, token, rows
        self.items: dict[str, Any] = {}
        self.todo: list[Any] = []
        self.rows_done = 0
        self.following: Any = None
        self.began: float | None = None

    def open(self) -> None:
        """Send the first items, or all."""
        if self.began is None:
            self.began = time.monotonic()
            self.window.open()

    def look(self) -> bool:
        """Take note of finished items, and hand out more; whether there was anything new.

        Raises
        ------
        TaskEnded
            A task failed or was cancelled.
        """
        finished = self.window.look()
        self.rows_done += sum(self.item_rows(item) for item in finished)
        return bool(finished)

    @property
    def done(self) -> bool:
        """Whether all items are."""
        return self.window.given and not self.window.pending

    def everyone(self) -> list[Work]:
        """This, and what has begun behind it."""
        return [self] if self.following is None else [self, *self.following.everyone()]

    def bereaved(self, items: list[Any], worker: str, alone: bool) -> None:
        """A worker has died with items of this; ``alone``: with nothing else."""

    def mine(self, key: str) -> bool:
        """Whether a task belongs to this."""
        return key.endswith(self.token)

    def item_rows(self, item: Any) -> int:
        """Rows of an item."""
        raise NotImplementedError

    def about(self, item: Any) -> dict[str, Any]:
        """An item in the words of the event log."""
        raise NotImplementedError

    def dataset_of(self, item: Any) -> Any:
        """The rows that an item reads; None where that is not known."""
        return None

    def shards_of(self, item: Any) -> list[tuple[str, int, int]]:
        """Shards that an item reads (see :meth:`~scalelatent.data.Dataset.shards`); none where it cannot be
        computed alone, and nothing be found out of it.
        """
        return []

    def reads(self, item: Any) -> Reads | None:
        """The rows of those shards, for the scheduler; None where it is not to ask."""
        return None

    def label(self, item: Any) -> str:
        """An item in names of tasks and files."""
        raise NotImplementedError

    def add_trial(self, graph: Graph, key: str, item: Any, note: str, worker: str) -> None:
        """Add the task that computes an item alone, noting its steps in a file of the run folder."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Call it off, and what has begun behind it."""
        if self.following is not None:
            self.following.cancel()
        self.release()

    def release(self) -> None:
        """Let go of all futures."""
        self.window.cancel()
        self.following = None
