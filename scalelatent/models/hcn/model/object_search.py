"""Search for several objects in one image with a network that was fitted on images of one object.

See section 2.4 of Lázaro-Gredilla et al., "Hierarchical compositional feature learning" (2016).

The frame of an object is the rectangle that its template (a feature of the top layer) covers. In an image
that is larger than the images of the fit, a frame has several possible positions. The search chooses several
frames that do not overlap; the network of the fit, in contrast, has exactly one template per image.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from .hierarchy import Hierarchy

# Position of a frame: row and column of its upper left corner.
Place = tuple[int, int]

# Largest number of sets of frames that the search in one image examines.
MAX_CHOICES = 2000


def enlarge(net: Hierarchy, height: int, width: int) -> Hierarchy:
    """Return a network for images of ``height`` x ``width``; its features have more possible positions."""
    layers, channels = [], net.layers[0].image[0]
    for layer in net.layers:
        layers.append(replace(layer, image=(channels, height, width)))
        height, width, channels = layers[-1].places
    return replace(net, layers=tuple(layers))


def choose_places(gains: np.ndarray, frame: tuple[int, int], max_frames: int) -> tuple[list[Place], bool]:
    """Return the positions of up to ``max_frames`` frames that do not overlap, with the largest sum of gains.

    ``gains`` (rows, columns) has the gain of a frame at each position of its upper left corner, and ``frame``
    is the (height, width) of a frame. Positions with a gain of 0 or less are never chosen. The positions in
    the result are sorted by column, then row. The second result is True if no other set of frames has a
    larger sum of gains, and False if the search ended after `MAX_CHOICES` sets.
    """
    search = _Search(frame)
    search.add_places(np.maximum(gains, 0), max_frames, 0.0, [])
    return sorted(search.places, key=lambda place: place[::-1]), search.n_choices < MAX_CHOICES


@dataclass
class _Search:
    """Branch-and-bound search for the frames with the largest sum of gains.

    ``frame`` is the (height, width) of a frame. ``places`` are the best frames so far, ``best_gain`` is the
    sum of their gains, and ``n_choices`` is the number of examined sets of frames.
    """

    frame: tuple[int, int]
    best_gain: float = 0.0
    places: list[Place] = field(default_factory=list)
    n_choices: int = 0

    def add_places(self, gains: np.ndarray, max_frames: int, gain: float, chosen: list[Place]) -> None:
        """Try to add up to ``max_frames`` frames to the frames ``chosen``, whose sum of gains is ``gain``.

        ``gains`` is 0 at positions whose frame would overlap a chosen frame. One of the best sets contains
        the frame with the largest gain, or a frame that overlaps it: otherwise this frame could be added, or
        could replace another frame without a loss. The search therefore branches over these frames only, in
        descending order of their gains.
        """
        if gain > self.best_gain:
            self.best_gain, self.places = gain, chosen
        if not max_frames or gain + self._bound_gain(gains, max_frames) <= self.best_gain:
            return
        near = self._find_overlapping(np.unravel_index(gains.argmax(), gains.shape))
        sums, rest = gains[near], self._bound_gain(gains, max_frames - 1)
        for at in np.argsort(-sums, axis=None, kind="stable"):
            row, column = (int(i) for i in np.unravel_index(at, sums.shape))
            more = gain + float(sums[row, column])
            if more + rest <= self.best_gain or self.n_choices >= MAX_CHOICES:
                return
            self.n_choices += 1
            place = near[0].start + row, near[1].start + column
            left = gains.copy()
            left[self._find_overlapping(place)] = 0
            self.add_places(left, max_frames - 1, more, [*chosen, place])

    def _find_overlapping(self, place: tuple[np.intp | int, ...]) -> tuple[slice, slice]:
        """Return the slices (rows, columns) of positions of frames that overlap the frame at ``place``."""
        (row, column), (height, width) = (int(i) for i in place), self.frame
        return slice(max(0, row - height + 1), row + height), slice(
            max(0, column - width + 1), column + width
        )

    def _bound_gain(self, gains: np.ndarray, max_frames: int) -> float:
        """Return an upper bound of the sum of gains of ``max_frames`` frames that do not overlap.

        The positions are divided into cells of the size of a frame. Two frames with positions in one cell
        overlap, so a set has at most one frame per cell.
        """
        (height, width), (rows, columns) = self.frame, gains.shape
        cells = np.maximum.reduceat(gains, range(0, rows, height), axis=0)
        cells = np.maximum.reduceat(cells, range(0, columns, width), axis=1)
        return float(np.sort(cells, axis=None)[::-1][:max_frames].sum())
