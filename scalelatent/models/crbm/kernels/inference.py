"""Inputs and results that the inference kernels in numpy, numba and CuPy share.

Each row of a batch has a graph. All graphs share the couplings W (v, h), and each graph has its biases, a row
of bv (rows, v) and of bh (rows, h): p(v, h) is proportional to exp(v'W h + bv'v + bh'h) for units 0 or 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scalelatent.kernels.arrays import Array
from scalelatent.kernels.jit import entry, in_array

# Upper bound of |W|. A message is at most e^|W|; for larger W message times belief exceeds float32.
MAX_WEIGHT = 40.0
# A row has converged if no belief changed by more than this in its last sweep: epsilon of Ping and Ihler
# (2017).
CONVERGED = 1e-3
# Largest number of beliefs that are multiplied before the log is taken. Each belief is at least a half, so
# the product stays above the smallest float64.
PRODUCT_UNITS = 512
# Largest number of messages that are multiplied before mantissa and exponent are split, and largest |log| of
# the product of these messages.
_FACTORS, _MAX_LOG = 8, 80.0
# Upper bound of the bytes of the messages of all graphs that a GPU works on at a time.
MESSAGE_BYTES = 256 * 2**20
BLOCKS = 8  # thread blocks of a cluster; the same number as in gpu.cu
# Largest number of chains (parts of a batch) of a step on a GPU that keeps the parameters; the CUDA kernel in
# gpu.cu adds at most this many gradients.
MOST_CHAINS = 1023


class WeightError(ValueError):
    """Couplings or biases are too large for messages in float32, or not finite."""


@dataclass(frozen=True)
class Inference:
    """Beliefs of a batch of graphs."""

    # (rows, v) and (rows, h): log P(unit = 1) - log P(unit = 0); the belief is the sigmoid
    lv: Array
    lh: Array
    # int (rows,): number of sweeps, each from the hidden units to the visible units and back
    sweeps: Array | None
    # (rows,): largest change of a belief in the last sweep; the first sweep starts from sigmoid(biases)
    change: Array | None
    # float64 (rows,), or None: Bethe estimate of log Z, from the kernel that computes pair beliefs
    log_z: Array | None = None


def largest_magnitude(a: Array) -> float:
    """Return the largest absolute value of an array on host or device; NaN if the array contains NaN."""
    if not a.size:
        return 0.0
    if not isinstance(a, np.ndarray):
        return float(abs(a).max())  # the maximum is computed on the device, and only one number is copied
    if a.dtype == np.float32 and a.flags.c_contiguous:
        return float(np.int32(_largest_bits(a.reshape(-1).view(np.int32))).view(np.float32))
    return max(float(a.max()), -float(a.min()))  # abs would allocate a second array


@entry(in_array("i4", 1))
def _largest_bits(bits: np.ndarray) -> np.int32:
    """Return the largest bits of float32 numbers without their signs.

    Without the signs, the bits as integers have the order of the numbers, and NaN comes after infinity. The
    compiled loop compares vectors of integers.
    """
    most = np.int32(0)
    for i in range(len(bits)):
        most = max(most, bits[i] & np.int32(0x7FFFFFFF))
    return most


def check_weights(largest: float) -> None:
    """Raise `WeightError` if messages in float32 cannot carry couplings as large as ``largest``."""
    if not math.isfinite(largest):
        raise WeightError(
            "the couplings W are not all finite: lower the learning rate or raise the weight decay"
        )
    if largest > MAX_WEIGHT:
        raise WeightError(
            f"the largest coupling |W| is {largest:g}; beyond {MAX_WEIGHT:g} its messages leave the range of "
            "float32: lower the learning rate or raise the weight decay"
        )


def check_graphs(
    shape: tuple[int, int], bv: tuple[int, ...], bh: tuple[int, ...], n_sweeps: int, tol: float | None
) -> None:
    """Raise ValueError if biases of these shapes do not fit couplings of ``shape``, or settings are wrong."""
    v, h = shape
    if len(bv) != 2 or len(bh) != 2 or bv[0] != bh[0] or bv[1] != v or bh[1] != h:
        raise ValueError(
            f"biases of shape {bv} and {bh} do not fit couplings of shape {shape}: give shapes (rows, {v}) "
            f"and (rows, {h})"
        )
    if n_sweeps < 1:
        raise ValueError(f"n_sweeps={n_sweeps}: give at least one sweep")
    if tol is not None and not tol >= 0:
        raise ValueError(f"tol={tol!r}: give a number of at least 0, or None for a fixed number of sweeps")


def check_pairs(pairs: tuple[int, ...], shape: tuple[int, int]) -> None:
    """Raise ValueError if the array of pair beliefs does not have the shape of W."""
    if pairs != shape:
        raise ValueError(f"pairs has shape {pairs}: give the shape of W, {shape}")


def check_biases(*biases: np.ndarray) -> None:
    """Raise `WeightError` if a bias is infinite or NaN, which messages would hide."""
    for b in biases:
        if not math.isfinite(largest_magnitude(b)):
            row = int(np.flatnonzero(~np.isfinite(b).all(axis=1))[0])
            raise WeightError(
                f"the biases of row {row} are not all finite: lower the learning rate, or look for NaN in "
                "the rows x"
            )


def choose_limits(most: float) -> tuple[int, float]:
    """Return, for max |W|, how many messages may be multiplied in float32, and a bound of |log odds|."""
    check_weights(most)
    factors = max(1, min(_FACTORS, int(_MAX_LOG / max(most, 1.0))))
    return factors, max(87.0 - 2 * most, min(86.0, 2 * most + 17.0))
