"""Fixed-point unit of beliefs, evidence and messages, 1/256 nat: sums are exact in any order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UNITS_PER_NAT = 256
"""Units per nat."""
MESSAGE_LIMIT = 2**15 - 1
"""Largest stored message (int16), in units of 1/256 nat.

No message is larger than the evidence of its pixel, which has the same limit.
"""
BELIEF_LIMIT = 2**28
"""Beliefs below this number of units of 1/256 nat have exact int32 sums."""
FIXED_WEIGHT = 2**28
"""Belief in a fixed weight that is on, in units of 1/256 nat; it is larger than any evidence."""

POOL_FLOOR = 10_000 * UNITS_PER_NAT
"""Largest message between layers, in units of 1/256 nat."""
CLASS_FLOOR = 2**28
"""Largest message of the class layer, in units of 1/256 nat.

This message exceeds the evidence of all pixels of an image, except in the first passes of large networks.
Therefore all templates but one are off.
"""
OFF_IMAGE = -(2**29)
"""Log prior of a shift that leaves the image, in units of 1/256 nat; it represents minus infinity."""


def to_units(nats: npt.ArrayLike) -> np.ndarray:
    """Convert nats to units of 1/256 nat, rounded to whole numbers, int32."""
    return np.rint(np.asarray(nats, np.float64) * UNITS_PER_NAT).astype(np.int32)


def from_units(units: npt.ArrayLike) -> np.ndarray:
    """Convert units of 1/256 nat to nats, float64."""
    return np.asarray(units, np.float64) / UNITS_PER_NAT
