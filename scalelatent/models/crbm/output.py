"""What a fitted conditional RBM says of rows: beliefs, how its sweeps went, energies."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.parameters import is_number, is_whole
from scalelatent.contract.wants import Targets, Wants
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.reading import Meter, Reader, as_rows, name_dataset_in_errors
from scalelatent.engine.threads import resolve_jobs, single_threaded
from scalelatent.errors import warn_user
from scalelatent.kernels.arrays import Array
from scalelatent.models.crbm.kernels import AnyCoupling
from scalelatent.models.crbm.kernels.inference import CONVERGED, Inference
from scalelatent.models.crbm.model.beliefs import INFERENCES, couple, infer
from scalelatent.models.crbm.model.energy import (
    CrbmShape,
    Params,
    block_biases,
    hidden_logits,
    negative_free_energy,
    sigmoid,
)
from scalelatent.models.crbm.model.gibbs import Uniforms, gibbs_marginals
from scalelatent.models.crbm.model.predict import CrbmOutput, PreparedOutput

from .fit import REMEDY

if TYPE_CHECKING:
    from .estimator import ConditionalRBM

BLOCK_ROWS, ENERGY_ROWS = 256, 4096
# Rows whose convergence is looked at where outputs are written to disk.
MOST_LOOKED_AT = 1024


@dataclass(frozen=True)
class Beliefs:
    """What an inference found of some rows.

    Attributes
    ----------
    visible, hidden : ndarray of float32, shape (n, v) and (n, h)
        Beliefs P(v_i = 1 | x) and P(h_j = 1 | x); of mixed- and max-product those of max-marginals.
    sweeps : ndarray of int, shape (n,)
        Sweeps done.
    converged : ndarray of bool, shape (n,)
        No belief moved by more than ``tol`` (0.001 without one) in the last sweep. Gibbs sampling never says.
    log_z : ndarray of float64, shape (n,), or None
    pairs : ndarray of float64, shape (v, h), or None
        Mean over rows of P(v_i = 1, h_j = 1 | x).

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


def sweeps_of(model: ConditionalRBM, n_sweeps: int | None) -> int:
    """Sweeps that were asked for; of None those of a fitted model."""
    if n_sweeps is None:
        return int(model.n_sweeps_)
    if not is_whole(n_sweeps):
        raise ValueError(f"n_sweeps={n_sweeps!r}: give a whole number of at least 1")
    return int(n_sweeps)


def infer_rows(
    model: ConditionalRBM,
    rows: Dataset | np.ndarray,
    *,
    inference: str | None,
    n_sweeps: int | None,
    tol: float | None,
    pairs: bool,
    log_z: bool,
) -> Beliefs:
    """See :meth:`.ConditionalRBM.infer`; ``rows`` are a Dataset, or an array of width 0."""
    name = model.inference_ if inference is None else inference
    known = [*(n for n in INFERENCES if n != "independent"), "gibbs"]
    if name not in known and not (name == "independent" and not model._shape.n_hidden):
        raise ValueError(f"inference={name!r} is not one of {', '.join(map(repr, known))}")
    if (pairs or log_z) and name not in ("sum-product", "independent"):
        raise ValueError(f"pairs and log_z are results of inference='sum-product', not of {name!r}")
    if tol is not None and not (is_number(tol) and tol >= 0):
        raise ValueError(f"tol={tol!r}: give a number of at least 0, or None for a fixed number of sweeps")
    sweeps = sweeps_of(model, n_sweeps)
    task = _Task(model, rows, name, sweeps, tol, pairs, log_z)
    named = name_dataset_in_errors(rows) if isinstance(rows, Dataset) else nullcontext()
    with named, single_threaded(), ThreadPoolExecutor(resolve_jobs(model.n_jobs)) as pool:
        found = list(pool.map(task.block, range(0, max(len(rows), 1), BLOCK_ROWS)))
    columns = list(zip(*found, strict=True))
    visible, hidden, done, converged = (np.concatenate(column) for column in columns[:4])
    if tol is not None and name != "gibbs" and not converged.all():
        warn_missed(tol, 1 - converged.mean(), sweeps)
    mean = sum(columns[5][1:], columns[5][0]) / max(len(rows), 1) if pairs else None
    return Beliefs(visible, hidden, done, converged, np.concatenate(columns[4]) if log_z else None, mean)


def warn_missed(tol: float, share: float, sweeps: int, rows: str = "the rows") -> None:
    """Warn of a tolerance that a share of the rows did not meet."""
    warn_user(f"tol={tol:g} was not met by {share:.1%} of {rows} within {sweeps} sweeps: {REMEDY}")


class _Prepared(NamedTuple):
    """Parameters, and what inference needs of W."""

    backend: Backend
    params: Params
    coupling: AnyCoupling | None


class _Told(NamedTuple):
    """Of a block; log Z and the sum of the pairs where they were asked for."""

    visible: np.ndarray
    hidden: np.ndarray
    sweeps: np.ndarray
    converged: np.ndarray
    log_z: np.ndarray | None
    pairs: np.ndarray | None


class _Task:
    """Blocks of rows, by any thread."""

    def __init__(
        self,
        model: ConditionalRBM,
        rows: Dataset | np.ndarray,
        name: str,
        sweeps: int,
        tol: float | None,
        pairs: bool,
        log_z: bool,
    ) -> None:
        self._model, self._rows, self._name = model, rows, name
        self._pairs, self._log_z = pairs or log_z, log_z  # log Z comes with the pairs
        self._sweeps, self._tol = sweeps, tol
        self._mine = threading.local()

    def _prepared(self) -> _Prepared:
        if not hasattr(self._mine, "prepared"):
            backend = make_backend(self._model.device)
            params = self._model._shape.split(backend.asarray(self._model._theta, np.float32))
            coupled = self._model._shape.n_hidden and self._name not in ("gibbs", "independent")
            coupling = couple(params.W, backend) if coupled else None
            self._mine.prepared = _Prepared(backend, params, coupling)
        prepared: _Prepared = self._mine.prepared
        return prepared

    def block(self, start: int) -> _Told:
        backend, params, coupling = self._prepared()
        shape, stop = self._model._shape, min(start + BLOCK_ROWS, len(self._rows))
        n = stop - start
        rows = self._rows
        x = as_rows(rows.read_x(start, stop)) if isinstance(rows, Dataset) else rows[start:stop]
        block = Block(x, None, None, start)
        _, b1, b2 = block_biases(shape, params, block, backend)
        if self._name == "gibbs":
            visible, hidden = self._gibbs(backend, params, b1, b2, start)
            return _Told(visible, hidden, np.full(n, self._sweeps), np.zeros(n, bool), None, None)
        pairs = backend.xp.zeros(params.W.shape, dtype=np.float64) if self._pairs else None
        damping = float(self._model.damping)
        found = infer(self._name, coupling, b1, b2, self._sweeps, self._tol, backend, pairs, damping)
        return self._told(backend, found, n, None if pairs is None else backend.to_host(pairs))

    def _gibbs(
        self, backend: Backend, params: Params, b1: Array, b2: Array, start: int
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = np.arange(start, start + len(b1))
        numbers = Uniforms(self._model.seed_, 0, rows, lambda a: backend.asarray(a, np.float32))
        found = gibbs_marginals(params, b1, b2, numbers, self._sweeps, backend.xp)
        visible, hidden = (backend.to_host(a).astype(np.float32) for a in found)
        return visible, hidden

    def _told(self, backend: Backend, found: Inference, n: int, pairs: np.ndarray | None) -> _Told:
        xp, host = backend.xp, backend.to_host
        visible, hidden = (host(sigmoid(a, xp)).astype(np.float32) for a in (found.lv, found.lh))
        if found.change is None:
            log_z = None
            if self._log_z:  # of units alone, exact
                log_z = np.logaddexp(0, host(found.lv).astype(np.float64)).sum(axis=1)
            return _Told(visible, hidden, np.zeros(n, int), np.ones(n, bool), log_z, pairs)
        limit = CONVERGED if self._tol is None else self._tol
        log_z = None if found.log_z is None else host(found.log_z)
        return _Told(visible, hidden, host(found.sweeps), host(found.change) <= limit, log_z, pairs)


@dataclass(frozen=True)
class WatchedOutput(CrbmOutput):
    """Notes how many rows of each block did not meet the tolerance; for one process, and no record."""

    told: list[tuple[int, int]] = field(default_factory=list)

    def infer(self, prepared: PreparedOutput, block: Block) -> Inference:
        found = super().infer(prepared, block)
        if self.tol is not None and found.change is not None:
            change = prepared.backend.to_host(found.change)
            self.told.append((int((~(change <= self.tol)).sum()), len(change)))
        return found

    def warn(self, rows: str) -> None:
        """Warn where some rows did not meet the tolerance."""
        missed, seen = (sum(column) for column in zip(*self.told, strict=True)) if self.told else (0, 0)
        if missed:
            assert self.tol is not None
            warn_missed(self.tol, missed / seen, self.n_sweeps, rows)


def places_of(n_rows: int) -> list[slice]:
    """All rows, or runs in four places of many."""
    if n_rows <= MOST_LOOKED_AT:
        return [slice(0, n_rows)]
    run = MOST_LOOKED_AT // 4
    return [slice(a, a + run) for a in ((n_rows - run) * k // 3 for k in range(4))]


def free_energies(shape: CrbmShape, theta: np.ndarray, ds: Dataset, targets: Targets) -> np.ndarray:
    """F(v, x) of each row, float64."""
    out, backend = [], make_backend("reference")
    reader = Reader(ds, None, Meter(), wants=Wants(csr=True, targets=targets))
    params = shape.split(theta.astype(np.float64))
    with name_dataset_in_errors(ds):
        for a in range(0, len(ds), ENERGY_ROWS):
            x, y, weight = reader.read(a, min(a + ENERGY_ROWS, len(ds)))
            block = reader.block(x, y, weight, a)
            _, b1, b2 = block_biases(shape, params, block, backend)
            v = np.asarray(block.y, dtype=np.float64)
            out.append(-negative_free_energy(v, b1, hidden_logits(params, v, b2), np))
    return np.concatenate(out)
