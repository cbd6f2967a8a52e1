"""Maps from rows to template scores, class scores or completed images, by a network of several layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.models.hcn.kernels.units import UNITS_PER_NAT

from .hierarchy import Hierarchy
from .layer import hide_unknown, row_numbers

# A forward pass over one block of rows needs at most this much memory, in bytes.
PART_BYTES = 2**25


@dataclass(frozen=True, eq=False)
class FixedNetwork:
    """A trained network of several layers; a weight is on if its log odds are positive.

    Attributes
    ----------
    net : Hierarchy
    beliefs : ndarray of float64, shape (weights,)
        Log odds of the weights of all layers.
    template_codes : ndarray of int, shape (templates,)
        Class of each template; without classes, the number of the template itself.
    """

    net: Hierarchy
    beliefs: np.ndarray
    template_codes: np.ndarray

    @cached_property
    def weights(self) -> list[np.ndarray]:
        """Weights of each layer, bool (channels, h, w, F)."""
        return [part > 0 for part in self.net.split(self.beliefs)]

    @property
    def requirements(self) -> BlockRequirements:
        """Rows per block and scratch memory of maps with forward passes."""
        rows = int(np.clip(PART_BYTES // self.net.forward_bytes, 1, 256))
        return BlockRequirements(block_rows=rows, scratch=(2**27, 3 * self.net.forward_bytes))

    def scores(self, backend: Backend, block: Block) -> np.ndarray:
        """Return the scores of the templates in nats, float64 (rows, templates)."""
        return (
            self.net.template_scores(self.weights, self.net.layers[0].read_evidence(block), backend)
            / UNITS_PER_NAT
        )


@dataclass(frozen=True, eq=False)
class NetworkMap:
    """Base class of the row maps that use a :class:`FixedNetwork`."""

    network: FixedNetwork

    @property
    def requirements(self) -> BlockRequirements:
        return self.network.requirements

    def prepare(self, backend: Backend) -> Backend:
        return backend


@dataclass(frozen=True, eq=False)
class ScoreMap(NetworkMap):
    """Scores of the templates by a forward pass (a :class:`~scalelatent.contract.learners.RowMap`)."""

    output_name: str = "scores"

    def output(self) -> tuple[tuple[int, ...], str]:
        return (self.network.net.n_templates,), "float64"

    def apply(self, prepared: Backend, block: Block) -> np.ndarray:
        return self.network.scores(prepared, block)


@dataclass(frozen=True, eq=False)
class ClassMap(NetworkMap):
    """Class scores of each row (a LabelMap): the score of a class is the score of its best template.

    If ``labelled``, the map also gives each row the label of its best class.
    """

    labelled: bool = False
    output_name: str = "classes"

    @property
    def requirements(self) -> BlockRequirements:
        return replace(self.network.requirements, labels=self.labelled)

    def output(self) -> tuple[tuple[int, ...], str]:
        return (int(self.network.template_codes.max()) + 1,), "float64"

    def apply(self, prepared: Backend, block: Block) -> np.ndarray:
        scores = self.network.scores(prepared, block)
        codes = range(self.output()[0][0])
        return np.stack(
            [scores[:, self.network.template_codes == code].max(axis=1) for code in codes], axis=1
        )

    def labels(self, out: np.ndarray) -> np.ndarray:
        """Return the number of the best class of each row."""
        return out.argmax(axis=1)


@dataclass(frozen=True, eq=False)
class CompletionMap(NetworkMap):
    """Images after a pass up and a pass down (a :class:`~scalelatent.contract.learners.RowMap`).

    Attributes
    ----------
    fills : bool
        Keep the known pixels, and replace only the unknown ones. False: replace all pixels.
    known : ndarray of uint8, shape (rows, bytes), or None
        One bit per pixel, 1 if the pixel is known; None: the pixels that are not missing.
    codes : ndarray of int, shape (rows,), or None
        Class of each row; below 0 for an unknown class. None: all classes are unknown.
    """

    fills: bool = False
    known: np.ndarray | None = None
    codes: np.ndarray | None = None
    output_name: str = "reconstruction"

    def output(self) -> tuple[tuple[int, ...], str]:
        return self.network.net.layers[0].image, "uint8"

    def apply(self, prepared: Backend, block: Block) -> np.ndarray:
        layer, rows = self.network.net.layers[0], row_numbers(block)
        evidence = hide_unknown(layer.read_evidence(block), self.known, rows)
        codes = None if self.codes is None else self.codes[rows]
        made = self.network.net.complete(self.network.weights, evidence, codes, prepared) > 0
        if self.fills:
            made = np.where(evidence != 0, evidence > 0, made)
        return made.astype(np.uint8)
