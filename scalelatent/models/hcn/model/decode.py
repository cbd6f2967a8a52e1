"""What images consist of under fixed features: S, reconstructions, unknown pixels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scalelatent.contract.learners import Backend, Block
from scalelatent.contract.wants import Wants
from scalelatent.models.hcn.kernels.exact import from_grid
from scalelatent.models.hcn.kernels.order import shuffled

from .layer import FeatureLayer, rows_of

SWEEPS = 10
# Of beliefs of S that are held at once.
PART_BYTES = 2**25


@dataclass(frozen=True)
class Decoder:
    """Places of fixed features in images, each image by itself.

    Attributes
    ----------
    layer : FeatureLayer
    weights : ndarray of bool, shape (channels, h, w, F)
        As the kernels have them.
    seed : int
    n_sweeps : int
    """

    layer: FeatureLayer
    weights: np.ndarray
    seed: int = 0
    n_sweeps: int = SWEEPS

    @property
    def row_bytes(self) -> int:
        """Bytes of a row while it is decoded."""
        return 6 * int(np.prod(self.layer.places)) + 16 * self.layer.n_pixels

    @property
    def block_rows(self) -> int:
        """Rows that are decoded together."""
        return int(np.clip(PART_BYTES // self.row_bytes, 1, 256))

    @property
    def wants(self) -> Wants:
        """Of maps and reductions over rows."""
        return Wants(block_rows=self.block_rows, scratch=(0, self.row_bytes))

    def beliefs(
        self, evidence: np.ndarray, rows: np.ndarray, backend: Backend
    ) -> tuple[np.ndarray, np.ndarray]:
        """Beliefs of S in units, int32 (rows, HS, WS, F); trees of each that moved last."""
        order = shuffled(self.seed, "hcn decode", 0, rows, self.layer.n_pixels)
        s = backend.xp.asarray(self.layer.no_places(len(rows)))
        messages = backend.xp.asarray(evidence), backend.xp.asarray(order)
        moved = backend.kernel("hcn_decode")(*messages, s, self.weights, self.n_sweeps)
        return backend.to_host(s), backend.to_host(moved)

    def places(self, evidence: np.ndarray, rows: np.ndarray, backend: Backend) -> np.ndarray:
        """S, uint8 (rows, HS, WS, F): what is believed, improved feature by feature."""
        return self.decode(evidence, rows, backend)[0]

    def decode(
        self, evidence: np.ndarray, rows: np.ndarray, backend: Backend
    ) -> tuple[np.ndarray, np.ndarray]:
        """As :meth:`places`; trees of each row that moved last."""
        s, moved = np.empty((len(rows), *self.layer.places), np.uint8), np.empty(len(rows), np.int64)
        for a in range(0, len(rows), self.block_rows):
            part = slice(a, a + self.block_rows)
            beliefs, moved[part] = self.beliefs(evidence[part], rows[part], backend)
            s[part] = beliefs > 0
        improve = backend.kernel("hcn_improve")  # on the host, whatever the device
        return improve(evidence, s, self.weights, -float(self.layer.prior)), moved

    def layers(self, s: np.ndarray, backend: Backend) -> np.ndarray:
        """How many features lie over each pixel, int32 (rows, channels, height, width)."""
        return backend.kernel("hcn_cover")(s, self.weights)


@dataclass(frozen=True)
class PlaceMap:
    """S of rows (a :class:`~scalelatent.contract.learners.RowMap`)."""

    decoder: Decoder
    what: str = "places"

    @property
    def wants(self) -> Wants:
        return self.decoder.wants

    def output(self) -> tuple[tuple[int, ...], str]:
        """(HS, WS, F), uint8."""
        return self.decoder.layer.places, "uint8"

    def prepare(self, backend: Backend) -> Backend:
        """The backend."""
        return backend

    def apply(self, prepared: Backend, block: Block) -> np.ndarray:
        """S of the block's rows."""
        return self.decoder.places(self.decoder.layer.evidence_in(block), rows_of(block), prepared)


@dataclass(frozen=True)
class ReconstructionMap:
    """Images without their noise (a :class:`~scalelatent.contract.learners.RowMap`).

    With ``fills`` known pixels stay, and only those whose value is ``layer.missing`` are made, or those that
    ``known`` says nothing of: a bit for each pixel of each row by its number, packed, uint8.
    """

    decoder: Decoder
    fills: bool = False
    known: np.ndarray | None = None
    what: str = "reconstruction"

    @property
    def wants(self) -> Wants:
        return self.decoder.wants

    def output(self) -> tuple[tuple[int, ...], str]:
        """Shape of an image, uint8."""
        return self.decoder.layer.image, "uint8"

    def prepare(self, backend: Backend) -> Backend:
        """The backend."""
        return backend

    def apply(self, prepared: Backend, block: Block) -> np.ndarray:
        """Reconstructions of the block's rows."""
        evidence, rows = self.decoder.layer.evidence_in(block), rows_of(block)
        if self.known is not None:
            known = np.unpackbits(self.known[rows], axis=1, count=self.decoder.layer.n_pixels)
            evidence = np.where(known.reshape(evidence.shape) != 0, evidence, np.int32(0))
        return reconstruct(self.decoder, evidence, rows, prepared, self.fills)


@dataclass(frozen=True)
class BeliefMap:
    """Beliefs of S in nats, and of each row the share of trees at rest, in one vector of float32."""

    decoder: Decoder
    what: str = "beliefs"

    @property
    def wants(self) -> Wants:
        return self.decoder.wants

    def output(self) -> tuple[tuple[int, ...], str]:
        """HS WS F beliefs, then the share."""
        return (int(np.prod(self.decoder.layer.places)) + 1,), "float32"

    def prepare(self, backend: Backend) -> Backend:
        """The backend."""
        return backend

    def apply(self, prepared: Backend, block: Block) -> np.ndarray:
        """Beliefs of the block's rows."""
        layer = self.decoder.layer
        s, moved = self.decoder.beliefs(layer.evidence_in(block), rows_of(block), prepared)
        rest = 1 - moved[:, None] / layer.n_pixels
        return np.concatenate([from_grid(s.reshape(len(s), -1)), rest], axis=1).astype(np.float32)


def reconstruct(
    decoder: Decoder, evidence: np.ndarray, rows: np.ndarray, backend: Backend, fills: bool = False
) -> np.ndarray:
    """Images of 0 and 1, uint8 (rows, channels, height, width); with ``fills`` known pixels stay."""
    made = decoder.layers(decoder.places(evidence, rows, backend), backend) > 0
    if fills:
        made = np.where(evidence != 0, evidence > 0, made)
    return made.astype(np.uint8)
