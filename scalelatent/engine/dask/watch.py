"""Detect stalled work on a cluster: lost or hanging workers, and tasks that no worker can run.

Dask waits forever for a task that hangs or that no worker can run; `test_survive.py` tests both cases.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .scheduler_listener import listener, pass_topic

if TYPE_CHECKING:
    from .executor import DaskExecutor
    from .link import ClusterMember
    from .scheduler_listener import Handler
    from .window import Item, Work

Shard = tuple[str, int, int]  # (file, first row, row after the last) of a dataset shard
# Minimum seconds between two queries for the memory of all workers; an answer has 2 kB per worker.
MEMBERS_SECONDS = 5.0
# After FIRST_LOOK seconds without a finished task, the tasks of a pass are checked; the time until the next
# check doubles each time, up to LAST_LOOK.
FIRST_LOOK, LAST_LOOK = 1.0, 30.0
# A pass is retried after this number of consecutive checks (about 4 s) that find no task of it on any worker.
MAX_IDLE_CHECKS = 3
# A task counts as hanging if it sends no report for HANG_SECONDS, and for HANG_TIMES times the usual duration
# of a task. A running task sends a report every ten seconds (worker_side.BEAT_SECONDS).
HANG_SECONDS, HANG_TIMES = 60.0, 20.0
# M-steps, merges and tasks of other programs send no reports. They count as hanging after this many seconds
# without progress of the pass.
MAX_SILENT_SECONDS = 3600.0
# After DEATHS workers died while they had the task of an item (its rows), this task runs alone, so that bad
# rows kill at most three workers (test_bad_shards.py).
DEATHS = 2
# Prefix of the Dask key of a job's driver, which is itself a task on a worker.
DRIVERS = "scalelatent-job-"
# Maximum seconds to wait for the event that a worker died, after an error that names this worker.
REPORT_SECONDS = 2.0
# Seconds for which a worker on which a task hung gets no more tasks.
AVOID_SECONDS = 900.0


class Retry(Exception):
    """Signal that a pass, a map or a segment of steps must be started again."""

    advice = "Look at the logs of the workers"
    """Advice in the error message if retries do not help."""


class WorkerDied(Retry):
    """Signal that a worker process ended unexpectedly while it ran tasks of a pass, map or segment."""

    advice = (
        "Most often that is memory: look at the logs of the workers, and give them more memory or fewer "
        "threads ([cluster] memory_limit, threads)"
    )


class NoProgress(Retry):
    """Signal that the tasks of a pass, map or segment have sent no report for too long."""

    advice = (
        "Look in the logs of these workers for the cause (a storage that does not answer, a machine that "
        "swaps), and stop the workers that hang"
    )


def _when_died(workers: int) -> str:
    return "1 worker when it died" if workers == 1 else f"{workers} workers when they died"


class Watch:
    """Supervisor of the tasks of one executor; it detects lost workers, hanging tasks and missing progress.

    1. Receive the scheduler's events of workers that join or leave, and the reports of running tasks.
    2. After a worker died, record its address for each item (the rows of one task) whose task it had.
    3. If two workers died while they read the same shard, raise `WorkerDied`; its items then run alone.
    4. If no task has finished for some seconds, ask the scheduler which workers have tasks of this work.
    5. Raise `NoProgress` if these tasks send no reports, and `Retry` if no worker has such a task.
    """

    def __init__(self, executor: DaskExecutor) -> None:
        self._executor, self.topic = executor, pass_topic(executor.token)
        self.pass_reports: dict[tuple[str, str, int], str] = {}
        self.avoided: dict[str, float] = {}
        self.members: dict[str, ClusterMember] = {}  # last known properties of each worker, by address
        # Addresses of the workers that died while they had one task, by (stage, pass, item: rows of the
        # task).
        self.deaths: dict[tuple[str, int, Any], list[str]] = {}
        # Cancelled tasks, as (stage, pass, item: rows of the task), that each worker had, by its address. The
        # worker may still compute such a task, and die.
        self._cancelled: dict[str, list[tuple[str, int, Any]]] = {}
        self._members_at = 0.0
        self._worker_events: deque[dict[str, Any]] = deque()
        self._listening = False
        self._beat = self._started = self._moved = 0.0
        self._look, self._idle_checks = FIRST_LOOK, 0

    # -- listening -------------------------------------------------------------------------------------------

    @property
    def _topics(self) -> list[tuple[str, Handler]]:
        return [("all", self._receive_worker_event), (self.topic, self._receive_pass_event)]

    def begin(self) -> None:
        """Subscribe to the scheduler's events."""
        if not self._listening:
            self._listening = True
            for topic, handler in self._topics:
                self._executor.link.call(
                    "events were requested", listener(self._executor.client).add_handler, topic, handler
                )

    def end(self) -> None:
        """Unsubscribe from the scheduler's events."""
        if self._listening:
            self._listening = False
            for topic, handler in self._topics:
                listener(self._executor.client).remove_handler(topic, handler)
            self._worker_events.clear()
            self.pass_reports.clear()

    def _receive_worker_event(self, message: dict[str, Any]) -> None:
        """Queue the event of a worker that joined or left; Dask calls this method in the client's thread."""
        if message.get("action") in ("add-worker", "remove-worker"):
            self._worker_events.append(message)
            self._executor.wake_event.set()

    def _receive_pass_event(self, message: dict[str, Any]) -> None:
        """Process an event that a task has sent; Dask calls this method in the client's thread."""
        if "driver" in message:
            if message["driver"] == self._executor.token and "cut" in message:
                self._executor.receive(message["cut"])
            elif message["driver"] == self._executor.token:
                self._executor.pools.pace.receive(message)
            return
        if message["fit"] != self._executor.pass_token:
            return
        if "info" in message:
            self.pass_reports[message["fit"], message["stage"], message["pass"]] = message["info"]
            self._executor.wake_event.set()
        else:
            self._beat = time.monotonic()

    # -- looking ---------------------------------------------------------------------------------------------

    def start(self, current: Work[Item]) -> None:
        """Start to supervise a pass, map or segment; forget the workers that died during others."""
        self._started = time.monotonic()
        now = (current.name, current.number)
        self.deaths = {key: who for key, who in self.deaths.items() if key[:2] == now}
        self._reset()

    def _reset(self) -> None:
        self._moved, self._look, self._idle_checks = time.monotonic(), FIRST_LOOK, 0

    def span_seconds(self, current: Work[Item]) -> float:
        """Return the mean seconds that one task took on one thread, in a pass that has just ended."""
        spent = time.monotonic() - self._started
        return spent * self._executor.workers / max(len(current.items), 1)

    def check(self, current: Work[Item], moved: bool) -> None:
        """Process queued events of workers that joined or left; raise `Retry` if the pass makes no progress.

        ``moved`` is True if a task has finished since the last call.
        """
        self._remember_members()
        if self._worker_events:
            self._process_worker_events(current)
        if moved:
            self._reset()
        elif time.monotonic() - self._moved > self._look:
            self._look = min(2 * self._look, LAST_LOOK)
            self._check_progress(current)

    def _remember_members(self) -> None:
        """Ask the scheduler for the properties of all workers, unless the last answer is recent."""
        now = time.monotonic()
        # An answer has 2 kB per worker, so the interval grows with the number of workers.
        if now - self._members_at > max(MEMBERS_SECONDS, 0.02 * len(self.members)):
            self._members_at = now
            found = self._executor.link.members()
            for address, member in found.items():
                if address in self.members and self.members[address].memory > member.memory:
                    # Keep the highest memory (bytes), which may explain the death if this worker dies later.
                    found[address] = replace(member, memory=self.members[address].memory)
            # Keep lost workers for error messages, until there are 100 more lost workers than others.
            self.members = {**(self.members if len(self.members) < 2 * len(found) + 100 else {}), **found}

    def _process_worker_events(self, current: Work[Item]) -> None:
        while self._worker_events:
            message = self._worker_events.popleft()
            if message["action"] == "add-worker":
                event = {"event": "worker_joined", "worker": message["worker"]}
                self._executor.callbacks.on_event(event)
                continue
            self._process_lost_worker(current, message)
        if self.suspects(current):
            raise WorkerDied("two workers died while they read the same shard")
        threads = self._executor.look_at_workers()
        if threads:
            current.window.refresh(threads)
            if current.following is not None:
                current.following.window.refresh(threads)

    def _process_lost_worker(self, current: Work[Item], message: dict[str, Any]) -> None:
        worker, expected = message["worker"], bool(message.get("expected", False))
        keys = [key for key in message.get("processing-tasks", ()) if not str(key).startswith(DRIVERS)]
        works = current.list_with_followers()
        lost = [(work, work.items[key]) for work in works for key in keys if key in work.items]
        named = {(work.name, work.number, item) for work, item in lost}
        for key in () if expected else named.union(self._cancelled.pop(worker, ())):
            self._count_death(key, worker)
        event = {"event": "worker_lost", "worker": worker, "expected": expected}
        self._executor.callbacks.on_event({**event, f"{current.unit}s": len(named)})
        for work, item in lost:
            self.report_retry(work, item, "its worker was lost", worker)
        for key in message.get("lost-computed-tasks", ()):
            for work in works:
                if key in work.items:
                    self.report_retry(work, work.items[key], "its worker was lost with the result", worker)
        own = [item for work, item in lost if work is current]
        current.worker_lost(own, worker, len(keys) == 1, expected)

    def record_cancelled(self, work: Work[Item]) -> None:
        """Record which worker has which tasks, before the tasks of a pass or map are cancelled."""
        self._cancelled = {
            address: [(work.name, work.number, work.items[key]) for key in keys if key in work.items]
            for address, keys in self._executor.link.processing().items()
        }

    # -- dead workers ----------------------------------------------------------------------------------------

    def suspects(self, work: Work[Item]) -> list[Item]:
        """Return the items (the rows of one task) with a shard that DEATHS dead workers were reading."""
        now = work.name, work.number
        of_shard: dict[Shard, set[str]] = {}
        lost = [(key[2], who) for key, who in self.deaths.items() if key[:2] == now]
        for item, who in lost:
            for shard in work.shards_of(item):
                of_shard.setdefault(shard, set()).update(who)
        suspect = {shard for shard, who in of_shard.items() if len(who) >= DEATHS}
        return [item for item, _ in lost if suspect.intersection(work.shards_of(item))]

    def forget_deaths(self, work: Work[Item], item: Item) -> None:
        """Forget which workers died while they had the task of ``item`` (the rows of this task)."""
        self.deaths.pop((work.name, work.number, item), None)

    def deaths_of(self, work: Work[Item], item: Item) -> list[str]:
        """Return the addresses of the workers that died while they had the task of ``item`` (its rows)."""
        return self.deaths.get((work.name, work.number, item), [])

    def deaths_with(self, work: Work[Item], item: Item, shards: Iterable[Shard]) -> list[str]:
        """Return the workers that died during tasks that read these shards.

        The workers that had the task of ``item`` are at the end of the list.
        """
        wanted, own = set(shards), self.deaths_of(work, item)
        others = [
            who
            for key, who in self.deaths.items()
            if key[:2] == (work.name, work.number)
            and key[2] != item
            and wanted.intersection(work.shards_of(key[2]))
        ]
        return [*dict.fromkeys(a for who in others for a in who if a not in own), *own]

    def count_named_death(self, work: Work[Item], key: str, worker: str) -> bool:
        """Count the dead worker that an error of the scheduler names for the task ``key``.

        Return True if the rows of some task may have killed two workers.
        """
        deadline = time.monotonic() + REPORT_SECONDS
        while time.monotonic() < deadline and not any(worker in who for who in self.deaths.values()):
            while self._worker_events:
                message = self._worker_events.popleft()
                if message["action"] == "remove-worker":
                    self._process_lost_worker(work, message)
            self._executor.wait(0.05)
        item = work.items.get(key)
        if item is None:
            return bool(self.suspects(work))
        self._count_death((work.name, work.number, item), worker)
        return bool(self.suspects(work))

    def _count_death(self, key: tuple[str, int, Any], worker: str) -> None:
        who = self.deaths.setdefault(key, [])
        if worker not in who:  # The error and an event may both report this death, which counts once.
            who.append(worker)

    def raise_peak_memory(self, address: str, memory: int) -> None:
        """Set the recorded peak memory of a worker to ``memory`` bytes if that is more than before."""
        member = self.members.get(address)
        if member is not None and memory > member.memory:
            self.members[address] = replace(member, memory=memory)

    def describe_deaths(self, work: Work[Item], item: Item, workers: Sequence[str] = ()) -> str:
        """Describe a task and the workers that died while they had it, for an error message.

        If given, ``workers`` are the workers that died while they had any task that reads the same shard.
        """
        workers = workers or self.deaths_of(work, item)
        others = "" if len(workers) == len(self.deaths_of(work, item)) else ", or another one of its shard,"
        lost = "; ".join(self._worker_words(address) for address in dict.fromkeys(workers))
        return f"{work.describe(item)}{others} was with {_when_died(len(workers))}: {lost}"

    def describe_killed_task(self, current: Work[Item] | None, key: str, last: str) -> str:
        """Describe the task ``key``, the workers that died while they had it, and their memory."""
        item = None if current is None else current.items.get(key)
        if current is None or item is None or not self.deaths_of(current, item):
            return f"task {key} was with {_when_died(1)}: {self._worker_words(last)}"
        return self.describe_deaths(current, item)

    def _worker_words(self, address: str) -> str:
        member = self.members.get(address)
        if member is None:
            return address
        limit = f" of {member.memory_limit / 2**30:.1f} GiB" if member.memory_limit else ""
        return f"{address} on {member.host}, {member.memory / 2**30:.2f} GiB{limit} in use at its peak"

    def report_retry(self, current: Work[Item], item: Item, why: str, worker: str) -> None:
        """Notify the callbacks that the task for the rows ``item`` runs again, with the reason ``why``."""
        event = current.make_repeat_event(item, why, worker)
        if event is not None:
            self._executor.callbacks.on_event(event)

    def _check_progress(self, current: Work[Item]) -> None:
        """Raise `Retry` or `RunError` if the scheduler or all workers are lost, or if the tasks hang."""
        link = self._executor.link
        if not link.connected:
            raise link.lost("a pass was running", str(getattr(self._executor.client, "status", "closed")))
        busy = {
            address: [key for key in keys if current.owns(key)] for address, keys in link.processing().items()
        }
        busy = {address: keys for address, keys in busy.items() if keys}
        if busy:
            self._idle_checks = 0
            self._check_hangs(current, busy)
        elif not self._executor.look_at_workers():
            self._executor.wait_for_workers(current.format_count(len(current.window.pending)))
        elif any(member.running for member in link.members().values()):
            # No worker has a task of the pass. A busy scheduler may not have processed the graph yet, so only
            # several such checks in a row count.
            self._idle_checks += 1
            if self._idle_checks >= MAX_IDLE_CHECKS:
                raise Retry("no worker has its tasks, because the workers that had them are lost")

    def _check_hangs(self, current: Work[Item], busy: dict[str, list[str]]) -> None:
        """Raise `NoProgress` if the tasks ``busy`` (keys by worker) have sent no report for too long."""
        quiet = time.monotonic() - max(self._moved, self._beat)
        spans = {
            address: [current.items[key] for key in keys if key in current.items]
            for address, keys in busy.items()
        }
        spans = {address: there for address, there in spans.items() if there}
        usual = self._executor.span_seconds(current.name) or 0.0
        limit = max(current.hang_seconds or HANG_SECONDS, HANG_TIMES * usual) if spans else MAX_SILENT_SECONDS
        if quiet < limit:
            self._look = min(self._look, max(limit - quiet, FIRST_LOOK))
            return
        for address, there in spans.items() if spans else ():
            self.avoided[address] = time.monotonic()
            for item in there:
                self.report_retry(current, item, f"it sent no report for {quiet:.0f} s", address)
        raise NoProgress(f"no report arrived for {quiet:.0f} s from {', '.join(sorted(busy))}")

    def trusted(self, threads: dict[str, int]) -> dict[str, int]:
        """Return the number of threads, by address, of the workers on which no task hung recently.

        If a task hung on every worker, return all workers.
        """
        now = time.monotonic()
        self.avoided = {
            address: since
            for address, since in self.avoided.items()
            if address in threads and now - since < AVOID_SECONDS
        }
        return {a: n for a, n in threads.items() if a not in self.avoided} or threads

    @property
    def only(self) -> list[str]:
        """Addresses of the only workers that may run tasks; empty if all workers may.

        The restriction is needed because Dask counts a hanging worker as idle and sends it tasks.
        """
        bound = self.avoided or self._executor.pools.bound
        return list(self._executor.threads) if bound else []
