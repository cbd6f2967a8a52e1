"""Detection of oriented edges in numba; `reference.oriented_edges` defines the result."""

from __future__ import annotations

import numba
import numpy as np

from scalelatent.kernels.jit import entry, in_array, out_array
from scalelatent.kernels.memory import empty


@entry(in_array("u1", 3), in_array("i4", 3), numba.int32, out_array("u1", 4))
def oriented_edges(images: np.ndarray, weights: np.ndarray, min_response: np.int32, out: np.ndarray) -> None:
    """Write 1 to ``out`` for the filter with the largest response at a pixel, if at least min_response."""
    n, height, width = images.shape
    half, side = weights.shape[0], weights.shape[1]
    reach = side // 2
    sums = empty((half, width), np.int32)
    out[:] = np.uint8(0)
    for i in range(n):
        for y in range(height):
            sums[:] = np.int32(0)
            for k in range(half):
                row = sums[k]
                for dy in range(max(-reach, -y), min(reach, height - 1 - y) + 1):
                    pixels = images[i, y + dy]
                    for dx in range(-reach, reach + 1):
                        weight = weights[k, dy + reach, dx + reach]
                        for x in range(max(0, -dx), min(width, width - dx)):
                            row[x] += weight * np.int32(pixels[x + dx])
            for x in range(width):
                best, strength = 0, np.int32(-1)
                for k in range(half):
                    if abs(sums[k, x]) > strength:
                        best, strength = k, abs(sums[k, x])
                if strength >= min_response:
                    out[i, best if sums[best, x] > 0 else best + half, y, x] = np.uint8(1)
