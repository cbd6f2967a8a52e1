"""What the rows of a chain say of learning: loss, wrong units, and whether their beliefs came to rest."""

from __future__ import annotations

from typing import Any

import numpy as np

from .beliefs import count_converged
from .negative_phases import Phase
from .state import CrbmState


class Measures:
    """Of the negative phases of a chain; they stay where they are until all are asked for.

    Examples
    --------
    >>> from scalelatent.engine.backend import make_backend
    >>> measures, one = Measures(), np.ones((2, 1))
    >>> measures.add(Phase(one, one, one, None, np.array([0.5, 1.0]), np.array([1, 0])))
    >>> measures.sums(make_backend("cpu"), None)
    [1.5, 1.0, 2.0, 2.0]
    """

    def __init__(self) -> None:
        self._parts: list[list[Any]] = []

    def add(self, phase: Phase) -> None:
        """Keep what is measured, and nothing else of the phase."""
        change = None if phase.inferred is None else phase.inferred.change
        self._parts.append([phase.loss, phase.wrong] + ([] if change is None else [change]))

    def sums(self, backend: Any, tol: float | None) -> list[float]:
        """Loss, wrong units, rows, and rows at rest: the ``sums`` of :class:`.state.CrbmState`."""
        columns = [list(column) for column in zip(*self._parts, strict=True)]
        loss, wrong, *change = (
            backend.to_host(column[0] if len(column) == 1 else backend.xp.concatenate(column))
            for column in columns
        )
        at_rest = count_converged(change[0], tol) if change else len(loss)
        return [float(loss.sum(dtype=np.float64)), float(wrong.sum()), float(len(loss)), float(at_rest)]


def shares(state: CrbmState, n_visible: int) -> dict[str, Any]:
    """Objective and error a unit, and the share of rows at rest, out of a state's sums.

    Examples
    --------
    >>> none = np.zeros(0, np.float32)
    >>> state = CrbmState(none, none, none, none, np.array([6.0, 1.0, 2.0, 1.0]))
    >>> shares(state, 3)
    {'objective': 1.0, 'train_error': 0.16666666666666666, 'converged': 0.5}
    """
    loss, wrong, rows, converged = state.sums.tolist()
    units = max(rows * n_visible, 1.0)
    return {"objective": loss / units, "train_error": wrong / units, "converged": converged / max(rows, 1.0)}
