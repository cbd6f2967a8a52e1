"""Search for several templates in one image, see section 2.4 of Lázaro-Gredilla et al. (2016).

In an image that is larger than a template, the template has several possible positions. The class layer of
the fit allows one template per image. The search replaces it by a class layer that allows several templates,
whose frames (rectangles of the size of a template) do not overlap. The other layers stay unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from .hierarchy import Hierarchy

# Position of a frame: row and column of its upper left corner.
Place = tuple[int, int]

# The search in one image ends after it has examined this many sets of frames.
MAX_CHOICES = 2000


def enlarge(net: Hierarchy, height: int, width: int) -> Hierarchy:
    """Return a network for images of ``height`` x ``width``: its features have more possible positions."""
    layers, channels = [], net.layers[0].image[0]
    for layer in net.layers:
        layers.append(replace(layer, image=(channels, height, width)))
        height, width, channels = layers[-1].places
    return replace(net, layers=tuple(layers))


def choose_places(gains: np.ndarray, frame: tuple[int, int], most: int) -> tuple[list[Place], bool]:
    """Return positions of up to ``most`` frames that do not overlap, with the largest sum of gains.

    Parameters
    ----------
    gains : ndarray of float64, shape (rows, columns)
        Gain of a frame with its upper left corner at each position; a position with a gain of 0 or less is
        never chosen.
    frame : (int, int)
        Height and width of a frame.
    most : int
        Largest number of frames.

    Returns
    -------
    places : list of (int, int)
        Row and column of each frame, sorted by column, then row.
    exact : bool
        True if no other set of frames has a larger sum. False if the search ended after `MAX_CHOICES` sets
        and returns the best of them.
    """
    search = _Search(frame)
    search.add_places(np.maximum(gains, 0), most, 0.0, [])
    return sorted(search.places, key=lambda place: place[::-1]), search.n_choices < MAX_CHOICES


@dataclass
class _Search:
    """Branch-and-bound search: the best frames so far, their sum of gains, the number of examined sets."""

    frame: tuple[int, int]
    best_gain: float = 0.0
    places: list[Place] = field(default_factory=list)
    n_choices: int = 0

    def add_places(self, gains: np.ndarray, most: int, gain: float, chosen: list[Place]) -> None:
        """Try to add up to ``most`` frames to the frames ``chosen``, whose sum of gains is ``gain``.

        ``gains`` is 0 at positions that overlap a chosen frame. At least one best set contains the frame with
        the largest gain, or a frame that overlaps it. Only these are tried next, in the order of their gains.
        """
        if gain > self.best_gain:
            self.best_gain, self.places = gain, chosen
        if not most or gain + self._bound_gain(gains, most) <= self.best_gain:
            return
        near = self._find_overlapping(np.unravel_index(gains.argmax(), gains.shape))
        sums, rest = gains[near], self._bound_gain(gains, most - 1)
        for at in np.argsort(-sums, axis=None, kind="stable"):
            row, column = (int(i) for i in np.unravel_index(at, sums.shape))
            more = gain + float(sums[row, column])
            if more + rest <= self.best_gain or self.n_choices >= MAX_CHOICES:
                return
            self.n_choices += 1
            place = near[0].start + row, near[1].start + column
            left = gains.copy()
            left[self._find_overlapping(place)] = 0
            self.add_places(left, most - 1, more, [*chosen, place])

    def _find_overlapping(self, place: tuple[np.intp | int, ...]) -> tuple[slice, slice]:
        """Return the positions (rows, columns) of all frames that overlap the frame at ``place``."""
        (row, column), (height, width) = (int(i) for i in place), self.frame
        return slice(max(0, row - height + 1), row + height), slice(
            max(0, column - width + 1), column + width
        )

    def _bound_gain(self, gains: np.ndarray, most: int) -> float:
        """Return an upper bound of the sum of gains of ``most`` frames.

        Two frames whose corners are in one cell of the size of a frame overlap, so a set has at most one
        frame per cell.
        """
        (height, width), (rows, columns) = self.frame, gains.shape
        cells = np.maximum.reduceat(gains, range(0, rows, height), axis=0)
        cells = np.maximum.reduceat(cells, range(0, columns, width), axis=1)
        return float(np.sort(cells, axis=None)[::-1][:most].sum())
