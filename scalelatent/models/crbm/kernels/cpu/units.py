"""Units of a graph: their biases, log odds and beliefs, eight at a time."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types

from scalelatent.kernels.arrays import aligned
from scalelatent.kernels.jit import entry, filled, given, part
from scalelatent.kernels.vectors import I32, I64, Vectors, copy, instructions
from scalelatent.models.crbm.kernels.inference import (
    PRODUCT_UNITS,
    check_biases,
    check_graphs,
)

from .coupling import UNITS, WIDE, Coupling

# Rows of the scratch of units: bias, log odds, and the beliefs of 1 and of 0.
BIASES, LOG_ODDS, ON, OFF = range(4)
UNIT_FIELDS = 4
# Rows of the scratch of one block of units: product of messages as mantissa and exponent, or their sum; the
# most that a belief has moved; the limit of log odds, in all lanes.
PRODUCT, EXPONENT, MOVED, LIMIT = range(4)


def _settle(
    lanes: Vectors, new: ir.Value, units: ir.Value, step: ir.Value, moved: ir.Value, limit: ir.Value
) -> None:
    b = lanes.b
    log_odds, on, off = (b.add(units, b.mul(step, I64(k))) for k in (LOG_ODDS, ON, OFF))
    t, u = lanes.sigmoids(new, lanes.load(limit))
    change = lanes.call("fabs", b.fsub(t, lanes.load(on)))
    lanes.store(lanes.max(lanes.load(moved), change), moved)
    for value, address in ((new, log_odds), (t, on), (u, off)):
        lanes.store(value, address)


@instructions(UNITS)
def update(
    lanes: Vectors, units: ir.Value, step: ir.Value, q: ir.Value, e: ir.Value, offset: ir.Value,
    moved: ir.Value, limit: ir.Value,
) -> None:  # fmt: skip
    """Log odds = bias + log(q 2^(e - offset)) of eight units, whose fields lie ``step`` bytes apart, and
    their beliefs; ``moved`` becomes the most that a belief of each lane has moved. Addresses; ``offset`` a
    number.
    """
    exponent = lanes.b.sub(lanes.load(e, 0, lanes.ints), lanes.spread(lanes.b.trunc(offset, I32)))
    new = lanes.log_plus(lanes.load(q), exponent, lanes.load(units))
    _settle(lanes, new, units, step, moved, limit)


@instructions(UNITS)
def update_by_sum(
    lanes: Vectors, units: ir.Value, step: ir.Value, total: ir.Value, moved: ir.Value, limit: ir.Value
) -> None:
    """As :func:`update`: log odds = bias + ``total``."""
    new = lanes.b.fadd(lanes.load(units), lanes.load(total))
    _settle(lanes, new, units, step, moved, limit)


@part
def start(units: np.ndarray, biases: np.ndarray, small: np.ndarray) -> None:
    """Units of a graph before its first sweep: their biases alone; what is filled up has none."""
    units[BIASES] = np.float32(0.0)
    copy(biases, units[BIASES, : len(biases)])
    small[PRODUCT] = np.float32(0.0)
    step, total = 4 * units.shape[1], small.ctypes.data
    for k in range(0, step, WIDE):
        update_by_sum(units.ctypes.data + k, step, total, total + WIDE * MOVED, total + WIDE * LIMIT)


def small_of(limit: float, *graphs: int) -> np.ndarray:
    """Scratch of one block of units, (*graphs, 4, 8)."""
    out = aligned((*graphs, 4, UNITS))
    out[..., :LIMIT, :], out[..., LIMIT, :] = 0.0, limit
    return out


def checked(
    coupling: Coupling,
    bv: np.ndarray,
    bh: np.ndarray,
    n_sweeps: int,
    tol: float | None,
    damping: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Biases in float32, and the tolerance, below 0 where there is none."""
    check_graphs(coupling.w.shape, bv.shape, bh.shape, n_sweeps, tol, damping)
    bv, bh = (np.ascontiguousarray(b, dtype=np.float32) for b in (bv, bh))
    check_biases(bv, bh)
    return bv, bh, -1.0 if tol is None else float(tol)


def unfilled(bv: np.ndarray, bh: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Arrays for the result of a batch: log odds of both sides, sweeps, change."""
    rows = len(bv)
    sweeps, change = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.float32)
    return np.empty_like(bv), np.empty_like(bh), sweeps, change


@entry(*[given("f4", 2)] * 3, filled("f4", 1))
def log_loss(lv: np.ndarray, beliefs: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
    """See :func:`..model.nll_of_units`."""
    for n in range(len(lv)):
        total, product = 0.0, 1.0
        for i in range(lv.shape[1]):
            total += max(lv[n, i], np.float32(0.0)) - lv[n, i] * v[n, i]
            product *= max(beliefs[n, i], np.float32(1.0) - beliefs[n, i])
            if i % PRODUCT_UNITS == PRODUCT_UNITS - 1:
                total, product = total - math.log(product), 1.0
        out[n] = total - math.log(product)


# Types of (bv, bh, n_sweeps, tol) and of the result's (lv, lh, sweeps, change).
INPUTS = (given("f4", 2), given("f4", 2), types.int64, types.float64)
RESULTS = (filled("f4", 2), filled("f4", 2), filled("i8", 1), filled("f4", 1))
