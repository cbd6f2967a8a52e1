"""Messages between layers, see the functions of the same names in the reference."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from scalelatent.kernels.jit import entry, filled, given, part
from scalelatent.models.hcn.kernels.exact import ABSENT, POOL_FLOOR
from scalelatent.models.hcn.kernels.windows import starts

_0, _ABSENT, _MOST, _LEAST = np.int32(0), np.int32(ABSENT), np.int32(POOL_FLOOR), np.int32(2 * ABSENT)
_SOME = 512  # terms of at most POOL_FLOOR whose sum int32 has room for


@part
def _reach(at: Any, feature: Any, places: Any) -> tuple[Any, Any, Any]:
    """First place from which a feature reaches a pixel, how many do, and the weight of the first, flipped."""
    first = max(0, at - feature + 1)
    return first, min(places - 1, at) - first + 1, first - at + feature - 1


@part
def _clip(x: Any) -> Any:
    return min(max(x, -_MOST), _MOST)


@part
def _lands(d: Any, y: Any, shape: Any) -> tuple[Any, Any, Any, Any]:
    """Of a shift and a row of places: the row of pools, first and last place of the row, columns between."""
    n, height, width = shape
    side = 1
    while side * side < n:
        side += 1
    dy, dx = d // side - side // 2, d % side - side // 2
    source = y - dy
    if source < 0 or source >= height:
        return 0, 0, 0, 0
    return source, max(0, dx), width + min(0, dx), dx


@part
def _gather(down: Any, y: Any, total: Any, first: Any, second: Any) -> None:
    """What the shifts say that land in a row: positive sum, largest, second largest."""
    total[:], first[:], second[:] = _0, _ABSENT, _ABSENT
    for d in range(down.shape[0]):
        source, begin, end, dx = _lands(d, y, down.shape)
        row = down[d, source]
        for x in range(begin, end):
            t = row[x - dx]
            total[x] += max(t, _0)
            second[x] = max(second[x], min(first[x], t))
            first[x] = max(first[x], t)


@part
def _raise_ors(below: Any, down: Any, up: Any, rows: Any) -> None:
    """Of ORs to shifts, for one channel of an image."""
    total, first, second = rows[0], rows[1], rows[2]
    for y in range(down.shape[1]):
        _gather(down, y, total, first, second)
        for d in range(down.shape[0]):
            source, begin, end, dx = _lands(d, y, down.shape)
            row, out, under = down[d, source], up[d, source], below[y]
            for x in range(begin, end):
                t = row[x - dx]
                best = second[x] if t == first[x] else first[x]
                others = _clip(under[x]) + total[x] - max(t, _0)
                out[x - dx] = _clip(min(others, max(_0, -best)))


@part
def _best_shifts(up: Any, prior: Any, y: Any, first: Any, second: Any) -> None:
    """Largest and second largest of a row's pools."""
    first[:], second[:] = _ABSENT, _ABSENT
    for d in range(up.shape[0]):
        told, chance = up[d, y], prior[d, y]
        for x in range(up.shape[2]):
            b = told[x] + chance[x]
            b = _ABSENT if chance[x] == _ABSENT else b
            second[x] = max(second[x], min(first[x], b))
            first[x] = max(first[x], b)


@entry(
    given("i4", 4), given("i4", 3), given("i4", 5), filled("i4", 4), numba.float32, filled("i4", 3),
    filled("i4", 2),
)  # fmt: skip
def _raise(
    below: np.ndarray, prior: np.ndarray, down: np.ndarray, evidence: np.ndarray, damping: Any,
    up: np.ndarray, rows: np.ndarray,
) -> None:  # fmt: skip
    for n in range(down.shape[0]):
        for a in range(down.shape[1]):
            _raise_ors(below[n, a], down[n, a], up, rows)
            for y in range(down.shape[3]):
                _best_shifts(up, prior, y, rows[0], rows[1])
                for x in range(down.shape[4]):
                    old = evidence[n, a, y, x]
                    step = damping * np.float32(_clip(rows[0, x]) - old)
                    evidence[n, a, y, x] = old + np.int32(np.rint(step))


@entry(
    given("i4", 4), given("i4", 3), given("i4", 4), filled("i4", 5), numba.int64, filled("i4", 3),
    filled("i4", 2), filled("i4", 4),
)  # fmt: skip
def _lower(
    below: np.ndarray, prior: np.ndarray, above: np.ndarray, down: np.ndarray, rounds: Any, up: np.ndarray,
    rows: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    total, first, second = rows[0], rows[1], rows[2]
    for n in range(down.shape[0]):
        for a in range(down.shape[1]):
            for _ in range(rounds + 1):
                _raise_ors(below[n, a], down[n, a], up, rows)
                for y in range(down.shape[3]):
                    _best_shifts(up, prior, y, first, second)
                    top = above[n, a, y]
                    for d in range(down.shape[2]):
                        told, chance, row = up[d, y], prior[d, y], down[n, a, d, y]
                        for x in range(down.shape[4]):
                            best = second[x] if told[x] + chance[x] == first[x] else first[x]
                            new = _clip(chance[x] + min(top[x], -best))
                            row[x] = -_MOST if chance[x] == _ABSENT else new
            for y in range(down.shape[3]):
                _gather(down[n, a], y, total, first, second)
                for x in range(down.shape[4]):
                    out[n, a, y, x] = _clip(first[x] + total[x] - max(first[x], _0))


@entry(given("i4", 4), given("i4", 4), given("i4", 3), given("i4", 3), given("i8", 1), filled("i4", 4))
def _lower_trees(
    s: np.ndarray, w: np.ndarray, to_s: np.ndarray, to_w: np.ndarray, begins: np.ndarray, out: np.ndarray
) -> None:
    high, wide, n_features = s.shape[1:]
    h, width = w.shape[1:3]
    for n in range(out.shape[0]):
        for a in range(out.shape[1]):
            for y in range(out.shape[2]):
                r, rows, i = _reach(y, h, high)
                for x in range(out.shape[3]):
                    c, cols, j = _reach(x, width, wide)
                    begin, run = begins[y * out.shape[3] + x], cols * n_features
                    total, first = _0, _LEAST
                    for k in range(rows):
                        places = s[n, r + k].ravel()[c * n_features :]
                        weights = w[a, i + k].ravel()[j * n_features :]
                        told_s, told_w = to_s[n, a, begin + k * run :], to_w[n, a, begin + k * run :]
                        for q0 in range(0, run, _SOME):
                            for q in range(q0, min(q0 + _SOME, run)):
                                place, weight = places[q] - told_s[q], weights[q] - told_w[q]
                                t = min(place + weight, min(place, weight))
                                total += min(max(t, _0), _MOST)
                                first = max(first, t)
                            total = min(total, _MOST)
                    out[n, a, y, x] = _clip(total if total > _0 else first)


@entry(
    given("i4", 4), given("i4", 1), filled("i4", 4), filled("i4", 4), filled("i4", 3), filled("i4", 3),
    given("i8", 1),
)  # fmt: skip
def _sweep_layers(
    evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray, to_s: np.ndarray, to_w: np.ndarray,
    begins: np.ndarray,
) -> None:  # fmt: skip
    n_channels, height, width = evidence.shape[1:]
    high, wide, n_features = s.shape[1:]
    h, width_of = w.shape[1:3]
    for p in range(order.size):
        pixel, x = divmod(order[p], width)
        index, y = divmod(pixel, height)
        n, a = divmod(index, n_channels)
        below = evidence[n, a, y, x]
        (r, rows, i), (c, cols, j) = _reach(y, h, high), _reach(x, width_of, wide)
        begin, run = begins[y * width + x], cols * n_features
        most, total, first, second = abs(below), _0, _LEAST, _LEAST
        for k in range(rows):
            places = s[n, r + k].ravel()[c * n_features :]
            weights = w[a, i + k].ravel()[j * n_features :]
            told_s, told_w = to_s[n, a, begin + k * run :], to_w[n, a, begin + k * run :]
            if below > _0:
                for q in range(run):
                    place, weight = places[q] - told_s[q], weights[q] - told_w[q]
                    t = min(place + weight, min(place, weight))
                    second = max(second, min(first, t))
                    first = max(first, t)
            else:
                for q0 in range(0, run, _SOME):
                    for q in range(q0, min(q0 + _SOME, run)):
                        place, weight = places[q] - told_s[q], weights[q] - told_w[q]
                        t = min(place + weight, min(place, weight))
                        total += min(max(t, _0), most)
                    total = min(total, _MOST + _MOST)
        rest, top = min(most, max(_0, -first)), min(most, max(_0, -second))
        for k in range(rows):
            places = s[n, r + k].ravel()[c * n_features :]
            weights = w[a, i + k].ravel()[j * n_features :]
            told_s, told_w = to_s[n, a, begin + k * run :], to_w[n, a, begin + k * run :]
            if below > _0:
                for q in range(run):
                    place, weight = places[q] - told_s[q], weights[q] - told_w[q]
                    t = min(place + weight, min(place, weight))
                    size = top if t == first else rest
                    told_s[q] = min(max(weight + size, _0), size)
                    told_w[q] = min(max(place + size, _0), size)
                    places[q], weights[q] = place + told_s[q], weight + told_w[q]
            else:
                for q in range(run):
                    place, weight = places[q] - told_s[q], weights[q] - told_w[q]
                    t = min(place + weight, min(place, weight))
                    size = max(_0, min(max(t, _0), most) + most - total)
                    told_s[q] = -min(max(weight, _0), size)
                    told_w[q] = -min(max(place, _0), size)
                    places[q], weights[q] = place + told_s[q], weight + told_w[q]


def sweep_layers(
    evidence: np.ndarray, order: np.ndarray, s: np.ndarray, w: np.ndarray, to_s: np.ndarray, to_w: np.ndarray
) -> None:
    """All trees of a layer of some images once, in order, with their messages of the sweep before."""
    begins = starts(evidence.shape[2:4], w.shape[1:3], w.shape[3])
    _sweep_layers(evidence, order, s, w, to_s, to_w, begins)


def _scratch(down: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.empty(down.shape[2:], np.int32), np.empty((3, down.shape[4]), np.int32)


def raise_pools(
    below: np.ndarray, prior: np.ndarray, down: np.ndarray, evidence: np.ndarray, damping: float
) -> None:
    """From places of the layer below to what a layer makes."""
    _raise(below, prior, down, evidence, damping, *_scratch(down))


def lower_pools(
    below: np.ndarray, prior: np.ndarray, above: np.ndarray, down: np.ndarray, rounds: int
) -> np.ndarray:
    """From what a layer makes to places of the layer below; messages of pools change."""
    out = np.empty_like(below)
    _lower(below, prior, above, down, rounds, *_scratch(down), out)
    return out


def lower_trees(s: np.ndarray, w: np.ndarray, to_s: np.ndarray, to_w: np.ndarray) -> np.ndarray:
    """Messages of trees to what they make."""
    n_channels, h, width, n_features = w.shape
    image = s.shape[1] + h - 1, s.shape[2] + width - 1
    out = np.empty((len(s), n_channels, *image), np.int32)
    _lower_trees(s, w, to_s, to_w, starts(image, (h, width), n_features), out)
    return out
