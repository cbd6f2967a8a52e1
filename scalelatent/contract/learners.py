"""The interface between the models and the engine.

A model is pure mathematics over arrays; the engine decides where and when it runs. A model learns in one of
two ways and writes rows in two more. Each way is a small protocol in this module:

=========================  ==========================================  ===================================
protocol                   one unit of work                            used by
=========================  ==========================================  ===================================
:class:`BatchLearner`      rows -> additive ``Stats`` -> new state     capsule, linear_mixture (EM)
:class:`OnlineLearner`     chains of a minibatch -> additive           conditional RBM, stepwise EM, online
                           ``Stats`` -> step                           compositional networks
:class:`RowMap`            rows -> rows, written out of core           projections, layers of an MBN
:class:`RowSets`           some of the rows, written out of core       centroids of an MBN
=========================  ==========================================  ===================================

Every additive statistic is a :class:`Stats`: one float64 vector with named views. The engine sums these
vectors in one fixed order, so a model never defines its own merge and a statistic is sent as one buffer. A
chain (part of a minibatch) may append some numbers per row, its records; the engine concatenates the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from .block_requirements import BlockRequirements
from .stats import Layout, Stats

if TYPE_CHECKING:
    import numpy.typing as npt

    from scalelatent.kernels.arrays import Array, HostRows

# Types that only the learner reads, not the engine: its state, its parameters prepared for the blocks of one
# task, and the data that it stores per leaf (a fixed range of rows).
State = TypeVar("State")
StateIn = TypeVar("StateIn", contravariant=True)
Prepared = TypeVar("Prepared")
PreparedIn = TypeVar("PreparedIn", contravariant=True)
PreparedOut = TypeVar("PreparedOut", covariant=True)
Kept = TypeVar("Kept")
Table = TypeVar("Table")


@dataclass(frozen=True)
class Block:
    """The rows of one kernel call; their arrays are never changed in place.

    Attributes
    ----------
    x : ndarray or CsrRows, shape (rows, features)
        Features in the dataset's own dtype; :class:`.CsrRows` if the dataset stores CSR rows and the model
        requires ``csr``.
    y : ndarray of int32, shape (rows,), or None
        Class codes. If the model requires :class:`~.block_requirements.Targets`, uint8 (rows, v) of 0 and 1.
    weight : ndarray of float64, shape (rows,), or None
    start : int
        Index of the first row in the dataset.
    rows : ndarray of int64, shape (rows,), or None
        Index of each row in the dataset, for minibatches, whose rows are not contiguous.
    epoch : int
        Number of the epoch, from 0.
    chain : int
        Number of the chain within its step.
    """

    x: Any  # an array of the backend's library, or CsrRows
    y: np.ndarray | None
    weight: np.ndarray | None
    start: int
    rows: np.ndarray | None = None
    epoch: int = 0
    chain: int = 0

    def row_number(self, row: int) -> int:
        """Return the index in the dataset of the row ``row`` of this block, for error messages."""
        return self.start + row if self.rows is None else int(self.rows[row])

    def slice_rows(self, first: int, stop: int) -> Block:
        """Return the block of the rows ``first:stop`` of this block."""
        part = slice(first, stop)
        y, weight, rows = (None if v is None else v[part] for v in (self.y, self.weight, self.rows))
        return replace(self, x=self.x[part], y=y, weight=weight, start=self.start + first, rows=rows)


class Backend(Protocol):
    """One thread's array library, its kernels and its reusable buffers."""

    name: str  # "numba", "cupy" or "reference": the variant of each kernel that `kernel` returns
    device: str  # "cpu", or number and name of the GPU
    row_limits: dict[str, int]  # maximum rows per call, by name of the work, after GPU memory ran out
    gpu_errors: tuple[type[Exception], ...]  # types of errors of the GPU libraries; empty on a CPU

    @property
    def xp(self) -> ModuleType:
        """Array library of this backend: numpy, or CuPy, whose operators run on this backend's stream."""

    def kernel(self, name: str) -> Callable[..., Any]:
        """Return the function of the kernel ``name`` for this backend's array library."""

    def buffer(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an uninitialised array from the buffer ``name``; the next call with this name reuses it."""

    def asarray(self, a: Array, dtype: npt.DTypeLike, name: str | None = None) -> Array:
        """Return ``a`` as a contiguous array of ``dtype``, in a named buffer if it is copied."""

    def take(self, a: Array, rows: Array, name: str) -> Array:
        """Return a copy of the rows of ``a`` with the indices ``rows``, in the reusable buffer ``name``."""

    def matmul(self, a: Array, b: Array, name: str) -> Array:
        """Return the matrix product of ``a`` and ``b``, in the reusable buffer ``name``."""

    def copy_table(self, table: Table) -> Table:
        """Return a kernel's table of constants in the memory of the backend's device."""

    def to_host(self, a: Array) -> np.ndarray:
        """Return a numpy copy of ``a`` after all earlier work on the device has finished."""

    def release_memory(self) -> None:
        """Release the buffers and the free blocks of the memory pool."""

    def name_error(self, error: Exception) -> Exception:
        """Return an error that names the GPU, for an error of a type in ``gpu_errors``."""


class BlockReceiver(Protocol):
    """An object to which the engine gives blocks of rows."""

    @property
    def requirements(self) -> BlockRequirements:
        """Requirements for the blocks of rows that this object receives, such as their number of rows."""


class Reduction(BlockReceiver, Protocol[StateIn, Prepared]):
    """Computation of an additive statistic; each task sums it over one span (a range of rows)."""

    def layout(self) -> Layout:
        """Return the names and shapes of the statistic's fields."""

    def flops_per_row(self) -> float:
        """Return the floating point operations per row, which determine the number of rows of a task."""

    def prepare(self, state: StateIn, backend: Backend) -> Prepared:
        """Return the data that all blocks of a task need, such as float32 parameters on the device."""

    def accumulate(self, prepared: Prepared, block: Block, stats: Stats) -> None:
        """Add the statistic of the rows of a block to ``stats``."""


@runtime_checkable
class LeafReduction(Reduction[StateIn, Prepared], Protocol[StateIn, Prepared]):
    """A :class:`Reduction` whose large sums stay on a GPU until the end of a leaf (a group of blocks)."""

    def make_leaf_sums(self, prepared: Prepared, stats: Stats) -> Any:
        """Return empty sums for a leaf (a group of consecutive blocks), to which `add_block` adds blocks."""

    def add_block(self, prepared: Prepared, block: Block, stats: Stats, sums: Any) -> None:
        """Add the contribution of a block to ``sums``, the sums of its group of blocks, and to ``stats``."""

    def add_leaf_sums(self, prepared: Prepared, stats: Stats, sums: Any) -> None:
        """Add ``sums`` to ``stats`` after the last block of a leaf (a group of consecutive blocks)."""


@runtime_checkable
class BatchLearner(Protocol[State]):
    """A learner that reads all rows in each pass; the sum of their statistics gives its next state."""

    def reductions(self) -> Mapping[str, Reduction[State, Any]]:
        """Return the reduction of the ``"train"`` rows and, if any, that of the ``"validation"`` rows."""

    def update(self, state: State, stats: Mapping[str, Stats]) -> State:
        """Return the next state, given the sums of a pass (the M-step of EM); a pure function."""

    def summary(self, state: State) -> dict[str, Any]:
        """Return measurements of the last pass, such as the objective, for callbacks and the dashboard."""

    def is_done(self, state: State) -> bool:
        """Return True if the learner needs no further pass."""


class RowMap(BlockReceiver, Protocol[Prepared]):
    """A function with one output row per row of the data: projections, predictions, codes of a layer."""

    def output(self) -> tuple[tuple[int, ...], str]:
        """Return (shape of one output row, dtype)."""

    def prepare(self, backend: Backend) -> Prepared:
        """Return the data that every block needs, such as parameters on the device."""

    def apply(self, prepared: Prepared, block: Block) -> np.ndarray:
        """Return the output rows of a block, (rows, *shape) with the shape that `output` returns."""


class OutputMap(RowMap[Prepared], Protocol[Prepared]):
    """A :class:`RowMap` whose output an estimator returns to the user."""

    @property
    def output_name(self) -> str:
        """Name of the output, such as "probabilities", for progress, tasks and records."""


class LabelMap(RowMap[Prepared], Protocol[Prepared]):
    """A :class:`RowMap` that also computes labels of its output rows, if its requirements set ``labels``."""

    def labels(self, out: np.ndarray) -> np.ndarray:
        """Return one class code for each of the output rows ``out``."""


@runtime_checkable
class ColumnMap(RowMap[Prepared], Protocol[Prepared]):
    """A :class:`RowMap` that computes its output column by column.

    A block is a whole shard of the output, so that many rows share the cost of preparing a column. A map can
    be a composition of several such maps (``stages``, each of which can be split by columns), followed by a
    plain map (``last``).
    """

    @property
    def last(self) -> RowMap | None:
        """Row map to apply after the last of ``stages``, or None; it cannot be split by columns."""

    def stages(self) -> Sequence[ColumnStage]:
        """Return the maps that this map applies one after the other."""

    def row_bytes(self) -> int:
        """Return the bytes of one row of the output and of all intermediate results."""

    def fill(self, prepared: Prepared, block: Block, out: np.ndarray) -> Iterator[None]:
        """Write the output rows of a block to ``out``; yield several times, so that the caller can stop."""


class ColumnStage(ColumnMap[Prepared], Protocol[Prepared]):
    """A :class:`ColumnMap` that can be split by columns; its costs determine the columns of one task."""

    def select_columns(self, first: int, stop: int) -> ColumnStage:
        """Return a map that computes only the columns ``first:stop`` of this map's output."""

    @property
    def column_group(self) -> int:
        """Number of adjacent output columns that are computed together, in the time of a single column."""

    def flops_per_row(self) -> float:
        """Return the floating point operations that compute one output column of one row."""

    def column_flops(self) -> float:
        """Return the floating point operations that prepare one output column, for any number of rows."""


class RowSets(BlockReceiver, Protocol):
    """Selections of rows of a dataset (sets with equal numbers of rows) that the engine copies in one pass.

    The copies are CSR rows if ``requirements`` sets ``csr``.
    """

    @property
    def n_sets(self) -> int:
        """Number of sets of rows."""

    @property
    def rows_per_set(self) -> int:
        """Number of rows of every set; all sets have equally many rows."""

    def output(self) -> tuple[tuple[int, ...], str]:
        """Return (shape of one row as it is stored in a set, dtype)."""

    def rows(self, which: int) -> np.ndarray:
        """Return the indices, in the dataset, of the rows of set number ``which``, in ascending order."""

    def take(self, which: int, x: HostRows, rows: np.ndarray) -> HostRows:
        """Return the rows ``rows`` of ``x`` in the format in which the set number ``which`` is stored."""

    def check(self, x: HostRows, start: int) -> None:
        """Raise a ValueError if the rows ``x``, the first of which is row ``start``, cannot be used."""


class StepLearner(BlockReceiver, Protocol[State, PreparedOut]):
    """Methods that all learners have which update their state after each minibatch."""

    def layout(self) -> Layout:
        """Return names and shapes of the fields of the statistic that a chain (part of a minibatch) fills."""

    def flops_per_row(self) -> float:
        """Return the floating point operations per row."""

    def prepare(self, state: State, backend: Backend) -> PreparedOut:
        """Return the data that the chains (parts) of a minibatch need; called once per step and thread."""

    def step(self, state: State, stats: Stats, n_rows: int) -> State:
        """Return the state after one batch of ``n_rows`` rows; a pure function."""

    def end_epoch(self, state: State) -> State:
        """Return the state after an epoch, such as one with a lower learning rate; a pure function."""

    def summary(self, state: State) -> dict[str, Any]:
        """Return measurements (scalars), such as the objective, for the callbacks and the dashboard."""

    def is_done(self, state: State) -> bool:
        """Return True if no more steps are needed; called only after an epoch or a validation."""


class OnlineLearner(StepLearner[State, Prepared], Protocol[State, Prepared]):
    """A learner that updates its state after each minibatch, from statistics, gradients or log-odds.

    A *step* uses one batch, which is split into a few *chains* of rows. Chains are independent: each starts
    from the same state and fills its own statistic. The statistics are summed (their row records are
    concatenated) in the order of the chains, on whichever workers these ran, and give the next state. The job
    sets the number of chains, which changes the result; the number of workers never changes the result.

    A learner that also measures held-out rows is a :class:`ValidatedLearner` too.
    """

    def run_chain(self, prepared: Prepared, block: Block, stats: Stats) -> None:
        """Add the statistic of one chain's rows (part of a minibatch) to ``stats``; write a record per row.

        ``prepared`` is shared with other chains and is never changed; a chain that updates parameters row by
        row works on its own copy. Random numbers are keyed by (seed, stage, ``block.epoch``, row of
        ``block.rows``).
        """


@runtime_checkable
class MultiChainLearner(Protocol[PreparedIn]):
    """An :class:`OnlineLearner` that can run several chains (parts of a minibatch) in one call.

    GPUs use this call, because a single chain is too small to keep a GPU busy.
    """

    def run_chains(self, prepared: PreparedIn, blocks: Sequence[Block], stats: Sequence[Stats]) -> None:
        """Fill each statistic from the block of its index, bitwise identical to calls of `run_chain`."""


@runtime_checkable
class GpuStepLearner(Protocol):
    """A :class:`MultiChainLearner` that can take whole steps on a GPU, which keeps the parameters.

    Between such steps, the state may be an object that only these two methods accept. `to_host` returns the
    state that all other methods of the learner take.
    """

    def step_on_gpu(self, state: Any, blocks: Sequence[Block], n_rows: int, backend: Backend) -> Any | None:
        """Return the state after a step, bitwise identical to that of `run_chain` for each block, and `step`.

        The old state does not change. Return None if these rows or settings need `run_chain` and `step`.
        """

    def to_host(self, state: Any) -> Any:
        """Return the state with all arrays on the host."""


@runtime_checkable
class ValidatedLearner(StepLearner[State, PreparedOut], Protocol[State, PreparedOut]):
    """A learner by minibatches that also measures held-out rows in validation passes."""

    def validation(self) -> Reduction[State, Any]:
        """Return the reduction that a validation pass computes over the held-out rows."""

    def validated(self, state: State, stats: Stats) -> State:
        """Return the state with the result of a validation pass, for ``summary``, ``is_done`` and schedules.

        This is a pure function, which is called before ``end_epoch``.
        """


class StoredRangeLearner(ValidatedLearner[State, Prepared], Protocol[State, Prepared, Kept]):
    """A learner that stores data for each fixed range of rows (a *leaf*); a step visits several ranges."""

    def visit(self, prepared: Prepared, block: Block, kept: Kept | None) -> Kept:
        """Return the data to store for a fixed range of rows: arrays in dicts, lists or tuples.

        ``kept`` is the stored data of this range from the previous epoch, or None at the first visit.
        """

    def replace_contribution(self, prepared: Prepared, kept: Kept | None, new: Kept, stats: Stats) -> None:
        """Add to ``stats`` the contribution of a range's data ``new`` minus that of its old data ``kept``."""


@runtime_checkable
class MultiRangeLearner(Protocol[PreparedIn, Kept]):
    """A :class:`StoredRangeLearner` that can visit several ranges of rows (leaves) in one call, for GPUs."""

    def visit_leaves(
        self, prepared: PreparedIn, blocks: Sequence[Block], kept: Sequence[Kept | None]
    ) -> list[Kept]:
        """Return the data to store for the rows of each block, bitwise identical to those of `visit`."""


Work = BatchLearner | StepLearner | Mapping[str, Reduction]
"""Work of a stage: many passes, steps over minibatches, or one pass of several reductions."""
