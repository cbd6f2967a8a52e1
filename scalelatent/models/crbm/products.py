"""Products of a batch's few rows with the parameters, on host or device.

A step of a small batch reads every matrix of parameters for some twenty rows. OpenBLAS packs a matrix before
it multiplies, which then costs more than the product; the register tiles of :mod:`~scalelatent.models.tiles`
read it in place. Of what is written there, W is here the rows of the batch, and X the parameters.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from scalelatent._numba import entry, filled, given, kernel
from scalelatent.models.tiles import ROWS, STRIP, add_moment, fits, latents, pack, padded

from .update import Pace, Way, climb

# Up to so many rows the tiles are ahead of OpenBLAS; at 80 they are even (benchmarks/crbm_steps.py).
MAX_ROWS = 64
# Units whose parameters stay in the second-level cache from one reading to the next.
_SLAB = 32

_F4 = numba.float32


def _few(rows: Any, *others: Any) -> bool:
    """Whether the tiles serve: float32 on the host, and few rows."""
    return 0 < len(rows) <= MAX_ROWS and all(
        isinstance(a, np.ndarray) and a.dtype == np.float32 and a.flags.c_contiguous for a in (rows, *others)
    )


@entry(given("f4", 2), given("f4", 2), given("f4", 1), filled("f4", 2))
def _affine(x: Any, weights: Any, bias: Any, out: Any) -> None:
    rows, units = out.shape
    packed, h = pack(x), np.empty((padded(rows), STRIP), dtype=np.float32)
    for first in range(0, units, STRIP):
        strip = weights[first : first + STRIP]
        latents(packed, strip, h)
        for i in range(rows):
            for j in range(len(strip)):
                out[i, first + j] = h[i, j] + bias[first + j]


@kernel
def _transposed(a: Any, factor: Any) -> Any:
    out = np.empty((a.shape[1], a.shape[0]), dtype=np.float32)
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            out[j, i] = factor * a[i, j]
    return out


@entry(given("f4", 2), given("f4", 2), given("f4", 2), filled("f4", 2))
def _outer_less(left: Any, right: Any, less: Any, out: Any) -> None:
    columns = _transposed(left, np.float32(1.0))
    for first in range(0, len(out), _SLAB):
        part, other = out[first : first + _SLAB], less[first : first + _SLAB]
        for i in range(len(part)):
            for j in range(part.shape[1]):
                part[i, j] = -other[i, j]
        add_moment(columns[first : first + _SLAB], len(left), right, part)


@entry(*[given("f4", 2)] * 2, *[filled("f4", 2)] * 2, *[given("f4", 2)] * 2, _F4, _F4, _F4)
def _climb_outer(
    theta: Any, velocity: Any, new_theta: Any, new_velocity: Any, left: Any, right: Any, rate: Any,
    decay: Any, momentum: Any,
) -> None:  # fmt: skip
    columns, moving = _transposed(left, rate), len(velocity) > 0
    for first in range(0, len(theta), _SLAB):
        part = slice(first, first + _SLAB)
        old, new, before = theta[part], new_theta[part], velocity[part]
        if not moving and decay == 0:  # the same numbers, in one reading less
            new[:] = old
            add_moment(columns[part], len(left), right, new)
            continue
        # Decay and gradient are added up before theta is: alone each may be lost to its rounding.
        move = new_velocity[part] if moving else new
        for i in range(len(old)):
            for j in range(old.shape[1]):
                move[i, j] = -decay * old[i, j]
                if moving:
                    move[i, j] += momentum * before[i, j]
        add_moment(columns[part], len(left), right, move)
        for i in range(len(old)):
            for j in range(old.shape[1]):
                new[i, j] = old[i, j] + move[i, j]


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
    # Of fewer units than a tile has rows most of it would be filled up.
    enough = len(weights) >= ROWS and x.shape[1] == weights.shape[1]
    if enough and _few(x, weights, bias, out) and fits(len(x), weights):
        _affine(x, weights, bias, out)
        return
    if xp is np and len(weights) < ROWS:
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
    if len(left) == len(right) and _few(left, right, less, out):
        _outer_less(left, right, less, out)
    else:
        xp.matmul(left.T, right, out=out)
        xp.subtract(out, less, out=out)


def climb_outer(way: Way, left: np.ndarray, right: np.ndarray, pace: Pace) -> None:
    """:func:`.update.climb` of a matrix along the gradient left^T right, which is not written out.

    Parameters
    ----------
    way : Way
        Matrices (units, features); the new ones are arrays of their own.
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
    if len(left) == len(right) and _few(left, right, *way):
        _climb_outer(*way, left, right, *map(np.float32, pace))
    else:
        climb(way.part(slice(None), -1), (left.T @ right).reshape(-1), way.theta.size, pace)
