"""Mean field: two matrix products a sweep, in tiles whose sums run in order, so that a row's beliefs do not
depend on the rows beside it.
"""

from __future__ import annotations

import numpy as np

from scalelatent.kernels.arrays import aligned
from scalelatent.kernels.jit import entry, filled, given, part
from scalelatent.kernels.memory import empty
from scalelatent.kernels.tiles import STRIP, latents, padded_size
from scalelatent.kernels.vectors import copy, largest
from scalelatent.models.crbm.kernels.inference import Inference

from .coupling import WIDE, Coupling, rounded_up
from .units import (
    INPUTS,
    LIMIT,
    LOG_ODDS,
    MOVED,
    ON,
    RESULTS,
    UNIT_FIELDS,
    checked,
    small_of,
    start,
    unfilled,
    update_by_sum,
)


@part
def _side(total: np.ndarray, units: np.ndarray, small: np.ndarray, limit_moved: np.float32) -> np.float32:
    """Units of one side of a graph from the products; the most that one of all its beliefs has moved."""
    n, step, at, scratch = len(total), 4 * units.shape[1], units.ctypes.data, small.ctypes.data
    for k in range(n):
        units[UNIT_FIELDS, k] = total[k]
    small[MOVED] = limit_moved
    for k in range(0, step, WIDE):
        sums = at + UNIT_FIELDS * step + k
        update_by_sum(at + k, step, sums, scratch + WIDE * MOVED, scratch + WIDE * LIMIT)
    return largest(small[MOVED])


@entry(*[given("f4", 1)] * 2, *INPUTS, *RESULTS, *[filled("f4", 3)] * 2, *[filled("f4", 2)] * 5)
def _infer(
    to_v: np.ndarray, to_h: np.ndarray, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float,
    lv: np.ndarray, lh: np.ndarray, sweeps: np.ndarray, change: np.ndarray, v_units: np.ndarray,
    h_units: np.ndarray, v_out: np.ndarray, h_out: np.ndarray, tv: np.ndarray, th: np.ndarray,
    small: np.ndarray,
) -> None:  # fmt: skip
    """A strip of graphs side by side; one that has met its tolerance stays as it is."""
    rows, v, h = len(bv), bv.shape[1], bh.shape[1]
    moved = empty(rows, np.float32)
    for n in range(rows):
        start(v_units[n], bv[n], small)
        start(h_units[n], bh[n], small)
        v_units[n, UNIT_FIELDS], h_units[n, UNIT_FIELDS] = np.float32(0.0), np.float32(0.0)
        copy(h_units[n, ON], th[n])
        change[n] = np.inf
    for sweep in range(n_sweeps):
        if largest(change) <= tol:
            break
        latents(to_v, th[:rows], v_out)
        for n in range(rows):
            moved[n] = np.float32(-1.0)
            if change[n] > tol:
                moved[n] = _side(v_out[:v, n], v_units[n], small, np.float32(0.0))
                copy(v_units[n, ON], tv[n])
        latents(to_h, tv[:rows], h_out)
        for n in range(rows):
            if moved[n] >= 0:
                change[n] = _side(h_out[:h, n], h_units[n], small, moved[n])
                copy(h_units[n, ON], th[n])
                sweeps[n] = sweep + 1
    for n in range(rows):
        copy(v_units[n, LOG_ODDS], lv[n])
        copy(h_units[n, LOG_ODDS], lh[n])


def mean_field(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    bv, bh, limit = checked(coupling, bv, bh, n_sweeps, tol)
    results, (v, h), strip = unfilled(bv, bh), coupling.w.shape, min(STRIP, len(bv))
    fields = UNIT_FIELDS + 1
    units = aligned((strip, fields, rounded_up(v))), aligned((strip, fields, rounded_up(h)))
    products = aligned((padded_size(v), rounded_up(strip))), aligned((padded_size(h), rounded_up(strip)))
    beliefs, small = (aligned((strip, v)), aligned((strip, h))), small_of(coupling.limit)
    for first in range(0, len(bv), STRIP):
        part = slice(first, first + STRIP)
        _infer(
            *coupling.packed,
            bv[part],
            bh[part],
            n_sweeps,
            limit,
            *(a[part] for a in results),
            *units,
            *products,
            *beliefs,
            small,
        )
    return Inference(*results)
