"""Schedule the items of a pass on the workers: a few items at once per worker, one message per batch.

An item is the rows of one task. Bounded memory (law 2) requires few items at once. A worker's cache needs the
same rows in every pass. Heterogeneous workers need shares in seconds (`benchmarks/device_pools.py`). Dask's
work stealing runs once a second, assumes equal durations for tasks with one name prefix, and does not know
which rows a task reads.
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

# Minimum number of items per thread of a worker: one is computed, and one waits. The results of
# streamed_pass.py were measured with this number.
WINDOW = 2
# Maximum and minimum seconds of work queued on a worker, so that no worker waits for the driver. A pass on
# heterogeneous workers of at most AT_ONCE seconds is sent as one batch (measured: device_pools.py).
MOST_AHEAD, LEAST_AHEAD, AT_ONCE = 2.0, 0.2, 0.8
# On heterogeneous workers, one item takes at most 1/REMAINING_PARTS of the remaining seconds of a pass. This
# value keeps simulated pools near the best possible time (test_window.py).
REMAINING_PARTS = 4


def _unit_cost(item: object) -> float:
    return 1.0


def _equal_speeds(threads: Mapping[str, int]) -> Mapping[str, float]:
    return {}


@dataclass(frozen=True)
class Costs(Generic[Item]):
    """Estimated costs of items; by default all items cost the same and all workers are equally fast."""

    work: Callable[[Item], float] = _unit_cost
    """Function that returns the seconds of an item on a thread of speed 1."""
    known: bool = False
    most: float = float("inf")
    """Maximum number of items per thread."""
    speeds: Callable[[Mapping[str, int]], Mapping[str, float]] = _equal_speeds
    """Function that returns the estimated speed of each worker; a worker without an entry has speed 1."""
    cut: Callable[[Item], Sequence[Item]] | None = None
    """Function that cuts an item into smaller items, or returns []; None if all workers are equally fast."""
    shortest: float = 0.0
    """Seconds of the shortest item that justifies a task of its own."""


@dataclass
class _Share(Generic[Item]):
    """Items of one worker: planned items, and the number and seconds of items that were sent to it.

    A lost worker has 0 threads.
    """

    threads: int = 0
    speed: float = 1.0
    items: deque[Item] = field(default_factory=deque)
    planned_seconds: float = 0.0
    sent_count: int = 0
    backlog: float = 0.0

    @property
    def rate(self) -> float:
        return self.threads * self.speed

    @property
    def busy(self) -> float:
        """Estimated seconds until a thread is free for one more item."""
        return 0.0 if self.sent_count < self.threads else self.backlog / self.rate

    @property
    def remaining_seconds(self) -> float:
        """Estimated seconds until all items of this worker are done; infinite for a lost worker."""
        return (self.planned_seconds + self.backlog) / self.rate if self.threads else float("inf")

    def add_sent(self, count: int, work: float) -> None:
        """Count items that were sent, and their seconds; negative numbers count items that ended."""
        self.sent_count += count
        # The backlog of a worker without items is exactly 0, because sums of floats leave rounding errors.
        self.backlog = self.backlog + work if self.sent_count else 0.0


class Window(Generic[Item]):
    """Items of a pass that are planned for, or computed by, the workers.

    1. Assign to each worker a contiguous share of the items in proportion to its threads and speed. Shares
       are identical in every pass, so that row caches are reused.
    2. Send each worker a few items, and more whenever few of them are left.
    3. Let an idle worker take the last item of the share that would end last.
    4. If workers are heterogeneous, cut items so that they shrink towards the end of the pass, and give a
       worker no item that another worker would end sooner (guided self-scheduling, Polychronopoulos and Kuck,
       IEEE Trans. Computers C-36, 1987).
    5. Let the remaining workers take the items of a lost worker.
    """

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
        self.participants: set[str] = set()
        self.opened = False
        self._set_workers(threads)
        self._left = sum(map(self._costs.work, items))
        self._whole = self.seconds
        self._assign_shares(items)

    def _set_workers(self, threads: Mapping[str, int]) -> None:
        self._threads, speeds = dict(threads), self._costs.speeds(threads)
        for name in threads:
            self._shares.setdefault(name, _Share())
        for name, share in self._shares.items():
            share.threads, share.speed = threads.get(name, 0), speeds.get(name, 1.0)
        self._rate = sum(share.rate for share in self._shares.values())

    def _assign_shares(self, items: Sequence[Item]) -> None:
        """Assign a contiguous share of items to each worker; cut long items that cross an edge of a share."""
        shares, todo, place, cut = list(self._shares.values()), deque(items), 0.0, self._costs.cut
        # If all workers are equally fast, each item counts as 1. Measured seconds change with each pass, and
        # an item on an edge would then move from worker to worker.
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
            share.planned_seconds += seconds
            place += work

    @property
    def seconds(self) -> float:
        """Estimated seconds until the end of the pass if the remaining work were balanced perfectly."""
        return self._left / self._rate if self._rate else 0.0

    @property
    def unequal(self) -> bool:
        """True if the workers have different speeds."""
        return self._costs.cut is not None

    @property
    def all_sent(self) -> bool:
        """True if all items have been sent to workers."""
        return self.opened and not any(share.items for share in self._shares.values())

    def open(self) -> None:
        """Send the tasks of the first items to the workers."""
        if not self.opened:
            self.opened = True
            self._send_items()

    def refresh(self, threads: Mapping[str, int]) -> None:
        """Update the set of workers; the remaining workers take the items of lost workers."""
        if dict(threads) != self._threads:
            self._set_workers(threads)
            if self.opened and not self.all_sent:
                self._send_items()

    def poll(self) -> list[Item]:
        """Return the items that finished since the last call; send items to workers that have few left."""
        done = []
        for item, (future, worker) in list(self.pending.items()):
            status = future.status
            if status in ("pending", "lost"):  # Dask computes a lost result again.
                continue
            if status != "finished":
                raise TaskEnded(item, future)
            del self.pending[item]
            work = self._costs.work(item)
            self._shares[worker].add_sent(-1, -work)
            self._left -= work
            done.append(item)
        if done and not self.all_sent:
            low = self._get_queue_seconds() / 2
            if any(s.sent_count <= s.threads or s.busy < low for s in self._shares.values() if s.threads):
                self._send_items()
        return done

    def _get_queue_seconds(self) -> float:
        """Return the seconds of work to queue on each worker; they shrink during a heterogeneous pass."""
        if not self.unequal:
            return MOST_AHEAD if self._costs.known else 0.0
        return float("inf") if self._whole <= AT_ONCE else min(MOST_AHEAD, max(LEAST_AHEAD, self.seconds / 2))

    def _send_items(self) -> None:
        if self.unequal:
            self._set_workers(self._threads)  # The speed estimates may have changed.
        batch, ahead, refused = list[tuple[Item, str]](), self._get_queue_seconds(), 0.0

        def has_room(share: _Share[Item]) -> bool:
            least, most = WINDOW * share.threads, self._costs.most * share.threads
            return share.sent_count < least or (share.busy < ahead and share.sent_count < most)

        waiting = [(s.busy, name) for name, s in self._shares.items() if s.threads and has_room(s)]
        heapq.heapify(waiting)
        while waiting:
            _, name = heapq.heappop(waiting)
            share = self._shares[name]
            if share.speed <= refused:  # A faster worker that is free sooner was refused an item.
                continue
            source = share if share.items else self._find_longest_share()
            if source is None:
                break
            item = self._take(share, source)
            if item is None:
                refused = max(refused, share.speed)
                continue
            batch.append((item, name))
            if has_room(share):
                heapq.heappush(waiting, (share.busy, name))
        # If every worker refused the item, the worker that would end it first gets it.
        while self._rate and (source := self._find_longest_share()) is not None:
            if ahead < float("inf") and any(
                share.sent_count for share in self._shares.values() if share.threads
            ):
                break
            item = source.items.pop()
            work = self._costs.work(item)
            name = self._find_earliest_end(work)[1]
            self._give(self._shares[name], source, work)
            batch.append((item, name))
        self.participants.update(name for _, name in batch)
        futures = self._send(batch, self.all_sent) if batch else {}
        self.pending.update({item: (futures[item], name) for item, name in batch if item in futures})

    def _take(self, share: _Share[Item], source: _Share[Item]) -> Item | None:
        """Remove and return the next item of ``source``; None if another worker would end the item sooner."""
        own, items, cut = source is share, source.items, self._costs.cut
        item = items.popleft() if own else items.pop()
        work = self._costs.work(item)
        if cut is not None:
            room = max(self._costs.shortest, (self.seconds - share.busy) / REMAINING_PARTS) * share.speed
            while work > room and (parts := cut(item)):
                item, *rest = parts if own else reversed(parts)
                (items.extendleft if own else items.extend)(reversed(rest))
                work = self._costs.work(item)
            ends = share.busy + work / share.speed
            if ends > self.seconds and ends > self._find_earliest_end(work)[0]:
                (items.appendleft if own else items.append)(item)
                return None
        self._give(share, source, work)
        return item

    def _give(self, share: _Share[Item], source: _Share[Item], work: float) -> None:
        source.planned_seconds = source.planned_seconds - work if source.items else 0.0
        share.add_sent(1, work)

    def _find_longest_share(self) -> _Share[Item] | None:
        there = (share for share in self._shares.values() if share.items)
        return max(there, key=lambda share: share.remaining_seconds, default=None)

    def _find_earliest_end(self, work: float) -> tuple[float, str]:
        """Return (seconds, worker) of the earliest possible end of an item that takes ``work`` seconds."""
        return min((s.busy + work / s.speed, name) for name, s in self._shares.items() if s.threads)

    def cancel(self) -> None:
        """Cancel the tasks of all items that have not finished."""
        # Releasing the futures cancels their tasks. Client.cancel would also cancel dependents, and it breaks
        # the client if a dependent was released before.
        for future, _ in self.pending.values():
            future.release()
        self.pending.clear()
        self._shares.clear()


class TaskEnded(Exception):
    """Signal that a task has failed or was cancelled."""

    def __init__(self, item: Any, future: Future) -> None:
        super().__init__(item, future)
        self.item, self.future = item, future


class ItemWords(TypedDict):
    """Part, number and rows of an item (the rows of one task), as they are written to the event log."""

    part: str
    span: int
    level: NotRequired[int]
    rows: NotRequired[list[int]]


class Work(Generic[Item]):
    """Base class of work that is split into items (one task each): a pass, a map, a segment or a trial."""

    window: Window[Item]
    hang_seconds: float | None = None
    """Seconds without a report after which a task counts as hanging; None for the default."""
    unit = "span"
    """Word for an item in messages to the user."""

    def __init__(self, name: str, number: int, token: str, rows: int) -> None:
        self.name, self.number, self.token, self.rows = name, number, token, rows
        self.items: dict[str, Item] = {}
        self.todo: Sequence[Item] = []
        self.rows_done = 0
        self.following: Work[Item] | None = None
        self.began: float | None = None

    def open(self) -> None:
        """Send the tasks of the first items to the workers."""
        if self.began is None:
            self.began = time.monotonic()
            self.window.open()

    def poll(self) -> bool:
        """Count finished items and send more items; return True if any item has finished."""
        finished = self.window.poll()
        self.rows_done += sum(self.item_rows(item) for item in finished)
        return bool(finished)

    @property
    def done(self) -> bool:
        """True if the tasks of all items are done."""
        return self.window.all_sent and not self.window.pending

    def list_with_followers(self) -> list[Work[Item]]:
        """Return this work and all work that is queued behind it."""
        return [self] if self.following is None else [self, *self.following.list_with_followers()]

    def worker_lost(self, items: list[Item], worker: str, alone: bool, expected: bool) -> None:
        """React to the loss of a worker that ran these items.

        ``alone`` is True if the worker ran a single task; ``expected`` is True if it was stopped on purpose.
        """

    def make_repeat_event(self, item: Item, why: str, worker: str) -> dict[str, Any] | None:
        """Return the event that an item is computed again, for the event log; None for no event."""
        about = {"stage": self.name, "pass": self.number, **self.about(item)}
        return {"event": "span_redone", **about, "worker": worker, "why": why}

    def owns(self, key: str) -> bool:
        """Return True if the task with this key belongs to this work."""
        return key.endswith(self.token)

    def item_rows(self, item: Item) -> int:
        """Return the number of rows that the task of an item reads."""
        raise NotImplementedError

    def about(self, item: Item) -> ItemWords:
        """Return part, number and rows of an item for the event log."""
        raise NotImplementedError

    def describe(self, item: Item) -> str:
        """Return the description of an item for error messages."""
        about = self.about(item)
        rows = about.get("rows")
        where = f" (rows {rows[0]}:{rows[1]} of the {about['part']} rows)" if rows else ""
        number = f" of pass {self.number}" if self.number else ""
        return f"{self.unit} {about['span']}{where}{number} of {self.name}"

    def format_count(self, count: int) -> str:
        """Return a number of items as text, such as ``"3 spans"``."""
        return f"{count} {self.unit}{'' if count == 1 else 's'}"

    def dataset_of(self, item: Item) -> Dataset | None:
        """Return the dataset that an item reads; None if it is not known."""
        return None

    def shards_of(self, item: Item) -> list[tuple[str, int, int]]:
        """Return the shards that an item reads (see :meth:`~scalelatent.data.Dataset.shards`)."""
        return []

    def reads(self, item: Item) -> Reads | None:
        """Return the rows that an item reads, for the scheduler's plugin; None if it does not need them."""
        return None

    def label(self, item: Item) -> str:
        """Return the label of an item in names of tasks and files."""
        raise NotImplementedError

    def add_trial(self, graph: Graph, key: str, item: Item, note: str, worker: str) -> None:
        """Add the task that computes an item alone and logs its steps in a file of the run folder."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Cancel this work and the work that follows it."""
        if self.following is not None:
            self.following.cancel()
        self.release()

    def release(self) -> None:
        """Release all futures of this work, which cancels its unfinished tasks."""
        self.window.cancel()
        self.following = None
