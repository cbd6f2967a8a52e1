"""Inputs and results that the inference kernels in numpy, numba and CuPy share.

Each row of a batch has a graph whose units, visible v and hidden h, are 0 or 1. All graphs share the
couplings W, and each graph has biases bv and bh: p(v, h) is proportional to exp(v'W h + bv'v + bh'h).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scalelatent.kernels.arrays import Array
from scalelatent.kernels.jit import entry, in_array

# Upper bound of |W|. A message between units is at most e^|W|; with a larger W its products exceed float32.
MAX_WEIGHT = 40.0
# A row has converged if no P(unit = 1) changed by more than this in its last sweep (epsilon of Ping and
# Ihler, 2017).
CONVERGED = 1e-3
# Largest number of probabilities that are multiplied before the log is taken. Each of them is at least 0.5,
# so the product stays above the smallest float64.
PRODUCT_UNITS = 512
# Largest number of messages that are multiplied before mantissa and exponent are split, and largest |log| of
# the product of these messages, which keeps it in the range of float32.
_FACTORS, _MAX_LOG = 8, 80.0
# Upper bound of the bytes of the messages of all graphs that a GPU infers at a time.
MESSAGE_BYTES = 256 * 2**20
BLOCKS = 8  # thread blocks of a cluster; the same number as in gpu.cu
# Largest number of chains (parts of a batch) of a step whose parameters stay on a GPU. The CUDA kernel that
# adds their gradients has a tree of ten levels.
MOST_CHAINS = 1023


class WeightError(ValueError):
    """Couplings or biases are too large for messages in float32, or not finite."""


@dataclass(frozen=True)
class Inference:
    """Result of an inference for a batch of rows: estimates of P(unit = 1) in each row's graph."""

    lv: Array  # (rows, visible units): log odds log P(v = 1) - log P(v = 0)
    lh: Array  # (rows, hidden units): log odds log P(h = 1) - log P(h = 0)
    # int (rows,): number of sweeps, each with messages from the hidden units to the visible units and back
    sweeps: Array | None
    # (rows,): largest change of P(unit = 1) in the last sweep, not counting the extra sweep that some kernels
    # make for P(v = 1, h = 1) after a row has met ``tol``; the first sweep starts from sigmoid(biases)
    change: Array | None
    # float64 (rows,): Bethe estimate of log Z; None unless P(v = 1, h = 1) was computed as well
    log_z: Array | None = None


def find_largest_magnitude(array: Array) -> float:
    """Return the largest absolute value of an array on host or device; NaN if the array contains NaN."""
    if not array.size:
        return 0.0
    if not isinstance(array, np.ndarray):
        return float(abs(array).max())  # the device computes the maximum, so only one number is copied
    if array.dtype == np.float32 and array.flags.c_contiguous:
        return float(np.int32(_find_largest_bits(array.reshape(-1).view(np.int32))).view(np.float32))
    return max(float(array.max()), -float(array.min()))  # abs would allocate a second array


@entry(in_array("i4", 1))
def _find_largest_bits(bits: np.ndarray) -> np.int32:
    """Return the largest of float32 numbers without their signs; numbers and result are int32 bits.

    The bits of positive float32 numbers, read as integers, have the order of the numbers, and NaN comes after
    infinity. Integers are compared in vectors, which floats that may be NaN are not.
    """
    most = np.int32(0)
    for i in range(len(bits)):
        most = max(most, bits[i] & np.int32(0x7FFFFFFF))
    return most


def check_weights(largest: float) -> None:
    """Raise `WeightError` if ``largest``, max |W|, is not finite or too large for messages in float32."""
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
    """Raise ValueError if shapes of biases do not fit that of W, or if ``n_sweeps`` or ``tol`` is wrong."""
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
    """Raise ValueError if ``pairs``, the shape of the array of P(v = 1, h = 1), is not the shape of W."""
    if pairs != shape:
        raise ValueError(f"pairs has shape {pairs}: give the shape of W, {shape}")


def check_biases(*biases: np.ndarray) -> None:
    """Raise `WeightError` if a bias is infinite or NaN, which the results of an inference may not show."""
    for b in biases:
        if not math.isfinite(find_largest_magnitude(b)):
            row = int(np.flatnonzero(~np.isfinite(b).all(axis=1))[0])
            raise WeightError(
                f"the biases of row {row} are not all finite: lower the learning rate, or look for NaN in "
                "the rows x"
            )


def choose_limits(most: float) -> tuple[int, float]:
    """Return limits of float32 if max |W| is ``most``: factors of a product, and largest |log odds|.

    The first limit is the number of messages that are multiplied before mantissa and exponent are split. The
    second applies when P(unit = 1) and P(unit = 0) are computed from log odds.
    """
    check_weights(most)
    factors = max(1, min(_FACTORS, int(_MAX_LOG / max(most, 1.0))))
    return factors, max(87.0 - 2 * most, min(86.0, 2 * most + 17.0))
