"""Mixed-product belief propagation, which stores no messages and divides once per visible unit and sweep.

Let A = exp(W), and let t and u be the beliefs P(h = 1) and P(h = 0) of a hidden unit h. A visible unit
sends its decision: the message is A^d, where d = 1 if the log odds of the unit are above 0. So a message
to the unit is A t + u if d = 0, and A / (A u + t) if d = 1. To multiply these messages over the hidden units,
the kernel computes the product of A x + y, where x, y are t, u for d = 0, and u, t for d = 1. For d = 1 the
product of a row of A, computed beforehand, is divided by that product. A hidden unit receives the sum of W
over the visible units that are 1.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from scalelatent.kernels.arrays import aligned_empty
from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.memory import empty, same_bytes
from scalelatent.kernels.vectors import BIAS, I64, Vectors, copy_vector, find_largest, vector_intrinsic
from scalelatent.models.crbm.kernels.inference import Inference

from .coupling import ROWS, UNIT_BYTES, UNITS, Coupling
from .units import (
    EXPONENT,
    INPUTS,
    LIMIT,
    LOG_ODDS,
    MOVED,
    OFF,
    ON,
    PRODUCT,
    RESULTS,
    UNIT_FIELDS,
    allocate_results,
    check_inputs,
    make_scratch,
    start_units,
    update_by_product,
    update_by_sum,
)

_HALF = ROWS // 2  # number of visible units whose products are computed together


@vector_intrinsic(UNITS)
def _gather(
    lanes: Vectors, exp_w: ir.Value, row_bytes: ir.Value, x0: ir.Value, x1: ir.Value, x2: ir.Value,
    x3: ir.Value, swap: ir.Value, end: ir.Value, chunk_bytes: ir.Value, mantissas: ir.Value,
    exponents: ir.Value,
) -> None:  # fmt: skip
    """Write the product of A x + y over the hidden units, for each of four visible units.

    A = exp(W); x and y are P(h = 1) and P(h = 0) of the hidden units, in this or the other order. The product
    is split into mantissa and exponent after ``chunk_bytes`` bytes of the hidden units, which have ``end``
    bytes. ``swap`` is the sum of the addresses of x and y; the other arguments are addresses.
    """
    b, xs = lanes.b, (x0, x1, x2, x3)
    steps = [b.mul(row_bytes, I64(r)) for r in range(_HALF)]
    ys = [b.sub(swap, x) for x in xs]

    def multiply_factors(i: ir.Value, products: list[ir.Value]) -> list[ir.Value]:
        return [
            b.fmul(product, lanes.fma(lanes.load(exp_w, b.add(i, step)), lanes.load(x, i), lanes.load(y, i)))
            for product, step, x, y in zip(products, steps, xs, ys, strict=True)
        ]

    def multiply_chunk(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
        stop = b.add(i, chunk_bytes)
        stop = b.select(b.icmp_signed("<", stop, end), stop, end)
        products = lanes.loop(i, stop, I64(UNIT_BYTES), state[:_HALF], multiply_factors)
        split = [lanes.split(p) for p in products]
        return [mantissa for mantissa, _ in split] + [
            b.add(old, b.sub(new, lanes.integer(BIAS)))
            for old, (_, new) in zip(state[_HALF:], split, strict=True)
        ]

    start = [lanes.constant(1.0)] * _HALF + [lanes.integer(0)] * _HALF
    state = lanes.loop(I64(0), end, chunk_bytes, start, multiply_chunk)
    for r in range(_HALF):
        lanes.store(lanes.fold(state[r], b.fmul), mantissas, 4 * r)
        lanes.store(lanes.fold(state[_HALF + r], b.add), exponents, 4 * r)


@subkernel
def _sweep(
    exp_w: np.ndarray, w: np.ndarray, row_products: np.ndarray, v_units: np.ndarray, h_units: np.ndarray,
    small: np.ndarray, factors: int,
) -> None:  # fmt: skip
    """Update all units of a graph once; eight visible units are processed at a time."""
    row, unit, w_at = 4 * exp_w.shape[1], 4 * v_units.shape[1], exp_w.ctypes.data
    v_at, h_at, scratch = v_units.ctypes.data, h_units.ctypes.data, small.ctypes.data
    powers, moved = scratch + UNIT_BYTES * EXPONENT, scratch + UNIT_BYTES * MOVED
    limit, chunk = scratch + UNIT_BYTES * LIMIT, UNIT_BYTES * factors
    on, off, columns = h_at + ON * row, h_at + OFF * row, h_units[UNIT_FIELDS]
    exponents, row_bits = same_bytes(small, np.int32)[EXPONENT], same_bytes(row_products, np.int32)
    decided = v_units[UNIT_FIELDS]
    x = empty(ROWS, np.int64)
    columns[:] = np.float32(0.0)
    for i in range(0, len(exp_w), ROWS):
        for r in range(ROWS):
            x[r] = off if decided[i + r] else on
        for r in range(0, ROWS, _HALF):
            four = x[r], x[r + 1], x[r + 2], x[r + 3]
            _gather(w_at + (i + r) * row, row, *four, on + off, row, chunk, scratch + 4 * r, powers + 4 * r)
        for r in range(ROWS):
            if decided[i + r]:
                small[PRODUCT, r] = row_products[0, i + r] / small[PRODUCT, r]
                exponents[r] = row_bits[1, i + r] - exponents[r]
        update_by_product(v_at + 4 * i, unit, scratch, powers, 0, moved, limit)
        for r in range(ROWS):
            decided[i + r] = v_units[LOG_ODDS, i + r] > np.float32(0.0)
            if decided[i + r]:
                for j in range(len(columns)):
                    columns[j] += w[i + r, j]
    for j in range(0, row, UNIT_BYTES):
        update_by_sum(h_at + j, row, h_at + UNIT_FIELDS * row + j, moved, limit)


@entry(*[in_array("f4", 2)] * 3, types.int64, *INPUTS, *RESULTS, *[out_array("f4", 2)] * 3)
def _infer(
    exp_w: np.ndarray, w: np.ndarray, row_products: np.ndarray, factors: int, bv: np.ndarray, bh: np.ndarray,
    n_sweeps: int, tol: float, lv: np.ndarray, lh: np.ndarray, sweeps: np.ndarray, change: np.ndarray,
    v_units: np.ndarray, h_units: np.ndarray, small: np.ndarray,
) -> None:  # fmt: skip
    for n in range(len(bv)):
        start_units(v_units, bv[n], small)
        start_units(h_units, bh[n], small)
        v_units[UNIT_FIELDS] = np.float32(0.0)
        for sweep in range(n_sweeps):
            small[MOVED] = np.float32(0.0)
            _sweep(exp_w, w, row_products, v_units, h_units, small, factors)
            sweeps[n], change[n] = sweep + 1, find_largest(small[MOVED])
            if change[n] <= tol:
                break
        copy_vector(v_units[LOG_ODDS], lv[n])
        copy_vector(h_units[LOG_ODDS], lh[n])


def mixed_product(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """Find the most probable state of the visible units alone (marginal MAP); a unit is 1 if ``lv`` > 0."""
    bv, bh, limit = check_inputs(coupling, bv, bh, n_sweeps, tol)
    results, exp_w = allocate_results(bv, bh), coupling.exp_w
    units = aligned_empty((UNIT_FIELDS + 1, len(exp_w))), aligned_empty((UNIT_FIELDS + 1, exp_w.shape[1]))
    matrices = exp_w, coupling.padded, coupling.row_products
    _infer(
        *matrices, coupling.factors, bv, bh, n_sweeps, limit, *results, *units, make_scratch(coupling.limit)
    )
    return Inference(*results)
