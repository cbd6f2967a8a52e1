"""Rows that are no numbers."""

from __future__ import annotations

import numpy as np

from .base import Block
from .csr import CsrRows


def find_nonfinite(block: Block) -> str | None:
    """Where the first value of a block that is not finite in float32 lies, in words, or None.

    Examples
    --------
    >>> find_nonfinite(Block(np.array([[0.0, np.nan]]), None, None, 7))
    'row 7, feature 1 is nan'
    >>> find_nonfinite(Block(np.array([[0.0, 1e39]]), None, None, 7))
    'row 7, feature 1 is 1e+39, beyond float32'
    """
    x = block.x
    if x.dtype.kind != "f":
        return None
    if isinstance(x, CsrRows):
        x = x.to_dense()
    elif not isinstance(x, np.ndarray):
        x = x.get()  # rows that lie on a device
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(x.astype(np.float32, copy=False))
    if not bad.any():
        return None
    row, feature = map(int, np.argwhere(bad)[0])
    number, value = block.number(row), x[row, feature]
    return f"row {number}, feature {feature} is {value}{', beyond float32' if np.isfinite(value) else ''}"
