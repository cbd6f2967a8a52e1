"""The compiled draw of documents from the counts of base documents."""

from __future__ import annotations

import numba
import numpy as np

from scalelatent.kernels.jit import entry, filled, given
from scalelatent.kernels.philox import mulhi, philox

_ZERO, _ONE = np.uint64(0), np.uint64(1)


@entry(
    given("i8", 1),
    given("i8", 1),
    given("i8", 1),
    numba.uint64,
    numba.uint64,
    numba.uint64,
    filled("u8", 1),
    filled("i8", 1),
)
def resample(
    counts: np.ndarray,
    pointers: np.ndarray,
    local: np.ndarray,
    first: np.ndarray,
    seed: np.uint64,
    word: np.uint64,
    out: np.ndarray,
    kept: np.ndarray,
) -> int:
    """Draw a document for each base row."""
    place, total_kept = 0, 0
    longest = 0
    for i in range(local.shape[0]):
        longest = max(longest, pointers[local[i] + 1] - pointers[local[i]])
    sums = np.empty(longest + 1, np.uint64)
    for i in range(local.shape[0]):
        low = pointers[local[i]]
        n = pointers[local[i] + 1] - low
        sums[0] = _ZERO
        for j in range(n):
            sums[j + 1] = sums[j] + np.uint64(counts[low + j])
            out[place + j] = _ZERO
        words, row = sums[n], first + np.uint64(i)
        a, b, c, d = _ZERO, _ZERO, _ZERO, _ZERO
        drawn = _ZERO
        while drawn < words:
            which = drawn & np.uint64(3)
            if which == _ZERO:
                # numpy's generator counts before it draws
                a, b, c, d = philox((drawn >> np.uint64(2)) + _ONE, _ZERO, row, _ZERO, seed, word)
            u = a if which == _ZERO else b if which == _ONE else c if which == np.uint64(2) else d
            target = mulhi(u, words)  # uniform on 0 .. words - 1, to a relative 2**-64 * words
            left, right = 0, n - 1  # the entry whose words include the target
            while left < right:
                middle = (left + right) >> 1
                if sums[middle + 1] > target:
                    right = middle
                else:
                    left = middle + 1
            out[place + left] += _ONE
            drawn += _ONE
        kept[i] = 0
        for j in range(n):
            if out[place + j] > _ZERO:
                kept[i] += 1
        total_kept += kept[i]
        place += n
    return total_kept
