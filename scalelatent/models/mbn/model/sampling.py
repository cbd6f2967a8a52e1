"""Random draws without replacement of the rows, columns and one-hot units that a clustering uses.

The random numbers of a draw depend only on (seed, purpose, layer, clustering), so any process can repeat the
draw. They are raw 64-bit numbers of numpy's Philox generator, which are the same in all versions of numpy.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from scalelatent.contract.learners import Backend

# A draw of at least this share of all n numbers decides for each number whether the draw contains the number
# (a mask). For a smaller share, it is faster to draw numbers one by one until enough of them are different.
_MIN_MASK_SHARE = 1 / 16


@lru_cache(maxsize=64)  # a fit uses fewer keys: one per purpose and seed
def make_key(seed: int, purpose: str) -> np.ndarray:
    """Return the key of the random generator for a purpose, a name of at most 8 letters such as "columns"."""
    return np.array([seed % 2**64, int.from_bytes(purpose.encode(), "little")], dtype=np.uint64)


def choose_masks(
    seed: int,
    purpose: str,
    layer: int,
    first: int,
    count: int,
    *,
    n: int,
    m: int,
    backend: Backend | None = None,
) -> np.ndarray:
    """Draw ``m`` of ``n`` numbers for each of ``count`` clusterings, starting with clustering ``first``.

    Return masks, bool (count, n), which are True for drawn numbers. They are on the device of ``backend``.
    """
    key = make_key(seed, purpose)
    if backend is not None:
        return backend.kernel("mbn_choose_masks")(key, layer, first, count, n, m)
    # Import the module here, because it imports numba, which is slow.
    from scalelatent.models.mbn.kernels.cpu import draws

    return draws.choose_masks(key, layer, first, count, n, m)


def choose_numbers(
    seed: int,
    purpose: str,
    layer: int,
    first: int,
    count: int = 1,
    *,
    n: int,
    m: int,
    backend: Backend | None = None,
) -> np.ndarray:
    """Return ``m`` different random numbers from 0 to n - 1 for each of ``count`` clusterings, as one array.

    The numbers of each clustering are in rising order. The array is on the device of ``backend``; None means
    the CPU.
    """
    key, by_mask = make_key(seed, purpose), m >= n * _MIN_MASK_SHARE
    if backend is not None:
        return backend.kernel("mbn_choose_numbers")(key, layer, first, count, n, m, by_mask)
    # Import the module here, because it imports numba, which is slow.
    from scalelatent.models.mbn.kernels.cpu import draws

    return draws.choose_numbers(key, layer, first, count, n, m, by_mask)
