"""Max-product belief propagation: the message along an edge with coupling w is max(w + c, 0) - max(c, 0).

The cavity c is the log odds of the sender minus the message that it received along the same edge.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from scalelatent.kernels.arrays import aligned_empty
from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.vectors import F32, I64, Vectors, copy_vector, find_largest, vector_intrinsic
from scalelatent.models.crbm.kernels.inference import Inference

from .coupling import ROWS, UNIT_BYTES, UNITS, Coupling
from .units import (
    INPUTS,
    LIMIT,
    LOG_ODDS,
    MOVED,
    RESULTS,
    UNIT_FIELDS,
    allocate_results,
    check_inputs,
    make_scratch,
    start_units,
    update_by_sum,
)

_HALF = ROWS // 2  # number of visible units whose messages are computed together


def _message(lanes: Vectors, w: ir.Value, cavity: ir.Value) -> ir.Value:
    zero = lanes.constant(0.0)
    return lanes.b.fsub(lanes.max(lanes.b.fadd(w, cavity), zero), lanes.max(cavity, zero))


@vector_intrinsic(UNITS)
def _gather(
    lanes: Vectors, w: ir.Value, messages: ir.Value, row_bytes: ir.Value, lh: ir.Value, end: ir.Value,
    totals: ir.Value,
) -> None:  # fmt: skip
    """Replace messages from four visible units with messages to them; write the sum for each visible unit."""
    b = lanes.b
    steps = [b.mul(row_bytes, I64(r)) for r in range(_HALF)]

    def receive_messages(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        log_odds, out = lanes.load(lh, i), []
        for step, total in zip(steps, sums, strict=True):
            place = b.add(i, step)
            message = _message(lanes, lanes.load(w, place), b.fsub(log_odds, lanes.load(messages, place)))
            lanes.store(message, messages, place)
            out.append(b.fadd(total, message))
        return out

    start = [lanes.constant(0.0)] * _HALF
    for r, total in enumerate(lanes.loop(I64(0), end, I64(UNIT_BYTES), start, receive_messages)):
        lanes.store(lanes.fold(total, b.fadd), totals, 4 * r)


@vector_intrinsic(UNITS)
def _scatter(
    lanes: Vectors, w: ir.Value, messages: ir.Value, row_bytes: ir.Value, lv: ir.Value, end: ir.Value,
    totals: ir.Value,
) -> None:  # fmt: skip
    """Replace messages to four visible units with messages from them; add these to sums per hidden unit."""
    b = lanes.b
    steps = [b.mul(row_bytes, I64(r)) for r in range(_HALF)]
    own = [lanes.spread(lanes.load(lv, 4 * r, F32)) for r in range(_HALF)]

    def send_messages(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        total = lanes.load(totals, i)
        for step, log_odds in zip(steps, own, strict=True):
            place = b.add(i, step)
            message = _message(lanes, lanes.load(w, place), b.fsub(log_odds, lanes.load(messages, place)))
            lanes.store(message, messages, place)
            total = b.fadd(total, message)
        lanes.store(total, totals, i)
        return []

    lanes.loop(I64(0), end, I64(UNIT_BYTES), [], send_messages)


@subkernel
def _sweep(w: np.ndarray, m: np.ndarray, v_units: np.ndarray, h_units: np.ndarray, small: np.ndarray) -> None:
    """Update all messages and units of a graph once; eight visible units are processed at a time."""
    row, unit = 4 * w.shape[1], 4 * v_units.shape[1]
    w_at, m_at, v_at, h_at = w.ctypes.data, m.ctypes.data, v_units.ctypes.data, h_units.ctypes.data
    totals = small.ctypes.data
    moved, limit = totals + UNIT_BYTES * MOVED, totals + UNIT_BYTES * LIMIT
    columns, lh = h_at + UNIT_FIELDS * row, h_at + LOG_ODDS * row
    h_units[UNIT_FIELDS] = np.float32(0.0)
    for i in range(len(w) // ROWS):
        at, lv = i * ROWS * row, v_at + LOG_ODDS * unit + UNIT_BYTES * i
        for half in range(2):
            here = at + half * _HALF * row
            _gather(w_at + here, m_at + here, row, lh, row, totals + 4 * _HALF * half)
        update_by_sum(v_at + UNIT_BYTES * i, unit, totals, moved, limit)
        for half in range(2):
            here = at + half * _HALF * row
            _scatter(w_at + here, m_at + here, row, lv + 4 * _HALF * half, row, columns)
    for j in range(0, row, UNIT_BYTES):
        update_by_sum(h_at + j, row, columns + j, moved, limit)


@entry(in_array("f4", 2), *INPUTS, *RESULTS, *[out_array("f4", 2)] * 4)
def _infer(
    w: np.ndarray, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float, lv: np.ndarray, lh: np.ndarray,
    sweeps: np.ndarray, change: np.ndarray, m: np.ndarray, v_units: np.ndarray, h_units: np.ndarray,
    small: np.ndarray,
) -> None:  # fmt: skip
    for n in range(len(bv)):
        start_units(v_units, bv[n], small)
        start_units(h_units, bh[n], small)
        m[:] = np.float32(0.0)
        for sweep in range(n_sweeps):
            small[MOVED] = np.float32(0.0)
            _sweep(w, m, v_units, h_units, small)
            sweeps[n], change[n] = sweep + 1, find_largest(small[MOVED])
            if change[n] <= tol:
                break
        copy_vector(v_units[LOG_ODDS], lv[n])
        copy_vector(h_units[LOG_ODDS], lh[n])


def max_product(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """Find the most probable joint state of all units by max-product: a unit is 1 if its log odds are > 0."""
    bv, bh, limit = check_inputs(coupling, bv, bh, n_sweeps, tol)
    results, w = allocate_results(bv, bh), coupling.padded
    scratch = (
        aligned_empty(w.shape),
        aligned_empty((UNIT_FIELDS, len(w))),
        aligned_empty((UNIT_FIELDS + 1, w.shape[1])),
    )
    _infer(w, bv, bh, n_sweeps, limit, *results, *scratch, make_scratch(coupling.limit))
    return Inference(*results)
