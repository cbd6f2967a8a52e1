"""Schedule the items (the rows of one task each) of a pass: a few items at once per worker.

Dask's own scheduling does not serve here for three reasons. Bounded memory allows only few items at once on
a worker. A worker must get the same rows in every pass, because it caches them. Workers of different
speeds need shares of equal seconds, not of equal rows (`benchmarks/device_pools.py`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from scalelatent.engine.quarantine import whole_shards

from .graph import Graph, Reads

if TYPE_CHECKING:
    from distributed import Future

    from scalelatent.data.dataset import Dataset

Item = TypeVar("Item")
Batch = list[tuple[Item, str]]

# Minimum number of items (the rows of one task) that each thread of a worker has: the thread computes one
# item while the other waits. The results of streamed_pass.py were measured with this number.
WINDOW = 2
# Maximum and minimum seconds of work that is queued on a worker, so that no worker waits for the driver. On
# workers of different speeds, a pass of at most AT_ONCE seconds is sent in one message (device_pools.py).
MOST_AHEAD, LEAST_AHEAD, AT_ONCE = 2.0, 0.2, 0.8
# On workers of different speeds, an item (the rows of one task) takes at most 1/REMAINING_PARTS of the
# remaining seconds of a pass. With this value, simulated clusters come near the best time (test_window.py).
REMAINING_PARTS = 4


@dataclass(frozen=True)
class Costs(Generic[Item]):
    """Estimated seconds of items (the rows of one task each); by default, items and workers are equal."""

    work: Callable[[Item], float] = lambda item: 1.0
    """Function that returns the seconds of an item on a thread of speed 1."""
    known: bool = False
    """True if the seconds of an item were measured in an earlier pass."""
    most: float = float("inf")
    """Maximum number of items per thread."""
    speeds: Callable[[Mapping[str, int]], Mapping[str, float]] = lambda threads: {}
    """Function that returns the estimated speed of each worker; a worker without an entry has speed 1."""
    cut: Callable[[Item], Sequence[Item]] | None = None
    """Function that cuts an item into smaller items, or returns [] for an item that cannot be cut.

    None if all workers are equally fast.
    """
    shortest: float = 0.0
    """Seconds of the shortest item that justifies a task of its own."""


@dataclass
class _Share(Generic[Item]):
    """Items (the rows of one task each) that are planned for one worker, and the load that was sent to it.

    ``sent_count`` is the number of items that were sent and are not finished, and ``backlog`` their seconds
    at speed 1. A lost worker has 0 threads.
    """

    threads: int = 0
    speed: float = 1.0
    items: deque[Item] = field(default_factory=deque)
    planned_seconds: float = 0.0
    sent_count: int = 0
    backlog: float = 0.0

    @property
    def rate(self) -> float:
        """Seconds of work at speed 1 that this worker does per second."""
        return self.threads * self.speed

    @property
    def busy(self) -> float:
        """Estimated seconds until a thread of this worker is free for one more task."""
        return 0.0 if self.sent_count < self.threads else self.backlog / self.rate

    @property
    def remaining_seconds(self) -> float:
        """Estimated seconds until all tasks of this worker are done; infinite for a lost worker."""
        return (self.planned_seconds + self.backlog) / self.rate if self.threads else float("inf")

    def add_sent(self, count: int, work: float) -> None:
        """Count tasks that were sent, and their seconds; negative numbers count tasks that have ended."""
        self.sent_count += count
        # Without tasks, set the backlog (seconds) to exactly 0; the sum of floats has a rounding error.
        self.backlog = self.backlog + work if self.sent_count else 0.0


class Window(Generic[Item]):
    """Scheduler of the items (the rows of one task each) of a pass.

    1. Assign to each worker a contiguous share of the items in proportion to its threads and speed. Shares
       are identical in every pass, so that the workers find their rows in their caches.
    2. Send each worker a few items, and more whenever few of them are left.
    3. Let an idle worker take the last item from the worker that would end last.
    4. If the speeds of workers differ, make items smaller towards the end of the pass, and give a worker no
       item that another worker would end sooner (guided self-scheduling, Polychronopoulos and Kuck,
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
        """Assign contiguous tasks to each worker; cut a long task on the boundary between two workers."""
        shares, todo, place, cut = list(self._shares.values()), deque(items), 0.0, self._costs.cut
        # If all workers are equally fast, each task counts as one unit of work. Measured seconds would differ
        # in each pass, and a task at a boundary would then move to another worker between passes.
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
        """Estimated seconds until the end of the pass, if all workers end at the same time."""
        return self._left / self._rate if self._rate else 0.0

    @property
    def unequal(self) -> bool:
        """True if the workers have different speeds."""
        return self._costs.cut is not None

    @property
    def all_sent(self) -> bool:
        """True if all tasks have been sent to workers."""
        return self.opened and not any(share.items for share in self._shares.values())

    def open(self) -> None:
        """Send the first tasks to the workers."""
        if not self.opened:
            self.opened = True
            self._send_items()

    def refresh(self, threads: Mapping[str, int]) -> None:
        """Update the set of workers; the remaining workers take the tasks of lost workers."""
        if dict(threads) != self._threads:
            self._set_workers(threads)
            if self.opened and not self.all_sent:
                self._send_items()

    def poll(self) -> list[Item]:
        """Return the items whose tasks finished since the last call; send tasks to workers with few tasks."""
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
        """Return the seconds of work to queue on each worker; if speeds differ, they fall during the pass."""
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
            if share.speed <= refused:  # a worker that is at least as fast would end the next task too late
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
        # If no worker may take the next task now, the worker that would end it first gets it.
        while self._rate and (source := self._find_longest_share()) is not None:
            if ahead < float("inf") and any(
                share.sent_count for share in self._shares.values() if share.threads
            ):
                break
            item = source.items.pop()
            work = self._costs.work(item)
            name = self._find_earliest_end(work)[1]
            self._move_seconds(self._shares[name], source, work)
            batch.append((item, name))
        self.participants.update(name for _, name in batch)
        futures = self._send(batch, self.all_sent) if batch else {}
        self.pending.update({item: (futures[item], name) for item, name in batch if item in futures})

    def _take(self, share: _Share[Item], source: _Share[Item]) -> Item | None:
        """Remove and return the next task of ``source``; None if another worker would end the task sooner."""
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
        self._move_seconds(share, source, work)
        return item

    def _move_seconds(self, share: _Share[Item], source: _Share[Item], work: float) -> None:
        """Move ``work`` seconds from the planned tasks of ``source`` to the sent tasks of ``share``."""
        source.planned_seconds = source.planned_seconds - work if source.items else 0.0
        share.add_sent(1, work)

    def _find_longest_share(self) -> _Share[Item] | None:
        there = (share for share in self._shares.values() if share.items)
        return max(there, key=lambda share: share.remaining_seconds, default=None)

    def _find_earliest_end(self, work: float) -> tuple[float, str]:
        """Return (seconds, worker) of the earliest possible end of a task that takes ``work`` seconds."""
        return min((s.busy + work / s.speed, name) for name, s in self._shares.items() if s.threads)

    def cancel(self) -> None:
        """Cancel all tasks that have not finished."""
        # Releasing the futures cancels their tasks. `Client.cancel` would also cancel tasks that depend on
        # them, and the client fails if such a task was released before.
        for future, _ in self.pending.values():
            future.release()
        self.pending.clear()
        self._shares.clear()


class TaskEnded(Exception):
    """Signal that the task of ``item`` has failed or was cancelled; ``future`` is the task's future."""

    def __init__(self, item: Any, future: Future) -> None:
        super().__init__(item, future)
        self.item, self.future = item, future


class Work(Generic[Item]):
    """Base class of work that is split into items (the rows of one task each).

    The subclasses are a pass, a map, a segment (consecutive minibatch steps), and a single suspect item.
    """

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

    def poll(self) -> bool:
        """Count finished tasks and send more tasks; return True if any task has finished."""
        finished = self.window.poll()
        self.rows_done += sum(self.item_rows(item) for item in finished)
        return bool(finished)

    @property
    def done(self) -> bool:
        """True if all tasks are done."""
        return self.window.all_sent and not self.window.pending

    def list_with_followers(self) -> list[Work[Item]]:
        """Return a list of this work and of the passes that were sent in advance and depend on this work."""
        return [self] if self.following is None else [self, *self.following.list_with_followers()]

    def worker_lost(self, items: list[Item], worker: str, alone: bool, expected: bool) -> None:
        """Handle the loss of a worker that ran the tasks of these items (rows).

        ``alone`` is True if the worker ran a single task; ``expected`` is True if the worker was stopped on
        purpose.
        """

    def make_repeat_event(self, item: Item, why: str, worker: str) -> dict[str, Any] | None:
        """Return the log event that the task of ``item`` runs again, and why; None for no event."""
        about = {"stage": self.name, "pass": self.number, **self.about(item)}
        return {"event": "span_redone", **about, "worker": worker, "why": why}

    def owns(self, key: str) -> bool:
        """Return True if the task with this Dask key belongs to this work."""
        return key.endswith(self.token)

    def about(self, item: Item) -> dict[str, Any]:
        """Return the description of an item for the event log.

        Its keys are "part" ("train", "validation" or "output"), "span" (number of the item) and "rows" (list
        of the first row and the row after the last).
        """
        raise NotImplementedError

    def item_rows(self, item: Item) -> int:
        """Return the number of rows that one task computes."""
        first, stop = self.about(item)["rows"]
        return int(stop - first)

    def describe(self, item: Item) -> str:
        """Return the description of an item (the rows of one task) for error messages."""
        about = self.about(item)
        first, stop = about["rows"]
        number = f" of pass {self.number}" if self.number else ""
        where = f"(rows {first}:{stop} of the {about['part']} rows)"
        return f"{self.unit} {about['span']} {where}{number} of {self.name}"

    def format_count(self, count: int) -> str:
        """Return a number of tasks as text for messages, such as ``"3 spans"``."""
        return f"{count} {self.unit}{'' if count == 1 else 's'}"

    def dataset_of(self, item: Item) -> Dataset | None:
        """Return the stored dataset that the task of ``item`` reads; None if it reads no stored rows."""
        return None

    def source_rows(self, item: Item) -> Sequence[int]:
        """Return (first row, row after the last) of the dataset rows that one task reads."""
        rows: Sequence[int] = self.about(item)["rows"]
        return rows

    def shards_of(self, item: Item) -> list[tuple[str, int, int]]:
        """Return (file, first row, row after the last) of each dataset shard that one task reads."""
        dataset = self.dataset_of(item)
        return [] if dataset is None else list(dataset.shards(*self.source_rows(item)))

    def reads(self, item: Item) -> Reads | None:
        """Return (dataset, first row, row after the last) of the whole shards that one task reads."""
        dataset = self.dataset_of(item)
        if dataset is None:
            return None
        return (f"{self.token}/{self.about(item)['part']}", *whole_shards(dataset, *self.source_rows(item)))

    def label(self, item: Item) -> str:
        """Return the label of an item (the rows of one task) in names of tasks and files."""
        raise NotImplementedError

    def add_trial(self, graph: Graph, key: str, item: Item, note: str, worker: str) -> None:
        """Add a task that computes ``item``, rows that may have killed workers, alone on ``worker``.

        The task logs each step to the file ``note``. If this worker dies too, the file names the bad rows.
        """
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
