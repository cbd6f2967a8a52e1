"""Gradients of the parameters out of both phases: products over the rows of a batch, never rows x v x h."""

from __future__ import annotations

from typing import Any

import numpy as np

from .learners import Phase
from .model import CrbmShape, Observed
from .products import climb_outer, outer_less
from .update import Pace, Way, climb


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
        outer_less(v, phase.positive, phase.pairs, out, xp)


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


def climb_factors(
    shape: CrbmShape, way: Way, w: np.ndarray, dv: np.ndarray, dh: np.ndarray, x: np.ndarray, pace: Pace
) -> None:
    """:func:`.update.climb` along a gradient whose products dv^T x and dh^T x are not written out.

    Parameters
    ----------
    shape : CrbmShape
    way : Way
        Vectors; the new ones are arrays of their own.
    w : ndarray of float64, shape (v, h)
        Gradient of W.
    dv, dh, x : ndarray of float64, shape (rows, v), (rows, h) and (rows, x)
        Positive less negative phase of the units, and what was observed.
    pace : Pace

    Examples
    --------
    >>> theta, none, out = np.ones(5, np.float32), np.zeros(0, np.float32), np.empty(5, np.float32)
    >>> factors = (np.full((1, 1), value) for value in (5.0, 1.0, 2.0, 3.0))
    >>> climb_factors(CrbmShape(1, 1, 1), Way(theta, none, out, none), *factors, Pace(1.0, 0.5, 0.0))
    >>> out.tolist()
    [5.5, 3.5, 6.5, 2.0, 3.0]
    """
    dv, dh, x = (a.astype(np.float32) for a in (dv, dh, x))
    places = {name: place for name, (place, _) in shape.layout.slices.items()}
    climb(way.part(places["W"]), w.reshape(-1), w.size, pace)
    for name, left in (("Wvx", dv), ("Whx", dh)):
        climb_outer(way.part(places[name], left.shape[1], x.shape[1]), left, x, pace)
    for name, left in (("bv", dv), ("bh", dh)):
        climb(way.part(places[name]), left.sum(axis=0), 0, pace)
