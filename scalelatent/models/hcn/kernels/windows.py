"""Positions and weights of features that can turn on a pixel, and the memory layout of their messages.

A pair of a pixel is a feature position and a weight of the feature that together turn on the pixel. The pixel
sends a belief-propagation message to the position and another message to the weight.
"""

from __future__ import annotations

import functools

import numpy as np


def find_window(at: int, feature: int, places: int) -> tuple[slice, slice]:
    """Return the slices of the feature positions and of the weights that can turn on pixel ``at`` of an axis.

    ``feature`` is the length of a feature in pixels, and ``places`` the number of positions along the axis.
    The weights of a feature are stored in reverse order, so that position i of the first slice belongs to
    weight i of the second slice.
    """
    first, last = max(0, at - feature + 1), min(places - 1, at)
    return slice(first, last + 1), slice(first - at + feature - 1, last - at + feature)


def list_shifts(n: int) -> list[tuple[int, int]]:
    """Return the offsets (rows, columns) of the ``n`` shifts by which a square pool can move a pixel."""
    reach = round(n**0.5) // 2
    return [(dy, dx) for dy in range(-reach, reach + 1) for dx in range(-reach, reach + 1)]


def message_starts(image: tuple[int, ...], feature: tuple[int, ...], n_features: int) -> np.ndarray:
    """Return the index of the first message of each pixel in an array of messages, int64 (pixels + 1,).

    A pixel sends belief-propagation messages to each feature position and to each weight that can turn on the
    pixel. The array has the messages of the pixels of one channel of an image to positions, or to weights.
    The last entry is the number of messages. ``image`` and ``feature`` are (height, width) in pixels.
    """
    counts = [
        [at.stop - at.start for at, _ in (find_window(i, f, n - f + 1) for i in range(n))]
        for n, f in zip(image, feature, strict=True)
    ]
    sizes = np.multiply.outer(*map(np.array, counts)).ravel() * n_features
    return np.concatenate([[0], np.cumsum(sizes)])


@functools.lru_cache(maxsize=16)
def make_tree_layouts(image: tuple[int, ...], feature: tuple[int, ...], n_features: int) -> np.ndarray:
    """Return where kernels find the pairs of each pixel in memory: int64 (pixels, 5), read-only.

    A pair is a feature position (array S) and a weight (array W) that together turn on the pixel. The pairs
    of a pixel are in a few rows of equal length; each row is contiguous in S and in W. The columns are:

    - 0: number of rows of pairs,
    - 1: number of pairs per row,
    - 2: byte offset of the first position in the int32 array S of an image,
    - 3: byte offset of the first weight in the int32 array W of a channel,
    - 4: byte offset of the first message in an int16 message array of one channel of an image.
    """
    (height, width), (h, w) = image, feature
    begins, out = message_starts(image, feature, n_features), np.empty((height, width, 5), np.int64)
    for y, x in np.ndindex(height, width):
        (r, i), (c, j) = find_window(y, h, height - h + 1), find_window(x, w, width - w + 1)
        s = (r.start * (width - w + 1) + c.start) * n_features
        weights = (i.start * w + j.start) * n_features
        begin = begins[y * width + x]
        out[y, x] = r.stop - r.start, (c.stop - c.start) * n_features, 4 * s, 4 * weights, 2 * begin
    out.setflags(write=False)
    return out.reshape(height * width, 5)


def count_pairs(image: tuple[int, ...], feature: tuple[int, ...], n_features: int) -> int:
    """Return the number of pairs (feature position, weight) of all pixels of one channel of an image."""
    (height, width), (h, w) = image, feature
    return (height - h + 1) * h * (width - w + 1) * w * n_features


MESSAGE_ROOM = 32
"""Number of unused entries at the end of a message array; kernels read and write whole SIMD vectors there."""


def message_room(image: tuple[int, ...], feature: tuple[int, ...], n_features: int) -> int:
    """Return the number of messages of a channel of an image, plus the unused entries `MESSAGE_ROOM`."""
    return count_pairs(image, feature, n_features) + MESSAGE_ROOM
