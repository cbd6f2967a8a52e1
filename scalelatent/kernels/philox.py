"""The random generator Philox 4x64-10 in numba. It gives the numbers of ``numpy.random.Philox``.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Creating a
`numpy.random.Philox` takes microseconds, which is too slow for a kernel that needs one stream per row. A test
compares the numbers of both.
"""

from __future__ import annotations

import numpy as np

from .jit import entry, in_array, out_array, subkernel

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_M0, _M1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_W0, _W1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)


@subkernel
def mulhi(a: np.uint64, b: np.uint64) -> np.uint64:
    """Return the high 64 bits of the product of two uint64 numbers."""
    a_low, a_high = a & _LOW, a >> _HALF
    b_low, b_high = b & _LOW, b >> _HALF
    low = a_low * b_low
    middle = a_high * b_low + (low >> _HALF)
    carry = (middle & _LOW) + a_low * b_high
    return a_high * b_high + (middle >> _HALF) + (carry >> _HALF)


@subkernel
def philox(
    c0: np.uint64, c1: np.uint64, c2: np.uint64, c3: np.uint64, k0: np.uint64, k1: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """Return four random words from a counter and a key, all uint64."""
    for _ in range(10):
        high0, low0 = mulhi(_M0, c0), _M0 * c0
        high1, low1 = mulhi(_M1, c2), _M1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _W0, k1 + _W1
    return c0, c1, c2, c3


@subkernel
def draw_below(draw: np.uint32, n: int) -> np.int64:
    """Return a uniform number in range(n), from a uniform uint32."""
    return np.int64((np.uint64(draw) * np.uint64(n)) >> _HALF)


@entry(in_array("u8", 1), in_array("i8", 1), out_array("u4", 2))
def row_draws(key: np.ndarray, rows: np.ndarray, out: np.ndarray) -> None:
    """Fill ``out`` (rows, draws) with random 32-bit integers that depend on the key and the row alone.

    ``key`` is (seed, stage, epoch). Epoch 0 gives the draws of a dataset that is generated with a corruption.
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
                # numpy increments the counter before it draws
                a, b, c, d = philox(np.uint64(step + 1), zero, zero, key[2], key[0], key[1])
            lane = word % 4
            drawn = a if lane == 0 else b if lane == 1 else c if lane == 2 else d
            out[i, k] = np.uint32(drawn if k % 2 == 0 else drawn >> _HALF)
