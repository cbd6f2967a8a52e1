"""Compiled kernel that draws documents from the counts of base documents."""

from __future__ import annotations

import numba
import numpy as np

from scalelatent.kernels.jit import entry, in_array, out_array
from scalelatent.kernels.philox import mulhi, philox

_ZERO, _ONE = np.uint64(0), np.uint64(1)


@entry(
    in_array("i8", 1),
    in_array("i8", 1),
    in_array("i8", 1),
    numba.uint64,
    numba.uint64,
    numba.uint64,
    out_array("u8", 1),
    out_array("i8", 1),
)
def resample(
    base_counts: np.ndarray,
    pointers: np.ndarray,
    local: np.ndarray,
    first: np.ndarray,
    seed: np.uint64,
    word: np.uint64,
    counts: np.ndarray,
    row_entries: np.ndarray,
) -> None:
    """Draw documents `first`, `first + 1`, …, one for each number of a base document (CSR row) in `local`.

    `base_counts` and `pointers` are CSR rows. `counts` receives the drawn count of each entry of the base
    rows, row by row, and `row_entries` the number of counts above 0 in each row.
    """
    offset, longest = 0, 0
    for i in range(local.shape[0]):
        longest = max(longest, pointers[local[i] + 1] - pointers[local[i]])
    sums = np.empty(longest + 1, np.uint64)
    for i in range(local.shape[0]):
        low = pointers[local[i]]
        n = pointers[local[i] + 1] - low
        sums[0] = _ZERO
        for j in range(n):
            sums[j + 1] = sums[j] + np.uint64(base_counts[low + j])
            counts[offset + j] = _ZERO
        words, row = sums[n], first + np.uint64(i)
        a, b, c, d = _ZERO, _ZERO, _ZERO, _ZERO
        drawn = _ZERO
        while drawn < words:
            lane = drawn & np.uint64(3)
            if lane == _ZERO:
                # numpy's generator increments its counter before the first draw.
                a, b, c, d = philox((drawn >> np.uint64(2)) + _ONE, _ZERO, row, _ZERO, seed, word)
            u = a if lane == _ZERO else b if lane == _ONE else c if lane == np.uint64(2) else d
            target = mulhi(u, words)  # uniform on 0 .. words - 1, up to a relative error of 2**-64 * words
            left, right = 0, n - 1  # search the entry that holds word `target` of the base row
            while left < right:
                middle = (left + right) >> 1
                if sums[middle + 1] > target:
                    right = middle
                else:
                    left = middle + 1
            counts[offset + left] += _ONE
            drawn += _ONE
        row_entries[i] = 0
        for j in range(n):
            if counts[offset + j] > _ZERO:
                row_entries[i] += 1
        offset += n
