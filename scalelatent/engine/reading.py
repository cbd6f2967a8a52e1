"""Rows of a dataset a piece at a time, as work wants them: checked, told by name if they are bad, and kept
where they fit.

A piece is what the dataset reads best at once (a chunk). See :mod:`.ahead` for the blocks of a span.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.wants import Targets, Wants
from scalelatent.data.csr import index_dtype
from scalelatent.errors import DataError, RunError, ScalelatentError, ShardError
from scalelatent.kernels.sparse_rows import CsrRows

from .cache import Piece, PieceCache
from .quarantine import Ranges

# A piece of rows with outputs is cut where these would be more: outputs may be far wider than rows.
TARGET_BYTES = 2**24
_NO_WANTS = Wants()


@contextmanager
def naming(dataset: Any) -> Iterator[None]:
    """Give what a kernel says about a row, and a broken shard, the name of the dataset.

    Raises
    ------
    DataError
        In place of a ValueError or FloatingPointError.
    RunError
        In place of a MemoryError, of the host or of a device.
    """
    try:
        yield
    except ShardError as error:
        raise error.moved(url=dataset.url) from error.__cause__
    except ScalelatentError:
        raise
    except MemoryError as error:
        raise RunError(
            f"out of memory on rows of {dataset.url or 'the given arrays'}: {error}. Give the worker more "
            "memory, or fewer threads ([cluster] memory_limit, threads), then resume the run; or start anew "
            "in another folder with a lower [engine] block_rows (engine={'block_rows': ...})"
        ) from error
    except (ValueError, FloatingPointError) as error:
        where = dataset.url or "the given arrays"
        raise DataError(f"{where}: {error}. Clean these rows, or leave them out, and start again") from error


def as_rows(x: Any) -> Any:
    """Rows as kernels take them: an ndarray as it is, a scipy matrix as :class:`CsrRows`.

    Examples
    --------
    >>> from scipy.sparse import csr_array
    >>> as_rows(csr_array([[0, 2]])).indices.tolist()
    [1]
    """
    return x if isinstance(x, np.ndarray) else CsrRows.of(x)


class Stopped(Exception):
    """The pass was called off."""


class StopEvent(threading.Event):
    """Tells a pass to stop, and hears how far it is; a task of a cluster has one of its own kind.

    ``is_set`` is asked before each block, and while rows are waited for.
    """

    notes = False
    """Each read and each computation is told to ``note`` before it is begun, so nothing is read ahead."""

    def moved(self) -> None:
        """Another block is about to be computed on."""

    def note(self, doing: str, start: int, stop: int) -> None:
        """The next step, with its rows."""


@dataclass
class Meter:
    """What reading cost: bytes decoded, by any of the threads that read, and seconds waited for."""

    bytes_read: int = 0
    wait_seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def count(self, nbytes: int) -> None:
        """Add to the bytes."""
        with self._lock:
            self.bytes_read += nbytes


class Reader:
    """Pieces of one dataset through the cache.

    Parameters
    ----------
    dataset : Dataset
    cache : PieceCache or None
        None reads every time.
    meter : Meter
    classes : ndarray or None
        The model's classes: labels become their positions here. None leaves labels unread.
    wants : Wants
        Of the work whose rows these are.
    skipped : tuple of (start, stop)
        Rows that are not to be read: they are zeros of class 0 and weight 0, all others have a weight.
    """

    def __init__(
        self,
        dataset: Any,
        cache: PieceCache | None,
        meter: Meter,
        classes: np.ndarray | None = None,
        *,
        wants: Wants = _NO_WANTS,
        skipped: Ranges = (),
    ) -> None:
        self.dataset, self.skipped = dataset, skipped
        self.csr, self.targets = wants.csr, wants.targets
        self.classes = classes if dataset.has_y and wants.targets is None else None
        self.cache = cache if dataset.is_stored else None
        self.meter = meter
        labels = None if self.classes is None else (str(self.classes.dtype), self.classes.tobytes())
        form = labels if wants.targets is None else wants.targets.source
        self._name = (dataset.fingerprint(), form, skipped) if self.cache is not None else None

    @property
    def target_width(self) -> int:
        """Outputs of a row; 0 where they are not read."""
        if self.targets is None:
            return 0
        return self.dataset.n_features if self.targets.source == "x" else int(self.dataset.n_targets or 0)

    def pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows cut into what is read at once."""
        pieces = self.dataset.pieces(start, stop)
        if self.targets is None:
            return pieces
        step = max(1, TARGET_BYTES // max(self.target_width, 1))
        return [(c, min(c + step, b)) for a, b in pieces for c in range(a, b, step)]

    def block(
        self,
        x: Any,
        y: Any,
        weight: Any,
        start: int,
        rows: np.ndarray | None = None,
        epoch: int = 0,
        chain: int = 0,
    ) -> Block:
        """Columns of some rows (of a piece, or gathered out of several) as kernels take them."""
        if self.targets is not None and self.targets.source == "x":
            x, y = _observed(x, self.targets, start, rows, epoch), x
        elif isinstance(x, CsrRows) and not self.csr:
            x = x.to_dense()
        return Block(x, y, weight, start, rows, epoch, chain)

    def cached(self, start: int, stop: int) -> Piece | None:
        """A piece that is at hand without reading."""
        return self.cache.get((self._name, start, stop)) if self.cache is not None else None

    def read(self, start: int, stop: int) -> Piece:
        """(x, codes or outputs, weight) of a piece; where rows are their own outputs, x are these."""
        found = self.cached(start, stop)
        if found is not None:
            return found
        piece = self._read_around(start, stop) if self.skipped else self._read(start, stop)
        if self.cache is not None:
            self.cache.put((self._name, start, stop), piece)
        return piece

    def _read(self, start: int, stop: int) -> Piece:
        ds = self.dataset
        itself = self.targets is not None and self.targets.source == "x"
        piece = (
            ds.read_binary(start, stop) if itself else as_rows(ds.read_x(start, stop)),
            None if itself else self._read_y(start, stop),
            ds.read_weight(start, stop) if ds.has_weight else None,
        )
        if ds.is_stored:
            self.meter.count(sum(a.nbytes for a in piece if a is not None))
        return piece

    def _read_y(self, start: int, stop: int) -> np.ndarray | None:
        if self.targets is not None:
            return self.dataset.read_targets(start, stop)
        return None if self.classes is None else self.dataset.read_codes(start, stop, self.classes)

    def _read_around(self, start: int, stop: int) -> Piece:
        """A piece without the rows that are to be left out, in whose places there is nothing."""
        held, row = [], start
        inside = [(max(a, start), min(b, stop)) for a, b in self.skipped if a < stop and b > start]
        for a, b in [*inside, (stop, stop)]:
            if row < a:
                x, y, weight = self._read(row, a)
                held.append(((row, a), (x, y, np.ones(a - row) if weight is None else weight)))
            if a < b:
                held.append(((a, b), self._nothing(b - a)))
            row = b
        x, y, weight = (cut(held, column, start, stop) for column in range(3))
        return x, y, weight

    def _nothing(self, rows: int) -> Piece:
        dtype, p = self.dataset.dtype, self.dataset.n_features
        if self.targets is not None and self.targets.source == "x":
            return np.zeros((rows, p), np.uint8), None, np.zeros(rows)
        if self.dataset.is_sparse:
            index = index_dtype(p)
            empty = np.zeros(0, dtype), np.zeros(0, index), np.zeros(rows + 1, np.int64)
            x: Any = CsrRows(*empty, (rows, p))
        else:
            x = np.zeros((rows, p), dtype)
        y = None if self.classes is None else np.zeros(rows, np.int32)
        if self.targets is not None:
            y = np.zeros((rows, self.target_width), np.uint8)
        return x, y, np.zeros(rows)


def _observed(v: np.ndarray, targets: Targets, start: int, rows: np.ndarray | None, epoch: int) -> np.ndarray:
    """The input of rows that are outputs."""
    how = targets.corruption
    if how is None:
        return np.empty((len(v), 0), np.uint8)
    from scalelatent.kernels.corruption import corrupt

    rows = np.arange(start, start + len(v)) if rows is None else rows
    return corrupt(
        v,
        rows,
        epoch,
        kind=how.kind,
        rate=how.rate,
        size=how.size,
        shape=how.shape,
        seed=how.seed,
        stage=how.stage,
    )


def cut(held: list[Any], column: int, start: int, stop: int) -> Any:
    """Rows start to stop of a column (x, y or weight) of pieces: a view where one piece has them all.

    Examples
    --------
    >>> held = [((0, 2), (np.arange(2), None, None)), ((2, 4), (np.arange(2, 4), None, None))]
    >>> cut(held, 0, 1, 3).tolist(), cut(held, 1, 1, 3)
    ([1, 2], None)
    """
    parts = [
        piece[column][max(start - a, 0) : stop - a]
        for (a, b), piece in held
        if piece[column] is not None and a < stop and b > start
    ]
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    return CsrRows.concatenate(parts) if isinstance(parts[0], CsrRows) else np.concatenate(parts)
