"""Unit of all log odds in kernels, 1/256 nat, and limits of log odds in this unit.

Log odds are whole numbers of this unit, because sums of whole numbers are exact in any order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UNITS_PER_NAT = 256
"""Number of units per nat."""
MESSAGE_LIMIT = 2**15 - 1
"""Upper bound of the absolute value of the log odds of a pixel of an image, in units of 1/256 nat.

A message from a pixel is never larger than the log odds of the pixel, so messages fit int16.
"""
BELIEF_LIMIT = 2**28
"""Limit of the log odds of a weight, in 1/256 nat; below it, int32 sums in kernels cannot overflow."""
FIXED_WEIGHT = 2**28
"""Log odds of a fixed weight that is on, in units of 1/256 nat; those of a weight that is off are -2**28."""

POOL_FLOOR = 10_000 * UNITS_PER_NAT
"""Upper bound of the absolute value of a message between two layers, in units of 1/256 nat."""
CLASS_FLOOR = 2**28
"""Upper bound of the absolute value of a message from the class layer to a template, in units of 1/256 nat.

The sum of the log odds of all pixels of an image is smaller, except in the first passes of large networks.
Therefore the class layer can turn off all templates but one.
"""
OFF_IMAGE = -(2**29)
"""Log prior of a shift that leaves the image, in units of 1/256 nat; it stands for minus infinity."""


def to_units(nats: npt.ArrayLike) -> np.ndarray:
    """Convert nats to whole units of 1/256 nat, rounded, int32."""
    return np.rint(np.asarray(nats, np.float64) * UNITS_PER_NAT).astype(np.int32)


def from_units(units: npt.ArrayLike) -> np.ndarray:
    """Convert units of 1/256 nat to nats, float64."""
    return np.asarray(units, np.float64) / UNITS_PER_NAT
