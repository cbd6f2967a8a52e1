"""Classes of templates, counts of labelled rows, and learning of templates from images at the end of a fit.

Learning from images changes only the templates (the features of the top layer). If the template of an image
is certain, the message of the image to a weight of this template is the log odds of the pixel under the
weight. Here a pixel is a feature position of the layer below. The steps are:

1. Each template starts as the log odds of one image of its class after a forward pass. The features below
   stay fixed.
2. In each pass, every image is assigned to its best template, among those of its class if it has a label.
3. The log odds of a weight become its prior plus the log odds of the pixel in all images of the template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.models.hcn.kernels.units import BELIEF_LIMIT, UNITS_PER_NAT

from .compression import PixelCounts
from .hierarchy import Hierarchy
from .layer import row_numbers

if TYPE_CHECKING:
    from .multi_layer_learning import LayeredState

# A forward pass over one block of rows needs at most this much memory, in bytes.
BLOCK_BYTES = 2**25
# Requirement of reductions: the engine also passes rows without a class, with label -1.
SOME_LABELS = BlockRequirements(unlabelled=True)
# Score that replaces the score of a template to which an image must not be assigned; it is below all scores.
NO_SCORE = np.int32(-(2**31))

FixedWeights: TypeAlias = tuple[list[np.ndarray], Backend]
"""Weights of each layer, bool (channels, h, w, F), and the backend of the kernels."""


def class_layer(n_classes: int, per_class: int) -> tuple[int, ...]:
    """Return the class of each template; the templates of a class are contiguous."""
    return tuple(code for code in range(n_classes) for _ in range(per_class))


def assign_classes(counts: np.ndarray, per_class: int) -> tuple[int, ...]:
    """Return the class of each template.

    Entry (class, template) of ``counts`` is the number of rows of the class whose best template this is. A
    template gets the class with the largest count that has fewer than ``per_class`` templates; the largest
    counts of all templates are assigned first.
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
    """Counts of pixels, rows, and rows by class (a :class:`~scalelatent.contract.learners.Reduction`)."""

    pixels: PixelCounts
    n_classes: int
    requirements: ClassVar[BlockRequirements] = SOME_LABELS

    def layout(self) -> Layout:
        return Layout((*self.pixels.layout().fields, ("labelled", (self.n_classes,)), ("rows", ())))

    def flops_per_row(self) -> float:
        return self.pixels.flops_per_row()

    def prepare(self, state: object, backend: Backend) -> None:
        return None

    def accumulate(self, prepared: None, block: Block, stats: Stats) -> None:
        self.pixels.accumulate(prepared, block, stats)
        stats["rows"][...] += len(row_numbers(block))
        if block.y is not None:
            stats["labelled"][...] += np.bincount(block.y[block.y >= 0], minlength=self.n_classes)


@dataclass(frozen=True)
class ForwardReduction:
    """Base class of the reductions that run a forward pass over each block of rows."""

    net: Hierarchy

    @property
    def requirements(self) -> BlockRequirements:
        row = self.net.forward_bytes
        rows = int(np.clip(BLOCK_BYTES // row, 1, 64))
        return BlockRequirements(block_rows=rows, scratch=(0, 3 * row), unlabelled=True)

    def flops_per_row(self) -> float:
        return 2.0 * sum(layer.pairs for layer in self.net.layers)


@dataclass(frozen=True)
class TemplateCounts(ForwardReduction):
    """Counts of rows by class and best template (a :class:`~scalelatent.contract.learners.Reduction`).

    Rows without a class are not counted. The weights are those of the learner's state; if the state is None,
    those of ``beliefs``.
    """

    n_classes: int
    beliefs: np.ndarray | None = None

    def layout(self) -> Layout:
        return Layout((("templates", (self.n_classes, self.net.n_templates)),))

    def prepare(self, state: LayeredState | None, backend: Backend) -> FixedWeights:
        beliefs = self.beliefs if state is None else state.beliefs
        assert beliefs is not None
        return [part > 0 for part in self.net.split(beliefs)], backend

    def accumulate(self, prepared: FixedWeights, block: Block, stats: Stats) -> None:
        weights, backend = prepared
        scores = self.net.template_scores(weights, self.net.layers[0].read_evidence(block), backend)
        assert block.y is not None
        known = block.y >= 0
        np.add.at(stats["templates"], (block.y[known], scores[known].argmax(axis=1)), 1)

    def error(self, stats: Stats) -> float:
        """Return the share of rows in a wrong class; the class of a cluster is that of most of its rows."""
        counts, classes = stats["templates"], self.net.classes
        right = counts.max(axis=0) if classes is None else counts[classes, range(len(classes))]
        return 1 - float(right.sum() / counts.sum()) if counts.any() else float("nan")


@dataclass(frozen=True, eq=False)
class RowCodes:
    """Collection of class codes of some rows (a :class:`~scalelatent.contract.learners.Reduction`).

    ``numbers`` are the sorted indices of these rows. The statistic holds the class code plus 1 of each row,
    and 0 for a row without a class.
    """

    numbers: np.ndarray
    requirements: ClassVar[BlockRequirements] = SOME_LABELS

    def layout(self) -> Layout:
        return Layout((("codes", (len(self.numbers),)),))

    def flops_per_row(self) -> float:
        return 1.0

    def prepare(self, state: object, backend: Backend) -> None:
        return None

    def accumulate(self, prepared: None, block: Block, stats: Stats) -> None:
        where, among = match_rows(self.numbers, row_numbers(block))
        assert block.y is not None
        stats["codes"][where] += np.maximum(block.y[among] + 1, 0)


@dataclass(frozen=True, eq=False)
class TemplateEvidence(ForwardReduction):
    """Sum of the log odds at the top layer of the images that are assigned to each template (a Reduction).

    The sums are multiples of 1/256 nat, so they are identical in any order of the rows.

    Attributes
    ----------
    beliefs : ndarray of float64, shape (weights,)
        Log odds of the weights of all layers.
    numbers, templates : ndarray of int, shape (images,), or None
        Sorted row numbers, and the template that each of these rows is assigned to; other rows are not used.
        None: each row is assigned to the best template that has a weight, among those of its class if its
        class is known.
    """

    beliefs: np.ndarray
    numbers: np.ndarray | None = None
    templates: np.ndarray | None = None

    def layout(self) -> Layout:
        return Layout((("evidence", (self.net.n_templates, *self.net.layers[-1].image)),))

    def prepare(self, state: object, backend: Backend) -> FixedWeights:
        return [part > 0 for part in self.net.split(self.beliefs)], backend

    def accumulate(self, prepared: FixedWeights, block: Block, stats: Stats) -> None:
        """Add the log odds of the block's images to the sums of their templates."""
        pixels, (weights, backend) = self.net.layers[0].read_evidence(block), prepared
        templates: np.ndarray | None = None
        if self.numbers is None or self.templates is None:
            among, allowed = self._find_allowed(block, len(pixels))
        else:
            where, among = match_rows(self.numbers, row_numbers(block))
            templates = self.templates[where]
        if not len(among):
            return
        evidence, scores = self.net.forward(weights, pixels[among], backend)[-1]
        if templates is None:
            templates = np.where(allowed, scores.reshape(len(among), -1), NO_SCORE).argmax(axis=1)
        for one, template in zip(evidence, templates, strict=True):
            stats["evidence"][template] += one / UNITS_PER_NAT

    def _find_allowed(self, block: Block, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which templates each row may be assigned to.

        A template is allowed if it is in use (has a weight) and, for a labelled row, belongs to the row's
        class.

        Returns
        -------
        among : ndarray of int, shape (found,)
            Indices of the rows of the block with at least one allowed template.
        allowed : ndarray of bool, shape (found, templates)
            True for the allowed templates of these rows.
        """
        used = np.any(self.net.split(self.beliefs)[-1] > 0, axis=(0, 1, 2))
        allowed = np.broadcast_to(used, (n_rows, self.net.n_templates))
        if block.y is not None and self.net.classes is not None:
            of_class = np.array(self.net.classes) == block.y[:, None]
            allowed = allowed & (of_class | (block.y < 0)[:, None])
        among = np.flatnonzero(allowed.any(axis=1))
        return among, allowed[among]

    def update_beliefs(self, first: np.ndarray, stats: Stats) -> np.ndarray:
        """Return the log odds of all weights in nats, with new log odds of the templates.

        The log odds of a template are its initial ones, from ``first``, plus the evidence in ``stats``. A
        template that would lose all weights keeps its earlier log odds.
        """
        priors, earlier = self.net.split(first)[-1], self.net.split(self.beliefs)[-1]
        evidence = np.moveaxis(stats["evidence"], 0, -1)[:, ::-1, ::-1]
        most = BELIEF_LIMIT // (2 * UNITS_PER_NAT)
        found = np.clip(priors + evidence, -most, most)
        found = np.where(np.any(found > 0, axis=(0, 1, 2)), found, earlier)
        return np.concatenate([self.beliefs[: -priors.size], found.ravel()])


def match_rows(numbers: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the common values in the sorted ``numbers`` and in ``rows``, as two arrays."""
    if not len(numbers):
        return np.empty(0, int), np.empty(0, int)
    where = np.minimum(np.searchsorted(numbers, rows), len(numbers) - 1)
    among = np.flatnonzero(numbers[where] == rows)
    return where[among], among


def choose_first_images(
    net: Hierarchy, numbers: np.ndarray, codes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted row numbers of the images as which templates start, and the template of each image.

    Parameters
    ----------
    numbers, codes : ndarray of int, shape (rows,)
        Row numbers and their classes, below 0 for no class; the first rows of each class are chosen.
    """
    if net.classes is None:
        chosen, templates = numbers[: net.n_templates], np.arange(min(net.n_templates, len(numbers)))
    else:
        rows, of = list[np.ndarray](), list[np.ndarray]()
        for code in range(max(net.classes) + 1):
            own = net.templates_of(code)
            rows.append(numbers[codes == code][: len(own)])
            of.append(own[: len(rows[-1])])
        chosen, templates = np.concatenate(rows), np.concatenate(of)
    order = np.argsort(chosen)
    return chosen[order], templates[order]
