"""What a scheduler does for fits where a worker dies with spans.

`test_bad_shards.py` needs it: no shard ends a fourth worker, and Dask's allowed-failures knows tasks alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from distributed import SchedulerPlugin

from . import hooks

if TYPE_CHECKING:
    from distributed import Scheduler

__all__ = ["NAME", "SpanGuard", "together"]

NAME = "scalelatent-spans"


class SpanGuard(SchedulerPlugin):
    """Retries a span after the first worker that died with it, and fails it after the second."""

    # By itself Dask gives a span out until allowed-failures workers have died of it, and spreads what one
    # worker had over many: each span that reads the bad chunk would take another worker with it. So what a
    # dead worker had of one shard goes to one worker, and all that read it fail at the second death. Workers
    # that read the shard at the same moment as the first one die with it.

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.scheduler: Scheduler
        self._bound: dict[str, str] = {}  # key of a span -> the worker that alone may compute it

    async def start(self, scheduler: Scheduler) -> None:
        """Begin to listen."""
        self.scheduler = scheduler

    def log_event(self, topic: str, msg: object) -> None:
        """Hear that a worker is lost, before the scheduler gives its tasks to others."""
        lost = hooks.lost_worker(topic, msg)
        if lost is None:
            return
        self._free(lost)
        if not lost.expected:
            self._contain(lost.keys)

    def _free(self, lost: hooks.LostWorker) -> None:
        """Any worker may compute what was bound to the lost one, unless that may have died of it."""
        there = {k: w for k, w in self._bound.items() if hooks.task_state(self.scheduler, k) is not None}
        free = [k for k, w in there.items() if w == lost.worker and (lost.expected or k not in lost.keys)]
        hooks.bind(self.scheduler, free, None)
        self._bound = {key: worker for key, worker in there.items() if key not in free}

    def _contain(self, keys: list[str]) -> None:
        lost = hooks.spans_at(self.scheduler, keys)
        others = hooks.spans_at(self.scheduler) if lost else []
        for spans in together(lost):
            what, first, stop = spans[0].reads[0], spans[0].reads[1], max(span.reads[2] for span in spans)
            sharing = [
                at for at in others if at.reads[0] == what and at.reads[1] < stop and first < at.reads[2]
            ]
            hooks.last_chance(self.scheduler, [span.key for span in (*spans, *sharing)])
            if sharing or len(spans) > 1:
                loads = hooks.loads(self.scheduler)
                there = {other.worker for other in sharing}.intersection(loads) or set(loads)
                worker = min(there, key=lambda address: (loads[address], address), default=None)
                own = [span.key for span in spans]
                if worker:
                    self._bound |= dict.fromkeys(hooks.bind(self.scheduler, own, worker), worker)


def together(spans: Iterable[hooks.SpanAt]) -> list[list[hooks.SpanAt]]:
    """Spans in groups, so that no shard is read by two of them."""
    groups: list[list[hooks.SpanAt]] = []
    ends = ("", 0)
    for span in sorted(spans, key=lambda span: span.reads):
        what, start, stop = span.reads
        if what == ends[0] and start < ends[1]:
            groups[-1].append(span)
            ends = (what, max(stop, ends[1]))
        else:
            groups.append([span])
            ends = (what, stop)
    return groups
