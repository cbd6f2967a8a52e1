"""The displacement fields of the infinite digits and the sizes that go with them."""

from __future__ import annotations

import functools
import math
import os

import numpy as np

from scalelatent.errors import DataError
from scalelatent.kernels.random_words import check_seed

from .digit_kernels import gaussian_taps, smooth_fields

__all__ = ["LEAST_SIGMA", "N_FIELDS", "TANGENT_SIGMA", "read_fields", "seeded_fields", "shift_rows"]

N_FIELDS = 1522
"""Number of displacement fields, as published."""
MAX_FIELD_BYTES = 1 << 30
"""Of all displacement fields of a size of images; 419 x 419 pixels are the largest."""
_STEP_WORDS = 1 << 20

# Sizes at 28 pixels; other images get them in proportion.
_FIELD_SIGMA = 4.0
# Displacement in pixels along each axis: digits bend visibly and stay legible. One nearest neighbour on MNIST
# (4,000 bases, 40,000 images, validation rows): error 7.8 % without, 6.4 % at 1.0, 6.3 % at 1.5, 6.2 % at
# 2.5; halos from 2 on.
_FIELD_RMS = 1.5
TANGENT_SIGMA = 1.0
LEAST_SIGMA = 0.5  # of a derivative filter, in pixels; narrower ones are no derivatives any more


def shift_rows(images: np.ndarray, k1: np.ndarray) -> None:
    """Shift each deformed image by (k1 mod 9) in place, zeros coming in."""
    for way in range(9):
        dy, dx = way // 3 - 1, way % 3 - 1
        rows = np.flatnonzero((k1 >= 0) & (k1 % 9 == way))
        if way == 4 or not rows.size:
            continue
        moved = np.zeros_like(images[rows])
        height, width = images.shape[1:]
        to_y, from_y = slice(max(dy, 0), height + min(dy, 0)), slice(max(-dy, 0), height + min(-dy, 0))
        to_x, from_x = slice(max(dx, 0), width + min(dx, 0)), slice(max(-dx, 0), width + min(-dx, 0))
        moved[:, to_y, to_x] = images[rows][:, from_y, from_x]
        images[rows] = moved


@functools.lru_cache(maxsize=4)
def seeded_fields(seed: int, height: int, width: int) -> np.ndarray:
    """White noise smoothed by a Gaussian, float32 (1522, h, w), in pixels.

    The noise comes from the raw bits of Philox, which no numpy version changes, and is scaled by its exact
    deviation instead of a sum over it: every machine makes the same fields.

    Raises
    ------
    DataError
        The fields would take more than `MAX_FIELD_BYTES`.
    """
    size = min(height, width) / 28
    sigma = _FIELD_SIGMA * size
    radius = math.ceil(3 * sigma)
    taps, _ = gaussian_taps(sigma, radius)
    shape = (N_FIELDS, height + 2 * radius, width + 2 * radius)
    size_of_all = 4 * N_FIELDS * height * width
    if size_of_all > MAX_FIELD_BYTES:
        raise DataError(
            f"base images are {height} x {width} pixels: their {N_FIELDS} displacement fields take "
            f"{size_of_all / 1e6:,.0f} MB of memory, and {MAX_FIELD_BYTES / 1e6:,.0f} MB is the limit; scale "
            "the images down"
        )
    generator = np.random.Philox(key=np.array([check_seed(seed), 0], dtype=np.uint64))
    deviation = math.sqrt(1 / 12) * math.fsum(float(t) ** 2 for t in taps)
    fields = np.empty((N_FIELDS, height, width), np.float32)
    step = max(1, _STEP_WORDS // math.prod(shape[1:]))  # a few fields at a time: noise takes far more room
    for first in range(0, N_FIELDS, step):
        some = fields[first : first + step]
        bits = generator.random_raw(len(some) * math.prod(shape[1:])).reshape(len(some), *shape[1:])
        noise = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24) - np.float32(0.5)
        np.multiply(smooth_fields(noise, taps), np.float32(_FIELD_RMS * size / deviation), out=some)
    fields.flags.writeable = False
    return fields


def read_fields(path: str | os.PathLike[str], height: int, width: int) -> np.ndarray:
    """The published displacement fields from their file."""
    expected = N_FIELDS * height * width * 4
    try:
        found = os.path.getsize(path)
    except OSError as error:
        raise DataError(
            f"file of displacement fields {path}: {error.strerror}; give the path of the file"
        ) from error
    if found != expected:
        raise DataError(
            f"file of displacement fields {path} has {found} bytes; {N_FIELDS} fields of {height} x {width} "
            f"float32 are {expected} bytes. Give the published file, or leave it out to use our own fields"
        )
    return np.fromfile(path, "<f4").astype(np.float32).reshape(N_FIELDS, height, width)
