"""Beliefs, evidence and messages are whole numbers of 1/256 nat: sums of them are exact in any order."""

from __future__ import annotations

from typing import Any

import numpy as np

GRID = 256
"""Units in a nat."""
MESSAGE_LIMIT = 2**15 - 1
"""Units that a stored message (int16) has room for. No message is larger than the evidence of its pixel."""
BELIEF_LIMIT = 2.0**24
"""Whole numbers below it are exact in float32."""
HARD = 2.0**22
"""Belief of a weight that is fixed, in units; beyond any evidence."""


def to_grid(nats: Any) -> np.ndarray:
    """Units, whole numbers in float32."""
    return np.rint(np.asarray(nats, np.float64) * GRID).astype(np.float32)


def from_grid(units: Any) -> np.ndarray:
    """Nats, float64."""
    return np.asarray(units, np.float64) / GRID
