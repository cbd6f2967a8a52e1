"""What changes while a conditional RBM learns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Measured on the way: loss, wrong units, rows, rows that converged.
N_SUMS = 4


@dataclass(frozen=True)
class CrbmState:
    """Everything that changes from step to step.

    Attributes
    ----------
    theta : ndarray of float32, shape (parameters,)
        In the order of :attr:`.model.CrbmShape.layout`.
    velocity : ndarray of float32
        u of the momentum; empty without.
    best : ndarray of float32
        Parameters that did best on the validation rows; empty where none are held out.
    particles : ndarray of float32, shape (places of a batch, h)
        Persistent chains; no rows unless the learner is pcd.
    sums : ndarray of float64, shape (4,)
        Of the epoch in progress.
    objective, train_error, converged : float
        Of the last epoch, measured on the way: mean loss (of belief learners log-loss in nats a unit, else
        energy gap a unit), share of units that the negative phase had wrong, share of rows that converged.
    validation_error, changed_error, best_error : float
        Shares of wrong units; ``changed_error`` among those that x has otherwise than v. NaN where not
        measured.
    iteration, steps, stale, best_epoch : int
        Epochs, steps; epochs that ended since the best one (-1 while that is going on), and which it was
        (counted from 1).
    """

    theta: np.ndarray
    velocity: np.ndarray
    best: np.ndarray
    particles: np.ndarray
    sums: np.ndarray
    objective: float = float("nan")
    train_error: float = float("nan")
    converged: float = float("nan")
    validation_error: float = float("nan")
    changed_error: float = float("nan")
    best_error: float = float("inf")
    iteration: int = 0
    steps: int = 0
    stale: int = 0
    best_epoch: int = 0
