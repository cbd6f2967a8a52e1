"""Scheduler plugin that limits how many workers die while they read the same bad shard.

Dask limits the deaths per task (`allowed-failures`), but several tasks read one shard. With this plugin, a
shard kills at most three workers (`test_bad_shards.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from distributed import SchedulerPlugin

from . import hooks

if TYPE_CHECKING:
    from distributed import Scheduler

NAME = "scalelatent-spans"


class SpanGuard(SchedulerPlugin):
    """Plugin that retries a task after one worker died while it ran the task, and fails it after two."""

    # Dask spreads the tasks of a dead worker over many workers, where each task that reads a bad shard kills
    # another worker. The plugin sends all tasks that read the same shard to one worker; if that worker dies
    # too, these tasks fail. A third worker that was reading the shard at the same time can still die.

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.scheduler: Scheduler
        self._bound: dict[str, str] = {}  # key of a task -> address of the only worker that may run it

    async def start(self, scheduler: Scheduler) -> None:
        """Store the scheduler object, because Dask passes it only to this method."""
        self.scheduler = scheduler

    def log_event(self, topic: str, msg: object) -> None:
        """Choose workers for the tasks of a lost worker when Dask logs the loss, before Dask chooses."""
        lost = hooks.lost_worker(topic, msg)
        if lost is None:
            return
        self._free(lost)
        if not lost.expected:
            self._contain(lost.keys)

    def _free(self, lost: hooks.LostWorker) -> None:
        """Let any worker run the tasks that were bound to the lost worker, unless they may have killed it."""
        there = {k: w for k, w in self._bound.items() if hooks.task_state(self.scheduler, k) is not None}
        free = [k for k, w in there.items() if w == lost.worker and (lost.expected or k not in lost.keys)]
        hooks.bind(self.scheduler, free, None)
        self._bound = {key: worker for key, worker in there.items() if key not in free}

    def _contain(self, keys: list[str]) -> None:
        """Group the tasks ``keys`` of a dead worker by the shard that they read; send a group to one worker.

        If that worker dies too, the tasks of its group fail.
        """
        lost = hooks.running_spans(self.scheduler, keys)
        others = hooks.running_spans(self.scheduler) if lost else []
        for spans in group_by_shard(lost):
            part, first, stop = spans[0].reads[0], spans[0].reads[1], max(span.reads[2] for span in spans)
            sharing = [
                at for at in others if at.reads[0] == part and at.reads[1] < stop and first < at.reads[2]
            ]
            hooks.isolate_suspects(self.scheduler, [span.key for span in (*spans, *sharing)])
            if sharing or len(spans) > 1:
                loads = hooks.loads(self.scheduler)
                there = {other.worker for other in sharing}.intersection(loads) or set(loads)
                worker = min(there, key=lambda address: (loads[address], address), default=None)
                own = [span.key for span in spans]
                if worker:
                    self._bound |= dict.fromkeys(hooks.bind(self.scheduler, own, worker), worker)


def group_by_shard(spans: Iterable[hooks.RunningSpan]) -> list[list[hooks.RunningSpan]]:
    """Return the tasks of spans (ranges of rows) in groups; the tasks of a group read the same shard."""
    groups: list[list[hooks.RunningSpan]] = []
    ends = ("", 0)
    for span in sorted(spans, key=lambda span: span.reads):
        part, start, stop = span.reads
        if part == ends[0] and start < ends[1]:
            groups[-1].append(span)
            ends = (part, max(stop, ends[1]))
        else:
            groups.append([span])
            ends = (part, stop)
    return groups
