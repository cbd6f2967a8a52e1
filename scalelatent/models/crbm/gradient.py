"""Gradients of the parameters out of both phases: products over the rows of a batch, never rows x v x h."""

from __future__ import annotations

from typing import Any

import numpy as np

from .learners import Phase
from .model import CrbmShape, Observed


def of_weights(xp: Any, v: Any, phase: Phase, out: Any) -> None:
    """Write the gradient of W, (v, h), to ``out``: v^T positive less the pairs of the negative phase.

    Examples
    --------
    >>> one, out = np.ones((1, 1)), np.empty((1, 1))
    >>> of_weights(np, one, Phase(one, 0.25 * one, one, None, 0, 0), out)
    >>> out.tolist()
    [[0.75]]
    """
    if not out.shape[1]:
        return
    if phase.pairs is None:
        left = xp.concatenate([v, -phase.visible])
        xp.matmul(left.T, xp.concatenate([phase.positive, phase.hidden]), out=out)
    else:
        xp.matmul(v.T, phase.positive, out=out)
        xp.subtract(out, phase.pairs, out=out)


def difference(
    shape: CrbmShape, backend: Any, theta: Any, seen: Observed | None, v: Any, phase: Phase
) -> Any:
    """The gradient of all parameters, summed over rows: a flat vector in a buffer of the backend.

    Examples
    --------
    >>> from scalelatent.engine.backend import make_backend
    >>> one = np.ones((1, 1))
    >>> phase = Phase(0 * one, 0.25 * one, one, None, 0, 0)
    >>> difference(CrbmShape(1, 1, 0), make_backend("cpu"), np.zeros(3), None, one, phase).tolist()
    [1.0, 1.0, 0.75]
    """
    flat = backend.buffer("gradient", theta.shape, theta.dtype)
    out = shape.split(flat)
    of_weights(backend.xp, v, phase, out.W)
    dv, dh = v - phase.visible, phase.positive - phase.hidden
    if seen is not None:
        seen.add_outer(dv, out.Wvx, backend.xp)
        if shape.n_hidden:
            seen.add_outer(dh, out.Whx, backend.xp)
    out.bv[...] = dv.sum(axis=0)
    out.bh[...] = dh.sum(axis=0)
    return flat


def of_factors(
    shape: CrbmShape, w: np.ndarray, dv: np.ndarray, dh: np.ndarray, x: np.ndarray, dtype: Any
) -> np.ndarray:
    """The same from the gradient of W and the factors of the others, one row each, on the host.

    Examples
    --------
    >>> factors = (np.full((1, 1), value) for value in (5.0, 1.0, 2.0, 3.0))
    >>> of_factors(CrbmShape(1, 1, 1), *factors, np.float64).tolist()
    [5.0, 3.0, 6.0, 1.0, 2.0]
    """
    flat = np.empty(shape.n_parameters, dtype=dtype)
    out = shape.split(flat)
    dv, dh, x = (a.astype(dtype) for a in (dv, dh, x))
    out.W[...] = w
    np.matmul(dv.T, x, out=out.Wvx)
    np.matmul(dh.T, x, out=out.Whx)
    out.bv[...] = dv.sum(axis=0)
    out.bh[...] = dh.sum(axis=0)
    return flat
