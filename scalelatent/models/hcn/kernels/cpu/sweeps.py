"""Belief-propagation messages of all pixels of images in numba; `kernels/reference.py` defines results."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np

from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.memory import empty
from scalelatent.models.hcn.kernels.units import FIXED_WEIGHT
from scalelatent.models.hcn.kernels.windows import MESSAGE_ROOM, count_pairs, make_tree_layouts

from .trees import make_passes, prefetch

_summarize_off, _summarize_on, _send_off, _send_on = make_passes(0)
_summarize_off_1, _summarize_on_1, _send_off_1, _send_on_1 = make_passes(1)

_0, _NO_DAMPING = np.int32(0), np.float32(1)
# Smallest number of pairs (feature position, weight) of a pixel for which its stored belief-propagation
# messages are prefetched into the CPU cache.
LARGE_TREE_PAIRS = 512
# Number of bytes of the stored belief-propagation messages of a pixel that are prefetched into the CPU cache;
# the processor prefetches the rest by itself.
PREFETCH_BYTES = 1024


@subkernel
def _find_messages(first: np.int32, second: np.int32, b: np.int32) -> tuple[np.int32, np.int32]:
    """Return the two messages of a pixel with log odds ``b`` > 0 to its pairs, in units of 1/256 nat.

    A pixel is the OR of pairs of a feature position and a weight. In belief propagation, each pair sends a
    message, its value, to the OR. ``first`` and ``second`` are the two largest values. The second result is
    the message to the pair with the largest value, and the first result is the message to all other pairs.
    """
    return min(b, max(_0, -first)), min(b, max(_0, -second))


@entry(in_array("i4", 5), in_array("i4", 2), out_array("i4", 5), out_array("i4", 5), in_array("i8", 2))
def _sweep(evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray, trees: np.ndarray) -> None:
    n_channels, height, width = evidence.shape[2:]
    s_step, w_step = 4 * s.shape[3] * s.shape[4], 4 * w.shape[3] * w.shape[4]
    live = empty(w.shape[2], np.uint8)
    for k in range(order.shape[0]):
        pixels = evidence[k].ravel()
        for p in range(order.shape[1]):
            index = order[k, p]
            b = pixels[index]
            layer, pixel = divmod(index, height * width)
            n, a = divmod(layer, n_channels)
            rows, run, of_s, of_w, _ = trees[pixel]
            spots = s[k, n].ctypes.data + of_s, w[k, a].ctypes.data + of_w
            tree = (rows, run, s_step, w_step, *spots, live.ctypes.data)
            if b < _0:
                total = _summarize_off(tree, (-b,), _NO_DAMPING)
                if total < -b - b:
                    _send_off(tree, (-b - total, -b, _0), _NO_DAMPING)
            elif b > _0:
                first, second = _summarize_on(tree, (b,), _NO_DAMPING)
                rest, top = _find_messages(first, second, b)
                if top > _0:
                    _send_on(tree, (rest, top, first), _NO_DAMPING)


def sweep(evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray) -> None:
    """Update log odds of positions ``s`` and weights ``w`` by new belief-propagation messages of pixels."""
    _sweep(evidence, order, s, w, make_tree_layouts(evidence.shape[3:5], w.shape[2:4], w.shape[4]))


def _make_sweep(wide: bool) -> Callable[..., None]:
    """Return the kernel that updates all stored messages once; they are int16, or int32 if ``wide``."""
    summarize_off, summarize_on, send_off, send_on = make_passes(2, wide)
    factor = 1 + wide

    @subkernel
    def sweep(
        evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray, to_s: np.ndarray,
        to_w: np.ndarray, held: np.ndarray, damping: np.float32, trees: np.ndarray, moved: np.ndarray,
    ) -> None:  # fmt: skip
        n_channels, height, width = evidence.shape[2:]
        s_step, w_step = 4 * s.shape[3] * s.shape[4], 4 * w.shape[3] * w.shape[4]
        # The stored messages of pixels with many pairs (position, weight) do not stay in the CPU cache
        # between two sweeps (updates of all pixels).
        far = w.shape[2] * w.shape[3] * w.shape[4] >= LARGE_TREE_PAIRS
        for k in range(order.shape[0]):
            pixels = evidence[k].ravel()
            for p in range(order.shape[1]):
                index = order[k, p]
                b = pixels[index]
                layer, pixel = divmod(index, height * width)
                n, a = divmod(layer, n_channels)
                rows, run, of_s, of_w, begin = trees[pixel]
                tree = (
                    rows, run, s_step, w_step, s[k, n].ctypes.data + of_s, w[k, a].ctypes.data + of_w,
                    to_s[k, n, a].ctypes.data + factor * begin, to_w[k, n, a].ctypes.data + factor * begin,
                    held[k, n, a, pixel].ctypes.data,
                )  # fmt: skip
                # Prefetch the first belief-propagation messages of the next pixel into the CPU cache.
                if far and p + 1 < order.shape[1]:
                    layer, pixel = divmod(order[k, p + 1], height * width)
                    n, a = divmod(layer, n_channels)
                    prefetch(to_s[k, n, a].ctypes.data + factor * trees[pixel, 4], PREFETCH_BYTES)
                # An unknown pixel (log odds b of 0) sends messages of 0, which replace its stored messages.
                if b <= _0:
                    total = summarize_off(tree, (-b,), _NO_DAMPING)
                    change = send_off(tree, (-b - total, -b, _0), damping)
                else:
                    first, second = summarize_on(tree, (b,), _NO_DAMPING)
                    rest, top = _find_messages(first, second, b)
                    change = send_on(tree, (rest, top, first), damping)
                moved[k] += change

    return sweep


_sweep_short, _sweep_wide = _make_sweep(False), _make_sweep(True)


@entry(
    in_array("i4", 5), in_array("i4", 2), out_array("i4", 5), out_array("i4", 5), out_array("i2", 4),
    out_array("i2", 4), out_array("u1", 5), numba.float32, in_array("i8", 2), out_array("i8", 1),
)  # fmt: skip
def _sweep_messages(
    evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray, to_s: np.ndarray, to_w: np.ndarray,
    held: np.ndarray, damping: np.float32, trees: np.ndarray, moved: np.ndarray,
) -> None:  # fmt: skip
    _sweep_short(evidence, order, s, w, to_s, to_w, held, damping, trees, moved)


@entry(
    in_array("i4", 5), in_array("i4", 2), out_array("i4", 5), out_array("i4", 5), out_array("i4", 4),
    out_array("i4", 4), out_array("u1", 5), numba.float32, in_array("i8", 2), out_array("i8", 1),
)  # fmt: skip
def _sweep_wide_messages(
    evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray, to_s: np.ndarray, to_w: np.ndarray,
    held: np.ndarray, damping: np.float32, trees: np.ndarray, moved: np.ndarray,
) -> None:  # fmt: skip
    _sweep_wide(evidence, order, s, w, to_s, to_w, held, damping, trees, moved)


def sweep_messages(
    evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray, to_s: np.ndarray, to_w: np.ndarray,
    held: np.ndarray, damping: float,
) -> np.ndarray:  # fmt: skip
    """Update all stored belief-propagation messages; return the number of changed pixels per chain.

    A chain is a sequence of minibatches, or a range of images, that one task learns. A pixel has changed if
    one of its messages has changed.
    """
    moved = np.zeros(len(order), np.int64)
    size = count_pairs(evidence.shape[3:5], w.shape[2:4], w.shape[4])
    for messages in (to_s, to_w):
        if messages.shape[3] < size + MESSAGE_ROOM:
            raise ValueError(f"messages of {size} pairs need room for {size + MESSAGE_ROOM}")
    found = make_tree_layouts(evidence.shape[3:5], w.shape[2:4], w.shape[4])
    kernel = _sweep_messages if to_s.dtype == np.int16 else _sweep_wide_messages
    kernel(evidence, order, s, w, to_s, to_w, held, damping, found, moved)
    return moved


@entry(
    in_array("i4", 4), in_array("i4", 2), out_array("i4", 4), in_array("i4", 4), out_array("i2", 2),
    numba.int64,
    in_array("i8", 2), out_array("i8", 1),
)  # fmt: skip
def _decode(
    evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray, to_s: np.ndarray, n_sweeps: int,
    trees: np.ndarray, moved: np.ndarray,
) -> None:  # fmt: skip
    height, width = evidence.shape[2:]
    s_step, w_step = 4 * s.shape[2] * s.shape[3], 4 * w.shape[2] * w.shape[3]
    live = empty(w.shape[1], np.uint8)
    for n in range(order.shape[0]):
        pixels = evidence[n].ravel()
        to_s[:] = 0
        for _ in range(n_sweeps):
            moved[n] = 0
            for p in range(order.shape[1]):
                index = order[n, p]
                b = pixels[index]
                a, pixel = divmod(index, height * width)
                rows, run, of_s, of_w, begin = trees[pixel]
                spots = s[n].ctypes.data + of_s, w[a].ctypes.data + of_w, to_s[a].ctypes.data + begin
                tree = (rows, run, s_step, w_step, *spots, live.ctypes.data)
                change = False
                if b < _0:
                    total = _summarize_off_1(tree, (-b,), _NO_DAMPING)
                    change = _send_off_1(tree, (-b - total, -b, _0), _NO_DAMPING)
                elif b > _0:
                    first, second = _summarize_on_1(tree, (b,), _NO_DAMPING)
                    rest, top = _find_messages(first, second, b)
                    change = _send_on_1(tree, (rest, top, first), _NO_DAMPING)
                moved[n] += change
            if moved[n] == 0:
                break


def decode_images(
    evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray, n_sweeps: int
) -> np.ndarray:
    """Add the messages of pixels to ``s``, the prior log odds of the feature positions of each image.

    A sweep updates all messages once; sweeps end if no message changes, or after ``n_sweeps``. Return for
    each image the number of pixels whose messages changed in the last sweep.
    """
    sizes = evidence.shape[2:4], w.shape[1:3], w.shape[3]
    moved = np.zeros(len(order), np.int64)
    messages = np.empty((w.shape[0], count_pairs(*sizes) + MESSAGE_ROOM), np.int16)
    hard = np.where(w, np.int32(FIXED_WEIGHT), np.int32(-FIXED_WEIGHT))
    _decode(evidence, order, s, hard, messages, n_sweeps, make_tree_layouts(*sizes), moved)
    return moved
