"""Flipped bits and occluded patches, in place; integers only, so that every machine makes the same rows.

All randomness comes in as `draws` (rows, k) of :func:`.philox.row_draws`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .jit import entry, filled, given
from .philox import below


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
