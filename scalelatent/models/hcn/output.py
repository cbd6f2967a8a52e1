"""Results of the methods of a fitted network: log odds of feature positions, and objects in images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PlaceBeliefs:
    """Log odds of features at all positions of images, and convergence of their belief propagation.

    Attributes
    ----------
    places : ndarray of float32, shape (n, HS, WS, features)
        Log odds, in nats, of each feature at each of HS x WS positions.
    share_at_rest : ndarray of float32, shape (n,)
        Share of the pixels of an image whose messages did not change in the last sweep over all pixels.
    converged : ndarray of bool, shape (n,)
        True if no message of the image changed in the last sweep.
    """

    places: np.ndarray
    share_at_rest: np.ndarray
    converged: np.ndarray


@dataclass(frozen=True)
class FoundObjects:
    """Objects in images and their positions; the objects of an image are sorted by column, then row.

    The shapes below have room for ``objects`` objects, the largest number per image. An image with fewer
    objects has fill values after its last object.

    Attributes
    ----------
    labels : ndarray, shape (n, objects)
        Class of each object. The fill value is -1, or "" if classes are strings.
    positions : ndarray of int, shape (n, objects, 2)
        Row and column of the upper left corner of the frame of each object, which has the size of the images
        of the fit. The fill value is -1.
    scores : ndarray of float64, shape (n, objects)
        Log probability ratio, in nats, of an object of this class and no object. The fill value is 0.
    exact : ndarray of bool, shape (n,)
        True if it is proved that no other set of objects is better; False if the search ended before a proof.
    """

    labels: np.ndarray
    positions: np.ndarray
    scores: np.ndarray
    exact: np.ndarray
