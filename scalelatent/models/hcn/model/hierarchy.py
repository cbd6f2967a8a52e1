"""Networks of several layers: features, pools that shift pixels, and a class layer on top.

The model is from section 2.3 of Lázaro-Gredilla et al., "Hierarchical compositional feature learning" (2016).

The generative model works from the top down. The class layer turns on one template, which is an array of
pixels with one channel per feature of the layer below. Each pixel that is on has a pool, which shifts the
pixel at random. The shifted pixel puts the feature of its channel at its position. The features are arrays of
pixels again, and so on down to the image. Learning alternates two passes of belief propagation (Algorithm 1
of the paper): a pass up from the pixels, which changes the log odds of the weights W, and a pass down from
the class layer.

Arrays of pixels have the shape (images, channels, height, width). Arrays of feature positions have the shape
(images, HS, WS, F): F features at HS x WS positions. The channels of the pixels of one layer are the features
of the layer below, so `channels_last` converts an array of pixels to an array of positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from scalelatent.contract.learners import Backend
from scalelatent.kernels.streams import stream
from scalelatent.models.hcn.kernels.pixel_order import shuffled
from scalelatent.models.hcn.kernels.units import CLASS_FLOOR, OFF_IMAGE, POOL_FLOOR, UNITS_PER_NAT
from scalelatent.models.hcn.kernels.windows import list_shifts, message_room

from .layer import FeatureLayer, convolve

# Pools shift pixels. In a pass down, the pools of a layer and the pixels into which they shift exchange
# messages once, and then this number of times again. One exchange is not enough, because a pixel is the OR of
# several pools, and each pool can shift into several pixels.
INNER_ROUNDS = 5


def shift_priors(image: tuple[int, ...], side: int, spread: float, seed: int, level: int = 0) -> np.ndarray:
    """Return the log prior of each shift of each pixel: int32 (side * side, height, width), in 1/256 nat.

    The shift by 0 pixels has weight 1. Each other shift has weight 1 - ``spread`` times a random number
    between 0 and 1, because belief propagation cannot choose between shifts of equal weights. The prior is
    the weight divided by the sum of the weights of all shifts that stay in the image. Shifts that leave the
    image have the log prior ``OFF_IMAGE``. Random numbers depend on ``seed`` and ``level``, the number of the
    layer.
    """
    weights = 1 - spread * stream(seed, "hcn pools", level, 0).random(side * side)
    weights[side * side // 2] = 1
    rows, columns = np.indices(image)
    is_inside = np.array(
        [
            (rows + dy >= 0) & (rows + dy < image[0]) & (columns + dx >= 0) & (columns + dx < image[1])
            for dy, dx in list_shifts(side * side)
        ]
    )
    weights = weights[:, None, None] * is_inside
    with np.errstate(divide="ignore"):
        priors = np.where(
            is_inside, np.rint(np.log(weights / weights.sum(axis=0)) * UNITS_PER_NAT), OFF_IMAGE
        )
    return priors.astype(np.int32)


@dataclass(frozen=True)
class LayerMessages:
    """Belief-propagation messages and log odds of one layer for some images: int32 in units of 1/256 nat.

    Attributes
    ----------
    s : ndarray, shape (images, HS, WS, F)
        Log odds of F features at HS x WS positions: ``above`` plus all messages of pixels to a position.
    above : ndarray, shape (images, HS, WS, F)
        Messages from the layer above to the positions.
    to_s, to_w : ndarray, shape (images, channels, messages)
        Messages of the pixels to positions and to weights W. The last `MESSAGE_ROOM` entries are unused.
    held : ndarray of uint8, shape (images, channels, height * width, h)
        Flags of the h rows of a feature whose weights can turn on a pixel: 1 for a row with a nonzero message
        of the pixel in ``to_w``, else 0.
    evidence : ndarray, shape (images, channels, height, width)
        Log odds of the pixels of this layer: messages of their pools, which lead up from the layer below.
    down : ndarray, shape (images, channels, shifts, height, width)
        Message of the pool of each pixel to the shifted pixel, for each shift.
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
        """Sum of messages of pixels to each position: (images, F, HS, WS), F features, HS x WS positions."""
        return channels_first(self.s - self.above)

    def with_above(self, above: np.ndarray) -> LayerMessages:
        """Return a copy with new belief-propagation messages ``above``, and with log odds ``s`` to match."""
        return replace(self, s=self.s + (above - self.above), above=above)


@dataclass(frozen=True)
class Hierarchy:
    """Network of several layers under a class layer; each pixel of each layer has a pool, which shifts it.

    Attributes
    ----------
    layers : tuple of FeatureLayer
        Layers from the image up. The features of the last layer are the templates. A template is as large as
        the array of positions below it, so it has only one position.
    classes : tuple of int, or None
        Class of each template; None if templates are clusters.
    side : int
        Side of a pool in pixels; a pool of side 3 shifts a pixel by at most one pixel.
    spread : float
        Largest difference between the prior weights of the shifts of a pool, before normalization.
    damping : float
        Weight of a new belief-propagation message of a pool in the average of the new and the old message.
    seed : int
        Seed of the priors of shifts, of the initial log odds, and of the orders in which pixels are updated.
    """

    layers: tuple[FeatureLayer, ...]
    classes: tuple[int, ...] | None = None
    side: int = 3
    spread: float = 0.9
    damping: float = 0.2
    seed: int = 0

    @cached_property
    def priors(self) -> tuple[np.ndarray, ...]:
        """Log priors of the shifts of pixels per layer, (shifts, height, width), in units of 1/256 nat."""
        return tuple(
            shift_priors(layer.image[1:], self.side, self.spread, self.seed, level)
            for level, layer in enumerate(self.layers)
        )

    @property
    def forward_bytes(self) -> int:
        """Bytes of memory that a pass up and a pass down with fixed weights need per image."""
        values = sum(layer.n_pixels + int(np.prod(layer.places)) for layer in self.layers)
        return 8 * values + 4 * self.side**2 * max(layer.n_pixels for layer in self.layers)

    @property
    def n_templates(self) -> int:
        """Number of templates of all classes; templates are the features of the last layer."""
        return self.layers[-1].n_features

    @property
    def per_class(self) -> int:
        """Number of templates (features of the last layer) of a class; without classes, of all templates."""
        return self.n_templates if self.classes is None else self.classes.count(0)

    def templates_of(self, code: int) -> np.ndarray:
        """Return the numbers of the templates (features of the last layer) of class ``code``."""
        assert self.classes is not None
        return np.flatnonzero(np.array(self.classes) == code)

    @property
    def n_weights(self) -> int:
        return sum(layer.n_weights for layer in self.layers)

    @property
    def pairs(self) -> int:
        """Number of pairs (feature position, weight) of one image, summed over all layers."""
        return sum(layer.pairs for layer in self.layers)

    def split(self, flat: np.ndarray) -> list[np.ndarray]:
        """Return each layer's part of ``flat``, a vector of the weights of all layers, as a shaped view."""
        parts = np.split(flat, np.cumsum([layer.n_weights for layer in self.layers[:-1]]))
        return [part.reshape(layer.weights_shape) for part, layer in zip(parts, self.layers, strict=True)]

    def first_beliefs(self, restart: int = 0) -> np.ndarray:
        """Return the initial log odds of the weights of all layers, in nats, as one vector."""
        layers = enumerate(self.layers)
        return np.concatenate([one.first_beliefs(self.seed, restart, level).ravel() for level, one in layers])

    def start(self, n_rows: int, own_class_only: bool = False) -> list[LayerMessages]:
        """Return the initial belief-propagation messages of ``n_rows`` images for each layer.

        If ``own_class_only``, an image has no messages for templates of other classes in the top layer.
        """
        *below, top = self.layers
        if own_class_only:
            top = replace(top, n_features=self.per_class)
        started = [self._start_layer(layer, POOL_FLOOR, n_rows) for layer in below]
        return [*started, self._start_layer(top, CLASS_FLOOR, n_rows)]

    def _start_layer(self, layer: FeatureLayer, floor: int, n_rows: int) -> LayerMessages:
        """Return first belief-propagation messages: -``floor`` from the layer above, 0 from the pixels."""
        (channels, *image), places = layer.image, (n_rows, *layer.places)
        room = message_room((image[0], image[1]), layer.window, layer.n_features)
        evidence = np.zeros((n_rows, channels, *image), np.int32)
        return LayerMessages(
            np.full(places, -floor, np.int32),
            np.full(places, -floor, np.int32),
            np.zeros((n_rows, channels, room), np.int32),
            np.zeros((n_rows, channels, room), np.int32),
            np.zeros((n_rows, channels, image[0] * image[1], layer.window[0]), np.uint8),
            evidence,
            self._start_pools(evidence),
        )

    def pass_up(
        self,
        messages: list[LayerMessages],
        weights: list[np.ndarray],
        pixels: np.ndarray,
        labels: np.ndarray | None,
        orders: tuple[int, int],
        first: bool,
        backend: Backend,
        ranks: np.ndarray | None = None,
    ) -> None:
        """Run the pass up of Algorithm 1 of Lázaro-Gredilla et al. (2016), from the pixels to the classes.

        The pass changes all messages and the log odds of weights in place.

        Parameters
        ----------
        messages : list of LayerMessages
            Belief-propagation messages of each layer for these images.
        weights : list of ndarray of int32, shape (channels, h, w, F)
            Log odds of the weights of F features (h x w pixels) of each layer, in units of 1/256 nat.
        pixels : ndarray of int32, shape (images, channels, height, width)
            Log odds of the pixels of the images, in units of 1/256 nat.
        labels : ndarray of int, shape (images,), or None
            Class of each image; below 0 if unknown. If the top layer has messages only for the templates of
            the class of each image, the images must be sorted by class.
        orders : (int, int)
            Row number of the first image, and number of the pass. The random order in which pixels are
            updated is a function of these two numbers and the seed.
        first : bool
            True in the first pass over these images, in which messages of pools are not damped.
        ranks : ndarray of int, shape (images,), or None
            If the images were sorted by class: for each image in the original order, its index in the sorted
            order. The random order of pixels is then drawn for the original order of the images. Without
            ``ranks``, a top layer with messages for one class per image has a random order for each class.
        """
        (row, number), below, damping = orders, pixels, 1.0 if first else self.damping
        pass_pools_up, sweep = backend.kernel("hcn_pass_pools_up"), backend.kernel("hcn_sweep_messages")
        for level, (layer, whole, values) in enumerate(zip(self.layers, messages, weights, strict=True)):
            pass_pools_up(below, self.priors[level], whole.down, whole.evidence, damping)
            ranked, done = None, 0
            if ranks is not None:
                key = self.seed, f"hcn layer {level}", number, np.array([row])
                order = shuffled(*key, ranks.size * layer.n_pixels)[0]
                ranked = reorder_images(order, ranks, layer.n_pixels)
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
                    values[..., self.templates_of(code)] = w
            below = whole.from_below
        top = messages[-1]
        scores = (top.s - top.above).reshape(len(pixels), -1)
        above = self.class_messages(scores, None if self.is_own_class_only(top) else labels)
        messages[-1] = top.with_above(above.reshape(top.s.shape))

    def is_own_class_only(self, top: LayerMessages) -> bool:
        """Return True if the messages ``top`` of the top layer are for templates of an image's class only."""
        return top.s.shape[-1] < self.n_templates

    def _groups(
        self, level: int, m: LayerMessages, w: np.ndarray, labels: np.ndarray | None
    ) -> Iterator[tuple[int | None, LayerMessages, np.ndarray]]:
        """Yield (class, messages, log odds of weights) of one layer for each group of images.

        In the top layer, the images of a class are a group if images have messages only for the templates
        (features of this layer) of their class. Otherwise all images are one group, and the class is None.
        """
        if level < len(self.layers) - 1 or not self.is_own_class_only(m):
            yield None, m, w
            return
        assert labels is not None
        cuts = [0, *(np.flatnonzero(np.diff(labels)) + 1), len(labels)]
        for a, b in itertools.pairwise(cuts):
            code, part = int(labels[a]), LayerMessages(*(value[a:b] for value in vars(m).values()))
            yield code, part, np.ascontiguousarray(w[..., self.templates_of(code)])

    def pass_down(
        self,
        messages: list[LayerMessages],
        weights: list[np.ndarray],
        pixels: np.ndarray,
        labels: np.ndarray | None,
        backend: Backend,
    ) -> None:
        """Run the pass down of Algorithm 1 of Lázaro-Gredilla et al. (2016): from the classes to the pixels.

        The pass changes the belief-propagation messages in place, but not the log odds of weights.
        :meth:`pass_up` describes the parameters.
        """
        pass_trees_down = backend.kernel("hcn_pass_trees_down")
        pass_pools_down = backend.kernel("hcn_pass_pools_down")
        for level in reversed(range(len(self.layers))):
            m = messages[level]
            groups = self._groups(level, m, weights[level], labels)
            above = np.concatenate([pass_trees_down(g.s, w, g.to_s, g.to_w) for _, g, w in groups])
            below = messages[level - 1].from_below if level else pixels
            to_places = pass_pools_down(below, self.priors[level], above, m.down, INNER_ROUNDS)
            if level:
                messages[level - 1] = messages[level - 1].with_above(channels_last(to_places))

    def class_messages(self, scores: np.ndarray, labels: np.ndarray | None) -> np.ndarray:
        """Return belief-propagation messages of the class layer to the templates, int32 (images, templates).

        An image has exactly one template (feature of the top layer), and a labelled image has a template of
        its class. ``scores`` are the messages of the templates to the class layer; all messages are in units
        of 1/256 nat. ``labels`` are the classes of the images, below 0 if unknown. A template that the label
        allows gets minus the largest score of the other allowed templates, and all other templates get
        -``CLASS_FLOOR``.
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
        """Return the score of each template (top feature) in 1/256 nat, int32 (images, templates)."""
        return self.forward(weights, pixels, backend)[-1][1].reshape(len(pixels), -1)

    def forward(
        self, weights: list[np.ndarray], pixels: np.ndarray, backend: Backend
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Run a pass up with fixed weights, which is the forward pass of a convolutional network.

        See section 3.4 of Lázaro-Gredilla et al. (2016).

        Parameters
        ----------
        weights : list of ndarray of bool, shape (channels, h, w, F)
            Weights of the F features of each layer, which have h x w pixels.
        pixels : ndarray of int32, shape (images, channels, height, width)
            Log odds of the pixels of the images, in units of 1/256 nat.

        Returns
        -------
        list of (ndarray, ndarray)
            For each layer the messages of the pools to its pixels, (images, channels, height, width), and the
            messages of these pixels to the HS x WS positions of its F features, (images, F, HS, WS). The
            messages to the templates, which are the features of the last layer, are the template scores.
        """
        found, below = [], pixels
        for layer, prior, w in zip(self.layers, self.priors, weights, strict=True):
            evidence = np.zeros_like(below)
            backend.kernel("hcn_pass_pools_up")(below, prior, self._start_pools(below), evidence, 1.0)
            below = channels_first(convolve(evidence, w, layer))
            found.append((evidence, below))
        return found

    def _start_pools(self, below: np.ndarray) -> np.ndarray:
        """Return first messages of pools to pixels into which they can shift: the bound -``POOL_FLOOR``."""
        shape = *below.shape[:2], self.side**2, *below.shape[2:]
        return np.full(shape, -POOL_FLOOR, np.int32)

    def complete(
        self, weights: list[np.ndarray], pixels: np.ndarray, labels: np.ndarray | None, backend: Backend
    ) -> np.ndarray:
        """Return the log odds of pixels after a pass up and a pass down, int32 in the shape of ``pixels``.

        The passes are those of section 3.3 of Lázaro-Gredilla et al. (2016).

        Parameters
        ----------
        weights : list of ndarray of bool, shape (channels, h, w, F)
            Weights of the F features of each layer, which have h x w pixels.
        pixels : ndarray of int32, shape (images, channels, height, width)
            Log odds of the pixels in units of 1/256 nat; 0 for an unknown pixel.
        labels : ndarray of int, shape (images,), or None
            Class of each image; below 0 if unknown. If None, all classes are unknown.
        """
        found = self.forward(weights, pixels, backend)
        pass_features_down = backend.kernel("hcn_pass_features_down")
        pass_pools_down = backend.kernel("hcn_pass_pools_down")
        scores = found[-1][1]
        down = self.class_messages(scores.reshape(len(pixels), -1), labels).reshape(scores.shape)
        for level in reversed(range(len(self.layers))):
            evidence, places = found[level]
            above = pass_features_down(places + down, weights[level], evidence)
            below = found[level - 1][1] if level else pixels
            down = pass_pools_down(below, self.priors[level], above, self._start_pools(below), INNER_ROUNDS)
        return down + pixels

    def draw(
        self, weights: list[np.ndarray], n_rows: int, labels: np.ndarray | None, seed: int
    ) -> np.ndarray:
        """Draw random images from the model, without noise: bool (images, channels, height, width).

        A template (feature of the top layer) whose weights are all off is drawn only if all weights of the
        templates of its class are off; the image is then empty.

        Parameters
        ----------
        weights : list of ndarray of bool, shape (channels, h, w, F)
            Weights of the F features of each layer, which have h x w pixels.
        n_rows : int
            Number of images.
        labels : ndarray of int, shape (n_rows,), or None
            Class of each image; below 0 for a random class, whose templates have a weight that is on if any
            template has one. If None, all classes are random.
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
                places = shift_pixels_randomly(place_features(places, w), prior, rng)
            out[row] = places
        return out


def place_features(places: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the pixels that features turn on, bool (channels, height, width).

    ``places`` is bool (F, HS, WS), True where one of F features is at one of HS x WS positions. ``w`` are the
    weights of these features of h x w pixels, bool (channels, h, w, F); the axes h and w are reversed.
    """
    (_, high, wide), (channels, h, width, _) = places.shape, w.shape
    out = np.zeros((channels, high + h - 1, wide + width - 1), bool)
    for f, r, c in np.argwhere(places):
        out[:, r : r + h, c : c + width] |= w[:, ::-1, ::-1, f]
    return out


def shift_pixels_randomly(pixels: np.ndarray, prior: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return ``pixels``, bool (channels, height, width), after each pixel that is on moved by a random shift.

    ``prior`` has the log prior of each shift of each pixel, (shifts, height, width), in units of 1/256 nat.
    """
    out, ways = np.zeros_like(pixels), list_shifts(len(prior))
    for channel, y, x in np.argwhere(pixels):
        chances = np.where(prior[:, y, x] == OFF_IMAGE, 0, np.exp(prior[:, y, x] / UNITS_PER_NAT))
        dy, dx = ways[rng.choice(len(ways), p=chances / chances.sum())]
        out[channel, y + dy, x + dx] = True
    return out


def reorder_images(order: np.ndarray, ranks: np.ndarray, n_pixels: int) -> np.ndarray:
    """Return ``order``, indices of pixels of all images, after image i has moved to index ``ranks[i]``."""
    image, pixel = np.divmod(order, np.int32(n_pixels))
    return ranks.astype(np.int32)[image] * np.int32(n_pixels) + pixel


def channels_first(places: np.ndarray) -> np.ndarray:
    """Move the last axis of (images, height, width, channels) to (images, channels, height, width)."""
    return np.ascontiguousarray(np.moveaxis(places, -1, 1))


def channels_last(pixels: np.ndarray) -> np.ndarray:
    """Move the second axis of (images, channels, height, width) to (images, height, width, channels)."""
    return np.ascontiguousarray(np.moveaxis(pixels, 1, -1))


def update_images(
    net: Hierarchy,
    messages: list[LayerMessages],
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
    """Update belief-propagation messages by a pass down and a pass up; return the change of the log odds.

    Parameters
    ----------
    messages : list of LayerMessages
        Belief-propagation messages of each layer, changed in place.
    beliefs : ndarray of int32, shape (weights,)
        Log odds of the weights of all layers, in units of 1/256 nat.
    pixels, labels, ranks
        Log odds of pixels, classes, and indices after sorting by class: see :meth:`Hierarchy.pass_up`.
    first_row : int
        Row number of the first image.
    number : int
        Number of earlier passes down and up over these images. For 0 there is no pass down.
    key : int or None
        Number of the pass in the whole fit, of which the random orders of pixels are a function, in addition
        to ``first_row``. The default is ``number``.

    Returns
    -------
    ndarray of int32, shape (weights,)
        Change of the log odds of the weights, in units of 1/256 nat.
    """
    new = beliefs.copy()
    weights = net.split(new)
    if number:
        net.pass_down(messages, weights, pixels, labels, backend)
    orders = first_row, number if key is None else key
    net.pass_up(messages, weights, pixels, labels, orders, number == 0, backend, ranks)
    return new - beliefs
