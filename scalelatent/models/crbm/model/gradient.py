"""Gradients of the parameters: expectations given the training rows, minus expectations of the model.

The two terms are called positive and negative phase. They are matrix products over the rows of a batch.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.kernels.arrays import Array
from scalelatent.models.crbm.kernels.products import (
    add_outer_difference,
    ascend_outer,
    ascend_outer_difference,
    fits_few_rows,
    write_outer_difference,
)
from scalelatent.models.crbm.kernels.update import StepArrays, StepRates, add_to, ascend

from .energy import CrbmShape, Observed
from .negative_phases import Phase


def compute_weight_gradient(xp: ModuleType, v: Array, phase: Phase, out: Array) -> None:
    """Write the gradient of the couplings W, summed over rows with outputs v, to ``out``."""
    if not out.shape[1]:
        return
    if phase.pairs is None:
        left, right = _stack_phases(xp, v, phase)
        xp.matmul(left.T, right, out=out)
    else:
        write_outer_difference(v, phase.positive, phase.pairs, out, xp)


def add_weight_gradient(backend: Backend, v: Array, phase: Phase, total: np.ndarray) -> None:
    """Add the gradient of the couplings W for rows with outputs v to the float64 array ``total``."""
    if phase.pairs is not None:
        add_outer_difference(v, phase.positive, phase.pairs, total, backend)
        return
    out = backend.buffer("of W", total.shape, v.dtype)
    compute_weight_gradient(backend.xp, v, phase, out)
    add_to(total.reshape(-1), backend.to_host(out).reshape(-1))


def compute_gradient(
    shape: CrbmShape, backend: Backend, theta: Array, seen: Observed | None, v: Array, phase: Phase
) -> Array:
    """Return the gradient of all parameters, summed over rows with outputs v, as one vector.

    The vector is in a buffer of the backend, which the next call overwrites.
    """
    flat = backend.buffer("gradient", theta.shape, theta.dtype)
    out = shape.split(flat)
    compute_weight_gradient(backend.xp, v, phase, out.W)
    dv, dh = v - phase.visible, phase.positive - phase.hidden
    if seen is not None:
        seen.write_outer(dv, out.Wvx, backend.xp)
        if shape.n_hidden:
            seen.write_outer(dh, out.Whx, backend.xp)
    out.bv[...] = dv.sum(axis=0)
    out.bh[...] = dh.sum(axis=0)
    return flat


def ascend_phase(
    shape: CrbmShape, backend: Backend, arrays: StepArrays, seen: Observed | None, v: Array, phase: Phase,
    rates: StepRates,
) -> None:  # fmt: skip
    """Take a gradient step of all parameters for a few rows, whose outputs are v and whose x are ``seen``.

    For few dense rows on the host, the matrix products are added directly to the parameters, and no gradient
    is stored. The exception is W if `Phase.pairs` is given and the step has momentum or weight decay.
    """
    x = None if seen is None or seen.columns is not None else seen.x
    if x is None or not fits_few_rows(v, x, arrays.theta):
        gradient = compute_gradient(shape, backend, arrays.theta, seen, v, phase)
        ascend(arrays, gradient, shape.n_weights, rates)
        return
    weights = arrays.slice_part(shape.layout.slices["W"][0], shape.n_visible, shape.n_hidden)
    if phase.pairs is None:
        ascend_outer(weights, *_stack_phases(np, v, phase), rates)
    else:
        ascend_outer_difference(weights, v, phase.positive, phase.pairs, rates, backend)
    _ascend_biases(shape, arrays, v - phase.visible, phase.positive - phase.hidden, x, rates)


def ascend_factors(
    shape: CrbmShape, arrays: StepArrays, w: np.ndarray, dv: np.ndarray, dh: np.ndarray, x: np.ndarray,
    rates: StepRates,
) -> None:  # fmt: skip
    """Take a gradient step of all parameters from the gradient ``w`` of W and from factors of the others.

    ``dv`` are the outputs minus their expectations in the model, and ``dh`` is the same difference for hidden
    units. The gradients of Wvx and Whx are the products dv^T x and dh^T x, which are not stored.
    """
    dv, dh, x = (a.astype(np.float32) for a in (dv, dh, x))
    ascend(arrays.slice_part(shape.layout.slices["W"][0]), w.reshape(-1), w.size, rates)
    _ascend_biases(shape, arrays, dv, dh, x, rates)


def _stack_phases(xp: ModuleType, v: Array, phase: Phase) -> tuple[Array, Array]:
    """Return matrices A and B whose product A^T B is the gradient of W if the phase has no `Phase.pairs`."""
    return xp.concatenate([v, -phase.visible]), xp.concatenate([phase.positive, phase.hidden])


def _ascend_biases(
    shape: CrbmShape, arrays: StepArrays, dv: np.ndarray, dh: np.ndarray, x: np.ndarray, rates: StepRates
) -> None:
    """Take the gradient step of Wvx, Whx, bv and bh.

    Their gradients are dv^T x, dh^T x and the sums of dv and dh over rows.
    """
    places = {name: place for name, (place, _) in shape.layout.slices.items()}
    for name, left in (("Wvx", dv), ("Whx", dh)):
        ascend_outer(arrays.slice_part(places[name], left.shape[1], x.shape[1]), left, x, rates)
    for name, left in (("bv", dv), ("bh", dh)):
        ascend(arrays.slice_part(places[name]), left.sum(axis=0), 0, rates)
