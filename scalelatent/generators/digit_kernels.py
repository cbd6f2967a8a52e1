"""Compiled kernel that deforms the base images of `InfiniteDigits` by adding tangent images (derivatives)."""

from __future__ import annotations

import numba
import numpy as np

from scalelatent.kernels.jit import entry, in_array, out_array


# Without fused multiply-adds, which the package's defaults allow, rows are identical on every CPU.
@entry(
    in_array("u1", 3),
    *[in_array("i8", 1)] * 3,
    in_array("f4", 3),
    *[in_array("f4", 1)] * 2,
    numba.float32,
    out_array("u1", 3),
    fastmath=False,
)
def render(
    images: np.ndarray,
    base: np.ndarray,
    k1: np.ndarray,
    k2: np.ndarray,
    fields: np.ndarray,
    smooth: np.ndarray,
    derive: np.ndarray,
    alpha: np.float32,
    out: np.ndarray,
) -> None:
    """Fill `out` (n, h, w) with base images, deformed by two displacement fields each.

    `base` holds the row in `images` of each output image; `k1` and `k2` hold the indices in `fields` of the
    two fields of the image. k1 < 0 leaves an image unchanged.
    """
    height, width = images.shape[1], images.shape[2]
    n_taps = smooth.shape[0]
    radius = n_taps // 2
    half, top, zero = np.float32(0.5), np.float32(255), np.float32(0)
    padded = np.zeros(width + 2 * radius, np.float32)
    # The rows above and below the image stay zero, because pixels outside are zero.
    smoothed = np.zeros((height + 2 * radius, width), np.float32)
    sloped = np.zeros((height + 2 * radius, width), np.float32)
    t_x = np.zeros(width, np.float32)
    t_y = np.zeros(width, np.float32)
    for i in range(out.shape[0]):
        image = images[base[i]]
        if k1[i] < 0:
            for y in range(height):
                for x in range(width):
                    out[i, y, x] = image[y, x]
            continue
        for y in range(height):
            for x in range(width):
                padded[radius + x] = image[y, x]
                smoothed[radius + y, x] = zero
                sloped[radius + y, x] = zero
            for u in range(n_taps):
                s, d = smooth[u], derive[u]
                for x in range(width):
                    smoothed[radius + y, x] += s * padded[u + x]
                    sloped[radius + y, x] += d * padded[u + x]
        along, across = fields[k1[i]], fields[k2[i]]
        for y in range(height):
            for x in range(width):
                t_x[x] = zero
                t_y[x] = zero
            for v in range(n_taps):
                s, d = smooth[v], derive[v]
                for x in range(width):
                    t_x[x] += s * sloped[y + v, x]
                    t_y[x] += d * smoothed[y + v, x]
            for x in range(width):
                value = np.float32(image[y, x]) + alpha * (along[y, x] * t_x[x] + across[y, x] * t_y[x])
                out[i, y, x] = np.uint8(np.floor(min(max(value, zero), top) + half))
