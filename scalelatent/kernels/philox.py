"""The random generator Philox 4x64-10 in numba. It gives the numbers of ``numpy.random.Philox``.

The algorithm is from Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
Creating a `numpy.random.Philox` takes microseconds, which is too slow for a kernel that needs a generator for
each row. A test compares the numbers of this module with those of numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .jit import entry, in_array, out_array, subkernel

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.typing.templates import Signature

_HALF = np.uint64(32)
_M0, _M1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_W0, _W1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)


def _mulhi(typingctx: object, a: object, b: object) -> tuple[Signature, Callable[..., ir.Value]]:
    wide = ir.IntType(128)

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        product = builder.mul(*(builder.zext(value, wide) for value in args))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


# mulhi(a, b) returns the high 64 bits of the product of two uint64 numbers.
mulhi: Callable[..., np.uint64] = intrinsic(_mulhi)


@subkernel
def philox(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Return four random uint64 numbers from a counter (c0 to c3) and a key (k0, k1)."""
    for _ in range(10):
        high0, low0 = mulhi(_M0, c0), _M0 * c0
        high1, low1 = mulhi(_M1, c2), _M1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _W0, k1 + _W1
    return c0, c1, c2, c3


@subkernel
def draw_below(draw: np.uint32, n: int) -> np.int64:
    """Return a random integer from 0 to n - 1, computed from the uniform random uint32 ``draw``."""
    return np.int64((np.uint64(draw) * np.uint64(n)) >> _HALF)


@entry(in_array("u8", 1), in_array("i8", 1), out_array("u4", 2))
def row_draws(key: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """Fill ``out`` (rows, draws) with random 32-bit integers that depend on the key and the row alone.

    ``key`` is (seed, hash of the purpose, epoch). Datasets that are generated with a corruption use epoch 0.
    """
    count, zero = out.shape[1], np.uint64(0)
    words = (count + 1) // 2  # words of 64 bits per row; one counter gives four words
    for i in range(out.shape[0]):
        first = rows[i] * words
        step = np.int64(-1)
        a = b = c = d = zero
        for k in range(count):
            word = first + k // 2
            if word // 4 != step:
                step = word // 4
                # numpy increments the counter before it computes random numbers, so this code adds 1.
                a, b, c, d = philox(np.uint64(step + 1), zero, zero, key[2], key[0], key[1])
            lane = word % 4
            drawn = a if lane == 0 else b if lane == 1 else c if lane == 2 else d
            out[i, k] = np.uint32(drawn if k % 2 == 0 else drawn >> _HALF)
