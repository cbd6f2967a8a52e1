"""Functions that run as tasks on the workers; their arguments have only a few hundred bytes each."""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import numpy as np

from scalelatent.contract.idle_threads import allow_threads
from scalelatent.contract.learners import Backend
from scalelatent.contract.stats import merge_vectors
from scalelatent.engine.backend import make_backend
from scalelatent.engine.cache import shared_cache
from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.passes import (
    PassContext,
    Span,
    Stage,
    is_worth_saving,
    split_vector,
    vector_length,
)
from scalelatent.engine.reading import Meter, Stopped
from scalelatent.engine.threads import single_threaded
from scalelatent.errors import RunError

from .hooks import offers_gpu
from .scheduler_listener import as_message
from .worker_side import (
    Fit,
    TaskStop,
    current_worker,
    pace_reports,
    report_kernels,
    report_smaller_blocks,
    restart_on_lost_gpu,
    reuse_freed_memory,
    send_to_driver,
    work_reports,
    worker_threads,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from scalelatent.engine.mapwrite import OutputTask

T = TypeVar("T")


class RecentObjects:
    """Cache of the last stages and maps that a process has loaded, so that its tasks read each file once.

    Each object is in a slot (such as the stage of a run), together with a key. A slot contains only one
    object, which is replaced when it is requested with another key.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # Map from a slot to (key, object).
        self._kept: OrderedDict[tuple[object, ...], tuple[object, object]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, slot: tuple[object, ...], load: Callable[[], T], key: object = None) -> T:
        """Return the object of a slot; if the slot is empty or has another key, call ``load()`` for it."""
        with self._lock:
            cached = self._kept.get(slot)
            if cached is not None and cached[0] == key:
                self._kept.move_to_end(slot)
                return cast("T", cached[1])
        value = load()
        with self._lock:
            self._kept[slot] = key, value
            self._kept.move_to_end(slot)
            while len(self._kept) > self._size:
                self._kept.popitem(last=False)
        return value

    def forget(self, run: object) -> None:
        """Drop all objects of a run, which is the first entry of their slots."""
        with self._lock:
            for slot in [slot for slot in self._kept if slot[0] == run]:
                del self._kept[slot]


# Reference of a stage: (run folder, run id, token of the last write). The id changes if the folder is removed
# and created again. The token changes if the stage is written again, for example after a resume.
StageRef = tuple[str, ...]
# Maximum number of stages and maps that a process keeps in memory, and maximum number of stages whose last
# pass it remembers. With these numbers a worker grows by 1 kB per pass (thousand_passes.py).
KEEP_STAGES, KEEP_CLOCKS = 6, 16
_recent = RecentObjects(KEEP_STAGES)
_local = threading.local()  # backends and pass context of each thread
_process_lock = threading.Lock()  # protects the two variables below
_limited: Any = None  # thread limits of this process's BLAS and OpenMP, set by its first task
_clocks: OrderedDict[tuple[StageRef, str], int] = OrderedDict()  # number of the last pass by stage


def configure_worker_process() -> None:
    """Set thread limits, allocator and kernel events of this process at its first task."""
    global _limited
    with _process_lock:
        if _limited is None:
            # A global variable keeps this object, because the thread limits end when it is deleted.
            _limited = single_threaded()
            _limited.__enter__()
            reuse_freed_memory()
            report_kernels()


def open_store(ref: StageRef) -> EngineStore:
    """Return the store of a run; the store refuses to write if its folder belongs to another run."""
    return EngineStore(ref[0], ref[1])


def load_stage(ref: StageRef, name: str) -> Stage:
    """Return a stage (learner and datasets) from the run folder; each process reads it once."""
    run = ref[:2]
    return _recent.get((run, "stage"), lambda: open_store(ref).load_stage(name), (name, ref[2:]))


def _thread_backend(device: str) -> Backend:
    """Return this thread's backend for a device; the thread makes it at its first task."""
    cached = getattr(_local, "backends", None)
    if cached is None:
        cached = _local.backends = {}
    if device not in cached:
        cached[device] = make_backend(worker_device(device))
    return cached[device]


def worker_device(device: str) -> str:
    """Return the device on which this worker computes: ``device``, or for "auto" the one that it offers."""
    if device != "auto":
        return device
    worker = current_worker()
    return "gpu" if worker is not None and offers_gpu(worker) else "cpu"


class PassInfo(TypedDict):
    """Results of a pass that the M-step sends to the driver."""

    summary: dict[str, Any]
    done: bool
    rows: int
    bytes_read: int


@dataclass(frozen=True)
class TaskParams:
    """State that an M-step returns to the tasks of the next pass.

    If the state is None, the tasks of the next pass do nothing: the learner is done, or Dask lost the
    parameters of a later pass and computes this earlier pass again.
    """

    state: object

    def __setstate__(self, fields: dict[str, Any]) -> None:
        object.__setattr__(self, "state", align_arrays(fields["state"]))


def task_params(ref: StageRef, stage: str, iteration: int) -> TaskParams:
    """Return the state before a pass from the run folder, where the previous M-step saved it."""
    store = open_store(ref)
    try:
        return TaskParams(store.load_state(stage, iteration))
    except RunError:
        if max(store.iterations(stage), default=0) > iteration:
            return TaskParams(None)
        raise


def task_span(
    ref: StageRef,
    stage_name: str,
    iteration: int,
    span: Span,
    params: TaskParams | None,
    fit: Fit,
    checkpoint_seconds: float,
    is_finished: bool = False,
) -> np.ndarray | None:
    """Return the sum of the statistic over a span (range of rows); None if the pass is no longer needed.

    ``is_finished`` is True if an interrupted run may have saved this sum.
    """
    if params is not None and params.state is None:
        return None
    begin = time.perf_counter()
    context = context_of(ref, stage_name, iteration, None if params is None else params.state)
    if is_finished:
        length = vector_length(context.reductions[span.part])
        vector = open_store(ref).load_node(stage_name, iteration, span, length)
        if vector is not None:
            return vector
    waited, limits = context.meter.wait_seconds, dict(context.backend.row_limits)
    with stopping(fit):
        vector = context.run_span(span, TaskStop(fit))
    seconds = time.perf_counter() - begin
    if is_worth_saving(seconds, vector.nbytes, checkpoint_seconds):
        open_store(ref).save_node(stage_name, iteration, span, vector)
    report_smaller_blocks(fit, context.backend, limits)
    pace_reports.add_rows(fit, stage_name, span.part, int(vector[-2]), seconds, context.backend.name)
    rows, nbytes = int(vector[-2]), int(vector[-1])
    work_reports.add_tasks(
        ref[0], stage_name, span.part, {"pass": iteration + 1, "span": span.index}, context.backend.name,
        rows, nbytes, seconds, context.meter.wait_seconds - waited,
    )  # fmt: skip
    return vector


@contextmanager
def stopping(fit: Fit) -> Iterator[None]:
    """End a cancelled task in the ``with`` statement, so that Dask runs the task again if it is needed."""
    from distributed import Reschedule

    try:
        with restart_on_lost_gpu(fit):
            yield
    except Stopped:
        raise Reschedule from None


def context_of(ref: StageRef, stage_name: str, iteration: int, state: object) -> PassContext:
    """Return this thread's `PassContext` (prepared state, readers) of a pass; drop that of earlier passes."""
    stage, key = load_stage(ref, stage_name), (ref, stage_name, iteration)
    _enter_pass(*key)
    configure_worker_process()
    cached = getattr(_local, "context", None)
    if cached is None or cached[0] != key:
        cache = shared_cache(stage.cache)
        _local.context = cached = (key, PassContext(stage, state, _thread_backend(stage.device), cache))
    return cached[1]


def _enter_pass(ref: StageRef, stage: str, iteration: int) -> None:
    """Notify the row cache that a new pass has started, at the first task of the pass in this process."""
    key = (ref, stage)
    with _process_lock:
        # Passes overlap, so a late task of an earlier pass must not count as a new pass.
        if iteration <= _clocks.get(key, -1):
            return
        _clocks[key] = iteration
        _clocks.move_to_end(key)
        while len(_clocks) > KEEP_CLOCKS:
            _clocks.popitem(last=False)
        shared_cache().start_pass()


def task_merge(vectors: list[np.ndarray | None]) -> np.ndarray | None:
    """Return the sum of some partial sums in their order; None if one of them is None (not needed)."""
    there = [vector for vector in vectors if vector is not None]
    return merge_vectors(there) if len(there) == len(vectors) else None


def task_mstep(
    ref: StageRef,
    stage_name: str,
    iteration: int,
    parts: list[str],
    nodes: list[list[np.ndarray | None]],
    params: TaskParams,
    fit: Fit,
) -> TaskParams:
    """Merge the remaining partial sums of a pass and run the M-step; save and return the next state."""
    stage, stats, rows, nbytes = load_stage(ref, stage_name), {}, 0, 0
    for part, vectors in zip(parts, nodes, strict=True):
        root = task_merge(vectors)
        if root is None:
            # Dask has lost a result and computes this pass again, but the run folder may have the next state.
            store = EngineStore(ref[0])
            found = iteration + 1 in store.iterations(stage_name)
            return TaskParams(store.load_state(stage_name, iteration + 1) if found else None)
        stats[part], part_rows, part_bytes = split_vector(stage, part, root)
        rows, nbytes = rows + part_rows, nbytes + part_bytes
    configure_worker_process()
    with allow_threads(worker_threads()):  # The other threads of this worker wait for the M-step.
        following = stage.batch.update(params.state, stats)
    open_store(ref).save_state(stage_name, iteration + 1, following, durable=False)
    info = make_pass_info(stage, following, rows, nbytes)
    message = as_message(info)
    if message is not None:
        send_to_driver(fit, {"stage": stage_name, "pass": iteration + 1, "info": message})
    return TaskParams(None if info["done"] else following)


def make_pass_info(stage: Stage, state: object, rows: int, bytes_read: int) -> PassInfo:
    """Return the results of the pass whose M-step has computed ``state``."""
    summary, done = stage.batch.summary(state), stage.batch.is_done(state)
    return {"summary": summary, "done": done, "rows": rows, "bytes_read": bytes_read}


def task_write_rows(
    ref: StageRef, url: str, shard: int, x: np.ndarray, y: npt.ArrayLike | None, beside: str | None
) -> None:
    """Write one output shard with the rows ``x`` of a dask array.

    ``beside`` names the record with labels and weights that the dask array does not compute, or is None.
    """
    from scalelatent.data import DatasetWriter

    given = {} if beside is None else open_store(ref).read(beside)
    y = given.get("y") if y is None else y
    DatasetWriter.attach(url).write_shard(shard, np.asarray(x), y, given.get("weight"))


def task_map(ref: StageRef, name: str, shard: int, fit: Fit) -> int:
    """Compute and write one output shard of a row map; return its number of rows."""
    task, backend = load_map(ref, name)
    limits, meter, begin = dict(backend.row_limits), Meter(), time.perf_counter()
    with stopping(fit):
        rows = int(task.write_shard(shard, backend, TaskStop(fit), meter))
    report_smaller_blocks(fit, backend, limits)
    # If several tasks compute groups of columns (tiles) of the same rows, each task reports only its share of
    # the rows, so that the reported rows add up to those of the output.
    work_reports.add_tasks(
        ref[0], task.name, "output", {"shard": shard}, backend.name, rows // task.writer.n_tiles,
        meter.bytes_read, time.perf_counter() - begin, meter.wait_seconds,
    )  # fmt: skip
    return rows


def load_map(ref: StageRef, name: str) -> tuple[OutputTask, Backend]:
    """Return a map from the run folder, which each process reads once, and the backend that computes it."""
    task = _recent.get((ref[:2], name), lambda: _read_map(ref, name))
    configure_worker_process()
    return task, _thread_backend(task.device)


def _read_map(ref: StageRef, name: str) -> OutputTask:
    from scalelatent.engine.mapwrite import MapTask
    from scalelatent.engine.rowsets import SetsTask

    tree = EngineStore(*ref[:2]).read(f"result-{name}.rec")
    return MapTask.from_tree(tree) if "row_map" in tree else SetsTask.from_tree(tree)


def align_arrays(tree: T) -> T:
    """Return a tree of dataclasses, dicts, lists and tuples with aligned copies of its unaligned arrays."""
    # Arrays in a message from another worker may start at any byte of the message. NumPy multiplies such
    # unaligned arrays without BLAS, which is slower and gives other bits.
    out: T = _aligned(tree, {})
    return out


def _aligned(tree: Any, aligned: dict[int, np.ndarray]) -> Any:
    if isinstance(tree, np.ndarray):
        return aligned.setdefault(id(tree), np.require(tree, requirements="A"))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        old = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
        new = {name: _aligned(value, aligned) for name, value in old.items()}
        if all(new[name] is old[name] for name in old):
            return tree
        tree = copy.copy(tree)
        for name, value in new.items():
            object.__setattr__(tree, name, value)  # This also works for frozen dataclasses.
        return tree
    if type(tree) is dict:
        return {key: _aligned(value, aligned) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_make"):
        return tree._make(_aligned(value, aligned) for value in tree)
    if type(tree) in (list, tuple):
        return type(tree)(_aligned(value, aligned) for value in tree)
    return tree
