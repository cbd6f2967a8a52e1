"""Belief-propagation messages through pools, which shift pixels, in numba; see `kernels/reference.py`."""

from __future__ import annotations

import numba
import numpy as np

from scalelatent.kernels.jit import entry, in_array, out_array, subkernel
from scalelatent.kernels.memory import zeros
from scalelatent.models.hcn.kernels.units import OFF_IMAGE, POOL_FLOOR
from scalelatent.models.hcn.kernels.windows import make_tree_layouts

from .trees import make_passes

_summarize_off, _summarize_on, _, _ = make_passes(2, wide=True)

_0, _OFF_IMAGE, _POOL_FLOOR, _NO_DAMPING = (
    np.int32(0),
    np.int32(OFF_IMAGE),
    np.int32(POOL_FLOOR),
    np.float32(1),
)


@subkernel
def _clip(x: np.int32) -> np.int32:
    return min(max(x, -_POOL_FLOOR), _POOL_FLOOR)


@subkernel
def _find_pool_range(d: int, side: int, y: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Return the positions of the pools whose shift number ``d`` moves a pixel into row ``y`` of an image.

    The result has four numbers: the row of these pools, the column of the first pool, the column into which
    shift ``d`` of the first pool moves, and the number of pools, 0 if their row is outside of the image.
    """
    source, dx = y - (d // side - side // 2), d % side - side // 2
    return source, max(0, -dx), max(0, dx), width - abs(dx) if 0 <= source < height else 0


@subkernel
def _sum_messages(
    down: np.ndarray, side: int, y: int, total: np.ndarray, first: np.ndarray, second: np.ndarray
) -> None:
    """Summarize ``down``, the belief-propagation messages of pools to the pixels into which they shift.

    Several pools can shift into the same pixel. For each pixel of row ``y``, write the sum of the positive
    messages of these pools to ``total``, and their two largest messages to ``first`` and ``second``.
    """
    total[:], first[:], second[:] = _0, _OFF_IMAGE, _OFF_IMAGE
    for d in range(down.shape[0]):
        source, of, to, n = _find_pool_range(d, side, y, down.shape[1], down.shape[2])
        row, sums, ones, twos = down[d, source, of : of + n], total[to:], first[to:], second[to:]
        for x in range(n):
            t, one = row[x], ones[x]
            sums[x] += max(t, _0)
            twos[x] = max(twos[x], min(one, t))
            ones[x] = max(one, t)


@subkernel
def _pass_ors_up(below: np.ndarray, down: np.ndarray, side: int, up: np.ndarray, rows: np.ndarray) -> None:
    """Write to ``up`` the belief-propagation messages of pixels to the pools that can shift into them."""
    total, first, second = rows[0], rows[1], rows[2]
    for y in range(down.shape[1]):
        _sum_messages(down, side, y, total, first, second)
        for d in range(down.shape[0]):
            source, of, to, n = _find_pool_range(d, side, y, down.shape[1], down.shape[2])
            row, out, under = down[d, source, of : of + n], up[d, source, of:], below[y, to:]
            sums, ones, twos = total[to:], first[to:], second[to:]
            for x in range(n):
                t, one = row[x], ones[x]
                best = twos[x] if t == one else one
                others = _clip(under[x]) + sums[x] - max(t, _0)
                out[x] = _clip(min(others, max(_0, -best)))


@subkernel
def _find_best_shifts(
    up: np.ndarray, prior: np.ndarray, y: int, first: np.ndarray, second: np.ndarray
) -> None:
    """Write to ``first`` and ``second`` each pool's two largest sums of message ``up`` and log prior."""
    first[:], second[:] = _OFF_IMAGE, _OFF_IMAGE
    for d in range(up.shape[0]):
        arrived, chance = up[d, y], prior[d, y]
        for x in range(len(arrived)):
            b = arrived[x] + chance[x]
            b, one = _OFF_IMAGE if chance[x] == _OFF_IMAGE else b, first[x]
            second[x] = max(second[x], min(one, b))
            first[x] = max(one, b)


@entry(
    in_array("i4", 4), in_array("i4", 3), in_array("i4", 5), out_array("i4", 4), numba.float32,
    out_array("i4", 3), out_array("i4", 2),
)  # fmt: skip
def _pass_up(
    below: np.ndarray, prior: np.ndarray, down: np.ndarray, evidence: np.ndarray, damping: np.float32,
    up: np.ndarray, rows: np.ndarray,
) -> None:  # fmt: skip
    side = np.int64(np.sqrt(down.shape[2]))
    for n in range(down.shape[0]):
        for a in range(down.shape[1]):
            _pass_ors_up(below[n, a], down[n, a], side, up, rows)
            for y in range(down.shape[3]):
                _find_best_shifts(up, prior, y, rows[0], rows[1])
                for x in range(down.shape[4]):
                    old = evidence[n, a, y, x]
                    step = damping * np.float32(_clip(rows[0, x]) - old)
                    evidence[n, a, y, x] = old + np.int32(np.rint(step))


@entry(
    in_array("i4", 4), in_array("i4", 3), in_array("i4", 4), out_array("i4", 5), numba.int64,
    out_array("i4", 3), out_array("i4", 2), out_array("i4", 4),
)  # fmt: skip
def _pass_down(
    below: np.ndarray, prior: np.ndarray, above: np.ndarray, down: np.ndarray, rounds: int, up: np.ndarray,
    rows: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    side, total, first, second = np.int64(np.sqrt(down.shape[2])), rows[0], rows[1], rows[2]
    for n in range(down.shape[0]):
        for a in range(down.shape[1]):
            for _ in range(rounds + 1):
                _pass_ors_up(below[n, a], down[n, a], side, up, rows)
                for y in range(down.shape[3]):
                    _find_best_shifts(up, prior, y, first, second)
                    top = above[n, a, y]
                    for d in range(down.shape[2]):
                        arrived, chance, row = up[d, y], prior[d, y], down[n, a, d, y]
                        for x in range(len(row)):
                            best = second[x] if arrived[x] + chance[x] == first[x] else first[x]
                            new = _clip(chance[x] + min(top[x], -best))
                            row[x] = -_POOL_FLOOR if chance[x] == _OFF_IMAGE else new
            for y in range(down.shape[3]):
                _sum_messages(down[n, a], side, y, total, first, second)
                for x in range(down.shape[4]):
                    out[n, a, y, x] = _clip(first[x] + total[x] - max(first[x], _0))


@entry(
    in_array("i4", 4),
    in_array("i4", 4),
    in_array("i4", 3),
    in_array("i4", 3),
    in_array("i8", 2),
    out_array("i4", 4),
)
def _pass_trees_down(
    s: np.ndarray, w: np.ndarray, to_s: np.ndarray, to_w: np.ndarray, trees: np.ndarray, out: np.ndarray
) -> None:
    s_step, w_step = 4 * s.shape[2] * s.shape[3], 4 * w.shape[2] * w.shape[3]
    live = zeros(w.shape[1], np.uint8)
    for n in range(out.shape[0]):
        for a in range(out.shape[1]):
            flat = out[n, a].ravel()
            for pixel in range(flat.size):
                rows, run, of_s, of_w, begin = trees[pixel]
                tree = (
                    rows, run, s_step, w_step, s[n].ctypes.data + of_s, w[a].ctypes.data + of_w,
                    to_s[n, a].ctypes.data + 2 * begin, to_w[n, a].ctypes.data + 2 * begin, live.ctypes.data,
                )  # fmt: skip
                total = _summarize_off(tree, (_POOL_FLOOR,), _NO_DAMPING)
                # The sum of positive messages of the pairs (position, weight) is 0 if no pair is on; the
                # result is then the largest message.
                if total == _0:
                    total = _summarize_on(tree, (_POOL_FLOOR,), _NO_DAMPING)[0]
                flat[pixel] = _clip(total)


@entry(in_array("i4", 4), in_array("i8", 2), in_array("i4", 4), out_array("i4", 4), out_array("i4", 4))
def _pass_features_down(
    s: np.ndarray, on: np.ndarray, evidence: np.ndarray, first: np.ndarray, total: np.ndarray
) -> None:
    high, wide = s.shape[2:]
    for n in range(s.shape[0]):
        for k in range(on.shape[0]):
            a, i, j, f = on[k]
            for y in range(high):
                row, sent = s[n, f, y], evidence[n, a, i + y, j:]
                ones, sums = first[n, a, i + y, j:], total[n, a, i + y, j:]
                for x in range(wide):
                    t = row[x] - sent[x]
                    sums[x] = min(sums[x] + min(max(t, _0), _POOL_FLOOR), _POOL_FLOOR)
                    ones[x] = max(ones[x], t)


def _scratch(down: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.empty(down.shape[2:], np.int32), np.empty((3, down.shape[4]), np.int32)


def pass_pools_up(
    below: np.ndarray, prior: np.ndarray, down: np.ndarray, evidence: np.ndarray, damping: float
) -> None:
    """Update ``evidence``, messages of pools up to pixels of features; see `reference.pass_pools_up`."""
    _pass_up(below, prior, down, evidence, damping, *_scratch(down))


def pass_pools_down(
    below: np.ndarray, prior: np.ndarray, above: np.ndarray, down: np.ndarray, rounds: int
) -> np.ndarray:
    """Return the belief-propagation messages to shifted pixels; update ``down``, those of the pools.

    A pixel is the OR of the pools that can shift into it. Pools and pixels exchange messages once, and then
    ``rounds`` more times. `reference.pass_pools_down` describes the other arrays.
    """
    out = np.empty_like(below)
    _pass_down(below, prior, above, down, rounds, *_scratch(down), out)
    return out


def pass_trees_down(s: np.ndarray, w: np.ndarray, to_s: np.ndarray, to_w: np.ndarray) -> np.ndarray:
    """Return belief-propagation messages of features down to pixels, for weights that a fit still learns."""
    n_channels, h, width, n_features = w.shape
    image = s.shape[1] + h - 1, s.shape[2] + width - 1
    out = np.empty((len(s), n_channels, *image), np.int32)
    _pass_trees_down(s, w, to_s, to_w, make_tree_layouts(image, (h, width), n_features), out)
    return out


def pass_features_down(s: np.ndarray, w: np.ndarray, evidence: np.ndarray) -> np.ndarray:
    """Return belief-propagation messages of features down to pixels, for fixed weights after one pass up."""
    first, total = np.full(evidence.shape, _OFF_IMAGE), np.zeros(evidence.shape, np.int32)
    _pass_features_down(s, np.ascontiguousarray(np.argwhere(w[:, ::-1, ::-1])), evidence, first, total)
    made: np.ndarray = np.where(total > 0, total, np.maximum(first, -_POOL_FLOOR))
    return made
