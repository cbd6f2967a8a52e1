"""The part of the E-step between the two matrix products, in numba: one serial kernel call per block.

The latent means are transposed, (dimensions, rows), so that every inner loop runs over rows in contiguous
memory and vectorises. A strip (256 consecutive rows) stays in the first-level cache through all steps. Sums
run in the order of the rows, so the compiler cannot choose an order of SIMD lanes.
"""

from __future__ import annotations

import numpy as np
from numba import boolean, float64

from scalelatent.contract.learners import Backend
from scalelatent.kernels import tiles
from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.memory import empty, same_bytes, zeros
from scalelatent.kernels.vectors import copy_vector

from .estep import estep_by_products
from .squash import SquashTable

# Number of rows that are processed together (a strip).
STRIP = 256
_MANTISSA, _ONE, _SHIFT = np.int64(0x000FFFFFFFFFFFFF), np.int64(0x3FF0000000000000), np.int64(52)
_LN2, _SQRT2 = 0.6931471805599453, 1.4142135623730951
# Number of fields of the scratch space; a field has one number per row. The scratch space is one flat array,
# because LLVM checks each pair of arrays for overlap, and does not vectorise loops over many arrays.
_FIELDS = 14
(
    _TOTAL,
    _RIGHT,
    _SIZE,
    _PLACE,
    _LAM0,
    _LAM1,
    _SLOPE,
    _FLOOR,
    _OWN,
    _OTHER,
    _BEFORE,
    _BEHIND,
    _EXPONENT,
    _LOG,
) = (STRIP * field for field in range(_FIELDS))


def residuals(
    h: np.ndarray, y: np.ndarray, weight: np.ndarray, dims: np.ndarray, labels: np.ndarray, nu: np.ndarray,
    table: SquashTable,
) -> tuple[np.ndarray | None, np.ndarray]:  # fmt: skip
    """Replace the latent means h by the residuals of all members for one block; return active rows and sums.

    Active rows are those that a member does not classify with the margin of its threshold ``nu``.
    """
    thresholded = bool((nu > 0).any())
    factors = np.empty((2 * len(dims), h.shape[1]), dtype=np.float32)
    sums = np.zeros((len(dims), 3))
    active = _compute_residuals(
        h,
        np.ascontiguousarray(y, dtype=np.int32),
        np.ascontiguousarray(weight, dtype=np.float64),
        dims,
        labels,
        nu,
        table.coefficients,
        table.scale,
        thresholded,
        factors,
        sums,
    )
    return active if thresholded else None, sums


def estep(
    backend: Backend, w: np.ndarray, x: np.ndarray, y: np.ndarray, weight: np.ndarray, dims: np.ndarray,
    labels: np.ndarray, nu: np.ndarray, table: SquashTable, train: bool,
) -> tuple[np.ndarray | None, np.ndarray]:  # fmt: skip
    """Return the residual moment and the sums of a block of rows; by one fused kernel if W is small."""
    if not tiles.can_multiply(len(w), x):
        return estep_by_products(backend, w, x, y, weight, dims, labels, nu, table, train)
    n, p = x.shape
    dense = not (nu > 0).any()
    delta = backend.buffer("delta", w.shape, np.float32)
    delta[...] = 0.0
    sums = np.zeros((len(dims), 3))
    kept = n if train and not dense else 0
    rows, g = backend.buffer("active", (kept, p), np.float32), backend.buffer("g", (len(w), kept), np.float32)
    _tiled_estep(
        w, x, y, weight, dims, labels, nu, table.coefficients, table.scale, train, dense, rows, g, delta, sums
    )
    return delta if train else None, sums


# Types of the arguments y, weight, dims, labels and nu, and of the table's coefficients and scale.
_INPUTS = (
    in_array("i4", 1),
    in_array("f8", 1),
    in_array("i8", 2),
    in_array("i8", 2),
    in_array("f8", 1),
    in_array("f8", 2),
    float64,
)


@entry(out_array("f4", 2), *_INPUTS, boolean, out_array("f4", 2), out_array("f8", 2))
def _compute_residuals(
    h: np.ndarray, y: np.ndarray, weight: np.ndarray, dims: np.ndarray, labels: np.ndarray, nu: np.ndarray,
    coefficients: np.ndarray, scale: float, thresholded: bool, factors: np.ndarray, sums: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Replace h by the residuals; return the rows without a margin, or an empty array without a threshold."""
    moved = zeros(len(y), np.bool_)
    _compute_factors(h, y, weight, dims, labels, nu, coefficients, scale, factors, moved, sums)
    if not thresholded:
        _scale_all(h, y, dims, labels, factors)
        return empty(0, np.int32)
    active = _find_active_rows(moved)
    _scale_active(h, y, dims, labels, factors, active)
    return same_bytes(active, np.int32)


@entry(
    in_array("f4", 2),
    in_array("f4", 2),
    *_INPUTS,
    boolean,
    boolean,
    out_array("f4", 2),
    out_array("f4", 2),
    out_array("f4", 2),
    out_array("f8", 2),
)
def _tiled_estep(
    w: np.ndarray, x: np.ndarray, y: np.ndarray, weight: np.ndarray, dims: np.ndarray, labels: np.ndarray,
    nu: np.ndarray, coefficients: np.ndarray, scale: float, train: bool, dense: bool, rows: np.ndarray,
    g: np.ndarray, delta: np.ndarray, sums: np.ndarray,
) -> None:  # fmt: skip
    """Compute latents, factors and residual moment by strips of rows, so that X is read from memory once.

    With a threshold, only active rows (rows that are not classified with a margin) have residuals. These rows
    and residuals are copied to ``rows`` and ``g``, and multiplied after the last strip.
    """
    n, width = len(x), tiles.STRIP
    packed = tiles.pack(w)
    h = empty((tiles.padded(len(w)), width), np.float32)
    factors = empty((2 * len(dims), width), np.float32)
    moved = empty(width, np.bool_)
    taken = 0
    for i in range(0, n, width):
        count = min(width, n - i)
        strip, codes = x[i : i + count], y[i : i + count]
        tiles.compute_latents(packed, strip, h)
        moved[:] = False
        _compute_factors(
            h, codes, weight[i : i + count], dims, labels, nu, coefficients, scale, factors, moved, sums
        )
        if not train:
            continue
        if dense:
            _scale_all(h, codes, dims, labels, factors)
            tiles.add_moment(h[:, 0:], count, strip, delta)
            continue
        active = _find_active_rows(moved[:count])
        _scale_active(h, codes, dims, labels, factors, active)
        _copy_rows(strip, active, rows[taken:])
        for k in range(len(w)):
            copy_vector(h[k], g[k, taken : taken + len(active)])
        taken += len(active)
    for i in range(0, taken, width):
        aside: np.ndarray = tiles.read_only(rows[i:])  # type: ignore[call-arg]
        tiles.add_moment(g[:, i:], min(width, taken - i), aside, delta)


@subkernel
def _find_active_rows(moved: np.ndarray) -> np.ndarray:
    """Return the numbers of the active rows: rows that are not classified with a margin (``moved``)."""
    out, count = empty(len(moved), np.uint32), 0
    for j in range(len(moved)):
        if moved[j]:
            out[count] = j
            count += 1
    return out[:count]


@subkernel
def _copy_rows(strip: np.ndarray, active: np.ndarray, rows: np.ndarray) -> None:
    for j in range(len(active)):
        copy_vector(strip[active[j]], rows[j])


@subkernel
def _compute_factors(
    h: np.ndarray, y: np.ndarray, weight: np.ndarray, dims: np.ndarray, labels: np.ndarray, nu: np.ndarray,
    coefficients: np.ndarray, scale: float, factors: np.ndarray, moved: np.ndarray, sums: np.ndarray,
) -> None:  # fmt: skip
    """Write the factors weight (r - 1) of each member and row, mark the active rows, and add the sums.

    Here r is the ratio of the posterior mean of a capsule to its latent mean. Active rows, marked in
    ``moved``, are rows that are not classified with a margin.

    For member m, line 2m of ``factors`` is for the capsule of a row's class, and line 2m + 1 is for all other
    capsules. Only the first ``len(y)`` columns of h are used.
    """
    n_members, k = dims.shape
    n = len(y)
    q, target = empty(k * STRIP, np.float32), empty(STRIP, np.int32)
    work = empty(_FIELDS * STRIP, np.float64)
    for first in range(0, n, STRIP):
        stop = min(first + STRIP, n)
        row = np.int64(0)  # a literal would make numba compile another kernel
        for r in range(n_members):
            _select_targets(labels[r], y[first:stop], target)
            before = row
            for i in range(k):
                _sum_squares(h, row, dims[r, i], first, stop - first, q[i * STRIP :])
                row += dims[r, i]
            _sum_lengths(q, target, dims[r], stop - first, work)
            _look_up_lambdas(coefficients, scale, stop - first, work)
            _compute_posterior(row - before, stop - first, work)
            _find_largest_probabilities(q, target, dims[r], stop - first, work)
            _log_right(stop - first, work)
            _add_sums(weight[first:stop], nu[r], work, moved[first:stop], sums[r])
            _write_factors(
                weight[first:stop], nu[r], work, factors[2 * r, first:stop], factors[2 * r + 1, first:stop]
            )


@subkernel
def _select_targets(label: np.ndarray, y: np.ndarray, target: np.ndarray) -> None:
    for j in range(len(y)):
        target[j] = label[y[j]]


@subkernel
def _sum_squares(h: np.ndarray, row: int, size: int, first: int, width: int, q: np.ndarray) -> None:
    # Use one-dimensional slices, because numba's checks of two indices keep LLVM from vectorising.
    strip = h[row, first : first + width]
    for j in range(width):
        q[j] = strip[j] * strip[j]
    for a in range(1, size):
        strip = h[row + a, first : first + width]
        for j in range(width):
            q[j] += strip[j] * strip[j]


@subkernel
def _sum_lengths(q: np.ndarray, target: np.ndarray, dims: np.ndarray, width: int, work: np.ndarray) -> None:
    """Write for each row the sum of squared lengths q of all capsules, and q and dimension of its class."""
    for j in range(width):
        work[_TOTAL + j] = 0.0
        work[_RIGHT + j] = 0.0
        work[_SIZE + j] = 0.0
    for i in range(len(dims)):
        row, size = q[i * STRIP : (i + 1) * STRIP], float(dims[i])
        for j in range(width):
            value = float(row[j])
            own = 1.0 if target[j] == i else 0.0
            work[_TOTAL + j] += value
            work[_RIGHT + j] += own * value
            work[_SIZE + j] += own * size


@subkernel
def _look_up_lambdas(coefficients: np.ndarray, scale: float, width: int, work: np.ndarray) -> None:
    cells = len(coefficients)
    for j in range(width):
        beta = 0.5 * work[_TOTAL + j]
        work[_PLACE + j] = beta / (beta + scale) * cells
    for j in range(width):
        t = work[_PLACE + j]
        # The index is limited because a NaN or infinite row must not cause a read outside the table. The sums
        # below are NaN as well, and the pass stops.
        cell = max(min(int(t), cells - 1), 0)
        u = t - cell
        c = coefficients[cell]
        work[_LAM0 + j] = ((c[3] * u + c[2]) * u + c[1]) * u + c[0]
        work[_LAM1 + j] = ((c[7] * u + c[6]) * u + c[5]) * u + c[4]


@subkernel
def _compute_posterior(total_dim: int, width: int, work: np.ndarray) -> None:
    """Write the terms of the posterior of each row into the workspace.

    For each row these terms are r - 1 of the capsule of the row's class, and r - 1 of the other capsules,
    where r is the ratio of the posterior mean to the latent mean. Two further terms are slope and floor of
    the probability P_i = slope q_i + floor d_i of capsule i with squared length q_i and dimension d_i.
    """
    inv_d, inv_d2 = 1.0 / total_dim, 1.0 / (total_dim + 2.0)
    for j in range(width):
        lam0, lam1, size = work[_LAM0 + j], work[_LAM1 + j], work[_SIZE + j]
        inverse = 1.0 / max(work[_TOTAL + j], 1e-300)
        fraction = work[_RIGHT + j] * inverse
        floor, rest = (1.0 - lam0) * inv_d, (1.0 - lam1) * inv_d2
        inv_p = 1.0 / (lam0 * fraction + floor * size)
        common = ((lam1 - lam0) * fraction + (rest - floor) * size) * inv_p
        work[_SLOPE + j] = lam0 * inverse
        work[_FLOOR + j] = floor
        work[_OTHER + j] = common
        work[_OWN + j] = common + 2.0 * rest * inv_p


@subkernel
def _find_largest_probabilities(
    q: np.ndarray, target: np.ndarray, dims: np.ndarray, width: int, work: np.ndarray
) -> None:
    """Write the probability P of each row's class, and the largest P of the classes before and after it.

    All P are computed by one expression, so that equal lengths give equal P.
    """
    for j in range(width):
        work[_RIGHT + j] = 0.0
        work[_BEFORE + j] = -1.0
        work[_BEHIND + j] = -1.0
    for i in range(len(dims)):
        row, size = q[i * STRIP : (i + 1) * STRIP], float(dims[i])
        for j in range(width):
            p = work[_SLOPE + j] * row[j] + work[_FLOOR + j] * size
            work[_RIGHT + j] = p if target[j] == i else work[_RIGHT + j]
            work[_BEFORE + j] = max(work[_BEFORE + j], p if i < target[j] else -1.0)
            work[_BEHIND + j] = max(work[_BEHIND + j], p if i > target[j] else -1.0)


@subkernel
def _log_right(width: int, work: np.ndarray) -> None:
    """Write the natural logarithm of P of the capsule of the row's class, with an error below 1e-15.

    P is split into mantissa m and exponent by its bits, and log m is an odd series of (m - 1) / (m + 1).
    Unlike a call of log, this vectorises.
    """
    bits = same_bytes(work, np.int64)
    for j in range(width):
        work[_EXPONENT + j] = float((bits[_RIGHT + j] >> _SHIFT) - 1023)
    for j in range(width):
        bits[_PLACE + j] = (bits[_RIGHT + j] & _MANTISSA) | _ONE
    for j in range(width):
        m, e, p = work[_PLACE + j], work[_EXPONENT + j], work[_RIGHT + j]
        big = m > _SQRT2
        m = 0.5 * m if big else m
        e = e + 1.0 if big else e
        z = (m - 1.0) / (m + 1.0)
        s = z * z
        series = 1 / 19 + s / 21
        series = series * s + 1 / 17
        series = series * s + 1 / 15
        series = series * s + 1 / 13
        series = series * s + 1 / 11
        series = series * s + 1 / 9
        series = series * s + 1 / 7
        series = series * s + 1 / 5
        series = series * s + 1 / 3
        # p - p is 0, or NaN if the row is not finite: the sum is then NaN, and the pass stops.
        work[_LOG + j] = e * _LN2 + 2.0 * z * (1.0 + s * series) + (p - p)


@subkernel
def _add_sums(weight: np.ndarray, nu: float, work: np.ndarray, moved: np.ndarray, sums: np.ndarray) -> None:
    loglik, errors, active = 0.0, 0.0, 0
    for j in range(len(weight)):
        right, before, behind = work[_RIGHT + j], work[_BEFORE + j], work[_BEHIND + j]
        use = nu <= 0.0 or max(before, behind) > nu * right
        loglik += weight[j] * work[_LOG + j]
        # If classes have equal probabilities, the first class is predicted. So a class before the row's class
        # counts as an error if its probability is equal.
        errors += weight[j] if before >= right or behind > right else 0.0
        moved[j] |= use
        active += use
    sums[0] += loglik
    sums[1] += errors
    sums[2] += active


@subkernel
def _write_factors(
    weight: np.ndarray, nu: float, work: np.ndarray, own: np.ndarray, other: np.ndarray
) -> None:
    for j in range(len(weight)):
        wrong = max(work[_BEFORE + j], work[_BEHIND + j])
        factor = weight[j] if nu <= 0.0 or wrong > nu * work[_RIGHT + j] else 0.0
        own[j] = work[_OWN + j] * factor
        other[j] = work[_OTHER + j] * factor


@subkernel
def _scale_all(
    h: np.ndarray, y: np.ndarray, dims: np.ndarray, labels: np.ndarray, factors: np.ndarray
) -> None:
    """Multiply the first ``len(y)`` columns (rows of the data) of h by their factors."""
    n = len(y)
    factor, target = empty(STRIP, np.float32), empty(STRIP, np.int32)
    for first in range(0, n, STRIP):
        width = min(STRIP, n - first)
        stop = first + width
        row = 0
        for r in range(dims.shape[0]):
            _select_targets(labels[r], y[first:stop], target)
            own, other = factors[2 * r, first:stop], factors[2 * r + 1, first:stop]
            for i in range(dims.shape[1]):
                for j in range(width):
                    factor[j] = own[j] if target[j] == i else other[j]
                for _ in range(dims[r, i]):
                    strip = h[row, first:stop]
                    for j in range(width):
                        strip[j] *= factor[j]
                    row += 1


@subkernel
def _scale_active(
    h: np.ndarray,
    y: np.ndarray,
    dims: np.ndarray,
    labels: np.ndarray,
    factors: np.ndarray,
    active: np.ndarray,
) -> None:
    """Write the columns ``active`` of h, multiplied by their factors, to the front of h.

    Column j is computed from column j or a later column, so nothing is overwritten too early. Row numbers are
    unsigned, because numba checks each signed index for negative values.
    """
    n = len(active)
    factor = empty(n, np.float32)
    row = 0
    for r in range(dims.shape[0]):
        label, own, other = labels[r], factors[2 * r], factors[2 * r + 1]
        for i in range(dims.shape[1]):
            for j in range(n):
                at = active[j]
                factor[j] = own[at] if label[y[at]] == i else other[at]
            for _ in range(dims[r, i]):
                strip = h[row]
                for j in range(n):
                    strip[j] = strip[active[j]] * factor[j]
                row += 1
