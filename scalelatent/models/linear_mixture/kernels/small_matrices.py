"""Eigenvectors and orthonormal columns for stacks of small matrices; float64, one thread.

The overhead of a LAPACK call is longer than the computation for such small matrices.
"""

from __future__ import annotations

import numpy as np
from numba import types

from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.memory import empty

# Largest number of Jacobi sweeps over all pairs of rows of a matrix.
_SWEEPS = 30
# Off-diagonal elements below this share of the largest diagonal element are rounding errors and count as 0.
_ZERO_SHARE = 1e-14
# If the part of a column that is orthogonal to earlier columns has less than this share of its length, the
# Cholesky decomposition is too inexact, and Gram-Schmidt is used.
_CHOLESKY_SHARE = 1e-3
# Gram-Schmidt subtracts the projections on earlier columns. It repeats this for a column that then has less
# than this share of its length.
REPROJECT_SHARE = 0.5
# A column counts as linearly dependent on earlier columns if the part of it that is orthogonal to them has
# less than this share of its length.
_DEPENDENT_SHARE = 1e-10


def eigenvectors(matrices: np.ndarray, small: float = _ZERO_SHARE) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvalues (K, q), decreasing, and eigenvectors as columns (K, q, q) of symmetric matrices.

    Off-diagonal elements below the share ``small`` of the largest diagonal element count as 0. The
    eigenvectors of a diagonal matrix are unit vectors with positive signs.
    """
    k, q = matrices.shape[:2]
    values, turn = np.empty((k, q)), np.empty((k, q, q))
    _compute_eigenvectors(np.array(matrices, order="C"), small, values, turn)
    return values, turn


def orthonormalising_triangles(grams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return upper triangular matrices (K, q, q) that make columns with these Gram matrices orthonormal.

    If C are the columns and C'C is the Gram matrix, then C times the triangular matrix is orthonormal. The
    projections of each column on earlier columns are subtracted. Also return, for each matrix (K,), the
    smallest share of its length that a column has after this. The share is 0 if the Cholesky decomposition is
    too inexact and `gram_schmidt` should be used.
    """
    inverse, least = np.empty_like(grams), np.empty(len(grams))
    _compute_triangles(np.array(grams, order="C"), inverse, least)
    return inverse, least


def gram_schmidt(columns: np.ndarray, otherwise: np.ndarray) -> None:
    """Make columns (K, p, q) orthonormal in place, in order.

    A column that is linearly dependent on earlier columns is replaced by the column of ``otherwise`` with
    this index, or by a unit vector.
    """
    _gram_schmidt(columns, np.ascontiguousarray(otherwise))


@entry(out_array("f8", 3), types.float64, out_array("f8", 2), out_array("f8", 3))
def _compute_eigenvectors(matrices: np.ndarray, small: float, values: np.ndarray, turn: np.ndarray) -> None:
    q = matrices.shape[1]
    rows, order = empty((q, q), np.float64), empty(q, np.int64)
    for k in range(len(matrices)):
        _diagonalise(matrices[k], small, rows, values[k], turn[k], order)


@entry(out_array("f8", 3), out_array("f8", 3), out_array("f8", 1))
def _compute_triangles(grams: np.ndarray, inverse: np.ndarray, least: np.ndarray) -> None:
    for k in range(len(grams)):
        least[k] = _compute_triangle(grams[k], inverse[k])


@subkernel
def _diagonalise(
    m: np.ndarray, small: float, rows: np.ndarray, values: np.ndarray, turn: np.ndarray, order: np.ndarray
) -> None:
    """Write eigenvalues, decreasing, and eigenvectors (columns of ``turn``) of a symmetric matrix m.

    Cyclic Jacobi rotations overwrite m; ``rows`` (q, q) is scratch memory for the eigenvectors.
    """
    q, least = len(m), 0.0
    rows[:] = 0.0
    for i in range(q):
        rows[i, i] = 1.0
        least = max(least, small * abs(m[i, i]))
    for _ in range(_SWEEPS):
        turned = False
        for i in range(q - 1):
            for j in range(i + 1, q):
                off, a, b = m[i, j], m[i, i], m[j, j]
                if abs(off) <= least:
                    continue
                turned = True
                half = (b - a) / (2.0 * off)
                t = 1.0 / (abs(half) + np.sqrt(half * half + 1.0))
                t = -t if half < 0 else t
                c = 1.0 / np.sqrt(t * t + 1.0)
                s = t * c
                up, down, left, right = m[i], m[j], rows[i], rows[j]
                for k in range(q):
                    x, y, u, v = up[k], down[k], left[k], right[k]
                    up[k] = c * x - s * y
                    down[k] = s * x + c * y
                    left[k] = c * u - s * v
                    right[k] = s * u + c * v
                for k in range(q):
                    m[k, i] = up[k]
                    m[k, j] = down[k]
                m[i, i], m[j, j] = a - t * off, b + t * off
                m[i, j] = 0.0
                m[j, i] = 0.0
        if not turned:
            break
    for i in range(q):  # insertion sort keeps the order of equal values
        k = i
        while k > 0 and m[order[k - 1], order[k - 1]] < m[i, i]:
            order[k] = order[k - 1]
            k -= 1
        order[k] = i
    for i in range(q):
        values[i] = m[order[i], order[i]]
        for k in range(q):
            turn[k, i] = rows[order[i], k]


@subkernel
def _compute_triangle(g: np.ndarray, inverse: np.ndarray) -> float:
    """Write to ``inverse`` the upper triangular matrix that makes columns with the Gram matrix g orthonormal.

    Return the smallest share of its length that a column has after its projections on earlier columns are
    subtracted; 0 if the result is too inexact.
    """
    q, least = len(g), 1.0
    inverse[:] = 0.0
    for i in range(q):
        inverse[i, i] = 1.0
    for i in range(q):
        full = g[i, i]
        if not (full > 1e-200 and full < 1e200):
            return 0.0
        # Compute row i of the Cholesky factor in place, and apply the same steps to the unit matrix.
        for j in range(i):
            one = g[i, j]
            for k in range(j):
                one -= g[i, k] * g[j, k]
            g[i, j] = one / g[j, j]
        left = full
        for k in range(i):
            left -= g[i, k] * g[i, k]
        if left <= _CHOLESKY_SHARE * _CHOLESKY_SHARE * full:
            return 0.0
        least = min(least, np.sqrt(left / full))
        root = np.sqrt(left)
        g[i, i] = root
        for k in range(i):
            one = g[i, k]
            for j in range(k + 1):
                inverse[j, i] -= one * inverse[j, k]
        for j in range(i + 1):
            inverse[j, i] /= root
    return least


@entry(out_array("f8", 3), in_array("f8", 3))
def _gram_schmidt(columns: np.ndarray, otherwise: np.ndarray) -> None:
    p, q = columns.shape[1:]
    dots = empty(q, np.float64)
    for k in range(len(columns)):
        w = columns[k]
        for j in range(q):
            tried = -1
            while not _normalise(w, j, dots):
                for f in range(p):
                    w[f, j] = otherwise[k, f, j] if tried < 0 else 0.0
                if tried >= 0:
                    w[tried % p, j] = 1.0
                tried += 1


@subkernel
def _normalise(w: np.ndarray, j: int, dots: np.ndarray) -> bool:
    """Subtract from column j its projections on earlier columns, and normalise it.

    Return False if the column depends linearly on earlier columns, so that nothing of it remains.
    """
    scale = 0.0
    for f in range(len(w)):
        scale = max(scale, abs(w[f, j]))
    if not scale > 0.0:
        return False
    for f in range(len(w)):  # the largest entry becomes 1, so that squares neither underflow nor overflow
        w[f, j] /= scale
    before, after = _project(w, j, dots)
    first = before
    while after < REPROJECT_SHARE * before and after > _DEPENDENT_SHARE * first:
        before, after = _project(w, j, dots)
    if not after > _DEPENDENT_SHARE * first:
        return False
    for f in range(len(w)):
        w[f, j] /= after
    return True


@subkernel
def _project(w: np.ndarray, j: int, dots: np.ndarray) -> tuple[float, float]:
    """Subtract from column j its projections on the orthonormal columns before it.

    Return the length of column j before and after the subtraction.
    """
    p, q = w.shape
    for i in range(q):
        dots[i] = 0.0
    for f in range(p):
        one, row = w[f, j], w[f]
        for i in range(q):
            dots[i] += one * row[i]
    before, after = dots[j], 0.0
    for f in range(p):
        one, row = w[f, j], w[f]
        for i in range(j):
            one -= dots[i] * row[i]
        w[f, j] = one
        after += one * one
    return np.sqrt(before), np.sqrt(after)
