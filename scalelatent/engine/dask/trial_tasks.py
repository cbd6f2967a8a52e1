"""What runs on a worker for a suspect: a task alone there, which says what it is about to do.

Each step (reading a piece, computing on a block) stands in a small file of the run folder before it is taken,
and beside it the memory of the process, several times a second. The file goes with the task. Where the
process dies it is left, and names the rows.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from scalelatent.engine.checkpoints import EngineStore
from scalelatent.engine.passes import Span
from scalelatent.errors import ScalelatentError

from .tasks import Ref, context_of, load_map, open_store, stopping
from .worker_side import Fit, TaskStop

SAMPLE_SECONDS = 0.25


class NotedStop(TaskStop):
    """The stop flag of a task that notes each of its steps, so that the rows at fault are known if it dies.

    Parameters
    ----------
    fit : Fit
    store : EngineStore
    name : str
        Of the file.
    """

    notes = True

    def __init__(self, fit: Fit | None, store: EngineStore, name: str) -> None:
        super().__init__(fit)
        self._store, self._name, self._lock = store, name, threading.Lock()
        self._said: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "peak": 0}

    def note(self, doing: str, start: int, stop: int) -> None:
        """The next step, with its rows."""
        self._say(doing=doing, rows=[start, stop])

    def sample(self) -> None:
        """The memory of this process, where it has grown."""
        memory = _memory()
        if memory > 1.02 * self._said["peak"]:
            self._say(peak=memory)

    def _say(self, **news: Any) -> None:
        with self._lock:
            self._said |= {"peak": max(self._said["peak"], _memory()), **news}
            self._store.write_bytes(self._name, json.dumps(self._said).encode())


def _memory() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


@contextmanager
def _noted(store: EngineStore, name: str, fit: Fit) -> Iterator[NotedStop]:
    stop, ended = NotedStop(fit, store, name), threading.Event()

    def sample() -> None:
        with suppress(ScalelatentError, OSError):
            while not ended.wait(SAMPLE_SECONDS):
                stop.sample()

    thread = threading.Thread(target=sample, name="scalelatent-note", daemon=True)
    thread.start()
    try:
        yield stop
    finally:
        ended.set()
        thread.join()
        store.remove(name)


def try_span(
    ref: Ref, stage_name: str, iteration: int, span: Span, learns: bool, fit: Fit, note: str
) -> None:
    """Compute a span, and keep it in the run folder for the pass that is begun anew.

    Parameters
    ----------
    learns : bool
        Whether the pass has parameters.
    note : str
        Name of the file in the run folder.
    """
    store = open_store(ref)
    state = store.load_state(stage_name, iteration) if learns else None
    with _noted(store, note, fit) as stop, stopping():
        vector = context_of(ref, stage_name, iteration, state).run_span(span, stop)
    store.save_node(stage_name, iteration, span, vector)


def try_shard(ref: Ref, name: str, shard: int, fit: Fit, note: str) -> None:
    """Compute and write one shard of a map."""
    task, backend = load_map(ref, name)
    with _noted(open_store(ref), note, fit) as stop, stopping():
        task.write_shard(shard, backend, stop)


def at_work(token: str, dask_worker: Any) -> int:
    """Tasks of a driver that this worker runs, wanted or not."""
    from .hooks import running_tasks

    return sum(token in key for key in running_tasks(dask_worker))
