"""Fixed-point unit of all log odds, 1/256 nat: sums of whole numbers are exact in any order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UNITS_PER_NAT = 256
"""Number of fixed-point units per nat."""
MESSAGE_LIMIT = 2**15 - 1
"""Upper bound of the log odds of one pixel, in units of 1/256 nat; it fits int16.

A message of belief propagation from a pixel is never larger than the log odds of the pixel.
"""
BELIEF_LIMIT = 2**28
"""Upper bound of the log odds of a weight, in units of 1/256 nat; int32 sums of smaller ones are exact."""
FIXED_WEIGHT = 2**28
"""Log odds of a fixed weight that is on, in units of 1/256 nat; a weight that is off has the negative."""

POOL_FLOOR = 10_000 * UNITS_PER_NAT
"""Upper bound of the absolute value of a message between two layers, in units of 1/256 nat."""
CLASS_FLOOR = 2**28
"""Upper bound of a message from the class layer to a template, in units of 1/256 nat.

It exceeds the log odds of all pixels of an image together, except in the first passes of large networks. The
class layer can therefore turn off all templates but one.
"""
OFF_IMAGE = -(2**29)
"""Log prior of a shift that leaves the image, in units of 1/256 nat; it represents minus infinity."""


def to_units(nats: npt.ArrayLike) -> np.ndarray:
    """Convert nats to units of 1/256 nat, rounded to whole numbers, int32."""
    return np.rint(np.asarray(nats, np.float64) * UNITS_PER_NAT).astype(np.int32)


def from_units(units: npt.ArrayLike) -> np.ndarray:
    """Convert units of 1/256 nat to nats, float64."""
    return np.asarray(units, np.float64) / UNITS_PER_NAT
