"""Kernels that corrupt rows or images of zeros and ones in place.

They compute only with integers, so all machines give the same rows. Their random numbers are the uint32
argument ``draws`` (rows, draws), from :func:`.philox.row_draws`. Images ``out`` are (rows, height, width).
"""

from __future__ import annotations

import numpy as np

from .jit import entry, in_array, out_array
from .memory import empty
from .philox import draw_below


@entry(in_array("u4", 2), out_array("u1", 2))
def flip_exactly(draws: np.ndarray, out: np.ndarray) -> None:
    """Flip different random bits of each row, one per draw; a partial shuffle of the bits chooses them."""
    n_bits = out.shape[1]
    order = np.arange(n_bits)
    taken = empty(draws.shape[1], np.int64)
    for i in range(out.shape[0]):
        for k in range(draws.shape[1]):
            j = k + draw_below(draws[i, k], n_bits - k)
            taken[k] = j
            order[k], order[j] = order[j], order[k]
            out[i, order[k]] ^= np.uint8(1)
        for k in range(draws.shape[1] - 1, -1, -1):  # restore the order for the next row
            j = taken[k]
            order[k], order[j] = order[j], order[k]


@entry(in_array("u4", 2), in_array("i8", 1), out_array("u1", 3))
def occlude(draws: np.ndarray, patch: np.ndarray, out: np.ndarray) -> None:
    """Set all pixels of a rectangle (patch) at a random place of each image to a value.

    ``draws`` determine the top and left of each patch; ``patch`` is (height, width, value).
    """
    for i in range(out.shape[0]):
        top = draw_below(draws[i, 0], out.shape[1] - patch[0] + 1)
        left = draw_below(draws[i, 1], out.shape[2] - patch[1] + 1)
        for y in range(top, top + patch[0]):
            for x in range(left, left + patch[1]):
                out[i, y, x] = patch[2]


@entry(in_array("u4", 2), in_array("i8", 1), out_array("u1", 3))
def draw_border(draws: np.ndarray, border: np.ndarray, out: np.ndarray) -> None:
    """Set the pixels of a border of each image to a value.

    ``draws`` determine the border's widths at the top, bottom, left and right; ``border`` is (largest width,
    value).
    """
    for i in range(out.shape[0]):
        height, width = out.shape[1], out.shape[2]
        top, bottom = 1 + draw_below(draws[i, 0], border[0]), height - 1 - draw_below(draws[i, 1], border[0])
        left, right = 1 + draw_below(draws[i, 2], border[0]), width - 1 - draw_below(draws[i, 3], border[0])
        for y in range(height):
            for x in range(width):
                if y < top or y >= bottom or x < left or x >= right:
                    out[i, y, x] = border[1]


@entry(in_array("u4", 2), in_array("i8", 1), out_array("u1", 3))
def scatter(draws: np.ndarray, patch: np.ndarray, out: np.ndarray) -> None:
    """Replace a rectangle (patch) of each image by pixels that are 0 or the value at random.

    The first two draws determine the top and left of the patch; each further draw determines 32 pixels.
    ``patch`` is (height, width, value).
    """
    for i in range(out.shape[0]):
        top = draw_below(draws[i, 0], out.shape[1] - patch[0] + 1)
        left = draw_below(draws[i, 1], out.shape[2] - patch[1] + 1)
        for k in range(patch[0] * patch[1]):
            bit = (np.int64(draws[i, 2 + k // 32]) >> (k % 32)) & 1
            out[i, top + k // patch[1], left + k % patch[1]] = bit * patch[2]


@entry(in_array("u4", 2), in_array("i8", 1), out_array("u1", 3))
def draw_grid_lines(draws: np.ndarray, grid: np.ndarray, out: np.ndarray) -> None:
    """Draw horizontal and vertical lines at equal distances on each image.

    ``draws`` determine the first row and the first column of pixels; ``grid`` is (distance, value).
    """
    for i in range(out.shape[0]):
        first_row, first_column = draw_below(draws[i, 0], grid[0]), draw_below(draws[i, 1], grid[0])
        for y in range(out.shape[1]):
            for x in range(out.shape[2]):
                if y % grid[0] == first_row or x % grid[0] == first_column:
                    out[i, y, x] = grid[1]


@entry(in_array("u4", 2), in_array("i8", 1), out_array("u1", 3))
def draw_lines(draws: np.ndarray, value: np.ndarray, out: np.ndarray) -> None:
    """Draw lines from edge to edge of each image; three draws determine a line's direction, start and end.

    ``value`` holds the value of the pixels of a line.
    """
    for i in range(out.shape[0]):
        for k in range(draws.shape[1] // 3):
            down = draw_below(draws[i, 3 * k], 2) == 1
            length, across = out.shape[2], out.shape[1]
            if down:
                length, across = across, length
            begin, end = draw_below(draws[i, 3 * k + 1], across), draw_below(draws[i, 3 * k + 2], across)
            steps, before = max(1, length - 1), begin
            # In each column, set the pixels between the height of the line here and in the previous column.
            for at in range(length):
                to = (2 * (begin * (steps - at) + end * at) + steps) // (2 * steps)
                step = np.int64(1) if to >= before else np.int64(-1)
                reached = to if before == to else before + step
                while True:
                    if down:
                        out[i, at, reached] = value[0]
                    else:
                        out[i, reached, at] = value[0]
                    if reached == to:
                        break
                    reached += step
                before = to


@entry(in_array("u4", 2), out_array("u1", 3))
def erase_lines(draws: np.ndarray, out: np.ndarray) -> None:
    """Set rows or columns of pixels to 0; two draws determine the direction and the position of each."""
    for i in range(out.shape[0]):
        for k in range(draws.shape[1] // 2):
            if draw_below(draws[i, 2 * k], 2) == 1:
                out[i, draw_below(draws[i, 2 * k + 1], out.shape[1]), :] = 0
            else:
                out[i, :, draw_below(draws[i, 2 * k + 1], out.shape[2])] = 0
