"""What changes while a conditional RBM learns, what is measured on the way, and whether it has diverged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.errors import DivergenceError
from scalelatent.kernels.arrays import Array
from scalelatent.models.crbm.kernels.inference import MAX_WEIGHT, magnitude

from .beliefs import count_converged
from .energy import CrbmShape
from .negative_phases import Phase

# Measured on the way: loss, wrong units, rows, rows that converged.
N_SUMS = 4
# Learning rates of the paper, tried in this order.
RATES = (0.05, 0.02, 0.01, 0.005)
NOT_FINITE = "parameters are no longer finite"


@dataclass(frozen=True)
class CrbmState:
    """Everything that changes from step to step."""

    # float32 (parameters,): in the order of :attr:`.model.CrbmShape.layout`
    theta: np.ndarray
    # u of the momentum; empty without
    velocity: np.ndarray
    # Parameters that did best on the validation rows; empty where none are held out
    best: np.ndarray
    # float32 (places of a batch, h): persistent chains; no rows unless the learner is pcd
    particles: np.ndarray
    # float64 (4,): of the epoch in progress
    sums: np.ndarray
    # objective, train_error, converged: Of the last epoch, measured on the way: mean loss (of belief learners
    # log-loss in nats a unit, else energy gap a unit), share of units that the negative phase had wrong,
    # share of rows that converged
    objective: float = float("nan")
    train_error: float = float("nan")
    converged: float = float("nan")
    # validation_error, changed_error, best_error: Shares of wrong units; ``changed_error`` among those that x
    # has otherwise than v. NaN where not measured
    validation_error: float = float("nan")
    changed_error: float = float("nan")
    best_error: float = float("inf")
    # iteration, steps, stale, best_epoch: Epochs, steps; epochs that ended since the best one (-1 while that
    # is going on), and which it was (counted from 1)
    iteration: int = 0
    steps: int = 0
    stale: int = 0
    best_epoch: int = 0


class Measures:
    """Of the negative phases of a chain; they stay where they are until all are asked for."""

    def __init__(self) -> None:
        self._parts: list[list[Array]] = []

    def add(self, phase: Phase) -> None:
        """Keep what is measured, and nothing else of the phase."""
        change = None if phase.inferred is None else phase.inferred.change
        self._parts.append([phase.loss, phase.wrong] + ([] if change is None else [change]))

    def sums(self, backend: Backend, tol: float | None) -> list[float]:
        """Loss, wrong units, rows, and converged rows: the ``sums`` of :class:`.state.CrbmState`."""
        columns = [list(column) for column in zip(*self._parts, strict=True)]
        loss, wrong, *change = (
            backend.to_host(column[0] if len(column) == 1 else backend.xp.concatenate(column))
            for column in columns
        )
        at_rest = count_converged(change[0], tol) if change else len(loss)
        return [float(loss.sum(dtype=np.float64)), float(wrong.sum()), float(len(loss)), float(at_rest)]


def shares(state: CrbmState, n_visible: int) -> tuple[float, float, float]:
    """(objective, error) a unit, and the share of converged rows, out of a state's sums."""
    loss, wrong, rows, converged = state.sums.tolist()
    units = max(rows * n_visible, 1.0)
    return loss / units, wrong / units, converged / max(rows, 1.0)


def what_diverged(shape: CrbmShape, theta: np.ndarray) -> str:
    """What is not finite, or more than messages in float32 bear, in a vector of parameters; else empty."""
    # Gradients of Wvx and Whx are products with those of the biases, so that a NaN shows in these too: far
    # fewer numbers to look at.
    most = magnitude(theta[: shape.n_visible * shape.n_hidden])
    if not np.isfinite([most, magnitude(theta[shape.n_weights :])]).all():
        return NOT_FINITE
    if most > MAX_WEIGHT:
        limits = f"largest {most:.3g}, at most {MAX_WEIGHT:g}"
        return f"weights have grown beyond what messages in float32 bear ({limits})"
    return ""


def lower_rate(rate: float) -> float:
    """The learning rate to try next."""
    return next((r for r in RATES if r < rate), rate / 2)


def diverged(what: str, epoch: int, step: int, rate: float, weight_decay: float) -> DivergenceError:
    """The error that ends such a fit; epochs and steps counted from 1."""
    return DivergenceError(
        f"{what} in epoch {epoch}, step {step}, at learning_rate={rate:g}: try "
        f"learning_rate={lower_rate(rate):g} (a run folder keeps the last good checkpoint: resume the run "
        f"with it), or a new run with weight_decay above {weight_decay:g}"
    )
