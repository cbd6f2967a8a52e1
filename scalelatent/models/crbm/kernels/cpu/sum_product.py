"""Sum-product belief propagation with half a division per edge and sweep.

Let A = exp(W), let a message r = m(1)/m(0) be odds, and let t = sigmoid(l) and u = sigmoid(-l) be the beliefs
of the sender. Then a new message is (A t + r u) / (t + r u), where r is the opposite message on the same
edge: dividing the belief by r gives the cavity. A hidden unit's message is N / D with s = r u, N = A t + s
and D = t + s. The visible unit sends back

    r' = (A x + y) / (x + y),    x = t_v D,  y = u_v N,

or, because t_v + u_v = 1,

    r' = (A t + s (A t_v + u_v)) / (t (A u_v + t_v) + s).

Neither N / D nor its log is computed, because l_v = b + log prod N - log prod D; s is stored in the place of
r. Two messages share a division through the product of their divisors.

A sweep takes these steps:

1. Take the next block of eight visible units. Odd sweeps go up, even sweeps down: the second-level cache then
   holds the rows that were used last.
2. ``gather``: replace the messages of the block by s, and multiply all N / D of each visible unit.
3. ``update_by_product``: compute the beliefs of the block's units.
4. ``scatter``: send messages back while the block is in the first-level cache, and fetch the next block.
5. After the last block, update the hidden units by the products of their messages.

Pair beliefs are P(v_i = 1 | h_j = 1) P(h_j = 1), and the first factor is A x / (A x + y), which the last
sweep stores in the place of the messages. The Bethe estimate is sum_i log Z_i + sum_j log Z_j + sum_ij log (x
+ y) / N, because each message to a hidden unit belongs to the cavity from which it was computed: Z_ij = (1 +
c_ij) Z_j, where c_ij are the odds of the cavity.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types

from scalelatent.kernels.arrays import aligned_empty
from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.memory import empty, same_bytes
from scalelatent.kernels.vectors import BIAS, copy_vector, find_largest
from scalelatent.models.crbm.kernels.inference import PRODUCT_UNITS, Inference, check_pairs

from .coupling import LINE_BYTES, ROWS, UNIT_BYTES, Coupling
from .edges import GATHERED, HALF, gather, scatter, scatter_pairs, scatter_split, scatter_two
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
    allocate_results,
    check_inputs,
    make_scratch,
    start_units,
    update_by_product,
)

# Rows of the array of hidden units, after the rows that visible units have as well: mantissa and exponent of
# the product of the messages, and mantissa and exponent of the product of the Bethe factors.
_P, _E, _Z, _EZ = (UNIT_FIELDS + k for k in range(4))
_FIELDS = UNIT_FIELDS + 4
# Upper bounds of a group of graphs that are swept together: number of graphs, and bytes of their messages. A
# group of large graphs has one graph, and all groups use the same memory for messages, because memory limits
# the speed of large graphs.
_GROUP, _GROUP_BYTES = 64, 2**17


@subkernel
def _update_block(
    a: int, m: int, row: int, v_at: int, unit: int, h_at: int, small: int, factors: int, c: int, next_a: int,
    next_m: int,
) -> None:  # fmt: skip
    """Send messages to eight visible units of one graph, compute their beliefs, and send messages back.

    All arguments are addresses, with three exceptions: ``row`` and ``unit`` are the bytes of a row of hidden
    and of visible units, and ``factors`` is the number of messages that are multiplied before mantissa and
    exponent are split. If the address ``c`` is not 0, P(v_i = 1 | h_j = 1) is written there. The next block,
    at ``next_a`` and ``next_m``, is fetched into the cache.
    """
    e, moved, limit = small + UNIT_BYTES * EXPONENT, small + UNIT_BYTES * MOVED, small + UNIT_BYTES * LIMIT
    tv, uv, p, ep = v_at + ON * unit, v_at + OFF * unit, h_at + _P * row, h_at + _E * row
    th, uh, chunk = h_at + ON * row, h_at + OFF * row, LINE_BYTES * factors
    for r in range(0, ROWS, GATHERED):
        at = r * row
        gather(a + at, m + at, row, th, uh, row, chunk, small + 4 * r, e + 4 * r)
    update_by_product(v_at, unit, small, e, 0, moved, limit)
    if c:
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


@subkernel
def _sweep(
    a: np.ndarray, m: np.ndarray, up: bool, v_units: np.ndarray, h_units: np.ndarray, small: np.ndarray,
    factors: int, active: np.ndarray, c: np.ndarray,
) -> int:  # fmt: skip
    """Sweep once over the active graphs of a group; return the number of splits of each column's product.

    A split divides a product into mantissa and exponent. All graphs use a block of exp(W) while it is in the
    cache. ``c`` is empty, or receives P(v_i = 1 | h_j = 1).
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
            _update_block(
                a_at + at,
                m_at + g * matrix + at,
                row,
                v_at + g * UNIT_FIELDS * unit + UNIT_BYTES * i,
                unit,
                h_at + g * h_step,
                scratch + g * scratch_step,
                factors,
                c_at + g * matrix + at if c_at else 0,
                a_at + at_next,
                m_at + g_next * matrix + at_next,
            )
    splits = blocks * (HALF if c_at else (1 if factors >= ROWS else (2 if factors >= HALF else HALF)))
    for g in active:
        h_here, here = h_at + g * h_step, scratch + g * scratch_step
        moved, limit = here + UNIT_BYTES * MOVED, here + UNIT_BYTES * LIMIT
        for j in range(0, row, UNIT_BYTES):
            update_by_product(
                h_here + j, row, h_here + _P * row + j, h_here + _E * row + j, BIAS * splits, moved, limit
            )
    return splits


@subkernel
def _sum_log_partitions(units: np.ndarray, n: int) -> float:
    """Return the sum of log(1 + e^l) over the log odds l of the first n units."""
    total, product = 0.0, 1.0
    for k in range(n):
        total += max(units[LOG_ODDS, k], np.float32(0.0))
        product *= max(units[ON, k], units[OFF, k])
        if k % PRODUCT_UNITS == PRODUCT_UNITS - 1:
            total, product = total - math.log(product), 1.0
    return total - math.log(product)


@subkernel
def _infer_group(
    a: np.ndarray, factors: int, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float, lv: np.ndarray,
    lh: np.ndarray, sweeps: np.ndarray, change: np.ndarray, log_z: np.ndarray, m: np.ndarray,
    v_units: np.ndarray, h_units: np.ndarray, small: np.ndarray,
) -> None:  # fmt: skip
    """Run sum-product on the graphs of one group; write log odds, sweeps, changes and log Z.

    If ``log_z`` is not empty, the last sweep replaces the messages by P(v_i = 1 | h_j = 1). A graph that has
    met ``tol`` then takes one more sweep.
    """
    rows, v, h, with_pairs = len(bv), bv.shape[1], bh.shape[1], len(log_z) > 0
    none, exponents = m[:0], same_bytes(h_units, np.int32)
    active, met = empty(rows, np.int64), empty(rows, np.int64)
    splits = 0
    for n in range(rows):
        active[n] = n
        start_units(v_units[n], bv[n], small[n])
        start_units(h_units[n], bh[n], small[n])
        m[n] = np.float32(1.0)
    for sweep in range(n_sweeps):
        last = with_pairs and sweep == n_sweeps - 1
        up, here = sweep % 2 == 1, m if last else none
        splits = _sweep(a, m, up, v_units, h_units, small, factors, active, here)
        left = ended = 0
        for g in active:
            sweeps[g], change[g] = sweep + 1, find_largest(small[g, MOVED])
            if not change[g] <= tol:
                active[left] = g
                left += 1
            elif with_pairs and not last:
                sweeps[g], met[ended] = sweep + 2, g
                ended += 1
        if ended:
            splits = _sweep(a, m, not up, v_units, h_units, small, factors, met[:ended], m)
        active = active[:left]
        if left == 0:
            break
    for n in range(rows):
        copy_vector(v_units[n, LOG_ODDS], lv[n])
        copy_vector(h_units[n, LOG_ODDS], lh[n])
        if with_pairs:
            total = _sum_log_partitions(v_units[n], v) + _sum_log_partitions(h_units[n], h)
            for j in range(h):
                power = exponents[n, _EZ, j] - BIAS * splits
                total += math.log(h_units[n, _Z, j]) + math.log(2.0) * power
            log_z[n] = total


@subkernel
def _add_pairs(c: np.ndarray, h_units: np.ndarray, pairs: np.ndarray) -> None:
    """Add P(v_i = 1, h_j = 1) of each graph of a group to ``pairs``, in the order of the graphs."""
    for i in range(pairs.shape[0]):
        for n in range(len(c)):
            for j in range(pairs.shape[1]):
                pairs[i, j] += h_units[n, ON, j] * c[n, i, j]


def _infer(
    a: np.ndarray, factors: int, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float, lv: np.ndarray,
    lh: np.ndarray, sweeps: np.ndarray, change: np.ndarray, log_z: np.ndarray, pairs: np.ndarray,
    m: np.ndarray, v_units: np.ndarray, h_units: np.ndarray, small: np.ndarray,
) -> None:  # fmt: skip
    """Run sum-product on all graphs, one group of graphs after another.

    Log Z and pair beliefs are requested together: if ``log_z`` is not empty, it is written, and the pair
    beliefs are added to ``pairs``.
    """
    for first in range(0, len(bv), len(m)):
        part = slice(first, min(first + len(m), len(bv)))
        _infer_group(
            a, factors, bv[part], bh[part], n_sweeps, tol, lv[part], lh[part], sweeps[part], change[part],
            log_z[part], m, v_units, h_units, small,
        )  # fmt: skip
        if len(log_z) > 0:
            _add_pairs(m[: part.stop - first], h_units, pairs)


# One compiled function for each dtype of the pair beliefs.
_INFER_BY_DTYPE = {
    name: entry(
        *(in_array("f4", 2), types.int64, *INPUTS, *RESULTS),
        *(out_array("f8", 1), out_array(name, 2), *[out_array("f4", 3)] * 4),
    )(_infer)
    for name in (np.dtype("f4").name, np.dtype("f8").name)
}


def sum_product(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None = None
) -> Inference:
    """Approximate the marginals of all units by sum-product belief propagation; exact on trees."""
    return _run(coupling, bv, bh, n_sweeps, tol, None)


def sum_product_pairs(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None, pairs: np.ndarray
) -> Inference:
    """Run :func:`sum_product`, add the pair beliefs of all rows to ``pairs``, (v, h), and estimate log Z."""
    check_pairs(pairs.shape, coupling.w.shape)
    return _run(coupling, bv, bh, n_sweeps, tol, pairs)


def _run(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None,
    pairs: np.ndarray | None,
) -> Inference:  # fmt: skip
    bv, bh, limit = check_inputs(coupling, bv, bh, n_sweeps, tol)
    results, a, rows = allocate_results(bv, bh), coupling.a, len(bv)
    log_z = np.empty(0 if pairs is None else rows)
    group = max(1, min(_GROUP, rows, _GROUP_BYTES // a.nbytes))
    m = aligned_empty((group, *a.shape))
    v_units, h_units = (
        aligned_empty((group, UNIT_FIELDS, len(a))),
        aligned_empty((group, _FIELDS, a.shape[1])),
    )
    added = np.empty((0, 0), dtype=np.float32) if pairs is None else pairs
    _INFER_BY_DTYPE[added.dtype.name](
        *(a, coupling.factors, bv, bh, n_sweeps, limit, *results, log_z, added),
        *(m, v_units, h_units, make_scratch(coupling.limit, group)),
    )
    return Inference(*results, None if pairs is None else log_z)
