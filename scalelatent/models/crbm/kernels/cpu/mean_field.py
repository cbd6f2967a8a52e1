"""Mean field: two matrix products per sweep (one update of all visible, then of all hidden units).

The order of all sums is fixed, so that the result of a row does not depend on the other rows of the batch.
"""

from __future__ import annotations

import numpy as np

from scalelatent.kernels.arrays import aligned_empty
from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.memory import empty
from scalelatent.kernels.tiles import STRIP, compute_latents, padded_size
from scalelatent.kernels.vectors import copy_vector, find_largest
from scalelatent.models.crbm.kernels.inference import Inference

from .coupling import UNIT_BYTES, Coupling, round_up
from .units import (
    INPUTS,
    LIMIT,
    LOG_ODDS,
    MOVED,
    ON,
    RESULTS,
    UNIT_FIELDS,
    allocate_results,
    check_inputs,
    make_scratch,
    start_units,
    update_by_sum,
)


@subkernel
def _update_side(total: np.ndarray, units: np.ndarray, small: np.ndarray, moved: np.float32) -> np.float32:
    """Update the visible or the hidden units of a graph.

    ``total`` is the product of W with P(unit = 1) of the other side (hidden or visible), and ``moved`` is the
    largest change of P(unit = 1) on that side in this sweep. Return the largest change on both sides.
    """
    n, step, at, scratch = len(total), 4 * units.shape[1], units.ctypes.data, small.ctypes.data
    for k in range(n):
        units[UNIT_FIELDS, k] = total[k]
    small[MOVED] = moved
    for k in range(0, step, UNIT_BYTES):
        sums = at + UNIT_FIELDS * step + k
        update_by_sum(at + k, step, sums, scratch + UNIT_BYTES * MOVED, scratch + UNIT_BYTES * LIMIT)
    return find_largest(small[MOVED])


@entry(*[in_array("f4", 1)] * 2, *INPUTS, *RESULTS, *[out_array("f4", 3)] * 2, *[out_array("f4", 2)] * 5)
def _infer(
    to_v: np.ndarray, to_h: np.ndarray, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float,
    lv: np.ndarray, lh: np.ndarray, sweeps: np.ndarray, change: np.ndarray, v_units: np.ndarray,
    h_units: np.ndarray, v_out: np.ndarray, h_out: np.ndarray, v_on: np.ndarray, h_on: np.ndarray,
    small: np.ndarray,
) -> None:  # fmt: skip
    """Infer several graphs together; a graph stays as it is once its largest change is at most ``tol``."""
    rows, v, h = len(bv), bv.shape[1], bh.shape[1]
    moved = empty(rows, np.float32)
    for n in range(rows):
        start_units(v_units[n], bv[n], small)
        start_units(h_units[n], bh[n], small)
        v_units[n, UNIT_FIELDS], h_units[n, UNIT_FIELDS] = np.float32(0.0), np.float32(0.0)
        copy_vector(h_units[n, ON], h_on[n])
        change[n] = np.inf
    for sweep in range(n_sweeps):
        if find_largest(change) <= tol:
            break
        compute_latents(to_v, h_on[:rows], v_out)
        for n in range(rows):
            moved[n] = np.float32(-1.0)
            if change[n] > tol:
                moved[n] = _update_side(v_out[:v, n], v_units[n], small, np.float32(0.0))
                copy_vector(v_units[n, ON], v_on[n])
        compute_latents(to_h, v_on[:rows], h_out)
        for n in range(rows):
            if moved[n] >= 0:
                change[n] = _update_side(h_out[:h, n], h_units[n], small, moved[n])
                copy_vector(h_units[n, ON], h_on[n])
                sweeps[n] = sweep + 1
    for n in range(rows):
        copy_vector(v_units[n, LOG_ODDS], lv[n])
        copy_vector(h_units[n, LOG_ODDS], lh[n])


def mean_field(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """Approximate P(unit = 1) of all units by mean field; hidden units start from sigmoid(``bh``)."""
    bv, bh, limit = check_inputs(coupling, bv, bh, n_sweeps, tol)
    results, (v, h), strip = allocate_results(bv, bh), coupling.w.shape, min(STRIP, len(bv))
    fields = UNIT_FIELDS + 1
    units = aligned_empty((strip, fields, round_up(v))), aligned_empty((strip, fields, round_up(h)))
    products = (
        aligned_empty((padded_size(v), round_up(strip))),
        aligned_empty((padded_size(h), round_up(strip))),
    )
    beliefs, small = ((aligned_empty((strip, v)), aligned_empty((strip, h))), make_scratch(coupling.limit))
    for first in range(0, len(bv), STRIP):
        part = slice(first, first + STRIP)
        inputs = *coupling.packed, bv[part], bh[part], n_sweeps, limit
        _infer(*inputs, *(a[part] for a in results), *units, *products, *beliefs, small)
    return Inference(*results)
