"""Several templates in one image: the class layer of a network exchanged after training (section 2.4).

The layers below stay as they are, and templates lie over a wider image as features do. The class layer that
was learned under lets one template lie at one place; this one lets several of them lie apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from .hierarchy import Hierarchy

Place = tuple[int, int]

# Choices that are looked at for an image before the best of them is taken.
MOST_LOOKS = 2000


def widened(net: Hierarchy, height: int, width: int) -> Hierarchy:
    """The network over larger images: the same weights and chances of shifts, more places."""
    layers, channels = [], net.layers[0].image[0]
    for layer in net.layers:
        layers.append(replace(layer, image=(channels, height, width)))
        height, width, channels = layers[-1].places
    return replace(net, layers=tuple(layers))


def apart(gains: np.ndarray, frame: tuple[int, int], most: int) -> tuple[list[Place], bool]:
    """Places of at most so many frames that do not overlap, with the largest sum of gains.

    Parameters
    ----------
    gains : ndarray of float64, shape (rows, columns)
        Of a frame whose upper left corner lies there; places of 0 or less are never chosen.
    frame : (int, int)
        Height and width.
    most : int

    Returns
    -------
    places : list of (int, int)
        By column, then row.
    exact : bool
        No choice is better; else these are the best of `MOST_LOOKS`, the greedy one among them.
    """
    search = _Search(frame)
    search.extend(np.maximum(gains, 0), most, 0.0, [])
    return sorted(search.places, key=lambda place: place[::-1]), search.looks < MOST_LOOKS


@dataclass
class _Search:
    """Branch and bound: the best choice until now, its gain, and how many were looked at."""

    frame: tuple[int, int]
    known: float = 0.0
    places: list[Place] = field(default_factory=list)
    looks: int = 0

    def extend(self, gains: np.ndarray, most: int, gain: float, chosen: list[Place]) -> None:
        """Choose among what is left.

        Some best choice has the largest gain, or a place whose frame overlaps that one: only these are tried
        next, the largest before others.
        """
        if gain > self.known:
            self.known, self.places = gain, chosen
        if not most or gain + self._bound(gains, most) <= self.known:
            return
        near = self._near(np.unravel_index(gains.argmax(), gains.shape))
        sums, rest = gains[near], self._bound(gains, most - 1)
        for at in np.argsort(-sums, axis=None, kind="stable"):
            row, column = (int(i) for i in np.unravel_index(at, sums.shape))
            more = gain + float(sums[row, column])
            if more + rest <= self.known or self.looks >= MOST_LOOKS:
                return
            self.looks += 1
            place = near[0].start + row, near[1].start + column
            left = gains.copy()
            left[self._near(place)] = 0
            self.extend(left, most - 1, more, [*chosen, place])

    def _near(self, place: tuple[np.intp | int, ...]) -> tuple[slice, slice]:
        """Places whose frames overlap that of one."""
        (row, column), (height, width) = (int(i) for i in place), self.frame
        return slice(max(0, row - height + 1), row + height), slice(
            max(0, column - width + 1), column + width
        )

    def _bound(self, gains: np.ndarray, most: int) -> float:
        """No choice gains more: places in one cell as large as a frame have frames that overlap."""
        (height, width), (rows, columns) = self.frame, gains.shape
        cells = np.maximum.reduceat(gains, range(0, rows, height), axis=0)
        cells = np.maximum.reduceat(cells, range(0, columns, width), axis=1)
        return float(np.sort(cells, axis=None)[::-1][:most].sum())
