"""Inference on rows in memory, with all that it says of itself."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.parameters import is_number, is_whole
from scalelatent.data import Dataset
from scalelatent.engine.backend import make_backend
from scalelatent.engine.reading import as_rows, naming
from scalelatent.engine.threads import resolve_jobs, single_threaded
from scalelatent.errors import warn_user
from scalelatent.models.crbm.kernels.inference import CONVERGED, Inference
from scalelatent.models.crbm.model.beliefs import INFERENCES, couple, infer
from scalelatent.models.crbm.model.energy import block_biases, sigmoid
from scalelatent.models.crbm.model.gibbs import Uniforms, gibbs_marginals

from .fit import REMEDY

BLOCK_ROWS = 256


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


def sweeps_of(model: Any, n_sweeps: Any) -> int:
    """Sweeps that were asked for; of None those of a fitted model.

    Raises
    ------
    ValueError
        Not a whole number of at least 1.
    """
    if n_sweeps is None:
        return int(model.n_sweeps_)
    if not is_whole(n_sweeps):
        raise ValueError(f"n_sweeps={n_sweeps!r}: give a whole number of at least 1")
    return int(n_sweeps)


def infer_rows(
    model: Any,
    rows: Any,
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
    named = naming(rows) if isinstance(rows, Dataset) else nullcontext()
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


class _Task:
    """Blocks of rows, by any thread."""

    def __init__(
        self, model: Any, rows: Any, name: str, sweeps: int, tol: float | None, pairs: bool, log_z: bool
    ) -> None:
        self._model, self._rows, self._name = model, rows, name
        self._pairs, self._log_z = pairs or log_z, log_z  # log Z comes with the pairs
        self._sweeps, self._tol = sweeps, tol
        self._mine = threading.local()

    def _prepared(self) -> tuple[Any, Any, Any]:
        if not hasattr(self._mine, "prepared"):
            backend = make_backend(self._model.device)
            params = self._model._shape.split(backend.asarray(self._model._theta, np.float32))
            coupled = self._model._shape.n_hidden and self._name not in ("gibbs", "independent")
            self._mine.prepared = backend, params, couple(params.W, backend) if coupled else None
        return self._mine.prepared

    def block(self, start: int) -> tuple[Any, ...]:
        """(visible, hidden, sweeps, converged, log Z, pairs) of a block."""
        backend, params, coupling = self._prepared()
        shape, stop = self._model._shape, min(start + BLOCK_ROWS, len(self._rows))
        n = stop - start
        x = as_rows(self._rows.read_x(start, stop)) if shape.n_observed else self._rows[start:stop]
        block = Block(x, None, None, start)
        _, b1, b2 = block_biases(shape, params, block, backend)
        if self._name == "gibbs":
            return (*self._gibbs(backend, params, b1, b2, start), np.full(n, self._sweeps), np.zeros(n, bool),
                    None, None)  # fmt: skip
        pairs = backend.xp.zeros(params.W.shape, dtype=np.float64) if self._pairs else None
        damping = float(self._model.damping)
        found = infer(self._name, coupling, b1, b2, self._sweeps, self._tol, backend, pairs, damping)
        return (*self._told(backend, found, n), None if pairs is None else backend.to_host(pairs))

    def _gibbs(self, backend: Any, params: Any, b1: Any, b2: Any, start: int) -> tuple[Any, Any]:
        rows = np.arange(start, start + len(b1))
        numbers = Uniforms(self._model.seed_, 0, rows, lambda a: backend.asarray(a, np.float32))
        found = gibbs_marginals(params, b1, b2, numbers, self._sweeps, backend.xp)
        return tuple(backend.to_host(a).astype(np.float32) for a in found)  # type: ignore[return-value]

    def _told(self, backend: Any, found: Inference, n: int) -> tuple[Any, ...]:
        xp, host = backend.xp, backend.to_host
        visible, hidden = (host(sigmoid(a, xp)).astype(np.float32) for a in (found.lv, found.lh))
        if found.change is None:
            log_z = None
            if self._log_z:  # of units alone, exact
                log_z = np.logaddexp(0, host(found.lv).astype(np.float64)).sum(axis=1)
            return visible, hidden, np.zeros(n, int), np.ones(n, bool), log_z
        limit = CONVERGED if self._tol is None else self._tol
        log_z = None if found.log_z is None else host(found.log_z)
        return visible, hidden, host(found.sweeps), host(found.change) <= limit, log_z
