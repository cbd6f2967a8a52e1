"""Sweeps over AND-OR trees, see the functions of the same names in the reference."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from scalelatent.kernels.jit import entry, filled, given, part
from scalelatent.models.hcn.kernels.exact import HARD
from scalelatent.models.hcn.kernels.windows import MESSAGE_ROOM, starts

from .trees import tree_of

_look_off, _look_on, _off, _off_evenly, _on, _on_evenly = tree_of(0)
_look_off_2, _look_on_2, _off_2, _off_evenly_2, _on_2, _on_evenly_2 = tree_of(2)
_look_off_1, _look_on_1, _off_1, _off_evenly_1, _on_1, _on_evenly_1 = tree_of(1)

_0, _ALL = np.int32(0), np.float32(1)


@part
def _bounds(first: Any, second: Any, b: Any) -> tuple[Any, Any]:
    """g of all pairs but the largest, and of the largest; b > 0."""
    return min(b, max(_0, -first)), min(b, max(_0, -second))


@part
def _reach(at: Any, feature: Any, places: Any) -> tuple[Any, Any, Any]:
    """First place from which a feature reaches a pixel, how many do, and the weight of the first, flipped."""
    first = max(0, at - feature + 1)
    return first, min(places - 1, at) - first + 1, first - at + feature - 1


@part
def _tree(y: Any, x: Any, s: Any, w: Any, channel: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Of a pixel's tree: rows, pairs of a run, bytes from run to run in S and W, bytes to its first run."""
    high, wide, n_features = s.shape
    h, width = w.shape[1:3]
    r, rows, i = _reach(y, h, high)
    c, cols, j = _reach(x, width, wide)
    return (
        rows,
        cols * n_features,
        4 * wide * n_features,
        4 * width * n_features,
        4 * (r * wide + c) * n_features,
        4 * ((channel * h + i) * width + j) * n_features,
    )


@entry(given("i4", 5), given("i4", 2), filled("i4", 5), filled("i4", 5))
def sweep(evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray) -> None:
    """All trees of some images once, in order; no message is kept."""
    n_channels, height, width = evidence.shape[2:]
    for k in range(order.shape[0]):
        for p in range(order.shape[1]):
            index, x = divmod(order[k, p], width)
            index, y = divmod(index, height)
            n, a = divmod(index, n_channels)
            b = evidence[k, n, a, y, x]
            rows, run, s_step, w_step, of_s, of_w = _tree(y, x, s[k, n], w[k], a)
            tree = (rows, run, s_step, w_step, s[k, n].ctypes.data + of_s, w[k].ctypes.data + of_w)
            if b < _0:
                total = _look_off(tree, (-b,), _ALL)
                if total == _0:
                    _off_evenly(tree, (-b, _0, _0), _ALL)
                elif total < -b - b:
                    _off(tree, (-b - total, -b, _0), _ALL)
            elif b > _0:
                first, second = _look_on(tree, (_0,), _ALL)
                rest, top = _bounds(first, second, b)
                if rest == top:
                    if top > _0:
                        _on_evenly(tree, (top, _0, _0), _ALL)
                else:
                    _on(tree, (rest, top, first), _ALL)


@entry(
    given("i4", 5), given("i4", 2), filled("i4", 5), filled("i4", 5), filled("i2", 4), filled("i2", 4),
    numba.float32, given("i8", 1), filled("i8", 1),
)  # fmt: skip
def _sweep_messages(
    evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray, to_s: np.ndarray, to_w: np.ndarray,
    damping: Any, begins: np.ndarray, moved: np.ndarray,
) -> None:  # fmt: skip
    n_channels, height, width = evidence.shape[2:]
    for k in range(order.shape[0]):
        for p in range(order.shape[1]):
            pixel, x = divmod(order[k, p], width)
            index, y = divmod(pixel, height)
            n, a = divmod(index, n_channels)
            b, begin = evidence[k, n, a, y, x], 2 * begins[y * width + x]
            rows, run, s_step, w_step, of_s, of_w = _tree(y, x, s[k, n], w[k], a)
            tree = (
                rows, run, s_step, w_step, s[k, n].ctypes.data + of_s, w[k].ctypes.data + of_w,
                to_s[k, n, a].ctypes.data + begin, to_w[k, n, a].ctypes.data + begin,
            )  # fmt: skip
            change = False
            if b < _0:
                total = _look_off_2(tree, (-b,), _ALL)
                if total == _0:
                    change = _off_evenly_2(tree, (-b, _0, _0), damping)
                else:
                    change = _off_2(tree, (-b - total, -b, _0), damping)
            elif b > _0:
                first, second = _look_on_2(tree, (_0,), _ALL)
                rest, top = _bounds(first, second, b)
                if rest == top:
                    change = _on_evenly_2(tree, (top, _0, _0), damping)
                else:
                    change = _on_2(tree, (rest, top, first), damping)
            moved[k] += change


def sweep_messages(
    evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray, to_s: np.ndarray, to_w: np.ndarray,
    damping: float,
) -> np.ndarray:  # fmt: skip
    """All trees of some images once, in order, with their messages of the sweep before; trees that moved."""
    moved = np.zeros(len(order), np.int64)
    begins = starts(evidence.shape[3:5], w.shape[2:4], w.shape[4])
    for messages in (to_s, to_w):
        if messages.shape[3] < begins[-1] + MESSAGE_ROOM:
            raise ValueError(f"messages of {begins[-1]} pairs need room for {begins[-1] + MESSAGE_ROOM}")
    _sweep_messages(evidence, order, s, w, to_s, to_w, damping, begins, moved)
    return moved


@entry(
    given("i4", 4), given("i4", 2), filled("i4", 4), given("i4", 4), filled("i2", 2), numba.int64,
    given("i8", 1), filled("i8", 1),
)  # fmt: skip
def _decode(
    evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray, to_s: np.ndarray, n_sweeps: Any,
    begins: np.ndarray, moved: np.ndarray,
) -> None:  # fmt: skip
    height, width = evidence.shape[2:]
    for n in range(order.shape[0]):
        to_s[:] = 0
        for _ in range(n_sweeps):
            moved[n] = 0
            for p in range(order.shape[1]):
                pixel, x = divmod(order[n, p], width)
                a, y = divmod(pixel, height)
                b, begin = evidence[n, a, y, x], 2 * begins[y * width + x]
                rows, run, s_step, w_step, of_s, of_w = _tree(y, x, s[n], w, a)
                spots = s[n].ctypes.data + of_s, w.ctypes.data + of_w, to_s[a].ctypes.data + begin
                tree = (rows, run, s_step, w_step, *spots)
                change = False
                if b < _0:
                    total = _look_off_1(tree, (-b,), _ALL)
                    if total == _0:
                        change = _off_evenly_1(tree, (-b, _0, _0), _ALL)
                    else:
                        change = _off_1(tree, (-b - total, -b, _0), _ALL)
                elif b > _0:
                    first, second = _look_on_1(tree, (_0,), _ALL)
                    rest, top = _bounds(first, second, b)
                    if rest == top:
                        change = _on_evenly_1(tree, (top, _0, _0), _ALL)
                    else:
                        change = _on_1(tree, (rest, top, first), _ALL)
                moved[n] += change
            if moved[n] == 0:
                break


def decode(
    evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray, n_sweeps: int
) -> np.ndarray:
    """Beliefs of S under fixed weights; trees that moved in the last sweep of each row."""
    begins, moved = starts(evidence.shape[2:4], w.shape[1:3], w.shape[3]), np.zeros(len(order), np.int64)
    kept = np.empty((w.shape[0], begins[-1] + MESSAGE_ROOM), np.int16)
    _decode(evidence, order, s, np.where(w, np.int32(HARD), np.int32(-HARD)), kept, n_sweeps, begins, moved)
    return moved
