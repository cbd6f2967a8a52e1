"""The contract between the models and the engine.

A model is pure mathematics over arrays; the engine decides where and when it runs. A model learns in one of
two ways, and hands out rows in two more; each is a small protocol here:

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from .stats import Layout, Stats
from .wants import Wants

if TYPE_CHECKING:
    import numpy.typing as npt

    from scalelatent.kernels.arrays import Array, HostRows

# What the engine hands on without looking inside: a learner's state, what it prepares of one for the blocks
# of a span, what it keeps of a leaf. A protocol without brackets is that of a learner of any state.
State = TypeVar("State")
StateIn = TypeVar("StateIn", contravariant=True)
Prepared = TypeVar("Prepared")
PreparedIn = TypeVar("PreparedIn", contravariant=True)
PreparedOut = TypeVar("PreparedOut", covariant=True)
Kept = TypeVar("Kept")
Table = TypeVar("Table")


@dataclass(frozen=True)
class Block:
    """A fixed run of rows, as a kernel sees it. Arrays are never changed in place.

    ``x`` is (rows, features) in the dataset's own dtype: an ndarray, or :class:`.CsrRows` where the
    dataset's rows are CSR and the work wants ``csr``. ``y`` is int32 class codes or None; where the work
    wants ``targets`` (see :class:`~.wants.Targets`) uint8 (rows, v), outputs of 0 and 1.
    ``weight`` is float64 or None, ``start`` the number of the first row in the dataset. In minibatches
    rows are not contiguous: ``rows`` (int64) then has the number of each, ``epoch`` counts from 0, and
    ``chain`` is the number of the chain in its step.
    """

    x: Any  # an array of the backend's library, or CsrRows: what the work wants
    y: np.ndarray | None
    weight: np.ndarray | None
    start: int
    rows: np.ndarray | None = None
    epoch: int = 0
    chain: int = 0

    def number(self, row: int) -> int:
        """Number in the dataset of a row of the block, for messages."""
        return self.start + row if self.rows is None else int(self.rows[row])


class Backend(Protocol):
    """What a work computes with: arrays of one library, kernels for them, and scratch. Of one thread."""

    name: str
    device: str
    row_limits: dict[str, int]
    card_errors: tuple[type[Exception], ...]

    @property
    def xp(self) -> ModuleType:
        """The array library, numpy or CuPy; CuPy's operators then run on this backend's stream."""

    def kernel(self, name: str) -> Callable[..., Any]:
        """The body of a kernel."""

    def buffer(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Scratch of this shape, valid until the same name is asked for again."""

    def asarray(self, a: Array, dtype: npt.DTypeLike, name: str | None = None) -> Array:
        """``a`` as a contiguous array of ``dtype``."""

    def take(self, a: Array, rows: Array, name: str) -> Array:
        """Rows of ``a`` in a named buffer."""

    def matmul(self, a: Array, b: Array, name: str) -> Array:
        """Matrix product in a named buffer."""

    def table(self, table: Table) -> Table:
        """A table of a kernel, where the kernel wants it."""

    def to_host(self, a: Array) -> np.ndarray:
        """As numpy, after all work before it."""

    def release_memory(self) -> None:
        """Let go of scratch, and of what a pool keeps for later."""

    def name_error(self, error: Exception) -> Exception:
        """Return the error that names the card, for one of ``card_errors``."""


class Reduction(Protocol[StateIn, Prepared]):
    """An additive pass over rows: what a task computes from its span."""

    @property
    def wants(self) -> Wants:
        """Optional requests."""

    def layout(self) -> Layout:
        """Shape of the statistic."""

    def flops_per_row(self) -> float:
        """Floating point operations a row, for the size of leaves and spans."""

    def prepare(self, state: StateIn, backend: Backend) -> Prepared:
        """What every block of a span needs (for example parameters in float32 on the device)."""

    def accumulate(self, prepared: Prepared, block: Block, stats: Stats) -> None:
        """Add the block's contribution to ``stats``."""


@runtime_checkable
class BatchLearner(Protocol[State]):
    """Learning by passes: statistics of all rows under one state give the next state."""

    def reductions(self) -> Mapping[str, Reduction[State, Any]]:
        """The parts of a pass: ``"train"`` and, where there are validation rows, ``"validation"``."""

    def update(self, state: State, stats: Mapping[str, Stats]) -> State:
        """M-step and schedule: a new state; a pure function."""

    def summary(self, state: State) -> dict[str, Any]:
        """The scalars of the last pass that the driver, the callbacks and the dashboard see."""

    def is_done(self, state: State) -> bool:
        """True where no member wants another pass."""


class RowMap(Protocol[Prepared]):
    """A function of rows whose output is as large as the data: projections, predictions, codes of a layer."""

    @property
    def wants(self) -> Wants:
        """Optional requests."""

    def output(self) -> tuple[tuple[int, ...], str]:
        """(shape of one output row, dtype)."""

    def prepare(self, backend: Backend) -> Prepared:
        """What every block needs."""

    def apply(self, prepared: Prepared, block: Block) -> np.ndarray:
        """Output rows of the block, (rows, *shape)."""


class LabelMap(RowMap[Prepared], Protocol[Prepared]):
    """A :class:`RowMap` that may want ``labels``: it makes those of its output itself."""

    def labels(self, out: np.ndarray) -> np.ndarray:
        """Class codes of output rows."""


@runtime_checkable
class PartedMap(RowMap[Prepared], Protocol[Prepared]):
    """A :class:`RowMap` whose columns are computed one after the other, each over many rows: what it takes to
    prepare a column is then done seldom. A block is a whole shard of the output.

    It may be several such maps, one after the other (``stages``, each of which can be cut by columns), and
    another map that follows.
    """

    @property
    def last(self) -> RowMap | None:
        """The map that follows."""

    def stages(self) -> Sequence[PartedMap]:
        """The maps that it is made of."""

    def row_bytes(self) -> int:
        """Bytes of a row of its output, and of what it has in between."""

    def of_columns(self, first: int, stop: int) -> PartedMap:
        """The map to some of the output's columns; of a map of one stage."""

    def fill(self, prepared: Prepared, block: Block, out: np.ndarray) -> Iterator[None]:
        """Write the output rows of the block; hands over now and then, so that it can be called off."""


class CostedMap(PartedMap[Prepared], Protocol[Prepared]):
    """A :class:`PartedMap` of one stage that says what its columns cost, which cuts its output into tiles."""

    def flops_per_row(self) -> float:
        """Floating point operations for one column of a row."""

    def column_flops(self) -> float:
        """Floating point operations that a column takes before its first row."""


class RowSets(Protocol):
    """Sets of some rows each, all of one size, that are kept; as CSR rows where they want ``csr``."""

    @property
    def wants(self) -> Wants:
        """Optional requests."""

    @property
    def n_sets(self) -> int:
        """How many."""

    @property
    def set_rows(self) -> int:
        """Rows of each."""

    def output(self) -> tuple[tuple[int, ...], str]:
        """(shape of a row as it is kept, dtype)."""

    def rows(self, which: int) -> np.ndarray:
        """Numbers of a set's rows, in rising order."""

    def take(self, which: int, x: HostRows, rows: np.ndarray) -> HostRows:
        """Some rows of ``x`` as the set keeps them."""

    def check(self, x: HostRows, start: int) -> None:
        """Raise ValueError where rows, of which the first is ``start``, cannot be used."""


class StepLearner(Protocol[State, PreparedOut]):
    """What learners by steps have in common, see :class:`OnlineLearner`."""

    @property
    def wants(self) -> Wants:
        """Optional requests."""

    def layout(self) -> Layout:
        """Shape of the statistic that a chain returns."""

    def flops_per_row(self) -> float:
        """Floating point operations a row."""

    def prepare(self, state: State, backend: Backend) -> PreparedOut:
        """What the chains of one step need (for example parameters in float32); once a step and thread."""

    def step(self, state: State, stats: Stats, n_rows: int) -> State:
        """A new state after one batch of ``n_rows`` rows; a pure function."""

    def end_epoch(self, state: State) -> State:
        """The state after an epoch (a schedule); a pure function. ``return state`` where there is none."""

    def summary(self, state: State) -> dict[str, Any]:
        """The scalars that the driver, the callbacks and the dashboard see."""

    def is_done(self, state: State) -> bool:
        """True where no more steps are wanted; asked at the ends of epochs and after validations only."""


class OnlineLearner(StepLearner[State, Prepared], Protocol[State, Prepared]):
    """Learning by minibatches: stats, gradients and evidence alike.

    A *step* takes one batch, cut into a few *chains* of rows. Chains know nothing of each other: each starts
    from the same state and adds what it found to a statistic of its own; the statistics are summed (records
    of rows put one after another) in the order of the chains, wherever these ran, and give the next state.
    How many chains there are belongs to the job, so it changes the result, and the number of workers never
    does.

    A learner that measures rows which are held out is a :class:`ValidatedLearner` too.
    """

    def run_chain(self, prepared: Prepared, block: Block, stats: Stats) -> None:
        """One chain of one step: add the gradient, statistics or evidence of these rows, in their order, to
        ``stats``, and write its fields of rows: one record for each of the block's, in their order. A chain
        that updates itself row by row keeps its own copy of the parameters; ``prepared`` belongs to other
        chains too and is never changed. Random numbers are keyed by (seed, stage, ``block.epoch``, row of
        ``block.rows``).
        """


@runtime_checkable
class SideBySide(Protocol[PreparedIn]):
    """An :class:`OnlineLearner` that can take all chains of a step that a worker has at once. Devices get
    them so: one launch keeps a whole card busy, where a chain alone would not.
    """

    def run_chains(self, prepared: PreparedIn, blocks: Sequence[Block], stats: Sequence[Stats]) -> None:
        """What ``run_chain`` does, for each block and its statistic: the same bits."""


@runtime_checkable
class ValidatedLearner(StepLearner[State, PreparedOut], Protocol[State, PreparedOut]):
    """A learner by steps that also measures rows which are held out."""

    def validation(self) -> Reduction[State, Any]:
        """The pass over the validation rows under the state of the moment."""

    def validated(self, state: State, stats: Stats) -> State:
        """A new state that knows what the pass measured (for ``summary``, ``is_done`` and schedules); a pure
        function, called before ``end_epoch``.
        """


class LeafLearner(ValidatedLearner[State, Prepared], Protocol[State, Prepared, Kept]):
    """A learner whose chains are *leaves*: fixed runs of rows, of which it keeps something between visits."""

    def visit(self, prepared: Prepared, block: Block, kept: Kept | None) -> Kept:
        """What is to be kept of a leaf under the state of the moment, a tree of arrays; ``kept`` is what its
        visit in the epoch before left, or None.
        """

    def exchange(self, prepared: Prepared, kept: Kept | None, new: Kept, stats: Stats) -> None:
        """Add to ``stats`` what a visit changes: what was kept, and what is kept from now on."""


Work = BatchLearner | StepLearner | Mapping[str, Reduction]
"""What a stage runs: many passes, steps over minibatches, or one pass of reductions."""
