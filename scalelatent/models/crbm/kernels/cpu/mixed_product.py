"""Mixed-product belief propagation, which stores no messages and divides once per visible unit and sweep.

A = exp(W), and t and u are the beliefs that the hidden unit is 1 and 0 (:mod:`.sum_product`). A visible unit
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
from scalelatent.kernels.vectors import BIAS, I64, Vectors, copy_vector, find_largest, instructions
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

_HALF = ROWS // 2


@instructions(UNITS)
def _gather(
    lanes: Vectors, a: ir.Value, row_step: ir.Value, x0: ir.Value, x1: ir.Value, x2: ir.Value, x3: ir.Value,
    swap: ir.Value, n: ir.Value, chunk: ir.Value, q: ir.Value, e: ir.Value,
) -> None:  # fmt: skip
    """Write the product of A x + y over the hidden units, for each of four visible units, as q times 2^e.

    All arguments are addresses, except ``row_step``, the bytes of a row of A, ``n``, the bytes of the hidden
    units, and ``chunk``, the bytes after which mantissas and exponents are split. The address of y is
    ``swap`` - x.
    """
    b, xs = lanes.b, (x0, x1, x2, x3)
    steps = [b.mul(row_step, I64(r)) for r in range(_HALF)]
    ys = [b.sub(swap, x) for x in xs]

    def edges(i: ir.Value, products: list[ir.Value]) -> list[ir.Value]:
        return [
            b.fmul(product, lanes.fma(lanes.load(a, b.add(i, step)), lanes.load(x, i), lanes.load(y, i)))
            for product, step, x, y in zip(products, steps, xs, ys, strict=True)
        ]

    def chunks(i: ir.Value, state: list[ir.Value]) -> list[ir.Value]:
        end = b.add(i, chunk)
        end = b.select(b.icmp_signed("<", end, n), end, n)
        split = [lanes.split(p) for p in lanes.loop(i, end, I64(UNIT_BYTES), state[:_HALF], edges)]
        return [m for m, _ in split] + [
            b.add(old, b.sub(new, lanes.integer(BIAS)))
            for old, (_, new) in zip(state[_HALF:], split, strict=True)
        ]

    start = [lanes.constant(1.0)] * _HALF + [lanes.integer(0)] * _HALF
    state = lanes.loop(I64(0), n, chunk, start, chunks)
    for r in range(_HALF):
        lanes.store(lanes.fold(state[r], b.fmul), q, 4 * r)
        lanes.store(lanes.fold(state[_HALF + r], b.add), e, 4 * r)


@subkernel
def _sweep(
    a: np.ndarray, w: np.ndarray, row_products: np.ndarray, v_units: np.ndarray, h_units: np.ndarray,
    small: np.ndarray, factors: int,
) -> None:  # fmt: skip
    """Update all units of a graph once, in blocks of eight visible units."""
    row, unit = 4 * a.shape[1], 4 * v_units.shape[1]
    a_at, v_at, h_at, q = a.ctypes.data, v_units.ctypes.data, h_units.ctypes.data, small.ctypes.data
    e, moved, limit = q + UNIT_BYTES * EXPONENT, q + UNIT_BYTES * MOVED, q + UNIT_BYTES * LIMIT
    on, off, columns = h_at + ON * row, h_at + OFF * row, h_units[UNIT_FIELDS]
    exponents, row_bits = same_bytes(small, np.int32)[EXPONENT], same_bytes(row_products, np.int32)
    decided = v_units[UNIT_FIELDS]
    x = empty(ROWS, np.int64)
    columns[:] = np.float32(0.0)
    for i in range(0, len(a), ROWS):
        for r in range(ROWS):
            x[r] = off if decided[i + r] else on
        for r in range(0, ROWS, _HALF):
            here = a_at + (i + r) * row
            four = x[r], x[r + 1], x[r + 2], x[r + 3]
            _gather(here, row, *four, on + off, row, UNIT_BYTES * factors, q + 4 * r, e + 4 * r)
        for r in range(ROWS):
            if decided[i + r]:
                small[PRODUCT, r] = row_products[0, i + r] / small[PRODUCT, r]
                exponents[r] = row_bits[1, i + r] - exponents[r]
        update_by_product(v_at + 4 * i, unit, q, e, 0, moved, limit)
        for r in range(ROWS):
            decided[i + r] = v_units[LOG_ODDS, i + r] > np.float32(0.0)
            if decided[i + r]:
                for j in range(len(columns)):
                    columns[j] += w[i + r, j]
    for j in range(0, row, UNIT_BYTES):
        update_by_sum(h_at + j, row, h_at + UNIT_FIELDS * row + j, moved, limit)


@entry(*[in_array("f4", 2)] * 3, types.int64, *INPUTS, *RESULTS, *[out_array("f4", 2)] * 3)
def _infer(
    a: np.ndarray, w: np.ndarray, row_products: np.ndarray, factors: int, bv: np.ndarray, bh: np.ndarray,
    n_sweeps: int, tol: float, lv: np.ndarray, lh: np.ndarray, sweeps: np.ndarray, change: np.ndarray,
    v_units: np.ndarray, h_units: np.ndarray, small: np.ndarray,
) -> None:  # fmt: skip
    for n in range(len(bv)):
        start_units(v_units, bv[n], small)
        start_units(h_units, bh[n], small)
        v_units[UNIT_FIELDS] = np.float32(0.0)
        for sweep in range(n_sweeps):
            small[MOVED] = np.float32(0.0)
            _sweep(a, w, row_products, v_units, h_units, small, factors)
            sweeps[n], change[n] = sweep + 1, find_largest(small[MOVED])
            if change[n] <= tol:
                break
        copy_vector(v_units[LOG_ODDS], lv[n])
        copy_vector(h_units[LOG_ODDS], lh[n])


def mixed_product(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """Find the most probable visible state, ``lv > 0``, with the hidden units summed out (marginal MAP)."""
    bv, bh, limit = check_inputs(coupling, bv, bh, n_sweeps, tol)
    results, a = allocate_results(bv, bh), coupling.a
    units = aligned_empty((UNIT_FIELDS + 1, len(a))), aligned_empty((UNIT_FIELDS + 1, a.shape[1]))
    matrices = a, coupling.padded, coupling.row_products
    _infer(
        *matrices, coupling.factors, bv, bh, n_sweeps, limit, *results, *units, make_scratch(coupling.limit)
    )
    return Inference(*results)
