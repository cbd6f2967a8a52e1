"""Products of a batch's few rows with the parameters, on host or device.

A step of a small batch reads every matrix of parameters for some twenty rows. OpenBLAS packs a matrix before
it multiplies, which then costs more than the product; the tiles of :mod:`.cpu.few_rows` read it in place.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.kernels.arrays import Array, lined_up

from .cpu import few_rows
from .update import StepRates, Way, add_to, climb

# Up to so many rows the tiles are ahead of OpenBLAS; with vectors of eight both are even there
# (benchmarks/crbm_steps.py --parts products).
MAX_ROWS = 160
# Below so many units BLAS makes a matrix times a vector of a product.
_FEW_UNITS = 8


def few(rows: Array, *others: Array) -> bool:
    """Whether the tiles serve: float32 on the host, and few rows."""
    return 0 < len(rows) <= MAX_ROWS and all(
        isinstance(a, np.ndarray) and a.dtype == np.float32 and a.flags.c_contiguous for a in (rows, *others)
    )


def affine(x: Array, weights: Array, bias: Array, out: Array, xp: ModuleType) -> None:
    """Write x weights^T + bias to ``out``."""
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


def outer_less(left: Array, right: Array, less: Array, out: Array, xp: ModuleType) -> None:
    """Write left^T right - less to ``out``."""
    if len(left) == len(right) and few(left, right, less, out):
        few_rows.outer_less(left, right, less, out)
    else:
        xp.matmul(left.T, right, out=out)
        xp.subtract(out, less, out=out)


def add_outer_less(left: Array, right: Array, less: Array, total: np.ndarray, backend: Backend) -> None:
    """Add left^T right - less, rounded to float32, to a ``total`` of float64 on the host."""
    if len(left) == len(right) and few(left, right, less):
        few_rows.add_outer_less(left, right, less, total)
        return
    out = backend.buffer("outer", less.shape, less.dtype)
    outer_less(left, right, less, out, backend.xp)
    add_to(total.reshape(-1), backend.to_host(out).reshape(-1))


def climb_outer(way: Way, left: np.ndarray, right: np.ndarray, pace: StepRates) -> None:
    """:func:`.update.climb` of a matrix along the gradient left^T right, which is not written out."""
    if len(left) != len(right) or not few(left, right, *way):
        climb(way.part(slice(None), -1), (left.T @ right).reshape(-1), way.theta.size, pace)
        return
    right, (rate, decay, momentum) = lined_up(right), map(np.float32, pace)
    if len(way.velocity) or decay:
        few_rows.climb_outer(*way, rate * left, right, decay, momentum)
    else:
        few_rows.plus_outer(rate * left, right, way.theta, way.new_theta)


def climb_outer_less(
    way: Way, left: np.ndarray, right: np.ndarray, less: np.ndarray, pace: StepRates, backend: Backend
) -> None:
    """:func:`climb_outer` along left^T right - less."""
    theta, velocity, new_theta, _ = way
    if not len(velocity) and not pace.decay and few(left, right, less, theta, new_theta):
        few_rows.climb_outer_less(left, right, less, np.float32(pace.rate), theta, new_theta)
        return
    out = backend.buffer("outer", less.shape, less.dtype)
    outer_less(left, right, less, out, backend.xp)
    climb(way.part(slice(None), -1), out.reshape(-1), theta.size, pace)
