"""Run the chains (independent parts) of a minibatch on the threads of one process, for both executors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.contract.learners import (
    Backend,
    Block,
    GpuStepLearner,
    MultiChainLearner,
    OnlineLearner,
    State,
    StepLearner,
)
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
from .reading import Meter, Reader, Stopped, name_dataset_in_errors
from .threads import single_threaded

if TYPE_CHECKING:
    from scalelatent.data.dataset import Dataset

CHECK_SECONDS = 0.2  # interval at which computing threads check whether to stop


class RowCheck:
    """Callable that calls ``call`` at most every ``seconds``; ``call`` may raise an error to stop the fit."""

    def __init__(self, call: Callable[[], None], seconds: float = CHECK_SECONDS) -> None:
        self._call, self._seconds = call, seconds
        self._next = time.monotonic()

    def __call__(self) -> None:
        """Call ``call`` if ``seconds`` have passed since the last time."""
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
    """Run consecutive chains (parts of a minibatch) from number ``first`` on; return their statistics.

    ``blocks`` has the rows of one chain each. Statistics are merged in the fixed tree of all ``n_chains``
    chains, so that few vectors are returned and threads and workers do not change the bits of the result.
    """
    layout, prepared = learner.layout(), learner.prepare(state, backend)
    sums = TreeReducer(PairTree(len(blocks) if n_chains is None else n_chains), layout.size)
    if isinstance(backend, CupyBackend) and isinstance(learner, MultiChainLearner):
        for chain, vector in enumerate(_run_together(learner, prepared, blocks, backend, check), first):
            sums.add(0, chain, vector)
        return sums
    for chain, block in enumerate(blocks, first):
        stats = Stats.zeros(layout, 0 if block is None else len(block.x))
        if block is not None:
            check()
            try:
                learner.run_chain(prepared, block, stats)
            except backend.gpu_errors as error:
                raise backend.name_error(error) from error
        sums.add(0, chain, stats.vector)
    return sums


def _run_together(
    learner: Any,
    prepared: object,
    blocks: Sequence[Block | None],
    backend: Backend,
    check: Callable[[], None],
) -> list[np.ndarray]:
    """Run chains (parts of a minibatch) in one GPU call, or more if memory is short; return statistics."""
    layout = learner.layout()
    stats = [Stats.zeros(layout, 0 if block is None else len(block.x)) for block in blocks]
    which = [k for k, block in enumerate(blocks) if block is not None]
    if which:
        check()
        try:
            learner.run_chains(prepared, [blocks[k] for k in which], [stats[k] for k in which])
        except backend.gpu_errors as error:
            named = backend.name_error(error)
            if len(which) < 2 or not isinstance(named, DeviceMemoryError):
                raise named from error
            backend.release_memory()
            half = which[len(which) // 2]
            parts = blocks[:half], blocks[half:]
            return [v for part in parts for v in _run_together(learner, prepared, part, backend, check)]
    return [s.vector for s in stats]


def apply_step(learner: StepLearner[State, Any], state: State, sums: TreeReducer, n_rows: int) -> State:
    """Return the state after a minibatch step, from the statistics of all chains (parts) of the minibatch."""
    return learner.step(state, Stats(learner.layout(), sums.root()), n_rows)


def learn_stream(
    learner: OnlineLearner[Any, Any],
    state: Any,
    dataset: Dataset,
    device: str,
    batch_rows: int,
    n_earlier: int,
    classes: np.ndarray | None = None,
) -> Any:
    """Take one step per ``batch_rows`` rows, in order, in this process; return the last state.

    ``n_earlier`` is the number of rows of earlier calls. The state must have an attribute ``iteration``, the
    number of its epoch.
    """
    backend, reader = (
        make_backend(device),
        Reader(dataset, None, Meter(), classes, requirements=learner.requirements),
    )
    with single_threaded():
        for a in range(0, len(dataset), batch_rows):
            b = min(a + batch_rows, len(dataset))
            # The row indices key the random numbers, so they continue from the earlier calls.
            numbers = np.arange(n_earlier + a, n_earlier + b, dtype=np.int64)
            x, y, weight = reader.read(a, b)
            block = reader.block(x, y, weight, n_earlier + a, numbers, state.iteration)
            state = apply_step(learner, state, run_chains(learner, state, [block], backend), b - a)
    return state


class ChainRunner:
    """Runner of some chains (parts of each minibatch) on threads of this process; one thread reads rows."""

    def __init__(
        self,
        stage: Stage,
        order: RowOrder,
        chains: range,
        backends: list[Backend],
        cache: PieceCache | None,
        n_epochs: int,
    ) -> None:
        self.meter, self.rows = Meter(), 0  # cost of reading, and number of rows of all finished steps
        self.order, self.device = order, backends[0].name
        self.learner: OnlineLearner = stage.online
        self._dataset = stage.datasets["train"]
        reader = Reader(
            self._dataset, cache, self.meter, stage.classes, requirements=self.learner.requirements
        )
        self._feed = Feed(reader, order, chains, n_epochs)
        n = min(len(backends), len(chains))
        if isinstance(backends[0], CupyBackend) and isinstance(self.learner, MultiChainLearner):
            n = 1  # a GPU computes all chains (parts of a minibatch) in one call
        edges = [len(chains) * i // n for i in range(n + 1)]
        self._shares = [(backends[i], slice(edges[i], edges[i + 1])) for i in range(n)]
        self._first = chains.start
        self._pool = ThreadPoolExecutor(n - 1, "scalelatent-chain") if n > 1 else None

    def run(
        self, epoch: int, step: int, state: object, check: Callable[[], None] = lambda: None
    ) -> TreeReducer:
        """Return the statistics that the runner's chains (parts of a minibatch) compute in one step."""
        with self._read(epoch, step, check) as blocks:
            return self._run(state, blocks, check)

    @contextmanager
    def _read(self, epoch: int, step: int, check: Callable[[], None]) -> Iterator[list[Block | None]]:
        """Yield the blocks of rows of a step; they may be reused after the ``with`` statement."""
        try:
            blocks = self._feed.blocks(epoch, step, check)
            with name_dataset_in_errors(self._dataset):
                yield blocks
            self.rows += sum(len(block.x) for block in blocks if block is not None)
        finally:
            self._feed.finish_step()

    def _run(self, state: object, blocks: Sequence[Block | None], check: Callable[[], None]) -> TreeReducer:
        stop = threading.Event()

        def check_stop() -> None:
            if stop.is_set():
                raise Stopped

        def run(backend: Backend, share: slice, check: Callable[[], None]) -> TreeReducer:
            first, n = self._first + share.start, self.order.n_chains
            return run_chains(self.learner, state, blocks[share], backend, check, first=first, n_chains=n)

        others: list[Future[TreeReducer]] = []
        if self._pool is not None:
            others = [self._pool.submit(run, *share, check_stop) for share in self._shares[1:]]
        try:
            with keep_current_device():
                out = run(*self._shares[0], check)
            while wait(others, timeout=CHECK_SECONDS).not_done:
                check()
        except BaseException:
            # Wait until the other threads have finished their current block and no longer use its rows.
            stop.set()
            wait(others)
            raise
        for future in others:
            for node, vector in future.result().nodes().items():
                out.add(*node, vector)
        return out

    def step(self, epoch: int, step: int, state: object, check: Callable[[], None] = lambda: None) -> object:
        """Run all chains (parts) of a minibatch, which must all belong to this runner; return the next state.

        The next state may be on a GPU; only this method and `to_host` accept such a state.
        """
        n_rows = self.order.step_rows(step)
        with self._read(epoch, step, check) as blocks:
            check()
            after = self._step_on_gpu(state, blocks, n_rows)
            if after is not None:
                return after
            before = self.to_host(state)
            sums = self._run(before, blocks, check)
        return apply_step(self.learner, before, sums, n_rows)

    def _step_on_gpu(self, state: object, blocks: Sequence[Block | None], n_rows: int) -> object | None:
        """Return the next state if a GPU can take the whole step, otherwise None."""
        backend, given = self._shares[0][0], [block for block in blocks if block is not None]
        if not isinstance(backend, CupyBackend) or not isinstance(self.learner, GpuStepLearner):
            return None
        if len(given) < len(blocks):  # in the last step of an epoch, some parts of the minibatch have no rows
            return None
        with keep_current_device():
            try:
                return self.learner.step_on_gpu(state, given, n_rows, backend)
            except backend.gpu_errors as error:
                named = backend.name_error(error)
                if isinstance(named, DeviceMemoryError):  # without the update, the GPU needs less memory
                    return None
                raise named from error

    def to_host(self, state: object) -> object:
        """Return a state that `step` has returned, with all arrays in host memory."""
        return self.learner.to_host(state) if isinstance(self.learner, GpuStepLearner) else state

    def close(self) -> None:
        """Stop the threads that compute, and the thread that reads rows."""
        self._feed.close()
        if self._pool is not None:
            self._pool.shutdown()


class InProcessSteps:
    """Runner of the minibatch steps of an online fit in this process; the handle of a state is the state."""

    def __init__(self, runner: ChainRunner, cache: PieceCache) -> None:
        self._runner, self._learner, self._cache = runner, runner.learner, cache
        self.callbacks = Callback()

    def __enter__(self) -> InProcessSteps:
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.close()

    def put(self, place: Place, state: object, *, is_written: bool = False) -> object:
        return state

    def get(self, place: Place, handle: object) -> object:
        return self._runner.to_host(handle)

    def steps(self, place: Place, stop: int, handle: object) -> Iterator[Advance]:
        """Run the steps from ``place`` up to ``stop`` of its epoch; yield the progress after each step."""
        if place.step == 0:
            self._cache.start_pass()
        before, check = self._runner.meter.bytes_read, RowCheck(self.callbacks.on_wait)
        for step in range(place.step, stop):
            handle = self._runner.step(place.epoch, step, handle, check)
            after = self._runner.meter.bytes_read
            yield Advance(step + 1, handle, after - before)
            before = after

    def end_epoch(self, place: Place, handle: object) -> object:
        return self._learner.end_epoch(self.get(place, handle))

    def summary(self, place: Place, handle: object) -> tuple[dict[str, Any], bool]:
        state = self.get(place, handle)
        return self._learner.summary(state), self._learner.is_done(state)
