"""How much of a process's memory rows may take between passes, where the user leaves it open."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from scalelatent.errors import ShardError

from .cache import DEFAULT_SHARE, SMALL_BYTES
from .passes import Stage, seconds_per_row
from .rates import rates
from .speeds import scratch_rates

if TYPE_CHECKING:
    from .plan import PlannedRows


def read_seconds(dataset: PlannedRows) -> float:
    """Seconds that a thread takes to read and decode a row of a stored dataset, measured once; of one that
    will be made as of any other.
    """
    if not dataset.pieces(0, 1):  # rows that do not exist yet
        return scratch_rates()[1] * dataset.nbytes / max(len(dataset), 1)

    def measure() -> float:
        pieces = dataset.pieces()
        for number, (start, stop) in enumerate(pieces, 1):
            times = []
            try:
                for _ in range(2):  # the first one may wait for the disk, and finds out what is there
                    begin = time.perf_counter()
                    dataset.read_x(start, stop)
                    times.append(time.perf_counter() - begin)
            except ShardError:  # the fit may leave it out
                if number == len(pieces):
                    raise
            else:
                break
        return min(times) / (stop - start)

    return rates.get(f"read {dataset.fingerprint()}", measure)


def is_slow(dataset: PlannedRows, seconds: float) -> bool:
    """Whether reading a row takes longer than the ``seconds`` that it is computed on; rows of an object store
    are worth keeping in any case.
    """
    return dataset.reads_at_once > 1 or read_seconds(dataset) > seconds


def choose_cache(asked: float | None, stage: Stage) -> float:
    """What the rows of a stage may take of each process's cache, as :func:`~.cache.shared_cache` takes it.

    Parameters
    ----------
    asked : float or None
        What the user says (see :func:`~.cache.parse_cache`); None: a little, unless there are more rows and
        passes would wait for them.
    stage : Stage
    """
    if asked is not None:
        return asked
    stored = {part: ds for part, ds in stage.datasets.items() if ds.is_stored}
    if sum(ds.nbytes for ds in stored.values()) > SMALL_BYTES:
        for part, dataset in stored.items():
            if is_slow(dataset, seconds_per_row(stage.reductions.get(part, stage.online))):
                return DEFAULT_SHARE
    return float(SMALL_BYTES)


def map_cache(asked: float | None, task: Any) -> float:
    """The same for rows that tasks of a map read more than once, each time for seconds of work."""
    if asked is not None:
        return asked
    return DEFAULT_SHARE if task.dataset.reads_at_once > 1 else float(SMALL_BYTES)
