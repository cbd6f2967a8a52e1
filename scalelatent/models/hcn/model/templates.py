"""Classes of templates: who belongs to which, and what is counted of labelled rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scalelatent.contract.learners import Block
from scalelatent.contract.stats import Layout, Stats
from scalelatent.contract.wants import Wants

from .compression import PixelCounts
from .hierarchy import Hierarchy
from .layer import rows_of

# Rows whose label is -1 have no class.
SOME_LABELS = Wants(unlabelled=True)


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

    def prepare(self, state: Any, backend: Any) -> None:
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
    wants: Wants = SOME_LABELS

    def layout(self) -> Layout:
        return Layout((("templates", (self.n_classes, self.net.n_templates)),))

    def flops_per_row(self) -> float:
        return 2.0 * sum(layer.pairs for layer in self.net.layers)

    def prepare(self, state: Any, backend: Any) -> tuple[list[np.ndarray], Any]:
        """The weights of the moment."""
        beliefs: Any = self.beliefs if state is None else state.beliefs
        return [part > 0 for part in self.net.split(beliefs)], backend

    def accumulate(self, prepared: tuple[list[np.ndarray], Any], block: Block, stats: Stats) -> None:
        """Count in the block's rows."""
        weights, backend = prepared
        scores = self.net.scores(weights, self.net.layers[0].evidence_in(block), backend)
        assert block.y is not None
        known = block.y >= 0
        np.add.at(stats["templates"], (block.y[known], scores[known].argmax(axis=1)), 1)

    def error(self, stats: Stats) -> float:
        """Share of rows in a wrong class; a cluster is of the class that most of its rows have."""
        counts, classes = stats["templates"], self.net.classes
        right = counts.max(axis=0) if classes is None else counts[classes, range(len(classes))]
        return 1 - float(right.sum() / counts.sum()) if counts.any() else float("nan")
