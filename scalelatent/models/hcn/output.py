"""What a fitted network says of images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PlaceBeliefs:
    """What an inference found in some images.

    Attributes
    ----------
    places : ndarray of float32, shape (n, HS, WS, features)
        Log odds that a feature lies at a place.
    share_at_rest : ndarray of float32, shape (n,)
        Pixels of each image whose messages did not change in the last sweep.
    converged : ndarray of bool, shape (n,)
        No message changed.
    """

    places: np.ndarray
    share_at_rest: np.ndarray
    converged: np.ndarray
