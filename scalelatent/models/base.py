"""The contract between the models and the engine.

A model is pure mathematics over arrays; the engine decides where and when it runs. Four ways of learning
cover the five models, and each is a small protocol here:

=========================  ==========================================  ===================================
protocol                   one unit of work                            used by
=========================  ==========================================  ===================================
:class:`BatchLearner`      rows -> additive ``Stats`` -> new state     capsule, linear_mixture (EM)
:class:`GradientLearner`   minibatch -> additive ``Stats`` -> step     conditional RBM, stepwise EM
:class:`RowMap`            rows -> rows, written out of core           projections, layers of an MBN
:class:`EvidenceLearner`   chain of minibatches -> evidence            compositional networks (online)
=========================  ==========================================  ===================================

Everything additive is a :class:`Stats`: one float64 vector with named views. The engine merges vectors,
whatever the model put into them, in one fixed order; so a model never writes a merge of its own and a
statistic travels as one buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    Examples
    --------
    >>> Layout((("total", (2, 3)), ("count", ()))).size
    7
    """

    fields: tuple[tuple[str, tuple[int, ...]], ...]

    @cached_property
    def slices(self) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Name -> (place in the vector, shape)."""
        out, start = {}, 0
        for name, shape in self.fields:
            stop = start + prod(shape)
            out[name] = (slice(start, stop), shape)
            start = stop
        return out

    @property
    def size(self) -> int:
        """Length of the vector, in float64 numbers."""
        return sum(prod(shape) for _, shape in self.fields)

    @property
    def nbytes(self) -> int:
        """Bytes of one statistic."""
        return 8 * self.size


class Stats:
    """An additive statistic: a float64 vector with named views.

    Parameters
    ----------
    layout : Layout
    vector : ndarray of float64, shape (layout.size,)

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
        if vector.shape != (layout.size,) or vector.dtype != np.float64:
            raise ValueError(
                f"a statistic of this layout is a float64 vector of {layout.size} numbers, not "
                f"{vector.dtype} {vector.shape}"
            )
        self.layout = layout
        self.vector = vector

    @classmethod
    def zeros(cls, layout: Layout) -> Stats:
        """The identity of :meth:`merge`."""
        return cls(layout, np.zeros(layout.size))

    def __getitem__(self, name: str) -> np.ndarray:
        """A view of one field, in its shape."""
        place, shape = self.layout.slices[name]
        return self.vector[place].reshape(shape)

    def merge(self, other: Stats) -> Stats:
        """Sum of two statistics; neither is changed."""
        return Stats(self.layout, self.vector + other.vector)

    def scale(self, factor: float) -> Stats:
        """The statistic times a number (forgetting); the original is not changed."""
        return Stats(self.layout, self.vector * factor)

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
    rows are CSR and the work has ``accepts_csr = True``. ``y`` is int32 class codes or None, ``weight``
    float64 or None, ``start`` the number of the first row in the dataset.
    """

    x: Any
    y: np.ndarray | None
    weight: np.ndarray | None
    start: int


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


class GradientLearner(Protocol):
    """Learning by minibatches: additive statistics of a batch, then a step (conditional RBM, stepwise EM)."""

    kind: str

    def gradient(self, state: Any, block: Block, rng: np.random.Generator, stats: Stats) -> None:
        """Add the gradient of these rows; sums over rows are float64 and in row order."""
        ...

    def step(self, state: Any, stats: Stats) -> Any:
        """A new state after one batch."""
        ...


class EvidenceLearner(Protocol):
    """Online learning by chains: every chain starts from one prior and returns additive evidence
    (compositional networks).
    """

    kind: str

    def run_chain(self, state: Any, blocks: Sequence[Block], rng: np.random.Generator, stats: Stats) -> None:
        """Evidence of a sequence of minibatches, added to ``stats``."""
        ...

    def absorb(self, state: Any, stats: Stats, n_chains: int, n_batches: int) -> Any:
        """Add the evidence of all chains and forget: lambda ** (n_chains * n_batches)."""
        ...
