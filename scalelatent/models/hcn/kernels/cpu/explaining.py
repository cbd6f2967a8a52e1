"""Images explained by drawings, each place once; see the functions of the same names in the reference.

Images lie flat here, with room at both ends, so that a shift is a step within one array, and what places
still have to say (nothing where they are lit) is one array: a pixel's best shift is a few loads and sums.
"""

from __future__ import annotations

import numba
import numpy as np

from scalelatent.kernels.jit import entry, filled, given, part
from scalelatent.models.hcn.kernels.exact import ABSENT
from scalelatent.models.hcn.kernels.reference import ROUNDS
from scalelatent.models.hcn.kernels.windows import shifts

_0, _1, _ABSENT = np.int32(0), np.int32(1), np.int32(ABSENT)


@part
def _best_shift(
    left: np.ndarray, prior: np.ndarray, steps: np.ndarray, p: int, q: int
) -> tuple[np.int32, int]:
    """What a pixel gains by its best shift, and that shift."""
    gain, best = _ABSENT, 0
    for d in range(len(steps)):
        # Shifts that leave the image have a prior that no evidence makes up for.
        told = prior[q, d] + left[p + steps[d]]
        best = d if told > gain else best
        gain = max(told, gain)
    return gain, best


@part
def _light(below: np.ndarray, left: np.ndarray, lit: np.ndarray, room: int, p: int, count: int) -> None:
    """One more lies on a place, or one less."""
    lit[p - room] += count
    left[p] = _0 if lit[p - room] else below[p - room]


@part
def _raise(
    left: np.ndarray, prior: np.ndarray, steps: np.ndarray, drawn: np.ndarray, made: np.ndarray, room: int,
    width: int, top: int, bottom: int, first: int, last: int,
) -> None:  # fmt: skip
    """What pixels gain each by itself: of some rows and columns of all channels."""
    for a in range(0, len(made), len(prior)):
        for y in range(top, bottom):
            for q in range(y * width + first, y * width + last):
                gain, _ = _best_shift(left, prior, steps, room + a + q, q)
                made[a + q] = _0 if drawn[a + q] else gain


@part
def _gain(
    below: np.ndarray, left: np.ndarray, lit: np.ndarray, drawn: np.ndarray, made: np.ndarray,
    prior: np.ndarray, steps: np.ndarray, room: int, own: np.ndarray, shift: np.ndarray, at: int,
) -> np.int32:  # fmt: skip
    """What a feature would gain here; nothing is changed in the end."""
    total = _0
    for i in range(len(own)):
        p, q, alone = own[i, 0] + at, own[i, 1] + at, own[i, 2]
        shift[i] = -1
        # Pixels of one channel alone can be shifted on to one place.
        if alone or drawn[p]:
            total += made[p]
        else:
            gain, d = _best_shift(left, prior, steps, room + p, q)
            total += gain
            shift[i] = room + p + steps[d]
            _light(below, left, lit, room, shift[i], _1)
    for i in range(len(own)):
        if shift[i] >= 0:
            _light(below, left, lit, room, shift[i], -_1)
    return total


@part
def _fill(below: np.ndarray, lit: np.ndarray, left: np.ndarray, room: int) -> None:
    for p in range(len(below)):
        left[room + p] = _0 if lit[p] else below[p]


# prior (pixels, shifts), steps of shifts, weights: steps to their pixels of all channels and of one, and
# whether no other is of their channel; where those of a feature begin, width.
_FEATURES = given("i4", 2), given("i4", 2), given("i8", 1), given("i8", 2), given("i8", 1), numba.int64
_ROOM = filled("i4", 1), filled("i4", 1), filled("i8", 1)  # left, made, shift


@part
def _see_others(
    seen: np.ndarray, usual: np.ndarray, n_pixels: int, width: int, reach: int, see: np.ndarray
) -> None:
    """Which places see something else than usual."""
    high, wide = see.shape
    h, w = n_pixels // width - high + reach, width - wide + reach
    see[:] = 0
    for p in range(len(seen)):
        if seen[p] != usual[p]:
            y, x = p % n_pixels // width, p % width
            for a in range(max(0, y - h), min(high, y + reach + 1)):
                for b in range(max(0, x - w), min(wide, x + reach + 1)):
                    see[a, b] = 1


@entry(*_FEATURES, numba.int64, given("i4", 1), filled("i4", 2), filled("i4", 2), *_ROOM, filled("u1", 2),
       filled("i4", 3), filled("i4", 4))  # fmt: skip
def _place_values(
    below: np.ndarray, prior: np.ndarray, steps: np.ndarray, at: np.ndarray, begins: np.ndarray, width: int,
    reach: int, usual: np.ndarray, drawn: np.ndarray, lit: np.ndarray, left: np.ndarray, made: np.ndarray,
    shift: np.ndarray, see: np.ndarray, says: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    room, n_pixels = (len(left) - below.shape[1]) // 2, len(prior)
    see[:] = 1
    # Most of an image is empty, and says there what others do: that is computed once.
    for n in range(-1, out.shape[0]):
        seen = below[n] if n >= 0 else usual
        if n >= 0:
            _see_others(seen, usual, n_pixels, width, reach, see)
        _fill(seen, lit[0], left, room)
        _raise(left, prior, steps, drawn[0], made, room, width, 0, n_pixels // width, 0, width)
        for f in range(out.shape[1]):
            own = at[begins[f] : begins[f + 1]]
            for y in range(out.shape[2]):
                for x in range(out.shape[3]):
                    gain = says[f, y, x]
                    if see[y, x]:
                        gain = _gain(
                            seen, left, lit[0], drawn[0], made, prior, steps, room, own, shift, y * width + x
                        )
                    if n >= 0:
                        out[n, f, y, x] = gain
                    else:
                        says[f, y, x] = gain


@entry(
    given("i4", 2), given("i4", 2), given("i8", 1), given("i8", 1), given("i4", 1), given("i8", 1),
    filled("i4", 1), filled("i4", 1), filled("u1", 1), filled("u1", 1), filled("i8", 2),
)  # fmt: skip
def _explain(
    below: np.ndarray, prior: np.ndarray, steps: np.ndarray, images: np.ndarray, pixels: np.ndarray,
    begins: np.ndarray, lit: np.ndarray, left: np.ndarray, shift: np.ndarray, first: np.ndarray,
    told: np.ndarray,
) -> None:  # fmt: skip
    room, n_pixels = (len(left) - below.shape[1]) // 2, len(prior)
    for k in range(len(images)):
        seen = below[images[k]]
        if k == 0 or images[k] != images[k - 1]:
            _fill(seen, lit, left, room)
        for number in range(ROUNDS):
            moved = False
            for i in range(begins[k], begins[k + 1]):
                p = room + pixels[i]
                if number:
                    _light(seen, left, lit, room, p + steps[shift[i]], -_1)
                _, d = _best_shift(left, prior, steps, p, pixels[i] % n_pixels)
                moved |= d != shift[i]
                shift[i] = d
                _light(seen, left, lit, room, p + steps[d], _1)
            if number and not moved:
                break
        chances, says = 0, 0
        # From the last to the first, so that none is lit in the end.
        for i in range(begins[k + 1] - 1, begins[k] - 1, -1):
            p = room + pixels[i] + steps[shift[i]]
            _light(seen, left, lit, room, p, -_1)
            first[i] = lit[p - room] == 0
            chances += prior[pixels[i] % n_pixels, shift[i]]
            says += seen[p - room] if first[i] else 0
        told[k, 0], told[k, 1] = chances, says


@entry(
    *_FEATURES, numba.int64, given("i4", 2), filled("i4", 2), filled("i4", 2), given("u1", 4), *_ROOM,
    filled("i4", 3), filled("i4", 4),
)  # fmt: skip
def _put_down(
    below: np.ndarray, prior: np.ndarray, steps: np.ndarray, at: np.ndarray, begins: np.ndarray, width: int,
    reach: int, price: np.ndarray, drawn: np.ndarray, lit: np.ndarray, taken: np.ndarray, left: np.ndarray,
    made: np.ndarray, shift: np.ndarray, gains: np.ndarray, out: np.ndarray,
) -> None:  # fmt: skip
    _, n_features, high, wide = taken.shape
    room, height = (len(left) - below.shape[1]) // 2, len(prior) // width
    h, w = height - high, width - wide
    for n in range(taken.shape[0]):
        top, bottom, first, last = 0, high, 0, wide
        _fill(below[n], lit[n], left, room)
        _raise(left, prior, steps, drawn[n], made, room, width, 0, height, 0, width)
        while True:
            for f in range(n_features):
                own = at[begins[f] : begins[f + 1]]
                for y in range(top, bottom):
                    for x in range(first, last):
                        gains[f, y, x] = _gain(
                            below[n], left, lit[n], drawn[n], made, prior, steps, room, own, shift,
                            y * width + x,
                        )  # fmt: skip
            most, best = _0, (-1, 0, 0)
            for f in range(n_features):
                if begins[f + 1] > begins[f]:
                    for y in range(high):
                        for x in range(wide):
                            gain = gains[f, y, x] - price[y, x]
                            if gain > most and not taken[n, f, y, x] and not out[n, f, y, x]:
                                most, best = gain, (f, y, x)
            f, y, x = best
            if f < 0:
                break
            out[n, f, y, x] = gains[f, y, x]
            for i in range(begins[f], begins[f + 1]):
                p, q = at[i, 0] + y * width + x, at[i, 1] + y * width + x
                if not drawn[n, p]:
                    _, d = _best_shift(left, prior, steps, room + p, q)
                    _light(below[n], left, lit[n], room, room + p + steps[d], _1)
                drawn[n, p] += 1
            # What else gains otherwise now: pixels near those drawn, and features that draw such pixels.
            top, bottom = max(0, y - 2 * reach), min(height, y + h + 2 * reach + 1)
            first, last = max(0, x - 2 * reach), min(width, x + w + 2 * reach + 1)
            _raise(left, prior, steps, drawn[n], made, room, width, top, bottom, first, last)
            top, bottom, first, last = max(0, top - h), min(high, bottom), max(0, first - w), min(wide, last)


def _pools(prior: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Priors of each pixel's shifts side by side, steps of the shifts, room for what n pixels' places say."""
    n_shifts, _, width = prior.shape
    steps = np.array([dy * width + dx for dy, dx in shifts(n_shifts)])
    left = np.zeros(n + 2 * int(np.abs(steps).max()), np.int32)
    return np.ascontiguousarray(prior.reshape(n_shifts, -1).T), steps, left


def _weights(at: np.ndarray, begins: np.ndarray, height: int, width: int) -> np.ndarray:
    """Steps from a place to the pixels of its feature, of all channels and of one; which have one alone."""
    rows, channels = at[:, 1] * width + at[:, 2], at[:, 0]
    owner = np.repeat(np.arange(len(begins) - 1), np.diff(begins)) * (channels.max(initial=0) + 1) + channels
    alone = np.bincount(owner)[owner] == 1
    return np.stack([channels * height * width + rows, rows, alone], axis=1).astype(np.int64)


def place_values(
    below: np.ndarray, prior: np.ndarray, at: np.ndarray, begins: np.ndarray, places: tuple[int, int]
) -> np.ndarray:
    """What each feature at each place says if it lies there alone."""
    flat, (height, width) = below.reshape(len(below), -1), below.shape[2:]
    chances, steps, left = _pools(prior, flat.shape[1])
    out = np.empty((len(below), len(begins) - 1, *places), np.int32)
    drawn, lit, made = (np.zeros((1, flat.shape[1]), np.int32) for _ in range(3))
    shift, own = np.empty(int(np.diff(begins).max(initial=0)), np.int64), _weights(at, begins, height, width)
    says, see = np.empty(out.shape[1:], np.int32), np.empty(places, np.uint8)
    usual = flat.min(axis=0) if len(flat) else np.zeros(flat.shape[1], np.int32)
    _place_values(
        flat, chances, steps, own, begins, width, _reach(prior), usual, drawn, lit, left, made[0], shift, see,
        says, out,
    )  # fmt: skip
    return out


def _reach(prior: np.ndarray) -> int:
    """How far a pixel may be shifted."""
    return round(len(prior) ** 0.5) // 2


def explain(
    below: np.ndarray, prior: np.ndarray, images: np.ndarray, pixels: np.ndarray, begins: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the pixels of drawings are shifted to, so that together they say most."""
    flat = below.reshape(len(below), -1)
    chances, steps, left = _pools(prior, flat.shape[1])
    shift, first = (np.zeros(len(pixels), np.uint8) for _ in range(2))
    told, lit = np.zeros((len(images), 2), np.int64), np.zeros(flat.shape[1], np.int32)
    _explain(flat, chances, steps, images, pixels, begins, lit, left, shift, first, told)
    return shift, first.view(bool), told


def put_down(
    below: np.ndarray, prior: np.ndarray, at: np.ndarray, begins: np.ndarray, price: np.ndarray,
    drawn: np.ndarray, lit: np.ndarray, taken: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Features put down one by one, that which gains most first."""
    flat, (height, width) = below.reshape(len(below), -1), below.shape[2:]
    chances, steps, left = _pools(prior, flat.shape[1])
    out, gains = np.zeros(taken.shape, np.int32), np.zeros(taken.shape[1:], np.int32)
    shift, own = np.empty(int(np.diff(begins).max(initial=0)), np.int64), _weights(at, begins, height, width)
    made, reach = np.zeros(flat.shape[1], np.int32), _reach(prior)
    there = drawn.reshape(flat.shape), lit.reshape(flat.shape), taken.view(np.uint8)
    _put_down(flat, chances, steps, own, begins, width, reach, price, *there, left, made, shift, gains, out)
    return out
