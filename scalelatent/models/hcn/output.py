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


@dataclass(frozen=True)
class TemplateBeliefs:
    """What a network with templates makes of some images, by one forward pass.

    Attributes
    ----------
    scores : ndarray of float64, shape (n, templates)
        In nats.
    templates : ndarray of int, shape (n,)
        The best template of each image.
    margins : ndarray of float64, shape (n,)
        How far its score lies above the next; inf of a single template.
    """

    scores: np.ndarray
    templates: np.ndarray
    margins: np.ndarray

    @classmethod
    def of(cls, scores: np.ndarray) -> TemplateBeliefs:
        """Of scores."""
        ranked = np.sort(scores, axis=1)
        alone = scores.shape[1] == 1
        margins = np.full(len(scores), np.inf) if alone else ranked[:, -1] - ranked[:, -2]
        return cls(scores, scores.argmax(axis=1), margins)


@dataclass(frozen=True)
class FoundObjects:
    """Which objects lie in some images, and where; those of an image by column, then row.

    Attributes
    ----------
    labels : ndarray, shape (n, objects)
        Class of each; -1, or "" of names, where fewer are found.
    positions : ndarray of int, shape (n, objects, 2)
        Row and column of the upper left corner of each object's frame, which is as large as the images of
        the fit; -1 where fewer are found.
    scores : ndarray of float64, shape (n, objects)
        In nats, how much better a template explains what lies there than noise does; 0 where fewer are found.
    exact : ndarray of bool, shape (n,)
        No choice of objects has a larger sum of scores; else the search was ended, and a better one may be.
    """

    labels: np.ndarray
    positions: np.ndarray
    scores: np.ndarray
    exact: np.ndarray
