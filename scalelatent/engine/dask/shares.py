"""Who computes which part of a pass, where some workers are many times faster than others."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
# None of these numbers was measured by itself. Together they make passes of 1.03, 1.14 and 1.40 times the
# ideal, where that is 8, 2 and 0.5 s (device_pools.py); test_shares.py holds simulated pools near the best. A
# piece takes at most this share of what is left of the pass, and of a whole pass.
LEFT_SHARE, PASS_SHARE = 3, 8
# Nothing is cut that takes less than so small a part of a pass: a tail that long is not worth a task.
FINEST = 128
# Seconds that a worker has at hand: at most; at least, so that the driver's answer is never waited for.
MOST_AHEAD, LEAST_AHEAD = 2.0, 0.2
# A pass this short is handed out at once: there is no time to learn anything from it.
AT_ONCE = 0.8


class Shares(Generic[T]):
    """What has not been handed out, and who is to have it."""

    # Guided self-scheduling (Polychronopoulos and Kuck, IEEE Trans. Computers C-36, 1987), weighted by
    # measured speeds. Each worker has a run of rows in proportion to its speed, the same every pass so that
    # its cache fits, and takes pieces that shrink towards the end; an idle one takes the last piece of the
    # worker that would end last. Work is in seconds of a thread of speed 1; what was handed out is backlog
    # until done() is told.

    def __init__(
        self,
        items: Sequence[T],
        work: Callable[[T], float],
        split: Callable[[T], Sequence[T]],
        threads: Mapping[str, int],
        speeds: Mapping[str, float],
        shortest: float = 0.0,
    ) -> None:
        self._work, self._split = work, split
        self._threads: dict[str, int] = {}
        self._speeds: dict[str, float] = {}
        self._lists: dict[str, deque[T]] = {}
        self._list_work: dict[str, float] = {}
        self._backlog: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self.left = float(sum(map(work, items)))
        self.set_workers(threads, speeds)
        self._whole = self.horizon()
        self._shortest = max(shortest, self._whole / FINEST)
        self._deal(items)

    # -- workers ---------------------------------------------------------------------------------------------

    def set_workers(self, threads: Mapping[str, int], speeds: Mapping[str, float]) -> None:
        """Take note of the workers there are, and of how fast they are by now."""
        self._threads = {name: count for name, count in threads.items() if count > 0}
        self._speeds = {name: speeds.get(name, 1.0) for name in self._threads}
        for name in self._threads:
            self._lists.setdefault(name, deque())
            self._list_work.setdefault(name, 0.0)
            self._backlog.setdefault(name, 0.0)
            self._counts.setdefault(name, 0)
        self._rates = {name: count * self._speeds[name] for name, count in self._threads.items()}
        self._capacity = sum(self._rates.values())
        self._outstanding = sum(self._backlog[name] for name in self._threads)

    def seconds(self, worker: str, item: T) -> float:
        """What an item takes one thread of a worker."""
        return self._work(item) / self._speeds[worker]

    def busy(self, worker: str) -> float:
        """Seconds until a worker has a thread for one more item."""
        if self._counts[worker] < self._threads[worker]:
            return 0.0
        return self._backlog[worker] / self._rates[worker]

    def horizon(self) -> float:
        """Seconds until the end of the pass, were all that is left shared out evenly."""
        return (self.left + self._outstanding) / self._capacity if self._capacity else 0.0

    def done(self, worker: str, item: T) -> None:
        """A worker is through with an item."""
        self._owe(worker, -1, -self._work(item))

    def _owe(self, worker: str, count: int, work: float) -> None:
        self._counts[worker] += count
        # Nothing is left of sums of floats where there is no item.
        there = self._backlog[worker] + work if self._counts[worker] else 0.0
        if worker in self._threads:
            self._outstanding += there - self._backlog[worker]
        self._backlog[worker] = there

    # -- items -----------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return any(self._lists.values())

    def clear(self) -> None:
        """Hand out no more."""
        self._lists.clear()
        self._list_work.clear()
        self.left = 0.0

    def _deal(self, items: Iterable[T]) -> None:
        """A run of rows for each worker, in proportion to its speed; items on an edge are cut if long."""
        edges, done = [], 0.0
        for name, rate in self._rates.items():
            done += rate
            edges.append((done / self._capacity * self.left, name))
        todo, place, at = deque(items), 0.0, 0
        while todo:
            item = todo.popleft()
            work = self._work(item)
            while at < len(edges) - 1 and place >= edges[at][0]:
                at += 1
            edge, name = edges[at]
            beyond = min(place + work - edge, edge - place)
            if at < len(edges) - 1 and beyond > self._shortest * self._speeds[name]:
                parts = self._split(item)
                if parts:
                    todo.extendleft(reversed(parts))
                    continue
            if at < len(edges) - 1 and place + work / 2 > edge:
                at, name = at + 1, edges[at + 1][1]
            self._lists[name].append(item)
            self._list_work[name] += work
            place += work

    def take(self, worker: str) -> T | None:
        """The next item of a worker; None where it had better have none."""
        source = worker if self._lists.get(worker) else self._latest()
        if source is None:
            return None
        own, items = source == worker, self._lists[source]
        busy, horizon = self.busy(worker), self.horizon()
        room = max(self._shortest, min(self._whole / PASS_SHARE, (horizon - busy) / LEFT_SHARE))
        item = items.popleft() if own else items.pop()
        while self.seconds(worker, item) > room and (parts := self._split(item)):
            if own:
                item = parts[0]
                items.extendleft(reversed(parts[1:]))
            else:
                item = parts[-1]
                items.extend(parts[:-1])
        ends = busy + self.seconds(worker, item)
        if ends > horizon and ends > self._soonest(item)[0]:
            (items.appendleft if own else items.append)(item)
            return None
        self._give(worker, item, source)
        return item

    def force(self) -> tuple[T, str]:
        """The last item of the longest list, for the worker that would end it first."""
        source = self._latest()
        assert source is not None
        item = self._lists[source].pop()
        _, worker = self._soonest(item)
        self._give(worker, item, source)
        return item, worker

    def _give(self, worker: str, item: T, source: str) -> None:
        work = self._work(item)
        self._list_work[source] = self._list_work[source] - work if self._lists[source] else 0.0
        self.left -= work
        self._owe(worker, 1, work)

    def _latest(self) -> str | None:
        """The list that would be empty last; those of lost workers first of all."""

        def lasts(name: str) -> float:
            if name not in self._threads:
                return float("inf")
            return (self._list_work[name] + self._backlog[name]) / self._rates[name]

        return max((name for name, items in self._lists.items() if items), key=lasts, default=None)

    def _soonest(self, item: T) -> tuple[float, str]:
        """(seconds, worker) at which an item would be done, at the earliest."""
        return min((self.busy(name) + self.seconds(name, item), name) for name in self._threads)

    def ahead(self) -> float:
        """Seconds that workers are to have at hand: all of a short pass, less and less of a long one."""
        if self._whole <= AT_ONCE:
            return float("inf")
        return min(MOST_AHEAD, max(LEAST_AHEAD, self.horizon() / 2))

    def hand_out(self) -> list[tuple[T, str]]:
        """Items for all workers that have less at hand than they should, who starts first first."""
        if not self:
            return []
        out: list[tuple[T, str]] = []
        ahead, refused = self.ahead(), 0.0
        waiting = [(self.busy(name), name) for name in self._threads if self._wants(name, ahead)]
        heapq.heapify(waiting)
        while waiting and self:
            _, name = heapq.heappop(waiting)
            if self._speeds[name] <= refused:  # a faster one, which is free sooner, had better have none
                continue
            item = self.take(name)
            if item is None:
                refused = self._speeds[name]
                continue
            out.append((item, name))
            if self._wants(name, ahead):
                heapq.heappush(waiting, (self.busy(name), name))
        # Where all have left it to others, the worker that would end it first has it all the same.
        while self and (ahead == float("inf") or not any(self._counts[name] for name in self._threads)):
            out.append(self.force())
        return out

    def _wants(self, worker: str, ahead: float) -> bool:
        """Whether a worker has less at hand than it should: one item waits, however long they are."""
        return self._counts[worker] <= self._threads[worker] or self.busy(worker) < ahead

    def any_low(self) -> bool:
        """Whether a worker has so little at hand that it is time to hand out more."""
        low = self.ahead() / 2
        return any(self._wants(name, low) for name in self._threads)


def cut(span: Any, grids: Mapping[str, Any], fan_in: int) -> list[Any]:
    """The children of a span in its part's tree; none of a leaf."""
    if span.level == 0:
        return []
    first, stop = span.index * fan_in, grids[span.part].n_nodes(span.level - 1)
    return [type(span)(span.part, span.level - 1, i) for i in range(first, min(first + fan_in, stop))]
