"""Classes of templates: who belongs to which, what is counted of labelled rows, and templates from images.

Templates from images: where it is certain which template an image has, the message of its trees to a weight
of that template is the evidence of the pixel under it. So each template begins as what one image of its class
says on the way up, under features that stay as they are; then, pass by pass, images come to their best
template, and a weight's belief is its prior and the evidence of the images that came.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Wants
from scalelatent.models.hcn.kernels.exact import BELIEF_LIMIT, GRID

from .compression import PixelCounts
from .hierarchy import Hierarchy
from .layer import rows_of

if TYPE_CHECKING:
    from .layered import LayeredState

# Of what rows have on the way up that is held at once.
BLOCK_BYTES = 2**25
# Rows whose label is -1 have no class.
SOME_LABELS = Wants(unlabelled=True)

# Below every score: templates that an image may not come to.
NO_SCORE = np.int32(-(2**31))

FixedWeights: TypeAlias = tuple[list[np.ndarray], Backend]
"""Weights of each layer, bool (channels, h, w, F), and the backend of the kernels."""


def on_the_way(net: Hierarchy) -> Wants:
    """Return the requests of reductions that run forward passes."""
    row = net.rising_bytes
    rows = int(np.clip(BLOCK_BYTES // row, 1, 64))
    return Wants(block_rows=rows, scratch=(0, 3 * row), unlabelled=True)


def class_layer(n_classes: int, per_class: int) -> tuple[int, ...]:
    """Class of each template: the templates of a class lie side by side."""
    return tuple(code for code in range(n_classes) for _ in range(per_class))


def assigned(counts: np.ndarray, per_class: int) -> tuple[int, ...]:
    """Class of each template, so many of each class, by the rows (classes, templates) that came to them.

    The largest number decides first; templates without rows take what is left.
    """
    classes, room = np.full(counts.shape[1], -1), np.full(len(counts), per_class)
    for at in np.argsort(-counts, axis=None, kind="stable"):
        code, template = divmod(int(at), counts.shape[1])
        if classes[template] < 0 and room[code]:
            classes[template] = code
            room[code] -= 1
    return tuple(classes.tolist())


@dataclass(frozen=True)
class LabelledPixels:
    """Counts of pixels, and rows of each class (a :class:`~scalelatent.contract.learners.Reduction`)."""

    pixels: PixelCounts
    n_classes: int
    wants: Wants = SOME_LABELS

    def layout(self) -> Layout:
        return Layout((*self.pixels.layout().fields, ("labelled", (self.n_classes,)), ("rows", ())))

    def flops_per_row(self) -> float:
        return self.pixels.flops_per_row()

    def prepare(self, state: object, backend: Backend) -> None:
        return None

    def accumulate(self, prepared: None, block: Block, stats: Stats) -> None:
        self.pixels.accumulate(prepared, block, stats)
        stats["rows"][...] += len(rows_of(block))
        if block.y is not None:
            stats["labelled"][...] += np.bincount(block.y[block.y >= 0], minlength=self.n_classes)


@dataclass(frozen=True)
class TemplateCounts:
    """Rows of each class that come to each template (a :class:`~scalelatent.contract.learners.Reduction`).

    The state is that of a learner, or None: then beliefs are given. Rows of no known class are left out.
    """

    net: Hierarchy
    n_classes: int
    beliefs: np.ndarray | None = None

    @property
    def wants(self) -> Wants:
        return on_the_way(self.net)

    def layout(self) -> Layout:
        return Layout((("templates", (self.n_classes, self.net.n_templates)),))

    def flops_per_row(self) -> float:
        return 2.0 * sum(layer.pairs for layer in self.net.layers)

    def prepare(self, state: LayeredState | None, backend: Backend) -> FixedWeights:
        """Return the weights of the state, or of the given beliefs, and the backend."""
        beliefs = self.beliefs if state is None else state.beliefs
        assert beliefs is not None
        return [part > 0 for part in self.net.split(beliefs)], backend

    def accumulate(self, prepared: FixedWeights, block: Block, stats: Stats) -> None:
        """Count the block's rows by class and best template."""
        weights, backend = prepared
        scores = self.net.template_scores(weights, self.net.layers[0].evidence_in(block), backend)
        assert block.y is not None
        known = block.y >= 0
        np.add.at(stats["templates"], (block.y[known], scores[known].argmax(axis=1)), 1)

    def error(self, stats: Stats) -> float:
        """Share of rows in a wrong class; a cluster is of the class that most of its rows have."""
        counts, classes = stats["templates"], self.net.classes
        right = counts.max(axis=0) if classes is None else counts[classes, range(len(classes))]
        return 1 - float(right.sum() / counts.sum()) if counts.any() else float("nan")


@dataclass(frozen=True, eq=False)
class RowCodes:
    """Classes of some rows, and 1 (a :class:`~scalelatent.contract.learners.Reduction`): 0 is no class.

    ``numbers`` rise.
    """

    numbers: np.ndarray
    wants: Wants = SOME_LABELS

    def layout(self) -> Layout:
        return Layout((("codes", (len(self.numbers),)),))

    def flops_per_row(self) -> float:
        return 1.0

    def prepare(self, state: object, backend: Backend) -> None:
        return None

    def accumulate(self, prepared: None, block: Block, stats: Stats) -> None:
        """Of those in the block."""
        where, among = found(self.numbers, rows_of(block))
        assert block.y is not None
        stats["codes"][where] += np.maximum(block.y[among] + 1, 0)


@dataclass(frozen=True, eq=False)
class TemplateEvidence:
    """Evidence on templates of the images that come to them (a
    :class:`~scalelatent.contract.learners.Reduction`): sums of whole units, the same in any order.

    Attributes
    ----------
    net : Hierarchy
    beliefs : ndarray of float64, shape (weights,)
        Of all layers.
    numbers, templates : ndarray of int, shape (images,), or None
        Rows, which rise, and the template that each comes to: others come to none. None: each comes to the
        best template that has a weight, of its class where that is known.
    """

    net: Hierarchy
    beliefs: np.ndarray
    numbers: np.ndarray | None = None
    templates: np.ndarray | None = None

    @property
    def wants(self) -> Wants:
        return on_the_way(self.net)

    def layout(self) -> Layout:
        return Layout((("evidence", (self.net.n_templates, *self.net.layers[-1].image)),))

    def flops_per_row(self) -> float:
        return 2.0 * sum(layer.pairs for layer in self.net.layers)

    def prepare(self, state: object, backend: Backend) -> FixedWeights:
        """Return the weights and the backend."""
        return [part > 0 for part in self.net.split(self.beliefs)], backend

    def accumulate(self, prepared: FixedWeights, block: Block, stats: Stats) -> None:
        """Add the evidence of the block's rows to that of their templates."""
        pixels, (weights, backend) = self.net.layers[0].evidence_in(block), prepared
        templates: np.ndarray | None = None
        if self.numbers is None or self.templates is None:
            among, allowed = self._allowed(block, len(pixels))
        else:
            where, among = found(self.numbers, rows_of(block))
            templates = self.templates[where]
        if not len(among):
            return
        made, scores = self.net.forward(weights, pixels[among], backend)[-1]
        if templates is None:
            templates = np.where(allowed, scores.reshape(len(among), -1), NO_SCORE).argmax(axis=1)
        for said, template in zip(made, templates, strict=True):
            stats["evidence"][template] += said / GRID

    def _allowed(self, block: Block, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows that may come to a template, and which templates each of them may come to."""
        used = np.any(self.net.split(self.beliefs)[-1] > 0, axis=(0, 1, 2))
        allowed = np.broadcast_to(used, (n_rows, self.net.n_templates))
        if block.y is not None and self.net.classes is not None:
            of_class = np.array(self.net.classes) == block.y[:, None]
            allowed = allowed & (of_class | (block.y < 0)[:, None])
        among = np.flatnonzero(allowed.any(axis=1))
        return among, allowed[among]

    def learned(self, first: np.ndarray, stats: Stats) -> np.ndarray:
        """Beliefs of all layers: those of the templates are their first ones and the evidence."""
        priors = self.net.split(first)[-1]
        said = np.moveaxis(stats["evidence"], 0, -1)[:, ::-1, ::-1]
        most = BELIEF_LIMIT // (2 * GRID)
        kept = self.beliefs[: -priors.size]
        return np.concatenate([kept, np.clip(priors + said, -most, most).ravel()])


def found(numbers: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions in ``numbers``, which rise, and in ``rows`` of those that are in both."""
    if not len(numbers):
        return np.empty(0, int), np.empty(0, int)
    where = np.minimum(np.searchsorted(numbers, rows), len(numbers) - 1)
    among = np.flatnonzero(numbers[where] == rows)
    return where[among], among


def first_images(net: Hierarchy, numbers: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows that templates begin with, in rising order, and the template of each.

    Parameters
    ----------
    numbers, codes : ndarray of int, shape (rows,)
        In the order in which they are taken, and their classes; below 0 none.
    """
    if net.classes is None:
        taken, templates = numbers[: net.n_templates], np.arange(min(net.n_templates, len(numbers)))
    else:
        rows, of = list[np.ndarray](), list[np.ndarray]()
        for code in range(max(net.classes) + 1):
            own = net.of_class(code)
            rows.append(numbers[codes == code][: len(own)])
            of.append(own[: len(rows[-1])])
        taken, templates = np.concatenate(rows), np.concatenate(of)
    order = np.argsort(taken)
    return taken[order], templates[order]
