"""Results that a fitted network returns: log odds of positions, and found objects."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PlaceBeliefs:
    """Log odds of features at all positions, and the convergence of the images.

    Attributes
    ----------
    places : ndarray of float32, shape (n, HS, WS, features)
        Log odds, in nats, of each feature at each position.
    share_at_rest : ndarray of float32, shape (n,)
        Share of pixels whose messages did not change in the last update (sweep) of all pixels.
    converged : ndarray of bool, shape (n,)
        True if no message changed in the last sweep.
    """

    places: np.ndarray
    share_at_rest: np.ndarray
    converged: np.ndarray


@dataclass(frozen=True)
class FoundObjects:
    """Objects in some images and their positions; the objects of an image are sorted by column, then row.

    Attributes
    ----------
    labels : ndarray, shape (n, objects)
        Class of each object; -1, or "" for names, if fewer objects were found.
    positions : ndarray of int, shape (n, objects, 2)
        Row and column of the upper left corner of each object's frame, which has the size of the images of
        the fit; -1 if fewer objects were found.
    scores : ndarray of float64, shape (n, objects)
        Log probability ratio of the best template and noise, in nats; 0 if fewer objects were found.
    exact : ndarray of bool, shape (n,)
        True if no choice of objects has a larger sum of scores; False if the search ended before a proof.
    """

    labels: np.ndarray
    positions: np.ndarray
    scores: np.ndarray
    exact: np.ndarray
