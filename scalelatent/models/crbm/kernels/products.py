"""Products of the rows of a small batch with the parameters, on host or device.

A step reads every matrix of parameters for about twenty rows. OpenBLAS packs a matrix before it multiplies,
and for few rows packing costs more than the product. The kernels of few_rows.py read the matrix in place.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.kernels.arrays import Array, align_copy

from .cpu import few_rows
from .update import StepArrays, StepRates, add_to, ascend

# Largest number of rows for which the kernels of few_rows.py are used instead of OpenBLAS. On processors with
# vectors of sixteen floats they are faster up to this number of rows. With eight floats they are as fast as
# OpenBLAS at this number (benchmarks/crbm_steps.py --parts products).
MAX_ROWS = 160
# For weights of fewer units than this, `write_affine_map` uses einsum on the host instead of BLAS, whose sums
# then have an order that depends on the position of a row in the batch.
_FEW_UNITS = 8


def fits_few_rows(rows: Array, *others: Array) -> bool:
    """Return whether few_rows.py multiplies the arrays: contiguous float32 on the host, 1 to 160 ``rows``."""
    return 0 < len(rows) <= MAX_ROWS and all(
        isinstance(a, np.ndarray) and a.dtype == np.float32 and a.flags.c_contiguous for a in (rows, *others)
    )


def write_affine_map(x: Array, weights: Array, bias: Array, out: Array, xp: ModuleType) -> None:
    """Write x weights^T + bias to ``out``; ``weights`` has a row for each unit."""
    if x.shape[1] == weights.shape[1] and fits_few_rows(x, weights, bias, out):
        # Align the rows, because loading an unaligned vector reads two cache lines.
        few_rows.products(align_copy(x), weights, bias, out)
        return
    if xp is np and len(weights) < _FEW_UNITS:
        np.einsum("ij,kj->ik", x, weights, out=out)
    else:
        xp.matmul(x, weights.T, out=out)
    out += bias


def write_outer_difference(left: Array, right: Array, subtracted: Array, out: Array, xp: ModuleType) -> None:
    """Write left^T right - subtracted to ``out``."""
    if len(left) == len(right) and fits_few_rows(left, right, subtracted, out):
        few_rows.write_outer_difference(left, right, subtracted, out)
    else:
        xp.matmul(left.T, right, out=out)
        xp.subtract(out, subtracted, out=out)


def add_outer_difference(
    left: Array, right: Array, subtracted: Array, total: np.ndarray, backend: Backend
) -> None:
    """Round left^T right - subtracted to float32, and add it to a ``total`` of float64 on the host."""
    if len(left) == len(right) and fits_few_rows(left, right, subtracted):
        few_rows.add_outer_difference(left, right, subtracted, total)
        return
    out = backend.buffer("outer", subtracted.shape, subtracted.dtype)
    write_outer_difference(left, right, subtracted, out, backend.xp)
    add_to(total.reshape(-1), backend.to_host(out).reshape(-1))


def ascend_outer(arrays: StepArrays, left: np.ndarray, right: np.ndarray, rates: StepRates) -> None:
    """Take a gradient step of a weight matrix along left^T right; for few rows the product is not stored."""
    if len(left) != len(right) or not fits_few_rows(left, right, *arrays):
        ascend(arrays.slice_part(slice(None), -1), (left.T @ right).reshape(-1), arrays.theta.size, rates)
        return
    right, (rate, decay, momentum) = align_copy(right), map(np.float32, rates)
    if len(arrays.velocity) or decay:
        few_rows.ascend_outer(*arrays, rate * left, right, decay, momentum)
    else:
        few_rows.add_outer_product(rate * left, right, arrays.theta, arrays.new_theta)


def ascend_outer_difference(
    arrays: StepArrays, left: np.ndarray, right: np.ndarray, subtracted: np.ndarray, rates: StepRates,
    backend: Backend,
) -> None:  # fmt: skip
    """Take a gradient step of a matrix of weights along left^T right - subtracted."""
    theta, velocity, new_theta, _ = arrays
    if not len(velocity) and not rates.decay and fits_few_rows(left, right, subtracted, theta, new_theta):
        few_rows.ascend_outer_difference(left, right, subtracted, np.float32(rates.rate), theta, new_theta)
        return
    out = backend.buffer("outer", subtracted.shape, subtracted.dtype)
    write_outer_difference(left, right, subtracted, out, backend.xp)
    ascend(arrays.slice_part(slice(None), -1), out.reshape(-1), theta.size, rates)
