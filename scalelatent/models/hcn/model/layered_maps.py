"""What several layers say of rows: scores of templates and classes, images without noise or holes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.wants import Wants
from scalelatent.models.hcn.kernels.exact import GRID

from .hierarchy import Hierarchy
from .layer import rows_of

# Of what a block's rows have on the way up that is held at once.
PART_BYTES = 2**25


@dataclass(frozen=True, eq=False)
class Telling:
    """Fixed weights of several layers.

    Attributes
    ----------
    net : Hierarchy
    beliefs : ndarray of float64, shape (weights,)
        Of all layers; a weight is on where its belief is positive.
    of_template : ndarray of int, shape (templates,)
        Class of each template, or its own number.
    """

    net: Hierarchy
    beliefs: np.ndarray
    of_template: np.ndarray

    @cached_property
    def weights(self) -> list[np.ndarray]:
        """Of each layer, bool."""
        return [part > 0 for part in self.net.split(self.beliefs)]

    @property
    def wants(self) -> Wants:
        """Of maps over rows."""
        rows = int(np.clip(PART_BYTES // self.net.rising_bytes, 1, 256))
        return Wants(block_rows=rows, scratch=(2**27, 3 * self.net.rising_bytes))

    def scores(self, backend: Backend, block: Block) -> np.ndarray:
        """Return the scores of the templates in nats, float64 (rows, templates)."""
        return self.net.template_scores(self.weights, self.net.layers[0].evidence_in(block), backend) / GRID


@dataclass(frozen=True, eq=False)
class ScoreMap:
    """Scores of templates of rows by a forward pass (a :class:`~scalelatent.contract.learners.RowMap`)."""

    told: Telling
    what: str = "scores"

    @property
    def wants(self) -> Wants:
        return self.told.wants

    def output(self) -> tuple[tuple[int, ...], str]:
        """(templates,), float64."""
        return (self.told.net.n_templates,), "float64"

    def prepare(self, backend: Backend) -> Backend:
        """The backend."""
        return backend

    def apply(self, prepared: Backend, block: Block) -> np.ndarray:
        """Scores of the block's rows."""
        return self.told.scores(prepared, block)


@dataclass(frozen=True, eq=False)
class ClassMap:
    """Scores of classes, each that of its best template; with ``labels`` the best class labels its row
    (a :class:`~scalelatent.contract.learners.LabelMap`).
    """

    told: Telling
    labelled: bool = False
    what: str = "classes"

    @property
    def wants(self) -> Wants:
        wants = self.told.wants
        return Wants(block_rows=wants.block_rows, scratch=wants.scratch, labels=self.labelled)

    def output(self) -> tuple[tuple[int, ...], str]:
        """(classes,), float64."""
        return (int(self.told.of_template.max()) + 1,), "float64"

    def prepare(self, backend: Backend) -> Backend:
        """The backend."""
        return backend

    def apply(self, prepared: Backend, block: Block) -> np.ndarray:
        """Scores of the block's rows."""
        scores = self.told.scores(prepared, block)
        codes = range(self.output()[0][0])
        return np.stack([scores[:, self.told.of_template == code].max(axis=1) for code in codes], axis=1)

    def labels(self, out: np.ndarray) -> np.ndarray:
        """The best class of each row."""
        return out.argmax(axis=1)


@dataclass(frozen=True, eq=False)
class CompletionMap:
    """Images by a forward and a top-down pass (a :class:`~scalelatent.contract.learners.RowMap`).

    Attributes
    ----------
    told : Telling
    fills : bool
        Known pixels stay; else all are what the templates make of them.
    known : ndarray of uint8, shape (rows, bytes), or None
        Bits of the pixels that are known; None: those that are not missing.
    codes : ndarray of int, shape (rows,), or None
        Class of each row, where it is known (at least 0).
    """

    told: Telling
    fills: bool = False
    known: np.ndarray | None = None
    codes: np.ndarray | None = None
    what: str = "reconstruction"

    @property
    def wants(self) -> Wants:
        return self.told.wants

    def output(self) -> tuple[tuple[int, ...], str]:
        """Shape of an image, uint8."""
        return self.told.net.layers[0].image, "uint8"

    def prepare(self, backend: Backend) -> Backend:
        """The backend."""
        return backend

    def apply(self, prepared: Backend, block: Block) -> np.ndarray:
        """Images of the block's rows."""
        layer, rows = self.told.net.layers[0], rows_of(block)
        evidence = layer.evidence_in(block)
        if self.known is not None:
            known = np.unpackbits(self.known[rows], axis=1, count=layer.n_pixels)
            evidence = np.where(known.reshape(evidence.shape) != 0, evidence, np.int32(0))
        codes = None if self.codes is None else self.codes[rows]
        made = self.told.net.complete(self.told.weights, evidence, codes, prepared) > 0
        if self.fills:
            made = np.where(evidence != 0, evidence > 0, made)
        return made.astype(np.uint8)
