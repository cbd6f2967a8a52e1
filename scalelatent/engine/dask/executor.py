"""Executor of fits on a Dask cluster, with the same bits as the executor of one process.

Both executors sum statistics in the same fixed tree, so that they give identical bits (law 4 of DESIGN.md;
`test_same_bits.py`).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from scalelatent.contract.stats import Stats
from scalelatent.engine.callbacks import Callback
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.executor import OnRows, StepResult
from scalelatent.engine.order import RowOrder
from scalelatent.engine.passes import Span, Stage, list_spans, plan_spans, split_vector
from scalelatent.engine.quarantine import Quarantine
from scalelatent.engine.rates import choose_cache
from scalelatent.errors import RunError
from scalelatent.storage.disk import Location, locate
from scalelatent.storage.folder_probe import find_folder_problem
from scalelatent.storage.write_checks import contains

from .cluster_pass import DaskPass
from .failures import WAIT_SECONDS, RowsExcluded, guard_spans, supervise
from .link import CALL_SECONDS, Link
from .maps import run_map, save_lazy
from .online_steps import DaskSteps
from .pools import Pools
from .scheduler_listener import KERNELS, listener
from .timed_calls import GONE_ERRORS, ask_workers
from .trial import clear_attempts, find_suspect_items, run_isolated
from .watch import NoProgress, Retry, Watch, WorkerDied
from .window import Item, TaskEnded, Work
from .worker_access import send_access

if TYPE_CHECKING:
    from distributed import Client, Future

    from scalelatent.data.dataset import Dataset
    from scalelatent.engine.mapwrite import OutputTask

W = TypeVar("W", bound=Work[Any])
# A pass or map fails after this number of consecutive retries that finish no further rows.
ATTEMPTS = 4
# Maximum seconds that a fit waits for a first worker. Dask would wait forever (no-workers-timeout).
STALL_SECONDS = 300.0
# Reuse worker information for this many seconds, so that short passes do not query the scheduler each time.
REFRESH_SECONDS = 1.0
# Task names include at most this many characters of the job id, so that they fit on one dashboard line.
JOB_CHARS = 40


class DaskExecutor:
    """Executor that computes spans (ranges of rows) as tasks of a Dask cluster."""

    keeps_states = True

    def __init__(
        self,
        client: Client,
        store: EngineStore,
        checkpoint_seconds: float = 30.0,
        callbacks: Callback | None = None,
        quarantine: Quarantine | None = None,
        cache: float | None = None,
        job: str = "",
    ) -> None:
        self.cache = cache
        self.client, self.link = client, Link(client)
        self.store = store
        self.checkpoint_seconds = checkpoint_seconds
        self.callbacks = callbacks or Callback()
        self.quarantine = quarantine or Quarantine("stop", store)
        self.spread, self._parts = "auto", 0
        # Suffix of the names of tasks and records. It has the end of a long job id, where ids differ most.
        self.token = "-".join(filter(None, (job[-JOB_CHARS:], uuid.uuid4().hex[:6])))
        self.pass_token = self.token
        self.wake_event = threading.Event()
        # For each stage, the reference (folder, run id, token) with which tasks load it; the token is new
        # each time that the stage is written.
        self.stage_refs: dict[str, tuple[str, ...]] = {}
        self._skipped: dict[str, dict[str, Any]] = {}
        self._seconds: dict[str, float] = {}
        self._queued_pass: DaskPass | None = None
        self._has_checked_crashes = False
        self.watch, self.pools = Watch(self), Pools(self.link)
        self.threads, self._looked = self.link.threads(), time.monotonic()
        if not self.threads:
            raise RunError(
                f"the cluster {self.link.address} has no workers: start some (`dask worker "
                f"{self.link.address}`), then fit again"
            )
        self._check_shared(self.store.location, "the run folder", "run_dir=…, or [job] out")
        guard_spans(client)
        self._events: deque[dict[str, Any]] = deque(maxlen=1000)
        self.lost_gpus: dict[str, str] = {}  # worker -> error of its GPU before its process ended
        self.link.call("events were requested", listener(client).add_handler, KERNELS, self.receive)

    # -- workers ---------------------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """Number of tasks that run at the same time: the threads of all workers, at least 1."""
        return max(1, sum(self.threads.values()))

    def refresh(self) -> None:
        """Ask the scheduler for the workers again if the last answer is older than `REFRESH_SECONDS`."""
        if time.monotonic() - self._looked > REFRESH_SECONDS:
            self.look_at_workers()

    def look_at_workers(self) -> dict[str, int]:
        """Return the number of threads of each worker that the fit uses, by address of the worker."""
        found = self.pools.chosen(self.watch.trusted(self.link.threads()))
        self._looked = time.monotonic()
        self.threads = found or self.threads
        return found

    def compute_on(self, device: str) -> None:
        """Set the device of the fit: ``"auto"``, ``"cpu"``, ``"gpu"`` or ``"reference"``."""
        self.pools.compute_on(device, self.threads)
        self.look_at_workers()
        offers = self.pools.offers(self.threads)
        if len(offers) > 1:
            self.pools.report_devices(offers, self.callbacks)

    def wait_for_workers(self, work: str = "the next step") -> dict[str, int]:
        """Return the number of threads of each worker, by address; wait until there is a worker."""
        begin = time.monotonic()
        while not (found := self.look_at_workers()):
            if time.monotonic() - begin > STALL_SECONDS:
                kind = "workers with a GPU" if self.pools.device == "gpu" else "workers"
                raise RunError(
                    f"no {kind} are left on {self.link.address} for {work}, and none joined within "
                    f"{STALL_SECONDS:.0f} s. Start workers, then resume the run; finished passes are kept"
                )
            self.wait(WAIT_SECONDS)
        return found

    def _check_shared(self, location: Location, name: str, option: str, *, all_answer: bool = True) -> None:
        """Raise a RunError if a worker cannot use a folder or, with ``all_answer``, does not answer."""
        mark = f".seen-{self.token}"
        action = f"the workers were looking for {name}"
        ask: Any = partial(self.link.ask_workers, action) if all_answer else partial(ask_workers, self.client)
        location.write(mark, b"seen")
        try:
            wrong = ask(find_folder_problem, location.url, mark)
        finally:
            location.delete(mark)
        blind = {a: str(words) for a, words in wrong.items() if words and not isinstance(words, GONE_ERRORS)}
        if blind:
            raise RunError(
                f"worker(s) {', '.join(blind)} do not see {name} {location.url} "
                f"({'; '.join(sorted(set(blind.values())))}): put it on storage that all workers share "
                f"({option}), and give them its credentials"
            )

    def send_access(self, dataset: Dataset) -> None:
        """Send the workers the storage options with which this process opened a dataset."""
        send_access(self.client, dataset)

    # -- names and events ------------------------------------------------------------------------------------

    def next_token(self) -> str:
        """Return a new suffix for task names, because Dask returns the old result for a name in use."""
        self._parts += 1
        return f"{self.token}{self._parts}"

    @property
    def fit(self) -> tuple[str, ...]:
        """Address of this driver for events of its tasks: (topic, token of the pass, token of the driver)."""
        return self.watch.topic, self.pass_token, self.token

    def _save_stage(self, stage: Stage) -> None:
        """Write a stage (learner and datasets) to the run folder, and choose a new reference to it."""
        skipped = self._skipped[stage.name] = self.quarantine.excluded_parts(stage)
        self.store.save_stage(replace(stage, skipped=skipped, cache=choose_cache(self.cache, stage)))
        self.pass_token = self.next_token()
        self.stage_refs[stage.name] = (*self.store.ref, self.pass_token)

    def span_seconds(self, name: str) -> float | None:
        """Return the measured seconds of one task of a stage on one thread; None before the first pass."""
        return self._seconds.get(name)

    def pass_report(self, current: DaskPass) -> str | None:
        """Return the JSON text of the results that a pass's M-step sent as an event; None until then."""
        return self.watch.pass_reports.get((current.token, current.stage.name, current.iteration + 1))

    def wait(self, seconds: float) -> None:
        """Wait at most ``seconds`` for an event; a callback may raise an error to interrupt the fit."""
        self.callbacks.on_wait()
        self._report_events()
        if self.wake_event.wait(min(seconds, WAIT_SECONDS)):
            self.wake_event.clear()

    def receive(self, event: dict[str, Any]) -> None:
        """Queue an event from a worker for the callbacks; Dask calls this method in the client's thread."""
        if event["event"] == "card_lost":
            self.lost_gpus[event["worker"]] = event["message"]
        self._events.append(event)
        self.wake_event.set()

    def _report_events(self) -> None:
        while self._events:
            self.callbacks.on_event(self._events.popleft())

    # -- passes ----------------------------------------------------------------------------------------------

    def put_state(self, stage: Stage, iteration: int, state: object) -> int:
        """Write a stage and its state into the run folder, from which the workers load both."""
        self._cancel_queued_pass()
        self._save_stage(stage)
        self.store.save_state(stage.name, iteration, state, durable=True)
        self.watch.begin()
        return iteration

    def get_state(self, stage: Stage, iteration: int, handle: int) -> Any:
        return self.store.load_state(stage.name, handle)

    def list_spans(self, stage: Stage) -> list[Span]:
        """Return the spans (ranges of rows, one per task) of a pass for the present number of threads."""
        return list_spans(stage, self.workers)

    def step(self, stage: Stage, iteration: int, handle: int, on_rows: OnRows) -> StepResult:
        """Run one pass and its M-step on the cluster; the pass may have been sent in advance."""
        current = self._queued_pass
        if current is None or current.stage is not stage or current.iteration != iteration:
            self._cancel_queued_pass()
            self.refresh()
            current = self._make_pass(stage, iteration)
        current = self.run(lambda: self._make_pass(stage, iteration), on_rows, first=current)
        out = current.result
        self._queued_pass, current.following = current.following, None
        assert out is not None
        if current.window.unequal:
            self.pools.pace.record_pass(current.window.participants, self.threads)
        current.release()
        self.watch.pass_reports.clear()
        if out["done"]:
            self._cancel_queued_pass()
        self.store.drop_nodes(upto=iteration)
        return StepResult(out["summary"], out["done"], out["rows"], out["bytes_read"], iteration + 1)

    def _make_pass(self, stage: Stage, iteration: int, learns: bool = True) -> DaskPass:
        """Return a new pass over all rows that are not excluded; it uses the sums of an interrupted pass."""
        if self.quarantine.excluded_parts(stage) != self._skipped[stage.name]:
            self._save_stage(stage)
        todo, finished = plan_spans(stage, iteration, self.store, self.workers)
        return DaskPass(self, stage, iteration, todo, finished, learns=learns)

    def run(self, create_work: Callable[[], W], on_rows: OnRows, first: W | None = None) -> W:
        """Run a pass or map to its end, and return it; after each failure, run a new one.

        ``first`` is the pass to start with; ``create_work`` creates all others.
        """
        self.watch.begin()
        tries, most = 0, -1
        while True:
            current, first = first or create_work(), None
            try:
                if self._run_suspects_first(current):
                    continue
                supervise(self, current, on_rows)
                self._seconds[current.name] = self.watch.span_seconds(current)
                return current
            except RowsExcluded:
                current.cancel()
                # Stored sums of this pass include the rows that are now excluded.
                self.store.drop_nodes()
                self.pass_token = self.next_token()
                tries, most = 0, -1
            except Retry as again:
                try:
                    self.watch.record_cancelled(current)
                finally:
                    current.cancel()
                tries = 1 if current.rows_done > most else tries + 1
                most = max(most, current.rows_done)
                if tries > ATTEMPTS:
                    raise RunError(
                        f"{current.name} (pass {current.number}) was started {tries} times and made no "
                        f"progress: {again}. {again.advice}, then resume the run"
                    ) from None
                self.pass_token = self.next_token()  # New tasks need other names than the cancelled tasks.
                self.wait_for_workers()
            except BaseException:
                current.cancel()
                raise

    def _run_suspects_first(self, current: Work[Item]) -> bool:
        """Before work starts, run each item (the rows of one task) alone that may have killed workers.

        Return True if there are such items; the caller must then create the work again.
        """
        if current.window.opened:  # The pass was sent in advance, so its tasks have started already.
            if self.watch.suspects(current):
                raise WorkerDied("two workers died while they read the same shard")
            return False
        if not self._has_checked_crashes:
            self._has_checked_crashes = True
            find_suspect_items(self, current)
        return run_isolated(self, current)

    def _cancel_queued_pass(self) -> None:
        """Cancel the pass that was sent in advance, if there is one."""
        queued, self._queued_pass = self._queued_pass, None
        if queued is not None:
            queued.cancel()

    def end(self) -> None:
        """Cancel the pass that was sent in advance, and unsubscribe from the scheduler's events."""
        self._cancel_queued_pass()
        self.watch.end()
        self._report_events()
        present = self.pools.offers(self.threads)
        self.pools.report_devices(self.pools.count_computing_workers(), self.callbacks, present)

    def close(self) -> None:
        """Record in the run folder that this driver did not crash; unsubscribe from events about kernels."""
        clear_attempts(self.store)
        listener(self.client).remove_handler(KERNELS, self.receive)

    def online_steps(self, stage: Stage, order: RowOrder, n_epochs: int) -> DaskSteps:
        return DaskSteps(self, stage, order, n_epochs, self.spread)

    def collect(self, stage: Stage, on_rows: OnRows) -> dict[str, Stats]:
        self._cancel_queued_pass()
        self.refresh()
        self._save_stage(stage)
        self.watch.begin()
        try:
            current = self.run(lambda: self._make_pass(stage, 0, learns=False), on_rows)
            current.release()
            sums = {part: split_vector(stage, part, current.sums[part])[0] for part in stage.grids}
        finally:
            self.watch.end()
        self.store.drop_nodes()
        return sums

    def run_map(self, task: OutputTask, on_rows: OnRows) -> None:
        self.refresh()
        location = locate(task.url)
        # The run folder was checked before.
        if not contains(self.store.location, location):
            self._check_shared(location, "the output", "out=…, or the fit's scratch", all_answer=False)
        try:
            run_map(self, task, on_rows)
        finally:
            self.watch.end()

    def save_lazy(self, dataset: Dataset, url: str, on_rows: OnRows) -> Dataset:
        """Write the rows of a dask array; a worker computes and writes each shard."""
        try:
            return save_lazy(self, dataset, url, on_rows)
        finally:
            self.watch.end()

    # -- results and errors ----------------------------------------------------------------------------------

    def fetched(self, future: Future, item: object = None) -> tuple[Any, ...]:
        """Return the result of a task as (result,), or () while it is not available.

        If the worker with the result is lost before the driver has a copy, Dask computes the result again.
        """
        if future.status in ("pending", "lost"):
            return ()
        if future.status != "finished":
            raise TaskEnded(item, future)
        try:
            return (self.link.call(f"the result of {future.key} was fetched", future.result, CALL_SECONDS),)
        except RunError as error:
            if future.status != "finished":
                return ()
            if self.link.connected and isinstance(error.__cause__, TimeoutError):
                raise NoProgress(
                    f"the result of {future.key} could not be fetched within {CALL_SECONDS:.0f} s"
                ) from None
            raise
