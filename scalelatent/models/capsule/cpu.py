"""The E-step between the two matrix products, in numba: one serial kernel a block.

The latent means lie transposed, (dimensions, rows), so that every inner loop runs over rows in contiguous
memory and vectorises; a strip of rows stays in the first-level cache through all three steps. Sums are
written in row order: no lane order is left to the compiler.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from scalelatent._numba import kernel

STRIP = 256
_MANTISSA, _ONE, _SHIFT = np.int64(0x000FFFFFFFFFFFFF), np.int64(0x3FF0000000000000), np.int64(52)
_LN2, _SQRT2 = 0.6931471805599453, 1.4142135623730951


def residuals(
    h: np.ndarray,
    y: np.ndarray,
    weight: np.ndarray,
    dims: np.ndarray,
    labels: np.ndarray,
    nu: np.ndarray,
    table: Any,
) -> tuple[np.ndarray | None, np.ndarray]:
    """Residuals of all members for one block, see :func:`..reference.residuals`; ``h`` is float32.

    Examples
    --------
    >>> from scalelatent.models.capsule.squash import squash_table
    >>> h = np.ones((2, 3), dtype=np.float32)
    >>> active, sums = residuals(h, np.zeros(3, np.int32), np.ones(3), np.array([[1, 1]]), np.array([[0, 1]]),
    ...                          np.zeros(1), squash_table(2))
    >>> active is None, sums.shape
    (True, (1, 3))
    """
    thresholded = bool((nu > 0).any())
    n = h.shape[1]
    factors = np.empty((2 * len(dims), n), dtype=np.float32)
    moved = np.zeros(n, dtype=np.bool_)
    sums = np.zeros((len(dims), 3))
    if n:
        _factors(h, y, weight, dims, labels, nu, table.coefficients, table.scale, factors, moved, sums)
    if not thresholded:
        _scale_all(h, y, dims, labels, factors)
        return None, sums
    active = np.flatnonzero(moved).astype(np.int32)
    _scale_active(h, y, dims, labels, factors, active)
    return active, sums


@kernel
def _factors(h, y, weight, dims, labels, nu, coefficients, scale, factors, moved, sums):  # type: ignore[no-untyped-def]
    """weight (r - 1) of the right capsule (row 2r) and of the others (row 2r + 1) of every member r."""
    n_members, k = dims.shape
    n = h.shape[1]
    q = np.empty((k, STRIP), dtype=np.float32)
    right = np.empty(STRIP)
    slope = np.empty(STRIP)
    floor = np.empty(STRIP)
    limit = np.empty(STRIP)
    wrong = np.empty(STRIP)
    target = np.empty(STRIP, dtype=np.int64)
    for first in range(0, n, STRIP):
        width = min(STRIP, n - first)
        row = 0
        for r in range(n_members):
            total_dim = dims[r].sum()
            for i in range(k):
                _squares(h, row, dims[r, i], first, width, q[i])
                row += dims[r, i]
            for j in range(width):
                target[j] = labels[r, y[first + j]]
            _posterior(
                q,
                target,
                dims[r],
                total_dim,
                coefficients,
                scale,
                width,
                right,
                slope,
                floor,
                wrong,
                factors[2 * r, first:],
                factors[2 * r + 1, first:],
            )
            for j in range(width):
                wrong[j] = -1.0
                limit[j] = 0.0
            for i in range(k):
                _best_wrong(q[i], i, dims[r, i], target, slope, floor, right, width, wrong, limit)
            _collect(
                right,
                wrong,
                limit,
                weight[first:],
                nu[r],
                width,
                moved[first:],
                sums[r],
                factors[2 * r, first:],
                factors[2 * r + 1, first:],
                slope,
            )


@kernel
def _squares(h, row, size, first, width, q):  # type: ignore[no-untyped-def]
    # One-dimensional slices: with two indices numba's wrap-around checks keep LLVM from vectorising.
    strip = h[row, first : first + width]
    for j in range(width):
        q[j] = strip[j] * strip[j]
    for a in range(1, size):
        strip = h[row + a, first : first + width]
        for j in range(width):
            q[j] += strip[j] * strip[j]


@kernel
def _posterior(
    q, target, dims, total_dim, coefficients, scale, width, right, slope, floor, total, own, other
):  # type: ignore[no-untyped-def]
    cells = coefficients.shape[0]
    for j in range(width):
        total[j] = q[0, j]
    for i in range(1, q.shape[0]):
        for j in range(width):
            total[j] += q[i, j]
    inv_d, inv_d2 = 1.0 / total_dim, 1.0 / (total_dim + 2.0)
    for j in range(width):
        beta = 0.5 * total[j]
        t = beta / (beta + scale) * cells
        # A NaN or infinite row must not read outside the table; it still gives NaN below, and the pass stops
        # on it.
        cell = max(min(int(t), cells - 1), 0)
        u = t - cell
        c = coefficients[cell]
        lam0 = ((c[3] * u + c[2]) * u + c[1]) * u + c[0]
        lam1 = ((c[7] * u + c[6]) * u + c[5]) * u + c[4]
        inverse = 1.0 / max(total[j], 1e-300)
        size = float(dims[target[j]])
        fraction = q[target[j], j] * inverse
        p = lam0 * fraction + (1.0 - lam0) * size * inv_d
        inv_p = 1.0 / p
        common = (
            (lam1 - lam0) * fraction + (1.0 - lam1) * size * inv_d2 - (1.0 - lam0) * size * inv_d
        ) * inv_p
        right[j] = p
        slope[j] = lam0 * inverse
        floor[j] = (1.0 - lam0) * inv_d
        other[j] = common
        own[j] = common + 2.0 * (1.0 - lam1) * inv_d2 * inv_p


@kernel
def _best_wrong(q, i, size, target, slope, floor, right, width, wrong, limit):  # type: ignore[no-untyped-def]
    """Largest wrong probability so far, and whether one wins (a tie goes to the lower capsule)."""
    for j in range(width):
        p = slope[j] * q[j] + floor[j] * size
        if target[j] == i:
            p = -1.0
        wrong[j] = max(wrong[j], p)
        if p > right[j] or (p == right[j] and i < target[j]):
            limit[j] = 1.0


@kernel
def _collect(right, wrong, lost, weight, nu, width, moved, sums, own, other, log_p):  # type: ignore[no-untyped-def]
    _log(right, log_p, width)
    loglik, errors, active = 0.0, 0.0, 0
    for j in range(width):
        loglik += weight[j] * log_p[j]
        errors += weight[j] * lost[j]
    for j in range(width):
        use = nu <= 0.0 or wrong[j] > nu * right[j]
        factor = np.float32(weight[j]) if use else np.float32(0.0)
        own[j] *= factor
        other[j] *= factor
        moved[j] |= use
        active += use
    sums[0] += loglik
    sums[1] += errors
    sums[2] += active


@kernel
def _log(x, out, width):  # type: ignore[no-untyped-def]
    """Natural logarithm of positive normal numbers: split by bits, then an odd series of (m-1)/(m+1);
    vectorises, error under 1e-15.
    """
    bits = x.view(np.int64)
    work = np.empty(width)
    work_bits = work.view(np.int64)
    for j in range(width):
        work_bits[j] = (bits[j] & _MANTISSA) | _ONE
    for j in range(width):
        m = work[j]
        e = float((bits[j] >> _SHIFT) - 1023)
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
        out[j] = e * _LN2 + 2.0 * z * (1.0 + s * series) if x[j] == x[j] else x[j]


@kernel
def _scale_all(h, y, dims, labels, factors):  # type: ignore[no-untyped-def]
    n = h.shape[1]
    factor = np.empty(STRIP, dtype=np.float32)
    for first in range(0, n, STRIP):
        width = min(STRIP, n - first)
        stop = first + width
        row = 0
        for r in range(dims.shape[0]):
            label = labels[r]
            own, other = factors[2 * r, first:stop], factors[2 * r + 1, first:stop]
            for i in range(dims.shape[1]):
                for j in range(width):
                    factor[j] = own[j] if label[y[first + j]] == i else other[j]
                for _ in range(dims[r, i]):
                    strip = h[row, first:stop]
                    for j in range(width):
                        strip[j] *= factor[j]
                    row += 1


@kernel
def _scale_active(h, y, dims, labels, factors, active):  # type: ignore[no-untyped-def]
    """The same for the active rows, moved to the front: column j only ever reads columns at or behind it."""
    n = len(active)
    factor = np.empty(n, dtype=np.float32)
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
