"""Addition and removal of features in images in numba; `kernels/reference.py` defines the results."""

from __future__ import annotations

import numba
import numpy as np

from scalelatent.kernels.jit import entry, in_array, out_array, subkernel


@subkernel
def _add_count(cover_counts: np.ndarray, w: np.ndarray, r: int, c: int, f: int, count: int) -> None:
    n_channels, h, width, _ = w.shape
    for a in range(n_channels):
        for i in range(h):
            for j in range(width):
                if w[a, h - 1 - i, width - 1 - j, f]:
                    cover_counts[a, r + i, c + j] += count


@subkernel
def _sum_evidence(
    evidence: np.ndarray, cover_counts: np.ndarray, w: np.ndarray, r: int, c: int, f: int, count: int
) -> float:
    """Return the sum of ``evidence`` over the pixels of feature ``f`` that ``count`` features cover.

    ``cover_counts`` is the number of features that cover each pixel; feature ``f`` is at the position (r, c).
    """
    n_channels, h, width, _ = w.shape
    total = 0.0
    for a in range(n_channels):
        for i in range(h):
            for j in range(width):
                if w[a, h - 1 - i, width - 1 - j, f] and cover_counts[a, r + i, c + j] == count:
                    total += evidence[a, r + i, c + j]
    return total


@subkernel
def _add_gains(gains: np.ndarray, w: np.ndarray, a: int, y: int, x: int, value: int) -> None:
    """Add ``value`` to the gains of all features at all positions where they would cover pixel (y, x).

    The gain of a feature at a position is the sum of the log odds of the pixels that only this feature would
    cover. ``a`` is the channel of the pixel.
    """
    _, h, width, n_features = w.shape
    high, wide, _ = gains.shape
    for r in range(max(0, y - h + 1), min(high - 1, y) + 1):
        for c in range(max(0, x - width + 1), min(wide - 1, x) + 1):
            i, j = h - 1 - y + r, width - 1 - x + c
            for f in range(n_features):
                gains[r, c, f] += value * w[a, i, j, f]


@subkernel
def _toggle(
    evidence: np.ndarray, cover_counts: np.ndarray, gains: np.ndarray, w: np.ndarray, r: int, c: int, f: int,
    count: int,
) -> None:  # fmt: skip
    """Add feature ``f`` at the position (r, c) if ``count`` is 1, or remove it if ``count`` is -1.

    Update ``cover_counts``, the number of features that cover each pixel, and ``gains``, the sum of log odds
    of pixels that only a new feature would cover.
    """
    n_channels, h, width, _ = w.shape
    for a in range(n_channels):
        for y in range(r, r + h):
            for x in range(c, c + width):
                if w[a, h - 1 - y + r, width - 1 - x + c, f]:
                    cover_counts[a, y, x] += count
                    if count == 1 and cover_counts[a, y, x] == 1:
                        _add_gains(gains, w, a, y, x, -evidence[a, y, x])
                    elif count == -1 and cover_counts[a, y, x] == 0:
                        _add_gains(gains, w, a, y, x, evidence[a, y, x])


@entry(in_array("u1", 4), in_array("u1", 4), out_array("i4", 4))
def _cover(s: np.ndarray, w: np.ndarray, out: np.ndarray) -> None:
    for n in range(s.shape[0]):
        for r in range(s.shape[1]):
            for c in range(s.shape[2]):
                for f in range(s.shape[3]):
                    if s[n, r, c, f]:
                        _add_count(out[n], w, r, c, f, 1)


@entry(
    in_array("i4", 4),
    in_array("u1", 4),
    numba.float64,
    out_array("u1", 4),
    out_array("i4", 4),
    out_array("f8", 3),
)
def _improve(
    evidence: np.ndarray, w: np.ndarray, cost: float, s: np.ndarray, cover_counts: np.ndarray,
    gains: np.ndarray,
) -> None:  # fmt: skip
    rows, high, wide, n_features = s.shape
    for n in range(rows):
        gains[:] = 0
        for a in range(cover_counts.shape[1]):
            for y in range(cover_counts.shape[2]):
                for x in range(cover_counts.shape[3]):
                    if cover_counts[n, a, y, x] == 0 and evidence[n, a, y, x] != 0:
                        _add_gains(gains, w, a, y, x, evidence[n, a, y, x])
        while True:
            most, best = 0.0, (-1, 0, 0)
            for r in range(high):
                for c in range(wide):
                    for f in range(n_features):
                        if s[n, r, c, f]:
                            gain = cost - _sum_evidence(evidence[n], cover_counts[n], w, r, c, f, 1)
                            if gain > most or (gain == most and best[0] >= 0 and not s[n][best]):
                                most, best = gain, (r, c, f)
                        elif gains[r, c, f] - cost > most:
                            most, best = gains[r, c, f] - cost, (r, c, f)
            if best[0] < 0:
                break
            count = -1 if s[n][best] else 1
            s[n][best] = count == 1
            _toggle(evidence[n], cover_counts[n], gains, w, best[0], best[1], best[2], count)


def cover(s: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the number of features at ``s`` that cover each pixel: int32 (rows, channels, height, width)."""
    (rows, high, wide, _), (n_channels, h, width, _) = s.shape, w.shape
    out = np.zeros((rows, n_channels, high + h - 1, wide + width - 1), np.int32)
    _cover(s, w.view(np.uint8), out)
    return out


def improve(evidence: np.ndarray, s: np.ndarray, w: np.ndarray, cost: float) -> np.ndarray:
    """Return a copy of the positions ``s`` after features were added or removed, one at a time.

    Each step raises the posterior probability the most; the steps end when none raises it.
    """
    out = s.copy()
    _improve(evidence, w.view(np.uint8), cost, out, cover(s, w), np.zeros(s.shape[1:]))
    return out
