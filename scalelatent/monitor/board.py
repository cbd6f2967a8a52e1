"""All jobs that a scheduler has heard of, in bounded memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from .job import ENDED, JobView
from .worker_stats import clip

__all__ = ["TOPIC", "Board"]

TOPIC = "scalelatent"
JOBS, WHOLE_JOBS, LOST = 300, 20, 50


class Board:
    """Messages in, tables and curves out.

    Parameters
    ----------
    jobs : int
        Jobs kept; the one that ended first goes first.
    whole_jobs : int
        Ended jobs of which single workers and finer curves are kept too.

    Examples
    --------
    >>> board = Board()
    >>> board.feed({"kind": "pass", "run": "runs/a", "pass": 1, "objective": 0.25}, now=10.0)
    >>> [(job["id"], job["objective"]) for job in board.summary(now=11.0)]
    [('a', 0.25)]
    """

    def __init__(self, jobs: int = JOBS, whole_jobs: int = WHOLE_JOBS) -> None:
        self.limit, self.whole_jobs = jobs, whole_jobs
        self.jobs: dict[str, JobView] = {}
        self.lost: deque[dict[str, Any]] = deque(maxlen=LOST)
        self.lost_total = self.joined_total = 0

    def feed(self, message: Any, now: float | None = None) -> None:
        """Take in a message of topic ``"scalelatent"``; what is none is passed over.

        Parameters
        ----------
        message : dict
            With ``kind`` and ``run``; see the contract in `scalelatent.monitor.publish`.
        now : float, optional
            Seconds since the epoch.
        """
        now = time.time() if now is None else now
        if not isinstance(message, Mapping):
            return
        if message.get("kind") in ("lost", "joined"):
            self._worker(message, now)
        elif message.get("run") and message.get("kind") in ("state", "pass", "progress", "span", "event"):
            job = self._job(clip(message["run"], 1000))
            was = job.state
            job.feed(message, now)
            if job.state in ENDED and was not in ENDED:
                self._compact()

    def find(self, name: str) -> JobView | None:
        """A job by its id or its run folder."""
        return self.jobs.get(name) or next((job for job in self.jobs.values() if job.id == name), None)

    def summary(self, now: float | None = None) -> list[dict[str, Any]]:
        """A row for each job: running ones first, then the one that was heard of last."""
        now = time.time() if now is None else now
        order = sorted(self.jobs.values(), key=lambda job: (job.state in ENDED, -(job.began or job.seen)))
        return [job.summary(now) for job in order]

    def _job(self, run: str) -> JobView:
        job = self.jobs.get(run)
        if job is None:
            if len(self.jobs) >= self.limit:
                first = min(self.jobs.values(), key=lambda j: (j.state not in ENDED, j.ended or j.seen))
                del self.jobs[first.run]
            job = self.jobs[run] = JobView(run)
        return job

    def _compact(self) -> None:
        ended = sorted((job for job in self.jobs.values() if job.ended), key=lambda job: -(job.ended or 0.0))
        for job in ended[self.whole_jobs :]:
            job.compact()

    def _worker(self, message: Mapping[str, Any], now: float) -> None:
        if message["kind"] == "joined":
            self.joined_total += 1
            return
        if message.get("expected"):
            return
        self.lost_total += 1
        address, name = clip(message.get("worker") or "?", 200), clip(message.get("name") or "", 80)
        memory, keys = message.get("memory"), message.get("keys")
        memory = float(memory) if isinstance(memory, (int, float)) else None
        keys = [clip(key, 120) for key in keys[:50]] if isinstance(keys, (list, tuple)) else []
        self.lost.append({"time": now, "worker": address, "name": name, "memory": memory, "tasks": keys})
        for job in self.jobs.values():
            job.lose(address, name, now, memory, len(keys))
