"""One pass on a Dask cluster: each span (range of rows), each merge of partial sums and the M-step is a task.

The next pass is queued behind the M-step. The tree of merges is fixed (law 1) and no graph is larger than one
pass (law 7); `test_same_bits.py` tests both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scalelatent.engine.grid import FAN_IN
from scalelatent.engine.passes import Span, Stage
from scalelatent.engine.quarantine import whole_shards

from .graph import Graph, Reads, TaskRef
from .pass_tasks import task_info, task_merge, task_mstep, task_params, task_span
from .pools import POOLED, estimate_costs
from .trial import try_span
from .window import AT_ONCE, Batch, TaskEnded, Window, Work

if TYPE_CHECKING:
    import numpy as np
    from distributed import Future

    from scalelatent.data.dataset import Dataset

    from .executor import DaskExecutor
    from .graph import Node
    from .pass_tasks import PassInfo
    from .window import ItemWords

# A pass depends on the M-step of the pass before. After this number of tasks or passes in such a chain, a
# pass starts from the run folder instead, so that the scheduler can forget old tasks. These numbers gave at
# most 65 tasks and 1 kB per pass (thousand_passes.py).
CHAIN_TASKS, CHAIN_PASSES = 2000, 32
# Maximum seconds to wait for the event with the results of a pass; after that, a task fetches them. Usually
# the event arrives in one packet with the message that the M-step is done.
EVENT_SECONDS = 1.0


class DaskPass(Work[Span]):
    """A pass over all rows, with the M-step of a learner or, if ``learns`` is False, without it.

    1. Send the tasks of the first spans; each computes the statistic of its rows.
    2. After some spans are done, send more; add a merge task as soon as all eight children of a node are
       known.
    3. With the last spans, send the M-step, which merges the remaining nodes and writes the next state.
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
        # Only in a pass without M-step: the task (key or future) that computes the sum over all rows, and the
        # sum itself after it was fetched; both by part ("train", "validation").
        self._roots: dict[str, Node] = {}
        self.sums: dict[str, np.ndarray] = {}
        self._n_spans, self._finished = len(spans) + len(finished), frozenset(finished)
        self._params: Node | None = None if behind is None else behind.mstep
        self._levels = {
            part: max(span.level for span in [*finished, *spans] if span.part == part) for part in stage.grids
        }
        self._graphs: list[tuple[Graph, list[Future]]] = []
        self.todo = spans
        self._mstep_seen: float | None = None
        self._info: PassInfo | None = None
        self.mstep: Future | None = None
        self._asked: Future | None = None
        self._trees = {part: _Tree(self, part) for part in stage.grids}
        spent = estimate_costs(executor, stage, self._finished)
        self.window = Window(executor.threads, [*finished, *spans], self._send, spent)
        # A short pass has no futures of spans, because each future costs two more packets; so it reports
        # progress only at its end.
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
            self._params = key = self.key("params")
            graph.add(key, task_params, self.ref, self.stage.name, self.iteration)
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
            self._trees[span.part].add(graph, span.level, span.index, key)
        quiet = self._quiet and last and self._params is not None and not self.window.pending
        wanted = set() if quiet else {*keys.values()}
        if not last:
            wanted.update(*(tree.open_keys(graph) for tree in self._trees.values()))
            wanted |= {self._params} if isinstance(self._params, str) else set()
        else:
            tops = {part: tree.tops() for part, tree in self._trees.items()}
            if self.learns:
                wanted.add(self._add_mstep(graph, tops, params))
            else:
                wanted.update(self._add_roots(graph, tops))
        futures = graph.send(self.executor.client, wanted, self.executor.watch.only)
        self._hold(futures)
        # Earlier graphs hold futures that this graph merges; they are dropped once one of their tasks ended.
        self._graphs = [(g, own) for g, own in self._graphs if all(f.status == "pending" for f in own)]
        self._graphs.append((graph, list(futures.values())))
        return {} if quiet else {span: futures[key] for span, key in keys.items()}

    def _add_mstep(self, graph: Graph, tops: dict[str, list[Node]], params: TaskRef | None) -> str:
        key = self.key("mstep")
        nodes = [[graph.hold(node) for node in nodes] for nodes in tops.values()]
        graph.add(
            key,
            task_mstep,
            self.ref,
            self.stage.name,
            self.iteration,
            list(tops),
            nodes,
            params,
            self.executor.fit,
            priority=10,
        )
        return key

    def _add_roots(self, graph: Graph, tops: dict[str, list[Node]]) -> list[str]:
        keys = {part: self.key("merge", f"{part}-root") for part in tops}
        for part, nodes in tops.items():
            graph.add(keys[part], task_merge, [graph.hold(node) for node in nodes], priority=10)
        self._roots.update(keys)
        return list(keys.values())

    def _hold(self, futures: dict[str, Future]) -> None:
        """Replace keys of the tasks that were just sent by futures, for later graphs and the driver."""
        if isinstance(self._params, str):
            self._params = futures.get(self._params)
        self.mstep = futures.get(self.key("mstep"))
        for tree in self._trees.values():
            tree.hold(futures)
        self._roots = {part: _held(node, futures) for part, node in self._roots.items()}

    def open_following(self) -> None:
        """Queue the next pass behind the M-step of this pass, unless too many passes are in the chain."""
        if not self.learns or self.following is not None or not self.window.all_sent:
            return
        links = self.links + 1
        if links < CHAIN_PASSES and links * self._n_spans < CHAIN_TASKS:
            spans = self.executor.spans(self.stage)
            self.following = DaskPass(self.executor, self.stage, self.iteration + 1, spans, behind=self)
            self.following.open()

    # -- supervision -----------------------------------------------------------------------------------------

    def poll(self) -> bool:
        """Count finished spans and send more; send the next pass once all spans of this pass are sent."""
        moved = super().poll()
        self.open_following()
        return moved

    def item_rows(self, item: Span) -> int:
        """Return the number of rows that the task of a span reads."""
        a, b = self.stage.grids[item.part].node_rows(item.level, item.index)
        return b - a

    def about(self, item: Span) -> ItemWords:
        """Return part, number and rows of a span (the rows of one task) for the event log."""
        a, b = self.stage.grids[item.part].node_rows(item.level, item.index)
        return {"part": item.part, "span": item.index, "level": item.level, "rows": [a, b]}

    def dataset_of(self, item: Span) -> Dataset:
        """Return the dataset to which the rows of a span belong: training or validation rows."""
        return self.stage.datasets[item.part]

    def label(self, item: Span) -> str:
        """Return the label of a span (the rows of one task) in names of tasks and files."""
        return f"{_part_prefix(item.part)}{item.level}-{item.index:04d}"

    def shards_of(self, item: Span) -> list[tuple[str, int, int]]:
        """Return the dataset shards that the task of a span reads."""
        rows = self.stage.grids[item.part].node_rows(item.level, item.index)
        return list(self.stage.datasets[item.part].shards(*rows))

    def reads(self, item: Span) -> Reads:
        """Return (name of training or validation rows, first row, row after the last) of a span's shards."""
        rows = self.stage.grids[item.part].node_rows(item.level, item.index)
        part = f"{self.executor.token}/{item.part}"
        return (part, *whole_shards(self.stage.datasets[item.part], *rows))

    def add_trial(self, graph: Graph, key: str, item: Span, note: str, worker: str) -> None:
        """Add the task that computes one span on a worker that runs nothing else."""
        about = self.ref, self.stage.name, self.iteration, item, self.learns
        graph.add(key, try_span, *about, self.executor.fit, note, worker=worker)

    @property
    def done(self) -> bool:
        """True if the driver has the results of the M-step or, in a pass without M-step, all sums."""
        if self.learns:
            return self.result is not None
        for part, root in self._roots.items():
            if part not in self.sums and not isinstance(root, str):
                self.sums.update((part, vector) for vector in self.executor.fetched(root))
        return self.window.all_sent and len(self.sums) == len(self.stage.grids)

    @property
    def result(self) -> PassInfo | None:
        """Results of the M-step, from its event or, if it was lost, from a task; None until they arrive."""
        if self._info is None and self.mstep is not None:
            report = self.executor.pass_report(self)
            status = self.mstep.status
            if report is not None:
                self._info = json.loads(report)
            elif status in ("error", "cancelled"):
                raise TaskEnded(None, self.mstep)
            elif status == "finished":
                self._mstep_seen = self._mstep_seen or time.monotonic()
                if time.monotonic() - self._mstep_seen > EVENT_SECONDS:
                    self._info = self._ask(self.mstep)
        return self._info

    def _ask(self, mstep: Future) -> PassInfo | None:
        """Return the results of the M-step from a task that fetches them; None until this task has ended."""
        if self._asked is None:
            graph, key = Graph(), self.key("info")
            graph.add(key, task_info, graph.ref(mstep), priority=10)
            self._asked = graph.send(self.executor.client, [key])[key]
            self._asked.add_done_callback(lambda _: self.executor.wake_event.set())
        found = self.executor.fetched(self._asked)
        if not found:
            return None
        if found[0] is not None:
            info: PassInfo = found[0]
            return info
        # Dask lost the result and computed the pass again, but its outcome was in the run folder already.
        state, work = self.executor.store.load_state(self.stage.name, self.iteration + 1), self.stage.batch
        return {
            "summary": work.summary(state),
            "done": work.is_done(state),
            "rows": self.stage.rows,
            "bytes_read": 0,
        }

    def release(self) -> None:
        """Release all futures of this pass, which cancels its unfinished tasks."""
        super().release()
        self._trees.clear()
        self._roots.clear()
        self._graphs.clear()
        self._params = self.mstep = self._asked = None


def key_of(stage: Stage, role: str | None, iteration: int, suffix: str, token: str) -> str:
    """Return the Dask key of a task of a pass; users read it on the dashboard."""
    if role == POOLED:
        return f"{stage.name}_{role}-it{iteration + 1:04d}-{suffix}-{token}"
    # Tasks of the stage ``capsule_estep`` are ``capsule_estep``, ``capsule_mstep``, … In a stage with another
    # name, keys contain the whole name, so that two stages of one model never have the same key: for a key in
    # use, Dask would return the result of the other stage.
    model = stage.name.split("_")[0] if stage.name.endswith("_estep") else stage.name
    name = f"{model}_{role}" if role else stage.name
    return f"{name}-it{iteration + 1:04d}{'-' + suffix if suffix else ''}-{token}"


def _part_prefix(part: str) -> str:
    """Return the prefix in task names for rows of a part: "s" for "train", "v" for "validation"."""
    return {"train": "s", "validation": "v"}.get(part, f"{part}-")


def _held(node: Node, futures: dict[str, Future]) -> Node:
    return futures.get(node, node) if isinstance(node, str) else node


class _Tree:
    """Tree of the partial sums of training or validation rows; merge tasks sum up to eight nodes into one."""

    def __init__(self, owner: DaskPass, part: str) -> None:
        self._owner, self._part, self._grid = owner, part, owner.stage.grids[part]
        self._nodes: dict[tuple[int, int], Node] = {}

    def add(self, graph: Graph, level: int, index: int, node: Node) -> None:
        """Add a partial sum, and add a merge task for each parent whose children are now all known."""
        self._nodes[level, index] = node
        while level < self._grid.depth - 1:
            family, parent = [(level, i) for i in self._grid.family(level, index)], index // FAN_IN
            if not all(node in self._nodes for node in family):
                return
            children = [self._nodes.pop(node) for node in family]
            level, index = level + 1, parent
            if len(children) == 1:
                self._nodes[level, index] = children[0]
                continue
            key = self._owner.key("merge", f"{_part_prefix(self._part)}{level}-{index:04d}")
            graph.add(key, task_merge, [graph.hold(child) for child in children], priority=5)
            self._nodes[level, index] = key

    def open_keys(self, graph: Graph) -> set[str]:
        """Return the keys of partial sums in ``graph`` that tasks of a later graph will merge."""
        return {node for node in self._nodes.values() if isinstance(node, str) and node in graph.tasks}

    def hold(self, futures: dict[str, Future]) -> None:
        """Replace the keys of partial sums that are not merged yet by their futures."""
        self._nodes = {place: _held(node, futures) for place, node in self._nodes.items()}

    def tops(self) -> list[Node]:
        """Remove and return the partial sums that are left for the M-step, in order."""
        return [self._nodes.pop(node) for node in sorted(self._nodes)]
