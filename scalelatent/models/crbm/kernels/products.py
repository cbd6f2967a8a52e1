"""Products of a batch's few rows with the parameters, on host or device.

A step of a small batch reads every matrix of parameters for some twenty rows. OpenBLAS packs a matrix before
it multiplies, which then costs more than the product; the tiles of :mod:`.cpu.few_rows` read it in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from scalelatent.kernels.vectors import lined_up

from .cpu import few_rows
from .update import Pace, Way, add_to, climb

# Up to so many rows the tiles are ahead of OpenBLAS; with vectors of eight both are even there
# (benchmarks/crbm_steps.py --parts products).
MAX_ROWS = 160
# Below so many units BLAS makes a matrix times a vector of a product.
_FEW_UNITS = 8


def few(rows: Any, *others: Any) -> bool:
    """Whether the tiles serve: float32 on the host, and few rows.

    Examples
    --------
    >>> few(np.zeros((2, 3), np.float32)), few(np.zeros((2, 3))), few(np.zeros((2000, 3), np.float32))
    (True, False, False)
    """
    return 0 < len(rows) <= MAX_ROWS and all(
        isinstance(a, np.ndarray) and a.dtype == np.float32 and a.flags.c_contiguous for a in (rows, *others)
    )


def affine(x: Any, weights: Any, bias: Any, out: Any, xp: Any) -> None:
    """Write x weights^T + bias to ``out``.

    Parameters
    ----------
    x : array, shape (rows, features)
    weights : array, shape (units, features)
    bias : array, shape (units,)
    out : array, shape (rows, units)
    xp : module
        numpy or CuPy.

    Examples
    --------
    >>> out = np.empty((1, 2), np.float32)
    >>> affine(np.ones((1, 3), np.float32), np.ones((2, 3), np.float32), np.float32([1, 2]), out, np)
    >>> out.tolist()
    [[4.0, 5.0]]
    """
    if x.shape[1] == weights.shape[1] and few(x, weights, bias, out):
        # Each vector of other rows would be loaded from two cache lines.
        few_rows.products(lined_up(x), weights, bias, out)
        return
    if xp is np and len(weights) < _FEW_UNITS:
        # BLAS makes a matrix times a vector of it, in which the sum of a row depends on the row's place.
        np.einsum("ij,kj->ik", x, weights, out=out)
    else:
        xp.matmul(x, weights.T, out=out)
    out += bias


def outer_less(left: Any, right: Any, less: Any, out: Any, xp: Any) -> None:
    """Write left^T right - less to ``out``.

    Examples
    --------
    >>> one, out = np.ones((4, 1), np.float32), np.empty((1, 1), np.float32)
    >>> outer_less(one, one, np.float32([[3]]), out, np)
    >>> out.tolist()
    [[1.0]]
    """
    if len(left) == len(right) and few(left, right, less, out):
        few_rows.outer_less(left, right, less, out)
    else:
        xp.matmul(left.T, right, out=out)
        xp.subtract(out, less, out=out)


def add_outer_less(left: Any, right: Any, less: Any, total: np.ndarray, backend: Any) -> None:
    """Add left^T right - less, rounded to float32, to a ``total`` of float64 on the host.

    Examples
    --------
    >>> from scalelatent.engine.backend import make_backend
    >>> one, total = np.ones((4, 1), np.float32), np.ones((1, 1))
    >>> add_outer_less(one, one, np.float32([[3]]), total, make_backend("cpu"))
    >>> total.tolist()
    [[2.0]]
    """
    if len(left) == len(right) and few(left, right, less):
        few_rows.add_outer_less(left, right, less, total)
        return
    out = backend.buffer("outer", less.shape, less.dtype)
    outer_less(left, right, less, out, backend.xp)
    add_to(total.reshape(-1), backend.to_host(out).reshape(-1))


def climb_outer(way: Way, left: np.ndarray, right: np.ndarray, pace: Pace) -> None:
    """:func:`.update.climb` of a matrix along the gradient left^T right, which is not written out.

    Parameters
    ----------
    way : Way
        Matrices (units, features).
    left : ndarray of float32, shape (rows, units)
    right : ndarray of float32, shape (rows, features)
    pace : Pace

    Examples
    --------
    >>> theta, none = np.ones((1, 2), np.float32), np.zeros((0, 2), np.float32)
    >>> way = Way(theta, none, np.empty_like(theta), none)
    >>> climb_outer(way, np.float32([[2]]), np.float32([[3, 4]]), Pace(0.5, 0.25, 0.0))
    >>> way.new_theta.tolist()
    [[3.75, 4.75]]
    """
    if len(left) != len(right) or not few(left, right, *way):
        climb(way.part(slice(None), -1), (left.T @ right).reshape(-1), way.theta.size, pace)
        return
    right, (rate, decay, momentum) = lined_up(right), map(np.float32, pace)
    if len(way.velocity) or decay:
        few_rows.climb_outer(*way, rate * left, right, decay, momentum)
    else:
        few_rows.plus_outer(rate * left, right, way.theta, way.new_theta)


def climb_outer_less(
    way: Way, left: np.ndarray, right: np.ndarray, less: np.ndarray, pace: Pace, backend: Any
) -> None:
    """:func:`climb_outer` along left^T right - less.

    Examples
    --------
    >>> from scalelatent.engine.backend import make_backend
    >>> theta, none, one = (np.ones((n, 1), np.float32) for n in (1, 0, 4))
    >>> way = Way(theta, none, theta, none)
    >>> climb_outer_less(way, one, one, np.float32([[3]]), Pace(0.5, 0.0, 0.0), make_backend("cpu"))
    >>> theta.tolist()
    [[1.5]]
    """
    theta, velocity, new_theta, _ = way
    if not len(velocity) and not pace.decay and few(left, right, less, theta, new_theta):
        few_rows.climb_outer_less(left, right, less, np.float32(pace.rate), theta, new_theta)
        return
    out = backend.buffer("outer", less.shape, less.dtype)
    outer_less(left, right, less, out, backend.xp)
    climb(way.part(slice(None), -1), out.reshape(-1), theta.size, pace)
