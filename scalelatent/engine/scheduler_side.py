"""What a scheduler does for fits: a span that was on two workers that died goes to no third one.

By itself Dask gives it out until `distributed.scheduler.allowed-failures` workers have died, faster than a
driver could hear of it, and then fails whatever lay beside it too. Told here that two deaths are enough, it
fails those tasks at once, and the driver finds the guilty one (see :mod:`.trial`).
"""

from __future__ import annotations

from typing import Any

from distributed import SchedulerPlugin

from . import hooks

__all__ = ["NAME", "SpanGuard"]

NAME = "scalelatent-spans"


class SpanGuard(SchedulerPlugin):
    """Lets spans and shards of maps outlive one death, not two.

    Examples
    --------
    >>> client.register_plugin(SpanGuard(), name=NAME)  # doctest: +SKIP
    """

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.scheduler: Any = None

    async def start(self, scheduler: Any) -> None:
        """Begin to listen."""
        self.scheduler = scheduler

    def log_event(self, topic: str, msg: Any) -> None:
        """Hear that a worker has died."""
        lost = hooks.lost_worker(topic, msg)
        if lost is not None and not lost.expected:
            hooks.last_chance(self.scheduler, lost.keys)
