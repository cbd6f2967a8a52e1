"""The contract between the models and the engine.

A model is pure mathematics over arrays; the engine decides where and when it runs. Three ways of learning
cover the five models, and each is a small protocol here:

=========================  ==========================================  ===================================
protocol                   one unit of work                            used by
=========================  ==========================================  ===================================
:class:`BatchLearner`      rows -> additive ``Stats`` -> new state     capsule, linear_mixture (EM)
:class:`OnlineLearner`     chains of a minibatch -> additive           conditional RBM, stepwise EM, online
                           ``Stats`` -> step                           compositional networks
:class:`RowMap`            rows -> rows, written out of core           projections, layers of an MBN
:class:`RowSets`           some of the rows, written out of core       centroids of an MBN
=========================  ==========================================  ===================================

Everything additive is a :class:`Stats`: one float64 vector with named views. The engine merges vectors,
whatever the model put into them, in one fixed order; so a model never writes a merge of its own and a
statistic travels as one buffer. What a chain has to say of each of its rows alone may follow in the vector:
records of rows are put one after another, where the rest is summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the fields of a statistic.

    Parameters
    ----------
    fields : tuple of (name, shape)
        In the order in which they lie in the vector.
    row_fields : tuple of (name, width), default ()
        Of a record of a row; only chains of an `OnlineLearner` have such.

    Examples
    --------
    >>> Layout((("total", (2, 3)), ("count", ()))).size
    7
    >>> Layout((("total", (2, 3)),), (("change", 4),)).length(10)
    46
    """

    fields: tuple[tuple[str, tuple[int, ...]], ...]
    row_fields: tuple[tuple[str, int], ...] = ()

    @cached_property
    def slices(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Name -> (place in the vector, shape)."""
        out, start = {}, 0
        for name, shape in self.fields:
            stop = start + prod(shape)
            out[name] = (slice(start, stop), shape)
            start = stop
        return out

    @cached_property
    def columns(self) -> dict[str, slice]:
        """Name -> columns in the records of rows."""
        out, start = {}, 0
        for name, width in self.row_fields:
            out[name] = slice(start, start + width)
            start += width
        return out

    @cached_property
    def size(self) -> int:
        """Length of what is summed, in float64 numbers."""
        return sum(prod(shape) for _, shape in self.fields)

    @property
    def row_width(self) -> int:
        """Numbers in the record of a row."""
        return sum(width for _, width in self.row_fields)

    def length(self, n_rows: int = 0) -> int:
        """Length of the vector with the records of so many rows."""
        return self.size + n_rows * self.row_width

    @property
    def nbytes(self) -> int:
        """Bytes of one statistic, without records of rows."""
        return 8 * self.size


class Stats:
    """An additive statistic: a float64 vector with named views.

    Parameters
    ----------
    layout : Layout
    vector : ndarray of float64, shape (layout.length(rows),)

    Examples
    --------
    >>> s = Stats.zeros(Layout((("total", (2,)), ("count", ()))))
    >>> s["total"][:] = 3.0
    >>> s["count"][...] = 1
    >>> float(s.merge(s)["total"][0]), float(s.scale(0.5)["count"])
    (6.0, 0.5)
    """

    __slots__ = ("layout", "vector")

    def __init__(self, layout: Layout, vector: np.ndarray) -> None:
        more = vector.size - layout.size
        fits = more >= 0 and not more % layout.row_width if layout.row_width else more == 0
        if vector.ndim != 1 or not fits or vector.dtype != np.float64:
            raise ValueError(
                f"a statistic of this layout is a float64 vector of {layout.size} numbers"
                f"{f' and {layout.row_width} for each row' if layout.row_width else ''}, not "
                f"{vector.dtype} {vector.shape}"
            )
        self.layout = layout
        self.vector = vector

    @classmethod
    def zeros(cls, layout: Layout, n_rows: int = 0) -> Stats:
        """The identity of :meth:`merge`; ``n_rows`` of a chain that says something of each."""
        return cls(layout, np.zeros(layout.length(n_rows)))

    def __getitem__(self, name: str) -> np.ndarray:
        """A view of one field, in its shape; of a field of rows, shape (rows, width)."""
        columns = self.layout.columns.get(name)
        if columns is not None:
            return self.vector[self.layout.size :].reshape(-1, self.layout.row_width)[:, columns]
        place, shape = self.layout.slices[name]
        return self.vector[place].reshape(shape)

    def merge(self, other: Stats) -> Stats:
        """Sum of two statistics, and the records of rows of both; neither is changed."""
        size = self.layout.size
        total = self.vector[:size] + other.vector[:size]
        return Stats(self.layout, np.concatenate([total, self.vector[size:], other.vector[size:]]))

    def scale(self, factor: float) -> Stats:
        """The statistic times a number (forgetting), without records of rows; the original is not changed."""
        return Stats(self.layout, self.vector[: self.layout.size] * factor)

    def __reduce__(self) -> tuple:
        return Stats, (self.layout, self.vector)


@dataclass(frozen=True)
class CsrRows:
    """Rows of mostly zeros in compressed sparse row form: what scipy's ``csr_array`` holds, without scipy.

    Row ``i`` has the values ``data[indptr[i]:indptr[i + 1]]`` in the columns ``indices[...]``, which rise
    strictly. Arrays are never changed in place.

    Parameters
    ----------
    data : ndarray, shape (entries,)
    indices : ndarray of int32 or int64, shape (entries,)
    indptr : ndarray of int32 or int64, shape (rows + 1,)
        From 0 to the number of entries.
    shape : (int, int)
        (rows, features).

    Examples
    --------
    >>> rows = CsrRows(np.array([5.0, 7.0]), np.array([2, 0]), np.array([0, 1, 1, 2]), (3, 4))
    >>> len(rows), rows[2:].to_dense().tolist()
    (3, [[7.0, 0.0, 0.0, 0.0]])
    """

    data: np.ndarray
    indices: np.ndarray
    indptr: np.ndarray
    shape: tuple[int, int]

    @classmethod
    def of(cls, matrix: Any) -> CsrRows:
        """The same arrays out of a scipy CSR matrix or array; nothing is copied."""
        rows, features = matrix.shape
        return cls(matrix.data, matrix.indices, matrix.indptr, (int(rows), int(features)))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values."""
        return self.data.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the three arrays."""
        return self.data.nbytes + self.indices.nbytes + self.indptr.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> CsrRows:
        """A contiguous run of rows; values and columns are views."""
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise ValueError(f"CsrRows are sliced by contiguous rows, step 1, not {step}")
        stop = max(start, stop)
        first, last = int(self.indptr[start]), int(self.indptr[stop])
        pointers = self.indptr[start : stop + 1] - self.indptr[start]
        return CsrRows(
            self.data[first:last], self.indices[first:last], pointers, (stop - start, self.shape[1])
        )

    def to_dense(self) -> np.ndarray:
        """The rows as a dense array, (rows, features), of the same dtype."""
        out = np.zeros(self.shape, self.data.dtype)
        first = np.arange(self.shape[0], dtype=np.int64) * self.shape[1]
        out.reshape(-1)[np.repeat(first, np.diff(self.indptr)) + self.indices] = self.data
        return out

    def take(self, rows: np.ndarray) -> CsrRows:
        """Rows in any order, copied.

        Examples
        --------
        >>> rows = CsrRows(np.array([5.0, 7.0]), np.array([2, 0]), np.array([0, 1, 1, 2]), (3, 4))
        >>> rows.take(np.array([2, 0])).to_dense().tolist()
        [[7.0, 0.0, 0.0, 0.0], [0.0, 0.0, 5.0, 0.0]]
        """
        counts = np.diff(self.indptr)[rows]
        pointers = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        entries = np.arange(pointers[-1]) + np.repeat(self.indptr[rows] - pointers[:-1], counts)
        return CsrRows(self.data[entries], self.indices[entries], pointers, (len(rows), self.shape[1]))

    @staticmethod
    def concatenate(parts: Sequence[CsrRows]) -> CsrRows:
        """Runs of rows one under the other; at least one."""
        if len(parts) == 1:
            return parts[0]
        counts = np.concatenate([np.diff(part.indptr) for part in parts])
        return CsrRows(
            np.concatenate([part.data for part in parts]),
            np.concatenate([part.indices for part in parts]),
            np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]),
            (len(counts), parts[0].shape[1]),
        )


@dataclass(frozen=True)
class Block:
    """A fixed run of rows, as a kernel sees it. Arrays are never changed in place.

    ``x`` is (rows, features) in the dataset's own dtype: an ndarray, or :class:`CsrRows` where the dataset's
    rows are CSR and the work has ``accepts_csr = True``. ``y`` is int32 class codes or None; where the work
    has ``targets`` (see :class:`~scalelatent.models.targets.Targets`) uint8 (rows, v), outputs of 0 and 1.
    ``weight`` is float64 or None, ``start`` the number of the first row in the dataset. In minibatches rows
    are not contiguous: ``rows`` (int64) then has the number of each, ``epoch`` counts from 0, and ``chain``
    is the number of the chain in its step.
    """

    x: Any
    y: np.ndarray | None
    weight: np.ndarray | None
    start: int
    rows: np.ndarray | None = None
    epoch: int = 0
    chain: int = 0


class Reduction(Protocol):
    """An additive pass over rows: what a task computes from its span."""

    def layout(self) -> Layout:
        """Shape of the statistic."""
        ...

    def flops_per_row(self) -> float:
        """Floating point operations a row, for the size of leaves and spans."""
        ...

    def prepare(self, state: Any, backend: Any) -> Any:
        """What every block of a span needs (for example parameters in float32 on the device)."""
        ...

    def accumulate(self, prepared: Any, block: Block, stats: Stats) -> None:
        """Add the block's contribution to ``stats``."""
        ...


@runtime_checkable
class BatchLearner(Protocol):
    """Learning by passes: statistics of all rows under one state give the next state."""

    kind: str

    def reductions(self) -> Mapping[str, Reduction]:
        """The parts of a pass: ``"train"`` and, where there are validation rows, ``"validation"``."""
        ...

    def update(self, state: Any, stats: Mapping[str, Stats]) -> Any:
        """M-step and schedule: a new state; a pure function."""
        ...

    def summary(self, state: Any) -> dict[str, float | int | None]:
        """The scalars of the last pass that the driver, the callbacks and the dashboard see."""
        ...

    def is_done(self, state: Any) -> bool:
        """True where no member wants another pass."""
        ...


class RowMap(Protocol):
    """A function of rows whose output is as large as the data: projections, predictions, codes of a layer."""

    def output(self) -> tuple[tuple[int, ...], str]:
        """(shape of one output row, dtype)."""
        ...

    def prepare(self, backend: Any) -> Any:
        """What every block needs."""
        ...

    def apply(self, prepared: Any, block: Block) -> np.ndarray:
        """Output rows of the block, (rows, *shape)."""
        ...


class PartedMap(RowMap, Protocol):
    """A :class:`RowMap` whose columns are computed one after the other, each over many rows: what it takes to
    prepare a column is then done seldom. A block is a whole shard of the output.

    It may be several such maps, one after the other (``stages``, each of which can be cut by columns), and
    another map that follows (``last``, or None).
    """

    whole_shards: bool
    last: RowMap | None

    def stages(self) -> Sequence[PartedMap]:
        """The maps that it is made of."""
        ...

    def row_bytes(self) -> int:
        """Bytes of a row of its output, and of what it has in between."""
        ...

    def of_columns(self, first: int, stop: int) -> PartedMap:
        """The map to some of the output's columns; of a map of one stage."""
        ...

    def fill(self, prepared: Any, block: Block, out: np.ndarray) -> Iterator[None]:
        """Write the output rows of the block; hands over now and then, so that it can be called off."""
        ...


class RowSets(Protocol):
    """Sets of some rows each, all of one size, that are kept."""

    csr: bool

    @property
    def n_sets(self) -> int:
        """How many."""
        ...

    @property
    def set_rows(self) -> int:
        """Rows of each."""
        ...

    def output(self) -> tuple[tuple[int, ...], str]:
        """(shape of a row as it is kept, dtype)."""
        ...

    def rows(self, which: int) -> np.ndarray:
        """Numbers of a set's rows, in rising order."""
        ...

    def take(self, which: int, x: Any, rows: np.ndarray) -> Any:
        """Some rows of ``x`` as the set keeps them."""
        ...

    def check(self, x: Any, start: int) -> None:
        """Raise ValueError where rows, of which the first is ``start``, cannot be used."""
        ...


class OnlineLearner(Protocol):
    """Learning by minibatches: stats, gradients and evidence alike.

    A *step* takes one batch, cut into a few *chains* of rows. Chains know nothing of each other: each starts
    from the same state and adds what it found to a statistic of its own; the statistics are summed (records
    of rows put one after another) in the order of the chains, whoever computed them, and give the next state.
    How many chains there are belongs to the job, so it changes the result, and the number of workers never
    does.

    A learner with a part of rows to validate on has two methods more, ``validation() -> Reduction`` and
    ``validated(state, stats) -> state`` (pure), see :class:`ValidatedLearner`.
    """

    kind: str

    def layout(self) -> Layout:
        """Shape of the statistic that a chain returns."""
        ...

    def flops_per_row(self) -> float:
        """Floating point operations a row."""
        ...

    def prepare(self, state: Any, backend: Any) -> Any:
        """What the chains of one step need (for example parameters in float32); once a step and thread."""
        ...

    def run_chain(self, prepared: Any, block: Block, stats: Stats) -> None:
        """One chain of one step: add the gradient, statistics or evidence of these rows, in their order, to
        ``stats``, and write its fields of rows: one record for each of the block's, in their order. A chain
        that updates itself row by row keeps its own copy of the parameters; ``prepared`` belongs to other
        chains too and is never changed. Random numbers are keyed by (seed, stage, ``block.epoch``, row of
        ``block.rows``).
        """
        ...

    def step(self, state: Any, stats: Stats, n_rows: int) -> Any:
        """A new state after one batch of ``n_rows`` rows; a pure function."""
        ...

    def end_epoch(self, state: Any) -> Any:
        """The state after an epoch (a schedule); a pure function. ``return state`` where there is none."""
        ...

    def summary(self, state: Any) -> dict[str, float | int | None]:
        """The scalars that the driver, the callbacks and the dashboard see."""
        ...

    def is_done(self, state: Any) -> bool:
        """True where no more steps are wanted; asked at the ends of epochs and after validations only."""
        ...


@runtime_checkable
class ValidatedLearner(Protocol):
    """What an :class:`OnlineLearner` has on top where rows are held out."""

    def validation(self) -> Reduction:
        """The pass over the validation rows under the state of the moment."""
        ...

    def validated(self, state: Any, stats: Stats) -> Any:
        """A new state that knows what the pass measured (for ``summary``, ``is_done`` and schedules); a pure
        function, called before ``end_epoch``.
        """
        ...
