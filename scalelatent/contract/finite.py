"""Non-finite values, and values beyond float32."""

from __future__ import annotations

import numpy as np

from scalelatent.errors import DivergenceError
from scalelatent.kernels.sparse_rows import CsrRows

from .learners import Block

# As the first step says it, before the weights have moved.
_FIRST = ("pass 1", "step 1")

LARGEST = 1e18
"""Squares of larger values, and their sums, are beyond float32."""


def find_nonfinite(block: Block, largest: float = np.inf) -> str | None:
    """Where the first non-finite or too large value of a block lies, in words, or None."""
    x = block.x
    if x.dtype.kind != "f" and (largest == np.inf or x.dtype.kind not in "iu"):
        return None
    if isinstance(x, CsrRows):
        x = x.to_dense()
    elif not isinstance(x, np.ndarray):
        x = x.get()  # rows that lie on a device
    with np.errstate(over="ignore"):
        single = x.astype(np.float32, copy=False)
        bad = ~np.isfinite(single) | (np.abs(single) > largest)
    if not bad.any():
        return None
    row, feature = map(int, np.argwhere(bad)[0])
    number, value = block.number(row), x[row, feature]
    place = f"row {number}, feature {feature} is {value:g}"
    if not np.isfinite(value):
        return place
    if np.isfinite(single[row, feature]):
        return f"{place}, too large for products in float32: scale the features below {largest:g}"
    return f"{place}, beyond float32"


def find_too_large(block: Block) -> str | None:
    """Like :func:`find_nonfinite` with ``LARGEST``."""
    x = block.x.data if isinstance(block.x, CsrRows) else block.x
    if x.dtype.kind not in "fiu" or not isinstance(x, np.ndarray):
        return None
    if x.dtype.kind != "f":  # of the integers only those of 8 bytes are ever so large, and their squares wrap
        fits = x.dtype.itemsize < 8 or not x.size or max(-int(x.min()), int(x.max())) <= LARGEST
        return None if fits else find_nonfinite(block, LARGEST)
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(np.vdot(x, x))
    return None if squares <= LARGEST**2 else find_nonfinite(block, LARGEST)


def diverged(members: list[int], when: str, step: str) -> DivergenceError:
    """The error of a fit whose objective is not finite any more."""
    if when in _FIRST:
        why = ", with the first weights: scale the features to about 1"
    else:
        why = f": the weights have grown beyond float32; {step}"
    return DivergenceError(f"the log-loss of member(s) {members} is not finite in {when}{why}")
