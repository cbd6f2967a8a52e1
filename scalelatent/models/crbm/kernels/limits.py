"""What float32 messages ask of a product of them, and of a belief."""

from __future__ import annotations

from typing import Any

from .inference import check_weights, magnitude

_FACTORS, _RANGE = 8, 80.0
# Of the messages of the graphs that a card works on at a time.
MESSAGE_BYTES = 256 * 2**20
BLOCKS = 8  # thread blocks of a cluster, as in gpu.cu


def limits_of(w: Any) -> tuple[int, float]:
    """For couplings of float32: how many messages may be multiplied, and how far log odds are told apart.

    Parameters
    ----------
    w : array of float32, shape (v, h)
        On the host or on a device.

    Returns
    -------
    factors : int
        So many messages can be multiplied in float32, whatever their values: 2 to 8.
    limit : float
        Log odds beyond +-limit are taken as +-limit when they are made a probability: far enough for every
        message to have its last value, near enough for no product to be subnormal (while |W| < 17).

    Raises
    ------
    WeightError
        Couplings that are not finite, or beyond ``MAX_WEIGHT``.

    Examples
    --------
    >>> import numpy as np
    >>> limits_of(np.full((3, 2), -20.0, dtype=np.float32))
    (4, 57.0)
    """
    most = magnitude(w)
    check_weights(most)
    factors = max(1, min(_FACTORS, int(_RANGE / max(most, 1.0))))
    return factors, max(87.0 - 2 * most, min(86.0, 2 * most + 17.0))
