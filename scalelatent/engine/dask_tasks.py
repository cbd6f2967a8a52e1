"""What runs on the workers: module-level functions with arguments of a few hundred bytes.

A task names its run by folder and id; constants of a stage and parameters of a pass are read once a
process and kept.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from scalelatent.errors import RunError

from .backend import make_backend
from .cache import shared_cache
from .inprocess import worth_saving
from .passes import PassContext, Span, Stage, split_vector
from .record import read_record
from .reduce import merge_vectors
from .store import EngineStore, RecentObjects
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


def sees(path: str) -> bool:
    """Whether this worker sees a file of the driver's."""
    import os

    return os.path.exists(path)


def load_stage(ref: Ref, name: str) -> Stage:
    """The constants of a stage, read once a process."""
    return _recent.get((ref, name), lambda: EngineStore(ref[0]).load_stage(name))


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


def task_params(ref: Ref, stage: str, iteration: int) -> Any:
    """Parameters of a pass: what the M-step before it left in the run folder."""
    return _recent.get(
        (ref, stage, "state", iteration), lambda: EngineStore(ref[0]).load_state(stage, iteration)
    )


def task_span(
    ref: Ref, stage_name: str, iteration: int, span: Span, state: Any, checkpoint_seconds: float
) -> np.ndarray:
    """Read, compute and reduce one span."""
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
        EngineStore(ref[0]).save_node(stage_name, iteration, span, vector)
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
    vector = EngineStore(ref[0]).load_node(stage, iteration, span)
    if vector is None:
        raise RunError(
            f"the finished span {span} of pass {iteration + 1} in {ref[0]} has become unreadable; resume "
            "the run again"
        )
    return vector


def task_merge(vectors: list[np.ndarray]) -> np.ndarray:
    """One family of the tree, in order."""
    return merge_vectors(vectors)


def task_mstep(
    ref: Ref, stage_name: str, iteration: int, parts: list[str], nodes: list[list[np.ndarray]], state: Any
) -> dict[str, Any]:
    """Last merge, M-step, and the next state into the run folder; returns scalars."""
    stage, store = load_stage(ref, stage_name), EngineStore(ref[0])
    stats, rows, nbytes = {}, 0, 0
    for part, vectors in zip(parts, nodes, strict=True):
        stats[part], part_rows, part_bytes = split_vector(stage, part, merge_vectors(vectors))
        rows, nbytes = rows + part_rows, nbytes + part_bytes
    limit_pools()
    following = stage.work.update(state, stats)
    store.save_state(stage_name, iteration + 1, following, durable=False)
    _recent.put((ref, stage_name, "state", iteration + 1), following)
    return {
        "summary": stage.work.summary(following),
        "done": stage.work.is_done(following),
        "rows": rows,
        "bytes_read": nbytes,
    }


def task_write_rows(url: str, shard: int, x: np.ndarray, y: Any, weight: Any) -> None:
    """One shard of a dask array's rows, written where it was computed."""
    from scalelatent.data import DatasetWriter

    DatasetWriter.attach(url).write_shard(shard, np.asarray(x), y, weight)


def task_map(ref: Ref, name: str, shard: int) -> int:
    """One shard of an output as large as the data."""
    task = _recent.get((ref, name), lambda: _load_map(ref[0], name))
    limit_pools()
    return task.write_shard(shard, _backend(task.device), threading.Event())


def _load_map(folder: str, name: str) -> Any:
    import json

    from scalelatent.data import Dataset

    from .mapwrite import MapTask

    tree = read_record(EngineStore(folder).folder / f"result-{name}.rec")
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
