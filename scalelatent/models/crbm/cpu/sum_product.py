"""Sum-product belief propagation at one division an edge and sweep.

With A = exp(W), messages r = m(1)/m(0) as odds, and the sender's belief t = sigmoid(l), u = sigmoid(-l), a
message is r_new = (A t + r u) / (t + r u), r the opposite message on the same edge (division of the belief by
r gives the cavity). So a hidden unit's message is N / D with N = A t + r u, D = t + r u, and what the visible
unit sends back is

    r' = (A x + y) / (x + y),    x = t_v D,  y = u_v N:

N / D itself is never needed, and neither is its log, since l_v = b + log prod N - log prod D. One sweep runs
over W in blocks of eight visible units: to them (``_gather``), their beliefs (``_update``), and back
(``_scatter``) while everything still lies in the first-level cache. One matrix of messages is stored.

Pair beliefs are P(v_i = 1 | h_j = 1) P(h_j = 1), and the former is A x / (A x + y): the last sweep leaves it
behind. The Bethe estimate is sum_i log Z_i + sum_j log Z_j + sum_ij log (x + y) / N, since each message to a
hidden unit belongs to the cavity it was made from: Z_ij = (1 + c_ij) Z_j with c the cavity's odds.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numba import types

from scalelatent._numba import entry, filled, given, kernel
from scalelatent.models.crbm.inference import Inference

from .coupling import ROWS, Coupling
from .lanes import BIAS, F32, I64, WIDE, Lanes, aligned, inline
from .units import (
    EXPONENT,
    INPUTS,
    LIMIT,
    LOG_ODDS,
    MOVED,
    OFF,
    ON,
    RESULTS,
    UNIT_FIELDS,
    checked,
    small_of,
    start,
    unfilled,
    update,
)

_HALF = ROWS // 2
# Rows of the scratch of the hidden units after those of every unit: products of messages, and of the Bethe
# factors, as mantissa and exponent.
_P, _E, _Z, _EZ = (UNIT_FIELDS + k for k in range(4))


def _make_gather(rows: int) -> Any:
    @inline
    def gather(typingctx, a, m, d, row_step, t, u, n, chunk, q, e):  # type: ignore[no-untyped-def]
        """N into the place of the messages ``m``, D into ``d``; of each row the product of all N / D as
        q times 2^e. Addresses, bytes of a row, bytes between exponents' splits.
        """

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            a, m, d, row_step, t, u, n, chunk, q, e = args
            lanes, b = Lanes(builder), builder
            steps = [b.mul(row_step, I64(r)) for r in range(rows)]

            def edges(i: Any, products: list[Any]) -> list[Any]:
                tj, uj, out = lanes.load(t, i), lanes.load(u, i), []
                for r, step in enumerate(steps):
                    at = b.add(i, step)
                    ru = b.fmul(lanes.load(m, at), uj)
                    top, bottom = lanes.fma(lanes.load(a, at), tj, ru), b.fadd(tj, ru)
                    lanes.store(top, m, at)
                    lanes.store(bottom, d, at)
                    out += [b.fmul(products[2 * r], top), b.fmul(products[2 * r + 1], bottom)]
                return out

            def chunks(i: Any, state: list[Any]) -> list[Any]:
                end = b.add(i, chunk)
                end = b.select(b.icmp_signed("<", end, n), end, n)
                products = lanes.loop(i, end, I64(WIDE), state[: 2 * rows], edges)
                split = [lanes.split(p) for p in products]
                exponents = [
                    b.add(state[2 * rows + r], b.sub(split[2 * r][1], split[2 * r + 1][1]))
                    for r in range(rows)
                ]
                return [mantissa for mantissa, _ in split] + exponents

            start = [lanes.constant(1.0)] * (2 * rows) + [lanes.integer(0)] * rows
            state = lanes.loop(I64(0), n, chunk, start, chunks)
            for r in range(rows):
                ratio = b.fdiv(state[2 * r], state[2 * r + 1])
                lanes.store(lanes.fold(ratio, b.fmul), q, 4 * r)
                lanes.store(lanes.fold(state[2 * rows + r], b.add), e, 4 * r)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), codegen

    return gather


def _make_scatter(rows: int, split: bool) -> Any:
    @inline
    def scatter(typingctx, a, m, d, row_step, t, u, n, p, e):  # type: ignore[no-untyped-def]
        """Messages to the hidden units into ``m``, which holds N; the product of each column times them as p
        times 2^e, and with ``split`` p a mantissa.
        """

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            a, m, d, row_step, t, u, n, p, e = args
            lanes, b = Lanes(builder), builder
            steps = [b.mul(row_step, I64(r)) for r in range(rows)]
            ti, ui = ([lanes.spread(lanes.load(x, 4 * r, F32)) for r in range(rows)] for x in (t, u))

            def edges(i: Any, _: list[Any]) -> list[Any]:
                product = lanes.load(p, i)
                for r, step in enumerate(steps):
                    at = b.add(i, step)
                    x, y = b.fmul(lanes.load(d, at), ti[r]), b.fmul(lanes.load(m, at), ui[r])
                    message = b.fdiv(lanes.fma(lanes.load(a, at), x, y), b.fadd(x, y))
                    lanes.store(message, m, at)
                    product = b.fmul(product, message)
                _keep(lanes, product, p, e, i, split)
                return []

            lanes.loop(I64(0), n, I64(WIDE), [], edges)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), codegen

    return scatter


def _keep(lanes: Lanes, product: Any, p: Any, e: Any, i: Any, split: bool) -> None:
    if split:
        product, exponent = lanes.split(product)
        lanes.store(lanes.b.add(lanes.load(e, i, exponent.type), exponent), e, i)
    lanes.store(product, p, i)


@inline
def _scatter_pairs(typingctx, a, m, d, t, u, n, p, e, c, z, ez):  # type: ignore[no-untyped-def]
    """Scatter of one row that also stores P(v_i = 1 | h_j = 1) into ``c``, which may be ``m``, and multiplies
    each column's (x + y) / N into z times 2^ez.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        a, m, d, t, u, n, p, e, c, z, ez = args
        lanes, b = Lanes(builder), builder
        ti, ui = lanes.spread(lanes.load(t, 0, F32)), lanes.spread(lanes.load(u, 0, F32))

        def edges(i: Any, _: list[Any]) -> list[Any]:
            top = lanes.load(m, i)
            x, y = b.fmul(lanes.load(d, i), ti), b.fmul(top, ui)
            ax, both = b.fmul(lanes.load(a, i), x), b.fadd(x, y)
            whole = lanes.fma(lanes.load(a, i), x, y)  # the bits of the other sweeps
            message = b.fdiv(whole, both)
            lanes.store(message, m, i)
            lanes.store(b.fdiv(ax, whole), c, i)
            _keep(lanes, b.fmul(lanes.load(p, i), message), p, e, i, True)
            _keep(lanes, b.fmul(lanes.load(z, i), b.fdiv(both, top)), z, ez, i, True)
            return []

        lanes.loop(I64(0), n, I64(WIDE), [], edges)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 11), codegen


_gather = _make_gather(_HALF)
_scatter, _scatter_split, _scatter_two = (
    _make_scatter(_HALF, False),
    _make_scatter(_HALF, True),
    _make_scatter(2, True),
)


@kernel
def _to_and_fro(a, m, d, v_units, h_units, small, factors, c):  # type: ignore[no-untyped-def]
    """One sweep; with a matrix ``c`` the last one."""
    blocks, row = len(a) // ROWS, 4 * a.shape[1]
    block, half, unit = ROWS * row, _HALF * row, 4 * v_units.shape[1]
    chunk, four, pairs = WIDE * factors, 4 * _HALF, len(c) > 0
    a_at, m_at, d_at, c_at = a.ctypes.data, m.ctypes.data, d.ctypes.data, c.ctypes.data
    v_at, h_at, q = v_units.ctypes.data, h_units.ctypes.data, small.ctypes.data
    th, uh, e = h_at + ON * row, h_at + OFF * row, q + WIDE * EXPONENT
    moved, limit = q + WIDE * MOVED, q + WIDE * LIMIT
    p, ep, z, ez = h_at + _P * row, h_at + _E * row, h_at + _Z * row, h_at + _EZ * row
    h_units[_P:] = np.float32(0.0)
    h_units[_P], h_units[_Z] = np.float32(1.0), np.float32(1.0)
    splits = 0
    for i in range(blocks):
        tv, uv = v_at + ON * unit + WIDE * i, v_at + OFF * unit + WIDE * i
        _gather(a_at, m_at, d_at, row, th, uh, row, chunk, q, e)
        _gather(a_at + half, m_at + half, d_at + half, row, th, uh, row, chunk, q + four, e + four)
        update(v_at + WIDE * i, unit, q, e, 0, moved, limit)
        if pairs:
            for r in range(ROWS):
                at = r * row
                _scatter_pairs(
                    a_at + at, m_at + at, d_at + at, tv + 4 * r, uv + 4 * r, row, p, ep, c_at + at, z, ez
                )
            splits += ROWS
        elif factors >= ROWS:
            _scatter(a_at, m_at, d_at, row, tv, uv, row, p, ep)
            _scatter_split(a_at + half, m_at + half, d_at + half, row, tv + four, uv + four, row, p, ep)
            splits += 1
        elif factors >= _HALF:
            _scatter_split(a_at, m_at, d_at, row, tv, uv, row, p, ep)
            _scatter_split(a_at + half, m_at + half, d_at + half, row, tv + four, uv + four, row, p, ep)
            splits += 2
        else:
            for r in range(0, ROWS, 2):
                at = r * row
                _scatter_two(a_at + at, m_at + at, d_at + at, row, tv + 4 * r, uv + 4 * r, row, p, ep)
                splits += 1
        a_at, m_at, c_at = a_at + block, m_at + block, c_at + block
    for j in range(0, row, WIDE):
        update(h_at + j, row, p + j, ep + j, BIAS * splits, moved, limit)
    return splits


@kernel
def _log_z(units, n):  # type: ignore[no-untyped-def]
    """Sum of log(1 + e^l) over the first n units, from l and the two beliefs."""
    total, product = 0.0, 1.0
    for k in range(n):
        total += max(units[LOG_ODDS, k], np.float32(0.0))
        product *= max(units[ON, k], units[OFF, k])
        if k % 512 == 511:
            total, product = total - math.log(product), 1.0
    return total - math.log(product)


def _infer(
    a, factors, bv, bh, n_sweeps, tol, lv, lh, sweeps, change, log_z, m, c, d, v_units, h_units, small, pairs
):  # type: ignore[no-untyped-def]
    """All graphs of a batch, one after the other."""
    v, h = bv.shape[1], bh.shape[1]
    none, exponents = m[:0], h_units.view(np.int32)
    for n in range(len(bv)):
        start(v_units, bv[n], small)
        start(h_units, bh[n], small)
        m[:] = np.float32(1.0)
        for sweep in range(n_sweeps):
            last = len(pairs) > 0 and (tol >= 0 or sweep == n_sweeps - 1)
            small[MOVED] = np.float32(0.0)
            splits = _to_and_fro(a, m, d, v_units, h_units, small, factors, c if last else none)
            sweeps[n], change[n] = sweep + 1, small[MOVED].max()
            if change[n] <= tol:
                break
        lv[n], lh[n] = v_units[LOG_ODDS, :v], h_units[LOG_ODDS, :h]
        if len(pairs):
            total = _log_z(v_units, v) + _log_z(h_units, h)
            for j in range(h):
                total += math.log(h_units[_Z, j]) + math.log(2.0) * (exponents[_EZ, j] - BIAS * splits)
            log_z[n] = total
            for i in range(v):
                for j in range(h):
                    pairs[i, j] += h_units[ON, j] * c[i, j]


def _compiled(pairs: str) -> Any:
    scratch = [filled("f4", 2)] * 6
    return entry(given("f4", 2), types.int64, *INPUTS, *RESULTS, filled("f8", 1), *scratch, filled(pairs, 2))(
        _infer
    )


_BODIES = {"float32": _compiled("f4"), "float64": _compiled("f8")}


def sum_product(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """See :func:`..reference.sum_product`."""
    return _run(coupling, bv, bh, n_sweeps, tol, np.zeros((0, 0)))


def sum_product_pairs(
    coupling: Coupling,
    bv: np.ndarray,
    bh: np.ndarray,
    n_sweeps: int,
    tol: float | None,
    pairs: np.ndarray,
) -> Inference:
    """See :func:`..reference.sum_product_pairs`."""
    if pairs.shape != coupling.w.shape:
        raise ValueError(f"pairs of shape {pairs.shape} are wanted in the shape of W, {coupling.w.shape}")
    return _run(coupling, bv, bh, n_sweeps, tol, pairs)


def bethe(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> np.ndarray:
    """See :func:`..reference.bethe`."""
    return _run(coupling, bv, bh, n_sweeps, tol, np.zeros(coupling.w.shape, dtype=np.float32)).log_z


def _run(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None, pairs: np.ndarray
) -> Inference:
    bv, bh, limit = checked(coupling, bv, bh, n_sweeps, tol)
    found, a = unfilled(bv, bh), coupling.a
    log_z = np.empty(len(bv) if len(pairs) else 0)
    m = aligned(a.shape)
    # Where the last sweep is known beforehand its messages are wanted no more.
    c = m if tol is None else aligned(a.shape if len(pairs) else (0, 0))
    scratch = (
        m,
        c,
        aligned((ROWS, a.shape[1])),
        aligned((UNIT_FIELDS, len(a))),
        aligned((_EZ + 1, a.shape[1])),
        small_of(coupling.limit),
    )
    results = found.lv, found.lh, found.sweeps, found.change
    _BODIES[pairs.dtype.name](a, coupling.factors, bv, bh, n_sweeps, limit, *results, log_z, *scratch, pairs)
    return replace(found, log_z=log_z) if len(pairs) else found
