"""Random draws of m of n numbers without replacement, one draw for each of many clusterings.

Each draw has its own random stream (Philox). The streams are computed by numba, because numpy takes
microseconds to create a stream. To draw many of the n numbers, one random byte for each number decides
whether the draw contains it. Then random numbers are added to the draw, or removed from it, until it has m
numbers. To draw few numbers, random numbers are taken one after the other until m of them are different.
"""

from __future__ import annotations

import numpy as np
from numba import types

from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.philox import philox

# Number of random 64-bit numbers that are generated at a time; their 8 KiB fit the first-level cache.
_WORDS = 1024


def choose_masks(key: np.ndarray, layer: int, first: int, count: int, n: int, m: int) -> np.ndarray:
    """Draw ``m`` of ``n`` numbers for each of ``count`` clusterings; return masks, bool (count, n).

    The random numbers of the clustering ``first + i`` of the layer number ``layer`` are those of
    ``numpy.random.Philox(key=key, counter=[0, 0, first + i, layer]).random_raw``.
    """
    out, words = np.empty((count, n), dtype=np.bool_), np.empty(_WORDS, dtype=np.uint64)
    _choose(key, layer, first, n, m, round(256 * m / n), words, words.view(np.uint8), out)
    return out


def choose_numbers(
    key: np.ndarray, layer: int, first: int, count: int, n: int, m: int, by_mask: bool
) -> np.ndarray:
    """Draw ``m`` of ``n`` numbers for each of ``count`` clusterings; return them one draw after the other.

    The result is int64, and the numbers of each draw are in rising order. With ``by_mask`` they are those of
    `choose_masks`. Otherwise they are the first ``m`` different numbers below ``n`` in the random stream of
    the clustering, which is faster if ``m`` is small.
    """
    if by_mask:
        return np.nonzero(choose_masks(key, layer, first, count, n, m))[1]
    out, words = np.empty((count, m), dtype=np.int64), np.empty(4, dtype=np.uint64)
    for i, row in enumerate(out):
        seen = np.full(1 << (2 * m + 1).bit_length(), -1, dtype=np.int64)
        _choose_few(key, layer, first + i, n, words, seen, row)
    out.sort(axis=1)
    return out.reshape(-1)


@subkernel
def _fill(key: np.ndarray, layer: int, which: int, first: int, words: np.ndarray) -> None:
    """Fill ``words`` with numbers of the random stream of a clustering, from number ``first`` of the stream.

    ``first`` is a multiple of four, because Philox computes four numbers at a time. ``layer`` and ``which``
    are the numbers of the layer and of the clustering.
    """
    for i in range(0, len(words), 4):
        counter = np.uint64((first + i) // 4 + 1), np.uint64(0), np.uint64(which), np.uint64(layer)
        words[i], words[i + 1], words[i + 2], words[i + 3] = philox(*counter, key[0], key[1])


def _choose(
    key: np.ndarray, layer: int, first: int, n: int, m: int, share: int, words: np.ndarray,
    numbers: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    """Write a mask of m of n numbers for each clustering to ``out``, bool (clusterings, n).

    Number i is selected if its random byte is below ``share``. ``words`` is scratch space for random 64-bit
    numbers, and ``numbers`` is a view of the bytes of ``words``.
    """
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


def _choose_few(
    key: np.ndarray, layer: int, which: int, n: int, words: np.ndarray, seen: np.ndarray, out: np.ndarray
) -> None:
    """Write different random numbers to ``out`` in the order in which they are drawn.

    ``seen`` is a hash table of the drawn numbers, with -1 in free places and a power of two as its length.
    """
    count, word = 0, 0
    while count < len(out):
        if word % 4 == 0:
            _fill(key, layer, which, word, words)
        drawn = np.int64(words[word % 4] % np.uint64(n))
        word += 1
        place = drawn & (len(seen) - 1)
        while seen[place] >= 0 and seen[place] != drawn:
            place = (place + 1) & (len(seen) - 1)
        if seen[place] < 0:
            seen[place] = out[count] = drawn
            count += 1


_choose_few = entry(
    in_array("u8", 1), *[types.int64] * 3, out_array("u8", 1), out_array("i8", 1), out_array("i8", 1)
)(_choose_few)
_choose = entry(
    in_array("u8", 1), *[types.int64] * 5, out_array("u8", 1), in_array("u1", 1), out_array("b1", 2)
)(_choose)
