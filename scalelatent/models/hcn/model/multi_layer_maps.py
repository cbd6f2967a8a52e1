"""Outputs of a multi-layer network for each row: scores of templates (top layer) and classes, images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.models.hcn.kernels.units import UNITS_PER_NAT

from .hierarchy import Hierarchy
from .layer import hide_unknown, row_numbers

# Upper bound of the memory, in bytes, of a forward pass (from pixels to templates) over a block of rows.
PART_BYTES = 2**25


@dataclass(frozen=True, eq=False)
class FixedNetwork:
    """Trained network of several layers; a weight is on if its log odds are positive.

    Attributes
    ----------
    net : Hierarchy
        Network with a class for each template (top feature). If templates are clusters, each cluster is a
        class.
    beliefs : ndarray of float64, shape (weights,)
        Log odds of the weights of all layers.
    """

    net: Hierarchy
    beliefs: np.ndarray

    @cached_property
    def weights(self) -> list[np.ndarray]:
        """Weights of each layer, bool (channels, height, width of a feature, features)."""
        return [part > 0 for part in self.net.split(self.beliefs)]

    @property
    def n_classes(self) -> int:
        """Number of classes, or of clusters if there are no labels."""
        assert self.net.classes is not None
        return max(self.net.classes) + 1

    @property
    def requirements(self) -> BlockRequirements:
        rows = int(np.clip(PART_BYTES // self.net.forward_bytes, 1, 256))
        return BlockRequirements(block_rows=rows, scratch=(2**27, 3 * self.net.forward_bytes))

    def scores(self, backend: Backend, block: Block) -> np.ndarray:
        """Return the score of each template at each of HS x WS positions, (rows, templates, HS, WS), in nats.

        Templates are the features of the last layer. In images of the size of the fit they have one position:
        HS = WS = 1.
        """
        pixels = self.net.layers[0].read_evidence(block)
        return self.net.forward(self.weights, pixels, backend)[-1][1] / UNITS_PER_NAT

    def class_scores(self, backend: Backend, block: Block) -> np.ndarray:
        """Return the best score of each class's templates at HS x WS positions, (rows, HS, WS, classes)."""
        scores = self.scores(backend, block)
        best = [scores[:, self.net.templates_of(code)].max(axis=1) for code in range(self.n_classes)]
        return np.stack(best, axis=-1)


@dataclass(frozen=True, eq=False)
class NetworkMap:
    """Base class of maps, which compute an output for each row with a trained network of several layers."""

    network: FixedNetwork

    @property
    def requirements(self) -> BlockRequirements:
        return self.network.requirements

    def prepare(self, backend: Backend) -> Backend:
        return backend


@dataclass(frozen=True, eq=False)
class ScoreMap(NetworkMap):
    """Scores in nats of the templates, which are the features of the last layer, for each row (a RowMap)."""

    output_name: str = "scores"

    def output(self) -> tuple[tuple[int, ...], str]:
        return (self.network.net.n_templates,), "float64"

    def apply(self, prepared: Backend, block: Block) -> np.ndarray:
        return self.network.scores(prepared, block)[:, :, 0, 0]


@dataclass(frozen=True, eq=False)
class ClassMap(NetworkMap):
    """Class scores of each row (a LabelMap): the score of a class is the largest score of its templates.

    If ``labelled``, the map also returns the class of each row, which is the class with the largest score.
    """

    labelled: bool = False
    output_name: str = "classes"

    @property
    def requirements(self) -> BlockRequirements:
        return replace(self.network.requirements, labels=self.labelled)

    def output(self) -> tuple[tuple[int, ...], str]:
        return (self.network.n_classes,), "float64"

    def apply(self, prepared: Backend, block: Block) -> np.ndarray:
        return self.network.class_scores(prepared, block)[:, 0, 0]

    def labels(self, out: np.ndarray) -> np.ndarray:
        return out.argmax(axis=1)


@dataclass(frozen=True, eq=False)
class CompletionMap(NetworkMap):
    """Images reconstructed by belief propagation up to the classes and down to the pixels (a RowMap).

    Attributes
    ----------
    fills : bool
        If True, reconstruct only unknown pixels; known pixels stay as observed. If False, reconstruct all.
    known : ndarray of uint8, shape (rows, bytes), or None
        One bit per pixel, 1 if the pixel is known; if None, only pixels of the value ``missing`` are unknown.
    codes : ndarray of int, shape (rows,), or None
        Class of each row, below 0 if unknown; if None, all classes are unknown.
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
