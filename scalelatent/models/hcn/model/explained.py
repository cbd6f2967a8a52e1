"""Images explained by templates: what lies where, so that each pixel is paid for once.

A forward pass lets each pixel of a template count the best evidence near it, whatever others count: an edge
of an image pays for all that can be shifted on to it. An explanation is one choice of all shifts (see
``kernels.reference.explain``), from the template down to the pixels, and its score the log probability of
these: the evidence of pixels that are drawn, each once, and the priors of the shifts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.models.hcn.kernels.exact import to_grid
from scalelatent.models.hcn.kernels.windows import shifts

from .layer import convolve, log_odds, to_features

if TYPE_CHECKING:
    from .hierarchy import Hierarchy

# Pixels of drawings, of all layers, that are shifted at once: each has about 50 bytes on the way.
DRAWN_AT_ONCE = 2**19
DRAWN_BYTES = 2**26
MARKS = 2**21  # of pixels that are looked at once: what a processor keeps near


@dataclass(frozen=True, eq=False)
class Drawings:
    """Pixels that are on, of some drawings of images.

    Attributes
    ----------
    images : ndarray of int64, shape (drawings,)
        Image that each explains.
    pixels : ndarray of int32, shape (pixels of all,)
        Numbers within channels x height x width, which rise in a drawing.
    begins : ndarray of int64, shape (drawings + 1,)
    """

    images: np.ndarray
    pixels: np.ndarray
    begins: np.ndarray

    @cached_property
    def owner(self) -> np.ndarray:
        """Drawing of each pixel."""
        return np.repeat(np.arange(len(self.images)), np.diff(self.begins))

    @classmethod
    def of(cls, images: np.ndarray, owner: np.ndarray, pixels: np.ndarray, size: int) -> Drawings:
        """Of pixels in any order, with repetitions; owners rise."""
        # Marked and looked up: numbers would be sorted, which takes thrice as long.
        step, numbers = max(1, MARKS // size), owner * size + pixels
        firsts = range(0, len(images), step)
        cuts = np.searchsorted(owner, [*firsts, len(images)])
        marks, found = np.zeros(min(step, len(images)) * size, bool), [np.empty(0, np.int64)]
        for first, (a, b) in zip(firsts, itertools.pairwise(cuts), strict=True):
            marks[numbers[a:b] - first * size] = True
            found.append(np.flatnonzero(marks) + first * size)
            marks[:] = False
        each = np.concatenate(found)
        begins = np.searchsorted(each, size * np.arange(len(images) + 1))
        return cls(images, (each % size).astype(np.int32), begins)


@dataclass(frozen=True, eq=False)
class Members:
    """Weights that are on, feature by feature.

    Attributes
    ----------
    at : ndarray of int32, shape (weights, 3)
        Channel, row and column.
    begins : ndarray of int64, shape (F + 1,)
    places : (HS, WS)
    """

    at: np.ndarray
    begins: np.ndarray
    places: tuple[int, int]

    @classmethod
    def of(cls, w: np.ndarray, places: tuple[int, int, int]) -> Members:
        """Of weights as kernels have them, bool (channels, h, w, F)."""
        where = np.argwhere(to_features(w))
        begins = np.searchsorted(where[:, 0], np.arange(w.shape[-1] + 1))
        return cls(np.ascontiguousarray(where[:, 1:], np.int32), begins, places[:2])

    def drawn(
        self,
        images: np.ndarray,
        owner: np.ndarray,
        features: np.ndarray,
        rows: np.ndarray,
        columns: np.ndarray,
        image: tuple[int, int, int],
    ) -> Drawings:
        """What features at these places draw; each place is one of a drawing's."""
        counts = np.diff(self.begins)[features]
        which = np.repeat(self.begins[features] - np.cumsum(counts) + counts, counts)
        which += np.arange(len(which))
        channels, i, j = self.at[which].T.astype(np.int64)
        (_, height, width) = image
        pixels = (channels * height + np.repeat(rows, counts) + i) * width + np.repeat(columns, counts) + j
        return Drawings.of(images, np.repeat(owner, counts), pixels, int(np.prod(image)))


@dataclass(frozen=True, eq=False)
class Explainer:
    """A network under fixed weights, bool (channels, h, w, F) of each layer, that explains images."""

    net: Hierarchy
    weights: list[np.ndarray]
    backend: Backend

    @cached_property
    def members(self) -> list[Members]:
        """Weights of each layer that are on."""
        return [Members.of(w, layer.places) for w, layer in zip(self.weights, self.net.layers, strict=True)]

    def values(self, pixels: np.ndarray) -> list[np.ndarray]:
        """What pixels say, and then the places of each layer below the templates: int32, in units."""
        kernel, found = self.backend.kernel("hcn_place_values"), [pixels]
        for members, prior in zip(self.members[:-1], self.net.priors, strict=False):
            found.append(kernel(found[-1], prior, members.at, members.begins, members.places))
        return found

    def scores(self, pixels: np.ndarray, allowed: np.ndarray | None = None) -> np.ndarray:
        """Of the best templates of each class by a forward pass, in units; minus infinity of all others.

        Clusters are all looked at.

        Parameters
        ----------
        pixels : ndarray of int32, shape (images, channels, height, width)
        allowed : ndarray of bool, shape (images, templates), or None
            Templates that are looked at; None: those with weights, of a class that has any.

        Returns
        -------
        ndarray of float64, shape (images, templates)
        """
        net, values = self.net, self.values(pixels)
        made = net.raise_last(values[-1], self.backend)
        forward = convolve(made, self.weights[-1], net.layers[-1]).reshape(len(pixels), -1).astype(np.float64)
        classes = np.arange(net.n_templates) if net.classes is None else np.array(net.classes)
        if allowed is None:
            used = np.diff(self.members[-1].begins) > 0
            allowed = np.broadcast_to(used | ~np.isin(classes, classes[used]), forward.shape)
        ranked = np.argsort(-np.where(allowed, forward, -np.inf), axis=1, kind="stable")
        chosen, out = np.zeros(forward.shape, bool), np.full(forward.shape, -np.inf)
        for code in np.unique(classes):
            own = ranked[np.isin(ranked, np.flatnonzero(classes == code))].reshape(len(ranked), -1)
            np.put_along_axis(chosen, own[:, : net.n_candidates], True, axis=1)
        images, templates = map(np.ascontiguousarray, np.nonzero(chosen & allowed))
        for part in self._parts(templates):
            told = self._told(values, images[part], templates[part])
            out[images[part], templates[part]] = told
        return out

    def _parts(self, templates: np.ndarray) -> Iterator[slice]:
        """Runs of drawings that have not too many pixels together."""
        sizes = np.cumsum(self.sizes[templates])
        ends = np.searchsorted(sizes, np.arange(DRAWN_AT_ONCE, sizes[-1:].sum() + 1, DRAWN_AT_ONCE)) + 1
        cuts = np.unique([0, *ends, len(templates)])
        return (slice(a, b) for a, b in itertools.pairwise(cuts))

    @cached_property
    def sizes(self) -> np.ndarray:
        """Pixels that each template draws, in all layers."""
        below = np.zeros(self.net.layers[0].image[0], int)
        for members in self.members:
            told = np.cumsum(np.concatenate([[0], 1 + below[members.at[:, 0]]]))
            below = np.diff(told[members.begins])
        return below

    def _told(self, values: list[np.ndarray], images: np.ndarray, templates: np.ndarray) -> np.ndarray:
        """Log probability of the explanation of each image by its template, in units."""
        total = np.zeros(len(images), np.int64)
        for _, _, _, told in self._down(values, images, templates):
            total += told[:, 0]
        return total + told[:, 1]

    def _down(
        self, values: list[np.ndarray], images: np.ndarray, templates: np.ndarray
    ) -> Iterator[tuple[Drawings, np.ndarray, np.ndarray, np.ndarray]]:
        """From the templates down, layer by layer: what it draws, and what the kernel says of that."""
        kernel, none = self.backend.kernel("hcn_explain"), np.zeros(len(templates), int)
        owner, features, rows, columns = np.arange(len(templates)), templates, none, none
        for level in reversed(range(len(self.members))):
            image, prior = self.net.layers[level].image, self.net.priors[level]
            drawn = self.members[level].drawn(images, owner, features, rows, columns, image)
            shift, first, told = kernel(values[level], prior, drawn.images, drawn.pixels, drawn.begins)
            yield drawn, shift, first, told
            owner = drawn.owner[first]
            features, rows, columns = landed(drawn.pixels[first], shift[first], image, self.net.side)

    def votes(self, pixels: np.ndarray, templates: np.ndarray) -> np.ndarray:
        """What each image says of the weights of its template: int32 (images, F, HS, WS), in units.

        Of a weight that is on: what the image would lose without it, where it alone draws its place. Of
        features that pay, and that the template does not draw, put down one by one: what each gains. Of all
        others: what it would cost to draw them, where nothing is to be gained any more.
        """
        values, net = self.values(pixels), self.net
        (top, shift, _, _), (low, shift_low, _, _), *_ = self._down(values, np.arange(len(pixels)), templates)
        said, prior, image = values[-1], net.priors[-1], net.layers[-1].image
        places = top.owner, *landed(top.pixels, shift, image, net.side)
        lies = np.zeros(said.shape, np.int32)
        np.add.at(lies, places, 1)
        lit, drawn = (np.zeros(values[-2].shape, np.int32) for _ in range(2))
        np.add.at(lit, (low.owner, *landed(low.pixels, shift_low, net.layers[-2].image, net.side)), 1)
        drawn[(low.owner, *np.unravel_index(low.pixels, net.layers[-2].image))] = 1
        of, centre = self.members[-2], prior[len(prior) // 2]
        price = np.maximum(-centre - to_grid(log_odds(net.layers[-1].p_weight)), 0)
        put = self.backend.kernel("hcn_put_down")
        gains = put(values[-2], net.priors[-2], of.at, of.begins, price, drawn, lit, lies > 0)
        left = np.where((lies > 0) | (gains > 0), 0, np.minimum(said, 0))
        out = np.where(gains > 0, gains + centre, net.raise_last(left, self.backend))
        where = top.owner, *np.unravel_index(top.pixels, image)
        chances = prior[(shift, *where[2:])]
        out[where] = chances + np.where(lies[places] == 1, said[places], 0)
        return out


def landed(
    pixels: np.ndarray, shift: np.ndarray, image: tuple[int, int, int], side: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Channel, row and column of the places that pixels are shifted to."""
    channel, y, x = np.unravel_index(pixels, image)
    ways = np.array(shifts(side**2))[shift]
    return channel, y + ways[:, 0], x + ways[:, 1]
