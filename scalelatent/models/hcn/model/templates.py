"""Classes of templates, counts of rows by template, and learning of templates from images after a fit.

The last passes of a fit learn the templates (the features of the top layer) again, and leave all other
features as they are. A forward pass converts each image to an array of log odds: one for each pixel of the
top layer, which is a feature at a position of the layer below. The steps are:

1. Each template starts from one image, of its class if there are classes, as if only this image had been
   assigned to it.
2. In each pass, every image is assigned to its best template, among the templates of its class if it has a
   label.
3. The log odds of a weight of a template become the prior log odds plus the sum, over the images that were
   assigned to the template, of the log odds of the pixel under the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.models.hcn.kernels.units import BELIEF_LIMIT, UNITS_PER_NAT

from .hierarchy import Hierarchy
from .layer import row_numbers

if TYPE_CHECKING:
    from .multi_layer_learning import LayeredState

# Upper bound of the memory, in bytes, of a forward pass (from pixels to templates) over a block of rows.
BLOCK_BYTES = 2**25
# Score of a template (top feature) to which an image must not be assigned; all other scores are larger.
NO_SCORE = np.int32(-(2**31))

FixedWeights: TypeAlias = tuple[list[np.ndarray], Backend]
"""Weights of each layer, bool (channels, h, w, F), and the backend of the kernels."""


def list_template_classes(n_classes: int, per_class: int) -> tuple[int, ...]:
    """Return the class of each template (top feature); templates of a class have consecutive numbers."""
    return tuple(code for code in range(n_classes) for _ in range(per_class))


def assign_classes(counts: np.ndarray, per_class: int) -> tuple[int, ...]:
    """Return the class of each template, so that each class has at most ``per_class`` templates.

    ``counts`` (classes, templates) has the number of rows of each class whose best template (top feature) is
    this one. Going from the largest number to the smallest, a number assigns its class to its template if the
    template has no class yet and the class has room for one more template.
    """
    classes, room = np.full(counts.shape[1], -1), np.full(len(counts), per_class)
    for at in np.argsort(-counts, axis=None, kind="stable"):
        code, template = divmod(int(at), counts.shape[1])
        if classes[template] < 0 and room[code]:
            classes[template] = code
            room[code] -= 1
    return tuple(classes.tolist())


@dataclass(frozen=True)
class ForwardReduction:
    """Base class of sums over all rows that run a forward pass (from pixels to templates) over each block."""

    net: Hierarchy

    @property
    def requirements(self) -> BlockRequirements:
        row = self.net.forward_bytes
        rows = int(np.clip(BLOCK_BYTES // row, 1, 64))
        return BlockRequirements(block_rows=rows, scratch=(0, 3 * row), unlabelled=True)

    def flops_per_row(self) -> float:
        return 2.0 * self.net.pairs


@dataclass(frozen=True)
class TemplateCounts(ForwardReduction):
    """Counts of rows by class and best template (top feature with the largest score), a Reduction.

    Rows without a class are not counted. A weight is on if its log odds are positive: those of the learner's
    state during learning, otherwise ``beliefs``.
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
        """Return the share of rows whose best template (top feature) has another class; NaN for no rows.

        Without classes, each template gets the class of most of its rows.
        """
        counts, classes = stats["templates"], self.net.classes
        right = counts.max(axis=0) if classes is None else counts[classes, range(len(classes))]
        return 1 - float(right.sum() / counts.sum()) if counts.any() else float("nan")


@dataclass(frozen=True, eq=False)
class RowCodes:
    """Class of each of the rows ``numbers``, read in one pass over the dataset (a Reduction).

    ``numbers`` are sorted row numbers. The result has for each of these rows the index of its class plus 1,
    or 0 for a row without a class.
    """

    numbers: np.ndarray
    requirements: ClassVar[BlockRequirements] = BlockRequirements(unlabelled=True)

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
    """Sums, over the images of each template, of the log odds of the pixels of the top layer (a Reduction).

    The sums are multiples of 1/256 nat, so they are identical in any order of the rows.

    Attributes
    ----------
    beliefs : ndarray of float64, shape (weights,)
        Log odds of the weights of all layers, in nats.
    numbers, templates : ndarray of int, shape (images,), or None
        Sorted row numbers, and the template to which each of these rows is assigned; other rows are not used.
        If None, each row is assigned to its best template with a weight that is on, among the templates of
        its class if the class is known.
    """

    beliefs: np.ndarray
    numbers: np.ndarray | None = None
    templates: np.ndarray | None = None

    def layout(self) -> Layout:
        return Layout((("evidence", (self.net.n_templates, *self.net.layers[-1].image)),))

    def prepare(self, state: object, backend: Backend) -> FixedWeights:
        return [part > 0 for part in self.net.split(self.beliefs)], backend

    def accumulate(self, prepared: FixedWeights, block: Block, stats: Stats) -> None:
        """Assign the images of the block to templates (top features); add their log odds to the templates."""
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
        """Return the templates (top features) to which each row of a block may be assigned.

        A template is allowed if it has a weight that is on and, for a labelled row, the class of the row. The
        first result has the indices of the rows with at least one allowed template. The second result is True
        for each allowed template of these rows, bool (rows, templates).
        """
        used = np.any(self.net.split(self.beliefs)[-1] > 0, axis=(0, 1, 2))
        allowed = np.broadcast_to(used, (n_rows, self.net.n_templates))
        if block.y is not None and self.net.classes is not None:
            of_class = np.array(self.net.classes) == block.y[:, None]
            allowed = allowed & (of_class | (block.y < 0)[:, None])
        among = np.flatnonzero(allowed.any(axis=1))
        return among, allowed[among]

    def update_beliefs(self, first: np.ndarray, stats: Stats) -> np.ndarray:
        """Return the log odds of the weights of all layers in nats, with new values for the top layer.

        The new log odds of a template are its initial log odds in ``first`` plus its sums in ``stats``, at
        most 2**19 nats in size. If none were positive, the template keeps its earlier log odds.
        """
        priors, earlier = self.net.split(first)[-1], self.net.split(self.beliefs)[-1]
        evidence = np.moveaxis(stats["evidence"], 0, -1)[:, ::-1, ::-1]
        most = BELIEF_LIMIT // (2 * UNITS_PER_NAT)
        found = np.clip(priors + evidence, -most, most)
        found = np.where(np.any(found > 0, axis=(0, 1, 2)), found, earlier)
        return np.concatenate([self.beliefs[: -priors.size], found.ravel()])


def match_rows(numbers: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices in sorted ``numbers``, and in ``rows``, of row numbers that are in both arrays."""
    if not len(numbers):
        return np.empty(0, int), np.empty(0, int)
    where = np.minimum(np.searchsorted(numbers, rows), len(numbers) - 1)
    among = np.flatnonzero(numbers[where] == rows)
    return where[among], among


def choose_first_images(
    net: Hierarchy, numbers: np.ndarray, codes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted row numbers of the images with which templates start, and each image's template.

    Templates are the features of the top layer. ``numbers`` are row numbers in random order, and ``codes``
    are the classes of these rows, below 0 for no class. The first rows of each class are chosen, one for each
    template of the class. Without classes, the first rows are chosen, one for each template.
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
