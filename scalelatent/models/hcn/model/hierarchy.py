"""Networks of several layers: what features make is shifted pixel by pixel, and places the features below.

From the top: one template of one class lies in an image (the class layer); its pixels, each shifted by a pool
of its own, are the places of the features of the layer below, and so on down to the image. A pass goes up
from the pixels (beliefs of W move then), and down again. What a layer makes, and the places of the layer
below, have one shape: (images, channels, height, width); places are kept as the trees have them, (images,
height, width, channels).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.kernels.streams import stream
from scalelatent.models.hcn.kernels.exact import ABSENT, CLASS_FLOOR, GRID, POOL_FLOOR
from scalelatent.models.hcn.kernels.order import shuffled
from scalelatent.models.hcn.kernels.windows import message_room, shifts

from .layer import FeatureLayer, convolve

# Rounds of messages between the pools and the ORs of a layer in each backward pass.
INNER_ROUNDS = 5


def shift_priors(image: tuple[int, ...], side: int, spread: float, seed: int, level: int = 0) -> np.ndarray:
    """Log priors of the shifts of a layer's pools, in units: int32 (side * side, height, width).

    No shift weighs 1, another 1 - spread u with u uniform: of even pools no message would say where to.
    Shifts that leave the image are ABSENT, and the others weigh more.
    """
    weights = 1 - spread * stream(seed, "hcn pools", level, 0).random(side * side)
    weights[side * side // 2] = 1
    rows, columns = np.indices(image)
    lands = np.array(
        [
            (rows + dy >= 0) & (rows + dy < image[0]) & (columns + dx >= 0) & (columns + dx < image[1])
            for dy, dx in shifts(side * side)
        ]
    )
    weights = weights[:, None, None] * lands
    with np.errstate(divide="ignore"):
        return np.where(lands, np.rint(np.log(weights / weights.sum(axis=0)) * GRID), ABSENT).astype(np.int32)


@dataclass(frozen=True)
class LayerMessages:
    """What is kept of some images in one layer; int32 and in units, where nothing else is said.

    Attributes
    ----------
    s : ndarray, shape (images, HS, WS, F)
        Beliefs of places: what comes from above and from the trees.
    above : ndarray, shape (images, HS, WS, F)
        What comes from above.
    to_s, to_w : ndarray, shape (images, channels, pairs and room)
        Messages of trees to places and weights.
    held : ndarray of uint8, shape (images, channels, height * width, h)
        Which lines of a pixel's window have a message to W that is not 0.
    evidence : ndarray, shape (images, channels, height, width)
        Messages of pools to trees.
    down : ndarray, shape (images, channels, shifts, height, width)
        Messages of pools to their shifts.
    """

    s: np.ndarray
    above: np.ndarray
    to_s: np.ndarray
    to_w: np.ndarray
    held: np.ndarray
    evidence: np.ndarray
    down: np.ndarray

    @property
    def from_below(self) -> np.ndarray:
        """What trees say of places: (images, F, HS, WS)."""
        return channels_first(self.s - self.above)

    def lower(self, above: np.ndarray) -> LayerMessages:
        """With other messages from above."""
        return replace(self, s=self.s + (above - self.above), above=above)


@dataclass(frozen=True)
class Hierarchy:
    """A network of layers of features and pools under a class layer.

    Attributes
    ----------
    layers : tuple of FeatureLayer
        From the image up. The last has the templates, which are as large as what it makes: one place.
    classes : tuple of int, or None
        Class of each template; None: templates are clusters.
    side : int
        Of a pool: 3 shifts by one pixel.
    spread : float
        How uneven pools are, see :func:`shift_priors`.
    damping : float
        Weight of a new message of a pool to what lies over it.
    seed : int
        Of pools, first beliefs and orders.
    """

    layers: tuple[FeatureLayer, ...]
    classes: tuple[int, ...] | None = None
    side: int = 3
    spread: float = 0.9
    damping: float = 0.2
    seed: int = 0

    @cached_property
    def priors(self) -> tuple[np.ndarray, ...]:
        """Log priors of the shifts of each layer's pools."""
        return tuple(
            shift_priors(layer.image[1:], self.side, self.spread, self.seed, level)
            for level, layer in enumerate(self.layers)
        )

    @property
    def rising_bytes(self) -> int:
        """Bytes of an image on its way up, and down again under fixed weights."""
        made = sum(layer.n_pixels + int(np.prod(layer.places)) for layer in self.layers)
        return 8 * made + 4 * self.side**2 * max(layer.n_pixels for layer in self.layers)

    @property
    def n_templates(self) -> int:
        """Templates of all classes."""
        return self.layers[-1].n_features

    @property
    def per_class(self) -> int:
        """Templates of a class, which all have as many; without classes all."""
        return self.n_templates if self.classes is None else self.classes.count(0)

    def of_class(self, code: int) -> np.ndarray:
        """Numbers of a class's templates."""
        assert self.classes is not None
        return np.flatnonzero(np.array(self.classes) == code)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([int(np.prod(layer.weights_shape)) for layer in self.layers])

    def split(self, flat: np.ndarray) -> list[np.ndarray]:
        """Weights of each layer, from one vector of all."""
        parts = np.split(flat, self._ends[:-1])
        return [part.reshape(layer.weights_shape) for part, layer in zip(parts, self.layers, strict=True)]

    def first_beliefs(self, restart: int = 0) -> np.ndarray:
        """Beliefs of all weights before anything is seen, in nats: one vector."""
        return np.concatenate(
            [
                layer.first_beliefs(self.seed, restart, level).ravel()
                for level, layer in enumerate(self.layers)
            ]
        )

    def start(self, n_rows: int, of_class: bool = False) -> list[LayerMessages]:
        """Messages of some images before their first pass; of the templates only those of an image's class,
        where ``of_class``.
        """
        layers = self.with_messages(of_class)
        floors = *(POOL_FLOOR for _ in layers[1:]), CLASS_FLOOR
        return [self._start(*one, n_rows) for one in zip(layers, floors, strict=True)]

    def with_messages(self, of_class: bool) -> tuple[FeatureLayer, ...]:
        """The layers as messages are of them: of the templates only those of a class, where ``of_class``."""
        *below, top = self.layers
        return *below, replace(top, n_features=self.per_class) if of_class else top

    def _start(self, layer: FeatureLayer, floor: int, n_rows: int) -> LayerMessages:
        (channels, *image), places = layer.image, (n_rows, *layer.places)
        room = message_room((image[0], image[1]), layer.window, layer.n_features)
        made = np.zeros((n_rows, channels, *image), np.int32)
        return LayerMessages(
            np.full(places, -floor, np.int32),
            np.full(places, -floor, np.int32),
            np.zeros((n_rows, channels, room), np.int32),
            np.zeros((n_rows, channels, room), np.int32),
            np.zeros((n_rows, channels, image[0] * image[1], layer.window[0]), np.uint8),
            made,
            self._silent(made),
        )

    def go_up(
        self,
        kept: list[LayerMessages],
        weights: list[np.ndarray],
        pixels: np.ndarray,
        labels: np.ndarray | None,
        orders: tuple[int, int],
        first: bool,
        backend: Backend,
        ranks: np.ndarray | None = None,
    ) -> None:
        """A forward pass of Algorithm 1; all messages and the beliefs of W are changed in place.

        Parameters
        ----------
        kept : list of LayerMessages
        weights : list of ndarray of int32, shape (channels, h, w, F)
            Beliefs of W, in units.
        pixels : ndarray of int32, shape (images, channels, height, width)
            Evidence.
        labels : ndarray of int, shape (images,), or None
            Class of each image; below 0 it is not known. In order where messages are of one class.
        orders : (int, int)
            Number of the first image and of the pass, which key the orders of trees.
        first : bool
            Whether nothing was passed before: then pools are not damped.
        ranks : ndarray of int, shape (images,), or None
            Where each image lies now, of images that were put in order of class: trees then come in the order
            of images that were not. None: each class has an order of its own.
        """
        (row, number), below, damping = orders, pixels, 1.0 if first else self.damping
        raise_pools, sweep = backend.kernel("hcn_raise_pools"), backend.kernel("hcn_sweep_messages")
        for level, (layer, whole, values) in enumerate(zip(self.layers, kept, weights, strict=True)):
            raise_pools(below, self.priors[level], whole.down, whole.evidence, damping)
            ranked, done = None, 0
            if ranks is not None:
                key = self.seed, f"hcn layer {level}", number, np.array([row])
                ranked = moved_rows(shuffled(*key, ranks.size * layer.n_pixels)[0], ranks, layer.n_pixels)
            for code, m, w in self._groups(level, whole, values, labels):
                trees = len(m.s) * layer.n_pixels
                if ranked is None:
                    name = f"hcn layer {level}" if code is None else f"hcn templates of {code}"
                    order = shuffled(self.seed, name, number, np.array([row]), trees)[0]
                else:
                    order = ranked[(ranked >= done) & (ranked < done + trees)] - np.int32(done)
                done += trees
                sweep(*(a[None] for a in (m.evidence, order, m.s, w, m.to_s, m.to_w, m.held)), 1.0)
                if code is not None:
                    values[..., self.of_class(code)] = w
            below = whole.from_below
        top = kept[-1]
        scores = (top.s - top.above).reshape(len(pixels), -1)
        told = self.class_messages(scores, None if self.is_narrow(top) else labels)
        kept[-1] = top.lower(told.reshape(top.s.shape))

    def is_narrow(self, top: LayerMessages) -> bool:
        """Whether messages are those of the templates of an image's class alone."""
        return top.s.shape[-1] < self.n_templates

    def _groups(
        self, level: int, m: LayerMessages, w: np.ndarray, labels: np.ndarray | None
    ) -> Iterator[tuple[int | None, LayerMessages, np.ndarray]]:
        """Images that have the same templates, and beliefs of W of these: (class, messages, beliefs)."""
        if level < len(self.layers) - 1 or not self.is_narrow(m):
            yield None, m, w
            return
        assert labels is not None
        cuts = [0, *(np.flatnonzero(np.diff(labels)) + 1), len(labels)]
        for a, b in itertools.pairwise(cuts):
            code, part = int(labels[a]), LayerMessages(*(value[a:b] for value in vars(m).values()))
            yield code, part, np.ascontiguousarray(w[..., self.of_class(code)])

    def go_down(
        self,
        kept: list[LayerMessages],
        weights: list[np.ndarray],
        pixels: np.ndarray,
        labels: np.ndarray | None,
        backend: Backend,
    ) -> None:
        """A backward pass: messages change, beliefs of W do not."""
        lower_trees, lower_pools = backend.kernel("hcn_lower_trees"), backend.kernel("hcn_lower_pools")
        for level in reversed(range(len(self.layers))):
            m = kept[level]
            groups = self._groups(level, m, weights[level], labels)
            made = np.concatenate([lower_trees(g.s, w, g.to_s, g.to_w) for _, g, w in groups])
            below = kept[level - 1].from_below if level else pixels
            told = lower_pools(below, self.priors[level], made, m.down, INNER_ROUNDS)
            if level:
                kept[level - 1] = kept[level - 1].lower(channels_last(told))

    def class_messages(self, scores: np.ndarray, labels: np.ndarray | None) -> np.ndarray:
        """Of the class layer to the templates: an image has one, of its class where that is known.

        Parameters
        ----------
        scores : ndarray of int32, shape (images, templates)
            What comes from below, in units.
        labels : ndarray of int, shape (images,), or None

        Returns
        -------
        ndarray of int32, shape (images, templates)
        """
        allowed = np.ones(scores.shape, bool)
        if labels is not None and self.classes is not None:
            allowed = (labels[:, None] < 0) | (np.array(self.classes) == labels[:, None])
        scores = np.where(allowed, np.clip(scores, -CLASS_FLOOR, CLASS_FLOOR), -CLASS_FLOOR)
        ranked = np.sort(scores, axis=1)
        first = ranked[:, -1:]
        second = ranked[:, -2:-1] if scores.shape[1] > 1 else np.full_like(first, -CLASS_FLOOR)
        others = np.where(scores == first, second, first)
        return np.where(allowed, -others, -CLASS_FLOOR).astype(np.int32)

    def template_scores(self, weights: list[np.ndarray], pixels: np.ndarray, backend: Backend) -> np.ndarray:
        """Return the scores of the templates by a forward pass, int32 (images, templates), in units."""
        return self.forward(weights, pixels, backend)[-1][1].reshape(len(pixels), -1)

    def forward(
        self, weights: list[np.ndarray], pixels: np.ndarray, backend: Backend
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each layer the evidence of what it makes, and what comes of it to its places."""
        found, below = [], pixels
        for layer, prior, w in zip(self.layers, self.priors, weights, strict=True):
            made = np.zeros_like(below)
            backend.kernel("hcn_raise_pools")(below, prior, self._silent(below), made, 1.0)
            below = channels_first(convolve(made, w, layer))
            found.append((made, below))
        return found

    def _silent(self, below: np.ndarray) -> np.ndarray:
        """Messages of pools before anything comes from above."""
        shape = *below.shape[:2], self.side**2, *below.shape[2:]
        return np.full(shape, -POOL_FLOOR, np.int32)

    def complete(
        self, weights: list[np.ndarray], pixels: np.ndarray, labels: np.ndarray | None, backend: Backend
    ) -> np.ndarray:
        """Beliefs of pixels by a forward and a top-down pass (section 3.3): int32, as ``pixels``.

        Parameters
        ----------
        weights : list of ndarray of bool, shape (channels, h, w, F)
        pixels : ndarray of int32, shape (images, channels, height, width)
            Evidence, 0 where a pixel is unknown.
        labels : ndarray of int, shape (images,), or None
            Class of each image, where it is known (at least 0).
        """
        found = self.forward(weights, pixels, backend)
        lower_features, lower_pools = backend.kernel("hcn_lower_features"), backend.kernel("hcn_lower_pools")
        scores = found[-1][1]
        told = self.class_messages(scores.reshape(len(pixels), -1), labels).reshape(scores.shape)
        for level in reversed(range(len(self.layers))):
            made, places = found[level]
            above = lower_features(places + told, weights[level], made)
            below = found[level - 1][1] if level else pixels
            told = lower_pools(below, self.priors[level], above, self._silent(below), INNER_ROUNDS)
        return told + pixels

    def draw(
        self, weights: list[np.ndarray], n_rows: int, labels: np.ndarray | None, seed: int
    ) -> np.ndarray:
        """Images of the model, without noise: bool (images, channels, height, width).

        Templates without a weight are left out; a class that has no other is an image of nothing.

        Parameters
        ----------
        weights : list of ndarray of bool, shape (channels, h, w, F)
        n_rows : int
        labels : ndarray of int, shape (n_rows,), or None
            Class of each image; below 0 it is drawn.
        seed : int
        """
        out = np.empty((n_rows, *self.layers[0].image), bool)
        classes = np.zeros(self.n_templates, int) if self.classes is None else np.array(self.classes)
        of_class = {code: np.flatnonzero(classes == code) for code in np.unique(classes).tolist()}
        on = np.asarray(np.any(weights[-1], axis=(0, 1, 2)))
        used = {code: some[on[some]] for code, some in of_class.items() if on[some].any()}
        codes = list(used or of_class)
        for row in range(n_rows):
            rng = stream(seed, "hcn draws", 0, row)
            label = -1 if labels is None else int(labels[row])
            label = codes[rng.integers(len(codes))] if label < 0 else label
            places = np.zeros((self.n_templates, 1, 1), bool)
            places[rng.choice(used.get(label, of_class[label]))] = True
            for w, prior in zip(reversed(weights), reversed(self.priors), strict=True):
                places = shifted(placed(places, w), prior, rng)
            out[row] = places
        return out


def placed(places: np.ndarray, w: np.ndarray) -> np.ndarray:
    """What features at places (F, HS, WS) make: bool (channels, height, width)."""
    (_, high, wide), (channels, h, width, _) = places.shape, w.shape
    out = np.zeros((channels, high + h - 1, wide + width - 1), bool)
    for f, r, c in np.argwhere(places):
        out[:, r : r + h, c : c + width] |= w[:, ::-1, ::-1, f]
    return out


def shifted(made: np.ndarray, prior: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Each pixel shifted by its pool, bool of the shape of ``made``."""
    out, ways = np.zeros_like(made), shifts(len(prior))
    for channel, y, x in np.argwhere(made):
        chances = np.where(prior[:, y, x] == ABSENT, 0, np.exp(prior[:, y, x] / GRID))
        dy, dx = ways[rng.choice(len(ways), p=chances / chances.sum())]
        out[channel, y + dy, x + dx] = True
    return out


def moved_rows(order: np.ndarray, ranks: np.ndarray, n_pixels: int) -> np.ndarray:
    """An order of the trees of some images, whose images have moved to their ranks: int32."""
    image, pixel = np.divmod(order, np.int32(n_pixels))
    return ranks.astype(np.int32)[image] * np.int32(n_pixels) + pixel


def channels_first(places: np.ndarray) -> np.ndarray:
    """(images, height, width, channels) as (images, channels, height, width)."""
    return np.ascontiguousarray(np.moveaxis(places, -1, 1))


def channels_last(made: np.ndarray) -> np.ndarray:
    """(images, channels, height, width) as (images, height, width, channels)."""
    return np.ascontiguousarray(np.moveaxis(made, 1, -1))


def learn(
    net: Hierarchy,
    kept: list[LayerMessages],
    beliefs: np.ndarray,
    pixels: np.ndarray,
    labels: np.ndarray | None,
    first_row: int,
    number: int,
    backend: Backend,
    *,
    key: int | None = None,
    ranks: np.ndarray | None = None,
) -> np.ndarray:
    """A visit of some images: down by the beliefs as they are, then up; how beliefs of W have changed.

    Parameters
    ----------
    kept : list of LayerMessages
        Changed in place.
    beliefs : ndarray of int32, shape (weights,)
        Of all layers, in units.
    number : int
        Of the visit: the first one goes up only.
    key : int or None
        What orders of trees are keyed by beside the first row; None: the number.
    ranks : ndarray of int, shape (images,), or None
        See :meth:`Hierarchy.go_up`.

    Returns
    -------
    ndarray of int32, shape (weights,)
    """
    new = beliefs.copy()
    weights = net.split(new)
    if number:
        net.go_down(kept, weights, pixels, labels, backend)
    orders = first_row, number if key is None else key
    net.go_up(kept, weights, pixels, labels, orders, number == 0, backend, ranks)
    return new - beliefs
