"""Random draws without replacement of the rows, columns and one-hot units that a clustering uses.

The random numbers of a draw depend only on (seed, purpose, layer, clustering), so any process can repeat the
draw. They are raw 64-bit numbers of numpy's Philox generator, which do not change between versions of numpy.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from scalelatent.contract.learners import Backend

# To draw less than this share of n numbers, numbers are drawn one by one until enough are different.
# Otherwise a mask decides for each of the n numbers whether it is drawn.
_SPARSE_SHARE = 1 / 16


@lru_cache(maxsize=64)  # a fit uses few keys, each for the draws of many clusterings
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
    """Draw ``m`` of ``n`` numbers for each of ``count`` clusterings; return masks, bool (count, n).

    The masks are on the device of ``backend``, or in the memory of the host by default.
    """
    key = make_key(seed, purpose)
    if backend is not None:
        return backend.kernel("mbn_choose_masks")(key, layer, first, count, n, m)
    # Import the module here, because it imports numba, which is slow.
    from scalelatent.models.mbn.kernels.cpu import draws

    return draws.choose_masks(key, layer, first, count, n, m)


def choose_numbers(seed: int, purpose: str, layer: int, which: int, *, n: int, m: int) -> np.ndarray:
    """Draw ``m`` of the numbers 0 to n - 1 without replacement; return them in rising order."""
    if m >= n * _SPARSE_SHARE:
        return np.flatnonzero(choose_masks(seed, purpose, layer, which, 1, n=n, m=m)[0])
    # Import the module here, because it imports numba, which is slow.
    from scalelatent.models.mbn.kernels.cpu import draws

    return draws.choose_few(make_key(seed, purpose), layer, which, n, m)
