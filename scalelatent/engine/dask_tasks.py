"""What runs on the workers: module-level functions with arguments of a few hundred bytes.

A task names its run by folder and id; constants of a stage and parameters of a pass are read once a
process and kept.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelatent.data.store import locate
from scalelatent.errors import RunError, ScalelatentError

from .backend import make_backend
from .cache import shared_cache
from .inprocess import worth_saving
from .passes import PassContext, Span, Stage, split_vector
from .recent import RecentObjects
from .reduce import merge_vectors
from .store import EngineStore
from .threads import single_threaded

# (folder, id of the run): a folder that was removed and made again is another run.
Ref = tuple[str, str]
_recent = RecentObjects(8)
_local = threading.local()
_pools = threading.Lock()
_limited: Any = None
_current: Any = None


def limit_pools() -> None:
    """One thread for BLAS in this worker, set at its first task and kept: its pools belong to its tasks."""
    global _limited
    with _pools:
        if _limited is None:
            # Kept, since the limits end with the object.
            _limited = single_threaded()
            _limited.__enter__()


def sees(folder: str, mark: str) -> str:
    """Nothing where this worker sees a file of the driver's, else what is wrong."""
    try:
        return "" if locate(folder).has(mark) else "they do not see it"
    except (ScalelatentError, OSError) as error:
        return str(error)


def load_stage(ref: Ref, name: str) -> Stage:
    """The constants of a stage, read once a process."""
    return _recent.get((ref, name), lambda: EngineStore(*ref[:2]).load_stage(name), (ref, "stage"))


def _backend(device: str) -> Any:
    kept = getattr(_local, "backends", None)
    if kept is None:
        kept = _local.backends = {}
    if device not in kept:
        kept[device] = make_backend(worker_device(device))
    return kept[device]


def worker_device(device: str) -> str:
    """What a worker computes on: ``"auto"`` is the GPU where the worker offers the resource ``GPU``, else the
    CPU.

    Examples
    --------
    >>> worker_device("auto")
    'cpu'
    """
    from distributed import get_worker

    if device != "auto":
        return device
    try:
        return "gpu" if get_worker().state.total_resources.get("GPU") else "cpu"
    except (ValueError, AttributeError):
        return "cpu"


@dataclass(frozen=True)
class Parameters:
    """What the tasks of a pass depend on: the state, and what the driver is told of the pass before.

    No state says that the pass is not wanted: the learner is done; or it is past, its outcome in the run
    folder, and Dask, having lost later parameters, goes through it again.
    """

    state: Any
    info: dict[str, Any] | None = None


def task_params(ref: Ref, stage: str, iteration: int) -> Parameters:
    """Parameters of a pass: what the M-step before it left in the run folder."""
    store = EngineStore(*ref[:2])
    try:
        return Parameters(
            _recent.get((ref, stage, iteration), lambda: store.load_state(stage, iteration), (ref, "state"))
        )
    except RunError:
        if max(store.iterations(stage), default=0) > iteration:
            return Parameters(None)
        raise


def task_span(
    ref: Ref,
    stage_name: str,
    iteration: int,
    span: Span,
    params: Parameters | None,
    checkpoint_seconds: float,
) -> np.ndarray | None:
    """Read, compute and reduce one span; None in a pass that is not wanted."""
    if params is not None and params.state is None:
        return None
    state = None if params is None else params.state
    stage = load_stage(ref, stage_name)
    key = (ref, stage_name, iteration, threading.get_ident())
    begin = time.perf_counter()
    _enter_pass((ref, stage_name, iteration))
    limit_pools()
    context = getattr(_local, "context", None)
    if context is None or context[0] != key:
        _local.context = context = (key, PassContext(stage, state, _backend(stage.device), shared_cache()))
    vector = context[1].run_span(span, threading.Event())
    if worth_saving(time.perf_counter() - begin, vector.nbytes, checkpoint_seconds):
        EngineStore(*ref[:2]).save_node(stage_name, iteration, span, vector)
    return vector


def _enter_pass(key: tuple[Ref, str, int]) -> None:
    """Advance the cache's clock at this process's first task of a pass."""
    global _current
    with _pools:
        if _current != key:
            _current = key
            shared_cache().start_pass()


def task_node(ref: Ref, stage: str, iteration: int, span: Span) -> np.ndarray:
    """A span that an interrupted run left finished."""
    vector = EngineStore(*ref[:2]).load_node(stage, iteration, span)
    if vector is None:
        raise RunError(
            f"the finished span {span} of pass {iteration + 1} in {ref[0]} has become unreadable; resume "
            "the run again"
        )
    return vector


def task_merge(vectors: list[np.ndarray | None]) -> np.ndarray | None:
    """One family of the tree, in order."""
    there = [vector for vector in vectors if vector is not None]
    return merge_vectors(there) if len(there) == len(vectors) else None


def task_mstep(
    ref: Ref,
    stage_name: str,
    iteration: int,
    parts: list[str],
    nodes: list[list[np.ndarray | None]],
    params: Parameters,
) -> Parameters:
    """Last merge and M-step; the next state goes into the run folder and to the spans of the next pass."""
    stage, store = load_stage(ref, stage_name), EngineStore(*ref[:2])
    stats, rows, nbytes = {}, 0, 0
    for part, vectors in zip(parts, nodes, strict=True):
        root = task_merge(vectors)
        if root is None:
            return _past(store, stage_name, iteration + 1)
        stats[part], part_rows, part_bytes = split_vector(stage, part, root)
        rows, nbytes = rows + part_rows, nbytes + part_bytes
    limit_pools()
    following = stage.work.update(params.state, stats)
    store.save_state(stage_name, iteration + 1, following, durable=False)
    _recent.put((ref, stage_name, iteration + 1), following, (ref, "state"))
    done = stage.work.is_done(following)
    info = {"summary": stage.work.summary(following), "done": done, "rows": rows, "bytes_read": nbytes}
    return Parameters(None if done else following, info)


def _past(store: EngineStore, stage: str, iteration: int) -> Parameters:
    # The last few states are kept: from the first of them on passes are computed again.
    found = iteration in store.iterations(stage)
    return Parameters(store.load_state(stage, iteration) if found else None)


def task_info(params: Parameters) -> dict[str, Any] | None:
    """What the driver is told of a pass."""
    return params.info


def task_write_rows(url: str, shard: int, x: np.ndarray, y: Any, weight: Any) -> None:
    """One shard of a dask array's rows, written where it was computed."""
    from scalelatent.data import DatasetWriter

    DatasetWriter.attach(url).write_shard(shard, np.asarray(x), y, weight)


def task_map(ref: Ref, name: str, shard: int) -> int:
    """One shard of an output as large as the data."""
    task = _recent.get((ref, name), lambda: _load_map(ref, name))
    limit_pools()
    return task.write_shard(shard, _backend(task.device), threading.Event())


def _load_map(ref: Ref, name: str) -> Any:
    import json

    from scalelatent.data import Dataset

    from .mapwrite import MapTask

    tree = EngineStore(*ref[:2]).read(f"result-{name}.rec")
    fields = json.loads(tree["task"])
    return MapTask(
        fields["name"],
        Dataset.from_spec(fields["dataset"]),
        tree["row_map"],
        fields["url"],
        fields["device"],
        fields["with_labels"],
        tree["classes"],
    )
