"""Passive-aggressive steps of one member in numba: row by row, on a copy of W.

The copy of W is transposed, (p, D), so that latent means and updates run over contiguous memory. These loops
vectorise without changing the order of any sum.
"""

from __future__ import annotations

import numpy as np
from numba import float64

from scalelatent.kernels.jit import entry, in_array, out_array

from .squash import SquashTable


def update_by_rows(
    w: np.ndarray, x: np.ndarray, labels: np.ndarray, weight: np.ndarray, dims: np.ndarray,
    inverse: np.ndarray, nu: float, aggressiveness: float, table: SquashTable,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Return the change of W and the sums, as :func:`..reference.update_by_rows` does, in float32."""
    start = np.ascontiguousarray(w.T, dtype=np.float32)
    own, sums = start.copy(), np.zeros(3)
    _update_by_rows(
        own,
        np.ascontiguousarray(x, dtype=np.float32),
        np.ascontiguousarray(labels, dtype=np.int64),
        np.ascontiguousarray(weight, dtype=np.float64),
        np.ascontiguousarray(dims, dtype=np.int64),
        np.ascontiguousarray(inverse, dtype=np.float32),
        nu,
        aggressiveness,
        table.coefficients,
        table.scale,
        sums,
    )
    return (own.astype(np.float64) - start).T, sums


@entry(
    out_array("f4", 2),
    in_array("f4", 2),
    in_array("i8", 1),
    in_array("f8", 1),
    in_array("i8", 1),
    in_array("f4", 2),
    float64,
    float64,
    in_array("f8", 2),
    float64,
    out_array("f8", 1),
)
def _update_by_rows(
    w: np.ndarray, x: np.ndarray, labels: np.ndarray, weight: np.ndarray, dims: np.ndarray,
    inverse: np.ndarray, nu: float, aggressiveness: float, coefficients: np.ndarray, scale: float,
    sums: np.ndarray,
) -> None:  # fmt: skip
    p, total_dim = w.shape
    n_capsules, cells, total = len(dims), len(coefficients), float(w.shape[1])
    h, z = np.empty(total_dim, dtype=np.float32), np.empty(p, dtype=np.float32)
    q = np.empty(n_capsules)
    for n in range(len(x)):
        row, right = x[n], labels[n]
        h[:] = 0.0
        for j in range(p):
            value = row[j]
            for k in range(total_dim):
                h[k] += w[j, k] * value
        length, k = 0.0, 0
        for i in range(n_capsules):
            q[i] = 0.0
            for _ in range(dims[i]):
                q[i] += float(h[k]) * float(h[k])
                k += 1
            length += q[i]
        beta = 0.5 * length
        place = beta / (beta + scale) * cells
        # The index is limited because a NaN must not cause a read outside the table. The sums below are NaN
        # as well, and the fit stops.
        cell = max(min(int(place), cells - 1), 0)
        u, c = place - cell, coefficients[cell]
        lam0 = ((c[3] * u + c[2]) * u + c[1]) * u + c[0]
        lam1 = ((c[7] * u + c[6]) * u + c[5]) * u + c[4]
        inverse_length = 1.0 / max(length, 1e-300)
        floor, rest = (1.0 - lam0) / total, (1.0 - lam1) / (total + 2.0)
        size, fraction = float(dims[right]), q[right] * inverse_length
        p_right = lam0 * fraction + floor * size
        before, behind = -1.0, -1.0
        for i in range(n_capsules):
            p_i = lam0 * q[i] * inverse_length + floor * dims[i]
            if i < right:
                before = max(before, p_i)
            elif i > right:
                behind = max(behind, p_i)
        sums[0] += weight[n] * (np.log(p_right) + (length - length))
        if before >= p_right or behind > p_right:
            sums[1] += weight[n]
        if (nu > 0.0 and max(before, behind) <= nu * p_right) or not weight[n] > 0.0:
            continue
        sums[2] += 1.0
        other = ((lam1 - lam0) * fraction + (rest - floor) * size) / p_right
        own = other + 2.0 * rest / p_right
        squared, k = 0.0, 0
        for i in range(n_capsules):
            factor = own if i == right else other
            for _ in range(dims[i]):
                h[k] = np.float32(h[k] * factor)
                squared += float(h[k]) * float(h[k])
                k += 1
        z[:] = 0.0
        for j in range(p):
            value = row[j]
            for k in range(p):
                z[k] += inverse[j, k] * value
        xz = 0.0
        for j in range(p):
            xz += float(row[j]) * float(z[j])
        loss = np.sqrt(squared)
        if not (xz > 0.0 and loss > 0.0):
            continue
        step = np.float32(min(1.0 / xz, aggressiveness * weight[n] / loss))
        for k in range(total_dim):
            h[k] *= step
        for j in range(p):
            value = z[j]
            for k in range(total_dim):
                w[j, k] += value * h[k]
