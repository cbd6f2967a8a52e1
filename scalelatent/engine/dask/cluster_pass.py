"""One pass on a Dask cluster: each span (range of rows), each merge of partial sums and the M-step is a task.

The tasks of the next pass depend on the M-step. Partial sums are merged in a fixed tree, so that results have
the same bits on any cluster. No task graph is larger than one pass (laws 1 and 7; `test_same_bits.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scalelatent.engine.grid import FAN_IN
from scalelatent.engine.passes import Span, Stage

from .graph import Graph, TaskRef
from .pass_tasks import make_pass_info, task_merge, task_mstep, task_params, task_span
from .pools import POOLED, estimate_costs
from .trial import try_span
from .window import AT_ONCE, Batch, TaskEnded, Window, Work

if TYPE_CHECKING:
    import numpy as np
    from distributed import Future

    from scalelatent.data.dataset import Dataset

    from .executor import DaskExecutor
    from .pass_tasks import PassInfo

# A pass depends on the M-step of the previous pass. After this number of tasks or passes in a row, a pass
# reads its state from the run folder instead, so that the scheduler can forget older tasks. With these
# numbers, the scheduler had at most 65 tasks and grew by 1 kB per pass (thousand_passes.py).
CHAIN_TASKS, CHAIN_PASSES = 2000, 32
# Maximum seconds that a driver waits for the event with the results of a finished M-step; after that, it
# reads the run folder. Usually the event arrives in one packet with the message that the M-step is done.
EVENT_SECONDS = 1.0


class DaskPass(Work[Span]):
    """A pass over all rows, with the M-step of a learner or, if ``learns`` is False, without an M-step.

    1. Send the tasks of the first spans (ranges of rows); each task computes the statistic of its rows.
    2. After some spans are done, send more. Add a task that merges eight neighbouring partial sums as soon as
       the tasks of all eight are known.
    3. With the last spans, send the M-step, which merges the remaining partial sums and writes the next
       state.
    4. Send the next pass, which depends on the M-step, so that the cluster never waits for the driver.
    5. Finish when the event with the results of the M-step has arrived.
    """

    def __init__(
        self,
        executor: DaskExecutor,
        stage: Stage,
        iteration: int,
        spans: list[Span],
        finished: Sequence[Span] = (),
        *,
        learns: bool = True,
        behind: DaskPass | None = None,
    ) -> None:
        super().__init__(stage.name, iteration + 1, executor.pass_token, stage.rows)
        self.executor, self.stage, self.iteration, self.learns = executor, stage, iteration, learns
        self.ref = executor.stage_refs[stage.name]
        self.following: DaskPass | None = None
        self.links: int = 0 if behind is None else behind.links + 1
        # Only in a pass without M-step: the key of the task that computes the sum over all rows, and this sum
        # after the driver has it; both dicts have the keys "train" and "validation".
        self._roots: dict[str, str] = {}
        self.sums: dict[str, np.ndarray] = {}
        self._n_spans, self._finished = len(spans) + len(finished), frozenset(finished)
        # Futures, by key, of the tasks whose results later graphs or the driver need.
        self._futures: dict[str, Future] = {}
        self._params: str | None = None  # key of the task that returns the state before this pass
        if behind is not None and behind.mstep is not None:
            self._params = str(behind.mstep.key)
            self._futures[self._params] = behind.mstep
        self._levels = {
            part: max(span.level for span in [*finished, *spans] if span.part == part) for part in stage.grids
        }
        self._graphs: list[tuple[Graph, list[Future]]] = []
        self.todo = spans
        self._mstep_seen: float | None = None
        self._info: PassInfo | None = None
        self._trees = {part: _Tree(self, part) for part in stage.grids}
        spent = estimate_costs(executor, stage, self._finished)
        self.window = Window(executor.threads, [*finished, *spans], self._send, spent)
        # A short pass requests no futures of its spans (ranges of rows), because each future costs two
        # messages. The driver therefore learns of finished rows only at the end of the pass.
        self._quiet = learns and spent.known and self.window.seconds < AT_ONCE

    def key(self, role: str | None, suffix: str = "") -> str:
        """Return the Dask key of this pass's task with the given role, such as "merge" or "mstep"."""
        return key_of(self.stage, role, self.iteration, suffix, self.token)

    def _span_key(self, span: Span) -> str:
        level = "" if span.level == self._levels[span.part] else f"{span.level}-"
        role = POOLED if self.window.unequal else None
        return self.key(role, f"{_part_prefix(span.part)}{level}{span.index:04d}")

    # -- sending ---------------------------------------------------------------------------------------------

    def _send(self, batch: Batch[Span], last: bool) -> dict[Span, Future]:
        graph = Graph()
        if self.learns and self._params is None:
            self._params = self.key("params")
            graph.add(self._params, task_params, self.ref, self.stage.name, self.iteration)
        params = None if self._params is None else graph.ref(self._params)
        keys = {}
        for span, worker in batch:
            keys[span] = key = self._span_key(span)
            graph.add(
                key,
                task_span,
                self.ref,
                self.stage.name,
                self.iteration,
                span,
                params,
                self.executor.fit,
                self.executor.checkpoint_seconds,
                span in self._finished,
                worker=worker,
                reads=self.reads(span),
            )
            self.items[key] = span
            self._trees[span.part].add_sum(graph, span.level, span.index, key)
        quiet = self._quiet and last and self._params is not None and not self.window.pending
        if not last:
            open_sums = {key for tree in self._trees.values() for key in tree.open_sums.values()}
            kept = {key for key in graph.tasks if key in open_sums or key == self._params}
        elif self.learns:
            kept = {self._add_mstep(graph, params)}
        else:
            kept = self._add_roots(graph)
        wanted = kept if quiet else kept.union(keys.values())
        futures = graph.send(self.executor.client, wanted, self.executor.watch.only)
        self._futures.update((key, futures[key]) for key in kept)
        # A graph holds the futures whose results it merges, until one of its tasks has ended.
        self._graphs = [(g, own) for g, own in self._graphs if all(f.status == "pending" for f in own)]
        self._graphs.append((graph, list(futures.values())))
        return {} if quiet else {span: futures[key] for span, key in keys.items()}

    def _add_mstep(self, graph: Graph, params: TaskRef | None) -> str:
        key = self.key("mstep")
        sums = [tree.take_sums(graph) for tree in self._trees.values()]
        about = self.ref, self.stage.name, self.iteration, list(self._trees)
        graph.add(key, task_mstep, *about, sums, params, self.executor.fit, priority=10)
        return key

    def _add_roots(self, graph: Graph) -> set[str]:
        """Add the tasks that sum all training and all validation rows; return their keys."""
        for part, tree in self._trees.items():
            self._roots[part] = self.key("merge", f"{part}-root")
            graph.add(self._roots[part], task_merge, tree.take_sums(graph), priority=10)
        return set(self._roots.values())

    def use(self, graph: Graph, key: str) -> TaskRef:
        """Return a reference to a partial sum; ``graph`` then holds its future, and this pass does not."""
        future = self._futures.pop(key, None)
        return graph.ref(key) if future is None else graph.hold(future)

    @property
    def mstep(self) -> Future | None:
        """Future of the M-step, or None before its task was sent."""
        return self._futures.get(self.key("mstep"))

    def open_following(self) -> None:
        """Send the next pass, which depends on this pass's M-step, unless too many passes are linked so."""
        if not self.learns or self.following is not None or not self.window.all_sent:
            return
        links = self.links + 1
        if links < CHAIN_PASSES and links * self._n_spans < CHAIN_TASKS:
            spans = self.executor.list_spans(self.stage)
            self.following = DaskPass(self.executor, self.stage, self.iteration + 1, spans, behind=self)
            self.following.window.open()

    # -- supervision -----------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Count finished tasks and send more; send the next pass once all tasks of this pass are sent."""
        moved = super().poll()
        self.open_following()
        return moved

    def about(self, item: Span) -> dict[str, Any]:
        rows = list(self.stage.grids[item.part].node_rows(item.level, item.index))
        return {"part": item.part, "span": item.index, "level": item.level, "rows": rows}

    def dataset_of(self, item: Span) -> Dataset:
        return self.stage.datasets[item.part]

    def label(self, item: Span) -> str:
        return f"{_part_prefix(item.part)}{item.level}-{item.index:04d}"

    def add_trial(self, graph: Graph, key: str, item: Span, note: str, worker: str) -> None:
        about = self.ref, self.stage.name, self.iteration, item, self.learns
        graph.add(key, try_span, *about, self.executor.fit, note, worker=worker)

    @property
    def done(self) -> bool:
        """True if the driver has the results of the M-step or, in a pass without M-step, all sums."""
        if self.learns:
            return self.result is not None
        for part, key in self._roots.items():
            if part not in self.sums:
                self.sums.update((part, vector) for vector in self.executor.fetched(self._futures[key]))
        return self.window.all_sent and len(self.sums) == len(self.stage.grids)

    @property
    def result(self) -> PassInfo | None:
        """Results of the M-step from its event or, if the event was lost, the run folder; None until then."""
        mstep = self.mstep
        if self._info is None and mstep is not None:
            report = self.executor.pass_report(self)
            if report is not None:
                self._info = json.loads(report)
            elif mstep.status in ("error", "cancelled"):
                raise TaskEnded(None, mstep)
            elif mstep.status == "finished":
                self._mstep_seen = self._mstep_seen or time.monotonic()
                if time.monotonic() - self._mstep_seen > EVENT_SECONDS:
                    self._info = self._read_info()
        return self._info

    def _read_info(self) -> PassInfo:
        """Return the results of the M-step from the state that it wrote, without the number of bytes read."""
        state = self.executor.store.load_state(self.stage.name, self.iteration + 1)
        return make_pass_info(self.stage, state, self.stage.rows, 0)

    def release(self) -> None:
        super().release()
        self._trees.clear()
        self._roots.clear()
        self._graphs.clear()
        self._futures.clear()


def key_of(stage: Stage, role: str | None, iteration: int, suffix: str, token: str) -> str:
    """Return the Dask key of a task of a pass; users read it on the dashboard."""
    if role == POOLED:
        return f"{stage.name}_{role}-it{iteration + 1:04d}-{suffix}-{token}"
    # Keys of the stage ``capsule_estep`` start with ``capsule_estep``, ``capsule_mstep`` and so on. Keys of a
    # stage with another ending contain the whole name of the stage, because Dask would return the result of
    # one stage to another stage of the model if two of their keys were equal.
    model = stage.name.split("_")[0] if stage.name.endswith("_estep") else stage.name
    name = f"{model}_{role}" if role else stage.name
    return f"{name}-it{iteration + 1:04d}{'-' + suffix if suffix else ''}-{token}"


def _part_prefix(part: str) -> str:
    """Return the letter in task names for the rows ``part``: "s" for "train", "v" for "validation"."""
    return {"train": "s", "validation": "v"}.get(part, f"{part}-")


class _Tree:
    """Tree of the partial sums of training or validation rows; merge tasks sum up to eight nodes into one."""

    def __init__(self, owner: DaskPass, part: str) -> None:
        self._owner, self._part, self._grid = owner, part, owner.stage.grids[part]
        # Key of the task of each partial sum that is not merged yet, by (level, index) of its node.
        self.open_sums: dict[tuple[int, int], str] = {}

    def add_sum(self, graph: Graph, level: int, index: int, key: str) -> None:
        """Add the task ``key`` of a partial sum; merge eight neighbouring sums whose tasks are all known."""
        self.open_sums[level, index] = key
        while level < self._grid.depth - 1:
            family, parent = [(level, i) for i in self._grid.family(level, index)], index // FAN_IN
            if not all(node in self.open_sums for node in family):
                return
            children = [self.open_sums.pop(node) for node in family]
            level, index, key = level + 1, parent, children[0]
            if len(children) > 1:
                key = self._owner.key("merge", f"{_part_prefix(self._part)}{level}-{index:04d}")
                sums = [self._owner.use(graph, child) for child in children]
                graph.add(key, task_merge, sums, priority=5)
            self.open_sums[level, index] = key

    def take_sums(self, graph: Graph) -> list[TaskRef]:
        """Remove the partial sums that are left at the end of a pass; return references to them, in order."""
        return [self._owner.use(graph, self.open_sums.pop(node)) for node in sorted(self.open_sums)]
