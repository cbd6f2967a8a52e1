"""Sum-product belief propagation at half a division an edge and sweep.

With A = exp(W), messages r = m(1)/m(0) as odds, and the sender's belief t = sigmoid(l), u = sigmoid(-l), a
message is r_new = (A t + r u) / (t + r u), r the opposite message on the same edge (division of the belief by
r gives the cavity). So a hidden unit's message is N / D with s = r u, N = A t + s, D = t + s, and what the
visible unit sends back is

    r' = (A x + y) / (x + y),    x = t_v D,  y = u_v N,

or, as t_v + u_v = 1,

    r' = (A t + s (A t_v + u_v)) / (t (A u_v + t_v) + s).

N / D itself is never needed, and neither is its log, since l_v = b + log prod N - log prod D; s takes the
place of r. Two messages share a division, by the product of what each is divided by. One sweep runs over W
in blocks of eight visible units: to them (``gather``), their beliefs (``update``), and back (``scatter``)
while everything still lies in the first-level cache and the next block is on its way to it. One matrix of
messages is stored. Sweeps go up and down in turn: the second-level cache holds what was used last.

Pair beliefs are P(v_i = 1 | h_j = 1) P(h_j = 1), and the former is A x / (A x + y): the last sweep leaves it
behind. The Bethe estimate is sum_i log Z_i + sum_j log Z_j + sum_ij log (x + y) / N, since each message to a
hidden unit belongs to the cavity it was made from: Z_ij = (1 + c_ij) Z_j with c the cavity's odds.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types

from scalelatent.kernels.arrays import aligned
from scalelatent.kernels.jit import entry, filled, given, part
from scalelatent.kernels.memory import empty, same_bytes
from scalelatent.kernels.vectors import BIAS, copy, largest
from scalelatent.models.crbm.kernels.inference import Inference

from .coupling import LINE, ROWS, WIDE, Coupling
from .edges import (
    GATHERED,
    HALF,
    damped_pairs,
    damped_scatter,
    gather,
    scatter,
    scatter_pairs,
    scatter_split,
    scatter_two,
)
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

# Rows of the scratch of the hidden units after those of every unit: products of messages, and of the Bethe
# factors, as mantissa and exponent.
_P, _E, _Z, _EZ = (UNIT_FIELDS + k for k in range(4))
_FIELDS = UNIT_FIELDS + 4
# Graphs that go through a sweep together, and bytes of all their messages: small graphs share a call, while
# large ones come one by one, since memory is their bound and they all use the same messages' place.
_GROUP, _GROUP_BYTES = 64, 2**17


@part
def _block(
    a: int, m: int, row: int, v_at: int, unit: int, h_at: int, small: int, factors: int,
    damping: np.float32 | None, c: int, next_a: int, next_m: int,
) -> None:  # fmt: skip
    """Eight visible units of one graph: messages to them, their beliefs, messages back. Addresses; the next
    block's A and messages are fetched. ``damping`` is None, or the weight of the messages back.
    """
    e, moved, limit = small + WIDE * EXPONENT, small + WIDE * MOVED, small + WIDE * LIMIT
    tv, uv, p, ep = v_at + ON * unit, v_at + OFF * unit, h_at + _P * row, h_at + _E * row
    th, uh, chunk = h_at + ON * row, h_at + OFF * row, LINE * factors
    for r in range(0, ROWS, GATHERED):
        at = r * row
        gather(a + at, m + at, row, th, uh, row, chunk, small + 4 * r, e + 4 * r)
    update(v_at, unit, small, e, 0, moved, limit)
    if damping is not None:
        for r in range(0, ROWS, 2):
            at, t, u, z, ez = r * row, tv + 4 * r, uv + 4 * r, h_at + _Z * row, h_at + _EZ * row
            if c:
                damped_pairs(a + at, m + at, row, th, t, u, row, p, ep, c + at, z, ez, uh, damping)
            else:
                damped_scatter(a + at, m + at, row, th, t, u, row, p, ep, uh, damping)
    elif c:
        for r in range(0, ROWS, 2):
            at, z, ez = r * row, h_at + _Z * row, h_at + _EZ * row
            scatter_pairs(a + at, m + at, row, th, tv + 4 * r, uv + 4 * r, row, p, ep, c + at, z, ez)
    elif factors >= HALF:
        for r in range(0, ROWS, HALF):
            at, t, u = r * row, tv + 4 * r, uv + 4 * r
            if r == 0 and factors >= ROWS:
                scatter(a + at, m + at, row, th, t, u, row, p, ep, next_a + at, next_m + at)
            else:
                scatter_split(a + at, m + at, row, th, t, u, row, p, ep, next_a + at, next_m + at)
    else:
        for r in range(0, ROWS, 2):
            at, t, u = r * row, tv + 4 * r, uv + 4 * r
            scatter_two(a + at, m + at, row, th, t, u, row, p, ep, next_a + at, next_m + at)


@part
def _to_and_fro(
    a: np.ndarray, m: np.ndarray, up: bool, v_units: np.ndarray, h_units: np.ndarray, small: np.ndarray,
    factors: int, damping: np.float32 | None, active: np.ndarray, c: np.ndarray,
) -> int:  # fmt: skip
    """One sweep of the active graphs of a group, ``up`` W or down; with matrices ``c`` it may be the last
    one. They share A: while a block of it is at hand all of them use it. Returns how often the columns'
    products were split.
    """
    row, unit, matrix, blocks = 4 * a.shape[1], 4 * v_units.shape[2], 4 * a.size, len(a) // ROWS
    a_at, m_at, c_at = a.ctypes.data, m.ctypes.data, c.ctypes.data if len(c) else 0
    v_at, h_at, scratch = v_units.ctypes.data, h_units.ctypes.data, small.ctypes.data
    h_step, scratch_step = _FIELDS * row, 4 * small[0].size
    for g in active:
        h_units[g, _P:] = np.float32(0.0)
        h_units[g, _P], h_units[g, _Z], small[g, MOVED] = np.float32(1.0), np.float32(1.0), np.float32(0.0)
    for k in range(blocks):
        i = blocks - 1 - k if up else k
        following = min(max(i - 1 if up else i + 1, 0), blocks - 1)
        for j in range(len(active)):
            g, at = active[j], i * ROWS * row
            last = j + 1 == len(active)
            g_next, at_next = active[0 if last else j + 1], (following if last else i) * ROWS * row
            _block(
                a_at + at,
                m_at + g * matrix + at,
                row,
                v_at + g * UNIT_FIELDS * unit + WIDE * i,
                unit,
                h_at + g * h_step,
                scratch + g * scratch_step,
                factors,
                damping,
                c_at + g * matrix + at if c_at else 0,
                a_at + at_next,
                m_at + g_next * matrix + at_next,
            )
    splits = HALF if c_at else (1 if factors >= ROWS else (2 if factors >= HALF else HALF))
    if damping is not None:
        splits = HALF
    splits *= blocks
    for g in active:
        h_here, here = h_at + g * h_step, scratch + g * scratch_step
        for j in range(0, row, WIDE):
            p, e = h_here + _P * row + j, h_here + _E * row + j
            update(h_here + j, row, p, e, BIAS * splits, here + WIDE * MOVED, here + WIDE * LIMIT)
    return splits


@part
def _log_z(units: np.ndarray, n: int) -> float:
    """Sum of log(1 + e^l) over the first n units, from l and the two beliefs."""
    total, product = 0.0, 1.0
    for k in range(n):
        total += max(units[LOG_ODDS, k], np.float32(0.0))
        product *= max(units[ON, k], units[OFF, k])
        if k % 512 == 511:
            total, product = total - math.log(product), 1.0
    return total - math.log(product)


@part
def _infer(
    a: np.ndarray, factors: int, damping: np.float32 | None, bv: np.ndarray, bh: np.ndarray, n_sweeps: int,
    tol: float, lv: np.ndarray, lh: np.ndarray, sweeps: np.ndarray, change: np.ndarray, log_z: np.ndarray,
    m: np.ndarray, v_units: np.ndarray, h_units: np.ndarray, small: np.ndarray,
) -> None:  # fmt: skip
    """A group of graphs. Where ``log_z`` is wanted P(v_i = 1 | h_j = 1) takes the place of the messages in
    the last sweep, which is one more for graphs that have met ``tol``.
    """
    rows, v, h, with_pairs = len(bv), bv.shape[1], bh.shape[1], len(log_z) > 0
    none, exponents = m[:0], same_bytes(h_units, np.int32)
    active, met = empty(rows, np.int64), empty(rows, np.int64)
    splits = 0
    for n in range(rows):
        active[n] = n
        start(v_units[n], bv[n], small[n])
        start(h_units[n], bh[n], small[n])
        m[n] = np.float32(1.0)
    for sweep in range(n_sweeps):
        last = with_pairs and sweep == n_sweeps - 1
        up, here = sweep % 2 == 1, m if last else none
        splits = _to_and_fro(a, m, up, v_units, h_units, small, factors, damping, active, here)
        left = ended = 0
        for g in active:
            sweeps[g], change[g] = sweep + 1, largest(small[g, MOVED])
            if damping is not None:
                change[g] /= damping
            if not change[g] <= tol:
                active[left] = g
                left += 1
            elif with_pairs and not last:
                sweeps[g], met[ended] = sweep + 2, g
                ended += 1
        if ended:
            splits = _to_and_fro(a, m, not up, v_units, h_units, small, factors, damping, met[:ended], m)
        active = active[:left]
        if left == 0:
            break
    for n in range(rows):
        copy(v_units[n, LOG_ODDS], lv[n])
        copy(h_units[n, LOG_ODDS], lh[n])
        if with_pairs:
            total = _log_z(v_units[n], v) + _log_z(h_units[n], h)
            for j in range(h):
                power = exponents[n, _EZ, j] - BIAS * splits
                total += math.log(h_units[n, _Z, j]) + math.log(2.0) * power
            log_z[n] = total


@part
def _add_pairs(c: np.ndarray, h_units: np.ndarray, pairs: np.ndarray) -> None:
    """Add the pair beliefs of a group's graphs, in their order."""
    for i in range(pairs.shape[0]):
        for n in range(len(c)):
            for j in range(pairs.shape[1]):
                pairs[i, j] += h_units[n, ON, j] * c[n, i, j]


def _infer_all(
    a: np.ndarray, factors: int, damping: np.float32 | None, bv: np.ndarray, bh: np.ndarray, n_sweeps: int,
    tol: float, lv: np.ndarray, lh: np.ndarray, sweeps: np.ndarray, change: np.ndarray, log_z: np.ndarray,
    pairs: np.ndarray, m: np.ndarray, v_units: np.ndarray, h_units: np.ndarray, small: np.ndarray,
) -> None:  # fmt: skip
    """Group after group; where there are ``log_z``, pair beliefs are added to ``pairs``."""
    for first in range(0, len(bv), len(m)):
        part = slice(first, min(first + len(m), len(bv)))
        _infer(
            a, factors, damping, bv[part], bh[part], n_sweeps, tol,
            lv[part], lh[part], sweeps[part], change[part], log_z[part], m, v_units, h_units, small,
        )  # fmt: skip
        if len(log_z) > 0:
            _add_pairs(m[: part.stop - first], h_units, pairs)


# By the type of the pairs, and whether messages are damped: what a fit does not need is not compiled.
_INFER = {
    (name, damped): entry(
        *(given("f4", 2), types.int64, types.float32 if damped else types.none, *INPUTS, *RESULTS),
        *(filled("f8", 1), filled(name, 2), *[filled("f4", 3)] * 4),
    )(_infer_all)
    for name in (np.dtype("f4").name, np.dtype("f8").name)
    for damped in (False, True)
}
_NO_PAIRS = np.empty((0, 0), dtype=np.float32)


def sum_product(
    coupling: Coupling,
    bv: np.ndarray,
    bh: np.ndarray,
    n_sweeps: int,
    tol: float | None = None,
    damping: float = 1.0,
) -> Inference:
    return _run(coupling, bv, bh, n_sweeps, tol, None, damping)


def sum_product_pairs(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None, pairs: np.ndarray,
    damping: float = 1.0,
) -> Inference:  # fmt: skip
    if pairs.shape != coupling.w.shape:
        raise ValueError(f"pairs of shape {pairs.shape} are wanted in the shape of W, {coupling.w.shape}")
    return _run(coupling, bv, bh, n_sweeps, tol, pairs, damping)


def bethe(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> np.ndarray:
    log_z = _run(coupling, bv, bh, n_sweeps, tol, np.zeros(coupling.w.shape, dtype=np.float32)).log_z
    assert log_z is not None
    return log_z


def _run(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None,
    pairs: np.ndarray | None, damping: float = 1.0,
) -> Inference:  # fmt: skip
    bv, bh, limit = checked(coupling, bv, bh, n_sweeps, tol, damping)
    results, a, rows = unfilled(bv, bh), coupling.a, len(bv)
    log_z = np.empty(0 if pairs is None else rows)
    group = max(1, min(_GROUP, rows, _GROUP_BYTES // a.nbytes))
    m = aligned((group, *a.shape))
    v_units, h_units = aligned((group, UNIT_FIELDS, len(a))), aligned((group, _FIELDS, a.shape[1]))
    added = _NO_PAIRS if pairs is None else pairs
    damped = damping != 1
    _INFER[added.dtype.name, damped](
        *(a, coupling.factors, np.float32(damping) if damped else None, bv, bh, n_sweeps, limit),
        *(*results, log_z, added),
        *(m, v_units, h_units, small_of(coupling.limit, group)),
    )
    return Inference(*results, None if pairs is None else log_z)
