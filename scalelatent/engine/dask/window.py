"""Items on their way through the workers: who gets which, and when; a few at once, one message a batch.

Bounded memory (law 2) wants few at once, a worker's cache the same rows every pass, and workers of unequal
speed want seconds (`benchmarks/device_pools.py`). Dask's stealing looks once a second, takes all tasks of a
name for equally long, and knows nothing of rows.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, NotRequired, TypedDict, TypeVar

from .graph import Graph, Reads

if TYPE_CHECKING:
    from distributed import Future

    from scalelatent.data.dataset import Dataset

Item = TypeVar("Item")
Batch = list[tuple[Item, str]]

# Items a thread has at least: one is computed, one waits (streamed_pass.py was taken with it).
WINDOW = 2
# Seconds that a worker has at hand: at most, and at least, so that the driver's answer is never waited for. A
# pass of unequal workers that is as short as AT_ONCE is handed out at once: device_pools.py.
MOST_AHEAD, LEAST_AHEAD, AT_ONCE = 2.0, 0.2, 0.8
# Of what is left of a pass of unequal workers a piece takes at most one of so many parts: with
# it test_window.py holds simulated pools near the best.
LEFT_PARTS = 4


def _one(item: object) -> float:
    return 1.0


def _alike(threads: Mapping[str, int]) -> Mapping[str, float]:
    return {}


@dataclass(frozen=True)
class Costs(Generic[Item]):
    """What items take; by default nothing is known of it, and workers are alike."""

    work: Callable[[Item], float] = _one
    """Seconds of an item on a thread of speed 1."""
    known: bool = False
    most: float = float("inf")
    """Items a thread may have."""
    speeds: Callable[[Mapping[str, int]], Mapping[str, float]] = _alike
    """Of workers, as they are known by now; 1 of those that are not named."""
    cut: Callable[[Item], Sequence[Item]] | None = None
    """Parts of an item, none where it is not to be cut; None where workers are alike."""
    shortest: float = 0.0
    """Seconds of the shortest item worth a task."""


@dataclass
class _Share(Generic[Item]):
    """A worker's run of items, and what it has been given and not ended; one without threads is gone."""

    threads: int = 0
    speed: float = 1.0
    items: deque[Item] = field(default_factory=deque)
    listed: float = 0.0
    having: int = 0
    backlog: float = 0.0

    @property
    def rate(self) -> float:
        return self.threads * self.speed

    @property
    def busy(self) -> float:
        """Seconds until there is a thread for one more item."""
        return 0.0 if self.having < self.threads else self.backlog / self.rate

    @property
    def lasts(self) -> float:
        """Seconds until its run is empty; a lost worker's never is."""
        return (self.listed + self.backlog) / self.rate if self.threads else float("inf")

    def owe(self, count: int, work: float) -> None:
        """Take note of what was given or, negative, ended."""
        self.having += count
        # Nothing is left of sums of floats where there is no item.
        self.backlog = self.backlog + work if self.having else 0.0


class Window(Generic[Item]):
    """Items on their way through the workers."""

    # Each worker has a run of items, in proportion to its threads and speed and the same every pass, so that
    # its cache fits; one that runs out takes what the longest run would reach last. Among unequal workers it
    # is guided self-scheduling (Polychronopoulos and Kuck, IEEE Trans. Computers C-36, 1987): pieces shrink
    # towards the end, and none goes to a worker by which the pass would end later.

    def __init__(
        self,
        threads: Mapping[str, int],
        items: Sequence[Item],
        send: Callable[[Batch[Item], bool], Mapping[Item, Future]],
        costs: Costs[Item] | None = None,
    ) -> None:
        self._send, self._costs = send, costs or Costs[Item]()
        self._shares: dict[str, _Share[Item]] = {}
        self.pending: dict[Item, tuple[Future, str]] = {}
        self.took_part: set[str] = set()
        self.opened = False
        self._set_workers(threads)
        self._left = sum(map(self._costs.work, items))
        self._whole = self.seconds
        self._deal(items)

    def _set_workers(self, threads: Mapping[str, int]) -> None:
        self._threads, speeds = dict(threads), self._costs.speeds(threads)
        for name in threads:
            self._shares.setdefault(name, _Share())
        for name, share in self._shares.items():
            share.threads, share.speed = threads.get(name, 0), speeds.get(name, 1.0)
        self._rate = sum(share.rate for share in self._shares.values())

    def _deal(self, items: Sequence[Item]) -> None:
        """A run for each worker; items on an edge are cut if long."""
        shares, todo, place, cut = list(self._shares.values()), deque(items), 0.0, self._costs.cut
        # Of workers that are alike each item counts as one: seconds are measured each pass, and an item on an
        # edge would go to and fro.
        whole = self._left if self.unequal else float(len(items))
        edges = [whole * part / self._rate for part in accumulate(share.rate for share in shares[:-1])]
        while shares and todo:
            item = todo.popleft()
            seconds, at = self._costs.work(item), bisect_right(edges, place)
            work = seconds if self.unequal else 1.0
            if cut is not None and at < len(edges):
                beyond = min(place + work - edges[at], edges[at] - place)
                if beyond > self._costs.shortest * shares[at].speed and (parts := cut(item)):
                    todo.extendleft(reversed(parts))
                    continue
            share = shares[bisect_right(edges, place + work / 2)]
            share.items.append(item)
            share.listed += seconds
            place += work

    @property
    def seconds(self) -> float:
        """Until the end, were all that is not done shared out evenly."""
        return self._left / self._rate if self._rate else 0.0

    @property
    def unequal(self) -> bool:
        """Whether it matters who gets which item."""
        return self._costs.cut is not None

    @property
    def given(self) -> bool:
        """Whether all items have been handed out."""
        return self.opened and not any(share.items for share in self._shares.values())

    def open(self) -> None:
        """Hand out the first items."""
        if not self.opened:
            self.opened = True
            self._hand_out()

    def refresh(self, threads: Mapping[str, int]) -> None:
        """Take note of workers that came or went; items of the latter are left to the others."""
        if dict(threads) != self._threads:
            self._set_workers(threads)
            if self.opened and not self.given:
                self._hand_out()

    def look(self) -> list[Item]:
        """Items finished since the last look; hands out more where workers run low."""
        done = []
        for item, (future, worker) in list(self.pending.items()):
            status = future.status
            if status in ("pending", "lost"):  # lost: its only copy was; it is computed again
                continue
            if status != "finished":
                raise TaskEnded(item, future)
            del self.pending[item]
            work = self._costs.work(item)
            self._shares[worker].owe(-1, -work)
            self._left -= work
            done.append(item)
        if done and not self.given:
            low = self._ahead() / 2
            if any(s.having <= s.threads or s.busy < low for s in self._shares.values() if s.threads):
                self._hand_out()
        return done

    def _ahead(self) -> float:
        """Seconds that workers are to have at hand: of a pass of unequal ones less and less."""
        if not self.unequal:
            return MOST_AHEAD if self._costs.known else 0.0
        return float("inf") if self._whole <= AT_ONCE else min(MOST_AHEAD, max(LEAST_AHEAD, self.seconds / 2))

    def _hand_out(self) -> None:
        if self.unequal:
            self._set_workers(self._threads)  # their speeds may be other ones by now
        batch, ahead, refused = list[tuple[Item, str]](), self._ahead(), 0.0

        def wants(share: _Share[Item]) -> bool:
            least, most = WINDOW * share.threads, self._costs.most * share.threads
            return share.having < least or (share.busy < ahead and share.having < most)

        waiting = [(s.busy, name) for name, s in self._shares.items() if s.threads and wants(s)]
        heapq.heapify(waiting)
        while waiting:
            _, name = heapq.heappop(waiting)
            share = self._shares[name]
            if share.speed <= refused:  # a faster one, which is free sooner, had better have none
                continue
            source = share if share.items else self._longest()
            if source is None:
                break
            item = self._take(share, source)
            if item is None:
                refused = max(refused, share.speed)
                continue
            batch.append((item, name))
            if wants(share):
                heapq.heappush(waiting, (share.busy, name))
        # Where all have left it to others, the worker that would end it first has it all the same.
        while self._rate and (source := self._longest()) is not None:
            if ahead < float("inf") and any(share.having for share in self._shares.values() if share.threads):
                break
            item = source.items.pop()
            work = self._costs.work(item)
            name = self._soonest(work)[1]
            self._give(self._shares[name], source, work)
            batch.append((item, name))
        self.took_part.update(name for _, name in batch)
        futures = self._send(batch, self.given) if batch else {}
        self.pending.update({item: (futures[item], name) for item, name in batch if item in futures})

    def _take(self, share: _Share[Item], source: _Share[Item]) -> Item | None:
        """The next item of a run for a worker; None where it had better have none."""
        own, items, cut = source is share, source.items, self._costs.cut
        item = items.popleft() if own else items.pop()
        work = self._costs.work(item)
        if cut is not None:
            room = max(self._costs.shortest, (self.seconds - share.busy) / LEFT_PARTS) * share.speed
            while work > room and (parts := cut(item)):
                item, *rest = parts if own else reversed(parts)
                (items.extendleft if own else items.extend)(reversed(rest))
                work = self._costs.work(item)
            ends = share.busy + work / share.speed
            if ends > self.seconds and ends > self._soonest(work)[0]:
                (items.appendleft if own else items.append)(item)
                return None
        self._give(share, source, work)
        return item

    def _give(self, share: _Share[Item], source: _Share[Item], work: float) -> None:
        source.listed = source.listed - work if source.items else 0.0
        share.owe(1, work)

    def _longest(self) -> _Share[Item] | None:
        there = (share for share in self._shares.values() if share.items)
        return max(there, key=lambda share: share.lasts, default=None)

    def _soonest(self, work: float) -> tuple[float, str]:
        """(seconds, worker) by which an item would be done, at the earliest."""
        return min((s.busy + work / s.speed, name) for name, s in self._shares.items() if s.threads)

    def cancel(self) -> None:
        """Call off what has not finished."""
        # By letting go: Client.cancel follows dependents, and breaks the client where one of them is not
        # wanted any more.
        for future, _ in self.pending.values():
            future.release()
        self.pending.clear()
        self._shares.clear()


class TaskEnded(Exception):
    """A task failed or was cancelled."""

    def __init__(self, item: Any, future: Future) -> None:
        super().__init__(item, future)
        self.item, self.future = item, future


class ItemWords(TypedDict):
    """An item in the words of the event log."""

    part: str
    span: int
    level: NotRequired[int]
    rows: NotRequired[list[int]]


class Work(Generic[Item]):
    """Base of a pass, a map, a segment of steps and a trial."""

    window: Window[Item]
    hang_seconds: float | None = None
    """Of silence, after which an item hangs, where it is not as usual."""
    unit = "span"
    """What people call an item."""

    def __init__(self, name: str, number: int, token: str, rows: int) -> None:
        self.name, self.number, self.token, self.rows = name, number, token, rows
        self.items: dict[str, Item] = {}
        self.todo: Sequence[Item] = []
        self.rows_done = 0
        self.following: Work[Item] | None = None
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

    def everyone(self) -> list[Work[Item]]:
        """This, and what has begun behind it."""
        return [self] if self.following is None else [self, *self.following.everyone()]

    def worker_lost(self, items: list[Item], worker: str, alone: bool, expected: bool) -> None:
        """A worker is gone that had items of this; ``alone``: with one and nothing else."""

    def redone(self, item: Item, why: str, worker: str) -> dict[str, Any] | None:
        """The event that tells that an item is computed again."""
        about = {"stage": self.name, "pass": self.number, **self.about(item)}
        return {"event": "span_redone", **about, "worker": worker, "why": why}

    def mine(self, key: str) -> bool:
        """Whether a task belongs to this."""
        return key.endswith(self.token)

    def item_rows(self, item: Item) -> int:
        """Rows of an item."""
        raise NotImplementedError

    def about(self, item: Item) -> ItemWords:
        """An item in the words of the event log."""
        raise NotImplementedError

    def words(self, item: Item) -> str:
        """An item in the words of errors."""
        about = self.about(item)
        rows = about.get("rows")
        where = f" (rows {rows[0]}:{rows[1]} of the {about['part']} rows)" if rows else ""
        number = f" of pass {self.number}" if self.number else ""
        return f"{self.unit} {about['span']}{where}{number} of {self.name}"

    def counted(self, count: int) -> str:
        """So many items, in words."""
        return f"{count} {self.unit}{'' if count == 1 else 's'}"

    def dataset_of(self, item: Item) -> Dataset | None:
        """The rows that an item reads; None where that is not known."""
        return None

    def shards_of(self, item: Item) -> list[tuple[str, int, int]]:
        """Shards that an item reads (see :meth:`~scalelatent.data.Dataset.shards`)."""
        return []

    def reads(self, item: Item) -> Reads | None:
        """The rows of those shards, for the scheduler; None where it is not to ask."""
        return None

    def label(self, item: Item) -> str:
        """An item in names of tasks and files."""
        raise NotImplementedError

    def add_trial(self, graph: Graph, key: str, item: Item, note: str, worker: str) -> None:
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
