"""A fit as steps: what an estimator asks for, and a session serves.

An estimator's ``_fit_steps`` is a generator. It yields what it needs next (:class:`Begin`, :class:`Remember`,
:class:`Derive`, :class:`Collect`, :class:`Map`, :class:`Gather`, :class:`Encode`, :class:`Learn`,
:class:`LearnOnline`) and is sent the answer;
it never asks where the rows are or who computes. One generator is a fit; several are a search, whose session
answers equal requests once and runs passes that are wanted at the same time together. A new model needs no
more than this to be searched.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scalelatent.contract.learners import (
    BatchLearner,
    CostedColumnMap,
    Reduction,
    RowMap,
    RowSets,
)
from scalelatent.data import Dataset
from scalelatent.engine.order import RowOrder
from scalelatent.engine.reading import RowMask

__all__ = [
    "Begin",
    "Collect",
    "Derive",
    "Encode",
    "Gather",
    "Learn",
    "LearnOnline",
    "Map",
    "Remember",
    "Rows",
    "Step",
    "Steps",
    "first_step",
]


@dataclass(frozen=True)
class Rows:
    """Rows of a step: a dataset, through maps that may not be done yet, perhaps masked."""

    dataset: Dataset
    maps: tuple[tuple[str, RowMap], ...] = ()
    mask: RowMask | None = None

    @property
    def n_features(self) -> int:
        """Numbers in a row, after the maps."""
        return self.maps[-1][1].output()[0][0] if self.maps else self.dataset.n_features

    @property
    def classes(self) -> np.ndarray | None:
        return self.dataset.classes

    @property
    def url(self) -> str | None:
        """Where the dataset is stored, or None."""
        return self.dataset.url

    @property
    def has_weight(self) -> bool:
        return self.dataset.has_weight

    def pieces(self) -> list[Dataset]:
        """The given rows, without those that are left out, as one or two runs."""
        if self.mask is None:
            return [self.dataset]
        a, b = self.mask.start, self.mask.stop
        runs = [(a, b)] if self.mask.inside else [(0, a), (b, len(self.dataset))]
        return [self.dataset[start:stop] for start, stop in runs if stop > start]


@dataclass(frozen=True)
class Begin:
    """All input is checked, work may begin. Answer: (seed, rows where every worker can read them)."""

    info: Mapping[str, Any] = field(default_factory=dict)  # told to the callbacks
    keeps_records: bool = False  # asks for a folder even where none was given
    # why no rows may be left out (see :mod:`~scalelatent.engine.quarantine`) and what would help, where
    # that is so
    all_rows: str = ""


@dataclass(frozen=True)
class Remember:
    """What a fit starts from beside its rows. Answer: these arrays; after a resume those of the run."""

    name: str
    # or a function that makes them, which is not called where the run has begun before
    arrays: Mapping[str, np.ndarray] | Callable[[], Mapping[str, np.ndarray]]
    # told to the callbacks as a stage, where the function takes long
    about: Mapping[str, int] = field(default_factory=dict)

    def value(self) -> Mapping[str, np.ndarray]:
        """The arrays of a run that begins."""
        return self.arrays() if callable(self.arrays) else self.arrays


@dataclass(frozen=True)
class Derive:
    """A pure function of results. Answer: its value; equal ones are computed once."""

    function: Callable[..., Any]
    arguments: tuple[object, ...]

    def value(self) -> Any:
        return self.function(*self.arguments)


@dataclass(frozen=True)
class Collect:
    """One pass of a reduction over rows. Answer: its Stats, not to be changed."""

    name: str
    reduction: Reduction
    rows: Rows
    classes: np.ndarray | None = None


@dataclass(frozen=True)
class Map:
    """Rows through a row map. Answer: Rows; they are written when a pass first needs them."""

    name: str
    row_map: RowMap
    rows: Rows


@dataclass(frozen=True)
class Gather:
    """Sets of rows. Answer: :class:`~scalelatent.engine.rowsets.StoredSets`, or what reads like them."""

    name: str
    sets: RowSets
    rows: Rows | None
    about: Mapping[str, int] = field(default_factory=dict)  # told to the callbacks with the stage
    # else they go when the fit is done, and are gathered again where a resumed one asks for them
    kept: bool = True


@dataclass(frozen=True)
class Encode:
    """Rows through a parted map, now. Answer: Rows; None where a resumed fit needs them no more."""

    name: str
    row_map: CostedColumnMap
    rows: Rows | None
    kept: bool = False  # they stay with the run; else they go when the fit is done, or are named in ``over``
    over: tuple[str, ...] = ()  # names of earlier ones that are not needed any more
    about: Mapping[str, int] = field(default_factory=dict)  # told to the callbacks with the stage


@dataclass(frozen=True)
class Learn:
    """Passes of a batch learner to its end. Answer: LoopResult."""

    name: str
    learner: BatchLearner
    state: object
    rows: Mapping[str, Rows]
    classes: np.ndarray | None
    predictor: Callable[[Any], RowMap]


@dataclass(frozen=True)
class LearnOnline:
    """Epochs of an online learner to its end. Answer: LoopResult."""

    name: str
    learner: Any  # an `OnlineLearner`; with `keeps_leaves` a `LeafLearner`
    state: object
    rows: Mapping[str, Rows]
    classes: np.ndarray | None
    order: Callable[[Mapping[str, Any]], RowOrder]  # of the engine options of the fit
    n_epochs: int  # at most
    # records of an epoch of at least 20 times as many steps, where no ``report_steps`` is given
    reports: int = 0
    keeps_leaves: bool = False  # the learner is a `LeafLearner`; ``Begin`` must have asked for records


Step = Begin | Remember | Derive | Collect | Map | Gather | Encode | Learn | LearnOnline
Steps = Generator[Step, Any, None]


def first_step(steps: Steps, derive: Callable[[Derive], object] = Derive.value) -> Begin:
    """Run a fit up to the point where work begins: everything before is checks of the input."""
    step = next(steps)
    while isinstance(step, Derive):
        step = steps.send(derive(step))
    assert isinstance(step, Begin)
    return step
