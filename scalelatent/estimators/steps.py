"""Steps of a fit: requests that an estimator yields, and that a session executes.

The method ``_fit_steps`` of an estimator is a generator. It yields one step at a time: an object of one of
the classes in this module. `FitSession` executes the step and sends the result back into the generator. The
generator does not know where the rows are or which process computes. A fit runs one generator. A search runs
one generator for each candidate: it executes equal steps once, and combines passes that several generators
request at the same time. An estimator with ``_fit_steps`` can therefore be searched without further code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scalelatent.contract.learners import BatchLearner, ColumnStage, Reduction, RowMap, RowSets
from scalelatent.data import Dataset
from scalelatent.engine.order import RowOrder
from scalelatent.engine.reading import RowMask


@dataclass(frozen=True)
class MappedRows:
    """Rows that a step reads: a dataset, row maps to apply to its rows, and a mask that selects some rows."""

    dataset: Dataset
    maps: tuple[tuple[str, RowMap], ...] = ()
    mask: RowMask | None = None

    @property
    def n_features(self) -> int:
        """Number of features of a row after all row maps were applied."""
        return self.maps[-1][1].output()[0][0] if self.maps else self.dataset.n_features

    @property
    def classes(self) -> np.ndarray | None:
        return self.dataset.classes

    @property
    def url(self) -> str | None:
        """Path or URL of the dataset if it is stored, otherwise None."""
        return self.dataset.url

    @property
    def has_weight(self) -> bool:
        return self.dataset.has_weight

    def pieces(self) -> list[Dataset]:
        """Return the rows of the dataset that the mask selects, as one or two contiguous slices."""
        if self.mask is None:
            return [self.dataset]
        a, b = self.mask.start, self.mask.stop
        runs = [(a, b)] if self.mask.inside else [(0, a), (b, len(self.dataset))]
        return [self.dataset[start:stop] for start, stop in runs if stop > start]


@dataclass(frozen=True)
class StartFit:
    """Request to start the fit after all checks of its input.

    The session sends back the seed, and the rows as datasets that every worker can read.
    """

    info: Mapping[str, Any] = field(default_factory=dict)  # information for ``on_fit_start`` of callbacks
    keeps_records: bool = False  # True: the fit needs a folder for files between its steps
    # Text for an error: why the fit cannot exclude rows that cannot be read, and what the user can do. Empty
    # if the fit can exclude such rows.
    all_rows: str = ""


@dataclass(frozen=True)
class StoreArrays:
    """Request to store the arrays from which a fit starts, such as initial weights.

    The session sends the stored arrays back to the estimator, so that a resumed fit starts from the arrays of
    the interrupted fit.
    """

    name: str
    # Arrays by name, or a function that returns them. A resumed fit does not call the function.
    arrays: Mapping[str, np.ndarray] | Callable[[], Mapping[str, np.ndarray]]
    # Information for ``on_stage`` of the callbacks, called before the function; if empty, it is not called.
    about: Mapping[str, int] = field(default_factory=dict)

    def value(self) -> Mapping[str, np.ndarray]:
        """Return the arrays from which a new fit starts."""
        return self.arrays() if callable(self.arrays) else self.arrays


@dataclass(frozen=True)
class ComputeValue:
    """Request for the value of a function whose result depends on its arguments only.

    The session sends back the value. A search calls the function once for candidates with equal arguments.
    """

    function: Callable[..., Any]
    arguments: tuple[object, ...]

    def value(self) -> Any:
        return self.function(*self.arguments)


@dataclass(frozen=True)
class SumStatistic:
    """Request for one pass over rows that sums the statistic of a reduction.

    The session sends back the sums as ``Stats``, which must not be modified.
    """

    name: str
    reduction: Reduction
    rows: MappedRows
    classes: np.ndarray | None = None


@dataclass(frozen=True)
class AddRowMap:
    """Request to add a row map to rows.

    The session sends back `MappedRows`. The map is applied when a later step first reads these rows.
    """

    name: str
    row_map: RowMap
    rows: MappedRows


@dataclass(frozen=True)
class StoreRowSets:
    """Request to copy selected rows into sets, such as the centres of each clustering.

    The session sends back an object that returns a set by number: `~scalelatent.engine.rowsets.StoredSets`,
    or `~scalelatent.engine.rowsets.DrawnSets` if the rows stay in memory.
    """

    name: str
    sets: RowSets
    rows: MappedRows | None
    about: Mapping[str, int] = field(default_factory=dict)  # more information for ``on_stage`` of callbacks
    # False: the session removes the sets after the fit. A resumed fit copies the rows again if needed.
    kept: bool = True


@dataclass(frozen=True)
class EncodeRows:
    """Request to apply a map to rows now. Tasks compute tiles of the output: some rows and some columns.

    The session sends back the output as `MappedRows`. It sends None if the fit was resumed after a later step
    has used and removed the output.
    """

    name: str
    row_map: ColumnStage
    rows: MappedRows | None
    kept: bool = False  # False: the output is removed after the fit, or after a step with it in ``removes``
    removes: tuple[str, ...] = ()  # names of earlier `EncodeRows` whose output is removed after this step
    about: Mapping[str, int] = field(default_factory=dict)  # more information for ``on_stage`` of callbacks


@dataclass(frozen=True)
class TrainBatch:
    """Request to train a batch learner until it is done. The session sends back its ``LoopResult``."""

    name: str
    learner: BatchLearner
    state: object
    rows: Mapping[str, MappedRows]
    classes: np.ndarray | None
    predictor: Callable[[Any], RowMap]  # returns the row map with which a search scores a state


@dataclass(frozen=True)
class TrainOnline:
    """Request to train an online learner until it is done. The session sends back its ``LoopResult``."""

    name: str
    learner: Any  # an `OnlineLearner`, or a `StoredRangeLearner` if ``keeps_leaves`` is True
    state: object
    rows: Mapping[str, MappedRows]
    classes: np.ndarray | None
    order: Callable[[Mapping[str, Any]], RowOrder]  # returns the order of the rows for the engine options
    n_epochs: int  # upper bound on the number of epochs
    # Number of reports of the objective per epoch; 0: the engine chooses. It is used if the user sets no
    # ``report_steps`` and an epoch has at least 20 steps for each report.
    reports: int = 0
    # True: the learner stores a statistic of each leaf (a fixed range of rows) between epochs. The step
    # `StartFit` of the fit must have set ``keeps_records``.
    keeps_leaves: bool = False


Step = (
    StartFit
    | StoreArrays
    | ComputeValue
    | SumStatistic
    | AddRowMap
    | StoreRowSets
    | EncodeRows
    | TrainBatch
    | TrainOnline
)
Steps = Generator[Step, Any, None]


def first_step(steps: Steps, derive: Callable[[ComputeValue], object] = ComputeValue.value) -> StartFit:
    """Run the checks of a fit's input, which are the steps before its `StartFit`; return this `StartFit`."""
    step = next(steps)
    while isinstance(step, ComputeValue):
        step = steps.send(derive(step))
    assert isinstance(step, StartFit)
    return step
