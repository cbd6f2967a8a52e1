"""Draws without replacement for many clusterings at once; numpy would take longer to start each stream.

For each number, a byte of the random stream decides whether the draw contains that number. Then random
numbers are added to the draw, or removed from it, until it has the requested size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from scalelatent.kernels.jit import entry, in_array, out_array, subkernel

if TYPE_CHECKING:
    from numba.core.base import BaseContext
    from numba.core.typing.templates import Signature

# Number of words of a stream that are computed together.
_WORDS = 1024
# Constants of Philox (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3).
_FACTORS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_STEPS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)


def choose_masks(key: np.ndarray, layer: int, first: int, count: int, n: int, m: int) -> np.ndarray:
    """Return a draw of ``m`` of ``n`` numbers for each of some clusterings, bool (count, n).

    Draw i has the stream of ``numpy.random.Philox(key=key, counter=[0, 0, first + i, layer])``, from which
    numpy's ``random_raw`` reads the same words.
    """
    out, words = np.empty((count, n), dtype=np.bool_), np.empty(_WORDS, dtype=np.uint64)
    _choose(key, layer, first, n, m, round(256 * m / n), words, words.view(np.uint8), out)
    return out


@intrinsic
def _multiply_high(typingctx, a, b):  # type: ignore[no-untyped-def]
    """Return the upper 64 bits of the product of two uint64."""
    wide = ir.IntType(128)

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]
    ) -> ir.Value:
        product = builder.mul(*(builder.zext(value, wide) for value in args))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


@subkernel
def _fill(key: np.ndarray, layer: int, which: int, first: int, words: np.ndarray) -> None:
    """Write words of the stream of a draw, from number ``first``, a multiple of four."""
    for i in range(0, len(words), 4):
        a, b = np.uint64((first + i) // 4 + 1), np.uint64(0)
        c, d = np.uint64(which), np.uint64(layer)
        one, two = key[0], key[1]
        for _ in range(10):
            high: np.uint64 = _multiply_high(_FACTORS[0], a)  # type: ignore[call-arg]
            other: np.uint64 = _multiply_high(_FACTORS[1], c)  # type: ignore[call-arg]
            a, b, c, d = other ^ b ^ one, _FACTORS[1] * c, high ^ d ^ two, _FACTORS[0] * a
            one, two = one + _STEPS[0], two + _STEPS[1]
        words[i], words[i + 1], words[i + 2], words[i + 3] = a, b, c, d


def _choose(
    key: np.ndarray, layer: int, first: int, n: int, m: int, share: int, words: np.ndarray,
    numbers: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    """Write the masks. ``words`` is scratch space, and ``numbers`` is a view of its bytes."""
    for s in range(len(out)):
        mask, surplus = out[s], -m
        for begin in range(0, n, len(numbers)):
            count = min(len(numbers), n - begin)
            _fill(key, layer, first + s, begin // 8, words[: (count + 31) // 32 * 4])
            for i in range(count):
                chosen = numbers[i] < share
                mask[begin + i] = chosen
                surplus += chosen
        word, filled = (n + 7) // 8, -1
        while surplus:
            missing, member = abs(surplus), surplus > 0
            last = word + 2 * missing + 8
            while word < last:
                if word // 4 != filled:
                    filled = word // 4
                    _fill(key, layer, first + s, 4 * filled, words[:4])
                drawn = words[word % 4] % np.uint64(n)
                if missing and mask[drawn] == member:
                    mask[drawn] = not member
                    missing -= 1
                word += 1
            surplus = missing if member else -missing


_choose = entry(
    in_array("u8", 1), *[types.int64] * 5, out_array("u8", 1), in_array("u1", 1), out_array("b1", 2)
)(_choose)
