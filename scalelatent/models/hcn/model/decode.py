"""Inference of the positions of the features in images, and reconstruction of images from features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelatent.contract.block_requirements import BlockRequirements
from scalelatent.contract.learners import Backend, Block
from scalelatent.models.hcn.kernels.pixel_order import shuffled
from scalelatent.models.hcn.kernels.units import from_units

from .layer import FeatureLayer, hide_unknown, row_numbers

# Default upper bound of the number of sweeps that infer the positions of features in an image. A sweep
# updates the belief-propagation messages of all pixels of the image once.
DECODE_SWEEPS = 10
# Upper bound of the working memory, in bytes, for one block of rows; a block has at least one row.
PART_BYTES = 2**25


@dataclass(frozen=True)
class Decoder:
    """Inference of the positions of features with fixed weights, for each image separately.

    Attributes
    ----------
    layer : FeatureLayer
    weights : ndarray of bool, shape (channels, h, w, F)
        Weights of the F features of h x w pixels; the axes h and w are reversed, as kernels expect.
    seed : int
        Seed of the random orders in which pixels are updated.
    n_sweeps : int
        Upper bound of the number of updates of the belief-propagation messages of each pixel.
    """

    layer: FeatureLayer
    weights: np.ndarray
    seed: int = 0
    n_sweeps: int = DECODE_SWEEPS

    @property
    def row_bytes(self) -> int:
        """Bytes of working memory per image."""
        return 6 * int(np.prod(self.layer.places)) + 16 * self.layer.n_pixels

    @property
    def block_rows(self) -> int:
        """Number of images per kernel call, at most 256, so that the images need up to `PART_BYTES`."""
        return int(np.clip(PART_BYTES // self.row_bytes, 1, 256))

    @property
    def requirements(self) -> BlockRequirements:
        return BlockRequirements(block_rows=self.block_rows, scratch=(0, self.row_bytes))

    def beliefs(
        self, evidence: np.ndarray, rows: np.ndarray, backend: Backend
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return log odds of feature positions, and the number of pixels of each row that did not converge.

        The log odds are int32 (rows, HS, WS, F), for HS x WS positions of F features, in units of 1/256 nat.
        A pixel has not converged if any of its belief-propagation messages changed in the last sweep (update
        of all pixels). ``evidence`` are the log odds of the pixels, and ``rows`` the row numbers of the
        images, which decide the orders in which pixels are updated.
        """
        order = shuffled(self.seed, "hcn decode", 0, rows, self.layer.n_pixels)
        s = backend.xp.asarray(self.layer.prior_beliefs(len(rows)))
        messages = backend.xp.asarray(evidence), backend.xp.asarray(order)
        moved = backend.kernel("hcn_decode_images")(*messages, s, self.weights, self.n_sweeps)
        return backend.to_host(s), backend.to_host(moved)

    def decode(
        self, evidence: np.ndarray, rows: np.ndarray, backend: Backend
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of features, and the number of pixels per row that did not converge.

        The positions are uint8 (rows, HS, WS, F): 1 if one of F features is at one of HS x WS positions.
        First, features are at all positions with positive log odds. Then features are added or removed one by
        one as long as the posterior probability increases. :meth:`beliefs` describes the parameters.
        """
        s, moved = np.empty((len(rows), *self.layer.places), np.uint8), np.empty(len(rows), np.int64)
        for a in range(0, len(rows), self.block_rows):
            part = slice(a, a + self.block_rows)
            beliefs, moved[part] = self.beliefs(evidence[part], rows[part], backend)
            s[part] = beliefs > 0
        # The kernel hcn_improve always runs on the CPU, even if the other kernels run on a GPU.
        improve = backend.kernel("hcn_improve")
        return improve(evidence, s, self.weights, -float(self.layer.prior)), moved

    def cover_counts(self, s: np.ndarray, backend: Backend) -> np.ndarray:
        """Return the number of features that cover each pixel, int32 (rows, channels, height, width)."""
        return backend.kernel("hcn_cover")(s, self.weights)


@dataclass(frozen=True)
class DecoderMap:
    """Base class of maps, which compute an output for each image from the positions of its features."""

    decoder: Decoder

    @property
    def requirements(self) -> BlockRequirements:
        return self.decoder.requirements

    def prepare(self, backend: Backend) -> Backend:
        return backend


@dataclass(frozen=True)
class PlaceMap(DecoderMap):
    """Positions of the features in each row (a :class:`~scalelatent.contract.learners.RowMap`)."""

    output_name: str = "places"

    def output(self) -> tuple[tuple[int, ...], str]:
        return self.decoder.layer.places, "uint8"

    def apply(self, prepared: Backend, block: Block) -> np.ndarray:
        return self.decoder.decode(self.decoder.layer.read_evidence(block), row_numbers(block), prepared)[0]


@dataclass(frozen=True)
class ReconstructionMap(DecoderMap):
    """Images without their noise (a :class:`~scalelatent.contract.learners.RowMap`).

    Attributes
    ----------
    fills : bool
        If True, reconstruct only unknown pixels; known pixels stay as observed. If False, reconstruct all.
    known : ndarray of uint8, shape (rows, bytes), or None
        One bit per pixel, 1 if the pixel is known; if None, only pixels of the value ``missing`` are unknown.
    """

    fills: bool = False
    known: np.ndarray | None = None
    output_name: str = "reconstruction"

    def output(self) -> tuple[tuple[int, ...], str]:
        return self.decoder.layer.image, "uint8"

    def apply(self, prepared: Backend, block: Block) -> np.ndarray:
        rows = row_numbers(block)
        evidence = hide_unknown(self.decoder.layer.read_evidence(block), self.known, rows)
        return reconstruct(self.decoder, evidence, rows, prepared, self.fills)


@dataclass(frozen=True)
class BeliefMap(DecoderMap):
    """Log odds of the feature positions of each row, in nats, followed by the share of converged pixels.

    A pixel has converged if none of its belief-propagation messages changed in the last update.
    """

    output_name: str = "beliefs"

    def output(self) -> tuple[tuple[int, ...], str]:
        return (int(np.prod(self.decoder.layer.places)) + 1,), "float32"

    def apply(self, prepared: Backend, block: Block) -> np.ndarray:
        layer = self.decoder.layer
        s, moved = self.decoder.beliefs(layer.read_evidence(block), row_numbers(block), prepared)
        rest = 1 - moved[:, None] / layer.n_pixels
        return np.concatenate([from_units(s.reshape(len(s), -1)), rest], axis=1).astype(np.float32)


def reconstruct(
    decoder: Decoder, evidence: np.ndarray, rows: np.ndarray, backend: Backend, fills: bool = False
) -> np.ndarray:
    """Return the pixels under the inferred features, uint8 0 or 1 (rows, channels, height, width).

    ``evidence`` are the log odds of the observed pixels; 0 for unknown pixels. If ``fills``, the known pixels
    stay as observed, and only unknown pixels are reconstructed.
    """
    made = decoder.cover_counts(decoder.decode(evidence, rows, backend)[0], backend) > 0
    if fills:
        made = np.where(evidence != 0, evidence > 0, made)
    return made.astype(np.uint8)
