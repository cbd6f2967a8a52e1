"""Find values that are NaN, infinite or too large for float32, and describe them for error messages."""

from __future__ import annotations

import numpy as np

from scalelatent.errors import DivergenceError
from scalelatent.kernels.sparse_rows import CsrRows

from .learners import Block

# Names of the first pass and the first minibatch step, which compute with the initial weights.
_FIRST_STEPS = ("pass 1", "step 1")

LARGEST_VALUE = 1e18
"""Largest magnitude of a feature; sums of squares of larger values overflow float32."""


def find_nonfinite(block: Block, largest: float = np.inf) -> str | None:
    """Describe the first value that is NaN, infinite or has a magnitude above ``largest``, or return None."""
    x = block.x
    if x.dtype.kind != "f" and (largest == np.inf or x.dtype.kind not in "iu"):
        return None
    if isinstance(x, CsrRows):
        x = x.to_dense()
    elif not isinstance(x, np.ndarray):
        x = x.get()  # copies rows from the GPU
    with np.errstate(over="ignore"):
        x_float32 = x.astype(np.float32, copy=False)
        bad = ~np.isfinite(x_float32) | (np.abs(x_float32) > largest)
    if not bad.any():
        return None
    row, feature = map(int, np.argwhere(bad)[0])
    number, value = block.row_number(row), x[row, feature]
    place = f"row {number}, feature {feature} is {value:g}"
    if not np.isfinite(value):
        return place
    if np.isfinite(x_float32[row, feature]):
        return f"{place}, too large for products in float32: scale the features below {largest:g}"
    return f"{place}, beyond float32: scale the features"


def find_too_large(block: Block) -> str | None:
    """Describe the first value that is NaN, infinite or has a magnitude above LARGEST_VALUE; else None.

    For floats, the sum of all squares is computed first, which is fast; single values are checked only if
    this sum is too large.
    """
    x = block.x.data if isinstance(block.x, CsrRows) else block.x
    if x.dtype.kind not in "fiu" or not isinstance(x, np.ndarray):
        return None
    if x.dtype.kind != "f":  # only integers of 8 bytes can be too large; their squares overflow
        fits = x.dtype.itemsize < 8 or not x.size or max(-int(x.min()), int(x.max())) <= LARGEST_VALUE
        return None if fits else find_nonfinite(block, LARGEST_VALUE)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(np.vdot(x, x))
    return None if squares <= LARGEST_VALUE**2 else find_nonfinite(block, LARGEST_VALUE)


def make_divergence_error(members: list[int], when: str, advice: str) -> DivergenceError:
    """Return the error for models ``members`` whose log-loss is not finite in the pass or step ``when``."""
    if when in _FIRST_STEPS:
        why = ", with the initial weights: scale the features to about 1"
    else:
        why = f": the weights have grown beyond float32; {advice}"
    return DivergenceError(f"the log-loss of member(s) {members} is not finite in {when}{why}")
