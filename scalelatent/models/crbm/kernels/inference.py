"""What every body of the inference kernels takes and returns.

A batch of rows is a batch of graphs with shared couplings W (v, h) and biases of their own, bv (rows, v) and
bh (rows, h): p(v, h) is proportional to exp(v'W h + bv'v + bh'h), all units 0 or 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scalelatent.kernels.arrays import Array
from scalelatent.kernels.jit import entry, given

# Beyond this a message, e^|W|, times a belief leaves the range of float32.
MAX_WEIGHT = 40.0
# A row counts as converged when no belief moved by more than this in its last sweep (the paper's epsilon).
CONVERGED = 1e-3
# Beliefs in a unit's likelier state, at least a half each, that can be multiplied in float64 without
# underflow, and fewer.
PRODUCT_UNITS = 512
_FACTORS, _RANGE = 8, 80.0
# Of the messages of the graphs that a card works on at a time.
MESSAGE_BYTES = 256 * 2**20
BLOCKS = 8  # thread blocks of a cluster, as in gpu.cu


class WeightError(ValueError):
    """Couplings or biases that float32 messages cannot carry: too large, or not finite."""


@dataclass(frozen=True)
class Inference:
    """Beliefs of a batch of graphs."""

    # lv, lh: (rows, v) and (rows, h): log odds of the units' beliefs: log P(unit = 1) - log
    # P(unit = 0); the belief is their sigmoid
    lv: Array
    lh: Array
    # int (rows,): sweeps done: from the hidden units to the visible ones and back
    sweeps: Array | None
    # (rows,): how far the belief that moved most moved in the last sweep, divided by the
    # damping; the first sweep starts from sigmoid(biases)
    change: Array | None
    # float64 (rows,), or None: Bethe estimate of log Z, where the kernel makes one
    log_z: Array | None = None

    def converged(self, tol: float = CONVERGED) -> Array:
        """Rows (bool) of whose beliefs none moved by more than ``tol`` in the last sweep."""
        assert self.change is not None
        return self.change <= tol


def magnitude(a: Array) -> float:
    """Largest absolute value, of an array on host or device; NaN where there is one."""
    if not a.size:
        return 0.0
    if not isinstance(a, np.ndarray):
        return float(abs(a).max())  # a device is asked once
    if a.dtype == np.float32 and a.flags.c_contiguous:
        return float(np.int32(_largest_bits(a.reshape(-1).view(np.int32))).view(np.float32))
    return max(float(a.max()), -float(a.min()))  # no temporary array, unlike abs


@entry(given("i4", 1))
def _largest_bits(bits: np.ndarray) -> np.int32:
    """Of float32 numbers without their sign: as whole numbers they have the same order, NaN after infinity,
    and are compared in vectors.
    """
    most = np.int32(0)
    for i in range(len(bits)):
        most = max(most, bits[i] & np.int32(0x7FFFFFFF))
    return most


def check_weights(largest: float) -> None:
    """Raise :class:`WeightError` where float32 messages cannot carry couplings as large as ``largest``."""
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
    shape: tuple[int, int],
    bv: tuple[int, ...],
    bh: tuple[int, ...],
    n_sweeps: int,
    tol: float | None,
    damping: float = 1.0,
) -> None:
    """Raise ValueError unless biases of these shapes belong to couplings of ``shape``, and the sweeps, the
    tolerance and the damping make sense.
    """
    v, h = shape
    if len(bv) != 2 or len(bh) != 2 or bv[0] != bh[0] or bv[1] != v or bh[1] != h:
        raise ValueError(
            f"biases of shape {bv} and {bh} do not belong to couplings of shape {shape}: wanted are "
            f"(rows, {v}) and (rows, {h})"
        )
    if n_sweeps < 1:
        raise ValueError(f"n_sweeps={n_sweeps}: at least one sweep is needed")
    if tol is not None and not tol >= 0:
        raise ValueError(f"tol={tol!r} is not a number of at least 0, or None for all n_sweeps sweeps")
    if not 0 < damping <= 1:
        raise ValueError(f"damping={damping!r} is not a number in (0, 1], the weight of new messages")


def check_biases(*biases: np.ndarray) -> None:
    """Raise :class:`WeightError` where a bias is infinite or no number: messages would hide it."""
    for b in biases:
        if not math.isfinite(magnitude(b)):
            row = int(np.flatnonzero(~np.isfinite(b).all(axis=1))[0])
            raise WeightError(
                f"the biases of row {row} are not all finite: lower the learning rate, or look for NaN in "
                "the rows x"
            )


def limits_of(w: Array) -> tuple[int, float]:
    """For couplings of float32: how many messages may be multiplied, and how far log odds are told apart."""
    most = magnitude(w)
    check_weights(most)
    factors = max(1, min(_FACTORS, int(_RANGE / max(most, 1.0))))
    return factors, max(87.0 - 2 * most, min(86.0, 2 * most + 17.0))
