"""Vectors of float32 in LLVM's own types, for kernels whose sums must stay in registers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from .jit import LANES as LANES
from .jit import part

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


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """An intrinsic of LLVM, which is declared where it is not yet."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def fetch(builder: Any, address: Any, offset: Any) -> None:
    """Begin to fetch the cache line so many bytes behind an address, which may be nobody's."""
    read, near, data = _I32(0), _I32(3), _I32(1)
    place = at(builder, address, offset, ir.IntType(8))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), place, read, near, data)


def load(builder: Any, address: Any, offset: Any, kind: Any, mask: Any = None) -> Any:
    """A vector so many bytes behind an address; zeros where a mask has none."""
    place, size = at(builder, address, offset, kind), _size(kind)
    if mask is None:
        return builder.load(place, align=size)
    zero = ir.Constant(kind, [0.0] * kind.count)
    name = f"llvm.masked.load.v{kind.count}f{8 * size}.p0"
    return call(builder, name, kind, place, _I32(size), mask, zero)


def store(builder: Any, value: Any, address: Any, offset: Any, mask: Any = None) -> None:
    """Store a vector so many bytes behind an address, or what a mask has of it."""
    place, size = at(builder, address, offset, value.type), _size(value.type)
    if mask is None:
        builder.store(value, place, align=size)
        return
    name = f"llvm.masked.store.v{value.type.count}f{8 * size}.p0"
    call(builder, name, ir.VoidType(), value, place, _I32(size), mask)


def _size(kind: Any) -> int:
    return BYTES if kind.element == ir.FloatType() else 2 * BYTES


@part
def copy(of: Any, to: Any) -> None:
    """Copy a vector into one of its length. Of a slice that is assigned numba checks the shape, with a
    message that takes two seconds to compile.
    """
    for k in range(len(to)):
        to[k] = of[k]


@part
def largest(values: Any) -> Any:
    """The maximum of a vector, NaN where it has one; ``max`` of numba takes five times as long to compile."""
    top = values[0]
    for k in range(1, len(values)):
        if values[k] > top or values[k] != values[k]:
            top = values[k]
    return top


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
