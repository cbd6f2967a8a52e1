"""A few items on every worker until all are done, handed out in batches: one message each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .graph import Graph, Reads

Batch = list[tuple[Any, str]]

# One item is computed, one waits: streamed_pass.py was taken with these numbers, and not with others.
WINDOW = 2
# Short items are handed out in larger numbers, at most so many a thread: their sum keeps a worker busy for a
# while, and the driver out of the way.
DEEPEST, BUSY_SECONDS = 32, 2.0


def depth_for(seconds: float | None, nbytes: int = 0) -> int:
    """Items a thread has at once."""
    wanted = WINDOW if seconds is None else int(BUSY_SECONDS / max(seconds, 1e-6))
    room = 2**26 // nbytes if nbytes else DEEPEST
    return max(WINDOW, min(wanted, room, DEEPEST))


class Window:
    """Items on their way through the workers."""

    # Each worker has a list of its own, in proportion to its threads and the same every pass, so that its
    # cache fits; one that runs out takes from the longest list.

    def __init__(
        self,
        threads: Mapping[str, int],
        items: Sequence[Any],
        send: Callable[[Batch, bool], Mapping[Any, Any]],
        depth: int = WINDOW,
    ) -> None:
        self._threads, self._send, self._depth = dict(threads), send, depth
        self._lists = _split(items, self._threads)
        self._having = dict.fromkeys(self._threads, 0)
        self.pending: dict[Any, tuple[Any, str]] = {}
        self.opened = False

    @property
    def given(self) -> bool:
        """Whether all items have been handed out."""
        return self.opened and not any(self._lists.values())

    def open(self) -> None:
        """Hand out the first items."""
        if not self.opened:
            self.opened = True
            self._hand_out()

    def refresh(self, threads: Mapping[str, int]) -> None:
        """Take note of workers that came or went; items of the latter's lists are left to the others."""
        for name in threads:
            self._lists.setdefault(name, deque())
            self._having.setdefault(name, 0)
        if dict(threads) != self._threads:
            self._threads = dict(threads)
            if self.opened and not self.given:
                self._hand_out()

    def look(self) -> list[Any]:
        """Items finished since the last look; hands out more where workers run low."""
        done = []
        for item, (future, worker) in list(self.pending.items()):
            status = future.status
            if status in ("pending", "lost"):  # lost: its only copy was; it is computed again
                continue
            if status != "finished":
                raise TaskEnded(item, future)
            del self.pending[item]
            self._ended(item, worker)
            done.append(item)
        if done and not self.given and self._any_low():
            self._hand_out()
        return done

    def _ended(self, item: Any, worker: str) -> None:
        self._having[worker] -= 1

    def _any_low(self) -> bool:
        return any(self._having[name] <= self._depth * n // 2 for name, n in self._threads.items())

    def _hand_out(self) -> None:
        batch: Batch = []
        having = dict(self._having)

        def give(worker: str, item: Any) -> None:
            batch.append((item, worker))
            having[worker] += 1

        for name, count in self._threads.items():
            own = self._lists[name]
            while own and having[name] < self._depth * count:
                give(name, own.popleft())
        # One that has nothing left and is about to run dry takes from the longest list what its owner would
        # reach last; in turn, so that what is short is shared fairly.
        dry = [name for name, count in self._threads.items() if having[name] < WINDOW * count]
        while dry:
            for name in tuple(dry):
                longest = max(self._lists.values(), key=len)
                if longest and having[name] < WINDOW * self._threads[name]:
                    give(name, longest.pop())
                else:
                    dry.remove(name)
        for _, worker in self._dispatch(batch):
            self._having[worker] += 1

    def _dispatch(self, batch: Batch) -> Batch:
        """Send a batch; returns what of it is looked after here."""
        futures = self._send(batch, self.given) if batch else {}
        kept = [(item, worker) for item, worker in batch if item in futures]
        self.pending.update({item: (futures[item], worker) for item, worker in kept})
        return kept

    def cancel(self) -> None:
        """Call off what has not finished."""
        # By letting go: Client.cancel follows dependents, and breaks the client where one of them is not
        # wanted any more.
        for future, _ in self.pending.values():
            future.release()
        self.pending.clear()
        self._lists.clear()
        self._threads.clear()


class TaskEnded(Exception):
    """A task failed or was cancelled."""

    def __init__(self, item: Any, future: Any) -> None:
        super().__init__(item, future)
        self.item, self.future = item, future


def _split(items: Sequence[Any], threads: Mapping[str, int]) -> dict[str, deque[Any]]:
    """Runs of items, in proportion to the threads of workers."""
    total, done, lists = max(1, sum(threads.values())), 0, {}
    for name, count in threads.items():
        first, done = done, done + count
        lists[name] = deque(items[first * len(items) // total : done * len(items) // total])
    return lists


class Work:
    """Base of a pass and of a map."""

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
        """Take note of finished items, and hand out more; whether there was anything new."""
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

    def worker_died(self, items: list[Any], worker: str, alone: bool) -> None:
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
        """Shards that an item reads (see :meth:`~scalelatent.data.Dataset.shards`)."""
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
