"""Units of beliefs, evidence and messages: whole numbers of 1/256 nat, with exact sums in any order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GRID = 256
"""Units per nat."""
MESSAGE_LIMIT = 2**15 - 1
"""Largest stored message (int16) in units. No message is larger than the evidence of its pixel."""
BELIEF_LIMIT = 2**28
"""Beliefs below this number of units have exact int32 sums."""
HARD = 2**28
"""Belief in a fixed weight, in units; larger than any evidence."""

POOL_FLOOR = 10_000 * GRID
"""Largest message between layers in units."""
CLASS_FLOOR = 2**28
"""Largest message of the class layer in units.

It exceeds the evidence of all pixels of an image, except in the first passes of large networks. Therefore all
templates but one are off.
"""
ABSENT = -(2**29)
"""Log prior of a shift that leaves the image, in units; it stands for minus infinity."""


def to_units(nats: npt.ArrayLike) -> np.ndarray:
    """Return nats as units, rounded, int32."""
    return np.rint(np.asarray(nats, np.float64) * GRID).astype(np.int32)


def from_units(units: npt.ArrayLike) -> np.ndarray:
    """Return units as nats, float64."""
    return np.asarray(units, np.float64) / GRID
