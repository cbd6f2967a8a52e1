"""Compiled kernels of the binary image sets; integers only, so that rows are identical on every machine.

Random numbers are an argument: `draws` (rows, k), uniform uint32; (draw * n) >> 32 is uniform on 0 to n - 1.
"""

from __future__ import annotations

import numpy as np

from scalelatent.kernels.jit import entry, in_array, out_array
from scalelatent.kernels.philox import draw_below


@entry(in_array("i2", 3), in_array("u1", 3), out_array("u1", 3))
def draw_features(placements: np.ndarray, features: np.ndarray, out: np.ndarray) -> None:
    """Draw shapes into images of 0 and 1; a pixel is 1 if any of the shapes covers it.

    `placements` (rows, count, 3) holds the index of a drawing in `features`, its top row and its left column;
    index -1 draws nothing.
    """
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


@entry(in_array("u4", 2), in_array("u8", 1), out_array("u1", 2))
def flip(draws: np.ndarray, threshold: np.ndarray, out: np.ndarray) -> None:
    """Flip, in place, each bit of `out` (rows, bits) whose random number in `draws` is below a threshold."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] ^= np.uint8(np.uint64(draws[i, j]) < threshold[0])


@entry(in_array("u4", 2), in_array("u1", 3), out_array("u1", 3))
def jitter_pixels(draws: np.ndarray, images: np.ndarray, out: np.ndarray) -> None:
    """Move each pixel that is 1 by -1, 0 or 1 along both axes; `draws` (rows, pixels) decides."""
    height, width = out.shape[1], out.shape[2]
    for i in range(out.shape[0]):
        for y in range(height):
            for x in range(width):
                out[i, y, x] = 0
        for y in range(height):
            for x in range(width):
                if images[i, y, x]:
                    way = draw_below(draws[i, y * width + x], 9)
                    v, u = y + way // 3 - 1, x + way % 3 - 1
                    if 0 <= v < height and 0 <= u < width:
                        out[i, v, u] = 1


@entry(in_array("u4", 2), in_array("i8", 1), out_array("u1", 3))
def make_grey(draws: np.ndarray, how: np.ndarray, out: np.ndarray) -> None:
    """Turn images of 0 and 1 into grey images of 0 to 255, in place.

    ``how[0]`` is the number of blurs; ``how[1]`` the largest random change of a grey value.
    """
    height, width = out.shape[1], out.shape[2]
    # A blur applies the filter 1 2 1 along rows, then along columns; pixels outside the image are 0.
    now, then = np.zeros((height + 2, width + 2), np.int64), np.zeros((height + 2, width + 2), np.int64)
    for i in range(out.shape[0]):
        for y in range(height):
            for x in range(width):
                now[y + 1, x + 1] = 255 * np.int64(out[i, y, x])
        for _ in range(how[0]):
            for y in range(1, height + 1):
                for x in range(1, width + 1):
                    then[y, x] = now[y, x - 1] + 2 * now[y, x] + now[y, x + 1]
            for y in range(1, height + 1):
                for x in range(1, width + 1):
                    now[y, x] = (then[y - 1, x] + 2 * then[y, x] + then[y + 1, x] + 8) // 16
        for y in range(height):
            for x in range(width):
                grain = draw_below(draws[i, y * width + x], 2 * how[1] + 1) - how[1]
                out[i, y, x] = np.uint8(min(255, max(0, now[y + 1, x + 1] + grain)))


@entry(
    in_array("u4", 2),
    in_array("u4", 1),
    in_array("i8", 1),
    in_array("i8", 1),
    in_array("i8", 2),
    in_array("i8", 1),
    out_array("i2", 3),
)
def typeset(
    draws: np.ndarray,
    likelihood: np.ndarray,
    starts: np.ndarray,
    letters: np.ndarray,
    glyphs: np.ndarray,
    page: np.ndarray,
    out: np.ndarray,
) -> None:
    """Fill pages with random words, line after line; `out` receives letters and places for `draw_features`.

    Word k has the letters `letters[starts[k]:starts[k + 1]]`, and `likelihood` holds the cumulative
    probabilities of words, scaled to uint32. `glyphs` holds height and width of each letter; `page` holds
    height and width of a page, and the distance of lines.
    """
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
            left += 3  # the space between two words, in pixels
