"""Types of arrays on the CPU or a GPU and of dense or sparse rows, and arrays that start at a cache line.

This module does not import numba.
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
"""An array of numpy, or of CuPy if a GPU computes."""

HostRows: TypeAlias = "np.ndarray | CsrRows"
"""Rows in memory as the engine passes them to a reduction or a map: dense, or CSR if it requests CSR."""

DenseOrCsr: TypeAlias = "np.ndarray | csr_array"
"""Rows as a dataset returns them."""


def check_same_width(one: int, other: int) -> None:
    """Raise DataError if rows and a model have different numbers of features, ``one`` and ``other``.

    Without this check, compiled code would read beyond the end of an array.
    """
    if one != other:
        raise DataError(
            f"the rows and the model have different numbers of features, {one} and {other}: pass rows with "
            "the features that the model was fitted on"
        )


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> np.ndarray:
    """Return an uninitialised array that starts at a cache line, so that no vector spans two lines."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, dtype=np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + size].view(dtype).reshape(shape)


def align_copy(a: np.ndarray) -> np.ndarray:
    """Return the array if it starts at a cache line, otherwise a copy that starts at a cache line."""
    if a.ctypes.data % 64 == 0:
        return a
    out = aligned_empty(a.shape, a.dtype)
    out[...] = a
    return out
