"""State of a conditional RBM during learning, measurements of an epoch, and checks for divergence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.errors import DivergenceError
from scalelatent.kernels.arrays import Array
from scalelatent.models.crbm.kernels.inference import MAX_WEIGHT, find_largest_magnitude

from .beliefs import count_converged
from .energy import CrbmShape
from .negative_phases import Phase

# Number of sums that training collects: loss, wrong outputs, rows, converged rows.
N_SUMS = 4
# Rates of Ping and Ihler (2017). The error of a diverged fit suggests the next lower one, else half its rate.
RATES = (0.05, 0.02, 0.01, 0.005)
# Start of the error message of a fit whose parameters became NaN or infinite.
NOT_FINITE = "parameters are no longer finite"


@dataclass(frozen=True)
class CrbmState:
    """State of a fit between two steps: parameters, velocity, persistent chains, and measurements."""

    theta: np.ndarray  # float32 parameter vector, in the order of :attr:`.energy.CrbmShape.layout`
    velocity: np.ndarray  # float32 change of ``theta`` in the last step; empty without momentum
    best: np.ndarray  # float32 parameters with the lowest validation error; empty without validation rows
    # float32 (rows of a batch, hidden units): P(h = 1) of the persistent Gibbs chains; only the learner pcd
    # has such chains, so for other learners the array has no rows
    particles: np.ndarray
    sums: np.ndarray  # float64 (4,): loss, wrong outputs, rows and converged rows of the current epoch
    objective: float = float("nan")  # mean loss per output in the last epoch, measured in training
    train_error: float = float("nan")  # share of outputs that training predicted wrong in the last epoch
    converged: float = float("nan")  # share of training rows whose inference converged in the last epoch
    validation_error: float = float("nan")  # share of wrong outputs on the validation rows, last epoch
    # Share of wrong outputs among the validation outputs that differ from x; NaN if not measured
    changed_error: float = float("nan")
    best_error: float = float("inf")  # lowest validation error of all epochs
    iteration: int = 0  # number of complete epochs
    steps: int = 0
    # Number of epochs since the validation error last fell by more than `CrbmLearner.gain`, or since the
    # learning rate was lowered. Such a fall sets -1, and the end of each epoch adds 1
    stale: int = 0
    best_epoch: int = 0  # number of the epoch with the parameters ``best``; the first epoch is 1
    n_drops: int = 0  # how often the learning rate was lowered because the validation error stopped falling
    last_drops: int = 0  # value of ``n_drops`` during the last complete epoch
    dropped_error: float = float("inf")  # ``best_error`` when the rate was last lowered; inf if it never was


class PhaseMeasures:
    """Measurements of training for a block's rows: loss, wrong outputs, convergence."""

    def __init__(self) -> None:
        self._parts: list[list[Array]] = []

    def add(self, phase: Phase) -> None:
        """Keep the measurements of each row of ``phase``, on the backend, but not its large arrays."""
        change = None if phase.inferred is None else phase.inferred.change
        self._parts.append([phase.loss, phase.wrong] + ([] if change is None else [change]))

    def sums(self, backend: Backend, tol: float | None) -> list[float]:
        """Return sums over all rows added: loss, wrong outputs, rows, converged rows (all without kernel)."""
        columns = [list(column) for column in zip(*self._parts, strict=True)]
        loss, wrong, *change = (
            backend.to_host(column[0] if len(column) == 1 else backend.xp.concatenate(column))
            for column in columns
        )
        at_rest = count_converged(change[0], tol) if change else len(loss)
        return [float(loss.sum(dtype=np.float64)), float(wrong.sum()), float(len(loss)), float(at_rest)]


def compute_shares(state: CrbmState, n_visible: int) -> tuple[float, float, float]:
    """Return loss per output, share of wrong outputs and share of converged rows of the current epoch."""
    loss, wrong, rows, converged = state.sums.tolist()
    units = max(rows * n_visible, 1.0)
    return loss / units, wrong / units, converged / max(rows, 1.0)


def find_divergence(shape: CrbmShape, theta: np.ndarray) -> str:
    """Return a reason why the parameters cannot be used, or '' if they are finite and W is not too large."""
    # A NaN in Wvx or Whx implies a NaN in a bias, because the gradients of Wvx and Whx are products with the
    # gradients of the biases. So it is enough to check W and the biases, which are far fewer numbers.
    most = find_largest_magnitude(theta[: shape.n_visible * shape.n_hidden])
    if not np.isfinite([most, find_largest_magnitude(theta[shape.n_weights :])]).all():
        return NOT_FINITE
    if most > MAX_WEIGHT:
        limits = f"largest {most:.3g}, at most {MAX_WEIGHT:g}"
        return f"the weights are too large for messages in float32 ({limits})"
    return ""


def make_divergence_error(
    problem: str, epoch: int, step: int, rate: float, weight_decay: float
) -> DivergenceError:
    """Return the error that ends a diverged fit; ``epoch`` and ``step`` count from 1."""
    lower = next((r for r in RATES if r < rate), rate / 2)
    return DivergenceError(
        f"{problem} in epoch {epoch}, step {step}, at learning_rate={rate:g}: try "
        f"learning_rate={lower:g} (a run folder keeps the last good checkpoint: resume the run "
        f"with it), or a new run with weight_decay above {weight_decay:g}"
    )
