"""What a clustering is made of is drawn without replacement: rows, columns, one-hot units.

Each draw has a Philox stream of its own, keyed by (seed, what is drawn, layer, clustering), and uses raw
words of it, which no version of numpy changes: what was drawn is drawn again wherever it is needed.
"""

from __future__ import annotations

import numpy as np

# Below this share positions are drawn one by one, above it a mask of all is.
_FEW = 1 / 16


def draw_bits(seed: int, what: str, layer: int, clustering: int) -> np.random.Philox:
    """The stream of one draw."""
    key = np.array([seed % 2**64, int.from_bytes(what.encode(), "little")], dtype=np.uint64)
    # High words of the counter, as in the engine's streams: streams of other layers never overlap.
    return np.random.Philox(key=key, counter=np.array([0, 0, clustering, layer], dtype=np.uint64))


def choose(bits: np.random.Philox, n: int, m: int) -> np.ndarray:
    """``m`` of ``n`` numbers, each set with the same probability."""
    if m >= n * _FEW:
        return np.flatnonzero(choose_mask(bits, n, m))
    found = np.empty(0, dtype=np.int64)
    while len(found) < m:
        found = _firsts(np.concatenate([found, _below(bits, n, m - len(found) + 8)]))
    return np.sort(found[:m])


def choose_mask(bits: np.random.Philox, n: int, m: int) -> np.ndarray:
    """:func:`choose` as a mask."""
    words = np.asarray(bits.random_raw(-(-n // 8)), dtype="<u8")
    mask = words.view(np.uint8)[:n] < round(256 * m / n)
    surplus = int(np.count_nonzero(mask)) - m
    while surplus:
        drawn = _below(bits, n, 2 * abs(surplus) + 8)
        chosen = _firsts(drawn[mask[drawn] == (surplus > 0)])[: abs(surplus)]
        mask[chosen] = surplus < 0
        surplus -= len(chosen) if surplus > 0 else -len(chosen)
    return mask


def _below(bits: np.random.Philox, n: int, count: int) -> np.ndarray:
    # The remainder of 64 bits: off a uniform number by n / 2^64 at most.
    return (np.asarray(bits.random_raw(count)) % np.uint64(n)).astype(np.int64)


def _firsts(numbers: np.ndarray) -> np.ndarray:
    """Different numbers, in the order of their first appearance."""
    return numbers[np.sort(np.unique(numbers, return_index=True)[1])]
