"""Steps of a fit: requests that an estimator yields and a session answers.

The method ``_fit_steps`` of an estimator is a generator. It yields one request at a time (:class:`Begin`,
:class:`Remember`, :class:`Derive`, :class:`Collect`, :class:`Map`, :class:`Gather`, :class:`Encode`,
:class:`Learn`, :class:`LearnOnline`), and the session sends the answer back. The generator does not know
where the rows are or which process computes. A fit runs one generator. A search runs several generators: its
session answers equal requests once and combines passes that are requested at the same time. A new model that
implements ``_fit_steps`` can be searched without further code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scalelatent.contract.learners import (
    BatchLearner,
    ColumnStage,
    Reduction,
    RowMap,
    RowSets,
)
from scalelatent.data import Dataset
from scalelatent.engine.order import RowOrder
from scalelatent.engine.reading import RowMask


@dataclass(frozen=True)
class Rows:
    """Rows of a step: a dataset, row maps that are applied on first use, and an optional mask."""

    dataset: Dataset
    maps: tuple[tuple[str, RowMap], ...] = ()
    mask: RowMask | None = None

    @property
    def n_features(self) -> int:
        """Number of features of a row after the maps."""
        return self.maps[-1][1].output()[0][0] if self.maps else self.dataset.n_features

    @property
    def classes(self) -> np.ndarray | None:
        return self.dataset.classes

    @property
    def url(self) -> str | None:
        """Address of the stored dataset, or None."""
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
class Begin:
    """Request to start the work after all checks.

    The session sends back (seed, rows that every worker can read).
    """

    info: Mapping[str, Any] = field(default_factory=dict)  # passed to the callbacks
    keeps_records: bool = False  # True: the fit needs a folder for its records; it may be temporary
    # Reason why the fit cannot exclude unreadable rows (see :mod:`~scalelatent.engine.quarantine`), and a
    # remedy; empty if it can.
    all_rows: str = ""


@dataclass(frozen=True)
class Remember:
    """Request to store the arrays from which a fit starts.

    The session sends the arrays back or, after a resume, the arrays that the run started from.
    """

    name: str
    # Arrays by name, or a function that returns them; a resumed fit does not call this function.
    arrays: Mapping[str, np.ndarray] | Callable[[], Mapping[str, np.ndarray]]
    # Passed to the callbacks as a stage, unless it is empty; use it if the function takes long.
    about: Mapping[str, int] = field(default_factory=dict)

    def value(self) -> Mapping[str, np.ndarray]:
        """Return the arrays with which a new (not resumed) run starts."""
        return self.arrays() if callable(self.arrays) else self.arrays


@dataclass(frozen=True)
class Derive:
    """Request for the value of a pure function of earlier results.

    The session sends back the value. A search computes the value of equal requests once.
    """

    function: Callable[..., Any]
    arguments: tuple[object, ...]

    def value(self) -> Any:
        return self.function(*self.arguments)


@dataclass(frozen=True)
class Collect:
    """Request for one pass that sums the statistic of a reduction over rows.

    The session sends back the ``Stats``, which must not be modified.
    """

    name: str
    reduction: Reduction
    rows: Rows
    classes: np.ndarray | None = None


@dataclass(frozen=True)
class Map:
    """Request to apply a row map to rows.

    The session sends back `Rows`, which are computed and written when a pass first needs them.
    """

    name: str
    row_map: RowMap
    rows: Rows


@dataclass(frozen=True)
class Gather:
    """Request to store sets of selected rows.

    The session sends back :class:`~scalelatent.engine.rowsets.StoredSets` or an equivalent object.
    """

    name: str
    sets: RowSets
    rows: Rows | None
    about: Mapping[str, int] = field(default_factory=dict)  # passed to the callbacks with the stage
    # False: the sets are removed after the fit; a resumed fit gathers them again if it needs them.
    kept: bool = True


@dataclass(frozen=True)
class Encode:
    """Request to compute the output rows of a map now, tile by tile (a tile has some rows and columns).

    The session sends back `Rows`, or None if a resumed fit does not need them any more.
    """

    name: str
    row_map: ColumnStage
    rows: Rows | None
    kept: bool = False  # False: the rows are removed after the fit, or earlier if ``over`` names them
    over: tuple[str, ...] = ()  # names of earlier outputs that can be removed now
    about: Mapping[str, int] = field(default_factory=dict)  # passed to the callbacks with the stage


@dataclass(frozen=True)
class Learn:
    """Request to run a batch learner until it is done. The session sends back its ``LoopResult``."""

    name: str
    learner: BatchLearner
    state: object
    rows: Mapping[str, Rows]
    classes: np.ndarray | None
    predictor: Callable[[Any], RowMap]


@dataclass(frozen=True)
class LearnOnline:
    """Request to run an online learner until it is done. The session sends back its ``LoopResult``."""

    name: str
    learner: Any  # an `OnlineLearner`; with `keeps_leaves` a `LeafLearner`
    state: object
    rows: Mapping[str, Rows]
    classes: np.ndarray | None
    order: Callable[[Mapping[str, Any]], RowOrder]  # makes the row order from the engine options
    n_epochs: int  # upper bound on the number of epochs
    # Records per epoch, if ``report_steps`` is not given and an epoch has at least 20 times as many steps.
    reports: int = 0
    keeps_leaves: bool = False  # the learner is a `LeafLearner`; `Begin.keeps_records` must be True


Step = Begin | Remember | Derive | Collect | Map | Gather | Encode | Learn | LearnOnline
Steps = Generator[Step, Any, None]


def first_step(steps: Steps, derive: Callable[[Derive], object] = Derive.value) -> Begin:
    """Run the input checks of a fit, which end with its request to start the work; return this `Begin`."""
    step = next(steps)
    while isinstance(step, Derive):
        step = steps.send(derive(step))
    assert isinstance(step, Begin)
    return step
