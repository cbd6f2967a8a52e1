"""Random draws of a clustering without replacement: rows, columns, one-hot units.

Each draw has its own Philox stream with the key (seed, purpose, layer, clustering). It uses raw words of the
stream, which no version of numpy changes, so a draw can be repeated wherever it is needed.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

# A draw of less than this share of n numbers draws numbers one by one. A larger draw decides for each of the
# n numbers whether it belongs to the draw (a mask).
_SPARSE_SHARE = 1 / 16


@lru_cache(maxsize=64)  # a fit draws for each clustering of each layer with few keys
def make_key(seed: int, purpose: str) -> np.ndarray:
    """Return the key of the streams of one kind of draw; ``purpose`` is a short name, such as "columns"."""
    return np.array([seed % 2**64, int.from_bytes(purpose.encode(), "little")], dtype=np.uint64)


def choose_masks(
    seed: int, purpose: str, layer: int, first: int, count: int, *, n: int, m: int
) -> np.ndarray:
    """Return a draw of ``m`` of ``n`` numbers for each of ``count`` clusterings, bool (count, n)."""
    # Imported by the first draw, because it imports the compiler.
    from scalelatent.models.mbn.kernels.cpu import draws

    return draws.choose_masks(make_key(seed, purpose), layer, first, count, n, m)


def choose_numbers(seed: int, purpose: str, layer: int, which: int, *, n: int, m: int) -> np.ndarray:
    """Return ``m`` of ``n`` numbers in rising order; each set has the same probability."""
    if m >= n * _SPARSE_SHARE:
        return np.flatnonzero(choose_masks(seed, purpose, layer, which, 1, n=n, m=m)[0])
    # The high words of the counter differ, so that streams of different layers never overlap.
    counter = np.array([0, 0, which, layer], dtype=np.uint64)
    bits = np.random.Philox(key=make_key(seed, purpose), counter=counter)
    found: dict[int, None] = {}  # the different numbers in the order of their first appearance
    while len(found) < m:
        drawn = np.asarray(bits.random_raw(m - len(found) + 8)) % np.uint64(n)
        found |= dict.fromkeys(drawn.tolist())
    return np.sort(np.fromiter(found, dtype=np.int64)[:m])
