"""State of a conditional RBM during learning, measurements of an epoch, and checks for divergence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.errors import DivergenceError
from scalelatent.kernels.arrays import Array
from scalelatent.models.crbm.kernels.inference import MAX_WEIGHT, largest_magnitude

from .beliefs import count_converged
from .energy import CrbmShape
from .negative_phases import Phase

# Number of sums that training collects: loss, wrong units, rows, converged rows.
N_SUMS = 4
# Learning rates of Ping and Ihler (2017) in falling order. The error of a diverged fit suggests the next
# lower rate.
RATES = (0.05, 0.02, 0.01, 0.005)
# Reason in the error of a diverged fit.
NOT_FINITE = "parameters are no longer finite"


@dataclass(frozen=True)
class CrbmState:
    """State of a fit between two steps: parameters, velocity, persistent chains, and measurements."""

    theta: np.ndarray  # float32 (parameters,), in the order of :attr:`.energy.CrbmShape.layout`
    # float32 (parameters,): last step, of which the next step takes the share ``momentum``; empty without
    # momentum
    velocity: np.ndarray
    # float32 (parameters,): parameters with the lowest validation error; empty without validation rows
    best: np.ndarray
    # float32 (rows of a batch, h): hidden states of the persistent chains; without rows unless the learner is
    # pcd
    particles: np.ndarray
    sums: np.ndarray  # float64 (4,): sums of the current epoch: loss, wrong units, rows, converged rows
    # Measured in training over the last epoch: mean loss per unit, share of units in which the negative
    # phase differs from the row, share of converged rows
    objective: float = float("nan")
    train_error: float = float("nan")
    converged: float = float("nan")
    # Shares of wrong units on the validation rows; ``changed_error`` counts units that differ between x and
    # v. NaN if not measured
    validation_error: float = float("nan")
    changed_error: float = float("nan")
    best_error: float = float("inf")
    iteration: int = 0  # complete epochs
    steps: int = 0
    # Epochs that ended since the validation error last fell enough. Such a fall sets -1, and the end of each
    # epoch adds 1, so the epoch of the fall ends at 0
    stale: int = 0
    best_epoch: int = 0  # epoch of ``best``, counted from 1
    n_drops: int = 0  # how often the learning rate was lowered because the validation error stopped falling
    last_drops: int = 0  # value of ``n_drops`` during the last complete epoch
    dropped_error: float = float("inf")  # lowest validation error when the rate was last lowered


class PhaseMeasures:
    """Measurements of the negative phases of a chain (part of a batch), on the backend until :meth:`sums`."""

    def __init__(self) -> None:
        self._parts: list[list[Array]] = []

    def add(self, phase: Phase) -> None:
        """Keep loss, wrong units and change of each row of a phase, but not its large arrays."""
        change = None if phase.inferred is None else phase.inferred.change
        self._parts.append([phase.loss, phase.wrong] + ([] if change is None else [change]))

    def sums(self, backend: Backend, tol: float | None) -> list[float]:
        """Return the sums of loss, wrong units, rows and converged rows."""
        columns = [list(column) for column in zip(*self._parts, strict=True)]
        loss, wrong, *change = (
            backend.to_host(column[0] if len(column) == 1 else backend.xp.concatenate(column))
            for column in columns
        )
        at_rest = count_converged(change[0], tol) if change else len(loss)
        return [float(loss.sum(dtype=np.float64)), float(wrong.sum()), float(len(loss)), float(at_rest)]


def compute_shares(state: CrbmState, n_visible: int) -> tuple[float, float, float]:
    """Return (loss per unit, share of wrong units, share of converged rows) from the sums of a state."""
    loss, wrong, rows, converged = state.sums.tolist()
    units = max(rows * n_visible, 1.0)
    return loss / units, wrong / units, converged / max(rows, 1.0)


def find_divergence(shape: CrbmShape, theta: np.ndarray) -> str:
    """Return why the parameters are not usable: not finite, or too large for float32 messages; else ''."""
    # A NaN in Wvx or Whx implies a NaN in a bias, because the gradients of Wvx and Whx are products with the
    # gradients of the biases. So it is enough to check W and the biases, which are far fewer numbers.
    most = largest_magnitude(theta[: shape.n_visible * shape.n_hidden])
    if not np.isfinite([most, largest_magnitude(theta[shape.n_weights :])]).all():
        return NOT_FINITE
    if most > MAX_WEIGHT:
        limits = f"largest {most:.3g}, at most {MAX_WEIGHT:g}"
        return f"the weights are too large for messages in float32 ({limits})"
    return ""


def make_divergence_error(
    problem: str, epoch: int, step: int, rate: float, weight_decay: float
) -> DivergenceError:
    """Return the error that ends a diverged fit; epochs and steps are counted from 1."""
    lower = next((r for r in RATES if r < rate), rate / 2)
    return DivergenceError(
        f"{problem} in epoch {epoch}, step {step}, at learning_rate={rate:g}: try "
        f"learning_rate={lower:g} (a run folder keeps the last good checkpoint: resume the run "
        f"with it), or a new run with weight_decay above {weight_decay:g}"
    )
