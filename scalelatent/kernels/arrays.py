"""Names of arrays that may be on a card, and of rows that may be sparse; the check of their widths.

Arrays that begin at a cache line are made here too. Nothing in this module needs numba.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from scalelatent.errors import DataError

if TYPE_CHECKING:
    import cupy
    import numpy.typing as npt
    from scipy.sparse import csr_array

    from .sparse_rows import CsrRows

Array: TypeAlias = "np.ndarray | cupy.ndarray"
"""An array of numpy, or of CuPy where a card computes."""

HostRows: TypeAlias = "np.ndarray | CsrRows"
"""Rows in memory as a work takes them: dense, or CSR where it wants that."""

DenseOrCsr: TypeAlias = "np.ndarray | csr_array"
"""Rows as a dataset reads them."""


def check_same_width(one: int, other: int) -> None:
    """Refuse rows and a model of different widths, before compiled code reads beyond the end of one."""
    if one != other:
        raise DataError(
            f"the rows and the model have different numbers of features, {one} and {other}: pass rows with "
            "the features that the model was fitted on"
        )


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> np.ndarray:
    """An empty array that begins at a cache line: half the vectors of another would lie across two."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, dtype=np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + size].view(dtype).reshape(shape)


def lined_up(a: np.ndarray) -> np.ndarray:
    """An array that begins at a cache line: itself where it does, else a copy."""
    if a.ctypes.data % 64 == 0:
        return a
    out = aligned(a.shape, a.dtype)
    out[...] = a
    return out
