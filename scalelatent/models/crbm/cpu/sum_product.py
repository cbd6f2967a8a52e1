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
_FIELDS = UNIT_FIELDS + 4
# Graphs that go through a sweep together, and bytes of all their messages: small graphs share a call, while
# large ones come one by one, since memory is their bound and they all use the same messages' place.
_GROUP, _GROUP_BYTES = 64, 2**17


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
def _block(a, m, d, row, v_at, unit, h_at, small, factors, c):  # type: ignore[no-untyped-def]
    """Eight visible units of one graph: messages to them, their beliefs, messages back. Addresses."""
    half, four = _HALF * row, 4 * _HALF
    e, moved, limit = small + WIDE * EXPONENT, small + WIDE * MOVED, small + WIDE * LIMIT
    tv, uv, p, ep = v_at + ON * unit, v_at + OFF * unit, h_at + _P * row, h_at + _E * row
    th, uh, chunk = h_at + ON * row, h_at + OFF * row, WIDE * factors
    for k in range(2):
        _gather(
            a + k * half, m + k * half, d + k * half, row, th, uh, row, chunk, small + k * four, e + k * four
        )
    update(v_at, unit, small, e, 0, moved, limit)
    if c:
        for r in range(ROWS):
            at, z, ez = r * row, h_at + _Z * row, h_at + _EZ * row
            _scatter_pairs(a + at, m + at, d + at, tv + 4 * r, uv + 4 * r, row, p, ep, c + at, z, ez)
    elif factors >= _HALF:
        for k in range(2):
            at, t, u = k * half, tv + k * four, uv + k * four
            if k == 0 and factors >= ROWS:
                _scatter(a + at, m + at, d + at, row, t, u, row, p, ep)
            else:
                _scatter_split(a + at, m + at, d + at, row, t, u, row, p, ep)
    else:
        for r in range(0, ROWS, 2):
            at, t, u = r * row, tv + 4 * r, uv + 4 * r
            _scatter_two(a + at, m + at, d + at, row, t, u, row, p, ep)


@kernel
def _to_and_fro(a, m, d, v_units, h_units, small, factors, active, c):  # type: ignore[no-untyped-def]
    """One sweep of the active graphs of a group; with matrices ``c`` it may be the last one. They share A:
    while a block of it is at hand all of them use it. Returns how often the columns' products were split.
    """
    row, unit, matrix = 4 * a.shape[1], 4 * v_units.shape[2], 4 * a.size
    with_pairs = len(c) > 0
    a_at, m_at, c_at = a.ctypes.data, m.ctypes.data, c.ctypes.data
    for g in active:
        h_units[g, _P:] = np.float32(0.0)
        h_units[g, _P], h_units[g, _Z], small[g, MOVED] = np.float32(1.0), np.float32(1.0), np.float32(0.0)
    for i in range(len(a) // ROWS):
        at = i * ROWS * row
        for g in active:
            _block(
                a_at + at,
                m_at + g * matrix + at,
                d.ctypes.data,
                row,
                v_units.ctypes.data + g * UNIT_FIELDS * unit + WIDE * i,
                unit,
                h_units.ctypes.data + g * _FIELDS * row,
                small[g].ctypes.data,
                factors,
                c_at + g * matrix + at if with_pairs else 0,
            )
    splits = ROWS if with_pairs else (1 if factors >= ROWS else (2 if factors >= _HALF else _HALF))
    splits *= len(a) // ROWS
    for g in active:
        h_at, scratch = h_units.ctypes.data + g * _FIELDS * row, small[g].ctypes.data
        for j in range(0, row, WIDE):
            p, e = h_at + _P * row + j, h_at + _E * row + j
            moved, limit = scratch + WIDE * MOVED, scratch + WIDE * LIMIT
            update(h_at + j, row, p, e, BIAS * splits, moved, limit)
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


@entry(
    given("f4", 2),
    types.int64,
    *INPUTS,
    *RESULTS,
    filled("f8", 1),
    filled("f4", 3),
    filled("f4", 3),
    filled("f4", 2),
    *[filled("f4", 3)] * 3,
)
def _infer(
    a, factors, bv, bh, n_sweeps, tol, lv, lh, sweeps, change, log_z, m, c, d, v_units, h_units, small
):  # type: ignore[no-untyped-def]
    """A group of graphs; where ``log_z`` is wanted ``c`` becomes P(v_i = 1 | h_j = 1)."""
    rows, v, h, with_pairs = len(bv), bv.shape[1], bh.shape[1], len(log_z) > 0
    none, exponents = c[:0], h_units.view(np.int32)
    active = np.arange(rows)
    for n in range(rows):
        start(v_units[n], bv[n], small[n])
        start(h_units[n], bh[n], small[n])
        m[n] = np.float32(1.0)
    for sweep in range(n_sweeps):
        last = with_pairs and (tol >= 0 or sweep == n_sweeps - 1)
        splits = _to_and_fro(a, m, d, v_units, h_units, small, factors, active, c if last else none)
        left = 0
        for g in active:
            sweeps[g], change[g] = sweep + 1, small[g, MOVED].max()
            if not change[g] <= tol:
                active[left] = g
                left += 1
        active = active[:left]
        if left == 0:
            break
    for n in range(rows):
        lv[n], lh[n] = v_units[n, LOG_ODDS, :v], h_units[n, LOG_ODDS, :h]
        if with_pairs:
            total = _log_z(v_units[n], v) + _log_z(h_units[n], h)
            for j in range(h):
                power = exponents[n, _EZ, j] - BIAS * splits
                total += math.log(h_units[n, _Z, j]) + math.log(2.0) * power
            log_z[n] = total


def _add_pairs(c, h_units, pairs):  # type: ignore[no-untyped-def]
    """Add the pair beliefs of a group's graphs, in their order."""
    for i in range(pairs.shape[0]):
        for n in range(len(c)):
            for j in range(pairs.shape[1]):
                pairs[i, j] += h_units[n, ON, j] * c[n, i, j]


_ADD = {
    name: entry(given("f4", 3), given("f4", 3), filled(name, 2))(_add_pairs)
    for name in (np.dtype("f4").name, np.dtype("f8").name)
}


def sum_product(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """See :func:`..reference.sum_product`."""
    return _run(coupling, bv, bh, n_sweeps, tol, None)


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
    coupling: Coupling,
    bv: np.ndarray,
    bh: np.ndarray,
    n_sweeps: int,
    tol: float | None,
    pairs: np.ndarray | None,
) -> Inference:
    bv, bh, limit = checked(coupling, bv, bh, n_sweeps, tol)
    found, a, rows = unfilled(bv, bh), coupling.a, len(bv)
    log_z = np.empty(0 if pairs is None else rows)
    group = max(1, min(_GROUP, rows, _GROUP_BYTES // a.nbytes))
    m = aligned((group, *a.shape))
    # Where the last sweep is known beforehand its messages are wanted no more.
    c = m if tol is None or pairs is None else aligned(m.shape)
    d = aligned((ROWS, a.shape[1]))
    v_units, h_units = aligned((group, UNIT_FIELDS, len(a))), aligned((group, _FIELDS, a.shape[1]))
    scratch = m, c, d, v_units, h_units, small_of(coupling.limit, group)
    add_pairs = None if pairs is None else _ADD[pairs.dtype.name]
    for first in range(0, rows, group):
        part = slice(first, first + group)
        results = (out[part] for out in (found.lv, found.lh, found.sweeps, found.change, log_z))
        _infer(a, coupling.factors, bv[part], bh[part], n_sweeps, limit, *results, *scratch)
        if add_pairs is not None:
            add_pairs(c[: rows - first], h_units, pairs)
    return found if pairs is None else replace(found, log_z=log_z)
