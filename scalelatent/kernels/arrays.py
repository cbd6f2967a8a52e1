"""What annotations call an array that may lie on a card."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import cupy
    import numpy as np

Array: TypeAlias = "np.ndarray | cupy.ndarray"
"""Of the backend's library: numpy's on the processor, CuPy's on a card."""
