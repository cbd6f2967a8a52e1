"""Outputs of a fitted conditional RBM for rows: estimates of P(unit = 1), convergence, and free energies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements, Targets
from scalelatent.contract.learners import Block
from scalelatent.contract.parameters import is_number, is_whole
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.inprocess import run_threads
from scalelatent.engine.reading import Meter, Reader, StopEvent, as_rows, name_dataset_in_errors
from scalelatent.engine.threads import resolve_jobs, single_threaded
from scalelatent.errors import warn_user
from scalelatent.models.crbm.kernels.inference import CONVERGED, Inference
from scalelatent.models.crbm.model.beliefs import INFERENCES, PreparedInference
from scalelatent.models.crbm.model.energy import (
    CrbmShape,
    compute_block_biases,
    compute_hidden_logits,
    compute_negative_free_energy,
    sigmoid,
)
from scalelatent.models.crbm.model.predict import CrbmOutput

from .fit import REMEDY

if TYPE_CHECKING:
    from .estimator import ConditionalRBM

# Number of rows that `infer` (256) and `free_energy` (4,096) process at a time.
BLOCK_ROWS, ENERGY_ROWS = 256, 4096
# After workers wrote outputs to disk, the convergence of at most this number of rows is checked.
MAX_CHECKED = 1024


@dataclass(frozen=True)
class Beliefs:
    """Result of :meth:`.ConditionalRBM.infer`; a belief is an estimate of P(unit = 1).

    Attributes
    ----------
    visible, hidden : ndarray of float32, shape (n, v) and (n, h)
        Beliefs P(v_i = 1 | x) and P(h_j = 1 | x); mixed- and max-product have max-marginals instead.
    sweeps : ndarray of int, shape (n,)
        Number of sweeps (rounds of messages between units) of each row; 0 without hidden units.
    converged : ndarray of bool, shape (n,)
        True if no belief changed by more than ``tol`` (0.001 for None) in the last sweep.
    log_z : ndarray of float64, shape (n,), or None
        Bethe estimate of the log partition function of each row, in nats; None if not requested.
    pairs : ndarray of float64, shape (v, h), or None
        Mean over rows of P(v_i = 1, h_j = 1 | x); None if not requested.

    Examples
    --------
    >>> Beliefs(np.zeros((2, 3)), np.zeros((2, 1)), np.full(2, 9), np.ones(2, bool)).sweeps.tolist()
    [9, 9]
    """

    visible: np.ndarray
    hidden: np.ndarray
    sweeps: np.ndarray
    converged: np.ndarray
    log_z: np.ndarray | None = None
    pairs: np.ndarray | None = None


def check_sweeps(model: ConditionalRBM, n_sweeps: int | None) -> int:
    """Return the number of sweeps: ``n_sweeps``, or ``n_sweeps_`` of the fitted model for None."""
    if n_sweeps is None:
        return int(model.n_sweeps_)
    if not is_whole(n_sweeps):
        raise ValueError(f"n_sweeps={n_sweeps!r}: give a whole number of at least 1")
    return int(n_sweeps)


def infer_rows(
    model: ConditionalRBM, rows: Dataset | np.ndarray, *, inference: str | None, n_sweeps: int | None,
    tol: float | None, pairs: bool, log_z: bool,
) -> Beliefs:  # fmt: skip
    """Run an inference on rows, and return the result; ``rows`` of a plain RBM is an array of width 0."""
    name = model.inference_ if inference is None else inference
    known = [n for n in INFERENCES if n != "independent"]
    if name not in known and not (name == "independent" and not model._shape.n_hidden):
        raise ValueError(f"inference={name!r} is not one of {', '.join(map(repr, known))}")
    if (pairs or log_z) and name not in ("sum-product", "independent"):
        raise ValueError(f"pairs and log_z are results of inference='sum-product', not of {name!r}")
    if tol is not None and not (is_number(tol) and tol >= 0):
        raise ValueError(f"tol={tol!r}: give a number of at least 0, or None for a fixed number of sweeps")
    # One kernel computes log Z and P(v_i = 1, h_j = 1) together.
    sweeps, with_pairs = check_sweeps(model, n_sweeps), pairs or log_z

    def compute(slot: int, stop: StopEvent) -> Callable[[int], Beliefs]:
        backend = make_backend(model.device)
        prepared = PreparedInference.make(model._shape, model._theta, name, sweeps, tol, backend)

        def infer_block(start: int) -> Beliefs:
            end = min(start + BLOCK_ROWS, len(rows))
            x = as_rows(rows.read_x(start, end)) if isinstance(rows, Dataset) else rows[start:end]
            total = backend.xp.zeros(prepared.params.W.shape, dtype=np.float64) if with_pairs else None
            found = prepared.run(Block(x, None, None, start), total)
            return _collect_block(prepared, found, None if total is None else backend.to_host(total))

        return infer_block

    found: dict[int, Beliefs] = {}
    starts = range(0, max(len(rows), 1), BLOCK_ROWS)
    with name_dataset_in_errors(rows) if isinstance(rows, Dataset) else nullcontext(), single_threaded():
        run_threads(starts, resolve_jobs(model.n_jobs), compute, found.__setitem__)
    blocks = [found[start] for start in starts]
    visible, hidden, done, converged = (
        np.concatenate([getattr(block, column) for block in blocks])
        for column in ("visible", "hidden", "sweeps", "converged")
    )
    if tol is not None and not converged.all():
        warn_missed(tol, 1 - converged.mean(), sweeps)
    totals = [block.pairs for block in blocks if block.pairs is not None]
    mean = sum(totals[1:], totals[0]) / max(len(rows), 1) if pairs else None
    estimates = [block.log_z for block in blocks if block.log_z is not None]
    return Beliefs(visible, hidden, done, converged, np.concatenate(estimates) if log_z else None, mean)


def _collect_block(prepared: PreparedInference, found: Inference, pairs: np.ndarray | None) -> Beliefs:
    """Return the result of a block on the host; ``pairs`` is P(v_i = 1, h_j = 1), summed over its rows."""
    xp, to_host = prepared.backend.xp, prepared.backend.to_host
    visible, hidden = (to_host(sigmoid(a, xp)).astype(np.float32) for a in (found.lv, found.lh))
    # Without hidden units the outputs are independent, so there are no sweeps and log Z is exact.
    if found.change is None:
        n, log_z = len(visible), np.logaddexp(0, to_host(found.lv).astype(np.float64)).sum(axis=1)
        return Beliefs(visible, hidden, np.zeros(n, int), np.ones(n, bool), log_z, pairs)
    limit = CONVERGED if prepared.tol is None else prepared.tol
    log_z = None if found.log_z is None else to_host(found.log_z)
    return Beliefs(visible, hidden, to_host(found.sweeps), to_host(found.change) <= limit, log_z, pairs)


def warn_missed(tol: float, share: float, sweeps: int, rows: str = "the rows") -> None:
    """Warn that the inference of a share of the rows did not converge to ``tol``."""
    warn_user(f"tol={tol:g} was not met by {share:.1%} of {rows} within {sweeps} sweeps: {REMEDY}")


@dataclass(frozen=True)
class CountingOutput(CrbmOutput):
    """Outputs of rows in one process, with a count of the rows whose inference did not meet ``tol``."""

    # For each block: number of rows that did not converge, and number of rows
    counts: list[tuple[int, int]] = field(default_factory=list)

    def infer(self, prepared: PreparedInference, block: Block) -> Inference:
        found = super().infer(prepared, block)
        if self.tol is not None and found.change is not None:
            change = prepared.backend.to_host(found.change)
            self.counts.append((int((~(change <= self.tol)).sum()), len(change)))
        return found

    def warn(self, rows: str) -> None:
        """Warn if some rows did not converge; ``rows`` names the counted rows in the message."""
        missed, seen = (sum(column) for column in zip(*self.counts, strict=True)) if self.counts else (0, 0)
        if missed:
            assert self.tol is not None
            warn_missed(self.tol, missed / seen, self.n_sweeps, rows)


def choose_checked_rows(n_rows: int) -> list[slice]:
    """Return the rows whose convergence is checked: all or, of more than 1,024, four ranges of 256 rows."""
    if n_rows <= MAX_CHECKED:
        return [slice(0, n_rows)]
    size = MAX_CHECKED // 4
    return [slice(a, a + size) for a in ((n_rows - size) * k // 3 for k in range(4))]


def compute_free_energies(shape: CrbmShape, theta: np.ndarray, ds: Dataset, targets: Targets) -> np.ndarray:
    """Return the free energy F(v, x) of each row in nats, where v are its outputs and x its inputs."""
    out, backend = [], make_backend("reference")
    reader = Reader(ds, None, Meter(), requirements=BlockRequirements(csr=True, targets=targets))
    params = shape.split(theta.astype(np.float64))
    with name_dataset_in_errors(ds):
        for a in range(0, len(ds), ENERGY_ROWS):
            x, y, weight = reader.read(a, min(a + ENERGY_ROWS, len(ds)))
            block = reader.block(x, y, weight, a)
            _, b1, b2 = compute_block_biases(shape, params, block, backend)
            v = np.asarray(block.y, dtype=np.float64)
            out.append(-compute_negative_free_energy(v, b1, compute_hidden_logits(params, v, b2), np))
    return np.concatenate(out)
