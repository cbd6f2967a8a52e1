"""Biases, log odds and beliefs P(unit = 1) of the units of a graph, eight units at a time."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types

from scalelatent.kernels.arrays import aligned_empty
from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.vectors import I32, I64, Vectors, copy_vector, vector_intrinsic
from scalelatent.models.crbm.kernels.inference import PRODUCT_UNITS, check_biases, check_graphs

from .coupling import UNIT_BYTES, UNITS, Coupling

# Rows of an array of units: bias, log odds, belief P(unit = 1), and belief P(unit = 0).
BIASES, LOG_ODDS, ON, OFF = range(4)
UNIT_FIELDS = 4
# Rows of the scratch space of eight units: product of the messages to each unit as mantissa and exponent (or
# the sum of messages), largest change of each unit's belief P(unit = 1), and upper bound of |log odds|.
PRODUCT, EXPONENT, MOVED, LIMIT = range(4)


def _store_beliefs(
    lanes: Vectors, new: ir.Value, units: ir.Value, step: ir.Value, moved: ir.Value, limit: ir.Value
) -> None:
    """Store the log odds ``new`` and the beliefs P(unit = 1 or 0) of eight units.

    ``moved`` keeps the largest change of each belief in the sweep, a round of messages over all edges.
    """
    b = lanes.b
    log_odds, on, off = (b.add(units, b.mul(step, I64(k))) for k in (LOG_ODDS, ON, OFF))
    t, u = lanes.sigmoids(new, lanes.load(limit))
    change = lanes.call("fabs", b.fsub(t, lanes.load(on)))
    lanes.store(lanes.max(lanes.load(moved), change), moved)
    for value, address in ((new, log_odds), (t, on), (u, off)):
        lanes.store(value, address)


@vector_intrinsic(UNITS)
def update_by_product(
    lanes: Vectors, units: ir.Value, step: ir.Value, mantissas: ir.Value, exponents: ir.Value,
    offset: ir.Value, moved: ir.Value, limit: ir.Value,
) -> None:  # fmt: skip
    """Set log odds = bias + log(mantissa 2^(exponent - offset)) of eight units, and update their beliefs.

    All arguments are addresses, except ``step``, the bytes between two fields of a unit, and the number
    ``offset``. At ``moved`` is the largest change of each belief so far.
    """
    exponent = lanes.b.sub(lanes.load(exponents, 0, lanes.ints), lanes.spread(lanes.b.trunc(offset, I32)))
    new = lanes.add_log(lanes.load(mantissas), exponent, lanes.load(units))
    _store_beliefs(lanes, new, units, step, moved, limit)


@vector_intrinsic(UNITS)
def update_by_sum(
    lanes: Vectors, units: ir.Value, step: ir.Value, total: ir.Value, moved: ir.Value, limit: ir.Value
) -> None:
    """Set log odds = bias + ``total`` of eight units, and update their beliefs P(unit = 1 or 0).

    All arguments are addresses, except ``step``, the bytes between two fields of a unit.
    """
    new = lanes.b.fadd(lanes.load(units), lanes.load(total))
    _store_beliefs(lanes, new, units, step, moved, limit)


@subkernel
def start_units(units: np.ndarray, biases: np.ndarray, small: np.ndarray) -> None:
    """Set the log odds of the units of a graph to their ``biases``; the padding after them has bias 0."""
    units[BIASES] = np.float32(0.0)
    copy_vector(biases, units[BIASES, : len(biases)])
    small[PRODUCT] = np.float32(0.0)
    step, total = 4 * units.shape[1], small.ctypes.data
    for k in range(0, step, UNIT_BYTES):
        update_by_sum(
            units.ctypes.data + k, step, total, total + UNIT_BYTES * MOVED, total + UNIT_BYTES * LIMIT
        )


def make_scratch(limit: float, *graphs: int) -> np.ndarray:
    """Return scratch space, (*graphs, 4 fields, 8 units): ``limit`` in the field LIMIT, 0 in the others."""
    out = aligned_empty((*graphs, 4, UNITS))
    out[..., :LIMIT, :], out[..., LIMIT, :] = 0.0, limit
    return out


def check_inputs(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return the biases in float32, and ``tol`` or -1 for None; raise an error if the inputs do not fit."""
    check_graphs(coupling.w.shape, bv.shape, bh.shape, n_sweeps, tol)
    bv, bh = (np.ascontiguousarray(b, dtype=np.float32) for b in (bv, bh))
    check_biases(bv, bh)
    return bv, bh, -1.0 if tol is None else float(tol)


def allocate_results(bv: np.ndarray, bh: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return arrays for the results: log odds of visible and of hidden units, sweeps, and last change."""
    rows = len(bv)
    sweeps, change = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.float32)
    return np.empty_like(bv), np.empty_like(bh), sweeps, change


@entry(*[in_array("f4", 2)] * 3, out_array("f4", 1))
def log_loss(lv: np.ndarray, beliefs: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
    """Write the log-loss of the outputs v of each row in nats to ``out``; ``beliefs`` = sigmoid(``lv``)."""
    for n in range(len(lv)):
        total, product = 0.0, 1.0
        for i in range(lv.shape[1]):
            total += max(lv[n, i], np.float32(0.0)) - lv[n, i] * v[n, i]
            product *= max(beliefs[n, i], np.float32(1.0) - beliefs[n, i])
            if i % PRODUCT_UNITS == PRODUCT_UNITS - 1:
                total, product = total - math.log(product), 1.0
        out[n] = total - math.log(product)


# Types of the arguments (bv, bh, n_sweeps, tol) and (lv, lh, sweeps, change) of compiled inference functions.
INPUTS = (in_array("f4", 2), in_array("f4", 2), types.int64, types.float64)
RESULTS = (out_array("f4", 2), out_array("f4", 2), out_array("i8", 1), out_array("f4", 1))
