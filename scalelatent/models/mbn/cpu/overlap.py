"""Nearest centroids of rows of codes: shared units are counted, never by one-hot products.

Two ways, both exact: up to 256 centroids in bit planes (:mod:`.planes`), whose cost is the same whatever a
row meets; beyond that through lists (:mod:`.lists`), whose cost does not grow with the number of centroids.
"""

from __future__ import annotations

import numpy as np

from . import lists as by_lists
from . import planes as by_planes


def make_lists(codes: np.ndarray, units: np.ndarray) -> by_lists.Lists | by_planes.Planes:
    """Centroids made ready for :func:`nearest_codes`, see :func:`..reference.make_lists`.

    Examples
    --------
    >>> type(make_lists(np.zeros((100, 20), dtype=np.uint16), np.ones((20, 9), dtype=bool))).__name__
    'Planes'
    >>> type(make_lists(np.zeros((500, 20), dtype=np.uint16), np.ones((20, 9), dtype=bool))).__name__
    'Lists'
    """
    few = by_planes.fits(len(codes), *units.shape)
    return by_planes.make_planes(codes, units) if few else by_lists.make_lists(codes, units)


def nearest_codes(x: np.ndarray, lists: by_lists.Lists | by_planes.Planes) -> np.ndarray:
    """Index of the centroid that shares most units with each row, see :func:`..reference.nearest_codes`.

    Examples
    --------
    >>> lists = make_lists(np.array([[0, 1], [1, 1]]), np.ones((2, 2), dtype=bool))
    >>> nearest_codes(np.array([[1, 1], [0, 0], [1, 0]], dtype=np.uint16), lists).tolist()
    [1, 0, 1]
    """
    if isinstance(lists, by_planes.Planes):
        return by_planes.nearest_in_planes(x, lists)
    return by_lists.nearest_in_lists(x, lists)
