"""Gradients of the parameters out of both phases: products over the rows of a batch, never rows x v x h."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.kernels.arrays import Array
from scalelatent.models.crbm.kernels.products import (
    add_outer_less,
    climb_outer,
    climb_outer_less,
    few,
    outer_less,
)
from scalelatent.models.crbm.kernels.update import StepRates, Way, add_to, climb

from .energy import CrbmShape, Observed
from .negative_phases import Phase


def of_weights(xp: ModuleType, v: Array, phase: Phase, out: Array) -> None:
    """Write the gradient of W, (v, h), to ``out``: v^T positive less the pairs of the negative phase."""
    if not out.shape[1]:
        return
    if phase.pairs is None:
        left, right = _both_phases(xp, v, phase)
        xp.matmul(left.T, right, out=out)
    else:
        outer_less(v, phase.positive, phase.pairs, out, xp)


def add_of_weights(backend: Backend, v: Array, phase: Phase, total: np.ndarray) -> None:
    """Add the gradient of W, see :func:`of_weights`, to a ``total`` of float64 on the host."""
    if phase.pairs is not None:
        add_outer_less(v, phase.positive, phase.pairs, total, backend)
        return
    out = backend.buffer("of W", total.shape, v.dtype)
    of_weights(backend.xp, v, phase, out)
    add_to(total.reshape(-1), backend.to_host(out).reshape(-1))


def difference(
    shape: CrbmShape, backend: Backend, theta: Array, seen: Observed | None, v: Array, phase: Phase
) -> Array:
    """The gradient of all parameters, summed over rows: a flat vector in a buffer of the backend."""
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


def climb_phase(
    shape: CrbmShape,
    backend: Backend,
    way: Way,
    seen: Observed | None,
    v: Array,
    phase: Phase,
    pace: StepRates,
) -> None:
    """:func:`.update.climb` along :func:`difference`. Of few rows on the host products with x are not written
    out, where x has all its columns; that of W with pairs is with momentum or decay.
    """
    x = None if seen is None or seen.columns is not None else seen.x
    if x is None or not few(v, x, way.theta):
        gradient = difference(shape, backend, way.theta, seen, v, phase)
        climb(way, gradient, shape.n_weights, pace)
        return
    weights = way.part(shape.layout.slices["W"][0], shape.n_visible, shape.n_hidden)
    if phase.pairs is None:
        climb_outer(weights, *_both_phases(np, v, phase), pace)
    else:
        climb_outer_less(weights, v, phase.positive, phase.pairs, pace, backend)
    _climb_biases(shape, way, v - phase.visible, phase.positive - phase.hidden, x, pace)


def climb_factors(
    shape: CrbmShape, way: Way, w: np.ndarray, dv: np.ndarray, dh: np.ndarray, x: np.ndarray, pace: StepRates
) -> None:
    """:func:`.update.climb` along a gradient whose products dv^T x and dh^T x are not written out."""
    dv, dh, x = (a.astype(np.float32) for a in (dv, dh, x))
    climb(way.part(shape.layout.slices["W"][0]), w.reshape(-1), w.size, pace)
    _climb_biases(shape, way, dv, dh, x, pace)


def _both_phases(xp: ModuleType, v: Array, phase: Phase) -> tuple[Array, Array]:
    """Factors of the gradient of W, of a negative phase without pairs."""
    return xp.concatenate([v, -phase.visible]), xp.concatenate([phase.positive, phase.hidden])


def _climb_biases(
    shape: CrbmShape, way: Way, dv: np.ndarray, dh: np.ndarray, x: np.ndarray, pace: StepRates
) -> None:
    """Of biases, and of what x adds to them."""
    places = {name: place for name, (place, _) in shape.layout.slices.items()}
    for name, left in (("Wvx", dv), ("Whx", dh)):
        climb_outer(way.part(places[name], left.shape[1], x.shape[1]), left, x, pace)
    for name, left in (("bv", dv), ("bh", dh)):
        climb(way.part(places[name]), left.sum(axis=0), 0, pace)
