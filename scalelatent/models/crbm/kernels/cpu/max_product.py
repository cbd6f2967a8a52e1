"""Max-product belief propagation on log odds: m = max(w + s, 0) - max(s, 0), s the cavity's log odds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import types

from scalelatent.kernels.arrays import aligned
from scalelatent.kernels.jit import entry, filled, given, part
from scalelatent.kernels.vectors import F32, I64, Vectors, copy, instructions, largest
from scalelatent.models.crbm.kernels.inference import Inference

from .coupling import ROWS, UNITS, WIDE, Coupling
from .units import (
    INPUTS,
    LIMIT,
    LOG_ODDS,
    MOVED,
    RESULTS,
    UNIT_FIELDS,
    checked,
    small_of,
    start,
    unfilled,
    update_by_sum,
)

_HALF = ROWS // 2


def _message(lanes: Vectors, w: ir.Value, cavity: ir.Value) -> ir.Value:
    zero = lanes.constant(0.0)
    return lanes.b.fsub(lanes.max(lanes.b.fadd(w, cavity), zero), lanes.max(cavity, zero))


def _make_gather(keep: bool) -> Callable[..., None]:
    @instructions(UNITS)
    def gather(
        lanes: Vectors, w: ir.Value, m: ir.Value, row_step: ir.Value, lh: ir.Value, n: ir.Value,
        totals: ir.Value,
    ) -> None:  # fmt: skip
        """Sums of the messages of the hidden units to four visible ones, which take the place of those that
        they are made from; with ``keep`` these stay for :func:`_damped`, which makes the messages again.
        """
        b = lanes.b
        steps = [b.mul(row_step, I64(r)) for r in range(_HALF)]

        def edges(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            lj, out = lanes.load(lh, i), []
            for step, total in zip(steps, sums, strict=True):
                at = b.add(i, step)
                message = _message(lanes, lanes.load(w, at), b.fsub(lj, lanes.load(m, at)))
                if not keep:
                    lanes.store(message, m, at)
                out.append(b.fadd(total, message))
            return out

        for r, total in enumerate(lanes.loop(I64(0), n, I64(WIDE), [lanes.constant(0.0)] * _HALF, edges)):
            lanes.store(lanes.fold(total, b.fadd), totals, 4 * r)

    return gather


_gather, _sum = (_make_gather(keep) for keep in (False, True))


@instructions(UNITS)
def _scatter(
    lanes: Vectors, w: ir.Value, m: ir.Value, row_step: ir.Value, lv: ir.Value, n: ir.Value, totals: ir.Value
) -> None:
    """Messages of four visible units back, in place; added to the sums of each column."""
    b = lanes.b
    steps = [b.mul(row_step, I64(r)) for r in range(_HALF)]
    own = [lanes.spread(lanes.load(lv, 4 * r, F32)) for r in range(_HALF)]

    def edges(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        total = lanes.load(totals, i)
        for step, li in zip(steps, own, strict=True):
            at = b.add(i, step)
            message = _message(lanes, lanes.load(w, at), b.fsub(li, lanes.load(m, at)))
            lanes.store(message, m, at)
            total = b.fadd(total, message)
        lanes.store(total, totals, i)
        return []

    lanes.loop(I64(0), n, I64(WIDE), [], edges)


@instructions(UNITS, weight=types.float32)
def _damped(
    lanes: Vectors, w: ir.Value, m: ir.Value, row_step: ir.Value, lv: ir.Value, lh: ir.Value, n: ir.Value,
    totals: ir.Value, weight: ir.Value,
) -> None:  # fmt: skip
    """:func:`_scatter` of messages that have the ``weight``, the old ones the rest."""
    b = lanes.b
    steps = [b.mul(row_step, I64(r)) for r in range(_HALF)]
    own = [lanes.spread(lanes.load(lv, 4 * r, F32)) for r in range(_HALF)]
    weights = lanes.spread(weight)

    def edges(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        total, lj = lanes.load(totals, i), lanes.load(lh, i)
        for step, li in zip(steps, own, strict=True):
            at = b.add(i, step)
            wij, old = lanes.load(w, at), lanes.load(m, at)
            new = _message(lanes, wij, b.fsub(li, _message(lanes, wij, b.fsub(lj, old))))
            message = lanes.fma(weights, b.fsub(new, old), old)
            lanes.store(message, m, at)
            total = b.fadd(total, message)
        lanes.store(total, totals, i)
        return []

    lanes.loop(I64(0), n, I64(WIDE), [], edges)


@part
def _to_and_fro(
    w: np.ndarray,
    m: np.ndarray,
    v_units: np.ndarray,
    h_units: np.ndarray,
    small: np.ndarray,
    damping: np.float32 | None,
) -> None:
    row, unit = 4 * w.shape[1], 4 * v_units.shape[1]
    w_at, m_at, v_at, h_at = w.ctypes.data, m.ctypes.data, v_units.ctypes.data, h_units.ctypes.data
    totals = small.ctypes.data
    moved, limit = totals + WIDE * MOVED, totals + WIDE * LIMIT
    columns = h_at + UNIT_FIELDS * row
    h_units[UNIT_FIELDS] = np.float32(0.0)
    for i in range(len(w) // ROWS):
        at, lv = i * ROWS * row, v_at + LOG_ODDS * unit + WIDE * i
        for half in range(2):
            here = at + half * _HALF * row
            sums = totals + 4 * _HALF * half
            if damping is not None:
                _sum(w_at + here, m_at + here, row, h_at + LOG_ODDS * row, row, sums)
            else:
                _gather(w_at + here, m_at + here, row, h_at + LOG_ODDS * row, row, sums)
        update_by_sum(v_at + WIDE * i, unit, totals, moved, limit)
        for half in range(2):
            here = at + half * _HALF * row
            own = lv + 4 * _HALF * half
            if damping is not None:
                lh = h_at + LOG_ODDS * row
                _damped(w_at + here, m_at + here, row, own, lh, row, columns, damping)
            else:
                _scatter(w_at + here, m_at + here, row, own, row, columns)
    for j in range(0, row, WIDE):
        update_by_sum(h_at + j, row, columns + j, moved, limit)


def _infer_all(
    w: np.ndarray, damping: np.float32 | None, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float,
    lv: np.ndarray, lh: np.ndarray, sweeps: np.ndarray, change: np.ndarray, m: np.ndarray,
    v_units: np.ndarray, h_units: np.ndarray, small: np.ndarray,
) -> None:  # fmt: skip
    for n in range(len(bv)):
        start(v_units, bv[n], small)
        start(h_units, bh[n], small)
        m[:] = np.float32(0.0)
        for sweep in range(n_sweeps):
            small[MOVED] = np.float32(0.0)
            _to_and_fro(w, m, v_units, h_units, small, damping)
            sweeps[n], change[n] = sweep + 1, largest(small[MOVED])
            if damping is not None:
                change[n] /= damping
            if change[n] <= tol:
                break
        copy(v_units[LOG_ODDS], lv[n])
        copy(h_units[LOG_ODDS], lh[n])


_INFER = {
    damped: entry(
        *(given("f4", 2), types.float32 if damped else types.none, *INPUTS, *RESULTS),
        *[filled("f4", 2)] * 4,
    )(_infer_all)
    for damped in (False, True)
}


def max_product(
    coupling: Coupling,
    bv: np.ndarray,
    bh: np.ndarray,
    n_sweeps: int,
    tol: float | None = None,
    damping: float = 1.0,
) -> Inference:
    bv, bh, limit = checked(coupling, bv, bh, n_sweeps, tol, damping)
    results, w = unfilled(bv, bh), coupling.padded
    scratch = aligned(w.shape), aligned((UNIT_FIELDS, len(w))), aligned((UNIT_FIELDS + 1, w.shape[1]))
    small = small_of(coupling.limit)
    damped = damping != 1
    weight = np.float32(damping) if damped else None
    _INFER[damped](w, weight, bv, bh, n_sweeps, limit, *results, *scratch, small)
    return Inference(*results)
