"""Sum-product belief propagation with half a division per edge and sweep (round of messages over all edges).

Let A = exp(W), let a message r = m(1)/m(0) be odds, and let t = sigmoid(l) and u = sigmoid(-l) be the beliefs
that the sender, a unit with log odds l, is 1 or 0. Then a new message is (A t + r u) / (t + r u), where r is
the message that the sender received along the same edge: dividing the belief by r removes the effect of this
message, which leaves the cavity. A hidden unit's message is N / D with s = r u, N = A t + s and D = t + s.
The visible unit, whose beliefs are t_v and u_v, sends back

    r' = (A x + y) / (x + y),    x = t_v D,  y = u_v N,

or, because t_v + u_v = 1,

    r' = (A t + s (A t_v + u_v)) / (t (A u_v + t_v) + s).

Neither N / D nor its log is computed, because l_v = bias + log prod N - log prod D; s is stored in the place
of r. Two messages share a division through the product of their divisors.

A sweep takes these steps:

1. Take the next eight visible units. The first sweep goes down the rows, the next one up, and so on, so that
   each sweep starts with the rows that the second-level cache still holds.
2. ``gather``: replace the messages to these units by s, and multiply all N / D of each unit.
3. ``update_by_product``: compute the beliefs of these units.
4. ``scatter``: send messages back while the rows are in the first-level cache; fetch the next rows.
5. After the last visible units, update the hidden units by the products of their messages.

Pair beliefs P(v_i = 1, h_j = 1) are P(v_i = 1 | h_j = 1) P(h_j = 1). The first factor is A x / (A x + y),
which the last sweep stores in the place of the messages. The Bethe estimate of log Z is
sum_i log Z_i + sum_j log Z_j + sum_ij log (x + y) / N, where Z_i = 1 + exp(l_i) with the log odds l_i.
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
# the product of the messages to a unit, and mantissa and exponent of its factor of the Bethe estimate.
_PRODUCT, _EXPONENT, _BETHE, _BETHE_EXPONENT = (UNIT_FIELDS + k for k in range(4))
_FIELDS = UNIT_FIELDS + 4
# Graphs are inferred in groups of at most this many graphs, whose messages have at most this many bytes (a
# larger graph is a group alone). The groups use the same memory for messages, so that it stays in the cache.
_GROUP, _GROUP_BYTES = 64, 2**17


@subkernel
def _update_block(
    exp_w: int, messages: int, row: int, v_at: int, unit: int, h_at: int, small: int, factors: int,
    given_h: int, next_exp_w: int, next_messages: int,
) -> None:  # fmt: skip
    """Send messages to eight visible units of one graph, compute their beliefs, and send messages back.

    All arguments are addresses, with three exceptions: ``row`` and ``unit`` are the bytes of a row of hidden
    and of visible units, and ``factors`` is the number of messages that are multiplied before mantissa and
    exponent are split. P(v_i = 1 | h_j = 1) is written to ``given_h``, unless this address is 0. The rows of
    the next eight visible units are fetched into the cache.
    """
    powers, moved = small + UNIT_BYTES * EXPONENT, small + UNIT_BYTES * MOVED
    v_on, v_off, limit = v_at + ON * unit, v_at + OFF * unit, small + UNIT_BYTES * LIMIT
    h_on, h_off, chunk = h_at + ON * row, h_at + OFF * row, LINE_BYTES * factors
    products = h_at + _PRODUCT * row, h_at + _EXPONENT * row
    for r in range(0, ROWS, GATHERED):
        w, m = exp_w + r * row, messages + r * row
        gather(w, m, row, h_on, h_off, row, chunk, small + 4 * r, powers + 4 * r)
    update_by_product(v_at, unit, small, powers, 0, moved, limit)
    if given_h:
        for r in range(0, ROWS, 2):
            w, m, t, u = exp_w + r * row, messages + r * row, v_on + 4 * r, v_off + 4 * r
            bethe, bethe_powers = h_at + _BETHE * row, h_at + _BETHE_EXPONENT * row
            scatter_pairs(w, m, row, h_on, t, u, row, *products, given_h + r * row, bethe, bethe_powers)
    elif factors >= HALF:
        for r in range(0, ROWS, HALF):
            w, m, t, u = exp_w + r * row, messages + r * row, v_on + 4 * r, v_off + 4 * r
            following = next_exp_w + r * row, next_messages + r * row
            if r == 0 and factors >= ROWS:
                scatter(w, m, row, h_on, t, u, row, *products, *following)
            else:
                scatter_split(w, m, row, h_on, t, u, row, *products, *following)
    else:
        for r in range(0, ROWS, 2):
            w, m, t, u = exp_w + r * row, messages + r * row, v_on + 4 * r, v_off + 4 * r
            following = next_exp_w + r * row, next_messages + r * row
            scatter_two(w, m, row, h_on, t, u, row, *products, *following)


@subkernel
def _sweep(
    exp_w: np.ndarray, m: np.ndarray, up: bool, v_units: np.ndarray, h_units: np.ndarray, small: np.ndarray,
    factors: int, active: np.ndarray, given_h: np.ndarray,
) -> int:  # fmt: skip
    """Send each message of the active graphs of a group once, and update their units (a sweep).

    All graphs use eight rows of exp(W) while these are in the cache; with ``up``, the last eight rows come
    first. ``small`` is the scratch space of `make_scratch` for each graph. ``given_h`` is empty, or receives
    P(v_i = 1 | h_j = 1). Return how often each product of messages to a hidden unit was split into mantissa
    and exponent, because each split adds `BIAS` to the stored exponent, which the reader subtracts.
    """
    row, unit, matrix, blocks = 4 * exp_w.shape[1], 4 * v_units.shape[2], 4 * exp_w.size, len(exp_w) // ROWS
    w_at, m_at, given_at = exp_w.ctypes.data, m.ctypes.data, given_h.ctypes.data if len(given_h) else 0
    v_at, h_at, scratch = v_units.ctypes.data, h_units.ctypes.data, small.ctypes.data
    h_step, scratch_step = _FIELDS * row, 4 * small[0].size
    for g in active:
        h_units[g, _PRODUCT:], small[g, MOVED] = np.float32(0.0), np.float32(0.0)
        h_units[g, _PRODUCT], h_units[g, _BETHE] = np.float32(1.0), np.float32(1.0)
    for k in range(blocks):
        i = blocks - 1 - k if up else k
        following = min(max(i - 1 if up else i + 1, 0), blocks - 1)
        for j in range(len(active)):
            g, here = active[j], i * ROWS * row
            last = j + 1 == len(active)
            g_next, next_here = active[0 if last else j + 1], (following if last else i) * ROWS * row
            _update_block(
                w_at + here,
                m_at + g * matrix + here,
                row,
                v_at + g * UNIT_FIELDS * unit + UNIT_BYTES * i,
                unit,
                h_at + g * h_step,
                scratch + g * scratch_step,
                factors,
                given_at + g * matrix + here if given_at else 0,
                w_at + next_here,
                m_at + g_next * matrix + next_here,
            )
    splits = blocks * (HALF if given_at else (1 if factors >= ROWS else (2 if factors >= HALF else HALF)))
    for g in active:
        units, here = h_at + g * h_step, scratch + g * scratch_step
        moved, limit = here + UNIT_BYTES * MOVED, here + UNIT_BYTES * LIMIT
        for j in range(0, row, UNIT_BYTES):
            products = units + _PRODUCT * row + j, units + _EXPONENT * row + j
            update_by_product(units + j, row, *products, BIAS * splits, moved, limit)
    return splits


@subkernel
def _sum_log_partitions(units: np.ndarray, n: int) -> float:
    """Return the sum of log(1 + e^l) over the log odds l of the first ``n`` units."""
    total, product = 0.0, 1.0
    for k in range(n):
        total += max(units[LOG_ODDS, k], np.float32(0.0))
        product *= max(units[ON, k], units[OFF, k])
        if k % PRODUCT_UNITS == PRODUCT_UNITS - 1:
            total, product = total - math.log(product), 1.0
    return total - math.log(product)


@subkernel
def _infer_group(
    exp_w: np.ndarray, factors: int, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float,
    lv: np.ndarray, lh: np.ndarray, sweeps: np.ndarray, change: np.ndarray, log_z: np.ndarray, m: np.ndarray,
    v_units: np.ndarray, h_units: np.ndarray, small: np.ndarray,
) -> None:  # fmt: skip
    """Run sum-product on the graphs of one group; write log odds, sweeps, changes and log Z.

    A graph stops after the sweep (round of messages) in which no P(unit = 1) changed by more than ``tol``. If
    ``log_z`` is not empty, one more sweep (or the last) replaces its messages ``m`` by P(v_i = 1 | h_j = 1).
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
        splits = _sweep(exp_w, m, up, v_units, h_units, small, factors, active, here)
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
            splits = _sweep(exp_w, m, not up, v_units, h_units, small, factors, met[:ended], m)
        active = active[:left]
        if left == 0:
            break
    for n in range(rows):
        copy_vector(v_units[n, LOG_ODDS], lv[n])
        copy_vector(h_units[n, LOG_ODDS], lh[n])
        if with_pairs:
            total = _sum_log_partitions(v_units[n], v) + _sum_log_partitions(h_units[n], h)
            for j in range(h):
                power = exponents[n, _BETHE_EXPONENT, j] - BIAS * splits
                total += math.log(h_units[n, _BETHE, j]) + math.log(2.0) * power
            log_z[n] = total


@subkernel
def _add_pairs(given_h: np.ndarray, h_units: np.ndarray, pairs: np.ndarray) -> None:
    """Add P(v_i = 1, h_j = 1) of each graph of a group to ``pairs``; ``given_h`` is P(v_i = 1 | h_j = 1)."""
    for i in range(pairs.shape[0]):
        for n in range(len(given_h)):
            for j in range(pairs.shape[1]):
                pairs[i, j] += h_units[n, ON, j] * given_h[n, i, j]


def _infer(
    exp_w: np.ndarray, factors: int, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float,
    lv: np.ndarray, lh: np.ndarray, sweeps: np.ndarray, change: np.ndarray, log_z: np.ndarray,
    pairs: np.ndarray, m: np.ndarray, v_units: np.ndarray, h_units: np.ndarray, small: np.ndarray,
) -> None:  # fmt: skip
    """Run sum-product on all graphs, one group of graphs after another.

    If ``log_z`` is not empty, log Z is written there, and P(v_i = 1, h_j = 1) is added to ``pairs``.
    """
    for first in range(0, len(bv), len(m)):
        part = slice(first, min(first + len(m), len(bv)))
        _infer_group(
            exp_w, factors, bv[part], bh[part], n_sweeps, tol, lv[part], lh[part], sweeps[part], change[part],
            log_z[part], m, v_units, h_units, small,
        )  # fmt: skip
        if len(log_z) > 0:
            _add_pairs(m[: part.stop - first], h_units, pairs)


# One compiled function for each dtype of the sums of P(v_i = 1, h_j = 1).
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
    """Approximate P(unit = 1) of all units by sum-product belief propagation, which is exact on trees."""
    return _run(coupling, bv, bh, n_sweeps, tol, None)


def sum_product_pairs(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None, pairs: np.ndarray
) -> Inference:
    """Run sum-product, add P(v_i = 1, h_j = 1) of all rows to ``pairs``, and estimate log Z of each row."""
    check_pairs(pairs.shape, coupling.w.shape)
    return _run(coupling, bv, bh, n_sweeps, tol, pairs)


def _run(
    coupling: Coupling, bv: np.ndarray, bh: np.ndarray, n_sweeps: int, tol: float | None,
    pairs: np.ndarray | None,
) -> Inference:  # fmt: skip
    bv, bh, limit = check_inputs(coupling, bv, bh, n_sweeps, tol)
    results, exp_w, rows = allocate_results(bv, bh), coupling.exp_w, len(bv)
    log_z = np.empty(0 if pairs is None else rows)
    group = max(1, min(_GROUP, rows, _GROUP_BYTES // exp_w.nbytes))
    m = aligned_empty((group, *exp_w.shape))
    v_units = aligned_empty((group, UNIT_FIELDS, len(exp_w)))
    h_units = aligned_empty((group, _FIELDS, exp_w.shape[1]))
    added = np.empty((0, 0), dtype=np.float32) if pairs is None else pairs
    _INFER_BY_DTYPE[added.dtype.name](
        *(exp_w, coupling.factors, bv, bh, n_sweeps, limit, *results, log_z, added),
        *(m, v_units, h_units, make_scratch(coupling.limit, group)),
    )
    return Inference(*results, None if pairs is None else log_z)
