"""Kernels of the binary image sets; integers only, so that every machine makes the same rows.

All randomness comes in as `draws` (rows, k): uniform uint32, of which a number below n is (draw * n) >> 32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from scalelatent.kernels.jit import entry, filled, given, kernel
from scalelatent.kernels.philox import philox

__all__ = ["draw_features", "flip", "flip_exactly", "jitter_pixels", "occlude", "row_draws", "typeset"]

_HALF = np.uint64(32)


@kernel
def below(draw: Any, n: Any) -> Any:
    """A uniform number in 0:n."""
    return np.int64((np.uint64(draw) * np.uint64(n)) >> _HALF)


@entry(given("u8", 1), given("i8", 1), filled("u4", 2))
def row_draws(key: Any, rows: Any, out: Any) -> None:
    """Draws of some rows: in epoch 0 those that `images.uniform` makes of a run of them."""
    count, zero = out.shape[1], np.uint64(0)
    words = (count + 1) // 2  # of 64 bits a row; a step of the counter gives four
    for i in range(out.shape[0]):
        first = rows[i] * words
        step = np.int64(-1)
        a = b = c = d = zero
        for k in range(count):
            word = first + k // 2
            if word // 4 != step:
                step = word // 4
                # numpy counts before it draws
                a, b, c, d = philox(np.uint64(step + 1), zero, zero, key[2], key[0], key[1])
            lane = word % 4
            drawn = a if lane == 0 else b if lane == 1 else c if lane == 2 else d
            out[i, k] = np.uint32(drawn if k % 2 == 0 else drawn >> _HALF)


@entry(given("i2", 3), given("u1", 3), filled("u1", 3))
def draw_features(placements: Any, features: Any, out: Any) -> None:
    """Images with features at places, joined by OR where they overlap."""
    for i in range(out.shape[0]):
        image = out[i]
        for y in range(image.shape[0]):
            for x in range(image.shape[1]):
                image[y, x] = 0
        for k in range(placements.shape[1]):
            feature = placements[i, k, 0]
            if feature < 0:
                continue
            top, left = placements[i, k, 1], placements[i, k, 2]
            for y in range(max(0, -top), min(features.shape[1], image.shape[0] - top)):
                for x in range(max(0, -left), min(features.shape[2], image.shape[1] - left)):
                    image[top + y, left + x] |= features[feature, y, x]


@entry(given("u4", 2), given("u8", 1), filled("u1", 2))
def flip(draws: Any, threshold: Any, out: Any) -> None:
    """Flip each bit whose draw lies below `threshold[0]`, in place; `out` is uint8 (rows, bits)."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] ^= np.uint8(np.uint64(draws[i, j]) < threshold[0])


@entry(given("u4", 2), filled("u1", 2))
def flip_exactly(draws: Any, out: Any) -> None:
    """Flip as many different bits of each row as it has draws, in place: a partial shuffle of the bits."""
    n_bits = out.shape[1]
    order = np.arange(n_bits)
    taken = np.empty(draws.shape[1], np.int64)
    for i in range(out.shape[0]):
        for k in range(draws.shape[1]):
            j = k + below(draws[i, k], n_bits - k)
            taken[k] = j
            order[k], order[j] = order[j], order[k]
            out[i, order[k]] ^= np.uint8(1)
        for k in range(draws.shape[1] - 1, -1, -1):  # put the bits back in order for the next row
            j = taken[k]
            order[k], order[j] = order[j], order[k]


@entry(given("u4", 2), given("i8", 1), filled("u1", 3))
def occlude(draws: Any, patch: Any, out: Any) -> None:
    """Set a patch of each image to a value, in place; draws: top, left; patch: height, width, value."""
    for i in range(out.shape[0]):
        top = below(draws[i, 0], out.shape[1] - patch[0] + 1)
        left = below(draws[i, 1], out.shape[2] - patch[1] + 1)
        for y in range(top, top + patch[0]):
            for x in range(left, left + patch[1]):
                out[i, y, x] = patch[2]


@entry(given("u4", 2), given("u1", 3), filled("u1", 3))
def jitter_pixels(draws: Any, images: Any, out: Any) -> None:
    """Move each pixel that is 1 by up to one pixel in both directions; draws (rows, pixels)."""
    height, width = out.shape[1], out.shape[2]
    for i in range(out.shape[0]):
        for y in range(height):
            for x in range(width):
                out[i, y, x] = 0
        for y in range(height):
            for x in range(width):
                if images[i, y, x]:
                    way = below(draws[i, y * width + x], 9)
                    v, u = y + way // 3 - 1, x + way % 3 - 1
                    if 0 <= v < height and 0 <= u < width:
                        out[i, v, u] = 1


@entry(
    given("u4", 2),
    given("u4", 1),
    given("i8", 1),
    given("i8", 1),
    given("i8", 2),
    given("i8", 1),
    filled("i2", 3),
)
def typeset(draws: Any, likelihood: Any, starts: Any, letters: Any, glyphs: Any, page: Any, out: Any) -> None:
    """Fill pages with random words, line after line."""
    for i in range(out.shape[0]):
        out[i] = -1
        used, top, left = 0, 1, 1
        for k in range(draws.shape[1]):
            word = np.searchsorted(likelihood, draws[i, k], side="right")
            width = -1
            for at in range(starts[word], starts[word + 1]):
                width += glyphs[letters[at], 1] + 1
            if left > 1 and left + width > page[1] - 1:
                top, left = top + page[2], 1
            if top + glyphs[0, 0] > page[0] - 1:
                break
            for at in range(starts[word], starts[word + 1]):
                glyph = letters[at]
                if left + glyphs[glyph, 1] > page[1] - 1 or used == out.shape[1]:
                    break
                out[i, used, 0], out[i, used, 1], out[i, used, 2] = glyph, top, left
                used += 1
                left += glyphs[glyph, 1] + 1
            left += 3  # a space
