"""Vectors of float32 in LLVM's own types, for kernels whose sums must stay in registers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir

from scalelatent._numba import LANES as LANES

BYTES = 4
_I32 = ir.IntType(32)


def at(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    """A pointer to a ``kind`` so many bytes behind an address; both int64."""
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Lanes of two vectors, counted through both."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def spread(builder: Any, scalar: Any, lanes: int) -> Any:
    """A scalar in all lanes of a vector of its type."""
    first = builder.insert_element(
        ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined), scalar, _I32(0)
    )
    return shuffle(builder, first, first, [0] * lanes)


def aligned(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """An uninitialised array that begins at a cache line: half the vectors of another would lie across two.

    Examples
    --------
    >>> aligned((3, 8)).ctypes.data % 64
    0
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, dtype=np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + size].view(dtype).reshape(shape)


def lined_up(a: np.ndarray) -> np.ndarray:
    """An array that begins at a cache line: itself where it does, else a copy.

    Examples
    --------
    >>> lined_up(np.arange(100.0)[1:]).ctypes.data % 64
    0
    """
    if a.ctypes.data % 64 == 0:
        return a
    out = aligned(a.shape, a.dtype)
    out[...] = a
    return out
