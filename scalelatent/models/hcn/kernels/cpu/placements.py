"""Which features lie where, and what they pay; see the functions of the same names in the reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from scalelatent.kernels.jit import entry, filled, given, part


@part
def _add(layers: Any, w: Any, r: Any, c: Any, f: Any, count: Any) -> None:
    n_channels, h, width, _ = w.shape
    for a in range(n_channels):
        for i in range(h):
            for j in range(width):
                if w[a, h - 1 - i, width - 1 - j, f]:
                    layers[a, r + i, c + j] += count


@part
def _gain(evidence: Any, layers: Any, w: Any, r: Any, c: Any, f: Any) -> Any:
    """Evidence of the pixels that lie under this feature alone."""
    n_channels, h, width, _ = w.shape
    total = 0.0
    for a in range(n_channels):
        for i in range(h):
            for j in range(width):
                if w[a, h - 1 - i, width - 1 - j, f] and layers[a, r + i, c + j] == 1:
                    total += evidence[a, r + i, c + j]
    return total


@entry(given("u1", 4), given("u1", 4), filled("i4", 4))
def _cover(s: np.ndarray, w: np.ndarray, out: np.ndarray) -> None:
    for n in range(s.shape[0]):
        for r in range(s.shape[1]):
            for c in range(s.shape[2]):
                for f in range(s.shape[3]):
                    if s[n, r, c, f]:
                        _add(out[n], w, r, c, f, 1)


@entry(given("f4", 4), given("u1", 4), filled("f8", 2), filled("i8", 2), filled("u1", 4), filled("i4", 4))
def _prune(evidence: Any, w: Any, cost: Any, placed: Any, out: Any, layers: Any) -> None:
    gains = cost[1]
    h, width = w.shape[1:3]
    for n in range(out.shape[0]):
        count = 0
        for r in range(out.shape[1]):
            for c in range(out.shape[2]):
                for f in range(out.shape[3]):
                    if out[n, r, c, f]:
                        placed[count, 0], placed[count, 1], placed[count, 2] = r, c, f
                        gains[count] = _gain(evidence[n], layers[n], w, r, c, f) - cost[0, 0]
                        count += 1
        while count:
            least = 0
            for k in range(1, count):
                if gains[k] < gains[least]:
                    least = k
            if gains[least] >= 0:
                break
            r, c, f = placed[least]
            out[n, r, c, f] = 0
            _add(layers[n], w, r, c, f, -1)
            count -= 1
            for k in range(least, count):  # in their order: of equals the first goes
                placed[k, 0], placed[k, 1], placed[k, 2] = placed[k + 1]
                gains[k] = gains[k + 1]
            for k in range(count):
                if abs(placed[k, 0] - r) < h and abs(placed[k, 1] - c) < width:
                    at = placed[k]
                    gains[k] = _gain(evidence[n], layers[n], w, at[0], at[1], at[2]) - cost[0, 0]


def cover(s: np.ndarray, w: np.ndarray) -> np.ndarray:
    """How many of the features placed lie over each pixel."""
    (rows, high, wide, _), (n_channels, h, width, _) = s.shape, w.shape
    out = np.zeros((rows, n_channels, high + h - 1, wide + width - 1), np.int32)
    _cover(s, w.view(np.uint8), out)
    return out


def prune(evidence: np.ndarray, s: np.ndarray, w: np.ndarray, cost: float) -> np.ndarray:
    """Which of the features placed are kept: those that do not pay for their cost are taken away."""
    out, layers = s.copy(), cover(s, w)
    most = int(s.reshape(len(s), -1).sum(axis=1, dtype=np.int64).max(initial=0))
    costs = np.zeros((2, max(most, 1)))
    costs[0, 0] = cost
    _prune(evidence, w.view(np.uint8), costs, np.zeros((most + 1, 3), np.int64), out, layers)
    return out
