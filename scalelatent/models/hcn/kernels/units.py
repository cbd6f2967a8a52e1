"""Beliefs, evidence and messages are whole numbers of 1/256 nat, so that sums are the same in any order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GRID = 256
"""Units in a nat."""
MESSAGE_LIMIT = 2**15 - 1
"""Units that a stored message (int16) has room for. No message is larger than the evidence of its pixel."""
BELIEF_LIMIT = 2**28
"""Units below which sums of beliefs stay within int32."""
HARD = 2**28
"""Belief of a weight that is fixed, in units; beyond any evidence."""

POOL_FLOOR = 10_000 * GRID
"""Largest message between layers, in units."""
CLASS_FLOOR = 2**28
"""Largest message of the class layer, in units: beyond what all pixels of an image say of a template (but in
the first passes of large networks), so that those of other classes, and all but one of its own, are off.
"""
ABSENT = -(2**29)
"""Log prior of a shift that leaves the image, in units."""


def to_units(nats: npt.ArrayLike) -> np.ndarray:
    """Units, int32."""
    return np.rint(np.asarray(nats, np.float64) * GRID).astype(np.int32)


def from_units(units: npt.ArrayLike) -> np.ndarray:
    """Nats, float64."""
    return np.asarray(units, np.float64) / GRID
