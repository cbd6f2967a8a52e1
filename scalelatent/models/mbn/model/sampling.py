"""Random draws of a clustering without replacement: rows, columns, one-hot units.

Each draw has its own Philox stream with the key (seed, purpose, layer, clustering). It uses raw words of the
stream, which no version of numpy changes, so a draw can be repeated wherever it is needed.
"""

from __future__ import annotations

import numpy as np

# A draw of less than this share of n numbers draws single numbers; a larger draw draws a mask of all n.
_FEW = 1 / 16


def make_stream(seed: int, purpose: str, layer: int, clustering: int) -> np.random.Philox:
    """Return the random stream of one draw; ``purpose`` is a short name, such as "columns"."""
    key = np.array([seed % 2**64, int.from_bytes(purpose.encode(), "little")], dtype=np.uint64)
    # The high words of the counter differ, so that streams of different layers never overlap.
    return np.random.Philox(key=key, counter=np.array([0, 0, clustering, layer], dtype=np.uint64))


def choose_numbers(bits: np.random.Philox, n: int, m: int) -> np.ndarray:
    """Return ``m`` of ``n`` numbers in rising order; each set has the same probability."""
    if m >= n * _FEW:
        return np.flatnonzero(choose_mask(bits, n, m))
    found = np.empty(0, dtype=np.int64)
    while len(found) < m:
        found = _drop_repeats(np.concatenate([found, _draw_below(bits, n, m - len(found) + 8)]))
    return np.sort(found[:m])


def choose_mask(bits: np.random.Philox, n: int, m: int) -> np.ndarray:
    """Return the result of :func:`choose_numbers` as a mask."""
    words = np.asarray(bits.random_raw(-(-n // 8)), dtype="<u8")
    mask = words.view(np.uint8)[:n] < round(256 * m / n)
    surplus = int(np.count_nonzero(mask)) - m
    while surplus:
        drawn = _draw_below(bits, n, 2 * abs(surplus) + 8)
        chosen = _drop_repeats(drawn[mask[drawn] == (surplus > 0)])[: abs(surplus)]
        mask[chosen] = surplus < 0
        surplus -= len(chosen) if surplus > 0 else -len(chosen)
    return mask


def _draw_below(bits: np.random.Philox, n: int, count: int) -> np.ndarray:
    # The remainder of a 64-bit number modulo n is uniform up to an error of n / 2^64 in each probability.
    return (np.asarray(bits.random_raw(count)) % np.uint64(n)).astype(np.int64)


def _drop_repeats(numbers: np.ndarray) -> np.ndarray:
    """Return the different numbers in the order of their first appearance."""
    return numbers[np.sort(np.unique(numbers, return_index=True)[1])]
