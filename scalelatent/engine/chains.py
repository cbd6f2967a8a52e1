"""Chains of a step on the threads of one process: what both executors run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from scalelatent.contract.learners import Backend, Block, OnlineLearner, SideBySide, State, StepLearner
from scalelatent.contract.stats import Stats
from scalelatent.errors import DeviceMemoryError

from .backend import CupyBackend, keep_current_device, make_backend
from .cache import PieceCache
from .callbacks import Callback
from .executor import Advance, Place
from .feeding import Feed
from .grid import PairTree, TreeReducer
from .order import RowOrder
from .passes import Stage
from .reading import Meter, Reader, Stopped, naming
from .threads import single_threaded

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset

# How often a computing thread looks whether to go on.
CHECK_SECONDS = 0.2


class CountsSteps(Protocol):
    """A state that says how many steps led to it."""

    @property
    def iteration(self) -> int: ...


Counted = TypeVar("Counted", bound=CountsSteps)


class RowCheck:
    """Calls something now and then: it may raise to leave, and costs too much for every block."""

    def __init__(self, call: Callable[[], None], seconds: float = CHECK_SECONDS) -> None:
        self._call, self._seconds = call, seconds
        self._next = time.monotonic()

    def __call__(self) -> None:
        """Call it, if it is time."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._seconds
            self._call()


def run_chains(
    learner: OnlineLearner,
    state: object,
    blocks: Sequence[Block | None],
    backend: Backend,
    check: Callable[[], None] = lambda: None,
    *,
    first: int = 0,
    n_chains: int | None = None,
) -> TreeReducer:
    """Statistics of chains from the ``first`` on, on this thread; at once where learner and device can."""
    # Merged as far as they go by the fixed tree of all chains, so some chains on one thread or worker come to
    # few vectors, with the bits of any other share of the work.
    layout, prepared = learner.layout(), learner.prepare(state, backend)
    sums = TreeReducer(PairTree(len(blocks) if n_chains is None else n_chains), layout.size)
    if isinstance(backend, CupyBackend) and isinstance(learner, SideBySide):
        for chain, vector in enumerate(_side_by_side(learner, prepared, blocks, backend, check), first):
            sums.add(0, chain, vector)
        return sums
    for chain, block in enumerate(blocks, first):
        stats = Stats.zeros(layout, 0 if block is None else len(block.x))
        if block is not None:
            check()
            try:
                learner.run_chain(prepared, block, stats)
            except backend.card_errors as error:
                raise backend.name_error(error) from error
        sums.add(0, chain, stats.vector)
    return sums


def _side_by_side(
    learner: Any,
    prepared: object,
    blocks: Sequence[Block | None],
    backend: Backend,
    check: Callable[[], None],
) -> list[np.ndarray]:
    """Statistics of chains that are launched together; by halves where they do not fit the card together."""
    layout = learner.layout()
    stats = [Stats.zeros(layout, 0 if block is None else len(block.x)) for block in blocks]
    which = [k for k, block in enumerate(blocks) if block is not None]
    if which:
        check()
        try:
            learner.run_chains(prepared, [blocks[k] for k in which], [stats[k] for k in which])
        except backend.card_errors as error:
            named = backend.name_error(error)
            if len(which) < 2 or not isinstance(named, DeviceMemoryError):
                raise named from error
            backend.release_memory()
            half = which[len(which) // 2]
            parts = blocks[:half], blocks[half:]
            return [v for part in parts for v in _side_by_side(learner, prepared, part, backend, check)]
    return [s.vector for s in stats]


def advance(learner: StepLearner[State, Any], state: State, sums: TreeReducer, n_rows: int) -> State:
    """The state after a step, given the statistics of all chains."""
    return learner.step(state, Stats(learner.layout(), sums.root()), n_rows)


def learn_stream(
    learner: OnlineLearner[Counted, Any],
    state: Counted,
    dataset: Dataset,
    device: str,
    batch_rows: int,
    seen: int,
    classes: np.ndarray | None = None,
) -> Counted:
    """The state after a step for each ``batch_rows`` rows, in their order, in this process."""
    backend, reader = make_backend(device), Reader(dataset, None, Meter(), classes, wants=learner.wants)
    with single_threaded():
        for a in range(0, len(dataset), batch_rows):
            b = min(a + batch_rows, len(dataset))
            # Numbers of rows go on over calls: they key the random numbers of rows.
            numbers = np.arange(seen + a, seen + b, dtype=np.int64)
            x, y, weight = reader.read(a, b)
            block = reader.block(x, y, weight, seen + a, numbers, state.iteration)
            state = advance(learner, state, run_chains(learner, state, [block], backend), b - a)
    return state


class ChainRunner:
    """Some chains of one stage, by the threads of this process, with their rows read ahead."""

    def __init__(
        self,
        stage: Stage,
        order: RowOrder,
        chains: range,
        backends: list[Backend],
        cache: PieceCache | None,
        n_epochs: int,
    ) -> None:
        self.meter, self.rows = Meter(), 0  # what its chains cost to read, and have taken
        self.order, self.device = order, backends[0].name
        self.learner: OnlineLearner = stage.online
        self._dataset = stage.datasets["train"]
        reader = Reader(self._dataset, cache, self.meter, stage.classes, wants=self.learner.wants)
        self._feed = Feed(reader, order, chains, n_epochs)
        n = min(len(backends), len(chains))
        if isinstance(backends[0], CupyBackend) and isinstance(self.learner, SideBySide):
            n = 1  # its chains are one launch
        edges = [len(chains) * i // n for i in range(n + 1)]
        self._shares = [(backends[i], slice(edges[i], edges[i + 1])) for i in range(n)]
        self._first = chains.start
        self._pool = ThreadPoolExecutor(n - 1, "scalelatent-chain") if n > 1 else None

    def run(
        self, epoch: int, step: int, state: object, check: Callable[[], None] = lambda: None
    ) -> TreeReducer:
        """Statistics of the chains in a step."""
        try:
            blocks = self._feed.blocks(epoch, step, check)
            with naming(self._dataset):
                found = self._run(state, blocks, check)
            self.rows += sum(len(block.x) for block in blocks if block is not None)
            return found
        finally:
            self._feed.rest()

    def _run(self, state: object, blocks: Sequence[Block | None], check: Callable[[], None]) -> TreeReducer:
        stop = threading.Event()

        def go_on() -> None:
            if stop.is_set():
                raise Stopped

        def run(backend: Backend, share: slice, check: Callable[[], None]) -> TreeReducer:
            first, n = self._first + share.start, self.order.n_chains
            return run_chains(self.learner, state, blocks[share], backend, check, first=first, n_chains=n)

        others: list[Future[TreeReducer]] = []
        if self._pool is not None:
            others = [self._pool.submit(run, *share, go_on) for share in self._shares[1:]]
        try:
            with keep_current_device():
                out = run(*self._shares[0], check)
            while wait(others, timeout=CHECK_SECONDS).not_done:
                check()
        except BaseException:
            # No other thread may still use the blocks: the others end with the block they are at.
            stop.set()
            wait(others)
            raise
        for future in others:
            for node, vector in future.result().nodes().items():
                out.add(*node, vector)
        return out

    def step(self, epoch: int, step: int, state: object, check: Callable[[], None] = lambda: None) -> object:
        """The state after a step; the runner has all chains."""
        rows = self.order.step_rows(step)
        return advance(self.learner, state, self.run(epoch, step, state, check), rows)

    def close(self) -> None:
        """End all threads."""
        self._feed.close()
        if self._pool is not None:
            self._pool.shutdown()


class InProcessSteps:
    """The steps of an online fit in this process; a handle is the state itself."""

    def __init__(self, runner: ChainRunner, cache: PieceCache) -> None:
        self._runner, self._learner, self._cache = runner, runner.learner, cache
        self.callbacks = Callback()

    def __enter__(self) -> InProcessSteps:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.close()

    def put(self, place: Place, state: object, *, kept: bool = False) -> object:
        return state

    def get(self, place: Place, handle: object) -> object:
        return handle

    def steps(self, place: Place, stop: int, handle: object) -> Iterator[Advance]:
        """One at a time."""
        if place.step == 0:
            self._cache.start_pass()
        before, check = self._runner.meter.bytes_read, RowCheck(self.callbacks.on_wait)
        for step in range(place.step, stop):
            handle = self._runner.step(place.epoch, step, handle, check)
            after = self._runner.meter.bytes_read
            yield Advance(step + 1, handle, after - before)
            before = after

    def end_epoch(self, place: Place, handle: object) -> object:
        return self._learner.end_epoch(handle)

    def summary(self, place: Place, handle: object) -> tuple[dict[str, Any], bool]:
        return self._learner.summary(handle), self._learner.is_done(handle)
