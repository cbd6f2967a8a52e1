"""One pass on its way through a Dask cluster: spans in a window, the tree behind them, the M-step at its end.

As soon as the last span is handed out, the rest of the tree and the M-step are submitted behind it, and
behind the M-step the first spans of the next pass. So the cluster goes on by itself where the driver would be
waited for twice: once to hear that the last span is done, once that the parameters are.

What depends on an M-step keeps the scheduler from forgetting the pass before. So every now and then a pass
starts from the run folder instead (``…_params``); and where a lost parameter sends Dask back along that
chain, passes whose parameters are in the run folder are not computed again (see :mod:`.dask_tasks`).
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from scalelatent.data.grid import FAN_IN

from .dask_tasks import task_info, task_merge, task_mstep, task_node, task_params, task_span
from .passes import Span, Stage

WINDOW = 2
# Tasks of earlier passes that the scheduler may have to remember, and passes in a chain.
CHAIN_TASKS, CHAIN_PASSES = 2000, 8


class Window:
    """A few items on every worker until all are done.

    Each worker has a list of its own, the same every pass, so that its cache fits; one that runs out takes
    from the longest list.

    Parameters
    ----------
    threads : dict
        Address of a worker -> its threads.
    items : sequence
    submit : callable
        (item, worker) -> future.
    all_given : callable or None
        Called once, when the last item has been submitted.
    """

    def __init__(
        self,
        threads: dict[str, int],
        items: Sequence[Any],
        submit: Callable[[Any, str], Any],
        all_given: Callable[[], None] | None = None,
    ) -> None:
        self._threads, self._submit, self._all_given = threads, submit, all_given
        names = list(threads)
        self._lists = {
            name: deque(items[i * len(items) // len(names) : (i + 1) * len(items) // len(names)])
            for i, name in enumerate(names)
        }
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.pending: dict[Any, tuple[Any, str]] = {}
        self._opened = False

    def open(self) -> None:
        """Hand out the first items."""
        if self._opened:
            return
        self._opened = True
        for _ in range(WINDOW):
            for name, count in self._threads.items():
                for _ in range(count):
                    self._give(name)
        self._look()

    def _give(self, worker: str) -> None:
        source = self._lists[worker] or max(self._lists.values(), key=len)
        if not source:
            return
        # Its own list from the front; from another's list the end, which its owner would reach last.
        item = source.popleft() if source is self._lists[worker] else source.pop()
        future = self._submit(item, worker)
        self.pending[future] = (item, worker)
        future.add_done_callback(self._ended.put)

    def _look(self) -> None:
        if self._all_given is not None and not any(self._lists.values()):
            call, self._all_given = self._all_given, None
            call()

    def run(
        self,
        finish: Callable[[Any, Any], None],
        next_ended: Callable[[Any, Any], Any],
        failed: Callable[[Any], None],
    ) -> None:
        """Wait for all items; ``failed`` raises the error of a task."""
        self.open()
        try:
            while self.pending:
                future = next_ended(self._ended, self.pending)
                item, worker = self.pending.pop(future)
                if future.status != "finished":
                    failed(future)
                self._give(worker)
                self._look()
                finish(item, future)
        finally:
            self.cancel()

    def close(self) -> None:
        """Forget what to submit, and whom to tell."""
        self.pending.clear()
        self._submit, self._all_given = _closed, None

    def cancel(self) -> None:
        """Call off what has not finished.

        By letting go: ``Client.cancel`` follows dependents, and breaks the client where one of them is wanted
        no more.
        """
        for future in self.pending:
            future.release()
        self.pending.clear()


def _closed(item: Any, worker: str) -> Any:
    raise RuntimeError(f"{item} is given to {worker} after its pass has ended")


class DaskPass:
    """A pass of a learner, or of reductions where ``params`` is None.

    Parameters
    ----------
    executor : DaskExecutor
    stage : Stage
    iteration : int
        Passes done before it.
    params : Future or None
        Parameters: of a ``params`` task, or of the M-step before.
    spans : list of Span
        To be computed.
    kept : list of (Span, ndarray)
        Spans that an interrupted run left finished.
    links : int
        Passes before it that the scheduler still remembers.
    """

    def __init__(
        self,
        executor: Any,
        stage: Stage,
        iteration: int,
        params: Any,
        spans: list[Span],
        kept: Sequence[tuple[Span, Any]] = (),
        links: int = 0,
    ) -> None:
        self.executor, self.stage, self.iteration, self.params = executor, stage, iteration, params
        self.links = links
        self.info: Any = None
        self.following: DaskPass | None = None
        self.rows_kept = 0
        self._driven = False
        self._n_spans = len(spans) + len(kept)
        self._trees = {part: _FutureTree(self, part) for part in stage.grids}
        for span, vector in kept:
            key = self.key("kept", f"{span.part}-{span.index:04d}")
            future = self._submit(task_node, *self._name, span, key=key)
            self._trees[span.part].add(span.level, span.index, future)
            self.rows_kept += int(vector[-2])
        self.window = Window(executor.threads, spans, self._submit_span, self._close)

    @property
    def _name(self) -> tuple[Any, str, int]:
        return self.executor.store.ref, self.stage.name, self.iteration

    def key(self, role: str | None, suffix: str = "") -> str:
        """Name of a task of this pass."""
        return self.executor.key(self.stage, role, self.iteration, suffix)

    def _submit(self, function: Any, *args: Any, **how: Any) -> Any:
        return self.executor.client.submit(function, *args, pure=False, **how)

    def _submit_span(self, span: Span, worker: str) -> Any:
        suffix = f"{_letter(span.part)}{span.index:04d}"
        future = self._submit(
            task_span,
            *self._name,
            span,
            self.params,
            self.executor.checkpoint_seconds,
            workers=[worker],
            allow_other_workers=True,
            key=self.key(None, suffix),
        )
        self._trees[span.part].add(span.level, span.index, future)
        return future

    def tops(self) -> dict[str, list[Any]]:
        """Futures of the top nodes of each part, in order; at most eight a part. All spans are handed out."""
        return {part: tree.tops() for part, tree in self._trees.items()}

    def _close(self) -> None:
        """The M-step behind what is on its way, and the next pass behind the M-step."""
        if self.params is None:
            return
        tops = self.tops()
        nodes = list(tops.values())
        mstep = self._submit(
            task_mstep, *self._name, list(tops), nodes, self.params, key=self.key("mstep"), priority=10
        )
        self.info = self._submit(task_info, mstep, key=self.key("info"), priority=10)
        links = self.links + 1
        if links < CHAIN_PASSES and links * self._n_spans < CHAIN_TASKS:
            spans = self.executor.spans(self.stage)
            self.following = DaskPass(
                self.executor, self.stage, self.iteration + 1, mstep, spans, links=links
            )
            self._open_following()

    def _open_following(self) -> None:
        # Only behind the pass that the driver looks after: where one window holds all spans of a pass, they
        # would be handed out without end.
        if self._driven and self.following is not None:
            self.following.window.open()

    def run(
        self,
        finish: Callable[[Span, Any], None],
        next_ended: Callable[[Any, Any], Any],
        failed: Callable[[Any], None],
    ) -> None:
        """Look after the pass until its spans are done."""
        self._driven = True
        self._open_following()
        self.window.run(finish, next_ended, failed)

    def cancel(self) -> None:
        """Call off the pass and what has begun behind it."""
        if self.following is not None:
            self.following.cancel()
        self.window.cancel()
        self.release()

    def release(self) -> None:
        """Let go of all futures at once: the pass and its window hold each other, and would wait for a
        collection of garbage, the scheduler with them.
        """
        self._trees.clear()
        self.window.close()
        self.params = self.info = self.following = None


def _letter(part: str) -> str:
    """A part in the names of its tasks; keys of two parts must differ."""
    return {"train": "s", "validation": "v"}.get(part, f"{part}-")


class _FutureTree:
    """Futures of one part's nodes; a complete family below the top becomes a merge task."""

    def __init__(self, owner: DaskPass, part: str) -> None:
        self._owner, self._part, self._grid = owner, part, owner.stage.grids[part]
        self._nodes: dict[tuple[int, int], Any] = {}

    def add(self, level: int, index: int, future: Any) -> None:
        self._nodes[level, index] = future
        while level < self._grid.depth - 1:
            family, parent = [(level, i) for i in self._grid.family(level, index)], index // FAN_IN
            if not all(node in self._nodes for node in family):
                return
            futures = [self._nodes.pop(node) for node in family]
            key = self._owner.key("merge", f"{_letter(self._part)}{level + 1}-{parent:04d}")
            merged = (
                futures[0]
                if len(futures) == 1
                else self._owner._submit(task_merge, futures, key=key, priority=5)
            )
            level, index = level + 1, parent
            self._nodes[level, index] = merged

    def tops(self) -> list[Any]:
        """The last family, in order: the M-step merges it."""
        return [self._nodes[node] for node in sorted(self._nodes)]


def params_of(executor: Any, stage: Stage, iteration: int) -> Any:
    """Future of the parameters that lie in the run folder."""
    key = executor.key(stage, "params", iteration)
    return executor.client.submit(task_params, executor.store.ref, stage.name, iteration, key=key, pure=False)
